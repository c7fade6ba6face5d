"""A rank that is a process: a few collectives through CUDA IPC. `ipc_worker.py GPUS`."""

import os
import sys
from pathlib import Path

from cases import Case, check, registry
from on_device import OnDevice

import collectives as cc
from collectives import device as engines
from collectives.tuning.device import Launch


def main() -> None:
    comm = cc.init(timeout=60)
    proxy = OnDevice(comm, comm.rank % int(sys.argv[1]))
    alone = int(sys.argv[1]) > 1
    for algorithm, collective in registry(comm.size):
        if collective == "barrier":
            continue
        for count in (1, 1000, 300_001) if alone else (1000,):
            check(proxy, Case(collective, algorithm, count=count, place="out"))
    engines.device_launch = lambda *_: Launch(copies=True)
    assert comm._device is not None
    for collective in ("all_reduce", "reduce_scatter", "all_gather"):
        before = comm._device.core.exchanges
        check(proxy, Case(collective, "direct_two_shot", count=300_001 if alone else 1000))
        assert (comm._device.core.exchanges > before) == (comm._device.path == "peer")
    # Memory that processes share has no name, and no way in once all have mapped it.
    files = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    assert not [file for file in files if "collectives-gpu" in file], files
    print(f"path {comm._device.path}, {comm._device.blocks} blocks\nall right", flush=True)
    comm.close()


main()
