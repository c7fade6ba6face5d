"""Calls on arrays on a GPU like ones before: by a short way, in half of the host's time."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

from .array import Stream
from .array.recognising import KINDS
from .device import DeviceEngine

Key = tuple[Hashable, ...]
_SOURCE, _TARGET = 4, 5  # of what the core is told
_MOST = 4096  # that are kept


class _Known(NamedTuple):
    """A call that was found right.

    gap     from source to target, in bytes, which may overlap then alone
    nbytes  of both
    """

    options: object
    before: tuple[Any, ...]
    behind: tuple[Any, ...]
    gap: int
    nbytes: tuple[int, int]


class KnownCalls:
    """What the general path has found of calls on the engine's GPU. A key says all that it looked
    at but the addresses: these may be others each time.
    """

    def __init__(self, engine: DeviceEngine) -> None:
        self._engine = engine
        self._known: dict[Key, _Known] = {}

    def call(self, x: Any, out: Any, stream: Any, how: Key, writes: bool = True) -> Key | None:
        """Makes a call and returns () if one like it is known; else the key to `learn` it under,
        None if the arrays or the stream need a closer look. None is made then.

        out     the array that is written; x itself, or None for it
        how     the collective's name, and its other arguments, which may be wrong
        writes  this rank's array is written
        """
        kind = KINDS.get(type(x))
        if kind is None or (mine := kind.glance(x)) is None:
            return None
        engine = self._engine
        pointer, size, dtype, ordinal = mine
        beside = False
        if type(stream) is Stream and stream.ordinal == ordinal:
            handle, beside = stream.handle, stream.beside
        elif stream is None:
            handle = kind.current_stream(ordinal)
        else:
            return None
        target, written = pointer, -1
        if out is not None and out is not x:
            theirs = kind.glance(out) if type(out) is type(x) else None
            if theirs is None or theirs[2] != dtype or theirs[3] != ordinal:
                return None
            target, written = theirs[:2]
        if ordinal != engine.device:
            return None
        key = (dtype, size, written, beside, how)
        try:
            known = self._known.get(key)
        except TypeError:  # an argument that cannot be right
            return None
        if known is None:
            return key
        gap = target - pointer
        if gap != known.gap and (
            -known.nbytes[1] < gap < known.nbytes[0] or known.gap == 0 < known.nbytes[0]
        ):
            return key  # overlaps otherwise, or no longer does: in place may be another algorithm
        arguments = (*known.before, pointer, target, *known.behind)
        engine.run_known(known.options, handle, arguments)
        if writes:
            kind.has_written(x if out is None else out)
        return ()

    def learn(
        self, key: Key, options: object, arguments: tuple[Any, ...], nbytes: tuple[int, int]
    ) -> None:
        """Keeps how a call was made.

        nbytes  of source and target
        """
        before, behind = arguments[:_SOURCE], arguments[_TARGET + 1 :]
        gap = arguments[_TARGET] - arguments[_SOURCE]
        if len(self._known) >= _MOST:
            self._known.clear()
        self._known[key] = _Known(options, before, behind, gap, nbytes)
