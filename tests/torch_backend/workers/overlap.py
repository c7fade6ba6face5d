"""FSDP2's reduce_scatters go on beside the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from common import check, run_all, same
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

WAIT = timedelta(seconds=40)  # without the overlap it is spent, and the test fails


class Gate(torch.autograd.Function):
    """Passes x on; its backward pass does something else too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, action: Callable[[], None]) -> torch.Tensor:
        ctx.action = action
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.action()
        return gradients[0], None


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.action: Callable[[], None] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(Gate.apply(x, self.action))


def layers(n: int, **options: Any) -> tuple[nn.Sequential, nn.Sequential]:
    """A model whose layers FSDP2 shards, and the same one whole."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(16) for _ in range(n)))
    torch.manual_seed(0)
    whole = nn.Sequential(*(Layer(16) for _ in range(n)))
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options), whole


def equal_gradients(model: nn.Module, whole: nn.Module, within: float = 1e-6) -> None:
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        assert (p.grad.full_tensor() - q.grad).abs().max() <= within


@check
def backward_goes_on_while_gradients_are_reduced() -> None:
    """Rank 0 gets to the first layer's backward pass before the others reduce the last layer's
    gradients: they wait for it. If rank 0 waited for its reduce_scatter, nobody would go on.
    """
    meet()
    store = dist.distributed_c10d._get_default_store()
    for reshard in (False, True):
        model, whole = layers(2, reshard_after_forward=reshard)
        key = f"rank 0 went on {reshard}"
        if dist.get_rank() == 0:
            model[0].action = lambda k=key: store.set(k, b"")
        else:
            model[1].action = lambda k=key: store.wait([k], WAIT)
        x = torch.randn(4, 16, requires_grad=True)
        model(x).sum().backward()
        whole(x).sum().backward()
        equal_gradients(model, whole)


def meet() -> None:
    """The first reduce_scatter of a group makes a communicator, which all ranks wait for."""
    model, _ = layers(1)
    model(torch.ones(4, 16)).sum().backward()


@check
def all_gathers_overtake_reduce_scatters() -> None:
    """The program's next calls do not wait for a reduce_scatter, which other ranks begin later."""
    meet()
    n, rank = dist.get_world_size(), dist.get_rank()
    group = dist.distributed_c10d._get_default_group()
    x, out = torch.arange(2.0 * n), torch.empty(2)
    gathered = torch.empty(n)
    if rank == 0:
        work = group.begin_reduce_scatter(out, x, dist.ReduceOp.SUM)
        dist.all_gather_into_tensor(gathered, torch.full((1,), float(rank)))
        assert not work.is_completed()
    else:
        dist.all_gather_into_tensor(gathered, torch.full((1,), float(rank)))
    dist.barrier()
    if rank:
        group.begin_reduce_scatter(out, x, dist.ReduceOp.SUM)
    group.end_reduce_scatters()
    same(gathered, list(range(n)))
    same(out, [2 * rank * n, (2 * rank + 1) * n])


@check
def gradients_that_are_used_at_once() -> None:
    """Added to, converted, divided, given to hooks: then torch waits."""
    x = torch.randn(4, 16, requires_grad=True)
    model, whole = layers(3)
    for _ in range(3):
        model(x).sum().backward()
        whole(x).sum().backward()
    equal_gradients(model, whole, 1e-5)
    for low in (torch.bfloat16, torch.float16):
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=low)
        model, whole = layers(3, mp_policy=policy)
        model(x).float().sum().backward()
        whole(x).sum().backward()
        equal_gradients(model, whole, 0.1)
    model, whole = layers(3)
    seen: list[torch.Tensor] = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.to_local().clone()))
    model(x).sum().backward()
    wanted = [p.grad.to_local() for layer in reversed(model) for p in layer.parameters()]
    assert len(seen) == len(wanted)
    for got, expected in zip(seen, wanted, strict=True):
        same(got, expected)


@check
def meshes_of_two_dimensions() -> None:
    n = dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (1, n), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), mesh=mesh)
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    x = torch.randn(4, 16, requires_grad=True)
    model(x).sum().backward()
    whole(x).sum().backward()
    equal_gradients(model, whole)


@check
def an_error_is_raised_by_backward() -> None:
    """Of a group that is aborted while its gradients are reduced; the next model has another."""
    group = dist.new_group()
    mesh = dist.DeviceMesh.from_group(group, "cpu")
    model = fully_shard(Layer(16), mesh=mesh)
    model(torch.randn(4, 16, requires_grad=True)).sum().backward()
    model.zero_grad()
    if dist.get_rank() == 0:
        model.action = group.abort
    try:
        model(torch.randn(4, 16, requires_grad=True)).sum().backward()
    except RuntimeError as error:
        assert "abort" in str(error), error
    else:
        raise AssertionError("an aborted reduce_scatter went unnoticed")


if __name__ == "__main__":
    run_all()
