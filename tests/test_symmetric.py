"""Symmetric arrays (Communicator.empty): every collective on them, mixtures with other arrays, and
their life. That nothing is staged, processes show (workers/symmetric.py).
"""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import cases
import launch
import numpy as np
import pytest
import reference
from cases import Case

import collectives as cc
from collectives.config import COLLECTIVES

# float32 elements; symmetric arrays go the zero-copy way from some 10 KiB on.
COUNTS = (1, 289, 9000, 30_011)
PLACES = ("both", "in", "out", "one rank", "all but one", "other offsets", "in place")


def array_of(comm, pool, count, dtype, symmetric, offset=0):
    """`count` elements at `offset` of the symmetric pool, or anywhere else."""
    kind = reference.DTYPES[dtype]
    if not symmetric:
        return np.empty(count, kind)
    begin = offset * 64
    return pool[begin : begin + count * kind.itemsize].view(kind)


def arrays_of(comm, case, where, pools):
    """x and out for this rank, lying as `where` says."""
    rank, n = comm.rank, comm.size
    expected = cases.expected(case, n)[rank]
    source = cases.make_input(case, rank, n)
    mine = {
        "one rank": rank == n - 1,
        "all but one": rank != 0,
    }.get(where, True)
    offset = rank if where == "other offsets" else 0
    x = array_of(comm, pools[0], source.size, case.dtype, mine and where != "out", offset)
    x[:] = source
    if expected is None:
        return x, None, source
    if where == "in place" and case.collective == "all_reduce":
        return x, x, source
    out = array_of(comm, pools[1], expected.size, case.dtype, mine and where != "in", offset)
    out.view(np.uint8)[:] = 0xA5
    return x, out, source


def check_symmetric(comm, found):
    pools = [comm.empty(9 << 20, "uint8") for _ in range(2)]
    for case, where in found:
        x, out, source = arrays_of(comm, case, where, pools)
        if case.collective == "broadcast":
            out = None
        elif case.place == "own" and case.collective == "reduce_scatter":
            begin = sum(cases.blocks(case, comm.size)[: comm.rank])
            out = x[begin : begin + out.size]
        elif case.place == "own" and case.collective == "all_gather":
            begin = sum(cases.blocks(case, comm.size)[: comm.rank])
            out[begin : begin + x.size] = x
            x = out[begin : begin + x.size]
        got = cases.call(comm, case, x, out)
        words = cases.difference(got, cases.expected(case, comm.size)[comm.rank])
        assert not words, f"rank {comm.rank} of {comm.size}, {where}, {case}: {words}"
        if case.place == "out" and case.collective != "broadcast" and x is not out:
            assert x.tobytes() == source.tobytes(), f"{where}, {case}: the input changed"
    return len(found)


def mixtures(collective, n, counts=COUNTS):
    for i, (count, where) in enumerate((c, w) for c in counts for w in PLACES):
        dtype, op = [("float32", "sum"), ("bfloat16", "max"), ("uint8", "bxor")][i % 3]
        if collective not in reference.REDUCING:
            op = "sum"
        for v in {False, collective in cases.VARIANTS}:
            root = i % n if collective in cases.ROOTED else 0
            yield Case(collective, None, dtype, op, count, root=root, v=v, seed=i), where
        if collective in ("reduce_scatter", "all_gather"):
            yield Case(collective, None, dtype, op, count, place="own", seed=i), where


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "collective",
    [name for name in COLLECTIVES if name != "barrier"],
)
def test_every_mixture(collective, n):
    found = list(mixtures(collective, n))
    assert cc.run_threads(n, check_symmetric, found, timeout=60) == [len(found)] * n


@pytest.mark.parametrize("n", [2, 3])
def test_forced_algorithms_and_large_arrays(n):
    found = [
        (Case(collective, algorithm, count=count, seed=3), where)
        for algorithm, collective in [*cases.registry(n), (None, "all_reduce")]
        if collective != "barrier"
        for count in (9000, 262_147)
        for where in ("both", "in place")
    ]
    assert cc.run_threads(n, check_symmetric, found, timeout=60) == [len(found)] * n


