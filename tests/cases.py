"""Calls to check, and how to check one: the same for ranks that are threads and for processes.

Every rank makes the inputs of all ranks from the case alone, so that it can compute what it should
get (with reference.py) without asking anybody. `check` runs one case and raises AssertionError
with the case, the place and the values if anything but the expected bytes came back, if the input
changed, or if bytes beside the output did.
"""

from __future__ import annotations

import itertools
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import reference

import collectives as cc
from collectives.config import COLLECTIVES
from collectives.schedule import why_unsupported

Array = np.ndarray[Any, Any]

# Elements; with float32, 96 fill the largest message of two ranks that rides in cache lines.
COUNTS = (0, 1, 2, 3, 5, 17, 63, 64, 65, 95, 96, 97, 1000, 4099)
# Bytes, on both sides of where the ways of moving data change.
SIZES = (384, 385, 32 << 10, (32 << 10) + 1, (128 << 10) + 1, (1 << 20) + 3)
VARIANTS = ("reduce_scatter", "all_gather", "gather", "scatter", "all_to_all")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
_GUARD = 64


class Case(NamedTuple):
    """One call, the same on all ranks.

    count   elements of the whole vector; blocks are made from it
    place   "out": into another array, "in": in place, "new": the call makes its result
    how     "blocking", "async" or "group"
    v       the variant with unequal blocks
    data    "exact": values whose results are exact in any order; "random": any values
    """

    collective: str
    algorithm: str | None = None
    dtype: str = "float32"
    op: str = "sum"
    count: int = 17
    root: int = 0
    order: str | None = None
    place: str = "out"
    how: str = "blocking"
    v: bool = False
    seed: int = 0
    data: str = "exact"


def factor_of(dtype: str) -> complex:
    return 1j if dtype in reference.COMPLEX else 0.5


# ---- what there is to run -----------------------------------------------------------------------


def registry(n: int, nodes: Sequence[int] = ()) -> list[tuple[str, str]]:
    """Every (algorithm, collective) that is registered at this moment and can run on n ranks."""
    return [
        (info.name, collective)
        for info in cc.algorithms()
        for collective in COLLECTIVES
        if not why_unsupported(info.name, collective, n, node=nodes)
    ]


def compositions(n: int, nodes: Sequence[int]) -> list[tuple[str, str]]:
    """Every hierarchical(intra, inter) of registered parts, with what it can do on these nodes."""
    single = [info.name for info in cc.algorithms() if info.name != "hierarchical"]
    return [
        (name, collective)
        for name in (f"hierarchical({inner}, {outer})" for inner in single for outer in single)
        for collective in COLLECTIVES
        if not why_unsupported(name, collective, n, node=nodes)
    ]


def sweep(
    n: int,
    pairs: Iterable[tuple[str | None, str]],
    counts: Sequence[int] = COUNTS,
    nodes: Sequence[int] = (),
    **fixed: Any,
) -> Iterator[Case]:
    """For each (algorithm, collective) and count: in and out of place, over dtypes, ops, roots."""
    for algorithm, collective in pairs:
        start = zlib.crc32(f"{algorithm} {collective} {n}".encode()) % 1000
        if collective == "barrier":
            yield Case(collective, algorithm, **{k: v for k, v in fixed.items() if k == "how"})
            continue
        turn = itertools.count(start)
        for count in counts:
            for place in ("in", "out"):
                i = next(turn)
                dtype, op = reference.PAIRS[i * 37 % len(reference.PAIRS)]
                case = Case(
                    collective,
                    algorithm,
                    dtype=dtype,
                    op=op if collective in reference.REDUCING else "sum",
                    count=count,
                    root=i % n if collective in ROOTED else 0,
                    order="rank" if collective in reference.REDUCING and i % 3 == 0 else None,
                    place="new" if place == "out" and i % 8 == 1 else place,
                    v=collective in VARIANTS and i % 5 == 0,
                    seed=i,
                )._replace(**fixed)
                yield case._replace(v=case.v and not forwards(algorithm, collective, n, nodes))


def forwards(algorithm: str | None, collective: str, n: int, nodes: Sequence[int] = ()) -> bool:
    """Whether blocks of all_to_all go through third ranks, which do not know unequal lengths."""
    if collective != "all_to_all" or algorithm is None:
        return False
    rounds = cc.schedule(algorithm, collective, n, node=nodes).rounds
    return any((t.src, t.dst) != divmod(t.chunk, n) for transfers in rounds for t in transfers)


# ---- data ---------------------------------------------------------------------------------------


