"""collectives.bootstrap: ranks find each other, and every way of not finding each other ends in "
"words."""

import concurrent.futures
import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from collectives import bootstrap
from collectives.bootstrap import (
    Mpi,
    Server,
    Solo,
    Tcp,
    Threads,
    client,
    detect,
    listen,
    through_store,
    wire,
)
from collectives.bootstrap import server as server_module
from collectives.config import Settings
from collectives.errors import (
    AbortedError,
    BootstrapError,
    ClosedError,
    CollectiveError,
    ConfigError,
    DeadlineError,
    MismatchError,
    PeerDiedError,
)

SECRET = b"a secret of the tests"
LOOPBACK = "127.0.0.1"


def run_all(*calls):
    """Runs the calls in a thread each; returns their results, an exception in place of what "
    "raised."""

    def guarded(call):
        try:
            return call()
        except CollectiveError as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(guarded, call) for call in calls]
        return [future.result(timeout=30) for future in futures]


@contextlib.contextmanager
def serving(size, secret=SECRET, job="job"):
    server = Server(listen(LOOPBACK), size=size, secret=secret, job=job)
    server.start()
    try:
        yield server
    finally:
        server.stop(1)


def join(server, rank, size, **options):
    options = {"secret": SECRET, "timeout": 10.0, **options}
    return Tcp(server.address, rank=rank, size=size, **options)


@contextlib.contextmanager
def tcp_world(size, timeout=10.0):
    with serving(size) as server:
        ranks = run_all(*(lambda r=r: join(server, r, size, timeout=timeout) for r in range(size)))
        for rank in ranks:
            assert isinstance(rank, Tcp), rank
        try:
            yield ranks
        finally:
            run_all(*(rank.close for rank in ranks))


@contextlib.contextmanager
def thread_world(size, timeout=10.0):
    yield Threads.world(size, timeout)


@contextlib.contextmanager
def solo_world(size, timeout=10.0):
    assert size == 1
    yield [Solo(timeout)]


WORLDS = [
    pytest.param(thread_world, id="threads"),
    pytest.param(tcp_world, id="tcp"),
]


@pytest.mark.parametrize(
    ("world", "size"),
    [(solo_world, 1), *[(w, n) for w in (thread_world, tcp_world) for n in (1, 2, 5)]],
)
def test_calls(world, size):
    with world(size) as ranks:

        def work(rank):
            gathered = [rank.all_gather(bytes([rank.rank]) * i * rank.rank) for i in range(4)]
            sent = rank.broadcast(b"from %d" % rank.rank, root=size - 1)
            rank.barrier()
            rank.check()
            large = rank.all_gather(bytes([rank.rank]) * 300_000)
            return gathered, sent, large

        for gathered, sent, large in run_all(*(lambda r=r: work(r) for r in ranks)):
            assert gathered == [[bytes([r]) * i * r for r in range(size)] for i in range(4)]
            assert sent == b"from %d" % (size - 1)
            assert large == [bytes([r]) * 300_000 for r in range(size)]
        assert [rank.rank for rank in ranks] == list(range(size))
        assert {rank.size for rank in ranks} == {size}
        assert len({rank.job for rank in ranks}) == 1
        assert isinstance(ranks[0], bootstrap.Bootstrap)
        with pytest.raises(CollectiveError, match=f"root is {size}; ranks are 0 to {size - 1}"):
            ranks[0].broadcast(b"", root=size)


