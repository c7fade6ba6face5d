"""A communicator for the ranks of a process group.

Ranks meet under names in torch's store, which outlives them: torchrun keeps its own over all
restarts, and a group may be made again on the store of one before it. Whatever a rank counts there
differs from rank to rank as soon as one dies before it gets so far. So nothing is counted. Rank 0
makes up a name, and the others answer to it:

    rank 0     says a fresh name          collects the answers    repeats them: the ranks have met
    rank r     answers with a fresh word                          sees its own word among them

Who sees a name of an earlier rank 0 answers to it in vain, and to the next one too. A rank that
died has no part in the next meeting, since nobody waits for its word. This costs a store's round
trips for each rank: two writes, and a look now and then.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from ..bootstrap import Bootstrap, Mpi, Solo, through_store
from ..bootstrap.groups import name_ranks
from ..bootstrap.mpi import import_mpi
from ..bootstrap.wire import GRACE
from ..communicator import Communicator
from ..errors import BootstrapError, ClosedError
from .rendezvous import met_through_mpi

# Rank 0 may hold the store, and its program may end with what it says at last. So it waits this
# long at most, in seconds, until those that came have heard it.
HEARD = 1.0


class Meeting(NamedTuple):
    """How the ranks of a process group meet, once or again.

    store    torch's store; what is under its prefix belongs to this group
    members  the number of each rank in the world, [] for the world itself
    apart    the name of this meeting, which no other meeting has
    """

    store: Any
    rank: int
    size: int
    timeout: float
    members: Sequence[int]
    apart: str = ""

    def set_apart(self, name: str, stop: threading.Event | None = None) -> Meeting:
        """The same ranks, with a part of the store in which there is nothing yet; collective.
        `name` tells what is set apart at the same time by several threads; `stop` ends the wait.

        Raises BootstrapError that names the ranks that are missing after the timeout, ClosedError
        if `stop` is set.
        """
        if self.size == 1:
            return self
        stop = stop or threading.Event()
        apart = self._lead(name, stop) if self.rank == 0 else self._follow(name, stop)
        return self._replace(store=dist.PrefixStore(apart, self.store), apart=apart)

    def join(self, name: str, stop: threading.Event | None = None) -> Communicator:
        """A communicator of all ranks of the group; collective. The rest as in `set_apart`."""
        return self.set_apart(name, stop).connect()

    def connect(self) -> Communicator:
        """A communicator of all ranks; collective, and once for what was set apart."""
        return Communicator(self._bootstrap())

    def _lead(self, name: str, stop: threading.Event) -> str:
        apart, where = f"{name}/{secrets.token_hex(12)}", f"{name}/met"

        def say(words: Mapping[int, str], error: str = "", peer: int = -1) -> None:
            told = {"apart": apart, "words": list(words.values()), "error": error, "peer": peer}
            self.store.set(where, json.dumps(told))

        say({})
        missing = list(range(1, self.size))
        for _ in _looks(self.timeout, stop):
            missing = [rank for rank in missing if not self.store.check([f"{apart}/{rank}"])]
            if not missing:
                break
        # Read at the end: a rank that gave up, and came again, has another word than at first.
        words = {
            rank: bytes(self.store.get(f"{apart}/{rank}")).decode()
            for rank in range(1, self.size)
            if rank not in missing
        }
        if missing:
            error = (
                f"not all ranks came within {self.timeout:g} s: {name_ranks([0, *words])} of "
                f"{self.size} came, {name_ranks(missing)} {'is' if len(missing) == 1 else 'are'} "
                "missing"
            )
            say(words, error, missing[0])
            await_heard(self.store, [f"{apart}/{rank}/heard" for rank in words], stop)
            raise BootstrapError(error, rank=0, peer=missing[0])
        say(words)
        return apart

    def _follow(self, name: str, stop: threading.Event) -> str:
        where, word, answered = f"{name}/met", secrets.token_hex(12), ""
        # Rank 0 speaks at its own deadline of who is missing, so it gets a little longer.
        for _ in _looks(self.timeout + GRACE, stop):
            if not self.store.check([where]):
                continue
            said = json.loads(bytes(self.store.get(where)))
            if said["apart"] != answered:
                answered = said["apart"]
                self.store.set(f"{answered}/{self.rank}", word)
            elif word in said["words"]:
                if said["error"]:
                    tell_heard(self.store, f"{answered}/{self.rank}/heard")
                    raise BootstrapError(said["error"], rank=self.rank, peer=said["peer"])
                return str(answered)
        raise BootstrapError(
            f"rank {self.rank} heard nothing from rank 0 within {self.timeout:g} s",
            rank=self.rank,
            peer=0,
        )

    def _bootstrap(self) -> Bootstrap:
        if self.size == 1:
            return Solo(self.timeout)
        if met_through_mpi():
            # Only MPI carries data between hosts.
            MPI = import_mpi()
            world = MPI.COMM_WORLD
            members = self.members or range(world.Get_size())
            group = world.Get_group().Incl(list(members))
            comm = world.Create_group(group, zlib.crc32(self.apart.encode()) & 0x7FFF)
            group.Free()
            return Mpi(comm, self.timeout, own=True)
        try:
            return through_store(
                self.store, self.rank, self.size, timeout=self.timeout, name="communicator"
            )
        except BootstrapError:
            if self.rank:
                tell_heard(self.store, f"failed/{self.rank}")
            else:
                await_heard(self.store, [f"failed/{rank}" for rank in range(1, self.size)])
            raise


def tell_heard(store: Any, key: str) -> None:
    """Tells rank 0 that this one has heard it."""
    with contextlib.suppress(RuntimeError):  # of torch, where rank 0 has gone with the store
        store.set(key, b"")


def await_heard(store: Any, keys: list[str], stop: threading.Event | None = None) -> None:
    """Returns when all have told under these keys that they have heard rank 0, or after HEARD
    seconds.
    """
    for _ in _looks(HEARD, stop or threading.Event()):
        if all(store.check([key]) for key in keys):
            return


def _looks(seconds: float, stop: threading.Event) -> Iterator[None]:
    """When to look at the store: soon, then less often, and once more after `seconds`. An eighth of
    the time that was waited is lost at most. Raises ClosedError if `stop` is set.
    """
    began = time.monotonic()
    while (waited := time.monotonic() - began) < seconds:
        yield
        if stop.wait(min(seconds - waited, 0.05, max(2e-4, waited / 8))):
            raise ClosedError("the process group was closed before all its ranks had met")
    yield
