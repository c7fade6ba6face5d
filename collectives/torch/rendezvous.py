"""`env://` for ranks that mpirun started: they know their number from MPI, and meet through it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from ..bootstrap.mpi import import_mpi
from ..bootstrap.sources import mpi_launcher
from ..errors import BootstrapError

_met: list[int] = []  # the size of the world, once its ranks have met through MPI


def met_through_mpi() -> bool:
    """True if the ranks of torch's world are those of MPI's, with the same numbers."""
    return bool(_met)


def through_mpi(
    url: str, timeout: timedelta = timedelta(minutes=30), **_: Any
) -> Iterator[tuple[Any, int, int]] | None:
    """A rendezvous for `env://` under an MPI launcher; None anywhere else.

    Rank 0 keeps the store, on a free port that MPI tells the others. Raises BootstrapError if MPI's
    world is not the launcher's.
    """
    told = {"RANK", "WORLD_SIZE"} & os.environ.keys()  # by torchrun, or by a person
    if url != "env://" or told or mpi_launcher(os.environ) is None:
        return None
    return _meet(timeout)


def _meet(timeout: timedelta) -> Iterator[tuple[Any, int, int]]:
    from torch.distributed import TCPStore

    world = import_mpi().COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    launcher = mpi_launcher(os.environ)
    said = int(os.environ.get(launcher.size, size)) if launcher is not None else size
    if said != size:
        raise BootstrapError(
            f"the launcher started {said} ranks, but the world of mpi4py's MPI has {size}: mpirun "
            "and the MPI library belong to two different MPIs"
        )
    hosts = world.allgather(socket.gethostname())
    store = None
    if rank == 0:
        host = "127.0.0.1" if len(set(hosts)) == 1 else socket.getfqdn()
        store = TCPStore(host, 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
        world.bcast((host, store.port))
    else:
        host, port = world.bcast(None)
        store = TCPStore(host, port, size, is_master=False, timeout=timeout)
    _met.append(size)
    yield store, rank, size
