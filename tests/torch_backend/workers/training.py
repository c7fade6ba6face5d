"""Data parallel training of torch, with every option, against training in one process."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from common import check, run_all
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    ddp_zero_hook,
    default_hooks,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS, BATCH = 4, 12


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 33), nn.ReLU(), nn.Linear(33, 35), nn.ReLU(), nn.Linear(35, 4)
    )


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 16, generator=generator), torch.randn(BATCH, 4, generator=generator)


def mine(x: torch.Tensor) -> torch.Tensor:
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def loss(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(m(x).float(), y)


def alone(optimizer: Any = torch.optim.SGD, lr: float = 0.05) -> nn.Module:
    m = model()
    o = optimizer(m.parameters(), lr=lr)
    for step in range(STEPS):
        o.zero_grad()
        loss(m, *batch(step)).backward()
        o.step()
    return m


def equal(m: nn.Module, reference: nn.Module, within: float = 1e-5) -> None:
    for p, q in zip(m.parameters(), reference.parameters(), strict=True):
        p = p.full_tensor() if hasattr(p, "full_tensor") else p
        assert (p - q).abs().max() <= within, (p - q).abs().max()


def train(m: nn.Module, o: Any, step_loss: Callable[..., torch.Tensor] = loss) -> None:
    for step in range(STEPS):
        x, y = batch(step)
        o.zero_grad()
        step_loss(m, mine(x), mine(y)).backward()
        o.step()


def with_ddp(hook: Callable[[DDP], None] | None = None, **options: Any) -> nn.Module:
    m = model()
    ddp = DDP(m, **options)
    if hook is not None:
        hook(ddp)
    train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.05))
    return m


@check
def ddp() -> None:
    reference = alone()
    equal(with_ddp(), reference)
    equal(with_ddp(gradient_as_bucket_view=True, static_graph=True), reference)
    equal(with_ddp(bucket_cap_mb=0.001), reference)
    equal(with_ddp(find_unused_parameters=True), reference)


@check
def ddp_with_unused_parameters() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    d = DDP(Partly(), find_unused_parameters=True)
    for _ in range(3):
        d(torch.ones(2, 4)).sum().backward()
    assert d.module.unused.weight.grad is None


@check
def ddp_no_sync() -> None:
    m = model()
    d = DDP(m)
    o = torch.optim.SGD(d.parameters(), lr=0.05)
    for step in range(STEPS):
        x, y = batch(step)
        o.zero_grad()
        (x1, x2), (y1, y2) = mine(x).chunk(2), mine(y).chunk(2)
        with d.no_sync():
            (loss(d, x1, y1) / 2).backward()
        (loss(d, x2, y2) / 2).backward()
        o.step()
    equal(m, alone())


@check
def ddp_join() -> None:
    d = DDP(model())
    o = torch.optim.SGD(d.parameters(), lr=0.01)
    with d.join():
        for step in range(2 + dist.get_rank()):
            o.zero_grad()
            loss(d, *batch(step)).backward()
            o.step()
    flat = torch.cat([p.detach().flatten() for p in d.parameters()])
    others = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(others, flat)
    assert all(torch.equal(flat, other) for other in others)


@check
def ddp_join_divides_by_those_that_are_left() -> None:
    """The reducer waits for a work that Python holds no more."""
    d = DDP(nn.Linear(5, 5, bias=False))
    with d.join(divide_by_initial_world_size=False):
        for _ in range(2 + 2 * dist.get_rank()):
            d(torch.full((1, 5), 3.0)).sum().backward()
            assert (d.module.weight.grad == 3).all(), d.module.weight.grad
            d.zero_grad()


@check
def ddp_buffers() -> None:
    d = DDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    for step in range(2):
        d(torch.randn(4, 4) + dist.get_rank() + step).sum().backward()
    d(torch.randn(4, 4))  # the forward pass takes the buffers of rank 0
    steps = d.module[1].num_batches_tracked.clone()
    dist.broadcast(steps, 0)
    assert steps == 3


@check
def comm_hooks() -> None:
    reference = alone()
    equal(with_ddp(lambda d: d.register_comm_hook(None, default_hooks.allreduce_hook)), reference)
    fp16 = default_hooks.fp16_compress_hook
    equal(with_ddp(lambda d: d.register_comm_hook(None, fp16)), reference, 1e-3)
    equal(with_ddp(lambda d: d.register_comm_hook(None, in_bfloat16)), reference, 1e-2)


def in_bfloat16(state, bucket):  # torch compares annotations, so there are none
    """torch's bf16 hook, which torch refuses by its name wherever there is no NCCL."""
    return default_hooks.bf16_compress_hook(None, bucket)


