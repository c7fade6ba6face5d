"""Two ranks, of which rank 0 lacks memory or is interrupted; both write what they see.

    short.py SCENARIO

thread   rank 0 cannot start the thread of its queue: the call is refused, and made never
factor   rank 0 has no memory for the scaled copy of premul_sum
message  rank 0 has no memory to set a message aside, and waits for another one
handler  a handler raises while rank 0 receives, again and again, and rank 0 goes on
stopped  rank 1 is stopped while it receives, and rank 0 gives up and forgets its array
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import collectives as cc


def tell(text: str) -> None:
    os.write(1, f"{text}\n".encode())  # one line at once, so that ranks do not mix theirs


def raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except (cc.CollectiveError, MemoryError, RuntimeError) as error:
        return f"{type(error).__name__} {error}"
    return "nothing"


@contextlib.contextmanager
def memory(more: int) -> Iterator[None]:
    """The process gets so many bytes more, and no others."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def thread(comm: cc.Communicator) -> None:
    refused, x = np.full(300_000, 1.0), np.full(300_000, 10.0**comm.rank)
    if comm.rank == 0:
        with memory(2 << 20):  # less than a thread's stack
            tell(f"refused {raised(lambda: comm.all_reduce(refused, async_op=True))}")
        refused[:] = -1
    comm.all_reduce(x, async_op=True).wait()
    tell(f"rank {comm.rank} has {x[0]:g} to {x[-1]:g}, and {refused[0]:g}")


def factor(comm: cc.Communicator) -> None:
    x = np.ones(16 << 20, np.float32)
    out = np.empty_like(x)
    comm.barrier()
    began = time.monotonic()
    with memory(16 << 20) if comm.rank == 0 else contextlib.nullcontext():
        why = raised(lambda: comm.all_reduce(x, "premul_sum", factor=2.0, out=out))
    tell(f"rank {comm.rank} {why}")
    assert time.monotonic() - began < 10


def message(comm: cc.Communicator) -> None:
    small, large = np.zeros(4, np.float32), 256 << 20
    if comm.rank == 0:
        work = comm.recv(small, 1, tag=1, async_op=True)
        with memory(64 << 20):
            comm.barrier()  # the message comes after it
            tell(f"rank 0 {raised(lambda: work.wait(20))}")
    else:
        comm.barrier()
        tell(f"rank 1 {raised(lambda: comm.send(np.zeros(large, np.uint8), 0, tag=2))}")


class Stop(Exception):
    pass


def handler(comm: cc.Communicator) -> None:
    """Either the receive had not begun, or the communicator is broken: no message comes later."""
    number = np.zeros(1, np.int64)
    if comm.rank == 1:
        with contextlib.suppress(cc.CollectiveError):
            while True:
                number += 1
                comm.send(number, 0)
    armed = False

    def stop(*_: Any) -> None:
        if armed:
            raise Stop

    signal.signal(signal.SIGALRM, stop)
    left: list[tuple[Any, int]] = []
    until = time.monotonic() + 5
    while time.monotonic() < until and not comm._core.broken:
        out = number
        try:
            armed = True
            signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 3e-4))
            while True:
                out = np.zeros(1, np.int64)
                comm.recv(out, 1)
        except Stop:
            armed = False
            left.append((out, int(out[0])))
        armed = False
        assert all(int(array[0]) == was for array, was in left), "written after it was interrupted"
    tell("nothing came later")
    comm.abort("enough")


def stopped(comm: cc.Communicator) -> None:
    arrays = [np.zeros(100_000_000, np.float32)]
    pids = comm.all_gather(np.array([os.getpid()]))
    comm.barrier()
    if comm.rank == 0:
        threading.Timer(0.05, lambda: os.kill(int(pids[1]), signal.SIGSTOP)).start()
    why = raised(lambda: comm.broadcast(arrays[0], 0, algorithm="ring")).split()[0]
    lends = comm._core.lends
    arrays.clear()
    comm.close()
    if comm.rank == 0:
        os.kill(int(pids[1]), signal.SIGCONT)
    tell(f"rank {comm.rank} {why}, lends {lends}")
    from mpi4py import MPI

    until = time.monotonic() + 2
    while time.monotonic() < until:  # what was under way goes on
        MPI.COMM_WORLD.Iprobe()
        time.sleep(1e-3)
    tell(f"rank {comm.rank} lives")


def main() -> None:
    comm = cc.init(timeout=2 if sys.argv[1] == "stopped" else 30)
    {s.__name__: s for s in (thread, factor, message, handler, stopped)}[sys.argv[1]](comm)
    os._exit(0)


main()
