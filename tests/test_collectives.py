"""Every registered algorithm and collective, on ranks that are threads, against reference.py.

The registry is read when a test runs: an algorithm that is registered, in C++ or in Python, is
tested here with no edit.
"""

from __future__ import annotations

import cases
import numpy as np
import pytest
import reference
from cases import Case

import collectives as cc
from collectives.config import COLLECTIVES

WORLDS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16)
AUTO = [(None, collective) for collective in COLLECTIVES]


def only(pairs, collective):
    return [pair for pair in pairs if pair[1] == collective]


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("n", WORLDS)
def test_every_algorithm_and_count(n, collective):
    pairs = only(cases.registry(n), collective)
    assert pairs or n == 1
    counts = cases.COUNTS if n < 9 else (*cases.COUNTS[:6], 65, 289, 4099)
    cases.on_threads(n, cases.sweep(n, [*pairs, (None, collective)], counts))


@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_large_arrays_in_every_algorithm(n, dtype):
    itemsize = reference.DTYPES[dtype].itemsize
    counts = [-(-size // itemsize) for size in cases.SIZES]
    pairs = [*cases.registry(n), *AUTO]
    cases.on_threads(n, cases.sweep(n, pairs, counts, dtype=dtype, op="sum"))


def test_results_larger_than_caches():
    counts = [(2 << 20) // 4 + 5, (8 << 20) // 4 + 5]
    cases.on_threads(2, cases.sweep(2, AUTO, counts, dtype="float32", op="sum"))


def test_every_dtype_and_op_in_every_algorithm():
    found = [
        Case(collective, algorithm, dtype, op, count=37, root=i % 3, order=order, seed=i)
        for algorithm, collective in [*cases.registry(3), *AUTO]
        if collective in reference.REDUCING
        for i, (dtype, op) in enumerate(reference.PAIRS)
        for order in (None, "rank")
    ]
    assert len({(case.dtype, case.op) for case in found}) == len(reference.PAIRS) > 90
    cases.on_threads(3, found)


@pytest.mark.parametrize("collective", cases.ROOTED)
@pytest.mark.parametrize("n", [2, 3, 4, 7])
def test_every_root(n, collective):
    cases.on_threads(
        n,
        [
            Case(collective, algorithm, dtype="int16", count=count, root=root, v=v, seed=root)
            for algorithm, _ in [*only(cases.registry(n), collective), (None, collective)]
            for root in range(n)
            for count in (1, 50, 3000)
            for v in {False, collective in cases.VARIANTS}
        ],
    )


@pytest.mark.parametrize("collective", cases.VARIANTS)
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_unequal_blocks(n, collective):
    pairs = [*only(cases.registry(n), collective), (None, collective)]
    counts = (0, 1, 2, 7, 64, 289, 5000, 100_000)
    cases.on_threads(n, cases.sweep(n, pairs, counts, v=True))


@pytest.mark.parametrize("how", ["async", "group"])
@pytest.mark.parametrize("n", [2, 5])
def test_queued_and_grouped_calls(n, how):
    pairs = [*cases.registry(n), *AUTO]
    cases.on_threads(n, cases.sweep(n, pairs, (1, 289, 20_000), how=how))


@pytest.mark.parametrize(
    "nodes",
    [
        (0, 1),
        (0, 0, 1, 1),
        (0, 1, 0, 1),
        (0, 0, 0, 1),
        (0, 0, 0, 1, 1, 2),
        (0, 0, 0, 1, 1, 2, 2, 2),
    ],
    ids=str,
)
def test_several_nodes(nodes):
    n = len(nodes)
    pairs = [*cases.registry(n, nodes), *AUTO]
    assert any(name == "hierarchical" for name, _ in pairs)
    cases.on_threads(n, cases.sweep(n, pairs, (0, 1, 17, 289, 4099, 50_000), nodes), nodes)


@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), (0, 0, 0, 1, 1, 2), (0, 1, 2, 0, 1, 2)], ids=str)
def test_every_composition(nodes):
    n = len(nodes)
    pairs = cases.compositions(n, nodes)
    assert len(pairs) > 20
    cases.on_threads(n, cases.sweep(n, pairs, (1, 65, 4099), nodes), nodes)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
