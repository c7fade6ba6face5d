"""Batches: any nesting of tuples, lists and dicts of arrays, whose first axes run over samples."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from ..communicator import Communicator


def each_array(batch: Any, do: Callable[[Any], Any]) -> Any:
    """The batch with do(array) in place of each array; dicts, tuples and lists keep their types."""
    if isinstance(batch, dict):
        new = copy.copy(batch)
        if getattr(batch, "__dict__", None) is batch:  # its items are its attributes
            new.__dict__ = new
        for key, part in batch.items():
            new[key] = each_array(part, do)
        return new
    if isinstance(batch, (tuple, list)):
        parts = [each_array(part, do) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return do(batch)


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


def counted(count: Callable[[Any], int], batch: Any) -> int:
    """What `count` counts in a batch. Raises ValueError unless that is a whole number of things."""
    found: Any = count(batch)
    try:
        found = found.item() if hasattr(found, "item") else found  # of a GPU: waited for once
        number = int(found)  # sums of masks are often floats
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = -1
    if number < 0 or number != found:
        raise ValueError(f"count= returned {found!r}; it counts samples or tokens: 0, 1, 2, ...")
    return number


def cut(batch: Any, low: int, high: int) -> Any:
    """Samples low to high. Raises TypeError or ValueError for what has not as many as `samples`."""
    total = samples(batch)

    def part(x: Any) -> Any:
        shape = tuple(getattr(x, "shape", ()))
        if not shape:
            raise TypeError(
                f"a batch that is split holds a {type(x).__name__} without samples; {_UNCUT}"
            )
        if shape[0] != total:
            raise ValueError(
                f"a batch of {total} samples that is split holds an array of {shape}; {_UNCUT}"
            )
        return x[low:high]

    return each_array(batch, part)


_UNCUT = "with accumulate, pass a list of the micro-batches themselves"


def micro_batches(batch: Any, parts: int) -> list[Any]:
    """A step's batch as `parts` micro-batches, None where one is empty.

    A list of batches (tuples, dicts, lists, None) is taken as the micro-batches themselves;
    anything else, also a list of arrays, as torch's DataLoader makes, is one batch. It is split
    along its first axis, as numpy.array_split does.
    """
    if batch is None:
        return [None] * parts
    if isinstance(batch, list) and not any(hasattr(part, "shape") for part in batch):
        if len(batch) != parts:
            raise ValueError(f"a list of {len(batch)} micro-batches, accumulate={parts}")
        return list(batch)
    if parts == 1:
        return [batch]
    total = samples(batch)
    each, extra = divmod(total, parts)
    ends: Sequence[int] = [i * each + min(i, extra) for i in range(parts + 1)]
    return [cut(batch, a, b) if b > a else None for a, b in itertools.pairwise(ends)]


def joined(comm: Communicator, batches: Iterable[Any]) -> Iterator[Any]:
    """Yields `batches`, then None until every rank is through. Collective."""
    source = iter(batches)
    done = object()
    while True:
        batch = next(source, done)
        more = np.array([batch is not done], np.uint8)
        if not comm.all_reduce(more, "max")[0]:
            return
        yield None if batch is done else batch
