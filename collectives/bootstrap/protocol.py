"""What every way for ranks to meet offers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Bootstrap(Protocol):
    """What a communicator needs of the way its ranks met.

    kind     "solo", "threads", "mpi" or "tcp"
    rank     this rank, 0 to size - 1
    size     number of ranks
    job      the same text on all ranks of this group, and different for any other group: a prefix
             for names
    timeout  seconds that a call waits at most, unless it is told otherwise

    All calls are collective over the group. They raise DeadlineError when a rank does not call in
    time, PeerDiedError when one is gone, ClosedError when one has closed, AbortedError when one has
    aborted, MismatchError when ranks make different calls. After any of these the group is broken:
    all later calls raise the same. One thread at a time.
    """

    kind: str
    rank: int
    size: int
    job: str
    timeout: float

    def all_gather(
        self, data: bytes, *, timeout: float | None = None, what: str = "all_gather"
    ) -> list[bytes]:
        """The `data` of all ranks, in rank order; lengths may differ.

        `what` names the call that it is for: ranks that differ in it are told so.
        """
        ...

    def broadcast(self, data: bytes, root: int = 0, *, timeout: float | None = None) -> bytes:
        """The `data` of `root`; that of the others is ignored."""
        ...

    def barrier(self, *, timeout: float | None = None) -> None:
        """Returns when all ranks have called."""
        ...

    def subgroup(
        self, ranks: Sequence[int], name: str, *, timeout: float | None = None
    ) -> Bootstrap:
        """A group of some of the ranks, in the order given; only they call.

        `name` must be equal on all of them, and used once in the lifetime of this group.
        """
        ...

    def check(self) -> None:
        """Raises if the group is known to be broken; never waits."""
        ...

    def abort(self, reason: str) -> None:
        """Breaks the group: pending and later calls of all ranks raise AbortedError (mpi: of this
        rank only).
        """
        ...

    def close(self) -> None:
        """Leaves the group. Others may leave later; calls that need this rank raise ClosedError."""
        ...


def ask(bootstrap: Bootstrap, mine: Any) -> list[Any]:
    """What all ranks say, in rank order; anything that JSON holds. Collective."""
    return [json.loads(b) for b in bootstrap.all_gather(json.dumps(mine).encode())]