def test_order_rank_is_the_sum_from_left_to_right(n):
    """Bit for bit, on random data, whatever the algorithm and the size."""
    found = [
        Case(
            collective,
            algorithm,
            dtype,
            op,
            count=count,
            root=seed % n,
            order="rank",
            seed=seed,
            data="random",
        )
        for algorithm, collective in [*cases.registry(n), *AUTO]
        if collective in reference.REDUCING
        for seed, (dtype, op) in enumerate(reference.PAIRS)
        if op in ("sum", "avg", "prod", "premul_sum") and dtype[0] in "fbc" and dtype != "bool"
        for count in ((67, 3000) if op == "sum" else (67,))
    ]
    cases.on_threads(n, found)


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_direct_algorithms_sum_from_left_to_right(n):
    """The direct algorithms need no order= for it: rank order is theirs."""
    found = [
        Case(collective, algorithm, dtype, count=count, seed=count, data="random")
        for algorithm, collective in cases.registry(n)
        if algorithm.startswith("direct") and collective in reference.REDUCING
        for dtype in reference.FLOATS
        for count in (17, 289, 9000, 70_000)
    ]
    cases.on_threads(n, found)


@pytest.mark.parametrize("n", [2, 3, 4, 6])
def test_direct_algorithms_equal_their_schedules(n):
    """The schedule of what is written by hand, run by the general engine, gives the same bytes."""
    twins = {}
    for name, collective in cases.registry(n):
        if not name.startswith("direct") or collective == "barrier":
            continue
        twin = f"{name}_as_scheduled"
        twins[twin] = name

        def rounds(size, root=0, *, name=name, collective=collective):
            return cc.schedule(name, collective, size, root=root).rounds

        def chunks(size, *, name=name, collective=collective):
            return cc.schedule(name, collective, size).nchunks

        cc.algorithm(collective, name=twin, chunks=chunks)(rounds)
    try:

        def compare(comm):
            for case in cases.sweep(
                n, [p for p in cases.registry(n) if p[0] in twins], (5, 289, 9000, 100_001)
            ):
                for dtype in ("float32", "bfloat16"):
                    one = case._replace(dtype=dtype, op="sum", data="random", order=None)
                    other = one._replace(algorithm=twins[case.algorithm])
                    words = cases.difference(cases.run(comm, one), cases.run(comm, other))
                    assert not words, f"{one}: {words}"

        assert len(twins) == 2
        cc.run_threads(n, compare, timeout=60)
    finally:
        for twin in twins:
            cc.unregister(twin)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_arrays_may_change_right_after_a_call(n):
    """Ranks may read each other's arrays during a call, and not after it."""
    found = list(spoiled(n))
    assert cc.run_threads(n, cases.hammer, found, timeout=60) == [10 * len(found)] * n


def spoiled(n):
    for algorithm, collective in [*AUTO, ("direct_one_shot", "all_reduce")]:
        for count in (100, 20_000, 600_000) if collective != "barrier" else ():
            root = {"root": n - 1} if collective in cases.ROOTED else {}
            yield Case(collective, algorithm, count=count, **root)


def test_the_check_sees_wrong_results():
    """What holds all of the above: a result that is off by one element, or late, is noticed."""

    def body(comm):
        case = Case("all_reduce", count=300)
        cases.check(comm, case)
        right = comm.all_reduce
        for wrong in (
            lambda x, **more: right(x, **{**more, "op": "max"}),
            lambda x, out, **_: out,
            lambda x, **more: np.roll(right(x, **more), 1),
        ):
            comm.all_reduce = wrong
            with pytest.raises(AssertionError, match="all_reduce"):
                cases.check(comm, case)
        return True

    assert all(cc.run_threads(2, body, timeout=20))
