"""Symmetric memory: arrays that all ranks of a node have mapped, so that calls copy nothing."""

from __future__ import annotations

import itertools
import json
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _core
from .array import dtype_name, from_pointer
from .bootstrap import Bootstrap
from .errors import ArrayError

if TYPE_CHECKING:
    from ._core import Communicator as Core


class _Owner:
    """Keeps a symmetric array's memory, and with it the core, alive."""

    def __init__(self, core: Core) -> None:
        self._core = core


class SymmetricMemory:
    """The segments of one communicator's symmetric arrays, numbered alike on all ranks.

    An array's segment is given back when the next one is made, and not when Python drops the array,
    which may happen in the middle of a call.
    """

    def __init__(self, core: Core, bootstrap: Bootstrap) -> None:
        self._core = core
        self._bootstrap = bootstrap
        self._numbers = itertools.count(1)
        self._dropped: list[int] = []  # segments whose array is gone

    def empty(self, shape: Sequence[int], dtype: Any, kind: str) -> Any:
        """What `Communicator.empty` says, on the host. Collective."""
        name = dtype_name(dtype)
        if any(n < 0 for n in shape):
            raise ValueError(f"shape {tuple(shape)} has negative lengths")
        nbytes = int(np.prod(shape, dtype=np.int64)) * _core.itemsizes[name]
        mine = {"bytes": nbytes, "handle": self._core.make_segment(nbytes)}
        said = self._bootstrap.all_gather(json.dumps(mine).encode(), what="empty")
        answers = [json.loads(b) for b in said]
        sizes = {a["bytes"] for a in answers}
        if len(sizes) > 1:
            words = ", ".join(f"rank {r}: {a['bytes']} bytes" for r, a in enumerate(answers))
            raise ArrayError(f"empty: the ranks ask for different sizes ({words})")
        while self._dropped:
            self._core.release_segment(self._dropped.pop())
        segment = next(self._numbers)
        pointer = self._core.open_segment(segment, nbytes, [a["handle"] for a in answers])
        owner = _Owner(self._core)
        weakref.finalize(owner, self._dropped.append, segment).atexit = False
        self._bootstrap.barrier()
        return from_pointer(pointer, shape, name, owner=owner, kind=kind)
