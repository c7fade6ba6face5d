"""Ranks that meet, to test how: as threads of one process, over TCP or not, and as processes."""

import concurrent.futures
import contextlib
import os
import subprocess
import sys
import textwrap

from collectives.bootstrap import Server, Tcp, Threads, listen
from collectives.errors import CollectiveError

SECRET = b"a secret of the tests"
LOOPBACK = "127.0.0.1"


def run_all(*calls):
    """Runs the calls in a thread each; returns their results, an exception in place of what
    raised.
    """

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
