"""Symmetric memory: arrays that all ranks of a node have mapped, so that calls copy nothing."""

from __future__ import annotations

import itertools
import json
import math
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import _core
from .array import dtype_name, from_pointer
from .bootstrap import Bootstrap
from .errors import ArrayError, ClosedError, CollectiveError

if TYPE_CHECKING:
    from ._core import Communicator as Core

LARGEST = (1 << 63) - 1  # bytes


class _Owner:
    """Keeps a symmetric array's memory, and with it the core, alive."""

    def __init__(self, core: Core) -> None:
        self._core = core


class _Dropped:
    """Segments whose array is gone."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._segments: list[int] = []
        self.closed = False  # no call can be at work in one

    def add(self, segment: int) -> None:
        self._segments.append(segment)
        if self.closed:
            self.release()

    def release(self) -> None:
        while self._segments:
            self._core.release_segment(self._segments.pop())


class SymmetricMemory:
    """The segments of one communicator's symmetric arrays, numbered alike on all ranks.

    An array's segment is given back before the next one is made, if no call is in the queue then,
    or when the communicator is closed: not when Python drops the array, since a call may be reading
    a peer's part meanwhile, by the mapping that goes with it. After `close` it goes with the array.
    """

    def __init__(self, core: Core, bootstrap: Bootstrap) -> None:
        self._core = core
        self._bootstrap = bootstrap
        self._numbers = itertools.count(1)
        self._dropped = _Dropped(core)

    def empty(self, shape: Sequence[int], dtype: Any, kind: str) -> Any:
        """What `Communicator.empty` says, on the host. Collective."""
        name = dtype_name(dtype)
        if any(n < 0 for n in shape):
            raise ValueError(f"shape {tuple(shape)} has negative lengths")
        nbytes = math.prod(shape) * _core.itemsizes[name]
        if nbytes > LARGEST:
            raise ArrayError(f"empty: {nbytes} bytes are more than any machine addresses")
        mine: dict[str, Any] = {"bytes": nbytes, "handle": "", "failure": ""}
        try:
            if self._core.drain(0):
                self._dropped.release()
            mine["handle"] = self._core.make_segment(nbytes)
        except ClosedError:
            raise
        except CollectiveError as error:  # the others are told, rather than left to wait
            mine["failure"] = str(error)
        answers = self._ask(mine)
        self._raise_failures(answers)
        sizes = {a["bytes"] for a in answers}
        if len(sizes) > 1:
            words = ", ".join(f"rank {r}: {a['bytes']} bytes" for r, a in enumerate(answers))
            raise ArrayError(f"empty: the ranks ask for different sizes ({words})")
        segment = next(self._numbers)
        pointer, failure = 0, ""
        try:
            pointer = self._core.open_segment(segment, nbytes, [a["handle"] for a in answers])
        except CollectiveError as error:
            failure = str(error)
        try:
            self._raise_failures(self._ask({"failure": failure}))
        except CollectiveError:
            self._core.release_segment(segment)
            raise
        owner = _Owner(self._core)
        weakref.finalize(owner, self._dropped.add, segment).atexit = False
        return from_pointer(pointer, shape, name, owner=owner, kind=kind)

    def close(self) -> None:
        """Frees what arrays that are gone had; no call of this rank is at work any more."""
        self._dropped.closed = True
        self._dropped.release()

    def _ask(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        return [
            json.loads(b)
            for b in self._bootstrap.all_gather(json.dumps(mine).encode(), what="empty")
        ]

    @staticmethod
    def _raise_failures(answers: list[dict[str, Any]]) -> None:
        words = "; ".join(
            f"rank {r}: {a['failure']}" for r, a in enumerate(answers) if a["failure"]
        )
        if words:
            raise CollectiveError(f"empty: no symmetric memory, on any rank: {words}")
