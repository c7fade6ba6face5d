"""Ranks that are processes and drop a symmetric buffer while a call is still to work on it:
`ending_buffer_worker.py GPUS`.
"""

import gc
import sys
import threading

import numpy as np
from on_device import OnDevice

import collectives as cc

COUNT = 2 << 20


def main() -> None:
    comm = cc.init(timeout=60, max_blocks=2)  # there is room for both
    proxy = OnDevice(comm, comm.rank % int(sys.argv[1]))
    late = comm.duplicate()
    other = OnDevice(late, proxy.device)
    for one in (proxy, other):
        assert one.all_reduce(np.ones(10, np.float32))[0] == 2
    place = f"cuda:{proxy.device}"
    x = comm.empty(COUNT, "float32", place, kind="cupy")
    host = np.ones(COUNT, np.float32)
    proxy.copy(x.data.ptr, host.ctypes.data, host.nbytes, 1)
    comm.barrier()
    # Rank 1 comes late on its GPU: it waits there for what rank 0 begins a little later.
    begin = threading.Timer(0.5, lambda: late.barrier(stream=other.stream))
    if comm.rank == 0:
        begin.start()
    else:
        late.barrier(stream=proxy.stream)
    comm.all_reduce(x, stream=proxy.stream, algorithm="direct_two_shot")
    del x
    gc.collect()
    for _ in range(3):  # the first releases what was dropped, the next frees it
        comm.empty(1000, "float32", place, kind="cupy")
    proxy.stream.synchronize()
    comm.synchronize()
    if comm.rank == 0:
        begin.join()
    other.stream.synchronize()
    late.synchronize()
    comm.barrier()
    print("all right", flush=True)


main()
