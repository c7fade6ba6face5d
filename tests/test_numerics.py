"""The numerics contract: all ranks end with the same bits, runs repeat bit for bit, order="rank"
depends on nothing but the contributions, and every algorithm's error stays within its bound.

The data are meant to be hard: subnormals, zeros of both signs, infinities, NaNs with payloads, and
magnitudes from the smallest to the largest of the dtype. Of a NaN, its sign and payload must agree
between ranks too.
"""

from __future__ import annotations

import cases
import numpy as np
import pytest
import reference

import collectives as cc

HARD = ("float16", "bfloat16", "float32", "float64", "float8_e4m3", "float8_e5m2")
OPS = ("sum", "avg", "prod", "min", "max", "premul_sum")
WORLDS = (1, 2, 3, 4, 5, 6, 7, 8, 9)
# Unit roundoff: half a unit in the last place of 1.
ROUNDOFF = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 2**-24, "float64": 2**-53}


def hard_values(rank, count, dtype, seed):
    """A third any bit pattern, a third special values, a third numbers of like magnitude."""
    rng = np.random.default_rng([seed, rank, 4])
    kind = reference.DTYPES[dtype]
    patterns = rng.integers(0, 256, count * kind.itemsize, np.uint8).view(kind)
    with np.errstate(all="ignore"):
        special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 2.0], kind)
        ordinary = rng.standard_normal(count).astype(kind)
    tiny = np.arange(8, dtype=np.uint8).repeat(kind.itemsize)
    tiny[np.arange(8 * kind.itemsize) % kind.itemsize != 0] = 0  # the smallest subnormals
    special = np.concatenate([special, tiny.view(kind)])
    which = rng.integers(0, 3, count)
    picked = special[rng.integers(0, len(special), count)]
    return np.where(which == 0, patterns, np.where(which == 1, picked, ordinary)).astype(kind)


def hard_contribution(rank, count, dtype, seed):
    """`hard_values`, of complex numbers too; of others, any bits."""
    if dtype in reference.COMPLEX:
        part = "float32" if dtype == "complex64" else "float64"
        return hard_values(rank, 2 * count, part, seed).view(reference.DTYPES[dtype])
    if dtype in HARD:
        return hard_values(rank, count, dtype, seed)
    return cases.any_bytes(rank, count, dtype, seed)


def longest_chain(name, collective, n):
    """The most additions that follow each other on the way of any contribution, by the schedule."""
    depth = {}
    for transfers in cc.schedule(name, collective, n).rounds:
        before = dict(depth)
        for t in transfers:
            sent = before.get((t.src, t.chunk), 0)
            if t.reduce:
                depth[t.dst, t.chunk] = max(depth.get((t.dst, t.chunk), 0), sent) + 1
            else:
                depth[t.dst, t.chunk] = sent
    return max(depth.values(), default=0)


def reducing(n, *collectives):
    return [
        (name, collective)
        for name, collective in [*cases.registry(n), (None, "all_reduce"), (None, "reduce_scatter")]
        if collective in collectives
    ]


def more_of(op, dtype):
    return {"factor": 0.3} if op == "premul_sum" else {}


@pytest.mark.parametrize("n", WORLDS)
def test_all_ranks_get_the_same_bits(n):
    """And the same bits in a second run, in place or not."""
    pairs = reducing(n, "all_reduce")

    def body(comm):
        results = []
        for name, _ in pairs:
            for dtype in reference.DTYPES:
                x = hard_contribution(comm.rank, 301, dtype, n)
                for op in reference.OPS:
                    if not reference.is_defined(op, dtype):
                        continue
                    more = more_of(op, dtype) | {"op": op, "algorithm": name}
                    first = comm.all_reduce(x, out=np.empty_like(x), **more)
                    again = comm.all_reduce(x.copy(), **more)
                    assert first.tobytes() == again.tobytes(), (name, dtype, op)
                    results.append(((name, dtype, op), first.tobytes()))
        return results

    ranks = cc.run_threads(n, body, timeout=60)
    assert len(ranks[0]) == len(pairs) * len(reference.PAIRS)
    for rank in ranks[1:]:
        wrong = [what for (what, mine), (_, his) in zip(ranks[0], rank, strict=True) if mine != his]
        assert not wrong


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_repeated_runs_give_the_same_bits(n):
    """In a new world, with other calls in between, an element keeps its bits."""
    pairs = reducing(n, "all_reduce", "reduce_scatter")

    def body(comm, noise):
        results = []
        for i, (name, collective) in enumerate(pairs):
            for dtype in ("float32", "bfloat16"):
                for count in (77, 5003):
                    if noise:
                        comm.all_reduce(np.ones(1 + i * 100, np.float64))
                    x = cases.random_values(comm.rank, count, dtype, n)
                    got = getattr(comm, collective)(x, algorithm=name, out=None)
                    results.append(got.tobytes())
        return results

    first = cc.run_threads(n, body, False, timeout=60)
    assert cc.run_threads(n, body, True, timeout=60) == first


