"""What comes after what: calls on arrays that are ready on different streams, calls in groups, and
works that outlive their communicator.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpus import GPUS, MARK, cupy, free_memory
from on_device import EMULATED, DeviceArray, OnDevice, back, filled, run_on

import collectives as cc

pytestmark = MARK
ALL = list(range(GPUS))
_FAR = 64 << 10  # bytes between arrays
COUNT = 1000

Calls = dict[str, Callable[[OnDevice, Any, Any], object]]
TWO_ARRAYS: Calls = {
    "all_reduce": lambda c, x, out: c.comm.all_reduce(x, out=out),
    "all_to_all": lambda c, x, out: c.comm.all_to_all(x, out=out),
    "sendrecv": lambda c, x, out: c.comm.sendrecv(x, 1 - c.rank, out, 1 - c.rank),
}


def late(comm: OnDevice, stream: Any, x: Any, value: Any) -> None:
    """`x` gets what is in `value`, on a stream that has much to do before."""
    room = [cupy.cuda.alloc(64 << 20) for _ in range(2)]
    for _ in range(8):
        cupy.cuda.runtime.memcpyAsync(room[0].ptr, room[1].ptr, 64 << 20, 3, stream.ptr)
    cupy.cuda.runtime.memcpyAsync(x.data.ptr, value.data.ptr, x.nbytes, 3, stream.ptr)
    comm.stream.synchronize()


@pytest.mark.parametrize("grouped", [False, True], ids=["alone", "in a group"])
@pytest.mark.parametrize("name", TWO_ARRAYS)
def test_an_input_that_is_ready_on_another_stream(name: str, grouped: bool) -> None:
    """The call waits for it, and its stream for the call: what comes there may write it again."""

    def body(comm: OnDevice) -> bool:
        x, out = filled(comm, COUNT, 0), filled(comm, COUNT, 0, at=_FAR)
        ones, sevens = filled(comm, COUNT, 1, at=2 * _FAR), filled(comm, COUNT, 7, at=3 * _FAR)
        other = cupy.cuda.Stream(non_blocking=True)
        like = np.empty(COUNT, np.float32)
        ready = DeviceArray(x.data.ptr, like, other.ptr, comm.device)
        into = DeviceArray(out.data.ptr, like, comm.stream.ptr, comm.device)
        comm.comm.all_reduce(into)  # sets the engine up
        comm.finish()
        comm.comm.barrier()
        late(comm, other, x, ones)
        comm.comm.barrier()
        if grouped:
            with comm.comm.group():
                TWO_ARRAYS[name](comm, ready, into)
        else:
            TWO_ARRAYS[name](comm, ready, into)
        cupy.cuda.runtime.memcpyAsync(x.data.ptr, sevens.data.ptr, x.nbytes, 3, other.ptr)
        comm.finish()
        other.synchronize()
        comm.comm.barrier()
        assert (back(comm, out) == (2 if name == "all_reduce" else 1)).all()
        assert (back(comm, x) == 7).all()
        return True

    assert run_on(2, ALL, body, timeout=60) == [True] * 2


def test_arrays_on_two_streams_while_one_is_captured() -> None:
    def body(comm: OnDevice) -> str:
        x, out = filled(comm, 8, 1), filled(comm, 8, 0, at=_FAR)
        like = np.empty(8, np.float32)
        other = cupy.cuda.Stream(non_blocking=True)
        comm.all_reduce(like)
        ready = DeviceArray(x.data.ptr, like, other.ptr, comm.device)
        into = DeviceArray(out.data.ptr, like, comm.stream.ptr, comm.device)
        comm.stream.begin_capture()
        try:
            with pytest.raises(cc.ArrayError) as caught:
                comm.comm.all_reduce(ready, out=into)
        finally:
            comm.stream.end_capture()
        return str(caught.value)

    (words,) = run_on(1, [0], body, timeout=20)
    assert "on different streams, of which one is being captured" in words


def test_a_barrier_in_a_group_comes_where_it_is_written() -> None:
    def body(comm: OnDevice) -> list[str]:
        x = filled(comm, COUNT, 1)
        comm.comm.all_reduce(x, stream=comm.stream)
        with comm.comm.group():
            first = comm.comm.all_reduce(x, stream=comm.stream)
            second = comm.comm.barrier(stream=comm.stream)
        assert first.wait() is x and second.wait() is None
        return [call["collective"] for call in comm.comm.dump()["gpu_calls"]]

    assert run_on(2, ALL, body, timeout=20) == [["all_reduce", "all_reduce", "barrier"]] * 2


@pytest.mark.parametrize("name", ["all_reduce", "recv"])
def test_a_work_of_a_group_waits_for_the_gpu(name: str) -> None:
    """The other rank comes later, though the group has ended here."""

    def body(comm: OnDevice) -> bool:
        comm.all_reduce(np.ones(8, np.float32))
        x = filled(comm, COUNT, comm.rank + 1)
        if comm.rank == 1:
            time.sleep(0.5)
        with comm.comm.group():
            if name == "all_reduce":
                work = comm.comm.all_reduce(x, stream=comm.stream)
            elif comm.rank == 0:
                work = comm.comm.recv(x, 1, stream=comm.stream)
            else:
                work = comm.comm.send(x, 0, stream=comm.stream)
        waits = not work.done()
        if comm.rank == 0:
            with pytest.raises(cc.DeadlineError):
                work.wait(timeout=0.01)
        work.wait()
        assert work.done()
        assert (back(comm, x) == (3 if name == "all_reduce" else 2)).all()
        comm.comm.barrier()
        return waits or comm.rank == 1

    assert run_on(2, ALL, body, timeout=20) == [True] * 2


def test_a_work_that_has_ended_keeps_its_result() -> None:
    """After `close`, which waited for it, and after an abort that came later."""

    def body(comm: OnDevice) -> bool:
        x = filled(comm, COUNT, 1)
        other = comm.comm.duplicate()
        comm.all_reduce(np.ones(8, np.float32))
        other.all_reduce(x, stream=comm.stream)
        comm.stream.synchronize()
        comm.comm.barrier()
        closed = comm.comm.all_reduce(x, async_op=True, stream=comm.stream)
        aborted = other.all_reduce(x, async_op=True, stream=comm.stream)
        while not aborted.done():
            time.sleep(1e-3)
        comm.comm.barrier()
        other.abort("for a reason")
        comm.comm.close()
        assert closed.done() and closed.wait() is x
        assert aborted.done() and aborted.wait() is x
        with pytest.raises(cc.ClosedError):
            comm.comm.synchronize()
        return True

    assert run_on(2, ALL, body, timeout=20) == [True] * 2


def test_a_call_that_failed_has_failed_after_close() -> None:
    def body(comm: OnDevice) -> str:
        x = filled(comm, COUNT, 1)
        comm.all_reduce(np.ones(8, np.float32))
        if comm.rank == 1:
            comm.comm.all_reduce(x, stream=comm.stream)
            time.sleep(0.1)
            comm.comm.abort("for a reason")
            return "for a reason"
        work = comm.comm.reduce_scatter(x, stream=comm.stream, async_op=True)
        comm.stream.synchronize()
        comm.comm.close()
        with pytest.raises(cc.CollectiveError) as caught:
            work.wait()
        return str(caught.value)

    assert all(run_on(2, ALL, body, timeout=20))


def used() -> int:
    """Bytes of the GPU; on the emulated runtime they are the process's."""
    if not EMULATED:
        return -free_memory()
    (line,) = (
        line for line in Path("/proc/self/status").read_text().splitlines() if "VmSize" in line
    )
    return int(line.split()[1]) << 10


