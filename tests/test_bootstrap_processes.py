"""Processes that meet over TCP, and what the others are told when one of them dies."""

import select
import signal
import time

import pytest
from bootstraps import LOOPBACK, finish, join, run_all, serving, start

from collectives.bootstrap import Tcp, client, listen
from collectives.errors import AbortedError, DeadlineError


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


@pytest.mark.parametrize("early", [0, 1])
def test_a_rank_meets_the_others_however_often_they_had_tried(port, early):
    code = """
    me, early = int(os.environ["ME"]), int(os.environ["EARLY"])
    os.environ.update(RANK=str(me), WORLD_SIZE="2")
    for timeout in (0.3, 0.3, 15) if me == early else (15,):
        try:
            comm = detect(timeout=timeout)
        except BootstrapError:
            print("failed", flush=True)
    print(comm.all_gather(b"%d" % me))
    comm.close()
    """
    first = start(code, port=port, EARLY=str(early), ME=str(early))
    assert [first.stdout.readline() for _ in range(2)] == ["failed\n"] * 2
    second = start(code, port=port, EARLY=str(early), ME=str(1 - early))
    assert finish([first, second]) == [(0, "[b'0', b'1']\n", "")] * 2


def test_a_process_that_ends_without_a_word(port):
    """Rank 0, the host, leaves without closing: the others get the result that was on its way,
    then an error.
    """
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


@pytest.mark.faults
@pytest.mark.parametrize("size", [10, 20 << 20])
def test_a_host_that_is_stopped_has_not_died(port, size, monkeypatch):
    """Whether or not what is sent to it fits into the buffers on the way."""
    monkeypatch.setattr(client, "GRACE", 0.5)
    host = start("comm.barrier(); print('ready', flush=True); time.sleep(60)", 0, 2, port)
    rank = Tcp((LOOPBACK, port), rank=1, size=2, timeout=15)
    rank.barrier()
    assert host.stdout.readline() == "ready\n"
    host.send_signal(signal.SIGSTOP)
    with pytest.raises(DeadlineError, match=r"rank 0, which hosts it, stopped\?"):
        rank.all_gather(b"x" * size, timeout=0.5)
    rank.close()
    host.kill()
    host.communicate()


def test_the_port_of_another_program(port):
    with listen(LOOPBACK, port):
        ((status, _, err),) = finish([start("", 0, 2, port)])
    assert status == 1
    assert f"BootstrapError: {LOOPBACK}:{port} is in use, by another job or program" in err
