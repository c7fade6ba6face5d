"""A communicator for the ranks of a process group."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..bootstrap import Bootstrap, Mpi, Solo, through_store
from ..bootstrap.mpi import import_mpi
from ..communicator import Communicator
from .rendezvous import met_through_mpi


class Meeting(NamedTuple):
    """How the ranks of a process group meet, once or again.

    store    torch's store; what is under its prefix belongs to this group
    members  the number of each rank in the world, [] for the world itself
    """

    store: Any
    rank: int
    size: int
    timeout: float
    members: Sequence[int]

    def join(self, name: str) -> Communicator:
        """A communicator of all ranks of the group; collective. `name` sets it apart from others of
        this group.
        """
        return Communicator(self._bootstrap(name))

    def attempt(self, name: str) -> int:
        """How often this rank came here for `name`, as often as the others. A store outlives
        groups: with this number in its keys, none is used again.
        """
        return int(self.store.add(f"{name}/came/{self.rank}", 1))

    def _bootstrap(self, name: str) -> Bootstrap:
        if self.size == 1:
            return Solo(self.timeout)
        attempt = self.attempt(name)
        if met_through_mpi():
            # Only MPI carries data between hosts.
            MPI = import_mpi()
            world = MPI.COMM_WORLD
            members = self.members or range(world.Get_size())
            group = world.Get_group().Incl(list(members))
            tag = zlib.crc32(f"{name}/{attempt}/{list(members)}".encode()) & 0x7FFF
            comm = world.Create_group(group, tag)
            group.Free()
            return Mpi(comm, self.timeout, own=True)
        return through_store(
            self.store, self.rank, self.size, timeout=self.timeout, name=f"{name}/{attempt}"
        )
