"""Where this rank's parts of the reduced gradients lie.

Under stages 0 and 1 they are parts of the buckets. Otherwise, or if several reductions are added up
in a step, they have memory of their own: all the time, or where the model lends some, from a step's
first reduction to its end. What torch has for activations serves for gradients then, which come as
activations go.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..array import empty
from ..lent_memory import Lend, Pieces
from .sharding import Shard


class GradientMemory:
    """Sets `grad` of shards.

    own   they have memory of their own
    lend  lends it
    """

    def __init__(self, *, own: bool, lend: Lend) -> None:
        self._own = own
        self._lend = lend
        self._shards: list[tuple[Pieces, list[Shard]]] = []

    def serve(self, shards: Sequence[Shard]) -> None:
        """From now on these are the shards."""
        self._shards = []
        kinds: dict[tuple[str, str], list[Shard]] = {}
        for shard in shards:
            if self._own:
                kinds.setdefault((shard.bucket.dtype, shard.bucket.device), []).append(shard)
            else:
                shard.grad = shard.bucket.buffer[shard.low : shard.high]
        for kind, alike in kinds.items():
            counts = [shard.high - shard.low for shard in alike]
            pieces = Pieces(counts, kind, self._lend, empty)
            self._shards.append((pieces, alike))
            _spread(pieces.arrays, alike)

    @property
    def nbytes(self) -> int:
        """Of memory of their own that they have all the time."""
        return sum(pieces.kept_bytes for pieces, _ in self._shards)

    def take(self) -> None:
        """A reduction is about to begin, perhaps the first of the step."""
        for pieces, shards in self._shards:
            if pieces.take():
                _spread(pieces.arrays, shards)

    def give(self) -> None:
        """The step is over, and gradients are needed no more."""
        for pieces, _ in self._shards:
            pieces.give()


def _spread(arrays: Sequence[Any], shards: Sequence[Shard]) -> None:
    for shard, array in zip(shards, arrays, strict=False):  # none yet, where they are lent
        shard.grad = array