@pytest.mark.parametrize("world", WORLDS)
def test_subgroups(world):
    with world(4) as ranks:

        def work(rank):
            if rank.rank == 1:
                return None
            group = rank.subgroup([3, 0, 2], "some")
            got = group.all_gather(b"%d" % rank.rank)
            group.close()
            return group.rank, group.size, group.job, got

        results = run_all(*(lambda r=r: work(r) for r in ranks))
        assert [results[r][0] for r in (3, 0, 2)] == [0, 1, 2]
        assert all(
            result[1] == 3 and result[3] == [b"3", b"0", b"2"] for result in results if result
        )
        jobs = {result[2] for result in results if result}
        assert len(jobs) == 1 and ranks[0].job not in jobs
        run_all(*(rank.barrier for rank in ranks))
        with pytest.raises(CollectiveError, match="lacks this rank, 0"):
            ranks[0].subgroup([1, 2], "others")
        with pytest.raises(CollectiveError, match="ranks must be different and 0 to 3"):
            ranks[0].subgroup([0, 0], "twice")


@pytest.mark.parametrize("world", WORLDS)
def test_deadline_names_who_is_missing(world):
    with world(4) as ranks:
        calls = [lambda r=r: ranks[r].all_gather(b"", timeout=0.2 if r == 0 else 9) for r in (0, 2)]
        for error in run_all(*calls):
            assert isinstance(error, DeadlineError) and isinstance(error, TimeoutError)
            assert (
                "rank 0 waited 0.2 s; ranks 0, 2 of 4 came, ranks 1, 3 have not called it"
                in str(error)
            )
        with pytest.raises(DeadlineError, match="rank 0 waited"):  # the group stays broken
            ranks[3].barrier()


@pytest.mark.parametrize("world", WORLDS)
def test_mismatch(world):
    with world(2) as ranks:
        for error in run_all(ranks[0].barrier, lambda: ranks[1].all_gather(b"")):
            assert isinstance(error, MismatchError)
            assert "barrier" in str(error) and "all_gather" in str(error)


@pytest.mark.parametrize("world", WORLDS)
def test_abort_ends_a_pending_call(world):
    with world(3) as ranks:

        def abort():
            time.sleep(0.1)
            ranks[2].abort("no more data")

        errors = run_all(ranks[0].barrier, ranks[1].barrier, abort)
        for error in errors[:2]:
            assert isinstance(error, AbortedError) and error.peer == 2
            assert "rank 2 aborted: no more data" in str(error)
        with pytest.raises(AbortedError):
            ranks[0].check()


@pytest.mark.parametrize("world", WORLDS)
def test_abort_by_another_thread_of_the_same_rank(world):
    with world(2) as ranks:

        def abort():
            time.sleep(0.1)
            ranks[0].abort("stop")

        error, _ = run_all(ranks[0].barrier, abort)
        assert isinstance(error, AbortedError)


@pytest.mark.parametrize("world", WORLDS)
def test_closed_ranks_are_named(world):
    with world(3) as ranks:
        ranks[1].close()
        with pytest.raises(ClosedError, match="this communicator is closed"):
            ranks[1].barrier()
        for error in run_all(ranks[0].barrier, ranks[2].barrier):
            assert isinstance(error, ClosedError) and error.peer == 1
            assert "barrier needs rank 1, which has closed before" in str(error)
        ranks[1].close()


def test_threads_tell_why_one_failed():
    ranks = Threads.world(3)
    group = run_all(*(lambda r=r: r.subgroup([0, 2], "g") for r in (ranks[0], ranks[2])))

    def fail():
        time.sleep(0.05)
        ranks[2].fail(KeyError("x"))

    errors = run_all(ranks[0].barrier, ranks[1].barrier, group[0].barrier, fail)
    for error in errors[:3]:
        assert isinstance(error, PeerDiedError)
        assert "rank 2 failed: KeyError: 'x'" in str(error)
    assert [error.peer for error in errors[:3]] == [2, 2, 1]


def test_threads_subgroups_must_agree():
    ranks = Threads.world(2)
    ranks[0].subgroup([0, 1], "g")
    with pytest.raises(MismatchError, match=r"its ranks are \(1, 0\), another said \(0, 1\)"):
        ranks[1].subgroup([1, 0], "g")


# The rendezvous: who may come in


