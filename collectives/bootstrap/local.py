"""Ranks within one process: one alone, and threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from ..config import DEFAULT_TIMEOUT
from ..errors import (
    AbortedError,
    BootstrapError,
    ClosedError,
    CollectiveError,
    MismatchError,
    PeerDiedError,
)
from .forks import Birth
from .groups import Base, Group, new_job


class Solo(Base):
    """A world of one rank."""

    kind = "solo"

    def __init__(self, timeout: float = DEFAULT_TIMEOUT) -> None:
        self.rank = 0
        self.size = 1
        self.job = new_job()
        self.timeout = timeout
        self._broken: CollectiveError | None = None

    def _exchange(self, op: str, data: bytes, timeout: float) -> list[bytes]:
        self.check()
        return [data]

    def subgroup(self, ranks: Sequence[int], name: str, *, timeout: float | None = None) -> Solo:
        self.check()
        self._check_members(ranks)
        return Solo(self.timeout if timeout is None else timeout)

    def check(self) -> None:
        if self._broken is not None:
            raise self._broken

    def abort(self, reason: str) -> None:
        self._broken = self._broken or AbortedError(f"rank 0 aborted: {reason}", rank=0, peer=0)

    def close(self) -> None:
        self._broken = self._broken or ClosedError("this communicator is closed", rank=0)


class _Hub:
    """What the threads of a group share."""

    def __init__(self, name: str, ranks: tuple[int, ...], parent: _Hub | None = None) -> None:
        self.parent = parent
        self.group = Group(name, len(ranks))
        self.ranks = ranks
        self.condition = threading.Condition()
        self.children: dict[str, _Hub] = {}

    def leave(self, rank: int) -> None:
        with self.condition:
            self.group.leave(rank)
            self.condition.notify_all()
            empty = len(self.group.left) == self.group.size
        if empty and self.parent is not None:
            with self.parent.condition:
                self.parent.children.pop(self.group.name, None)

    def fail(self, cls: type[CollectiveError], message: str, peer: int | None) -> None:
        with self.condition:
            self.group.fail(cls, message, peer)
            self.condition.notify_all()
            children = list(self.children.values())
        for child in children:
            child.fail(cls, message, child.ranks.index(peer) if peer in child.ranks else None)


class Threads(Base):
    """Ranks that are threads of one process; `Threads.world(n)` makes all of them at once."""

    kind = "threads"

    def __init__(self, hub: _Hub, rank: int, timeout: float) -> None:
        self.rank = rank
        self.size = hub.group.size
        self.job = hub.group.job
        self.timeout = timeout
        self._hub = hub
        self._birth = Birth()
        self._closed = False

    @classmethod
    def world(cls, size: int, timeout: float = DEFAULT_TIMEOUT) -> list[Threads]:
        """The bootstraps of `size` ranks, one for each thread."""
        if size < 1:
            raise BootstrapError(f"a world has at least one rank, not {size}")
        hub = _Hub("world", tuple(range(size)))
        return [cls(hub, rank, timeout) for rank in range(size)]

    def _exchange(self, op: str, data: bytes, timeout: float) -> list[bytes]:
        hub = self._hub
        self._birth.check(self.rank)
        with hub.condition:
            self.check()
            current = hub.group.put(self.rank, op, data)
            if current.result is not None or hub.group.failure is not None:
                hub.condition.notify_all()

            def done() -> bool:
                return current.result is not None or hub.group.failure is not None

            if not hub.condition.wait_for(done, timeout):
                hub.group.expire(current, self.rank, timeout)
                hub.condition.notify_all()
            if current.result is None:
                self.check()
        assert current.result is not None
        return list(current.result)

    def subgroup(self, ranks: Sequence[int], name: str, *, timeout: float | None = None) -> Threads:
        members = self._check_members(ranks)
        with self._hub.condition:
            self.check()  # in here: a group that fails from now on tells its parts
            hub = self._hub.children.setdefault(name, _Hub(name, members, self._hub))
        if hub.ranks != members:
            raise MismatchError(
                f"subgroup {name!r}: rank {self.rank} says its ranks are {members}, another said "
                f"{hub.ranks}",
                rank=self.rank,
            )
        seconds = self.timeout if timeout is None else timeout
        return Threads(hub, members.index(self.rank), seconds)

    def check(self) -> None:
        if self._closed:
            raise ClosedError("this communicator is closed", rank=self.rank)
        if self._hub.group.failure is not None:
            raise self._hub.group.failure.error(self.rank)

    def abort(self, reason: str) -> None:
        self._birth.check(self.rank)
        self._hub.fail(AbortedError, f"rank {self.rank} aborted: {reason}", self.rank)

    def fail(self, error: BaseException) -> None:
        """Tells the others that this rank's thread ends with `error`: their calls raise
        PeerDiedError.
        """
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        self._hub.fail(PeerDiedError, f"rank {self.rank} failed: {text}", self.rank)

    def close(self) -> None:
        if self._birth.in_child():
            return  # whoever held the lock is in the parent
        if not self._closed:
            self._closed = True
            self._hub.leave(self.rank)
