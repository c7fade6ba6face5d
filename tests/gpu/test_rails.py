"""Arrays on GPUs between nodes of several GPUs each, along rails: ranks that are threads, on nodes
that are told apart.
"""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import numpy as np
import pytest
import reference
import soak
from cases import Case, check, difference, random_values
from gpus import GPUS, MARK, TWO_GPUS, cupy
from on_device import EMULATED, OnDevice, back, filled, run_on
from test_leaks import SLACK

import collectives as cc
from collectives.tuning.rails import NEAR, RAILS_FROM

pytestmark = MARK

DEVICES = list(range(GPUS))
PLACEMENTS = [[0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 2, 2, 1, 0]]
# Both levels: as they are chosen, by kernels made by hand, and by interpreted schedules.
PARTS = (
    "hierarchical",
    "hierarchical(direct_two_shot, ring)",
    "hierarchical(ring, halving_doubling)",
)
TWO_SHOT = "hierarchical(direct_two_shot, direct_two_shot)"


@pytest.fixture(autouse=True)
def little_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a test says otherwise: four ranks would pin 128 MiB."""
    monkeypatch.setenv("COLLECTIVES_STAGING", "1M")


def rails_of(comm: OnDevice) -> Any:
    """What carries this communicator's calls along rails, None if nothing does."""
    engine: Any = comm.comm._device
    return engine.rails


def algorithms_for(collective: str) -> tuple[str, ...]:
    if collective == "broadcast":
        return (PARTS[0], PARTS[1], "hierarchical(ring, double_binary_tree)")
    if collective == "all_to_all":
        return (PARTS[0], TWO_SHOT)
    return PARTS


def cases_along_rails(n: int) -> list[Case]:
    """Every collective there is, by some algorithms, in windows and whole, dtypes and ops dealt."""
    found = []
    for collective in NEAR:
        for algorithm in algorithms_for(collective):
            for count in (1, 17, 4099, 20_011):
                for place in ("in", "out"):
                    i = len(found)
                    dtype, op = reference.PAIRS[i * 37 % len(reference.PAIRS)]
                    found.append(
                        Case(
                            collective,
                            algorithm,
                            dtype,
                            op if collective in reference.REDUCING else "sum",
                            count,
                            root=i % n if collective == "broadcast" else 0,
                            place=place,
                            v=collective in ("reduce_scatter", "all_gather") and i % 3 == 0,
                            seed=i,
                        )
                    )
    # avg divides once, by all ranks; what serves a call by itself; calls of nothing.
    found += [Case("all_reduce", PARTS[0], dtype, "avg", 777) for dtype in ("float32", "bfloat16")]
    found += [Case("reduce_scatter", PARTS[0], "float32", "avg", 778)]
    found += [Case(collective, None, count=40_961, seed=1) for collective in NEAR]
    return found + [Case(collective, PARTS[0], count=0) for collective in NEAR]


