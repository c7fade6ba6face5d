"""What waits for what, and what must not: the host, streams, buffers that end, closing, and ranks
that leave room for computing where others do not.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from pathlib import Path
from typing import Any

import launch
import numpy as np
import pytest
from cases import Case, check
from gpus import GPUS, MARK, TWO_GPUS, cupy
from on_device import EMULATED, OnDevice, back, filled, run_on

import collectives as cc
from collectives import _core
from collectives import device as engines
from collectives.array import Stream
from collectives.tuning.device import Launch

pytestmark = MARK

ALL = list(range(GPUS))
# CUDA does not tell how many blocks a kernel was launched with. The emulated runtime notes it; CI
# runs these tests there, and skips none.
LAUNCHES_ARE_SEEN = pytest.mark.skipif(
    not EMULATED, reason="only tests/emulated, in CI, tells of the kernels that were launched"
)


def emulated_runtime() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(_core.__file__).with_name("libemulated_cuda.so")))


def test_waiting_for_a_call_does_not_wait_for_later_ones() -> None:
    """Rank 0 is in a receive already whose sender comes when rank 0 says so."""

    def body(comm: OnDevice) -> bool:
        c, rank = comm.comm, comm.rank
        x, y = filled(comm, 5000, rank + 1), filled(comm, 100, 7 * rank, 1 << 20)
        c.barrier()
        first = c.all_reduce(x, stream=comm.stream, async_op=True)
        later = c.recv(y, 1, stream=comm.stream, async_op=True) if rank == 0 else None
        first.wait(30)
        assert first.done() and (later is None or not later.done())
        assert (back(comm, x) == 3).all() if rank == 1 else True
        c.barrier()
        if rank == 1:
            c.send(y, 0, stream=comm.stream)
        comm.finish()
        assert (back(comm, x) == 3).all() and (back(comm, y) == 7).all()
        return later is None or bool(later.done())

    assert run_on(2, ALL, body, timeout=20) == [True] * 2


@pytest.mark.parametrize("nodes", [None, [0, 1, 2]], ids=["one node", "staged"])
def test_closing_waits_for_no_kernel_of_another_rank(nodes: list[int] | None) -> None:
    """Freeing pinned memory waits for all GPUs, and lets no thread launch anything meanwhile: so
    what rank 0 waits for would never come. Rank 1 is alone in its communicator.
    """
    launched, closed = threading.Event(), threading.Event()

    def body(comm: OnDevice) -> bool:
        part = comm.comm.split(comm.rank == 1)
        x = filled(comm, 5000, comm.rank + 1)
        with comm.stream:
            part.all_reduce(x)
            part.synchronize()
            comm.meet()
            if comm.rank == 1:
                assert launched.wait(10)
                part.close()
                closed.set()
                return True
            if comm.rank == 2 and not closed.wait(10):
                return False
            part.all_reduce(x)
            launched.set()
            part.synchronize()
        return bool((back(comm, x) == 8).all())

    assert run_on(3, ALL, body, nodes=nodes, timeout=20) == [True] * 3


@TWO_GPUS
@LAUNCHES_ARE_SEEN
def test_kernels_that_start_early_leave_room() -> None:
    """Together with the kernel before them they take half of the GPU at most, so that small kernels
    of another communicator find room, for which a peer may wait.
    """
    library = emulated_runtime()

    def body(comm: OnDevice) -> list[int]:
        found = []
        for count in (16, 4096, 16384):
            comm.meet()
            if comm.rank == 0:
                library.emulatedLargestEarly()
            comm.all_gather(np.ones(count, "float32"), out=np.zeros(2 * count, "float32"))
            found.append(library.emulatedLargestEarly() if comm.rank == 0 else 0)
        return found

    room = 2 * int(os.environ.get("EMULATED_PROCESSORS", "8"))  # blocks
    found = run_on(2, ALL, body, timeout=20)[0]
    assert found[0] == 1 and max(found) <= room // 4, found


@TWO_GPUS
@LAUNCHES_ARE_SEEN
def test_calls_that_need_no_fifos_leave_more_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a call shall leave multiprocessors to a stream that computes."""
    how = Launch(blocks=3, straight_blocks=2, pull=True)
    monkeypatch.setattr(engines, "device_launch", lambda *_: how)
    library = emulated_runtime()

    def body(comm: OnDevice) -> tuple[int, bool]:
        comm.meet()
        if comm.rank == 0:
            library.emulatedLargest()
        found = comm.all_reduce(np.ones(200_000, "float32"), algorithm="direct_two_shot")
        return library.emulatedLargest() if comm.rank == 0 else 0, bool((found == 2).all())

    for symmetric, blocks in ((False, 3), (True, 2)):
        ((most, right), (_, other)) = run_on(2, ALL, body, symmetric=symmetric, timeout=20)
        assert right and other and most == blocks, (symmetric, most)


