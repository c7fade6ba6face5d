"""One rank, a thread of which makes symmetric buffers while another calls: memory that is freed in
the middle of a call is overwritten where MALLOC_PERTURB_ is set.
"""

import threading

import numpy as np
from gpus import cupy
from on_device import OnDevice, run_on


def body(proxy: OnDevice) -> None:
    comm = proxy.comm
    arrays = [
        cupy.ndarray((n,), np.float32, cupy.cuda.MemoryPointer(proxy.memory.mem, 0))
        for n in range(1, 65)
    ]
    comm.all_reduce(arrays[0], stream=proxy.stream)
    ended = threading.Event()
    calls = 0

    def call() -> None:
        nonlocal calls
        cupy.cuda.Device(proxy.device).use()
        while not ended.is_set():
            comm.all_reduce(arrays[calls % len(arrays)], stream=proxy.stream)
            calls += 1

    caller = threading.Thread(target=call)
    caller.start()
    kept = [comm.empty(64, "float32", "cuda:0", kind="cupy") for _ in range(300)]
    ended.set()
    caller.join()
    comm.synchronize()
    print(f"{len(kept)} buffers, {calls > 0}", flush=True)


run_on(1, [0], body, timeout=20)
