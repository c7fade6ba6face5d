"""Ranks of which some end; those that are left shrink, check all collectives, and go on.

    shrinking.py HOW [--victims 1,2] [--delay 0.01]

HOW is how the victims end:

killed, exits, raises, closes   before a call that the others make
stopped                         they stop (SIGSTOP) and are left out at the deadline
middle                          in the middle of large calls
in_shrink                       the first is killed, the second in the middle of the shrinking
in_subgroup                     in a call of a subgroup, which shrinks; then the world does
queued                          while asynchronous calls are outstanding
healthy                         nobody ends
nodes                           under MPI, on several nodes
nodes-killed, nodes-unnoticed   the same, where rank 1 is killed; the others shrink when a call has
                                failed, or before they have noticed anything
again                           one after the other, until one rank is left
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from typing import Any

import cases
import numpy as np
from cases import Case

import collectives as cc
from collectives.config import COLLECTIVES


def ones(count: int = 12) -> Any:
    return np.ones(count, np.float32)


def tell(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def check(comm: cc.Communicator) -> None:
    """Every algorithm of every collective gives the right bytes, and a part of the ranks works."""
    pairs = [(a, c) for a, c in cases.registry(comm.size, comm.nodes) if c == "all_reduce"]
    pairs += [(None, c) for c in COLLECTIVES]
    for count, only in ((3, pairs), (70_000, pairs[-len(COLLECTIVES) :])):
        for algorithm, collective in only:
            cases.check(comm, Case(collective, algorithm, count=count))
    part = comm.split(comm.rank % 2)
    assert part is not None
    cases.check(part, Case("all_reduce"))
    part.close()
    x = comm.empty(5000)
    x[:] = 1
    assert comm.all_reduce(x)[0] == comm.size


def die(how: str, comm: cc.Communicator) -> None:
    if how == "exits":
        os._exit(3)
    if how == "raises":
        raise ZeroDivisionError("the fault of this rank")
    if how == "closes":
        comm.close()
        sys.exit(0)
    if how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    os.kill(os.getpid(), signal.SIGKILL)


def fail(call: Any) -> cc.CollectiveError:
    """What the call raises, which must be an error of this package."""
    try:
        call()
    except cc.CollectiveError as error:
        return error
    raise AssertionError("the call of a broken communicator returned")


def too_late(comm: cc.Communicator) -> None:
    """What a rank meets that was stopped while the others went on."""
    until_it_fails(comm, 100)
    try:
        comm.shrink(timeout=5)
    except cc.AbortedError as error:
        assert "went on without rank" in str(error), error
    tell(f"rank {comm.rank} came too late")
    sys.exit(0)


def until_it_fails(comm: cc.Communicator, count: int) -> cc.CollectiveError:
    def calls() -> None:
        x = ones(count)
        while True:
            comm.all_reduce(x, "max")

    return fail(calls)


def go_on(old: cc.Communicator, gone: list[int], timeout: float) -> Any:
    """Shrinks, and holds what comes out to what must."""
    left = [r for r in range(old.size) if r not in gone]
    new = old.shrink(timeout=timeout)
    assert (new.size, new.rank) == (len(left), left.index(old.rank)), (new, gone)
    check(new)
    return new


def over_mpi() -> None:
    """Two nodes: whole, a communicator can be duplicated; after an abort it is lost."""
    from mpi4py import MPI

    os.environ["COLLECTIVES_NODE"] = f"node{MPI.COMM_WORLD.rank // 2}"
    comm = cc.init(timeout=30)
    whole = comm.shrink()
    assert (whole.size, whole.rank) == (comm.size, comm.rank)
    check(whole)
    whole.close()
    if comm.rank == 2:
        comm.abort("enough")
    until_it_fails(comm, 100)
    try:
        comm.shrink(timeout=5)
    except cc.UnsupportedError as error:
        tell(f"UnsupportedError: {error}")
    MPI.COMM_WORLD.Barrier()  # until all have told


def death_over_mpi(noticed: bool) -> None:
    """Ranks 0 to 2 on one node, 3 on another; rank 1 dies. The whole is lost, the part is not."""
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank
    os.environ["COLLECTIVES_NODE"] = f"node{rank // 3}"
    comm = cc.init(timeout=30)
    part = comm.split(comm.node)
    assert part is not None
    check(part)
    comm.all_reduce(ones())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if noticed:
        tell(f"rank {rank}: {type(until_it_fails(comm, 100)).__name__}")
    began = time.monotonic()
    error = fail(lambda: comm.shrink(timeout=3))
    seconds = time.monotonic() - began
    tell(f"rank {rank}: {type(error).__name__}: {error} (in time: {seconds < 25})")
    if rank != 3:
        until_it_fails(part, 100)
        part = part.shrink(timeout=10)
        check(part)
    tell(f"rank {rank}: a part of {part.size} works")
    os._exit(0)  # MPI's end would wait for the dead


def main(args: argparse.Namespace) -> None:
    if args.how == "nodes":
        over_mpi()
        return
    if args.how.startswith("nodes-"):
        death_over_mpi(noticed=args.how == "nodes-killed")
        return
    comm = cc.init(timeout=30)
    if args.how == "stopped":
        comm = comm.duplicate(timeout=3)
    n, rank = comm.size, comm.rank
    victims = [int(v) for v in args.victims.split(",")] if args.victims else []
    survivors = [r for r in range(n) if r not in victims]
    comm.all_reduce(ones())
    if args.how in ("killed", "exits", "raises", "closes", "stopped"):
        numbers = comm.all_gather(np.array([os.getpid()]))
        if rank in victims:
            time.sleep(0.05 * victims.index(rank))
            die(args.how, comm)
            too_late(comm)
        error = until_it_fails(comm, 100)
        assert not isinstance(error, cc.MismatchError), error
        comm = go_on(comm, victims, 5 if args.how == "stopped" else 20)
        if args.how == "stopped" and comm.rank == 0:
            for victim in victims:
                os.kill(int(numbers[victim]), signal.SIGCONT)
    elif args.how == "middle":
        if rank in victims:
            threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGKILL]).start()
        until_it_fails(comm, 500_000)
        comm = go_on(comm, victims, 10)
    elif args.how == "in_shrink":
        if rank == victims[0]:
            die("killed", comm)
        until_it_fails(comm, 100)
        if rank == victims[1]:
            # Joins, and dies at one moment or another of what follows.
            threading.Timer(args.delay, os.kill, [os.getpid(), signal.SIGKILL]).start()
            comm.shrink(timeout=10)
            time.sleep(10)
        new = comm.shrink(timeout=10)
        while new.size > len(survivors):  # it died after the first attempt had ended
            until_it_fails(new, 100)
            new = new.shrink(timeout=10)
        assert (new.size, new.rank) == (len(survivors), survivors.index(rank))
        check(new)
        comm = new
    elif args.how == "in_subgroup":
        part = comm.split(0 if rank < 3 else 1)
        assert part is not None
        if rank in victims:
            die("killed", comm)
        if rank < 3:
            until_it_fails(part, 100)
            part = go_on(part, victims, 10)
        else:
            check(part)
        until_it_fails(comm, 100)
        comm = go_on(comm, victims, 10)
        check(part)
    elif args.how == "queued":
        x = [ones(50_000) for _ in range(6)]
        works = [comm.all_reduce(a, async_op=True) for a in x]
        if rank in victims:
            works[1].wait()
            die("killed", comm)
        more = [comm.all_reduce(a, async_op=True) for a in (ones(), ones(9000))]
        error = fail(more[-1].wait)
        assert not isinstance(error, cc.MismatchError), error
        comm = go_on(comm, victims, 10)
        assert all(w.done() for w in works + more)
    elif args.how == "healthy":
        works = [comm.all_reduce(ones(50_000), async_op=True) for _ in range(3)]
        new = go_on(comm, [], 10)
        assert all(w.wait()[0] == n for w in works)
        check(comm)
        again = go_on(comm, [], 10)
        check(new)
        comm.close()
        check(again)
        comm = again
    elif args.how == "again":
        while comm.size > 1:
            if comm.rank == comm.size // 2:
                die("killed", comm)
            gone = [comm.size // 2]
            until_it_fails(comm, 2000)
            comm = go_on(comm, gone, 10)
    tell(f"rank {rank} went on as {comm.rank} of {comm.size}")
    comm.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("how")
    parser.add_argument("--victims", default="")
    parser.add_argument("--delay", type=float, default=0.0)
    main(parser.parse_args())