def test_a_missing_rank_is_named():
    with serving(4) as server:
        errors = run_all(*(lambda r=r: join(server, r, 4, timeout=0.3) for r in (0, 1, 3)))
    for error in errors:
        assert isinstance(error, BootstrapError) and error.peer == 2
        assert "ranks 0-1, 3 of 4 came, rank 2 is missing" in str(error)
        assert f":{server.address[1]}?" in str(error)


def test_a_wrong_world_size_is_told_to_all():
    with serving(3) as server:
        errors = run_all(lambda: join(server, 0, 3), lambda: join(server, 1, 2))
    for error in errors:
        assert isinstance(error, BootstrapError)
        assert "rank 1 (" in str(error) and "was told that the world has 2 ranks" in str(error)
        assert "rank 0, which hosts the rendezvous, was told 3" in str(error)


def test_a_rank_that_comes_twice_is_told_to_all():
    with serving(3) as server:
        errors = run_all(
            *(lambda: join(server, 1, 3) for _ in range(2)), lambda: join(server, 0, 3)
        )
    for error in errors:
        assert isinstance(error, BootstrapError)
        assert "rank 1 came twice: " in str(error) and str(error).count(f"pid {os.getpid()}") == 2


def test_a_rank_out_of_range():
    with serving(2) as server:
        (error,) = run_all(lambda: join(server, 2, 2))
    assert "is no rank of a world of 2: ranks are 0 to 1" in str(error)


def test_a_complete_job_survives_late_comers():
    with serving(2) as server:
        ranks = run_all(*(lambda r=r: join(server, r, 2) for r in range(2)))
        for size in (2, 3):
            with pytest.raises(BootstrapError, match=r"came twice|world has 3"):
                join(server, 1, size)
        assert run_all(*(lambda r=r: r.all_gather(b"x") for r in ranks)) == [[b"x", b"x"]] * 2
        run_all(*(rank.close for rank in ranks))


def test_another_job_is_refused_and_the_first_goes_on():
    with serving(2, job="first") as server:

        def late(rank):
            time.sleep(0.3)
            return join(server, rank, 2, job="first")

        ranks = run_all(
            lambda: join(server, 0, 2, job="first"),
            lambda: join(server, 0, 2, job="second"),
            lambda: late(1),
        )
        assert isinstance(ranks[1], BootstrapError)
        assert "belongs to job 'first'" in str(ranks[1]) and "to job 'second'" in str(ranks[1])
        run_all(ranks[0].barrier, ranks[2].barrier)
        run_all(ranks[0].close, ranks[2].close)


def test_a_wrong_secret_is_refused_and_the_job_goes_on():
    with serving(2) as server:
        begin = time.monotonic()
        for wrong in (b"another secret of tests", b""):
            with pytest.raises(
                BootstrapError, match="refused the secret of rank 1: COLLECTIVES_SECRET"
            ):
                join(server, 1, 2, secret=wrong)
        assert time.monotonic() - begin < 2
        ranks = run_all(*(lambda r=r: join(server, r, 2) for r in range(2)))
        run_all(*(rank.barrier for rank in ranks))
        run_all(*(rank.close for rank in ranks))


def test_a_server_that_does_not_know_the_secret_is_refused():
    """A program that accepts any answer: the rank notices, and tells it nothing."""
    listener = listen(LOOPBACK)
    heard = []

    def pretend():
        sock, _ = listener.accept()
        with sock:
            sock.sendall(wire.MAGIC + bytes(32))
            heard.append(sock.recv(200))
            sock.sendall(wire.ACCEPTED + bytes(32))
            heard.append(sock.recv(200))

    thread = threading.Thread(target=pretend)
    thread.start()
    with pytest.raises(BootstrapError, match="does not know the secret of this job"):
        Tcp(listener.getsockname(), rank=0, size=2, secret=SECRET, timeout=5)
    thread.join()
    listener.close()
    assert len(heard[0]) == wire.ANSWER and heard[1] == b""