def test_a_work_in_a_graph() -> None:
    """What is captured has no end of its own: done means that nothing is under way."""

    def body(comm: OnDevice) -> bool:
        x = filled(comm, 5000, 1)
        comm.comm.all_reduce(x, stream=comm.stream)
        comm.finish()
        comm.stream.begin_capture()
        work = comm.comm.all_reduce(x, stream=comm.stream, async_op=True)
        graph = comm.stream.end_capture()
        assert work.done()
        comm.meet()
        graph.launch(comm.stream)
        comm.finish()
        return bool((back(comm, x) == 4).all())

    assert run_on(2, ALL, body, timeout=20) == [True] * 2


def test_results_are_made_on_the_current_stream() -> None:
    """Its library may use the memory of an array that a call makes until what is on the current
    stream has ended: the call waits for that, on whatever stream it is put.
    """
    lock = threading.Lock()

    def body(comm: OnDevice) -> bool:
        c = comm.comm
        held = c.duplicate(max_blocks=2)
        x = filled(comm, 1000, comm.rank)
        with lock:
            other = cupy.cuda.Stream(non_blocking=True)
        held.all_reduce(x[:0], stream=comm.stream)  # sets it up
        c.all_reduce(x[:0], stream=comm.stream)
        comm.finish()
        if comm.rank == 0:
            held.barrier(stream=comm.stream)
        with comm.stream:
            work = c.all_gather(x, stream=other, async_op=True)
        c.barrier()
        if comm.rank == 0:
            time.sleep(0.3)
            assert not work.done(), "the call did not wait for the current stream"
        c.barrier()
        if comm.rank == 1:
            held.barrier(stream=comm.stream)
        out = work.wait(20)
        other.synchronize()
        comm.finish()
        return bool((back(comm, out) == np.repeat([0, 1], 1000)).all())

    assert run_on(2, ALL, body, timeout=20) == [True] * 2


def test_closing_one_while_others_wait_in_another() -> None:
    """On a GPU that ranks share, freeing would wait for a kernel that waits for this very rank."""

    def body(comm: OnDevice) -> bool:
        c = comm.comm
        twin = c.duplicate()
        for one in (comm, OnDevice(twin, comm.device)):
            check(one, Case("all_reduce", "ring"))
        if comm.rank == 1:
            time.sleep(0.3)
        x = filled(comm, 5000, 1)
        twin.close()
        c.all_reduce(x, stream=comm.stream)
        comm.finish()
        return bool((back(comm, x) == 2).all())

    assert run_on(2, [0], body, timeout=20) == [True] * 2


@pytest.mark.parametrize("what", ["closes", "allocates"])
def test_one_of_a_rank_alone_while_others_wait_on_its_gpu(what: str) -> None:
    """Nobody shares the GPU with that one; the collector of cycles may close it anywhere."""
    alone: list[Any] = []

    def lonely(comm: OnDevice) -> None:
        alone.append(comm.comm.duplicate())
        alone[0].all_reduce(filled(comm, 10, 1), stream=comm.stream)
        alone[0].synchronize()

    def body(comm: OnDevice) -> bool:
        c, twin = comm.comm, comm.comm.duplicate()
        x = filled(comm, 5000, 1)
        for one in (c, twin):
            one.all_reduce(x[:0], stream=comm.stream)
        comm.finish()
        twin.close()  # its memory is to be freed
        comm.meet()
        if comm.rank == 0:
            time.sleep(0.3)
            mine = alone.pop()
            if what == "closes":
                mine.close()
            else:
                mine.empty(10, "float32", "cuda:0", kind="cupy")
        c.all_reduce(x, stream=comm.stream)
        comm.finish()
        return bool((back(comm, x) == 2).all())

    run_on(1, [0], lonely)
    assert run_on(2, [0], body, timeout=20) == [True] * 2


@pytest.mark.parametrize(("n", "count"), [(2, 1_500_000), (3, 100_000), (3, 3_000_000)])
def test_ranks_of_which_one_leaves_room_for_computing(n: int, count: int) -> None:
    """They share the call out differently, if it is large. That ends at once, and in words; and
    where they do not, it works.
    """

    def body(comm: OnDevice) -> str:
        x = filled(comm, count, 1)
        comm.comm.all_reduce(x[:0], stream=comm.stream)
        comm.finish()
        stream = Stream(comm.stream.ptr, comm.device, beside=comm.rank == 0)
        try:
            comm.comm.all_reduce(x, stream=stream)
            comm.stream.synchronize()
            comm.comm.synchronize()
        except cc.MismatchError as error:
            comm.stream.synchronize()
            assert (back(comm, x) == 1).all()
            return str(error)
        assert (back(comm, x) == n).all()
        return ""

    words = run_on(n, ALL, body, timeout=60)
    if count == 100_000:  # in lines, in which blocks do not count
        assert words == [""] * n
    else:
        assert all(words) and any("leaving room for computing" in w for w in words), words


def test_a_buffer_that_ends_while_kernels_use_it() -> None:
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    got = launch.run(
        2, here / "ending_buffer_worker.py", min(GPUS, 2), env={"PYTHONPATH": path}, timeout=100
    ).expect(status=0)
    assert got.output.count("all right") == 2, got