def test_closing_frees_buffers_whose_arrays_are_gone() -> None:
    large = 256 << 20
    for turn in range(2):  # making the first one frees what others have left
        with cc.init() as comm:
            comm.all_reduce(cupy.empty(8, cupy.float32))
            comm.synchronize()
            before = used()
            x = comm.empty(large, "uint8", "cuda", kind="cupy")
            during = used()
            del x
            gc.collect()
        if turn == 1:
            assert during - before >= large, "what is measured is not the GPU's memory"
            assert used() - before < large // 2


def test_a_buffer_larger_than_any_memory_on_one_rank() -> None:
    """All are told, and number what comes next alike."""

    def body(comm: OnDevice) -> str:
        count = 1 << 62 if comm.rank == 0 else 1 << 20
        with pytest.raises(cc.CollectiveError) as caught:
            comm.comm.empty(count, "float64", "cuda", kind="cupy")
        x = comm.comm.empty(100_000, "float32", "cuda", kind="cupy")
        host = np.ones(100_000, np.float32)
        comm.copy(x.data.ptr, host.ctypes.data, host.nbytes, 1)
        comm.comm.barrier()
        comm.comm.all_reduce(x, algorithm="direct_two_shot", stream=comm.stream)
        comm.finish()
        assert (back(comm, x) == 2).all()
        return str(caught.value)

    for words in run_on(2, ALL, body, timeout=20):
        assert "rank 0: 36893488147419103232 bytes are more than any machine addresses" in words


