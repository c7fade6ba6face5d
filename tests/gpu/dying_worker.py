"""Ranks that are processes, of which the last is killed: `dying_worker.py GPUS ALGORITHM`. The
others, in an all_reduce (with "copies" as algorithm, in one by copy engines), or with "recv" in a
receive from it, write what they raise and how long after; then they still use their GPUs. With
"close" they close the communicator behind an all_reduce, and write how long that took.
"""

import os
import signal
import sys
import time

import cupy
import numpy as np
from on_device import OnDevice

import collectives as cc
from collectives import device as engines
from collectives.tuning.device import Launch


def main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher's, when it sees the death
    comm = cc.init(timeout=60)
    proxy = OnDevice(comm, comm.rank % int(sys.argv[1]))
    x = np.ones(20_000, np.float32)
    algorithm = None if sys.argv[2] in ("recv", "close") else sys.argv[2]
    if algorithm == "copies":
        algorithm = "direct_two_shot"
        engines.device_launch = lambda *_: Launch(copies=True)
    assert proxy.all_reduce(x, algorithm=algorithm)[0] == comm.size
    comm.barrier()
    if comm.rank == comm.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    array = cupy.ndarray((20_000,), cupy.float32, cupy.cuda.MemoryPointer(proxy.memory.mem, 0))
    if sys.argv[2] == "close":
        with proxy.stream:
            comm.all_reduce(array)
        comm.close()
        text = f"rank {comm.rank}: closed after {time.monotonic() - began:.1f} s\n"
        os.write(1, text.encode())
        os._exit(1)
    try:
        with proxy.stream:
            if sys.argv[2] == "recv":
                comm.recv(array, comm.size - 1)
            else:
                comm.all_reduce(array, algorithm=algorithm)
        comm.synchronize()
    except cc.CollectiveError as error:
        seconds = time.monotonic() - began
        first = f"rank {comm.rank}: {type(error).__name__} after {seconds:.1f} s: {error}\n"
    else:
        first = f"rank {comm.rank}: nothing raised\n"
    proxy.copy(proxy.memory.ptr, x.ctypes.data, x.nbytes, 1)
    try:
        comm.all_reduce(array)
        second = f"rank {comm.rank}: nothing raised\n"
    except cc.CollectiveError as error:
        second = f"rank {comm.rank}: again {type(error).__name__}\n"
    os.write(1, (first + second).encode())
    os._exit(1)


main()
