"""A rank that is a process: a few collectives through CUDA IPC. `ipc_worker.py GPUS`."""

import sys

from cases import Case, check, registry
from on_device import OnDevice

import collectives as cc


def main() -> None:
    comm = cc.init(timeout=60)
    proxy = OnDevice(comm, comm.rank % int(sys.argv[1]))
    alone = int(sys.argv[1]) > 1
    for algorithm, collective in registry(comm.size):
        if collective == "barrier":
            continue
        for count in (1, 1000, 300_001) if alone else (1000,):
            check(proxy, Case(collective, algorithm, count=count, place="out"))
    print("all right", flush=True)
    comm.close()


main()
