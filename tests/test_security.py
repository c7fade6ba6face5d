"""Nobody gets in: what other users may open, what is listened to, what is parsed, and what garbage
does. The fuzzer itself is tests/fuzz_rendezvous.py; `make fuzz` runs it at length.
"""

from __future__ import annotations

import ast
import contextlib
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import fuzz_rendezvous
import pytest

import collectives
from collectives import _core
from collectives.bootstrap import Server, Tcp, listen, read_secret, wire
from collectives.config import Settings
from collectives.errors import BootstrapError
from collectives.tuning import region_sizes

SECRET = b"a secret of the tests"
LOOPBACK = "127.0.0.1"
NOBODY = 65534

# ---- segments -----------------------------------------------------------------------------------


@pytest.fixture
def segment():
    """A segment as ranks share it, while its handle is open."""
    region = _core.make_region(True, 2, **region_sizes(2)._asdict())
    yield region
    region.close_handle()


def path_of(region) -> Path:
    pid, fd = region.handle().split(":")[:2]
    return Path(f"/proc/{pid}/fd/{fd}")


def test_segments_have_no_names(segment):
    """What has no name needs no unlinking, cannot be guessed, and is no link to follow."""
    path = path_of(segment)
    assert os.readlink(path) == "/memfd:collectives (deleted)"
    assert os.fstat(int(path.name)).st_nlink == 0
    assert not os.get_inheritable(int(path.name))
    # The directory through which peers open it is for this user alone.
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o500
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.parent.stat().st_uid == os.geteuid()
    segment.close_handle()  # as soon as all ranks have mapped it
    assert not path.exists()


def test_another_user_cannot_open_a_segment(segment):
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    path, handle = path_of(segment), segment.handle()
    opens = f"""
import os
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
try:
    os.open({str(path)!r}, os.O_RDWR)
except PermissionError as error:
    print("refused")
"""
    got = subprocess.run([sys.executable, "-c", opens], capture_output=True, text=True, timeout=60)
    assert got.stdout == "refused\n", got
    # And the core says so in words.
    opens = f"""
import os, collectives, collectives.errors
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
try:
    collectives._core.open_region({handle!r}, 2, **{region_sizes(2)._asdict()})
except collectives.CollectiveError as error:
    print(error)
"""
    got = subprocess.run([sys.executable, "-c", opens], capture_output=True, text=True, timeout=60)
    assert "another user's" in got.stdout, got


def test_a_handle_of_another_segment_is_refused(segment):
    pid, fd, inode, cookie = segment.handle().split(":")
    sizes = region_sizes(2)._asdict()
    for wrong, says in (
        (f"{pid}:{fd}:{int(inode) + 1}:{cookie}", "not the peer that was meant"),
        (f"{pid}:{fd}:{inode}:{int(cookie) ^ 1}", "its cookie or size differs"),
        (f"{pid}:0:{inode}:{cookie}", "segment|not the peer"),
        ("", "malformed"),
        (f"{pid}:{fd}:{inode}", "malformed"),
    ):
        with pytest.raises(collectives.CollectiveError, match=says):
            _core.open_region(wrong, 2, **sizes)


# ---- secrets ------------------------------------------------------------------------------------


def test_secret_files_are_private(tmp_path):
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef")
    file.chmod(0o600)
    link = tmp_path / "link"
    link.symlink_to(file)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo, 0o600)
    for path, says in (
        (link, "is a symbolic link"),
        (fifo, "no regular file"),
        (tmp_path, "no regular file"),
    ):
        with pytest.raises(BootstrapError, match=says):
            read_secret(Settings({"COLLECTIVES_SECRET_FILE": str(path)}))
    if os.geteuid() == 0:
        os.chown(file, NOBODY, NOBODY)
        with pytest.raises(BootstrapError, match=f"belongs to user {NOBODY}, this process to"):
            read_secret(Settings({"COLLECTIVES_SECRET_FILE": str(file)}))


def test_a_secret_may_be_any_bytes():
    raw = b"\xff\xfe of sixteen bytes"
    assert read_secret(Settings({"COLLECTIVES_SECRET": os.fsdecode(raw)})) == raw


def test_the_launcher_makes_a_new_secret_for_each_job():
    program = Path(__file__).with_name("workers") / "secret_of_job.py"
    command = [sys.executable, "-m", "collectives", "run", "-n", "2", str(program)]
    seen = []
    for _ in range(2):
        got = subprocess.run(command, capture_output=True, text=True, timeout=60)
        lines = set(got.stdout.split())
        assert len(lines) == 1, got
        seen += lines
    assert seen[0] != seen[1] and all(len(secret) == 64 for secret in seen)


