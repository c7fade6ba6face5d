"""What the workers share."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

# torch warns of parts of its own that it still uses.
warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
warnings.filterwarnings("ignore", category=FutureWarning)

CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Registers a part of a worker under its name."""
    CHECKS[function.__name__] = function
    return function


def start(backend: str = "collectives", seconds: float = 60) -> tuple[int, int]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, timeout=timedelta(seconds=seconds))
    return rank, size


def run_all(backend: str = "collectives") -> None:
    """Runs all checks, or those that the arguments name, one after the other, on all ranks."""
    start(backend)
    for name, function in CHECKS.items():
        if len(sys.argv) > 1 and name not in sys.argv[1:]:
            continue
        try:
            torch.manual_seed(0)
            function()
            dist.barrier()
        except BaseException as error:
            print(f"{name} failed on rank {os.environ['RANK']}: {error!r}", flush=True)
            raise
    dist.destroy_process_group()
    if int(os.environ["RANK"]) == 0:
        print("all checks passed")


def same(got: torch.Tensor, wanted: object) -> None:
    expected = torch.as_tensor(wanted).to(got)
    assert got.shape == expected.shape, (got.shape, expected.shape)
    assert torch.equal(got, expected), (got, expected)
