"""A batch of checks inside one launch: on every rank, every algorithm that is registered.

    battery.py [--counts 1,17] [--nodes 0,0,1] [--parts] [--mpi4py]

Writes one line, "checked N cases over TRANSPORTS", on rank 0. Whatever is wrong is written by the
rank that sees it, and ends the job.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from typing import Any

import cases
import numpy as np
import test_collectives
from cases import Case

import collectives as cc
from collectives.config import COLLECTIVES

AUTO = [(None, collective) for collective in COLLECTIVES]
PARTS = [(None, "all_reduce"), ("ring", "all_gather"), (None, "all_to_all"), (None, "barrier")]


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--counts", type=numbers, default=[0, 1, 17, 64, 289, 4099])
    parser.add_argument("--large", type=numbers, default=[])
    parser.add_argument("--nodes", type=numbers, default=None)
    parser.add_argument("--how", default="blocking")
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--mpi4py", action="store_true")
    parser.add_argument("--compositions", action="store_true")
    parser.add_argument("--expect-nodes", type=numbers, default=None)
    args = parser.parse_args()
    world: Any = None
    if args.mpi4py or args.parts or args.nodes:
        from mpi4py import MPI

        world = MPI.COMM_WORLD
    if args.nodes:
        os.environ["COLLECTIVES_NODE"] = f"node{args.nodes[world.rank]}"
    comm = cc.init(timeout=30)
    if args.nodes:
        assert comm.nodes == args.nodes, (comm.nodes, args.nodes)
    if args.expect_nodes:
        assert comm.nodes == args.expect_nodes, (comm.nodes, args.expect_nodes)
    done = everything(comm, args)
    if args.parts:
        done += parts(comm, world)
    if args.mpi4py:
        done += beside_mpi4py(comm, world)
    transports = comm.transports
    comm.close()
    if comm.rank == 0:
        print(f"checked {done} cases over {transports}")


def everything(comm: cc.Communicator, args: argparse.Namespace) -> int:
    """The registry, and what is chosen by itself; small arrays and large ones."""
    pairs = [*cases.registry(comm.size, comm.nodes), *AUTO]
    if args.compositions:
        pairs += cases.compositions(comm.size, comm.nodes)
    done = cases.run_cases(
        comm, cases.sweep(comm.size, pairs, args.counts, comm.nodes, how=args.how)
    )
    large = cases.sweep(
        comm.size, pairs, args.large, comm.nodes, dtype="float32", op="sum", how=args.how
    )
    done += cases.run_cases(comm, large)
    if comm.transports == "shm":  # where peers read each other's memory
        huge = cases.sweep(comm.size, AUTO, (70_001, 600_001), dtype="float32", op="sum")
        done += cases.run_cases(comm, huge)
        done += cases.hammer(comm, test_collectives.spoiled(comm.size), rounds=4)
    return done


def parts(comm: cc.Communicator, world: Any) -> int:
    """Parts of the world: of the mpi4py communicator, and of ours; duplicates of parts."""
    done = 0
    size, rank = comm.size, comm.rank
    found = []
    # In reverse order of ranks, so that no rank keeps its number by accident.
    sub = world.Split(rank % 2, size - rank)
    found.append(cc.Communicator.from_mpi(sub))
    assert (found[-1].rank, found[-1].size) == (sub.rank, sub.size)
    part = comm.split(rank % 2, key=-rank)
    assert part is not None
    assert (part.rank, part.size) == (sub.rank, sub.size)
    found.append(part)
    found.append(part.duplicate())
    found.append(comm.duplicate())
    node = comm.split(by="node")
    assert node is not None
    assert node.size == comm.local_size
    found.append(node)
    alone = comm.split(None if rank else 0)
    assert (alone is None) == (rank > 0)
    if alone is not None:
        found.append(alone)
    for _ in range(2):  # turn and turn about: calls on one never meet those on another
        for one in found:
            done += cases.run_cases(one, cases.sweep(one.size, PARTS, (1, 300, 70_000)))
    for one in found:
        one.close()
    sub.Free()
    cases.check(comm, Case("all_reduce"))
    return done


def beside_mpi4py(comm: cc.Communicator, world: Any) -> int:
    """The same arguments to mpi4py give the same bytes."""
    from mpi4py import MPI

    n, rank = comm.size, comm.rank
    done = 0
    ops = {"sum": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX, "bxor": MPI.BXOR}
    for dtype in ("float32", "float64", "int32", "int64", "uint8"):
        for count in (1, 65, 3000, 50_000):
            each = np.full(count, 0, dtype)
            for op in ops if dtype in ("int32", "int64", "uint8") else ("sum", "min", "max"):
                x = small_values(rank, n, count * n, dtype, op)
                theirs = np.empty_like(x)
                world.Allreduce(x, theirs, ops[op])
                same(comm.all_reduce(x.copy(), op), theirs, f"all_reduce {dtype} {op} {count}")
                world.Reduce_scatter_block(x, each, ops[op])
                same(comm.reduce_scatter(x, op), each, f"reduce_scatter {dtype} {op} {count}")
                done += 2
            x = cases.any_bytes(rank, count, dtype, count)
            theirs = np.empty(count * n, dtype)
            world.Allgather(x, theirs)
            same(comm.all_gather(x), theirs, f"all_gather {dtype} {count}")
            ours, theirs = x.copy(), x.copy()
            world.Bcast(theirs, n - 1)
            same(comm.broadcast(ours, n - 1), theirs, f"broadcast {dtype} {count}")
            x = cases.any_bytes(rank, count * n, dtype, count)
            theirs = np.empty_like(x)
            world.Alltoall(x, theirs)
            same(comm.all_to_all(x), theirs, f"all_to_all {dtype} {count}")
            done += 3
    return done


def small_values(rank: int, n: int, count: int, dtype: str, op: str) -> Any:
    """Values that overflow in no dtype: some MPIs wrap there, others stop at the end."""
    values = cases.exact_values(rank, n, count, "float32", "prod" if op == "prod" else "min", count)
    return abs(values).astype(dtype)


def same(ours: Any, theirs: Any, what: str) -> None:
    words = cases.difference(ours, theirs)
    assert not words, f"{what}: not what mpi4py gives: {words}"


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # peers that wait for this rank are ended by the launcher
