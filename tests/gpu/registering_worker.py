"""A rank that is a process and registers arrays: `registering_worker.py GPUS`. On emulated GPUs it
counts what it has mapped.
"""

from __future__ import annotations

import sys
from pathlib import Path

import cupy
import numpy as np
from on_device import EMULATED, OnDevice

import collectives as cc

SIZE, COUNT = 4 << 20, 5000


def mapped() -> int:
    """Allocations of emulated GPUs in this process; on real ones none is seen."""
    return Path("/proc/self/maps").read_text().count("emulated-gpu")


def main() -> None:
    comm = cc.init(timeout=60)
    proxy = OnDevice(comm, comm.rank % int(sys.argv[1]))
    runtime = cupy.cuda.runtime
    base = runtime.malloc(SIZE)
    host = np.empty(COUNT, np.float32)

    def array(offset: int) -> cupy.ndarray:
        memory = cupy.cuda.UnownedMemory(base, SIZE, None, proxy.device)
        return cupy.ndarray((COUNT,), cupy.float32, cupy.cuda.MemoryPointer(memory, offset))

    def check(x: cupy.ndarray) -> None:
        host[:] = np.arange(COUNT) + comm.rank
        proxy.copy(x.data.ptr, host.ctypes.data, host.nbytes, 1)
        comm.barrier()
        with proxy.stream:
            comm.all_reduce(x, algorithm="direct_two_shot")
        proxy.finish()
        proxy.copy(host.ctypes.data, x.data.ptr, host.nbytes, 2)
        assert (host == 2 * np.arange(COUNT) + 1).all()

    x, y = array(4096 * comm.rank), array(SIZE // 2 + 512 * comm.rank)
    comm.all_reduce(x, stream=proxy.stream)
    proxy.finish()
    before = mapped()
    first, second = comm.register(x), comm.register(y)
    assert first.zero_copy and second.zero_copy, (first, second)
    assert mapped() == before + EMULATED, "two arrays of one allocation open it once"
    check(x)
    check(y)
    first.close()
    assert mapped() == before + EMULATED
    check(y)

    # Freed too early by its owner, and allocated again: the old mapping is not taken for the new.
    comm.barrier()
    runtime.free(base)
    base = runtime.malloc(SIZE)
    comm.barrier()
    third = comm.register(array(4096 * comm.rank))
    assert third.zero_copy, third
    assert mapped() == before + 2 * EMULATED, "another allocation is opened"
    check(array(4096 * comm.rank))
    second.close()
    assert mapped() == before + EMULATED
    check(array(4096 * comm.rank))
    comm.close()  # ends what is open: only this process's own two allocations are left
    assert mapped() == 2 * EMULATED
    assert third.why == "the communicator is closed"
    print("all right", flush=True)


main()