def test_another_program_at_the_port():
    listener = listen(LOOPBACK)

    def pretend():
        sock, _ = listener.accept()
        with sock:
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            sock.recv(10)

    thread = threading.Thread(target=pretend)
    thread.start()
    with pytest.raises(BootstrapError, match=r"is no rendezvous of this package.*said b'HTTP/1.1"):
        Tcp(listener.getsockname(), rank=0, size=2, secret=SECRET, timeout=5)
    thread.join()
    listener.close()


def test_nothing_listens():
    with listen(LOOPBACK) as sock:
        address = sock.getsockname()
    with pytest.raises(BootstrapError, match=r"rank 1 of 2 reached no rendezvous at .* in 0.3 s"):
        Tcp(address, rank=1, size=2, timeout=0.3)


def strangers():
    """What may arrive at an open port, as functions of a fresh socket; all leave it open."""
    yield lambda s: None  # a scanner that says nothing
    yield lambda s: s.sendall(b"GET / HTTP/1.1\r\n\r\n" * 50)
    yield lambda s: s.sendall(os.urandom(4096))
    yield lambda s: s.sendall(wire.MAGIC)  # right so far, and then silence
    yield lambda s: s.sendall(wire.MAGIC + bytes(64))  # a proof that is wrong
    yield lambda s: s.close()
    yield lambda s: (
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)),
        s.close(),
    )


def speak(server, after):
    """A peer that knows the secret and then sends `after`, which makes its bytes from the link."""
    sock = socket.create_connection(server.address)
    greeting = client.receive_exactly(sock, wire.GREETING)
    theirs, ours = greeting[8:], bytes(32)
    proof = wire.prove(SECRET, b"rank", theirs, ours)
    sock.sendall(wire.MAGIC + ours + proof)
    assert client.receive_exactly(sock, wire.VERDICT).startswith(wire.ACCEPTED)
    key = wire.prove(SECRET, b"key", theirs, ours)
    sock.sendall(after(wire.Link(key, b"rank", b"server", 1 << 20)))
    sock.settimeout(5)
    return sock


def hangs_up(sock):
    """True if the server sends no more, and ends the connection."""
    sock.settimeout(5)
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_garbage_does_not_disturb_a_job():
    with serving(2) as server:
        opened = []
        for stranger in strangers():
            sock = socket.create_connection(server.address)
            with contextlib.suppress(OSError):
                stranger(sock)
            opened.append(sock)
        # Those who know the secret, and do not keep to the protocol.
        huge = wire.HEADER.pack(wire.HELLO, 1 << 62)
        forged = wire.HEADER.pack(wire.HELLO, 2) + bytes(32) + b"{}"
        for after in (
            lambda link: huge,
            lambda link: forged,
            lambda link: link.seal(wire.HELLO, b"no json"),
            lambda link: link.seal(wire.HELLO, b"{}"),
            lambda link: link.seal(wire.HELLO, json.dumps({"rank": []}).encode()),
            lambda link: link.seal(wire.HELLO, b"[" * 60_000),
            lambda link: link.seal(wire.CALL, b""),
            lambda link: link.seal(99, b""),
        ):
            with speak(server, after) as sock:
                assert hangs_up(sock)
        ranks = run_all(*(lambda r=r: join(server, r, 2) for r in range(2)))
        for rank in ranks:
            assert isinstance(rank, Tcp), rank
        more = [socket.create_connection(server.address) for _ in range(20)]
        assert run_all(*(lambda r=r: r.all_gather(b"x") for r in ranks)) == [[b"x", b"x"]] * 2
        run_all(*(rank.close for rank in ranks))
        for sock in opened + more:
            sock.close()


def test_silent_strangers_are_dropped(monkeypatch):
    monkeypatch.setattr(server_module, "HANDSHAKE_SECONDS", 0.1)
    with serving(2) as server, socket.create_connection(server.address) as sock:
        sock.settimeout(5)
        assert sock.recv(wire.GREETING).startswith(wire.MAGIC)
        assert hangs_up(sock)