def test_registered_arrays_that_overlap_on_one_rank() -> None:
    """A call on them would be on another array there."""

    def body(comm: OnDevice) -> str:
        mib = 1 << 20

        def array(at: int) -> Any:
            return cupy.ndarray((mib,), cupy.float32, cupy.cuda.MemoryPointer(comm.memory.mem, at))

        comm.all_reduce(np.ones(8, np.float32))
        first = comm.comm.register(array(0))
        alike = comm.comm.register(array(mib))  # begins in the first, on all ranks
        assert first.zero_copy and alike.zero_copy
        there = array(2 * mib if comm.rank == 0 else 16 * mib)
        with pytest.raises(cc.ArrayError) as caught:
            comm.comm.register(there)
        first.close()
        alike.close()
        assert comm.comm.register(there).zero_copy
        return str(caught.value)

    for words in run_on(2, ALL, body, timeout=20):
        assert (
            "(rank 0: no. 1 from byte 2097152 on, no. 2 from byte 1048576 on; rank 1: none)"
            in words
        )


@pytest.mark.parametrize("algorithm", ["bruck", "direct_two_shot"])
def test_all_to_all_of_nothing(algorithm: str) -> None:
    """Arrays without elements have one address."""

    def body(comm: OnDevice) -> bool:
        empty = np.empty(0, np.float32)
        x, out = (DeviceArray(0, empty, comm.stream.ptr, comm.device) for _ in range(2))
        comm.comm.all_to_all(x, out=out, algorithm=algorithm)
        comm.finish()
        return True

    assert run_on(2, ALL, body, timeout=20) == [True] * 2


def test_two_large_sends_to_oneself_and_one_receive() -> None:
    def body(comm: OnDevice) -> str:
        x, out = (cupy.empty(5 << 20, cupy.float32) for _ in range(2))
        comm.all_reduce(np.ones(8, np.float32))
        with pytest.raises(cc.UnsupportedError) as caught, comm.comm.group():
            comm.comm.send(x, comm.rank, stream=comm.stream)
            comm.comm.recv(out, comm.rank, stream=comm.stream)
            comm.comm.send(x, comm.rank, stream=comm.stream)
        return str(caught.value)

    for words in run_on(2, ALL, body, timeout=20):
        assert "waits on the stream for its receive" in words


def test_bad_arguments_in_words() -> None:
    def body(comm: OnDevice) -> bool:
        comm.all_reduce(np.ones(8, np.float32))
        with pytest.raises(ValueError, match="timeout must be a number"):
            comm.comm.synchronize(timeout=float("nan"))
        for device in ("gpu", "cuda:x", "cuda:"):
            with pytest.raises(ValueError, match="known: 'cpu', 'cuda', 'cuda:N'"):
                comm.comm.empty(8, device=device)
        return True

    assert run_on(1, [0], body, timeout=20) == [True]
