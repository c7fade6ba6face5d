"""Batches: any nesting of tuples and dicts of arrays, whose first axes run over samples."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any


def samples(batch: Any) -> int:
    """The length of the first axis of the first array."""
    while isinstance(batch, (tuple, list, dict)):
        if not batch:
            raise TypeError("an empty batch holds no array; pass None for a rank without data")
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    if not getattr(batch, "shape", ()):
        raise TypeError(
            f"a batch holds arrays whose first axis runs over samples, not {type(batch).__name__}; "
            "pass count=, a function that counts the samples of a batch"
        )
    return int(batch.shape[0])


def cut(batch: Any, low: int, high: int) -> Any:
    """Samples low to high."""
    if isinstance(batch, dict):
        return {key: cut(part, low, high) for key, part in batch.items()}
    if isinstance(batch, tuple):
        return tuple(cut(part, low, high) for part in batch)
    return batch[low:high]


def micro_batches(batch: Any, parts: int) -> list[Any]:
    """A step's batch as `parts` micro-batches, None where one is empty.

    A list is taken as the micro-batches themselves; anything else is split along its first axis, as
    numpy.array_split does.
    """
    if batch is None:
        return [None] * parts
    if isinstance(batch, list):
        if len(batch) != parts:
            raise ValueError(f"a list of {len(batch)} micro-batches, accumulate={parts}")
        return list(batch)
    if parts == 1:
        return [batch]
    total = samples(batch)
    each, extra = divmod(total, parts)
    ends: Sequence[int] = [i * each + min(i, extra) for i in range(parts + 1)]
    return [cut(batch, a, b) if b > a else None for a, b in itertools.pairwise(ends)]