def test_strangers_are_limited_in_number(monkeypatch):
    monkeypatch.setattr(server_module, "STRANGERS", 2)
    with serving(1) as server:
        socks = [socket.create_connection(server.address) for _ in range(5)]
        for sock in socks[:2]:  # the oldest make room
            sock.settimeout(5)
            while sock.recv(100):
                pass
        rank = join(server, 0, 1)
        rank.close()
        for sock in socks:
            sock.close()


def test_a_frame_cannot_be_replayed():
    with serving(1) as server:
        hello = {
            "rank": 0,
            "size": 1,
            "group": "world",
            "job": "",
            "timeout": 5,
            "asked": 5,
            "host": "h",
            "pid": 1,
        }

        links = []

        def greet(link):
            links.append(link)
            return link.seal(wire.HELLO, json.dumps(hello).encode())

        def answer():
            while (frame := links[0].next()) is None:
                links[0].feed(sock.recv(1 << 16))
            return frame[0]

        with speak(server, greet) as sock:
            assert answer() == wire.WELCOME
            call = links[0].seal(wire.CALL, wire.pack_call("barrier", b"", 5))
            sock.sendall(call)
            assert answer() == wire.RESULT
            sock.sendall(call)
            assert hangs_up(sock)


def test_tcp_limits():
    with serving(1) as server:
        rank = join(server, 0, 1)
        assert rank.all_gather(b"") == [b""]
        with pytest.raises(CollectiveError, match="too many for the rendezvous"):
            rank.all_gather(bytes(wire.FRAME_LIMIT))
        rank.close()


def test_a_server_that_stops_is_noticed():
    with serving(2) as server:
        ranks = run_all(*(lambda r=r: join(server, r, 2) for r in range(2)))
        server.stop(1)
        with pytest.raises(ClosedError, match="rank 0, which hosts the rendezvous, has closed"):
            ranks[1].barrier()
        for rank in ranks:
            rank.close()


# Processes


def start(code, rank=0, size=1, port=0, **environment):
    """A process that meets the others as `comm`, and then runs `code`."""
    program = (
        "from collectives.bootstrap import *\nfrom collectives.errors import *\n"
        "import os, time\ncomm = detect()\n" + textwrap.dedent(code)
    )
    environment = {
        **{
            name: value for name, value in os.environ.items() if not name.startswith("COLLECTIVES_")
        },
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "COLLECTIVES_TIMEOUT": "15",
        **environment,
    }
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def finish(processes):
    """Exit status and output of each."""
    ended = []
    for process in processes:
        out, err = process.communicate(timeout=30)
        ended.append((process.returncode, out, err))
    return ended


def test_processes(port):
    code = """
    print(comm.all_gather(b"%d" % comm.rank))
    second = detect()  # a second world at the same place
    print(second.broadcast(b"%d" % second.rank, 1), second.job != comm.job)
    comm.close()
    second.barrier()
    second.close()
    """
    ended = finish([start(code, rank, 3, port) for rank in (2, 1, 0)])
    assert ended == [(0, "[b'0', b'1', b'2']\nb'1' True\n", "")] * 3


def test_a_process_that_ends_without_a_word(port):
    """Rank 0, the host, leaves without closing: the others get the result that was on its way, "
    "then an error."""
    code = """
    comm.barrier()
    if comm.rank > 0:
        try:
            comm.barrier()
        except CollectiveError as error:
            print(type(error).__name__, error)
    """
    ended = finish([start(code, rank, 3, port) for rank in range(3)])
    assert [status for status, _, _ in ended] == [0, 0, 0], ended
    for _, out, _ in ended[1:]:
        assert out.startswith(("ClosedError rank 0, which hosts", "PeerDiedError rank"))


