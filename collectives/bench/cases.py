"""A collective on given buffers: which arrays it takes, what they hold, and what must come out.

The data are whole numbers so small that every sum is exact in the dtype, whatever the order, so
results are compared for equality, those of avg too: it rounds once, where it divides the sum. Each
rank's vector is a random pattern of `PERIOD` numbers, repeated. The period is a prime, so data that
end at a wrong place differ from what is expected there, and a reference costs one pattern, not one
vector.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from .. import _core
from ..array import numpy_dtype
from ..communicator import Communicator

PERIOD = 65521
FACTOR = 2.0  # of premul_sum

REDUCING = ("all_reduce", "reduce_scatter", "reduce")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
BLOCKED = ("reduce_scatter", "all_gather", "gather", "scatter", "all_to_all")

# In place and out of place: what the call of each collective can do. all_to_all copies its input
# first where it is the output too, so that is no other way to time.
_PLACES: dict[str, tuple[bool, ...]] = {
    "broadcast": (True,),
    "all_to_all": (False,),
    "barrier": (False,),
}

# Whole numbers up to here are exact.
_EXACT = {
    "float16": 1 << 11,
    "bfloat16": 1 << 8,
    "float32": 1 << 24,
    "float64": 1 << 53,
    "float8_e4m3": 1 << 4,
    "float8_e5m2": 1 << 3,
    "complex64": 1 << 24,
    "complex128": 1 << 53,
    "bool": 1,
}
_EPSILON = {
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "float32": 2.0**-23,
    "float64": 2.0**-52,
    "float8_e4m3": 2.0**-3,
    "float8_e5m2": 2.0**-2,
    "complex64": 2.0**-23,
    "complex128": 2.0**-52,
}
_LARGEST = 100  # of the numbers that ranks contribute
_GARBAGE = 0x5A  # in outputs before the call


def places(collective: str) -> tuple[bool, ...]:
    """The values of `in_place` that make a difference: out of place first."""
    return _PLACES.get(collective, (False, True))


@dataclass(frozen=True)
class Case:
    """What is called: a collective with its dtype, op and root, on `size` ranks."""

    collective: str
    size: int
    dtype: str = "float32"
    op: str = "sum"
    root: int = 0

    @property
    def itemsize(self) -> int:
        return int(_core.itemsizes[self.dtype])

    def elements(self, nbytes: int) -> int:
        """Elements of the whole vector (of all blocks together) for about `nbytes`: a multiple of
        the number of ranks where there are blocks, and at least one element each.
        """
        if self.collective == "barrier":
            return 0
        count = max(1, nbytes // self.itemsize)
        if self.collective in BLOCKED:
            count = max(1, count // self.size) * self.size
        return count

    def count(self, elements: int) -> int:
        """What nccl-tests calls count: elements of one rank's block where there are blocks."""
        return elements // self.size if self.collective in BLOCKED else elements


class Memory(Protocol):
    """How a case reaches the elements of its arrays. An array has a length and a dtype, can be
    sliced, and viewed as another dtype.
    """

    def writing(self, array: Any) -> AbstractContextManager[np.ndarray[Any, Any]]:
        """A numpy array to fill; what is in it at the end of the block is in `array` after it."""
        ...

    def reading(self, array: Any) -> np.ndarray[Any, Any]:
        """The elements of `array`."""
        ...

    def set(self, array: Any, byte: int) -> None:
        """Makes every byte of `array` this one."""
        ...

    def given(self, array: Any) -> Any:
        """What a user would pass for `array`."""
        ...


class HostMemory:
    """numpy's own memory."""

    def writing(self, array: Any) -> AbstractContextManager[np.ndarray[Any, Any]]:
        return nullcontext(array)

    def reading(self, array: Any) -> np.ndarray[Any, Any]:
        return np.asarray(array)

    def set(self, array: Any, byte: int) -> None:
        array.view(np.uint8)[:] = byte

    def given(self, array: Any) -> Any:
        return array


