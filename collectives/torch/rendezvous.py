"""`env://` for ranks that know their number from mpirun, or from `python -m collectives run`."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from ..bootstrap import detect
from ..bootstrap.sources import mpi_launcher

_met: list[int] = []  # the size of the world, once its ranks have met through MPI


def met_through_mpi() -> bool:
    """True if the ranks of torch's world are those of MPI's, with the same numbers."""
    return bool(_met)


def through_launcher(
    url: str, timeout: timedelta = timedelta(minutes=30), **_: Any
) -> Iterator[tuple[Any, int, int]] | None:
    """A rendezvous for `env://` under an MPI launcher or that of this package; None anywhere else.

    Rank 0 keeps the store, on a free port that the others are told. Raises BootstrapError if ranks
    are missing after `timeout`, or MPI's world is not the launcher's.
    """
    told = {"RANK", "WORLD_SIZE"} & os.environ.keys()  # by torchrun, or by a person
    launched = "COLLECTIVES_RANK" in os.environ or mpi_launcher(os.environ) is not None
    if url != "env://" or told or not launched:
        return None
    return _meet(timeout)


def _meet(timeout: timedelta) -> Iterator[tuple[Any, int, int]]:
    from torch.distributed import TCPStore

    world = detect(timeout=timeout.total_seconds())
    rank, size = world.rank, world.size
    try:
        hosts = world.all_gather(socket.gethostname().encode())
        if rank == 0:
            host = "127.0.0.1" if len(set(hosts)) == 1 else socket.getfqdn()
            store = TCPStore(host, 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
            world.broadcast(json.dumps([host, store.port]).encode())
        else:
            host, port = json.loads(world.broadcast(b""))
            store = TCPStore(host, port, size, is_master=False, timeout=timeout)
    finally:
        world.close()
    if world.kind == "mpi":
        _met.append(size)
    yield store, rank, size
