"""Every disagreement of disagreements.py among ranks that are processes.

disagreeing.py [--nodes 0,0,1]
"""

from __future__ import annotations

import os
import sys

import disagreements
import worker

import collectives as cc


def main() -> None:
    if "--nodes" in sys.argv:
        from mpi4py import MPI

        nodes = sys.argv[sys.argv.index("--nodes") + 1].split(",")
        os.environ["COLLECTIVES_NODE"] = f"node{nodes[MPI.COMM_WORLD.rank]}"
    comm = cc.init(timeout=30)
    assert disagreements.check_all(comm) > 20
    comm.close()


if __name__ == "__main__":
    worker.run(main)
