"""The process where ranks meet has too few files: what the ranks are told, and how soon."""

import contextlib
import resource
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from bootstraps import LOOPBACK, join, run_all

from collectives.bootstrap import Tcp, listen
from collectives.errors import BootstrapError, DeadlineError

SERVER = """
server = Server(listen(LOOPBACK), size=size, secret=SECRET, host="the host of this test")
server.start()
print(server.address[1], flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def hosting(size, soft, hard, code=SERVER):
    """A process with so few files, that `code` lets ranks meet in."""
    program = (
        "import sys\nfrom collectives.bootstrap import Server, hosting, listen\n"
        f"from bootstraps import LOOPBACK, SECRET\nsize = {size}\n" + textwrap.dedent(code)
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)),
    )
    try:
        port = int(process.stdout.readline())
        yield SimpleNamespace(address=(LOOPBACK, port), process=process)
    finally:
        process.kill()
        process.communicate()


def all_join(server, ranks, size):
    return run_all(*(lambda r=r: join(server, r, size, timeout=25) for r in ranks))


def check_told(errors, limit):
    for error in errors:
        assert isinstance(error, BootstrapError) and not isinstance(error, DeadlineError), error
        assert f"has reached its limit of open files, {limit}, and each rank takes" in str(error)
        assert "`ulimit -n 128`" in str(error)


def test_too_few_files_are_told_to_all_at_once():
    with hosting(64, 32, 32) as server:
        began = time.monotonic()
        check_told(all_join(server, range(64), 64), 32)
        assert time.monotonic() - began < 10  # of 25


def test_rank_0_that_hosts_tells_the_others_before_it_goes():
    code = """
    sock = listen(LOOPBACK)
    port = sock.getsockname()[1]
    sock.close()
    print(port, flush=True)
    try:
        hosting.meet(
            LOOPBACK, port, rank=0, size=size, secret=SECRET, job="", timeout=25, hosts=True
        )
    except Exception as error:
        print(error, flush=True)
    """
    with hosting(64, 32, 32, code) as server:
        began = time.monotonic()
        check_told(all_join(server, range(1, 64), 64), 32)
        assert "rank 0, which hosts the rendezvous" in server.process.stdout.readline()
        assert time.monotonic() - began < 15


def test_the_soft_limit_is_raised_as_far_as_it_must():
    with hosting(64, 24, 4096) as server:
        ranks = all_join(server, range(64), 64)
        for rank in ranks:
            assert isinstance(rank, Tcp), rank
        limit = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
        assert limit == (96, 4096)
        run_all(*(rank.close for rank in ranks))


def test_a_part_that_finds_no_room_leaves_its_world_alone():
    with hosting(12, 28, 28) as server:
        ranks = all_join(server, range(12), 12)
        began = time.monotonic()
        parts = run_all(*(lambda r=r: r.subgroup(range(12), "part") for r in ranks))
        for error in parts:
            assert isinstance(error, BootstrapError) and "limit of open files, 28" in str(error)
        assert time.monotonic() - began < 10
        assert run_all(*(rank.barrier for rank in ranks)) == [None] * 12
        run_all(*(rank.close for rank in ranks))


def test_strangers_make_room_for_ranks():
    with hosting(4, 32, 32) as server, contextlib.ExitStack() as opened:
        for _ in range(40):
            opened.enter_context(socket.create_connection(server.address))
        began = time.monotonic()
        ranks = all_join(server, range(4), 4)
        assert time.monotonic() - began < 8  # after a handshake's time they would go by themselves
        for rank in ranks:
            assert isinstance(rank, Tcp), rank
        run_all(*(rank.close for rank in ranks))


def test_a_rank_that_has_no_file_left_says_so():
    opened = []
    sock = listen(LOOPBACK)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (sock.fileno() + 8, limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                opened.append(socket.socket())
        words = r"rank 1 of 2 cannot reach .* Too many open files; raise .* ulimit -n"
        began = time.monotonic()
        with pytest.raises(BootstrapError, match=words):
            Tcp(sock.getsockname(), rank=1, size=2, timeout=20)
        with pytest.raises(BootstrapError, match=r"cannot listen on .* Too many open files"):
            listen(LOOPBACK)
        assert time.monotonic() - began < 5
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for one in (*opened, sock):
            one.close()
