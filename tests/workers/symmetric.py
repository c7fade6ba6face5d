"""Symmetric arrays among ranks that are processes: all mixtures, and their life."""

from __future__ import annotations

import os

import numpy as np
import test_symmetric
import worker

import collectives as cc

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all")


def main() -> None:
    comm = cc.init(timeout=30)
    for collective in COLLECTIVES:
        found = list(test_symmetric.mixtures(collective, comm.size))
        test_symmetric.check_symmetric(comm, found)
    staged(comm)
    kept = []
    for i in range(30):
        x = comm.empty(20_000 + i)
        x[:] = comm.rank
        comm.all_reduce(x)
        assert (x == comm.size * (comm.size - 1) / 2).all()
        if i % (comm.rank + 2) == 0:
            kept = [*kept[-2:], x]
    descriptors = len(os.listdir("/proc/self/fd"))
    assert descriptors < 100, f"{descriptors} open descriptors"
    last = comm.empty(5000)
    last[:] = 7
    comm.close()
    assert (last == 7).all()


def staged(comm: cc.Communicator) -> None:
    """Large calls on symmetric arrays touch no page of the segment where others are staged."""
    symmetric = [comm.empty(1 << 20), comm.empty(1 << 20)]
    ordinary = [np.empty(1 << 20, np.float32) for _ in range(2)]
    part = comm.duplicate()
    before = segment_pages()
    for arrays, largest in ((symmetric, 128 << 10), (ordinary, 1 << 40)):
        # Symmetric in the one communicator are ordinary in the other.
        one = comm if arrays is symmetric else part
        x, out = arrays
        x[:] = 1
        one.all_reduce(x)
        one.all_reduce(x, out=out)
        one.broadcast(x, 1)
        one.reduce_scatter(x, out=out[: x.size // comm.size + 1][: part_of(comm, x.size)])
        one.all_gather(x[: 1 << 18], out=np.empty(comm.size << 18, np.float32))
        grown = segment_pages() - before
        assert grown <= largest, f"{grown} bytes of the segment were touched"
    assert grown > 256 << 10, "the measurement sees nothing"
    part.close()


def part_of(comm: cc.Communicator, count: int) -> int:
    return count // comm.size + (comm.rank < count % comm.size)


def segment_pages() -> int:
    """Bytes in memory of the segments that ranks share, less the symmetric arrays themselves."""
    total, counts = 0, False
    with open("/proc/self/smaps") as file:
        for line in file:
            if "memfd:" in line:
                counts = "symmetric" not in line
            elif line[0] in "0123456789abcdef" and "-" in line.split()[0]:
                counts = False
            elif counts and line.startswith("Rss:"):
                total += int(line.split()[1]) << 10
    return total


if __name__ == "__main__":
    worker.run(main)