@pytest.mark.parametrize(
    ("nodes", "staging"),
    [(PLACEMENTS[0], "4K"), (PLACEMENTS[1], "1M"), (PLACEMENTS[2], "1K")],
    ids=str,
)
def test_every_collective(nodes: list[int], staging: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLECTIVES_STAGING", staging)
    wanted = cases_along_rails(len(nodes))
    if not EMULATED and len(nodes) > GPUS:
        wanted = wanted[::8]  # ranks that share a GPU wait long for each other's slices

    def body(comm: OnDevice) -> int:
        puts = 0
        for case in wanted:
            rails = rails_of(comm)
            run, made = rails.run, []
            rails.run = lambda *a, run=run, made=made, **more: (made.append(a), run(*a, **more))
            try:
                check(comm, case)
            finally:
                del rails.run
            assert bool(made) == (case.count > 0), case
            puts += len(made)
        return puts

    found = run_on(len(nodes), DEVICES, body, nodes=nodes, timeout=20)
    assert set(found) == {sum(case.count > 0 for case in wanted)}


def test_bits_are_the_same_on_all_ranks_and_again() -> None:
    """Also of numbers whose sums are rounded; within a dtype's rounding of a sum in float64."""
    n, count = 4, 20_011

    def body(comm: OnDevice) -> list[Any]:
        got = []
        for dtype in ("float32", "bfloat16", "float16"):
            for op in ("sum", "avg"):
                for _ in range(2):
                    x = random_values(comm.rank, count, dtype, 1)
                    got.append(comm.all_reduce(x, op, algorithm=TWO_SHOT))
        return got

    results = run_on(n, DEVICES, body, nodes=[0, 1, 0, 1], timeout=20)
    for i, first in enumerate(results[0]):
        for other in (r[i] for r in results):
            assert not difference(other, first)
        assert not difference(first, results[0][i - i % 2])
    for i, (dtype, digits) in enumerate((("float32", 24), ("bfloat16", 8), ("float16", 11))):
        given = [random_values(r, count, dtype, 1).astype(np.float64) for r in range(n)]
        size = np.abs(given).sum(axis=0)
        for j, divisor in ((0, 1), (2, n)):
            error = np.abs(results[0][4 * i + j].astype(np.float64) - sum(given) / divisor)
            assert (error <= 3 * size / divisor * 2.0**-digits).all()


def check_is_staged(comm: OnDevice, algorithm: str | None, order: str | None = None) -> None:
    """A call that rails could carry is right, and is not carried by them."""
    rails = rails_of(comm)
    if rails is not None:
        rails.run = None  # nothing calls it
    check(comm, Case("all_reduce", algorithm, count=40_961, order=order, place="in"))
    if rails is not None:
        del rails.run


@pytest.mark.parametrize("nodes", [[0, 0, 0, 1, 1, 2], [0, 1], [0, 1, 2, 2]], ids=str)
def test_other_placements_are_staged_whole(nodes: list[int]) -> None:
    def body(comm: OnDevice) -> str:
        assert rails_of(comm) is None
        for algorithm in (None, TWO_SHOT):
            check_is_staged(comm, algorithm)
        engine: Any = comm.comm._device
        told = comm.comm.explain("all_reduce", nbytes=1 << 20)
        assert engine.why_no_rails in told
        assert "through memory of the host (the ranks met through threads, not MPI)" in told
        return str(engine.why_no_rails)

    (why,) = set(run_on(len(nodes), DEVICES, body, nodes=nodes, timeout=20))
    assert why == (
        "each rank is on a node of its own"
        if nodes == [0, 1]
        else "the nodes have different numbers of ranks"
    )


def test_pointers_for_mpi_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLECTIVES_GPU_MPI", "on")

    def body(comm: OnDevice) -> None:
        check(comm, Case("all_reduce", None, count=100, place="in"))

    with pytest.raises(cc.UnsupportedError, match=r"COLLECTIVES_GPU_MPI=on.* not MPI"):
        run_on(2, DEVICES, body, nodes=[0, 1], timeout=20)


def test_gpus_that_do_not_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLECTIVES_GPU_PATH", "host")

    def body(comm: OnDevice) -> str:
        check_is_staged(comm, TWO_SHOT)
        engine: Any = comm.comm._device
        return str(engine.why_no_rails)

    (why,) = set(run_on(4, DEVICES, body, nodes=[0, 0, 1, 1], timeout=20))
    assert "COLLECTIVES_GPU_PATH=host" in why


# (Continuous integration has two emulated GPUs; a real machine's links cannot be taken away.)
@pytest.mark.skipif(
    not EMULATED or GPUS < 2, reason="only emulated GPUs can be told not to reach each other"
)
def test_one_node_whose_gpus_do_not_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 1 has GPU 0 for both of its ranks; node 0 has two, which are kept apart. All say so."""
    monkeypatch.setenv("EMULATED_NO_PEER", "0-1")

    def body(comm: OnDevice) -> str:
        check_is_staged(comm, None)
        engine: Any = comm.comm._device
        return str(engine.why_no_rails)

    (why,) = set(run_on(4, [0, 1, 0, 0], body, nodes=[0, 0, 1, 1], timeout=20))
    assert "do not reach each other" in why and "rank 0" in why and "rank 1" in why


def test_what_is_staged_whole_where_there_are_rails() -> None:
    def body(comm: OnDevice) -> str:
        assert rails_of(comm) is not None
        check_is_staged(comm, "ring")
        check_is_staged(comm, TWO_SHOT, order="rank")
        check_is_staged(comm, None, order="rank")
        for collective in ("reduce", "gather", "scatter"):
            check(comm, Case(collective, None, count=40_960, root=2))
        check(comm, Case("all_to_all", None, count=40_960, v=True))
        check(comm, Case("all_to_all", "hierarchical(bruck, direct_two_shot)", count=4000))
        told = comm.comm.explain("all_reduce", nbytes=RAILS_FROM)
        assert "whole arrays" in comm.comm.explain("all_reduce", nbytes=RAILS_FROM - 1)
        return told

    told = run_on(4, DEVICES, body, nodes=[0, 0, 1, 1], timeout=20)
    assert "along rails: direct_one_shot from GPU to GPU within nodes" in told[0]


def test_calls_follow_each_other_on_any_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Along rails and whole, on two streams in turn, between calls on host arrays: the host waits
    for nothing but these.
    """
    monkeypatch.setenv("COLLECTIVES_STAGING", "16K")
    lock = threading.Lock()

    def body(comm: OnDevice) -> None:
        with lock:
            other = cupy.cuda.Stream(non_blocking=True)
        count, n = 70_000, comm.size
        x, small = filled(comm, count, comm.rank + 1), filled(comm, 100, 1, 1 << 20)
        mine = np.ones(10, np.float32)
        comm.comm.barrier()
        for i in range(6):
            with (comm.stream, other)[i % 2]:
                comm.comm.all_reduce(x, op="sum" if i == 0 else "avg")
                if i % 2:
                    comm.comm.all_reduce(small, op="avg")
            if i == 3:
                assert comm.comm.all_reduce(mine)[0] == n
        with other:
            work = comm.comm.broadcast(x, root=1, async_op=True)
        assert work.wait(30) is x and work.done()
        comm.finish()
        assert (back(comm, x) == n * (n + 1) / 2).all()
        assert (back(comm, small) == 1).all()

    run_on(4, DEVICES, body, nodes=[0, 0, 1, 1], timeout=20)


def raised(call: Any) -> cc.CollectiveError:
    try:
        call()
    except cc.CollectiveError as error:
        return error
    raise AssertionError("nothing raised")


@pytest.mark.parametrize("differs", ["between nodes", "within nodes", "collective", "host"])
def test_a_mismatch_writes_nothing_anywhere(differs: str) -> None:
    """Though kernels are on the stream behind it. Calls on host arrays go on, and so does the GPU
    in another communicator.
    """

    def body(comm: OnDevice) -> None:
        twin = comm.comm.duplicate()
        x = filled(comm, 70_000, 7)
        node, local = divmod(comm.rank, 2)
        odd = {"between nodes": node, "within nodes": local}.get(differs, comm.rank == 3)
        comm.comm.barrier()

        def call() -> None:
            with comm.stream:
                if differs in ("between nodes", "within nodes"):
                    comm.comm.all_reduce(x[: 69_999 + odd])
                elif differs == "collective" and odd:
                    comm.comm.broadcast(x)
                elif differs == "host" and odd:
                    comm.comm.all_reduce(np.ones(70_000, np.float32))
                else:
                    comm.comm.all_reduce(x)
                comm.comm.synchronize()

        error = raised(call)
        assert isinstance(error, cc.MismatchError), error
        if differs.endswith("nodes"):
            assert "count=69999" in str(error) and "count=70000" in str(error), error
        comm.stream.synchronize()
        assert (back(comm, x) == 7).all()
        if differs != "host":
            assert isinstance(raised(lambda: comm.comm.all_reduce(x)), cc.MismatchError)
        assert comm.comm.all_reduce(np.ones(3))[0] == comm.size
        with comm.stream:
            twin.all_reduce(x)
        twin.synchronize()
        assert (back(comm, x) == 28).all()
        twin.close()

    run_on(4, DEVICES, body, nodes=[0, 0, 1, 1], timeout=20)


@pytest.mark.parametrize("how", ["abort", "late"])
def test_a_rank_that_does_not_come(how: str) -> None:
    """`abort` ends the others' waits; else they end at the deadline, and say whom they missed."""

    def body(comm: OnDevice) -> str:
        x = filled(comm, 70_000, 1)
        comm.comm.barrier()
        if comm.rank == 2:
            if how == "abort":
                comm.comm.abort("enough")
            else:
                time.sleep(2)
            return ""

        def call() -> None:
            with comm.stream:
                comm.comm.all_reduce(x)
                comm.comm.synchronize()

        error = raised(call)
        comm.stream.synchronize()
        return f"{type(error).__name__}: {error}"

    found = run_on(4, DEVICES, body, nodes=[0, 0, 1, 1], timeout=20 if how == "abort" else 1)
    for words in (found[0], found[1], found[3]):
        if how == "abort":
            assert words.startswith("AbortedError") and "enough" in words, words
        else:
            assert "rank 2" in words and ("Deadline" in words or "Aborted" in words), words


def test_a_call_is_not_captured() -> None:
    def body(comm: OnDevice) -> None:
        x = filled(comm, 70_000, 1)
        comm.meet()
        other = cupy.cuda.Stream(non_blocking=True)
        with comm.stream:
            comm.comm.all_reduce(x)
        with other:
            other.begin_capture()
            error = raised(lambda: comm.comm.all_reduce(x))
            other.end_capture()
        assert isinstance(error, cc.UnsupportedError) and "captured" in str(error)
        with comm.stream:
            comm.comm.all_reduce(x)
        comm.finish()
        assert (back(comm, x) == 16).all()

    run_on(4, DEVICES, body, nodes=[0, 0, 1, 1], timeout=20)


@TWO_GPUS
def test_a_stream_of_another_gpu() -> None:
    """It is refused in words, before anything is done: the call can be made on another stream."""

    def body(comm: OnDevice) -> None:
        x = filled(comm, 70_000, 1)
        comm.meet()
        if comm.rank == 1:
            with cupy.cuda.Device(1 - comm.device):
                other = cupy.cuda.Stream(non_blocking=True)
            # By its handle, which does not say whose it is: cupy's streams do.
            error = raised(lambda: comm.comm.all_reduce(x, stream=other.ptr))
            assert f"its stream is one of GPU {1 - comm.device}" in str(error)
        comm.comm.all_reduce(x, stream=comm.stream)
        comm.finish()
        assert (back(comm, x) == 4).all()

    run_on(4, DEVICES[:2], body, nodes=[0, 0, 1, 1], timeout=20)


def test_worlds_come_and_go() -> None:
    """With a part of each, closed or dropped."""

    def body(comm: OnDevice) -> None:
        check(comm, Case("all_reduce", None, count=40_961))
        part = comm.comm.duplicate()
        x = filled(comm, 40_961, 1)
        with comm.stream:
            part.all_reduce(x)
        part.synchronize()
        if comm.rank % 2:
            part.close()

    held = []
    for count in (4, 12):
        for _ in range(count):
            run_on(4, DEVICES, body, nodes=[0, 1, 0, 1], timeout=20)
        gc.collect()
        held.append(soak.held())
    before, after = held
    for what in ("descriptors", "mappings", "threads"):
        assert getattr(after, what) < getattr(before, what) + 6, held
    assert after.rss < before.rss + SLACK, held