@pytest.mark.parametrize("n", WORLDS[1:])
@pytest.mark.parametrize("op", ["sum", "prod", "min", "max", "avg"])
def test_order_rank_depends_on_the_contributions_alone(n, op):
    """Not on algorithm, size, position, placement, queue or group; NaN payloads and zeros too."""
    pairs = reducing(n, "all_reduce") + reducing(n, "reduce_scatter", "reduce")

    def body(comm):
        for dtype in HARD:
            x = hard_values(comm.rank, 613, dtype, n)
            wanted = None
            for name, collective in pairs:
                for begin, end in ((0, 613), (300, 317)):
                    part = x[begin:end].copy()
                    call = getattr(comm, collective)
                    got = call(part, op=op, order="rank", algorithm=name)
                    if got is None:  # reduce, elsewhere than at its root
                        continue
                    if collective == "reduce_scatter":
                        got = comm.all_gather(got, out=np.empty_like(part))
                    if wanted is None:
                        wanted = got.copy()
                    words = cases.difference(got, wanted[begin:end])
                    assert not words, f"{dtype} {name} {collective}: {words}"
            for part in (slice(0, 5), slice(9, 613)):
                with comm.group():
                    work = [comm.all_reduce(x[part].copy(), op, order="rank") for _ in range(2)]
                work.append(comm.all_reduce(x[part].copy(), op, order="rank", async_op=True))
                for one in work:
                    assert not cases.difference(one.wait(20), wanted[part])

    assert cc.run_threads(n, body, timeout=60) == [None] * n


@pytest.mark.parametrize("n", WORLDS)
def test_order_rank_on_hard_values_is_the_reference(n):
    """NaNs count as equal here: numpy does not promise whose payload it keeps."""
    xs = {d: [hard_values(r, 997, d, n + 100) for r in range(n)] for d in HARD}
    wanted = {
        (d, op): reference.combine(xs[d], op, more_of(op, d).get("factor"))
        for d in HARD
        for op in OPS
    }

    def body(comm):
        for (dtype, op), right in wanted.items():
            for name, collective in reducing(n, "all_reduce", "reduce_scatter"):
                more = more_of(op, dtype) | {"order": "rank", "algorithm": name}
                got = getattr(comm, collective)(xs[dtype][comm.rank].copy(), op, **more)
                if collective == "reduce_scatter":
                    got = comm.all_gather(got, out=np.empty_like(right))
                assert same_but_nan(got, right), (dtype, op, name, collective)

    assert cc.run_threads(n, body, timeout=60) == [None] * n


@pytest.mark.parametrize("n", [2, 3, 6, 9])
def test_order_rank_does_not_change_with_bucketing(n):
    """An array in any pieces, in any buckets, queued or grouped, gives the bits of the whole."""
    rng = np.random.default_rng(n)
    count = 20_011
    cuts = [sorted(rng.integers(0, count, pieces).tolist()) for pieces in (1, 3, 11)]

    def body(comm):
        for dtype in ("float32", "bfloat16", "float64"):
            x = cases.random_values(comm.rank, count, dtype, n)
            whole = comm.all_reduce(x.copy(), order="rank")
            for i, inner in enumerate(cuts):
                parts = np.split(x.copy(), inner)
                if i == 1:
                    works = [comm.all_reduce(p, order="rank", async_op=True) for p in parts]
                    got = [work.wait(30) for work in works]
                elif i == 2:
                    with comm.group():
                        works = [comm.all_reduce(p, order="rank") for p in parts]
                    got = [work.wait() for work in works]
                else:
                    got = [comm.all_reduce(p, order="rank") for p in parts]
                assert not cases.difference(np.concatenate(got), whole), (dtype, inner)

    assert cc.run_threads(n, body, timeout=60) == [None] * n