def exact_values(rank: int, n: int, count: int, dtype: str, op: str, seed: int) -> Array:
    """Values whose combination over n <= 16 ranks is exact in `dtype`, whatever the order."""
    rng = np.random.default_rng([seed, rank, count])
    kind = reference.DTYPES[dtype]
    if dtype == "bool":
        return rng.integers(0, 2, count).astype(np.bool_)
    if dtype not in reference.FLOATS and dtype not in reference.COMPLEX:
        return rng.integers(0, 256, count * kind.itemsize, np.uint8).view(kind)
    if op == "prod":
        # At most four ranks bring a factor of two, so that no power is out of any dtype's range.
        values = rng.choice([-1.0, 1.0], count)
        if rank < 4:
            values *= rng.choice([1.0, 1.0, 2.0], count)
        if dtype in reference.COMPLEX:
            return (values * rng.choice([1, 1j], count)).astype(kind)
        return values.astype(kind)
    if op in ("min", "max"):
        return rng.integers(-8, 9, count).astype(kind)
    if dtype.startswith("float8"):
        # No more than eight ranks bring something, since nine has no float8_e5m2.
        values = rng.integers(-1, 2, count)
        values[(np.arange(count) + rank) % 2 == 1] *= n <= 8
        return values.astype(kind)
    top = {"bfloat16": 8, "float16": 100, "float32": 1 << 18, "complex64": 1 << 18}
    limit = top.get(dtype, 1 << 40)
    values = rng.integers(-limit, limit + 1, count).astype(np.float64)
    if dtype in reference.COMPLEX:
        return (values + 1j * rng.integers(-limit, limit + 1, count)).astype(kind)
    return values.astype(kind)


def any_bytes(rank: int, count: int, dtype: str, seed: int) -> Array:
    """Any bit patterns, NaNs too: for calls that only move data."""
    kind = reference.DTYPES[dtype]
    rng = np.random.default_rng([seed, rank, count, 1])
    if dtype == "bool":
        return rng.integers(0, 2, count).astype(np.bool_)
    return rng.integers(0, 256, count * kind.itemsize, np.uint8).view(kind)


def random_values(rank: int, count: int, dtype: str, seed: int) -> Array:
    """Any numbers, with ratios of up to 2**24 between them (2**8 in the narrow dtypes)."""
    rng = np.random.default_rng([seed, rank, count, 2])
    kind = reference.DTYPES[dtype]
    spread = 4.0 if dtype in reference.NARROW else 12.0
    values = rng.standard_normal(count) * np.exp2(rng.uniform(-spread, spread, count))
    if dtype in reference.COMPLEX:
        return (values + 1j * rng.permutation(values)).astype(kind)
    return values.astype(kind)


