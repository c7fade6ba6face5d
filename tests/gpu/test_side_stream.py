"""Calls beside the caller's stream: they come after what is on it, it waits where it is told to,
and the host knows afterwards when they ran.
"""

from __future__ import annotations

import itertools
import threading
import time
from functools import partial

import numpy as np
import pytest
from gpus import GPUS, MARK, cupy
from on_device import OnDevice, run_on

from collectives import _core
from collectives.array import Stream
from collectives.side_stream import SideStreams, SideWork, quietest

pytestmark = MARK


@pytest.mark.parametrize("order", [None, "rank"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_calls_beside_the_stream(n: int, order: str | None) -> None:
    count, calls = 40_000, 4

    def body(comm: OnDevice) -> None:
        side = SideStreams()
        began = time.monotonic()
        with comm.stream:
            arrays = [cupy.empty(count, np.float32) for _ in range(calls)]
            works = []
            for turn, x in enumerate(arrays):
                x.set(np.full(count, comm.rank + turn, np.float32))
                call = partial(comm.comm.all_reduce, x, order=order)
                works.append(side.launch("cuda:0", call))
            for work in works:
                assert isinstance(work, SideWork)
                work.wait()
            comm.stream.synchronize()
        comm.comm.synchronize()  # raises what went wrong in a kernel
        for turn, x in enumerate(arrays):
            assert (x.get() == sum(r + turn for r in range(n))).all()
        spans = [work.span() for work in works if isinstance(work, SideWork)]
        assert all(work.done() for work in works)
        at = began - 0.1
        for start, end in spans:  # one after the other, in the time of the host
            assert at <= start <= end, spans
            at = end - 1e-6
        assert at <= time.monotonic() + 0.1, spans

    run_on(n, [0], body, timeout=60)


def test_a_thread_beside_the_stream() -> None:
    """Its calls come after what was on the stream, and do not wait for what comes later: there rank
    0 waits for rank 1, which comes to it when both threads are through. There is room for three
    kernels of four thread blocks.
    """

    def body(comm: OnDevice) -> None:
        other = comm.comm.duplicate()
        streams: list[int] = []
        with comm.stream:
            side = SideStreams()
            x, y = (cupy.empty(40_000, np.float32) for _ in "xy")
            # The first call on a GPU allocates, which may wait for all kernels.
            other.all_reduce(cupy.empty(1, np.float32))
            comm.comm.all_reduce(cupy.empty(1, np.float32))
            y.set(np.full(40_000, comm.rank + 1, np.float32))

            def calls() -> None:
                streams.append(cupy.cuda.get_current_stream().ptr)
                side.launch("cuda:0", partial(other.all_reduce, y)).wait()

            thread = threading.Thread(target=side.of("cuda:0").beside(calls))
            thread.start()
            if comm.rank == 1:
                thread.join(30)
            x.set(np.full(40_000, comm.rank, np.float32))
            comm.comm.all_reduce(x)
            thread.join(30)
            assert not thread.is_alive()
            comm.stream.synchronize()
            assert (y.get() == 3).all()
            assert (x.get() == 1).all()
            assert streams == [side.of("cuda:0")._stream.handle]
        comm.comm.synchronize()
        other.synchronize()
        other.close()

    run_on(2, [0], body, timeout=60, max_blocks=4)


def test_the_clock_goes_on_from_any_mark() -> None:
    def body(comm: OnDevice) -> None:
        with comm.stream:
            side = SideStreams().of("cuda:0")
            first = side.mark()
            first.wait()
            told = side.when(first)
            side.anchor(first)
            assert abs(side.when(first) - told) < 1e-6
            second = side.mark()
            second.wait()
            assert told - 1e-6 <= side.when(second) <= time.monotonic() + 0.1

    run_on(1, [0], body, timeout=60)


def test_arrays_on_the_host_are_called_as_they_are() -> None:
    done = _core.has_cuda
    assert SideStreams().launch("cpu", lambda stream: (stream, done)) == (None, done)


@pytest.mark.skipif(
    GPUS < 2, reason="needs a GPU that is not the current one (tests/emulated has it in every run)"
)
@pytest.mark.parametrize("own", [True, False], ids=["own", "given"])
def test_the_default_stream_of_another_gpu(own: bool) -> None:
    """Every GPU has one, and the same handle means that of the GPU which is current. Programs need
    not make theirs current: a torch tensor says where it is.
    """

    def body(comm: OnDevice) -> None:
        x = cupy.empty(1000, np.float32)
        host = np.full(1000, comm.rank + 1, np.float32)
        comm.copy(x.data.ptr, host.ctypes.data, host.nbytes, 1)
        side = _core.SideStream(comm.device, 0 if own else comm.stream.ptr)
        assert own or side.handle == comm.stream.ptr
        comm.comm.barrier()
        cupy.cuda.Device(1 - comm.device).use()
        if comm.rank == 0:
            time.sleep(0.2)  # the other's call waits meanwhile
        side.begin(0)
        comm.comm.all_reduce(x, stream=Stream(side.handle, comm.device))
        side.end().hold(0)
        cupy.cuda.Device(comm.device).use()
        cupy.cuda.runtime.memcpyAsync(host.ctypes.data, x.data.ptr, host.nbytes, 2, 0)
        cupy.cuda.Device(comm.device).synchronize()
        assert (host == 3).all()
        comm.comm.barrier()

    run_on(2, [0, 1], body, timeout=60)


def test_whether_a_stream_disturbs_is_measured() -> None:
    """Of three streams two have queues in the same half of the GPU's. The emulated runtime has no
    halves, so only the way is looked at there.
    """
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    pairs = itertools.permutations([stream.ptr for stream in streams], 2)
    found = [_core.slowdown(0, *pair) for pair in pairs]
    if hasattr(cupy, "RawModule"):
        assert max(found) > 1.6, found
        chosen = quietest(0, 0, lambda: cupy.cuda.Stream(non_blocking=True), lambda one: one.ptr)
        assert _core.slowdown(0, 0, chosen.ptr) < 1.4
    assert all(times > 0 for times in found)


def test_nothing_is_measured_on_streams_that_must_be_left_alone() -> None:
    busy, free = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    free.begin_capture()
    assert _core.slowdown(0, busy.ptr, free.ptr) == 1
    assert _core.slowdown(0, free.ptr, busy.ptr) == 1
    free.end_capture()

    def body(comm: OnDevice) -> None:  # other threads may wait for this one
        other = cupy.cuda.Stream(non_blocking=True)
        with comm.stream:
            comm.comm.all_reduce(cupy.empty(1, np.float32))
            assert _core.slowdown(0, comm.stream.ptr, other.ptr) == 1

    run_on(2, [0], body, timeout=60)


@pytest.mark.parametrize(
    ("times", "chosen"),
    [((1.0, 9), 0), ((2, 1.3, 9), 1), ((2, 2, 2, 1.1), 3), ((2.1, 1.9, 2, 2.2, 9), 1)],
)
def test_the_quietest_of_four_streams_is_taken(
    times: tuple[float, ...], chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    monkeypatch.setattr(_core, "slowdown", lambda _gpu, _computing, stream: times[stream])

    def make() -> int:
        made.append(len(made))
        return made[-1]

    assert quietest(0, 7, make, lambda one: one) == chosen
    assert made == list(range(min(4, chosen + 1 if times[chosen] < 1.4 else 4)))
