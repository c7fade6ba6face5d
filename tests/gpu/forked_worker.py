"""Two ranks that are processes, of which the first forks: the child writes what its calls raise,
and closes. Then the last rank is killed, and the first writes what its own call raises, and how
long after.
"""

import os
import signal
import time
from collections.abc import Callable

import numpy as np
from gpus import cupy
from on_device import OnDevice

import collectives as cc


def in_child(comm: cc.Communicator, x: cupy.ndarray) -> None:
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: comm.all_reduce(x),
        "all_gather": lambda: comm.all_gather(x[:1], out=x[:2]),
        "send": lambda: comm.send(x, 1),
        "synchronize": comm.synchronize,
        "empty": lambda: comm.empty(3, "float32", "cuda:0", kind="cupy"),
        "register": lambda: comm.register(x),
    }
    words = ""
    for name, call in calls.items():
        try:
            call()
            words += f"child: {name} raised nothing\n"
        except cc.CollectiveError as error:
            forked = "forked" in str(error)
            words += f"child: {name} raised {type(error).__name__}, {forked}\n"
    comm.close()
    os.write(1, f"{words}child: closed\n".encode())


def main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher's, when it sees the death
    comm = cc.init(timeout=60)
    proxy = OnDevice(comm, 0)
    x = cupy.ndarray((20_000,), np.float32, cupy.cuda.MemoryPointer(proxy.memory.mem, 0))
    with proxy.stream:
        for _ in range(2):
            comm.all_reduce(x)
        comm.synchronize()
        comm.barrier()
        if comm.rank == 0:
            child = os.fork()
            if child == 0:
                in_child(comm, x)
                os._exit(0)
            os.waitpid(child, 0)
        comm.all_reduce(x)
        comm.synchronize()
        comm.barrier()
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        try:
            comm.all_reduce(x)
            comm.synchronize()
            words = "nothing raised"
        except cc.CollectiveError as error:
            words = f"{type(error).__name__} after {time.monotonic() - began:.1f} s"
    os.write(1, f"parent: {words}\n".encode())
    os._exit(1)


main()
