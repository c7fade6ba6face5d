"""Gathers whose input lies in their output, in its own place or in another rank's."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.distributed as dist
from common import check, run_all, same

COUNTS = (1, 3, 100, 1000, 100_000)


def from_each_place(count: int, gather: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    for place in range(n):
        for shift in (0, 1):  # into the place of the next one
            rows = torch.full((n * count + 1,), float(rank))
            given = rows[place * count + shift :][:count]
            gather(rows[:-1], given)
            same(rows[:-1].view(n, count), torch.arange(n).view(n, 1).expand(n, count))


@check
def gathers_into_one_tensor() -> None:
    for count in COUNTS:
        from_each_place(count, lambda rows, given: dist.all_gather_into_tensor(rows, given))


@check
def gathers_into_one_tensor_of_one_rank() -> None:
    options, group = dist.GatherOptions(), dist.distributed_c10d._get_default_group()

    def gather(rows: torch.Tensor, given: torch.Tensor) -> None:
        group.gather_single(rows, given, options).wait()
        dist.broadcast(rows, options.rootRank)

    for root, count in itertools.product(range(dist.get_world_size()), COUNTS):
        options.rootRank = root
        from_each_place(count, gather)


@check
def gathers_into_a_list_of_one_rank() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()

    def gather(rows: torch.Tensor, given: torch.Tensor) -> None:
        dist.gather(given, list(rows.view(n, -1)) if rank == 1 else None, dst=1)
        dist.broadcast(rows, 1)

    for count in COUNTS:
        from_each_place(count, gather)


@check
def gathers_into_a_list() -> None:
    n = dist.get_world_size()
    for count in COUNTS:
        from_each_place(
            count, lambda rows, given: dist.all_gather(list(rows.view(n, -1)), given)
        )  # fmt: skip


@check
def gathers_of_unequal_lengths() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    lengths = [r + 1 for r in range(n)]
    for place in range(n):
        rows = torch.full((sum(lengths) + n,), float(rank))
        given = rows[sum(lengths[:place]) :][: rank + 1]
        dist.all_gather(list(rows[: sum(lengths)].split(lengths)), given)
        same(rows[: sum(lengths)], [float(r) for r in range(n) for _ in range(r + 1)])


if __name__ == "__main__":
    run_all()
