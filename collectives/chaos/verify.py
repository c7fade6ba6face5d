"""Calls whose results every rank knows: whole numbers, exact in any dtype and order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from ..communicator import Communicator

# How calls on GPUs are made: put on a stream one by one, or captured into a graph that is launched
# again and again; on arrays of this rank, or on symmetric buffers.
WAYS = ("stream", "graph", "symmetric", "symmetric graph")


class WrongResult(AssertionError):
    """A call returned something else than it must."""


class Call(NamedTuple):
    """A call.

    way   one of WAYS on GPUs, where "" is the first; hosts have but one
    room  elements that the arrays of a rank have at least, of which the call takes `elements`
    """

    collective: str
    elements: int
    dtype: str
    algorithm: str | None = None
    async_op: bool = False
    way: str = ""
    room: int = 0

    def options(self, size: int) -> dict[str, Any]:
        """Keywords of the communicator's method, on `size` ranks; the last one is the root."""
        root = {"root": size - 1} if self.collective in ("reduce", "broadcast") else {}
        return {"algorithm": self.algorithm, "async_op": self.async_op, **root}


class Prepared(Protocol):
    """A call that is made once or more often, one after the other."""

    def start(self) -> None:
        """Makes the call."""

    def finish(self, what: str) -> None:
        """Waits for it; raises what went wrong in it, and WrongResult."""


class Arrays(Protocol):
    """Where the arrays of calls lie."""

    def prepare(self, comm: Communicator, call: Call) -> Prepared:
        """Makes the arrays of a call. Collective."""

    def check_usable(self) -> None:
        """Raises if this rank cannot use its memory any more. Local."""


def _values(rank: int, count: int, dtype: str) -> Any:
    return ((np.arange(count) + 3 * rank) % 7).astype(dtype)


def numbers(call: Call, rank: int, n: int) -> tuple[Any, Any]:
    """What a rank of `n` passes, and what it must get; None where it gets nothing."""
    collective, count, dtype = call.collective, call.elements, call.dtype
    count = count // n * n if collective in ("reduce_scatter", "all_to_all") else count
    all_of = [_values(r, count, dtype) for r in range(n)]
    x = all_of[rank]
    total = sum(v.astype("int64") for v in all_of).astype(dtype)  # at most 6 * n: fits a uint8
    k = count // n
    if collective == "all_reduce":
        return x, total
    if collective == "reduce":
        return x, total if rank == n - 1 else None
    if collective == "reduce_scatter":
        return x, total[rank * k : (rank + 1) * k]
    if collective == "all_gather":
        return x, np.concatenate(all_of)
    if collective == "broadcast":
        return x, all_of[n - 1]
    return x, np.concatenate([v[rank * k : (rank + 1) * k] for v in all_of])


class OnHost:
    """Arrays of numpy."""

    def prepare(self, comm: Communicator, call: Call) -> Prepared:
        return _OnHost(comm, call)

    def check_usable(self) -> None:
        pass


class _OnHost:
    def __init__(self, comm: Communicator, call: Call) -> None:
        self._comm, self._call = comm, call
        self._x, self._expected = numbers(call, comm.rank, comm.size)
        self._got: Any = None

    def start(self) -> None:
        method = getattr(self._comm, self._call.collective)
        self._got = method(self._x.copy(), **self._call.options(self._comm.size))

    def finish(self, what: str) -> None:
        got = self._got.wait() if self._call.async_op else self._got
        check(got, self._expected, what)


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


def once(on: Arrays, comm: Communicator, call: Call, what: str) -> None:
    """Makes a call, and checks its result."""
    prepared = on.prepare(comm, call)
    prepared.start()
    prepared.finish(what)


def everything(on: Arrays, comm: Communicator) -> None:
    """Every collective of a plan, small and large, and a barrier."""
    from .plan import COLLECTIVES

    for collective in COLLECTIVES:
        for count in (12, 9_000):
            what = f"{collective} of {count} on {comm.size} ranks"
            once(on, comm, Call(collective, count, "int32"), what)
    comm.barrier()
