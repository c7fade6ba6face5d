"""Makes many communicators, and writes what has grown: test_leaks.py says how.

leaking.py COUNT    parts of the world, on ranks that are processes
leaking.py worlds   one world after another, of two ranks that meet over TCP in this process
"""

from __future__ import annotations

import os
import sys
import threading

import soak
import test_leaks
import worker

import collectives as cc
from collectives.bootstrap import Server, Tcp, listen

SECRET = b"a secret of the tests"


def world() -> None:
    server = Server(listen("127.0.0.1"), size=2, secret=SECRET, job="job")
    server.start()

    def rank(number: int) -> None:
        met = Tcp(server.address, rank=number, size=2, secret=SECRET, timeout=30)
        met.all_gather(b"x")
        met.close()

    ranks = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    server.stop(1)


def main() -> None:
    if sys.argv[1] == "worlds":
        for _ in range(30):
            world()
        before = soak.held()
        for _ in range(300):
            world()
        print(f"worlds: {test_leaks.growth(before, soak.held())}")
        return
    comm = cc.init(timeout=60)
    before, after = test_leaks.lives(comm, int(sys.argv[1]))
    if comm.rank == 0:
        print(f"rank 0: {test_leaks.growth(before, after)} {before} {after}")
    comm.close()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    worker.run(main)
