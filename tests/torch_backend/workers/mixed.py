"""Groups with one backend for CPU tensors and another one for CUDA tensors."""

from __future__ import annotations

import sys
import warnings

import torch
import torch.distributed as dist
from common import CHECKS, check, same, start

from collectives.torch.group import CollectivesGroup
from collectives.torch.mixed import CollectivesBackend, can_take_part


@check
def every_call() -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    mine = torch.arange(2.0) + 10 * rank
    every = [torch.arange(2.0) + 10 * r for r in range(n)]
    x = mine.clone()
    dist.all_reduce(x)
    same(x, sum(every))
    work = dist.all_reduce(x := mine.clone(), async_op=True)
    work.wait()
    same(x, sum(every))
    (y,) = dist.all_reduce(z := mine.clone(), async_op=True).get_future().wait()
    same(y, sum(every))
    same(z, sum(every))
    x = mine.clone()
    dist.broadcast(x, 1)
    same(x, every[1])
    dist.reduce(x := mine.clone(), 0)
    if rank == 0:
        same(x, sum(every))
    outs = [torch.empty(2) for _ in range(n)]
    dist.all_gather(outs, mine)
    same(torch.stack(outs), torch.stack(every))
    out = torch.empty(2 * n)
    dist.all_gather_into_tensor(out, mine)
    same(out, torch.cat(every))
    dist.reduce_scatter_tensor(out := torch.empty(2), torch.cat(every))
    same(out, every[rank] * n)
    dist.all_to_all_single(out := torch.empty(n), torch.full((n,), float(rank)))
    same(out, list(range(n)))
    dist.gather(mine, outs if rank == 0 else None)
    dist.scatter(out := torch.empty(2), every if rank == 0 else None)
    same(out, every[rank])
    if rank == 0:
        dist.send(mine, 1, tag=3)
    elif rank == 1:
        dist.recv(x, 0, tag=3)
        same(x, every[0])
    objects = [None] * n
    dist.all_gather_object(objects, rank)
    assert objects == list(range(n))
    dist.barrier()


@check
def training() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    d = torch.nn.parallel.DistributedDataParallel(model)
    x = torch.randn(4, 3)
    d(x * (1 + dist.get_rank())).sum().backward()
    mean = sum(range(1, dist.get_world_size() + 1)) / dist.get_world_size()
    assert torch.allclose(model.weight.grad, (x * mean).sum(0).expand(2, 3), rtol=1e-5)


def main() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        start(sys.argv[1])
    warned = [w for w in caught if "serves all devices here" in str(w.message)]
    group = dist.distributed_c10d._get_default_group()
    devices = dict(part.split(":") for part in sys.argv[1].split(","))
    if can_take_part():
        assert not warned
        for device, backend in devices.items():
            found = group._get_backend(torch.device(device))
            assert isinstance(found, CollectivesBackend) == (backend == "collectives"), found
    else:
        assert len(warned) == 1, caught
        assert isinstance(group, CollectivesGroup)
    for function in CHECKS.values():
        function()
    dist.destroy_process_group()
    print("all checks passed")


if __name__ == "__main__":
    main()
