"""Functional collectives and DTensor."""

from __future__ import annotations

import torch
import torch.distributed as dist
from common import check, run_all, same
from torch.distributed import _functional_collectives as functional
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor


def me() -> int:
    return dist.get_rank()


def n() -> int:
    return dist.get_world_size()


@check
def functional_and_dtensor() -> None:
    world = dist.group.WORLD
    same(functional.all_reduce(torch.ones(3), "sum", world) + 0, [float(n())] * 3)
    same(functional.all_reduce(torch.ones(3), "avg", world) + 0, [1.0] * 3)
    same(functional.broadcast(torch.full((2,), float(me())), 1, world) + 0, [1.0, 1.0])
    gathered = functional.all_gather_tensor(torch.full((2,), float(me())), 0, world)
    same(gathered + 0, torch.arange(float(n())).repeat_interleave(2))
    scattered = functional.reduce_scatter_tensor(torch.ones(2 * n()), "sum", 0, world)
    same(scattered + 0, [float(n())] * 2)
    exchanged = functional.all_to_all_single(torch.arange(float(n())), None, None, world)
    same(exchanged + 0, [float(me())] * n())
    pair = functional.all_reduce_coalesced([torch.ones(3), torch.ones(1)], "sum", world)
    same(pair[1] + 0, [float(n())])
    mesh = dist.init_device_mesh("cpu", (n(),))
    full = torch.arange(4.0 * n()).reshape(2 * n(), 2)
    sharded = distribute_tensor(full, mesh, [Shard(0)])
    same(sharded.full_tensor(), full)
    ones = distribute_tensor(torch.ones(2, 1), mesh, [Replicate()])
    product = (sharded @ ones).redistribute(mesh, [Replicate()])
    same(product.to_local(), full.sum(1, keepdim=True))
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    same(partial.full_tensor(), [float(n())] * 2)
    across = DTensor.from_local(torch.full((n(), 1), float(me())), mesh, [Shard(1)])
    same(across.redistribute(mesh, [Shard(0)]).to_local(), torch.arange(float(n())).unsqueeze(0))


@check
def results_as_tensors_of_other_calls() -> None:
    """Of calls that may be under way: what is passed on stands for a tensor to come."""
    world = dist.group.WORLD

    def started(count: int = 3, start: int = 0) -> torch.Tensor:
        return functional.all_reduce(torch.ones(count), "sum", world)[start:]

    for async_op in (False, True):
        work = dist.all_reduce(x := started(5, start=2), async_op=async_op)
        work.wait() if async_op else None
        same(x + 0, [float(n() ** 2)] * 3)
    dist.all_reduce_coalesced(pair := [started(), started(2)])
    same(pair[1] + 0, [float(n() ** 2)] * 2)
    dist.reduce(x := started(), 0)
    same(x + 0, [float(n() ** 2 if me() == 0 else n())] * 3)
    dist.broadcast(x := started() * (me() + 1), n() - 1)
    same(x + 0, [float(n() ** 2)] * 3)
    dist.all_gather(outs := [started() for _ in range(n())], started())
    dist.all_gather_into_tensor(out := started(3 * n()), started())
    same(out + 0, torch.cat(outs))
    same(out + 0, [float(n())] * 3 * n())
    dist.reduce_scatter_tensor(out := started(), started(3 * n()))
    same(out + 0, [float(n() ** 2)] * 3)
    dist.all_to_all_single(out := torch.empty(n()), started(n()))
    same(out, [float(n())] * n())
    sent = dist.isend(started(), (me() + 1) % n())
    dist.recv(x := started(), (me() - 1) % n())
    sent.wait()
    same(x + 0, [float(n())] * 3)
    mesh = dist.init_device_mesh("cpu", (n(),))
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    dist.all_reduce(x := partial.redistribute(mesh, [Replicate()]).to_local())
    same(x + 0, [float(n() ** 2)] * 2)


if __name__ == "__main__":
    run_all()
