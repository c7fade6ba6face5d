"""Where this rank's parts of the reduced gradients lie.

Under stages 0 and 1 they are parts of the buckets. Otherwise, or if several reductions are added up
in a step, they have memory of their own: all the time, or where the model lends some, from a step's
first reduction to its end. What torch has for activations serves for gradients then, which come as
activations go.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..array import empty
from .sharding import Shard

if TYPE_CHECKING:
    from .model import Lent

_ALIGNED = 256  # elements: where a shard may begin


class GradientMemory:
    """Sets `grad` of shards.

    own   they have memory of their own
    lend  lend(elements, dtype, device) is memory of the model, None if it has none to lend
    """

    def __init__(self, *, own: bool, lend: Callable[[int, str, str], Lent | None]) -> None:
        self._own = own
        self._lend = lend
        self._lent: list[tuple[Lent, list[Shard]]] = []
        self._there = False

    def serve(self, shards: Sequence[Shard]) -> None:
        """From now on these are the shards."""
        self._lent, self._there = [], False
        kinds: dict[tuple[str, str], list[Shard]] = {}
        for shard in shards:
            if self._own:
                kinds.setdefault((shard.bucket.dtype, shard.bucket.device), []).append(shard)
            else:
                shard.grad = shard.bucket.buffer[shard.low : shard.high]
        for kind, alike in kinds.items():
            # In one piece: what is free for it in one step should be in the next.
            lent = self._lend(sum(map(_room, alike)), *kind)
            if lent is not None:
                self._lent.append((lent, alike))
                continue
            for shard in alike:
                shard.grad = empty((shard.high - shard.low,), *kind)

    def take(self) -> None:
        """A reduction is about to begin, perhaps the first of the step."""
        if self._there:
            return
        self._there = True
        for lent, shards in self._lent:
            whole, moved = lent.take()
            at = 0
            for shard in shards if moved else ():
                shard.grad = whole[at : at + shard.high - shard.low]
                at += _room(shard)

    def give(self) -> None:
        """The step is over, and gradients are needed no more."""
        self._there = False
        for lent, _ in self._lent:
            lent.give()


def _room(shard: Shard) -> int:
    return math.ceil((shard.high - shard.low) / _ALIGNED) * _ALIGNED
