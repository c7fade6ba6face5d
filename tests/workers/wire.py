"""Counts what leaves each node while ranks call: for each node, bytes on its port by bytes that the
schedule says.

    wire.py ALGORITHM COLLECTIVE BYTES CALLS

The first rank of each node writes "node K: sent S scheduled T".
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import worker

import collectives as cc


def sent() -> int:
    """Bytes that this host has sent through eth0."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, fields = line.partition(":")
        if name.strip() == "eth0":
            return int(fields.split()[8])
    raise AssertionError("no eth0 here")


def scheduled(comm: cc.Communicator, algorithm: str, collective: str, nbytes: int) -> float:
    """Bytes that this node sends to others in one call."""
    plan = cc.schedule(algorithm, collective, comm.size, node=comm.nodes)
    blocks = comm.size if collective == "all_to_all" else plan.nchunks
    mine = comm.nodes[comm.rank]
    crossing = sum(
        comm.nodes[t.src] == mine and comm.nodes[t.dst] != mine for r in plan.rounds for t in r
    )
    return crossing * nbytes / blocks


def main() -> None:
    algorithm, collective, nbytes, calls = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:5])
    comm = cc.init(timeout=60)
    x = np.ones(nbytes // 4, np.float32)

    def call() -> None:
        if collective == "all_reduce":
            comm.all_reduce(x, "max", algorithm=algorithm)
        elif collective == "all_gather":
            comm.all_gather(x[: x.size // comm.size], algorithm=algorithm)
        else:
            comm.all_to_all(x, algorithm=algorithm)

    call()  # connections are made
    comm.barrier()
    before = sent()
    for _ in range(calls):
        call()
    comm.barrier()
    counted = sent() - before
    expected = calls * scheduled(comm, algorithm, collective, nbytes)
    if comm.nodes.index(comm.nodes[comm.rank]) == comm.rank:
        worker_line = f"node {comm.nodes[comm.rank]}: sent {counted} scheduled {expected:.0f}"
        print(worker_line, flush=True)
    comm.close()


worker.run(main)
