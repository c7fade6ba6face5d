"""Ranks of which one fails; the others write what they raise, and how long after.

    failing.py killed|exits|later|middle|late|leaves|signal [--mpi] [--algorithm NAME]

killed, exits  rank 2 ends while the others wait for it, each in another way
later          rank 0 closes and ends, rank 2 is killed; rank 3 looks when rank 1 has told of that
middle         rank 2 is killed while all ranks run large calls
late           rank 1 does not come within the timeout
leaves         all ranks end without closing, with a call in the queue
signal         an alarm rings on rank 0 while it waits
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import collectives as cc


def ones(count: int = 12) -> Any:
    return np.ones(count, np.float32)


def tell(text: str) -> None:
    os.write(1, f"{text}\n".encode())  # one line at once, so that ranks do not mix theirs


def report(rank: int, began: Callable[[], float], call: Callable[[], Any]) -> None:
    """Writes what `call` raises, and how many seconds after `began()`."""
    try:
        call()
    except Exception as error:
        seconds = time.time() - began()
        text = str(error).replace("\n", " ")
        tell(f"rank {rank}: {type(error).__name__} after {seconds:.1f} s: {text}")
    else:
        tell(f"rank {rank}: nothing raised")


def death(comm: cc.Communicator, args: argparse.Namespace) -> None:
    # The launcher ends the survivors when a rank fails; they tell first what they saw.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    at = np.zeros(1)

    def ends() -> None:
        if args.how == "exits":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)

    waits: list[Callable[[], Any]] = [
        lambda: comm.all_reduce(ones()),
        lambda: comm.all_reduce(ones(100_000), algorithm="ring"),
        lambda: None,
        lambda: comm.recv(ones(), 2),
        lambda: comm.all_reduce(ones(), async_op=True).wait(),
    ]
    at[0] = time.time() + 0.3
    comm.broadcast(at, 2)
    if comm.rank == 2:
        time.sleep(max(0.0, at[0] - time.time()))
        ends()
    report(comm.rank, lambda: at[0], waits[comm.rank])
    time.sleep(0.2)  # until all have told


def later(comm: cc.Communicator, args: argparse.Namespace) -> None:
    told = np.zeros(1)
    comm.barrier()
    if comm.rank == 0:
        comm.close()
        return
    if comm.rank == 2:
        time.sleep(0.5)  # rank 0 has ended
        os.kill(os.getpid(), signal.SIGKILL)
    if comm.rank == 3:
        time.sleep(2.0)  # rank 1 has told
    try:
        comm.recv(told, 2)
    except cc.CollectiveError as error:
        tell(f"rank {comm.rank}: {type(error).__name__} of rank {error.peer}")


def middle(comm: cc.Communicator, args: argparse.Namespace) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    at = np.array([time.time() + 0.3])
    comm.broadcast(at, 2)
    if comm.rank == 2:
        delay = max(0.0, at[0] - time.time())
        threading.Timer(delay, os.kill, [os.getpid(), signal.SIGKILL]).start()
    x = ones(1_000_000)

    def forever() -> None:
        while True:
            if args.algorithm == "movement":
                comm.all_gather(x)
            else:
                comm.all_reduce(x, "max", algorithm=args.algorithm)

    report(comm.rank, lambda: at[0], forever)
    time.sleep(0.2)


def late(comm: cc.Communicator, args: argparse.Namespace) -> None:
    began = time.time()
    if comm.rank == 1:
        time.sleep(2.5)
    else:
        report(comm.rank, lambda: began, lambda: comm.all_reduce(ones()))
    time.sleep(0.5)
    os._exit(0)


def leaves(comm: cc.Communicator, args: argparse.Namespace) -> None:
    comm.all_reduce(ones())
    kept.append(comm.all_reduce(ones(), async_op=True))
    kept.append(comm.empty(1000))
    kept.append(comm.split(0))
    comm.barrier()
    tell(f"rank {comm.rank} left")


def alarm(comm: cc.Communicator, args: argparse.Namespace) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def ring(number: int, frame: object) -> None:
        raise InterruptedError("alarm")

    if comm.rank == 0:
        signal.signal(signal.SIGALRM, ring)
        began = time.time()
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        report(0, lambda: began, lambda: comm.all_reduce(ones()))
    else:
        time.sleep(1.5)


kept: list[Any] = []
WAYS = {
    "killed": death,
    "exits": death,
    "later": later,
    "middle": middle,
    "late": late,
    "leaves": leaves,
    "signal": alarm,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("how", choices=list(WAYS))
    parser.add_argument("--mpi", action="store_true")
    parser.add_argument("--algorithm", default=None)
    arguments = parser.parse_args()
    if arguments.mpi:
        os.environ["COLLECTIVES_TRANSPORT"] = "mpi"
    WAYS[arguments.how](cc.init(timeout=1 if arguments.how == "late" else 20), arguments)
    sys.stdout.flush()