def same_but_nan(got, wanted):
    with np.errstate(all="ignore"):  # a signalling NaN
        nan, found = (np.isnan(x.astype(np.float64)) for x in (wanted, got))
    if not (found == nan).all():
        return False
    return got[~nan].tobytes() == wanted[~nan].tobytes()


def test_chains_of_additions_are_as_documented():
    """The k of the bound below: additions that follow each other."""
    for n in WORLDS[1:]:
        log = (n - 1).bit_length()
        assert longest_chain("ring", "all_reduce", n) == n - 1
        assert longest_chain("direct_one_shot", "all_reduce", n) == n - 1
        assert longest_chain("recursive_doubling", "all_reduce", n) <= log + 1
        assert longest_chain("halving_doubling", "all_reduce", n) <= log + 1
        assert longest_chain("double_binary_tree", "all_reduce", n) <= 2 * log


@pytest.mark.parametrize("n", WORLDS[1:])
@pytest.mark.parametrize("dtype", ROUNDOFF)
def test_errors_stay_within_the_bound(n, dtype):
    """|sum - exact| <= k u sum|x|, where k is the longest chain of additions in the algorithm's
    schedule, n - 1 in rank order (Higham, Accuracy and Stability of Numerical Algorithms, section
    4.2); narrow dtypes round once in a direct algorithm, or in rank order.
    """
    u = ROUNDOFF[dtype]

    def body(comm):
        xs = [cases.random_values(r, 2003, dtype, n) for r in range(n)]
        wide = np.stack([x.astype(np.longdouble) for x in xs])
        exact, size = wide.sum(axis=0), abs(wide).sum(axis=0)
        for name, collective in reducing(n, "all_reduce", "reduce_scatter"):
            for order in (None, "rank"):
                got = getattr(comm, collective)(xs[comm.rank].copy(), algorithm=name, order=order)
                if collective == "reduce_scatter":
                    got = comm.all_gather(got, out=np.empty(2003, got.dtype))
                once = order == "rank" or name is None or name.startswith("direct")
                if once and dtype in reference.NARROW:
                    # One rounding to the dtype, the rest in float32.
                    limit = abs(exact) * u * 1.01 + size * n * 2**-24
                else:
                    fixed = order == "rank" or name is None
                    chain = n - 1 if fixed else longest_chain(name, collective, n)
                    limit = size * (chain * u * 1.01)
                error = abs(got.astype(np.longdouble) - exact)
                worst = np.argmax(error - limit)
                assert (error <= limit).all(), (name, order, error[worst], limit[worst])

    assert cc.run_threads(n, body, timeout=60) == [None] * n


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_sums_accumulate_in_float32(dtype):
    """One large and many small contributions: in the dtype itself each small one would vanish."""

    def body(comm):
        big, small = (2048.0, 0.75) if dtype == "float16" else (256.0, 0.75)
        x = np.full(500, big if comm.rank == 0 else small, reference.DTYPES[dtype])
        got = comm.all_reduce(x, order="rank").astype(np.float64)
        wanted = np.float64(reference.DTYPES[dtype].type(big + 7 * small))
        assert wanted > big
        return (got == wanted).all()

    assert all(cc.run_threads(8, body, timeout=20))


def test_avg_divides_before_it_rounds():
    """The sum of eight float16 beyond the largest one, and in bfloat16 one rounding, not two."""

    def body(comm):
        x = np.full(300, 60000.0, np.float16)
        assert (comm.all_reduce(x, "avg", algorithm="direct_one_shot") == 60000.0).all()
        assert (comm.all_reduce(x.copy(), "avg", order="rank") == 60000.0).all()
        return True

    assert all(cc.run_threads(8, body, timeout=20))


def test_integers_wrap_and_booleans_stay_booleans():
    def body(comm):
        assert (comm.all_reduce(np.full(70, 127, np.int8)) == np.int8(125)).all()
        assert (comm.all_reduce(np.full(70, 2**31 - 1, np.int32)) == 2147483645).all()
        assert (comm.all_reduce(np.full(70, 2**63, np.uint64)) == 2**63).all()
        raw = np.full(70, 2, np.uint8).view(np.bool_)  # a true of an unusual sort
        assert (comm.all_reduce(raw, "band").view(np.uint8) == 1).all()
        return True

    assert all(cc.run_threads(3, body, timeout=20))
