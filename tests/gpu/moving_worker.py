"""A rank that is a process: sends and receives on its GPU. `moving_worker.py GPUS`."""

import sys

import numpy as np
from on_device import OnDevice
from test_point_to_point import MORE_THAN_FITS, Box, message, same, shift_ranks

import collectives as cc


def main() -> None:
    comm = cc.init(timeout=60)
    proxy = OnDevice(comm, comm.rank % int(sys.argv[1]))
    proxy.all_reduce(np.ones(8, np.float32))  # sets the engine up
    shift_ranks(proxy, [0, 1, 4099, 100_001], 1)
    shift_ranks(proxy, [5, 70_001], 0)
    box, last = Box(proxy), comm.size - 1
    x = message(0, last, MORE_THAN_FITS)
    array = box.put(x) if comm.rank == 0 else box.empty(x)
    comm.barrier()
    if comm.rank == 0:
        comm.send(array, last)
    elif comm.rank == last:
        comm.recv(array, 0)
    proxy.finish()
    assert comm.rank not in (0, last) or same(box.get(array), x)
    print("all right", flush=True)
    comm.close()


main()
