"""Ranks whose flight recorders are read.

recording.py stuck      rank 1 keeps away from call 6; all get SIGUSR1 while the others wait
recording.py handler    the program has a handler of its own for SIGUSR1
recording.py error      rank 1 makes another call than the others
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

import collectives as cc


def stuck(comm: cc.Communicator) -> None:
    x = np.ones(1 << 20, np.float32)
    for _ in range(5):
        comm.all_reduce(x, "max")
    pids = comm.all_gather(np.array([os.getpid()]))  # call 6
    folder = Path(os.environ["COLLECTIVES_DUMP"])
    if comm.rank != 1:
        comm.all_reduce(x, "max")
        return
    # Until the others wait, as their own dumps say; every signal makes new ones.
    end = time.monotonic() + 20
    while time.monotonic() < end:
        for pid in pids:
            os.kill(int(pid), signal.SIGUSR1)
        time.sleep(0.1)
        texts = [f.read_text() for f in folder.glob("*.json")]
        if len(texts) == comm.size and sum('"waiting"' in t for t in texts) == comm.size - 1:
            break
    comm.all_reduce(x, "max")


def handler(comm: cc.Communicator) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)
    assert heard.wait(10)


def error(comm: cc.Communicator) -> None:
    with contextlib.suppress(cc.MismatchError):
        comm.all_reduce(np.ones(3 + (comm.rank == 1)))
    comm.barrier()


heard = threading.Event()

if __name__ == "__main__":
    if sys.argv[1] == "handler":
        signal.signal(signal.SIGUSR1, lambda *_: heard.set())
    with cc.init(timeout=30) as world:
        {"stuck": stuck, "handler": handler, "error": error}[sys.argv[1]](world)
    print(f"rank {world.rank} ended well")