class Areas(Protocol):
    """Two areas of bytes that the arrays of all sizes lie in."""

    memory: Memory
    first: Any
    second: Any


class Buffers:
    """Two areas of host memory that the arrays of all sizes lie in, so that pages are touched once.

    They begin at a page, as those of OSU's benchmarks do. Collective if `symmetric`.
    """

    memory: Memory = HostMemory()

    def __init__(self, comm: Communicator, nbytes: int, *, symmetric: bool = False) -> None:
        nbytes = max(1, nbytes)
        if symmetric:
            self.first = comm.empty((nbytes,), "uint8")
            self.second = comm.empty((nbytes,), "uint8")
        else:
            self.first = _page_aligned(nbytes)
            self.second = _page_aligned(nbytes)
        self.first[:] = 0
        self.second[:] = 0


def _page_aligned(nbytes: int, page: int = 4096) -> np.ndarray[Any, Any]:
    raw = np.empty(nbytes + page, np.uint8)
    start = -raw.ctypes.data % page
    return raw[start : start + nbytes]


class Piece(NamedTuple):
    """Elements `start` to `start + length` of the output must be `pattern`, from `phase` on."""

    start: int
    length: int
    pattern: np.ndarray[Any, Any]
    phase: int


@dataclass
class Bound:
    """A case on this rank's arrays.

    x, out      input and output; the same memory, or one in the other, in place
    touched     what a timed loop rewrites before each call
    """

    case: Case
    rank: int
    elements: int
    in_place: bool
    x: Any
    out: Any
    kwargs: dict[str, Any] = field(default_factory=dict)
    memory: Memory = Buffers.memory

    @property
    def nbytes(self) -> int:
        return self.elements * self.case.itemsize

    @property
    def touched(self) -> Any:
        idle = self.case.collective == "scatter" and self.rank != self.case.root
        return None if idle or self.case.collective == "barrier" else self.x

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of the communicator's method for this call."""
        case, kwargs, given = self.case, dict(self.kwargs), self.memory.given
        at_root = self.rank == case.root
        if case.collective == "barrier":
            return (), kwargs
        if case.collective in REDUCING:
            if case.op != "sum":
                kwargs["op"] = case.op
            if case.op == "premul_sum":
                kwargs["factor"] = FACTOR
        if case.collective in ROOTED:
            kwargs["root"] = case.root
        if case.collective == "all_reduce" or (case.collective == "reduce" and at_root):
            if not self.in_place:
                kwargs["out"] = given(self.out)
        elif case.collective in ("reduce_scatter", "all_gather", "scatter", "all_to_all") or (
            case.collective == "gather" and at_root
        ):
            kwargs["out"] = given(self.out)
        x = None if case.collective == "scatter" and not at_root else given(self.x)
        return (x,), kwargs

    def fill(self) -> None:
        """Input from the pattern, garbage where the output goes."""
        if self.case.collective == "barrier":
            return
        self.memory.set(self.out, 1 if self.case.dtype == "bool" else _GARBAGE)
        case = self.case
        if case.collective == "broadcast" and self.rank != case.root:
            return
        if case.collective == "scatter" and self.rank != case.root:
            return
        with self.memory.writing(self.x) as x:
            _tile(x, contribution(case, self.rank))

    def clear(self) -> None:
        """Zeros, which stay zeros however often they are combined: no overflow in a timed loop."""
        for array in (self.x, self.out):
            self.memory.set(array, 0)

    def wrong(self, *, rough: bool = False) -> int:
        """How many elements of the output are not what they must be.

        rough  avg may round in every step, as it does where contributions are divided one by one
        """
        pieces = list(self._expected())
        if not pieces:
            return 0
        out = self.memory.reading(self.out)
        rough = rough and self.case.op == "avg" and self.case.collective in REDUCING
        return sum(_differ(out, piece, self.case, rough) for piece in pieces)

    def _expected(self) -> Iterator[Piece]:
        case, n, rank = self.case, self.case.size, self.rank
        block = self.elements // n if n else 0
        if case.collective == "all_reduce" or (case.collective == "reduce" and rank == case.root):
            yield Piece(0, self.elements, combined(case), 0)
        elif case.collective == "reduce_scatter":
            yield Piece(0, block, combined(case), rank * block)
        elif case.collective == "all_gather" or (case.collective == "gather" and rank == case.root):
            for r in range(n):
                yield Piece(r * block, block, contribution(case, r), 0)
        elif case.collective == "broadcast":
            yield Piece(0, self.elements, contribution(case, case.root), 0)
        elif case.collective == "scatter":
            yield Piece(0, block, contribution(case, case.root), rank * block)
        elif case.collective == "all_to_all":
            for r in range(n):
                yield Piece(r * block, block, contribution(case, r), rank * block)


