"""What the ways to meet share: calls that all ranks make together, and why a group is broken."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..errors import (
    AbortedError,
    BootstrapError,
    ClosedError,
    CollectiveError,
    DeadlineError,
    MismatchError,
    PeerDiedError,
)


def new_job() -> str:
    """A name that no other group has."""
    return os.urandom(8).hex()


def part_name(job: str, name: str) -> str:
    """What a part of the group `job` is called where all groups meet."""
    return f"group {job}/{name}"


def parent_of(name: str) -> str:
    """The job of the group that `name` is a part of, "" for a world."""
    kind, _, rest = name.partition(" ")
    return rest.partition("/")[0] if kind == "group" else ""


class Failure(NamedTuple):
    """Why a group is broken, in a form that crosses threads and wires; each rank raises an
    exception of its own.
    """

    kind: str
    message: str
    peer: int | None = None

    def error(self, rank: int) -> CollectiveError:
        return _ERRORS.get(self.kind, CollectiveError)(self.message, rank=rank, peer=self.peer)


_ERRORS: dict[str, type[CollectiveError]] = {
    cls.__name__: cls
    for cls in (
        AbortedError,
        BootstrapError,
        ClosedError,
        DeadlineError,
        MismatchError,
        PeerDiedError,
    )
}


def failure_of(cls: type[CollectiveError], message: str, peer: int | None = None) -> Failure:
    return Failure(cls.__name__, message, peer)


def interrupted(op: str, error: BaseException) -> Failure:
    """A call that ended half-way, e.g. at Ctrl-C: this rank is out of step with the others."""
    return failure_of(CollectiveError, f"{op} was interrupted by {type(error).__name__}")


def name_ranks(ranks: Iterable[int]) -> str:
    """ "rank 3", "ranks 0-2, 5", "no rank"."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    if not spans:
        return "no rank"
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans[:16])
    text += ", ..." if len(spans) > 16 else ""
    return f"rank {text}" if text.isdecimal() else f"ranks {text}"


def have(ranks: Sequence[int] | set[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


class Round:
    """One call that all ranks of a group make."""

    def __init__(self, op: str, first: int) -> None:
        self.op = op
        self.first = first  # the rank that called first
        self.data: dict[int, bytes] = {}
        self.result: list[bytes] | None = None


class Group:
    """Which rank has made which call. Knows no threads and no sockets; the hub and the server
    guard and feed it.
    """

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self.job = new_job()
        self.left: set[int] = set()
        self.failure: Failure | None = None
        self._calls = [0] * size
        self._rounds: dict[int, Round] = {}

    def put(self, rank: int, op: str, data: bytes) -> Round:
        """Takes the next call of `rank`; the round that it belongs to may now be complete, or the
        group broken.
        """
        number = self._calls[rank]
        self._calls[rank] += 1
        current = self._rounds.setdefault(number, Round(op, rank))
        if current.op != op:
            self.fail(
                MismatchError,
                f"ranks make different calls: call {number} is {current.op} on rank "
                f"{current.first}, but {op} on rank {rank}",
                rank,
            )
            return current
        current.data[rank] = data
        gone = self.left - current.data.keys()
        if gone:
            self._fail_closed(gone, op)
        elif len(current.data) == self.size:
            current.result = [current.data[r] for r in range(self.size)]
            del self._rounds[number]
        return current

    def leave(self, rank: int) -> None:
        self.left.add(rank)
        for pending in self._rounds.values():
            if rank not in pending.data:
                self._fail_closed({rank}, pending.op)

    def expire(self, late: Round, rank: int, seconds: float) -> None:
        """A rank has waited long enough."""
        missing = set(range(self.size)) - late.data.keys()
        self.fail(
            DeadlineError,
            f"{late.op}: rank {rank} waited {seconds:g} s; {name_ranks(late.data)} of {self.size} "
            f"came, {name_ranks(missing)} {have(missing)} not called it",
            min(missing, default=None),
        )

    def fail(self, cls: type[CollectiveError], message: str, peer: int | None = None) -> None:
        """Breaks the group; the first reason stays."""
        if self.failure is None:
            self.failure = failure_of(cls, message, peer)

    def _fail_closed(self, gone: set[int], op: str) -> None:
        message = f"{op} needs {name_ranks(gone)}, which {have(gone)} closed before"
        self.fail(ClosedError, message, min(gone))


class Base(ABC):
    """The calls of `Bootstrap` on top of one, `_exchange`."""

    kind = ""
    rank: int
    size: int
    job: str
    timeout: float

    @abstractmethod
    def _exchange(self, op: str, data: bytes, timeout: float) -> list[bytes]:
        """The `data` of all ranks that make call `op`, in rank order."""

    def all_gather(
        self, data: bytes, *, timeout: float | None = None, what: str = "all_gather"
    ) -> list[bytes]:
        return self._exchange(what, bytes(data), self.timeout if timeout is None else timeout)

    def broadcast(self, data: bytes, root: int = 0, *, timeout: float | None = None) -> bytes:
        if not 0 <= root < self.size:
            raise CollectiveError(
                f"broadcast: root is {root}; ranks are 0 to {self.size - 1}", rank=self.rank
            )
        mine = bytes(data) if self.rank == root else b""
        return self._exchange(
            f"broadcast from {root}", mine, self.timeout if timeout is None else timeout
        )[root]

    def barrier(self, *, timeout: float | None = None) -> None:
        self._exchange("barrier", b"", self.timeout if timeout is None else timeout)

    def _check_members(self, ranks: Sequence[int]) -> tuple[int, ...]:
        members = tuple(int(rank) for rank in ranks)
        if len(set(members)) != len(members) or not all(0 <= rank < self.size for rank in members):
            raise CollectiveError(
                f"subgroup {members}: ranks must be different and 0 to {self.size - 1}",
                rank=self.rank,
            )
        if self.rank not in members:
            raise CollectiveError(
                f"subgroup {members} lacks this rank, {self.rank}: only members call",
                rank=self.rank,
            )
        return members

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, size={self.size}, job={self.job!r})"
