"""Queued calls and messages among ranks that are processes."""

from __future__ import annotations

import numpy as np
import worker

import collectives as cc


def main() -> None:
    comm = cc.init(timeout=30)
    rank, n = comm.rank, comm.size
    xs = [np.full(1 + 777 * i, rank + i, np.int64) for i in range(40)]
    works = [comm.all_reduce(x, async_op=True) for x in xs]
    extra = np.array([rank])
    comm.all_reduce(extra)  # behind those in the queue
    assert all(work.done() for work in works)
    for i, x in enumerate(xs):
        assert (x == sum(range(n)) + n * i).all(), i
    assert extra[0] == sum(range(n))

    twin = comm.duplicate()
    order = [comm, twin] if rank % 2 else [twin, comm]
    works = [c.all_reduce(np.full(50_000, 1.0), async_op=True) for c in order for _ in range(3)]
    assert all((work.wait(30) == n).all() for work in works)
    twin.close()

    for count in (0, 1, 5000, 700_000):
        out = np.zeros(count)
        comm.sendrecv(np.full(count, rank + 1.0), (rank + 1) % n, out, (rank - 1) % n, 5, 5)
        assert (out == (rank - 1) % n + 1).all()

    outs = [np.zeros(100_000) for _ in range(n)]
    with comm.group():
        for peer in reversed(range(n)):
            comm.recv(outs[peer], peer, peer + 1)
        for peer in range(n):
            comm.send(np.full(100_000, float(rank * 10 + peer)), peer, rank + 1)
    for peer, out in enumerate(outs):
        assert (out == peer * 10 + rank).all(), (peer, out[0])

    if rank == 0:  # tags out of order, then a length that differs
        for tag in (1, 2, 3):
            comm.send(np.full(10, float(tag)), 1, tag)
        comm.send(np.zeros(11), 1, 9)
        comm.send(np.ones(10), 1, 9)
    elif rank == 1:
        for tag in (3, 1, 2):
            assert comm.recv(np.zeros(10), 0, tag)[0] == tag
        try:
            comm.recv(np.zeros(10), 0, 9)
        except cc.MismatchError as error:
            assert "expects 10 x float64" in str(error), error
        else:
            raise AssertionError("a message of another length was taken")
        assert comm.recv(np.zeros(10), 0, 9)[0] == 1
    comm.barrier()
    comm.close()


if __name__ == "__main__":
    worker.run(main)