def test_results_larger_than_caches():
    found = [(Case(c, None, count=2_200_000), "both") for c in ("all_reduce", "all_gather")]
    cc.run_threads(2, check_symmetric, found, timeout=60)


def test_processes():
    launch.run(3, "symmetric.py", timeout=60).expect(status=0)


def test_arrays_may_change_right_after_a_call():
    """Peers read this rank's memory during a call, and have done so at its end."""

    def body(comm):
        x, out = comm.empty(100_000), comm.empty(100_000)
        for i in range(50):
            x[:] = comm.rank + i
            comm.all_reduce(x, out=out)
            x[:] = -1e9
            assert (out == 3 + 3 * i).all(), i
            out[:] = -1e9

    assert cc.run_threads(3, body, timeout=60) == [None] * 3


def test_order_rank_and_groups_and_queues():
    def body(comm):
        x = comm.empty(50_000)
        source = cases.random_values(comm.rank, 50_000, "float32", 9)
        wanted = reference.combine(
            [cases.random_values(r, 50_000, "float32", 9) for r in range(comm.size)], "sum"
        )
        x[:] = source
        comm.all_reduce(x, order="rank")
        assert not cases.difference(x, wanted)
        x[:] = source
        comm.all_reduce(x, order="rank", async_op=True).wait(20)
        assert not cases.difference(x, wanted)
        x[:] = source
        with comm.group():
            comm.all_reduce(x, order="rank")
        assert not cases.difference(x, wanted)

    assert cc.run_threads(4, body, timeout=60) == [None] * 4


# ---- life ---------------------------------------------------------------------------------------


def test_what_empty_makes():
    def body(comm):
        for dtype in reference.DTYPES:
            x = comm.empty((3, 5), dtype)
            assert (x.shape, x.dtype) == ((3, 5), reference.DTYPES[dtype])
            assert x.flags.c_contiguous
            assert x.flags.writeable
            assert x.ctypes.data % 64 == 0
        assert comm.empty(7).dtype == np.float32
        assert comm.empty(np.prod((2, 3))).shape == (6,)
        assert comm.empty(0).shape == (0,)
        assert comm.empty(()).shape == ()
        assert comm.empty((4, 0, 2), np.int8).shape == (4, 0, 2)
        assert comm.empty([2, 3], np.dtype("u2")).dtype == np.uint16
        for shape in (0, ()):
            comm.all_reduce(comm.empty(shape))

    for n in (1, 2):
        assert cc.run_threads(n, body, timeout=20) == [None] * n


def test_freeing_and_making_again():
    """At other times on each rank; addresses may come again, and mean the new array then."""

    def body(comm):
        kept = []
        for i in range(60):
            x = comm.empty(20_000 + i, "float32")
            x[:] = comm.rank
            comm.all_reduce(x)
            assert (x == 3).all(), i
            if i % (comm.rank + 2) == 0:
                kept.append(x)
            if len(kept) > 3:
                kept.pop(0)
            del x
        gc.collect()
        for x in kept:
            assert (x == 3).all()

    assert cc.run_threads(3, body, timeout=60) == [None] * 3


def test_memory_is_given_back():
    def body(comm):
        for _ in range(40):
            comm.empty(32 << 20, "uint8")[:] = 1  # dropped at once
        comm.barrier()
        return True

    before = resident()
    assert all(cc.run_threads(2, body, timeout=60))
    assert resident() - before < 600 << 20  # of 2.5 GiB


def test_memory_is_given_back_before_more_is_taken():
    """And by `close`, or after it with the array."""

    def body(comm):
        for _ in range(2):
            x = comm.empty(128 << 20, "uint8")
            x[:] = 1
            del x  # gone before the next one is made
        comm.barrier()
        most = resident()
        part = comm.duplicate()
        kept, dropped = (part.empty(128 << 20, "uint8") for _ in range(2))
        kept[:], dropped[:] = 1, 1
        del dropped
        comm.barrier()
        before = resident()
        comm.barrier()
        part.close()
        comm.barrier()
        closed = resident()
        comm.barrier()
        del kept
        comm.barrier()
        return most, before - closed, closed - resident()

    start = resident()
    for most, at_close, after in cc.run_threads(2, body, timeout=60):
        assert most - start < 2.5 * (128 << 20)
        assert at_close > 1.5 * (128 << 20)
        assert after > 1.5 * (128 << 20)