@pytest.mark.faults
@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_ends_a_pending_all_gather(port, victim):
    code = f"""
    comm.barrier()
    if comm.rank == {victim}:
        print("ready", flush=True)
        time.sleep(60)
    try:
        comm.all_gather(b"")
    except PeerDiedError as error:
        print(error.peer, error)
    """
    processes = [start(code, rank, 3, port) for rank in range(3)]
    assert processes[victim].stdout.readline() == "ready\n"
    time.sleep(0.2)
    begin = time.monotonic()
    processes[victim].kill()
    ended = finish(processes)
    assert time.monotonic() - begin < 10
    assert ended[victim][0] == -signal.SIGKILL
    for rank in {0, 1, 2} - {victim}:
        status, out, err = ended[rank]
        assert status == 0, err
        if victim == 0:
            assert f"rank {rank} lost the rendezvous at {LOOPBACK}:{port}" in out
        else:
            assert out.startswith("2 rank 2 (") and f"pid {processes[2].pid}) is gone" in out


@pytest.mark.faults
def test_check_notices_a_death_without_waiting(port):
    code = """
    comm.barrier()
    if comm.rank == 1:
        os._exit(3)
    for _ in range(500):
        try:
            comm.check()
        except PeerDiedError as error:
            print(error.peer)
            break
        time.sleep(0.01)
    """
    ended = finish([start(code, rank, 2, port) for rank in range(2)])
    assert ended[0][:2] == (0, "1\n")


@pytest.mark.faults
def test_check_finds_an_error_that_came_with_an_answer():
    """The server's answer to the last call and its word of a death may arrive in one piece."""
    with serving(2) as server:
        a, b = run_all(lambda: join(server, 0, 2), lambda: join(server, 1, 2))
        run_all(a.barrier, b.barrier)
        b.abort("enough")
        assert select.select([a._sock], [], [], 10)[0]
        a._link.feed(a._sock.recv(1 << 16))  # as the call before would have read it
        with pytest.raises(AbortedError, match="enough"):
            a.check()
        a.close()
        b.close()


def test_the_port_of_another_program(port):
    with listen(LOOPBACK, port):
        ((status, _, err),) = finish([start("", 0, 2, port)])
    assert status == 1
    assert f"BootstrapError: {LOOPBACK}:{port} is in use, by another job or program" in err


def test_mpi_alone():
    pytest.importorskip("mpi4py")
    code = """
    import sys
    mpi = detect("mpi")
    print(mpi.all_gather(b"x"), mpi.broadcast(b"y"), mpi.size, mpi.kind)
    sub = mpi.subgroup([0], "sub")
    sub.close()
    mpi.close()
    try:
        mpi.barrier()
    except ClosedError as error:
        print(error)
    """
    ((status, out, err),) = finish([start(code)])
    assert (status, out) == (0, "[b'x'] b'y' 1 mpi\nthis communicator is closed\n"), err