def blocks(case: Case, n: int) -> list[int]:
    """Lengths of the ranks' blocks; for all_to_all, of those that rank 0 sends."""
    if not case.v:
        if case.collective in ("gather", "scatter", "all_to_all"):
            return [-(-case.count // n)] * n
        return reference.lengths(case.count, n)
    return _uneven(case.count, n, case.seed)


def _uneven(count: int, n: int, seed: int) -> list[int]:
    rng = np.random.default_rng([seed, 3])
    cuts = np.sort(rng.integers(0, count + 1, n - 1))
    return [int(c) for c in np.diff([0, *cuts, count])]


def pair_counts(case: Case, n: int) -> list[list[int]]:
    """For all_to_all: counts[s][d] elements go from rank s to rank d."""
    if not case.v:
        return [blocks(case, n)] * n
    return [_uneven(case.count + s, n, case.seed + s) for s in range(n)]


def input_length(case: Case, rank: int, n: int) -> int:
    match case.collective:
        case "all_gather" | "gather":
            return blocks(case, n)[rank]
        case "scatter":
            return sum(blocks(case, n)) if rank == case.root else 0
        case "all_to_all":
            return sum(pair_counts(case, n)[rank])
    return case.count


def make_input(case: Case, rank: int, n: int) -> Array:
    count = input_length(case, rank, n)
    if case.collective not in reference.REDUCING:
        return any_bytes(rank, count, case.dtype, case.seed)
    if case.data == "random" and case.dtype in (*reference.FLOATS, *reference.COMPLEX):
        return random_values(rank, count, case.dtype, case.seed)
    return exact_values(rank, n, count, case.dtype, case.op, case.seed)


def make_expected(case: Case, n: int) -> Sequence[Array | None]:
    xs = [make_input(case, r, n) for r in range(n)]
    factor = factor_of(case.dtype) if case.op == "premul_sum" else None
    match case.collective:
        case "all_reduce":
            return reference.all_reduce(xs, case.op, factor)
        case "reduce":
            return reference.reduce(xs, case.root, case.op, factor)
        case "reduce_scatter":
            return reference.reduce_scatter(xs, case.op, factor, blocks(case, n))
        case "all_gather":
            return reference.all_gather(xs)
        case "broadcast":
            return reference.broadcast(xs, case.root)
        case "gather":
            return reference.gather(xs, case.root)
        case "scatter":
            return reference.scatter(xs[case.root], blocks(case, n))
        case "all_to_all":
            return reference.all_to_all(xs, pair_counts(case, n))
    return [None] * n


_lock = threading.Lock()


@lru_cache(maxsize=8)
def _expected(case: Case, n: int) -> Sequence[Array | None]:
    return make_expected(case, n)


def expected(case: Case, n: int) -> Sequence[Array | None]:
    """What each rank should get. Ranks that are threads share one computation."""
    with _lock:
        return _expected(case._replace(algorithm=None, order=None, place="", how=""), n)


# ---- running one --------------------------------------------------------------------------------


class Guarded:
    """An array with known bytes before and behind it, now and then at an odd address."""

    def __init__(self, count: int, dtype: np.dtype[Any], seed: int) -> None:
        nbytes = count * dtype.itemsize
        begin = _GUARD + (seed % 7 == 0)
        self._raw = np.full(begin + nbytes + _GUARD, 0xA5, np.uint8)
        self.array: Array = self._raw[begin : begin + nbytes].view(dtype)
        self._begin, self._end = begin, begin + nbytes

    def is_intact(self) -> bool:
        outside = (self._raw[: self._begin], self._raw[self._end :])
        return all(bool((part == 0xA5).all()) for part in outside)


def check(comm: Any, case: Case) -> None:
    """Runs the case on this rank, by a communicator or what stands for one. Raises AssertionError
    if the result is not the expected bytes.
    """
    wanted = expected(case, comm.size)[comm.rank]
    try:
        got = run(comm, case)
    except AssertionError as error:
        raise AssertionError(f"rank {comm.rank} of {comm.size}, {case}: {error}") from error
    except Exception as error:
        name = type(error).__name__
        raise AssertionError(
            f"rank {comm.rank} of {comm.size}, {case} raised {name}: {error}"
        ) from error
    if case.op == "prod" and case.dtype in reference.COMPLEX and case.order is None:
        # The sign of a zero part depends on the order.
        got, wanted = (None if x is None else x + 0 for x in (got, wanted))
    words = difference(got, wanted)
    if words:
        raise AssertionError(f"rank {comm.rank} of {comm.size}, {case}: {words}")


def difference(got: Array | None, wanted: Array | None) -> str:
    """Where and how `got` differs in its bytes; "" if it does not."""
    if got is None or wanted is None:
        return "" if got is wanted else f"got {got!r}, expected {wanted!r}"
    if got.dtype != wanted.dtype or got.size != wanted.size:
        return f"got {got.size} x {got.dtype}, expected {wanted.size} x {wanted.dtype}"
    a, b = (np.ascontiguousarray(x).reshape(-1) for x in (got, wanted))
    if a.tobytes() == b.tobytes():
        return ""
    size = a.dtype.itemsize
    unequal = (a.view(np.uint8).reshape(-1, size) != b.view(np.uint8).reshape(-1, size)).any(axis=1)
    at = np.flatnonzero(unequal)
    return f"{len(at)} of {a.size} elements differ, first at {at[0]}: {a[at[0]]} != {b[at[0]]}"


def run_cases(comm: cc.Communicator, cases: Iterable[Case]) -> int:
    """Checks all cases on this rank; returns how many."""
    done = 0
    for case in cases:
        check(comm, case)
        done += 1
    return done


def hammer(comm: cc.Communicator, cases: Iterable[Case], rounds: int = 10) -> int:
    """Runs each case again and again in the same arrays, and spoils them right after each call.

    A peer that still reads this rank's memory, or writes it, after the call has returned is seen.
    """
    done = 0
    for case in cases:
        turns = [case._replace(seed=case.seed + i % 2) for i in range(rounds)]
        wanted = [expected(turn, comm.size)[comm.rank] for turn in turns[:2]]
        sources = [make_input(turn, comm.rank, comm.size) for turn in turns[:2]]
        x = np.empty_like(sources[0])
        out = None if wanted[0] is None else np.empty_like(wanted[0])
        if case.collective == "broadcast":
            out = x
        for i, turn in enumerate(turns):
            x[:] = sources[i % 2]
            got = call(comm, turn, x, out)
            if out is not x:
                x.view(np.uint8)[:] = 0xEE
            words = difference(got, wanted[i % 2])
            if words:
                raise AssertionError(f"rank {comm.rank} of {comm.size}, round {i}, {turn}: {words}")
            if out is not None:
                out.view(np.uint8)[:] = 0xEE
            done += 1
    return done


def on_threads(n: int, cases: Iterable[Case], nodes: Sequence[int] | None = None) -> int:
    """Checks all cases on n ranks that are threads; returns how many."""
    cases = list(cases)
    assert cc.run_threads(n, run_cases, cases, nodes=nodes, timeout=60) == [len(cases)] * n
    return len(cases)


def run(comm: cc.Communicator, case: Case) -> Array | None:
    """Makes the input, calls, and returns a copy of the result; checks what must not change."""
    if case.collective == "barrier":
        _end(comm, case.how, lambda **more: comm.barrier(**more), {})
        return None
    source = make_input(case, comm.rank, comm.size)
    if case.place == "in" or case.collective == "broadcast":
        return _run_in_place(comm, case, source)
    if case.place == "new" and case.collective in ("all_reduce", "reduce"):
        return _run_in_place(comm, case, source)
    kept = source.tobytes()
    out = None
    if case.place == "out":
        wanted = expected(case, comm.size)[comm.rank]
        if wanted is not None:
            out = Guarded(wanted.size, wanted.dtype, case.seed)
    elif case.collective == "scatter" and comm.rank != case.root:
        out = Guarded(blocks(case, comm.size)[comm.rank], source.dtype, case.seed)
    elif case.collective == "all_gather" and not case.v and case.count % comm.size:
        out = Guarded(case.count, source.dtype, case.seed)  # blocks of unequal length
    result = call(comm, case, source, out.array if out is not None else None)
    assert source.tobytes() == kept, "the input changed"
    if out is not None:
        assert result is out.array, "out= was not returned"
        assert out.is_intact(), "bytes beside the output changed"
    return result


def _run_in_place(comm: cc.Communicator, case: Case, source: Array) -> Array | None:
    """In place: x is the output, or this rank's block of the longer of the two."""
    rank, n = comm.rank, comm.size
    name = case.collective
    own = sum(blocks(case, n)[:rank])
    mine = blocks(case, n)[rank]
    if name == "reduce_scatter" and not case.v:
        whole = Guarded(source.size, source.dtype, case.seed)
        whole.array[:] = source
        got = call(comm, case, whole.array, whole.array[own : own + mine])
    elif (name == "all_gather" and not case.v) or (name == "gather" and rank == case.root):
        whole = Guarded(sum(blocks(case, n)), source.dtype, case.seed)
        block = whole.array[own : own + mine]
        block[:] = source
        if case.v:
            block = source  # the variants take no block of out
        got = call(comm, case, block, whole.array)
    elif name in ("scatter", "all_gather", "reduce_scatter") or (name == "all_to_all" and case.v):
        return run(comm, case._replace(place="out"))
    else:
        whole = Guarded(source.size, source.dtype, case.seed)
        whole.array[:] = source
        out = whole.array if name == "all_to_all" else None
        got = call(comm, case, whole.array, out)
        if name == "reduce" and rank != case.root:
            assert whole.array.tobytes() == source.tobytes(), "the input changed"
    assert whole.is_intact(), "bytes beside the array changed"
    return got


def call(comm: cc.Communicator, case: Case, x: Array, out: Array | None) -> Array | None:
    """The call itself."""
    name, n = case.collective, comm.size
    more: dict[str, Any] = {"algorithm": case.algorithm}
    arguments: list[Any] = [x]
    if name in reference.REDUCING:
        more |= {"op": case.op, "order": case.order}
        if case.op == "premul_sum":
            more["factor"] = factor_of(case.dtype)
    if name in ROOTED:
        more["root"] = case.root
    if name != "broadcast":
        more["out"] = out
    if name == "scatter" and comm.rank != case.root:
        arguments = [None]
    if case.v:
        arguments += [blocks(case, n)]
        if name == "all_to_all":
            counts = pair_counts(case, n)
            arguments[1:] = [counts[comm.rank], [row[comm.rank] for row in counts]]
        elif name == "gather":
            more["counts"] = arguments.pop()
        name += "_v"
    method = getattr(comm, name)
    return _end(comm, case.how, lambda **how: method(*arguments, **more, **how), {})


def _end(
    comm: cc.Communicator, how: str, start: Callable[..., Any], more: dict[str, Any]
) -> Array | None:
    if how == "async":
        result: Array | None = start(**more, async_op=True).wait(60)
        return result
    if how == "group":
        with comm.group():
            work = start(**more)
        result = work.wait()
        return result
    result = start(**more)
    return result
