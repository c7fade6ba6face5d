"""Rank 1 dies in the first attempt before it comes to a process group, and in the second between
that and another group; the argument is a directory, in which ranks tell each other how far they
are. torchrun keeps its store over all attempts.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from common import start


def rank_1_dies(when: str) -> None:
    """Once rank 0 has been waiting for a while for the next step of rank 1."""
    told = Path(sys.argv[1]) / when
    if os.environ["RANK"] == "0":
        told.touch()
        return
    while not told.exists():
        time.sleep(0.01)
    time.sleep(0.5)
    os._exit(3)


attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if attempt == 0:
    rank_1_dies("before a group")
rank, size = start(seconds=20)
if attempt == 1:
    rank_1_dies("between groups")
pair = dist.new_group()
x = torch.ones(3)
dist.all_reduce(x)
dist.all_reduce(x, group=pair)
# The callback track has a communicator of its own, which comes about now.
dist.all_reduce(x, async_op=True).get_future().then(lambda f: dist.all_reduce(x)).wait()
assert x[0] == size**4
dist.monitored_barrier()
print(f"rank {rank} is through in attempt {attempt}\n", end="", flush=True)
dist.destroy_process_group()