def bind(
    case: Case, rank: int, elements: int, in_place: bool, buffers: Areas, **kwargs: Any
) -> Bound:
    """`case` on `elements` elements of `buffers`; further arguments go to the communicator."""
    dtype = numpy_dtype(case.dtype)
    nbytes = elements * case.itemsize
    first, second = buffers.first[:nbytes].view(dtype), buffers.second[:nbytes].view(dtype)
    block = elements // case.size
    own = slice(rank * block, (rank + 1) * block)
    x, out = first, first if in_place else second
    at_root = rank == case.root
    if case.collective == "reduce_scatter":
        out = first[own] if in_place else second[:block]
    elif case.collective == "all_gather" or (case.collective == "gather" and at_root):
        x = first[own] if in_place else first[:block]
    elif case.collective == "gather":
        x, out = first[:block], second[:0]
    elif case.collective == "scatter":
        out = first[own] if in_place and at_root else second[:block]
    elif case.collective == "reduce" and not at_root:
        out = second
    elif case.collective == "barrier":
        x = out = first[:0]
    return Bound(case, rank, elements, in_place, x, out, kwargs, buffers.memory)


# ---- data ----------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def contribution(case: Case, rank: int) -> np.ndarray[Any, Any]:
    """The pattern that `rank` repeats."""
    rng = np.random.default_rng((20, rank, case.root))
    dtype = numpy_dtype(case.dtype)
    signed = dtype.kind != "u" and case.dtype != "bool"
    exact = _EXACT.get(case.dtype) or int(np.iinfo(dtype).max)
    op = case.op if case.collective in REDUCING else "max"
    place = np.arange(PERIOD)
    if case.dtype == "bool":
        return rng.integers(0, 2, PERIOD).astype(bool)
    if op in ("band", "bor", "bxor"):
        return rng.integers(0, 256, PERIOD * dtype.itemsize, dtype=np.uint8).view(dtype)
    if op == "prod":
        # Twos of at most three ranks at any place: products up to 8, exact in every dtype.
        two = ((place + rank) % max(case.size, 1) < 3) & (rng.integers(0, 2, PERIOD) == 1)
        values = np.where(two, 2, 1).astype(np.complex128 if dtype.kind == "c" else np.int64)
        if dtype.kind == "c":
            values[(place + rank) % 5 == 0] *= 1j
        return values.astype(dtype)
    adds = op in ("sum", "avg", "premul_sum")
    limit = exact // 2 if op == "premul_sum" else exact
    high = min(_LARGEST, limit // case.size if adds else limit)
    if high < 1:  # more ranks than the dtype can count: as many as it can have a one at each place
        here = (place + rank) % case.size < limit
        return (here & (rng.integers(0, 2, PERIOD) == 1)).astype(dtype)
    values = rng.integers(-high if signed else 0, high + 1, PERIOD).astype(np.float64)
    if dtype.kind == "c":
        return (values + 1j * rng.integers(-high, high + 1, PERIOD)).astype(dtype)
    return values.astype(dtype)


@functools.lru_cache(maxsize=8)
def combined(case: Case) -> np.ndarray[Any, Any]:
    """The pattern of the result: what numpy makes of the ranks' patterns."""
    wide = _wide(case.dtype)
    total = contribution(case, 0).astype(wide)
    step = {
        "prod": np.multiply,
        "min": np.minimum,
        "max": np.maximum,
        "band": np.bitwise_and,
        "bor": np.bitwise_or,
        "bxor": np.bitwise_xor,
    }.get(case.op, np.add)
    for r in range(1, case.size):
        total = step(total, contribution(case, r).astype(wide))
    if case.op == "premul_sum":
        total = total * FACTOR
    if case.op == "avg":
        # By parts: numpy multiplies complex numbers by the reciprocal.
        total = (total.view(np.float64) / case.size).view(wide)
    return total.astype(numpy_dtype(case.dtype))


def _wide(dtype: str) -> Any:
    if dtype == "bool":
        return bool
    kind = numpy_dtype(dtype).kind
    return {"i": np.int64, "u": np.uint64, "c": np.complex128}.get(kind, np.float64)


def _tile(target: np.ndarray[Any, Any], pattern: np.ndarray[Any, Any]) -> None:
    whole = len(target) // PERIOD * PERIOD
    target[:whole].reshape(-1, PERIOD)[:] = pattern
    target[whole:] = pattern[: len(target) - whole]


def _differ(out: np.ndarray[Any, Any], piece: Piece, case: Case, rough: bool) -> int:
    """Elements of `out` that are not those of the piece."""
    got = out[piece.start : piece.start + piece.length]
    pattern = np.roll(piece.pattern, -(piece.phase % PERIOD))
    wide = _wide(case.dtype)
    wrong = 0
    step = 16 * PERIOD  # so that what is in between stays small
    for begin in range(0, len(got), step):
        part = got[begin : begin + step]
        whole = len(part) // PERIOD * PERIOD
        for mine, expected in (
            (part[:whole].reshape(-1, PERIOD), pattern),
            (part[whole:], pattern[: len(part) - whole]),
        ):
            if rough:
                largest = float(np.abs(pattern.astype(wide)).max())
                near = _EPSILON[case.dtype] * case.size * max(1.0, largest)
                error = np.abs(mine.astype(wide) - expected.astype(wide))
                wrong += int(np.count_nonzero(~(error <= near)))
            else:
                wrong += int(np.count_nonzero(mine != expected))
    return wrong


# ---- calls ---------------------------------------------------------------------------------------


class Prepared(NamedTuple):
    """A call as the core takes it.

    arguments  the numbers that the core gets
    keep       what must stay alive while it may be called
    """

    arguments: tuple[Any, ...]
    keep: Any


class _NeverRun:
    """In place of the core's work of a call that was recorded."""

    def done(self) -> bool:
        return True


def prepare(comm: Communicator, bound: Bound) -> Prepared:
    """What `comm` would hand to the core for this call; nothing runs.

    Raises what the call would raise: ArrayError, UnsupportedError, ...
    """
    recorded: list[tuple[Any, ...]] = []

    def record(*arguments: Any) -> _NeverRun:
        recorded.append(arguments)
        return _NeverRun()

    args, kwargs = bound.arguments()
    submit, comm._submit = comm._submit, record
    try:
        work = getattr(comm, bound.case.collective)(*args, async_op=True, **kwargs)
    finally:
        comm._submit = submit
    return Prepared(recorded[0], (work, bound))


def as_user(comm: Communicator, bound: Bound) -> Callable[[], Any]:
    """The call through the communicator's method, written as a user writes it."""
    args, kwargs = bound.arguments()
    return functools.partial(getattr(comm, bound.case.collective), *args, **kwargs)


def call(comm: Communicator, bound: Bound) -> None:
    """Makes that call once."""
    as_user(comm, bound)()