def run_under(launcher, script, *arguments):
    """Runs a script under the launcher of this Python's environment; returns its output by line."""
    program = Path(sys.executable).with_name(launcher)
    if not program.exists():
        pytest.skip(f"no {launcher} beside this Python")
    environment = {
        **os.environ,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [str(program), *arguments, *script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


LAUNCHED = """
import os, time
from collectives.bootstrap import detect
from collectives.errors import *
comm = detect(timeout=30)
got = comm.all_gather(b"%d" % comm.rank * (comm.rank + 1))
if comm.rank != 1:
    group = comm.subgroup([2, 0], "some")
    got += group.all_gather(b"%d" % comm.rank)
    group.close()
again = detect(timeout=30)
again.barrier()
again.close()
if comm.rank == 0:
    try:
        comm.barrier(timeout=0.1)
    except DeadlineError as error:
        got.append("waited 0.1 s" in str(error))
else:
    time.sleep(0.3)
os.write(1, f"{comm.kind} {comm.rank} of {comm.size}: {got}\\n".encode())
"""
LAUNCHED_SAYS = [
    "{} 0 of 3: [b'0', b'11', b'222', b'2', b'0', True]",
    "{} 1 of 3: [b'0', b'11', b'222']",
    "{} 2 of 3: [b'0', b'11', b'222', b'2', b'0']",
]


@pytest.mark.mpi
def test_mpi():
    pytest.importorskip("mpi4py")
    lines = run_under("mpiexec", [sys.executable, "-c", LAUNCHED], "-n", "3")
    assert lines == [line.format("mpi") for line in LAUNCHED_SAYS]


@pytest.mark.torch
@pytest.mark.slow
def test_torchrun(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(LAUNCHED)
    lines = run_under("torchrun", [str(script)], "--standalone", "--nproc-per-node", "3")
    assert lines == [line.format("tcp") for line in LAUNCHED_SAYS]


@pytest.mark.mpi
def test_mpi_launched_by_another_mpi():
    """N processes that each see a world of one must not go on."""
    pytest.importorskip("mpi4py")
    program = "from collectives.bootstrap import detect; detect()"
    hydra = {"PMI_RANK": "1", "PMI_SIZE": "4"}
    environment = {
        name: v for name, v in os.environ.items() if not name.startswith(("PMI", "OMPI"))
    }
    check = "from mpi4py import MPI; print(MPI.get_vendor()[0])"
    vendor = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, env=environment
    )
    if "Open MPI" not in vendor.stdout:
        pytest.skip("needs a library that ignores the launcher")
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**environment, **hydra},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "as rank 1 of 4, but mpi4py, which uses Open MPI" in done.stderr
    assert "launcher and library belong to different MPIs" in done.stderr


# Stores, secrets, nodes, environment


class DictStore:
    def __init__(self):
        self.data = {}

    def set(self, key, value):
        self.data[key] = value if isinstance(value, bytes) else value.encode()

    def get(self, key):
        return self.data[key]

    def check(self, keys):
        return all(key in self.data for key in keys)


def test_through_a_store():
    store = DictStore()
    ranks = run_all(*(lambda r=r: through_store(store, r, 3, timeout=9) for r in range(3)))
    assert (
        run_all(*(lambda r=r: r.all_gather(b"%d" % r.rank) for r in ranks))
        == [[b"0", b"1", b"2"]] * 3
    )
    assert {rank.timeout for rank in ranks} == {9}
    said = json.loads(store.data["collectives/rendezvous"])
    assert said["host"] == LOOPBACK and len(said["secret"]) == 64
    run_all(*(rank.close for rank in ranks))


def test_through_a_store_with_a_missing_rank():
    store = DictStore()
    errors = run_all(*(lambda r=r: through_store(store, r, 3, timeout=0.3) for r in (0, 2)))
    for error in errors:
        assert isinstance(error, BootstrapError) and error.peer == 1
        assert "ranks 0, 2 of 3 came, rank 1 is missing" in str(error)


@pytest.mark.torch
def test_through_torch_stores(tmp_path):
    torch = pytest.importorskip("torch.distributed")
    store = torch.PrefixStore("p", torch.FileStore(str(tmp_path / "store"), 2))
    ranks = run_all(*(lambda r=r: through_store(store, r, 2, timeout=9) for r in range(2)))
    run_all(*(rank.barrier for rank in ranks))
    run_all(*(rank.close for rank in ranks))


def test_secrets(tmp_path):
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef\n")
    file.chmod(0o600)
    assert (
        bootstrap.read_secret(Settings({"COLLECTIVES_SECRET_FILE": str(file)}))
        == b"0123456789abcdef"
    )
    assert bootstrap.read_secret(Settings({})) == b""
    file.chmod(0o640)
    for environment, says in [
        (
            {"COLLECTIVES_SECRET_FILE": str(file)},
            r"read or written by others \(mode 640\): chmod 600",
        ),
        ({"COLLECTIVES_SECRET_FILE": str(tmp_path / "none")}, "cannot be read: No such file"),
        ({"COLLECTIVES_SECRET": "short"}, "holds 5 bytes, fewer than 16"),
        ({"COLLECTIVES_SECRET": "x" * 16, "COLLECTIVES_SECRET_FILE": str(file)}, "both set"),
    ]:
        with pytest.raises(BootstrapError, match=says):
            bootstrap.read_secret(Settings(environment))


def test_nodes():
    assert bootstrap.node_key(Settings({})) == bootstrap.host_key()
    keys = {bootstrap.node_key(Settings({"COLLECTIVES_NODE": name})) for name in ("a", "b")}
    assert len(keys) == 2
    # An override splits a host and never joins two.
    assert all(key.startswith(bootstrap.host_key()) for key in keys)


def test_loopback():
    assert bootstrap.is_loopback(LOOPBACK) and bootstrap.is_loopback("localhost")
    assert not bootstrap.is_loopback("0.0.0.0") and not bootstrap.is_loopback("192.0.2.1")


@pytest.mark.parametrize(
    ("environment", "error", "says"),
    [
        ({"RANK": "0"}, BootstrapError, "variable WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "2"}, BootstrapError, "variable RANK is not set"),
        (
            {"RANK": "2", "WORLD_SIZE": "2"},
            BootstrapError,
            "RANK is 2 and WORLD_SIZE is 2; ranks are 0 to",
        ),
        ({"RANK": "x", "WORLD_SIZE": "2"}, BootstrapError, "RANK is 'x', which is no whole number"),
        (
            {"RANK": "0", "WORLD_SIZE": "2"},
            BootstrapError,
            "neither COLLECTIVES_ADDR nor MASTER_ADDR",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": LOOPBACK},
            BootstrapError,
            "variable MASTER_PORT is not set",
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1"},
            BootstrapError,
            "without a secret: anybody could join. Set COLLECTIVES_SECRET on all ranks",
        ),
        (
            {
                "RANK": "0",
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "192.0.2.1",
                "MASTER_PORT": "1",
                "COLLECTIVES_SECRET": "x" * 16,
            },
            BootstrapError,
            "192.0.2.1 is no address of this host",
        ),
        ({"COLLECTIVES_RANK": "0"}, BootstrapError, "COLLECTIVES_WORLD_SIZE is not set"),
        ({"COLLECTIVES_RNAK": "0"}, ConfigError, "did you mean 'COLLECTIVES_RANK'"),
        (
            {"SLURM_STEP_NUM_TASKS": "4"},
            BootstrapError,
            "srun started 4 tasks, but nothing says how",
        ),
    ],
)
def test_environments_that_are_refused(environment, error, says):
    with pytest.raises(error, match=says):
        detect(environ=environment, timeout=0.5)


def test_detect(monkeypatch):
    assert isinstance(detect(environ={}), Solo)
    assert detect(environ={"COLLECTIVES_TIMEOUT": "7"}).timeout == 7
    assert detect(environ={"COLLECTIVES_TIMEOUT": "7"}, timeout=8).timeout == 8
    assert isinstance(detect(environ={"RANK": "0", "WORLD_SIZE": "1"}), Solo)
    assert isinstance(detect("solo", environ={"RANK": "0", "WORLD_SIZE": "2"}), Solo)
    world = Threads.world(2)
    assert detect(world[1], environ={}) is world[1]
    with pytest.raises(
        BootstrapError, match="unknown way to find ranks 'torchrn'; did you mean 'torchrun'"
    ):
        detect("torchrn", environ={})
    with pytest.raises(BootstrapError, match="a int is no way to find ranks"):
        detect(3, environ={})
    # mpi4py that is not installed, under a launcher that started several ranks
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(BootstrapError, match="mpi4py is not installed: pip install mpi4py"):
        detect(environ={"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"})
    assert isinstance(detect(environ={"PMI_RANK": "0", "PMI_SIZE": "1"}), Solo)
    with pytest.raises(BootstrapError, match="mpi4py is not installed"):
        Mpi()
