"""Ranks of one host, of which rank 1 cannot open the memory of others."""

from __future__ import annotations

import os

import numpy as np
import worker
from mpi4py import MPI

import collectives as cc
from collectives import reach


class Unreachable:
    """The core, but for what rank 1 may open."""

    def __getattr__(self, name):
        return getattr(cc._core, name)

    def open_region(self, *arguments, **named):
        raise cc.CollectiveError("it is not mine")


def main() -> None:
    if MPI.COMM_WORLD.rank == 1:
        reach._core = Unreachable()
    comm = cc.init(timeout=30)
    text = f"rank {comm.rank}: nodes {comm.nodes} over {comm.transports}: {comm.fallback}\n"
    os.write(1, text.encode())
    for count in (1, 5000):
        assert comm.all_reduce(np.ones(count)).tolist() == [3.0] * count
    comm.close()


worker.run(main)
