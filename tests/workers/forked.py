"""Ranks that are forked from one process, so that their arrays lie at the same addresses: each
writes "rank R: right" if all collectives give what they must.

    forked.py RANKS PORT
"""

from __future__ import annotations

import os
import sys
import traceback

import numpy as np

import collectives as cc

COUNTS = (12, 9_000, 600_000)
# Allocated before the fork: the addresses are those of all ranks.
ROOM = {count: np.zeros(count, np.int32) for count in COUNTS}
MORE = {count: np.zeros(count, np.int32) for count in COUNTS}


def values(rank: int, count: int) -> np.ndarray:
    return ((np.arange(count) + 3 * rank) % 7).astype(np.int32)


def check(comm: cc.Communicator, count: int) -> None:
    n, rank = comm.size, comm.rank
    x, y = ROOM[count], MORE[count]
    count = count // n * n
    x, y, k = x[:count], y[:count], count // n
    all_of = [values(r, count) for r in range(n)]

    def fresh() -> None:
        x[:] = all_of[rank]
        y[:] = -1

    for root in range(n):
        fresh()
        comm.broadcast(x, root)
        assert np.array_equal(x, all_of[root]), ("broadcast", count, root)
    fresh()
    x[rank * k : (rank + 1) * k] = rank + 1
    comm.all_gather(x[rank * k : (rank + 1) * k], out=x)
    assert np.array_equal(x, np.repeat(np.arange(n) + 1, k)), ("all_gather", count)
    fresh()
    comm.all_to_all(x, out=y)
    parts = [v[rank * k : (rank + 1) * k] for v in all_of]
    assert np.array_equal(y, np.concatenate(parts)), ("all_to_all", count)
    fresh()
    comm.all_reduce(x)
    assert np.array_equal(x, sum(all_of)), ("all_reduce", count)
    fresh()
    comm.all_reduce(x, out=y)
    assert np.array_equal(y, sum(all_of)), ("all_reduce to out", count)
    fresh()
    comm.scatter(x if rank == 0 else None, out=y[:k])
    assert np.array_equal(y[:k], all_of[0][rank * k : (rank + 1) * k]), ("scatter", count)
    fresh()
    comm.gather(x[:k], out=y if rank == n - 1 else None, root=n - 1)
    if rank == n - 1:
        assert np.array_equal(y, np.concatenate([v[:k] for v in all_of])), ("gather", count)


def body(rank: int, n: int, port: str) -> None:
    os.environ.update(
        COLLECTIVES_RANK=str(rank),
        COLLECTIVES_WORLD_SIZE=str(n),
        COLLECTIVES_ADDR="127.0.0.1",
        COLLECTIVES_PORT=port,
    )
    with cc.init(timeout=30) as comm:
        for count in COUNTS:
            check(comm, count)
        comm.barrier()
    os.write(1, f"rank {rank}: right over {comm.transports}\n".encode())


def main() -> None:
    n, port = int(sys.argv[1]), sys.argv[2]
    children = []
    for rank in range(n):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                body(rank, n, port)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        children.append(pid)
    sys.exit(any(os.waitpid(pid, 0)[1] for pid in children))


main()