# ---- the rendezvous -----------------------------------------------------------------------------


@contextlib.contextmanager
def serving(size=2):
    server = Server(listen(LOOPBACK), size=size, secret=SECRET, job="job")
    server.start()
    try:
        yield server
    finally:
        server.stop(1)


@contextlib.contextmanager
def job(server):
    """Two ranks; gives what exchanges once and checks it."""
    made: list[Tcp] = []

    def join(rank):
        made.append(Tcp(server.address, rank=rank, size=2, secret=SECRET, timeout=60))

    def together(call):
        threads = [threading.Thread(target=call, args=(r,)) for r in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)

    together(join)
    made.sort(key=lambda rank: rank.rank)

    def exchange():
        got = [None, None]

        def call(r):
            got[r] = made[r].all_gather(b"%d" % r)

        together(call)
        assert got == [[b"0", b"1"]] * 2

    yield exchange
    for rank in made:
        rank.close()


def test_it_listens_where_it_is_told_and_nowhere_else():
    with listen(LOOPBACK) as sock:
        assert sock.getsockname()[0] == LOOPBACK
        port = sock.getsockname()[1]
        for other in ("127.0.0.2", socket.gethostbyname(socket.gethostname())):
            if other == LOOPBACK:
                continue
            with pytest.raises(OSError):
                socket.create_connection((other, port), timeout=2)


def test_half_open_connections_do_not_keep_others_out():
    """Hundreds that send a byte now and then, before the ranks come and while they work."""
    with serving() as server:
        slow = [socket.create_connection(server.address) for _ in range(300)]
        for sock in slow:
            with contextlib.suppress(OSError):
                sock.send(wire.MAGIC[:1])
        with job(server) as exchange:
            for _ in range(20):
                more = [socket.create_connection(server.address) for _ in range(20)]
                for sock in more[:10] + slow[-50:]:
                    with contextlib.suppress(OSError):
                        sock.send(wire.MAGIC[1:2])
                exchange()
                for sock in more:
                    sock.close()
        for sock in slow:
            sock.close()


def test_a_group_has_at_most_the_size_of_the_job():
    """Or one frame could make the server hold a table of any size."""
    with serving() as server, job(server) as exchange:
        for size in (3, 1 << 31, 10**30):
            with pytest.raises(BootstrapError, match=r"this job has 2|lost the rendezvous"):
                Tcp(server.address, rank=0, size=size, secret=SECRET, timeout=5, group="large")
        exchange()


def test_timers_end_with_what_they_are_for():
    """Groups that come and go leave nothing behind until some far deadline."""
    with serving() as server, job(server) as exchange:
        ranks = []

        def part(rank, i):
            group = Tcp(
                server.address, rank=rank, size=2, secret=SECRET, timeout=9e5, group=f"part {i}"
            )
            group.all_gather(b"x")
            group.close()
            ranks.append(rank)

        for i in range(150):
            pair = [threading.Thread(target=part, args=(r, i)) for r in range(2)]
            for thread in pair:
                thread.start()
            for thread in pair:
                thread.join(30)
        exchange()
        assert len(ranks) == 300
        assert len(server._timers) < 150, len(server._timers)
        assert len(server._meetings) == 1


@pytest.mark.parametrize("target", list(fuzz_rendezvous.TARGETS))
def test_a_little_fuzz(target):
    """The first messages of what `make fuzz` sends."""
    messages = {"parsers": 15_000, "server": 6000, "client": 100, "wire": 1500}[target]
    before = time.monotonic()
    fuzz_rendezvous.TARGETS[target][0](fuzz_rendezvous.random.Random(f"{target} 0"), messages)
    assert time.monotonic() - before < 110


# ---- the sources --------------------------------------------------------------------------------


def test_nothing_that_is_received_is_executed():
    """No pickle, marshal, shelve, eval or exec in the package; JSON and fixed layouts only."""
    forbidden = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "eval", "exec", "compile"}
    package = Path(collectives.__file__).parent
    files = sorted(package.rglob("*.py"))
    assert len(files) > 40
    found = []
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name.partition(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [(node.module or "").partition(".")[0]]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                names = [node.func.id]
            found += [f"{file.name}: {name}" for name in names if name in forbidden]
    assert not found
    # Nor mpi4py's calls in small letters, which pickle.
    text = (package / "bootstrap" / "mpi.py").read_text()
    for name in ("bcast", "allgather", "gather", "send", "recv", "scatter", "alltoall"):
        assert f"comm.{name}(" not in text
