"""Calls whose results every rank knows: whole numbers, exact in any dtype and order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from ..communicator import Communicator


class WrongResult(AssertionError):
    """A call returned something else than it must."""


def _values(rank: int, count: int, dtype: str) -> Any:
    return ((np.arange(count) + 3 * rank) % 7).astype(dtype)


def call(
    comm: Communicator, collective: str, count: int, dtype: str, **how: Any
) -> tuple[Any, Any]:
    """Makes a call; what it returned, and what it must."""
    n, rank = comm.size, comm.rank
    count = count // n * n if collective in ("reduce_scatter", "all_to_all", "scatter") else count
    all_of = [_values(r, count, dtype) for r in range(n)]
    x = all_of[rank].copy()
    total = sum(v.astype("int64") for v in all_of).astype(dtype)  # at most 6 * n: fits a uint8
    k = count // n
    if collective == "all_reduce":
        return comm.all_reduce(x, **how), total
    if collective == "reduce":
        return comm.reduce(x, root=n - 1, **how), total if rank == n - 1 else None
    if collective == "reduce_scatter":
        return comm.reduce_scatter(x, **how), total[rank * k : (rank + 1) * k]
    if collective == "all_gather":
        return comm.all_gather(x, **how), np.concatenate(all_of)
    if collective == "broadcast":
        return comm.broadcast(x, root=n - 1, **how), all_of[n - 1]
    parts = [v[rank * k : (rank + 1) * k] for v in all_of]
    return comm.all_to_all(x, **how), np.concatenate(parts)


def check(got: Any, expected: Any, what: str) -> None:
    """Raises WrongResult unless they are equal."""
    if expected is None:
        return
    if not np.array_equal(np.asarray(got), expected):
        wrong = np.flatnonzero(np.asarray(got) != expected)
        at = int(wrong[0]) if wrong.size else -1
        raise WrongResult(
            f"{what}: {wrong.size} of {expected.size} elements are wrong, the first at {at}: "
            f"{np.asarray(got)[at]!r} instead of {expected[at]!r}"
        )


def everything(comm: Communicator) -> None:
    """Every collective of a plan, small and large, and a barrier."""
    from .plan import COLLECTIVES

    for collective in COLLECTIVES:
        for count in (12, 9_000):
            got, expected = call(comm, collective, count, "int32")
            check(got, expected, f"{collective} of {count} on {comm.size} ranks")
    comm.barrier()
