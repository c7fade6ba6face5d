"""Ranks tune, change what was written, and meet again: all of them ask the file.

COLLECTIVES_TABLE names the file.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import worker
from mpi4py import MPI

import collectives as cc
from collectives import cli


def main() -> None:
    # Uneven: a rank that is alone on its node has to choose as the others do.
    os.environ["COLLECTIVES_NODE"] = "a" if MPI.COMM_WORLD.rank < 2 else "b"
    status = cli.main(["tune", "--collective", "all_reduce", "-b", "64", "-e", "64"])
    assert status == 0, status
    path = Path(os.environ["COLLECTIVES_TABLE"])
    comm = cc.init(timeout=30)
    if comm.rank == 0:
        content = json.loads(path.read_text())
        for layout in content["layouts"].values():
            layout["choices"]["all_reduce"] = [[(1 << 64) - 1, "ring"]]
        path.write_text(json.dumps(content))
    comm.barrier()
    again = comm.duplicate()
    assert again.all_reduce(np.ones(16)).tolist() == [3.0] * 16
    os.write(1, f"rank {again.rank} chooses {again._tuner.choose('all_reduce', 64)}\n".encode())
    again.close()
    comm.close()


worker.run(main)
