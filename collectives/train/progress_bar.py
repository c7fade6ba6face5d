"""Batches for a trainer, with a line on rank 0's terminal about the steps that it takes on them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sized
from typing import TYPE_CHECKING, Any

from .progress import Bar

if TYPE_CHECKING:
    from .data_parallel import Trainer


def with_bar(trainer: Trainer, batches: Iterable[Any], total: int | None) -> Iterator[Any]:
    """Yields `batches` as `Trainer.join` does.

    total  how many there are; their length, if they have one, where it is None
    """
    if total is None and isinstance(batches, Sized):
        with contextlib.suppress(TypeError):  # a loader of an iterable data set has none to tell
            total = len(batches)
    bar = Bar(total, trainer.comm.rank)
    try:
        for batch in trainer.join(batches):
            yield batch
            bar.step(trainer.last, trainer.global_batch)
    finally:
        bar.close()