@check
def comm_hooks_that_call_out_of_callbacks() -> None:
    """With many buckets: every callback makes calls of its own, which ranks make at other times."""
    reference = alone()
    for approximation in (1, 4):
        state = powerSGD_hook.PowerSGDState(
            None, approximation, start_powerSGD_iter=2, min_compression_rate=0.5
        )
        m = with_ddp(
            lambda d, s=state: d.register_comm_hook(s, powerSGD_hook.powerSGD_hook),
            bucket_cap_mb=0.001,
        )
        equal(m, reference, 0.2)
        same_on_all_ranks(m)
    for hook in (
        quantization_hooks.quantization_pertensor_hook,
        quantization_hooks.quantization_perchannel_hook,
    ):
        m = with_ddp(
            lambda d, h=hook: d.register_comm_hook(dist.group.WORLD, h), bucket_cap_mb=0.001
        )
        equal(m, reference, 0.05)
        same_on_all_ranks(m)


def same_on_all_ranks(m: nn.Module) -> None:
    flat = torch.cat([p.detach().flatten() for p in m.parameters()])
    first = flat.clone()
    dist.broadcast(first, 0)
    assert torch.equal(first, flat)


@check
def post_local_sgd() -> None:
    everyone = dist.new_group()
    state = PostLocalSGDState(None, everyone, start_localSGD_iter=100)
    equal(with_ddp(lambda d: d.register_comm_hook(state, post_localSGD_hook)), alone())


@check
def zero_redundancy_optimizer() -> None:
    reference = alone(torch.optim.Adam, 1e-3)
    for as_bucket_view in (False, True):
        m = model()
        d = DDP(m)
        o = ZeroRedundancyOptimizer(
            d.parameters(),
            optimizer_class=torch.optim.Adam,
            lr=1e-3,
            parameters_as_bucket_view=as_bucket_view,
        )
        train(d, o)
        equal(m, reference)
        o.consolidate_state_dict(0)
        if dist.get_rank() == 0:
            assert len(o.state_dict()["state"]) == 6
    m = model()
    d = DDP(m, bucket_cap_mb=0.001)
    o = ZeroRedundancyOptimizer(
        d.parameters(), optimizer_class=torch.optim.SGD, overlap_with_ddp=True, lr=1e-3
    )
    hook = ddp_zero_hook.hook_with_zero_step(default_hooks.allreduce_hook, d, o)
    d.register_comm_hook(None, hook)
    for step in range(STEPS):
        x, y = batch(step)
        loss(d, mine(x), mine(y)).backward()
    same_on_all_ranks(m)


def with_fsdp2(clip: float | None = None, mesh: Any = None, **options: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    m = model()
    mesh = mesh or dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in m:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    fully_shard(m, mesh=mesh, **options)
    o = torch.optim.Adam(m.parameters(), lr=1e-3)
    for step in range(STEPS):
        x, y = batch(step)
        o.zero_grad()
        loss(m, mine(x), mine(y)).backward()
        if clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(m.parameters(), clip).full_tensor()
            assert 0 < norm < 100
        o.step()
    return m


@check
def fsdp2() -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    reference = alone(torch.optim.Adam, 1e-3)
    equal(with_fsdp2(), reference)
    equal(with_fsdp2(reshard_after_forward=False), reference)
    equal(with_fsdp2(clip=1e3), reference)
    for low, reduce in (
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, None),
        (torch.float16, torch.float16),
    ):
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=reduce)
        equal(with_fsdp2(mp_policy=policy), reference, 2e-2)


