"""A process group of torch between the ranks of a communicator: what a benchmark compares with."""

from __future__ import annotations

import socket

import numpy as np
from torch import distributed

import collectives as cc


def start(comm: cc.Communicator, backend: str) -> None:
    """Starts torch's default group with `backend` ("gloo" or "nccl") on a free port of rank 0; all
    ranks must be on one host. Collective.
    """
    port = np.zeros(1, np.int64)
    if comm.rank == 0:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port[0] = free.getsockname()[1]
    comm.broadcast(port)
    distributed.init_process_group(
        backend,
        init_method=f"tcp://127.0.0.1:{port[0]}",
        rank=comm.rank,
        world_size=comm.size,
    )
