"""The norm of the whole gradient from what each rank holds of it, and who is to blame for none."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..agreement import exchange
from .norms import Spans, sums_of_squares

if TYPE_CHECKING:
    from ..communicator import Communicator
    from .sharding import Store


def gradient_norm(store: Store, unused: frozenset[str]) -> float:
    """The norm of the gradients of all parameters but those that are `unused`: the same bits on all
    ranks; not finite if a gradient is not. Collective over the ranks that share.
    """
    return math.sqrt(float(sums_of_squares(_spans(store, None, unused), 1, store.comm)[0]))


def _spans(
    store: Store, number: Mapping[str, int] | None, unused: Collection[str] = ()
) -> list[Spans]:
    """The gradients of all parameters but those that are `unused`, each in a group of its own by
    `number`, or all in one.
    """
    found = []
    for shard in store.shards:
        if number is None:
            group = np.zeros(len(shard.pieces), np.int64)
        else:
            group = np.array([number[piece.name] for piece in shard.pieces], np.int64)
        span = Spans(shard.grad, shard.lows, shard.highs, group)
        if unused:
            used = np.array([piece.name not in unused for piece in shard.pieces], bool)
            span = Spans(span.values, span.low[used], span.high[used], span.group[used])
        found.append(span)
    return found


def who_is_not_finite(
    comm: Communicator, store: Store, names: Sequence[str], bad: Collection[str]
) -> str:
    """The parameters whose gradients are not finite, and the ranks where they were not before they
    were reduced, in words. Collective.

    names  of all parameters
    bad    those whose gradients were not finite on this rank
    """
    number = {name: i for i, name in enumerate(names)}
    squares = sums_of_squares(_spans(store, number), len(names), store.comm)
    where = exchange(comm, sorted(bad))
    words = []
    for name, square in zip(names, squares, strict=True):
        if not math.isfinite(square):
            ranks = [r for r, there in enumerate(where) if name in there]
            listed = ", ".join(map(str, ranks))
            source = f"rank{'s'[: len(ranks) - 1]} {listed}" if ranks else "no rank alone"
            words.append(f"{name!r} ({source})")
    return ", ".join(words[:8]) + (f" and {len(words) - 8} more" if len(words) > 8 else "")