@check
def fsdp2_over_a_mesh_of_two_dimensions() -> None:
    n = dist.get_world_size()
    reference = alone(torch.optim.Adam, 1e-3)
    for shape in ((n, 1), (1, n)):
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        equal(with_fsdp2(mesh=mesh), reference)


@check
def fsdp2_options() -> None:
    from torch.distributed.fsdp import fully_shard

    m = fully_shard(model(), mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    m.set_gradient_divide_factor(4.0)
    m.set_allocate_memory_from_process_group_for_comm(True)
    loss(m, *batch(0)).backward()
    reference = model()
    loss(reference, *batch(0)).backward()
    for p, q in zip(m.parameters(), reference.parameters(), strict=True):
        expected = q.grad * dist.get_world_size() / 4
        assert (p.grad.full_tensor() - expected).abs().max() < 1e-6


@check
def state_dicts_and_checkpoints() -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        set_model_state_dict,
    )

    m = with_fsdp2()
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_model_state_dict(m, options=whole)
    if dist.get_rank() == 0:
        equal(m_of(full), alone(torch.optim.Adam, 1e-3))
    where = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(where, 0)
    dcp.save({"model": get_model_state_dict(m)}, checkpoint_id=where[0])
    again = with_fsdp2()
    with torch.no_grad():
        for p in again.parameters():
            p.zero_()
    state = {"model": get_model_state_dict(again)}
    dcp.load(state, checkpoint_id=where[0])
    set_model_state_dict(again, state["model"])
    for p, q in zip(again.parameters(), m.parameters(), strict=True):
        assert torch.equal(p.to_local(), q.to_local())
    files = os.listdir(where[0])
    dist.barrier()
    if dist.get_rank() == 0:
        for name in files:
            os.remove(os.path.join(where[0], name))
        os.rmdir(where[0])


def m_of(state: dict[str, torch.Tensor]) -> nn.Module:
    m = model()
    m.load_state_dict(state)
    return m


@check
def fsdp1() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        f = FullyShardedDataParallel(
            model(), device_id=torch.device("cpu"), sharding_strategy=strategy
        )
        o = torch.optim.SGD(f.parameters(), lr=0.05)
        train(f, o)
        assert f.clip_grad_norm_(1.0) > 0
        with FullyShardedDataParallel.summon_full_params(f):
            for p, q in zip(f.parameters(), alone().parameters(), strict=True):
                assert (p - q).abs().max() < 1e-5


@check
def compiled() -> None:
    """torch.compile keeps functional collectives in its graph."""
    from torch.distributed import _functional_collectives as functional

    def step(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x * 2, "sum", dist.group.WORLD) + 1

    compiled_step = torch.compile(step, backend="aot_eager", fullgraph=True)
    n = dist.get_world_size()
    assert torch.equal(compiled_step(torch.ones(3)), torch.full((3,), 2.0 * n + 1))


@check
def compiled_ddp() -> None:
    """torch.compile of a module in DDP: Dynamo does not look into the process group."""
    torch.manual_seed(0)
    module = torch.nn.Linear(10, 10)
    wrapped = [DDP(copy.deepcopy(module), static_graph=static) for static in (False, True)]
    steps = [torch.compile(ddp, backend="eager") for ddp in wrapped]
    for turn in range(3):
        x = torch.full((4, 10), 0.1 * (turn + dist.get_rank()))
        for step in steps:
            step(x).square().sum().backward()
        for p, q in zip(*(ddp.parameters() for ddp in wrapped), strict=True):
            assert p.grad is not None and torch.equal(p.grad, q.grad)
            mean = p.grad.clone()
            dist.all_reduce(mean)
            assert torch.allclose(mean, p.grad * dist.get_world_size())


if __name__ == "__main__":
    run_all()
