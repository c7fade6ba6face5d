"""all_reduce of cupy arrays with defaults, which goes a way of its own: device_sum.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpus import MARK, cupy
from on_device import OnDevice, run_on

import collectives as cc

pytestmark = MARK


def at(comm: OnDevice, offset: int, values: Any) -> Any:
    """A cupy array at some bytes into the rank's memory."""
    pointer = cupy.cuda.MemoryPointer(comm.memory.mem, offset)
    comm.copy(pointer.ptr, values.ctypes.data, values.nbytes, 1)
    with comm.stream:
        return cupy.ndarray(values.shape, values.dtype, pointer)


def back(comm: OnDevice, x: Any) -> Any:
    host = np.empty(x.shape, x.dtype)
    comm.copy(host.ctypes.data, x.data.ptr, host.nbytes, 2)
    return host


def by_the_short_way(comm: OnDevice, *arrays: Any) -> bool:
    """Does all_reduce(*arrays) go there?"""
    comm.comm.barrier()
    with comm.stream:
        done = comm.comm._device_sum(arrays[0], arrays[1] if len(arrays) > 1 else None, None, None)
    comm.finish()
    return bool(done)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "complex64"])
@pytest.mark.parametrize("count", [1, 1000, 50_001])
def test_sums(dtype: str, count: int) -> None:
    def body(comm: OnDevice) -> None:
        mine = (np.arange(count) % 7 + comm.rank).astype(dtype)
        total = (3 * (np.arange(count) % 7) + 3).astype(dtype)
        x, out = at(comm, 0, mine), at(comm, 1 << 20, np.zeros(count, dtype))
        comm.comm.barrier()
        with comm.stream:
            assert comm.comm.all_reduce(x, out=out) is out  # the first sets the engine up
            comm.finish()
            assert (back(comm, out) == total).all() and (back(comm, x) == mine).all()
            assert comm.comm.all_reduce(x) is x
        comm.finish()
        assert (back(comm, x) == total).all()
        x = at(comm, 0, mine)
        assert by_the_short_way(comm, x)
        assert (back(comm, x) == total).all()

    run_on(3, [0], body, timeout=20)


def test_leaves_the_rest_to_the_general_path() -> None:
    def body(comm: OnDevice) -> None:
        x, y = at(comm, 0, np.ones(64, np.float32)), at(comm, 4096, np.ones(64, np.float32))
        with comm.stream:
            comm.comm.all_reduce(x)
        comm.finish()
        wide, short = at(comm, 8192, np.ones(64)), at(comm, 8192, np.ones(63, np.float32))
        shifted = cupy.ndarray((64,), np.float32, cupy.cuda.MemoryPointer(comm.memory.mem, 4))
        assert not by_the_short_way(comm, np.ones(64, np.float32))
        assert not by_the_short_way(comm, x[::2])
        for out in (wide, short, shifted, np.ones(64, np.float32)):
            assert not by_the_short_way(comm, x, out)
            with pytest.raises((cc.ArrayError, cc.ArrayTypeError)), comm.stream:
                comm.comm.all_reduce(x, out=out)
        assert by_the_short_way(comm, x, y) and (back(comm, y) == comm.comm.size * 2).all()
        comm.comm.close()
        with pytest.raises(cc.ClosedError), comm.stream:
            comm.comm.all_reduce(x)

    run_on(2, [0], body, timeout=20)


def test_counts_that_differ_raise() -> None:
    def body(comm: OnDevice) -> bool:
        x = at(comm, 0, np.ones(64, np.float32))
        with comm.stream:
            comm.comm.all_reduce(x)
            comm.finish()
            try:
                comm.comm.all_reduce(x[: 60 + comm.rank])
                comm.comm.synchronize()
            except cc.MismatchError:
                return True
        return False

    assert run_on(2, [0], body, timeout=20) == [True, True]
