"""Memory that is needed at times only, and that its owner uses for something else in between."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

_ALIGNED = 256  # elements: where a piece may begin


class Lent(Protocol):
    """Memory of somebody else, for as long as it can be spared."""

    def take(self) -> tuple[Any, bool]:
        """An array of it, 1-d; True if that lies elsewhere than the last one, or is the first."""

    def give(self) -> None:
        """It is needed no more, once what is on the owner's stream by now is done."""


# lend(elements, dtype, device): None where there is no such memory.
Lend = Callable[[int, str, str], Lent | None]


class Pieces:
    """Arrays of `counts` elements of one kind, a dtype and a device. They are lent in one piece,
    since what is free for it once should be again; or made, where none is lent, by
    make(count, dtype, device).
    """

    def __init__(
        self,
        counts: Sequence[int],
        kind: tuple[str, str],
        lend: Lend,
        make: Callable[..., Any],
    ) -> None:
        self.counts = list(counts)
        self.arrays: list[Any] = []
        rooms = [math.ceil(count / _ALIGNED) * _ALIGNED for count in counts]
        self._starts = [sum(rooms[:i]) for i in range(len(rooms))]
        self._there = False
        self._lent = lend(sum(rooms), *kind)
        if self._lent is None:
            self.arrays = [make(count, *kind) for count in counts]

    def take(self) -> bool:
        """The arrays are needed; True if they are others than before."""
        if self._there or self._lent is None:
            return False
        whole, moved = self._lent.take()
        self._there = True
        if moved:
            self.arrays = [
                whole[start : start + count]
                for start, count in zip(self._starts, self.counts, strict=True)
            ]
        return moved

    @property
    def kept_bytes(self) -> int:
        """What is never given back."""
        return sum(x.nbytes for x in self.arrays) if self._lent is None else 0

    def give(self) -> None:
        """They are needed no more."""
        if self._lent is not None and self._there:
            self._there = False
            self._lent.give()
