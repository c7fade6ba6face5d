"""What small calls over several nodes give is, bit for bit, what their schedules give: random data,
with the short way and without it.

    fused.py 0,0,1        node of each rank
"""

from __future__ import annotations

import itertools
import os
import sys

import ml_dtypes
import numpy as np
import worker
from mpi4py import MPI

import collectives as cc
from collectives.tuning import BY_NODE

DTYPES = ("float32", ml_dtypes.bfloat16, "complex64")


def results(comm: cc.Communicator, count: int, dtype: object, seed: int) -> dict[str, np.ndarray]:
    """What every call gives on this rank."""
    rng = np.random.default_rng([seed, comm.rank, count])
    x = (rng.standard_normal(count * comm.size) * 10 ** rng.uniform(-3, 3)).astype(dtype)
    found = {}
    for op, name in itertools.product(("sum", "avg"), (BY_NODE, "direct_one_shot")):
        found[f"all_reduce {op} {name}"] = comm.all_reduce(x.copy(), op, algorithm=name)
        ordered = comm.all_reduce(x.copy(), op, algorithm=name, order="rank")
        found[f"all_reduce {op} {name} by rank"] = ordered
    found["all_reduce direct_two_shot"] = comm.all_reduce(x.copy(), algorithm="direct_two_shot")
    found["reduce_scatter"] = comm.reduce_scatter(x, algorithm="direct_two_shot")
    root = comm.size - 1
    reduced = comm.reduce(x.copy(), root=root, algorithm="direct_one_shot")
    if comm.rank == root:
        found["reduce"] = reduced
    found["all_gather"] = comm.all_gather(x[:count], algorithm="direct_one_shot")
    gathered = comm.gather(x[:count], root, algorithm="direct_one_shot")
    if comm.rank == root:
        found["gather"] = gathered
    block = np.empty(count, x.dtype)
    found["scatter"] = comm.scatter(x, root, out=block, algorithm="direct_one_shot")
    joined = x.copy()
    mine = joined[comm.rank * count : (comm.rank + 1) * count]
    found["all_gather in place"] = comm.all_gather(mine, out=joined, algorithm="direct_one_shot")
    found["all_to_all"] = comm.all_to_all(x, algorithm="direct_two_shot")
    found["broadcast"] = comm.broadcast(x.copy(), root, algorithm="direct_one_shot")
    return {name: np.asarray(value).copy() for name, value in found.items()}


def main() -> None:
    nodes = [int(n) for n in sys.argv[1].split(",")]
    os.environ["COLLECTIVES_NODE"] = f"node{nodes[MPI.COMM_WORLD.rank]}"
    comm = cc.init(timeout=30)
    assert comm.nodes == nodes
    tuning = comm._core.tuning
    limits = tuning.assembled_max, tuning.assembled_by_node_max
    assert min(limits) > 0
    done = 0
    counts = (1, 60, 6000) if len(nodes) == len(set(nodes)) == 2 else (1, 60)
    for seed, (count, dtype) in enumerate(itertools.product(counts, DTYPES)):
        tuning.assembled_max, tuning.assembled_by_node_max = limits
        short = results(comm, count, dtype, seed)
        tuning.assembled_max = tuning.assembled_by_node_max = 0
        long = results(comm, count, dtype, seed)
        for name, value in short.items():
            assert value.tobytes() == long[name].tobytes(), (name, count, dtype)
            done += 1
    everywhere = comm.all_gather(np.array([done]))
    comm.close()
    if comm.rank == 0:
        print(f"compared {int(everywhere.sum())}")


worker.run(main)