def test_nothing_is_given_back_under_a_call_in_the_queue():
    """Which reads a peer's part of it by the mapping that this rank drops."""

    def body(comm):
        released = []
        comm._memory._dropped._core = SimpleNamespace(
            release_segment=lambda n: (released.append(n), comm._core.release_segment(n))
        )
        comm.empty(1000)
        y = np.ones(1000, np.float32)
        work = comm.all_reduce(y, async_op=True) if comm.rank == 0 else None
        comm.empty(1000)
        during = list(released)
        work = work or comm.all_reduce(y, async_op=True)
        work.wait(20)
        comm.empty(1000)
        return during, sorted(released)

    found = cc.run_threads(2, body, timeout=20)
    assert found == [([], [1, 2]), ([1], [1, 2])]


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_an_array_outlives_its_communicator():
    def body(comm):
        x = comm.empty(50_000)
        x[:] = comm.rank
        comm.all_reduce(x)
        comm.close()
        return x

    arrays = cc.run_threads(2, body, timeout=20)
    gc.collect()
    for x in arrays:
        assert (x == 1).all()
        x[:] = 5  # still writable
    assert arrays[0].sum() == 250_000
    views = [x[10:20] for x in arrays]
    del arrays, x
    gc.collect()
    assert all((v == 5).all() for v in views)


def test_a_view_keeps_the_memory():
    def body(comm):
        part = comm.empty((100, 300))[50:]
        gc.collect()
        for _ in range(3):
            comm.empty((100, 300))[:] = 7
        part[:] = 1
        comm.all_reduce(part)
        return bool((part == 2).all())

    assert cc.run_threads(2, body, timeout=20) == [True, True]


def test_a_dropped_array_is_freed():
    def body(comm):
        x = comm.empty(1000)
        base = x
        while getattr(base, "base", None) is not None:
            base = base.base
        gone = weakref.ref(base) if not isinstance(base, memoryview) else None
        del x, base
        gc.collect()
        return gone is None or gone() is None

    assert all(cc.run_threads(2, body, timeout=20))


@pytest.mark.torch
def test_torch_tensors():
    torch = pytest.importorskip("torch")

    def body(comm):
        x = comm.empty((300, 100), torch.bfloat16, kind="torch")
        assert (x.dtype, tuple(x.shape)) == (torch.bfloat16, (300, 100))
        x.fill_(comm.rank + 1)
        assert comm.all_reduce(x) is x
        assert (x == 3).all()
        part = comm.reduce_scatter(x)
        assert tuple(part.shape) == (150, 100)
        assert (part == 6).all()
        for dtype in (torch.float32, torch.float8_e4m3fn, torch.int64, torch.bool):
            assert comm.empty(3, dtype, kind="torch").dtype == dtype
        return True

    assert all(cc.run_threads(2, body, timeout=20))


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("nodes", [None, [0, 0, 1]])
def test_uneven_blocks_in_place(symmetric, nodes):
    """reduce_scatter_v into, and all_gather_v from, the rank's own block of the whole array."""

    def body(comm):
        for counts in ([0, 1, 5], [3000, 1, 70_000], [9, 9, 0]):
            ends = np.cumsum([0, *counts])
            whole = comm.empty(int(ends[-1])) if symmetric else np.empty(ends[-1], np.float32)
            whole[:] = np.arange(ends[-1]) % 101 + comm.rank
            mine = whole[ends[comm.rank] : ends[comm.rank + 1]]
            assert comm.reduce_scatter_v(whole, counts, out=mine) is mine
            comm.all_gather_v(mine, counts, out=whole)
            assert np.array_equal(whole, 3 * (np.arange(ends[-1]) % 101) + 3)
        with pytest.raises(cc.ArrayError, match="overlap"):
            part = whole[1 : 1 + counts[comm.rank]] if comm.rank == 0 else whole[:1]
            comm.all_gather_v(part, [9, 1, 1], out=whole[:11])

    cc.run_threads(3, body, nodes=nodes, timeout=20)
