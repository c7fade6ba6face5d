"""CUDA tensors. Ranks share a GPU where there are fewer GPUs than ranks.

COLLECTIVES_TEST_DEVICE=cpu runs what does not need a GPU on the host.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from common import check, run_all, same
from torch import nn
from torch.distributed import ReduceOp
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from collectives import ArrayError
from collectives.torch import extension

KIND = os.environ.get("COLLECTIVES_TEST_DEVICE", "cuda")
RANK, N = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if KIND == "cuda":
    GPUS = torch.cuda.device_count()
    DEVICE = torch.device("cuda", RANK % GPUS)
    torch.cuda.set_device(DEVICE)
else:
    GPUS, DEVICE = 0, torch.device("cpu")
LONG = 1_000_000_000  # cycles of the GPU: about half a second


def on_gpu(function: Callable[[], None]) -> Callable[[], None]:
    return check(function) if KIND == "cuda" else function


def ranks_of(dtype: torch.dtype = torch.float32, count: int = 6) -> list[torch.Tensor]:
    return [(torch.arange(count) % 5 + r).to(dtype).to(DEVICE) for r in range(N)]


@check
def every_reduction() -> None:
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32,
                  torch.int64, torch.uint8):  # fmt: skip
        every = ranks_of(dtype)
        stacked = torch.stack(every).double()
        for op, wanted in (
            (ReduceOp.SUM, stacked.sum(0)),
            (ReduceOp.MAX, stacked.amax(0)),
            (ReduceOp.MIN, stacked.amin(0)),
            (ReduceOp.PRODUCT, stacked.prod(0)),
        ):
            for async_op in (False, True):
                x = every[RANK].clone()
                work = dist.all_reduce(x, op, async_op=async_op)
                if async_op:
                    work.wait()
                same(x, wanted)
        dist.reduce(x := every[RANK].clone(), 0)
        if RANK == 0:
            same(x, stacked.sum(0))
        dist.reduce_scatter_tensor(out := torch.empty_like(x), torch.cat(every))
        same(out, every[RANK].double() * N)
        dist.reduce_scatter(out, [e.clone() for e in every])
        same(out, every[RANK].double() * N)
    every = ranks_of()
    dist.all_reduce(x := every[RANK].clone(), ReduceOp.AVG)
    assert torch.allclose(x, torch.stack(every).mean(0))
    flags = torch.full((3,), 1 << RANK, dtype=torch.int32, device=DEVICE)
    dist.all_reduce(flags, ReduceOp.BOR)
    same(flags, [(1 << N) - 1] * 3)


@check
def every_movement() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        every = ranks_of(dtype)
        mine, whole = every[RANK], torch.cat(every)
        dist.broadcast(x := mine.clone(), N - 1)
        same(x, every[-1])
        dist.all_gather_into_tensor(out := torch.empty_like(whole), mine)
        same(out, whole)
        outs = [torch.empty_like(mine) for _ in range(N)]
        dist.all_gather(outs, mine)
        same(torch.cat(outs), whole)
        dist.gather(mine, outs if RANK == 0 else None)
        dist.scatter(out := torch.empty_like(mine), every if RANK == 0 else None)
        same(out, mine)
        dist.all_to_all_single(out := torch.empty_like(whole), whole)
        same(out, torch.cat([mine] * N))
    uneven = [torch.full((r + 1,), float(r), device=DEVICE) for r in range(N)]
    outs = [torch.empty_like(u) for u in uneven]
    dist.all_gather(outs, uneven[RANK])
    same(torch.cat(outs), torch.cat(uneven))
    sends = [RANK + 1] * N
    receives = [r + 1 for r in range(N)]
    out = torch.empty(sum(receives), device=DEVICE)
    x = torch.full((sum(sends),), float(RANK), device=DEVICE)
    dist.all_to_all_single(out, x, receives, sends)
    same(out, torch.cat(uneven))
    turned = torch.empty(N * 2, 3, device=DEVICE).t()  # goes through scratch
    dist.all_reduce(turned.fill_(1.0))
    same(turned, torch.full((3, N * 2), float(N)))
    if N > 1 and RANK < 2:
        x = ranks_of()[RANK]
        if RANK == 0:
            dist.send(x, 1, tag=5)
        else:
            dist.recv(x, 0, tag=5)
            same(x, ranks_of()[0])
    objects: list[Any] = [None] * N
    dist.all_gather_object(objects, {"rank": RANK})
    assert objects == [{"rank": r} for r in range(N)]
    dist.barrier()


@check
def calls_that_are_like_ones_before() -> None:
    """With other numbers and in other memory. The extension makes them, if there is one."""
    dist.all_reduce(torch.ones(1, device=DEVICE))
    if KIND == "cuda":
        release = ".".join(torch.__version__.split(".")[:2])
        in_cpp = type(dist.group.WORLD.allreduce).__name__ == "Method"
        assert in_cpp == (release in extension.built_for())
    kept = []
    for turn in range(4):
        for async_op in (False, True):
            every = [numbers * (turn + 1) for numbers in ranks_of()]
            whole = torch.cat(every)
            total, most, flags = every[RANK].clone(), every[RANK].clone(), every[RANK] > 3
            gathered, mine = torch.empty_like(whole), torch.empty_like(total)
            works = [
                dist.all_reduce(total, async_op=async_op),
                dist.all_reduce(most, ReduceOp.MAX, async_op=async_op),
                dist.all_reduce(flags, ReduceOp.MAX, async_op=async_op),
                dist.all_gather_into_tensor(gathered, every[RANK], async_op=async_op),
                dist.reduce_scatter_tensor(mine, whole, async_op=async_op),
            ]
            for work in works:
                if async_op:
                    work.wait()
            same(total, sum(every))
            same(most, torch.stack(every).amax(0))
            same(flags, torch.stack(every).amax(0) > 3)
            same(gathered, whole)
            same(mine, every[RANK] * N)
            kept += [total, most, flags, gathered, mine, *every]
    seven, many = torch.empty(7, device=DEVICE), torch.empty(7 * N + 1, device=DEVICE)
    for wrong in (
        lambda: dist.all_gather_into_tensor(many, seven),
        lambda: dist.reduce_scatter_tensor(seven, many),
    ):
        try:
            wrong()
        except ArrayError:
            continue
        raise AssertionError("nothing was raised")


@check
def sends_and_receives() -> None:
    """Of any dtype, not contiguous, in batches that go both ways, larger than what fits between two
    ranks; as a part of what is on the stream.
    """
    dist.all_reduce(torch.ones(1, device=DEVICE))
    to, source = (RANK + 1) % N, (RANK - 1) % N
    if N == 1:
        return
    for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.bool):
        every = ranks_of(dtype, 6)
        x, out = every[RANK].view(2, 3).t(), torch.zeros(2, 3, dtype=dtype, device=DEVICE).t()
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, x.contiguous(), to), dist.P2POp(dist.irecv, out, source)]
        )
        assert len(works) == 2
        for work in works:
            work.wait()
        same(out, every[source].view(2, 3).t())
    count = 17 << 20
    x = torch.zeros(count, dtype=torch.uint8, device=DEVICE)
    outs = [torch.zeros_like(x) for _ in range(2)]
    for turn in range(3):
        x.fill_(RANK * 10 + turn)
        ops = [dist.P2POp(dist.isend, x, to, tag=t) for t in range(2)]
        ops += [dist.P2POp(dist.irecv, out, source, tag=t) for t, out in enumerate(outs)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        for out in outs:
            same(out[::100_003], torch.full_like(out[::100_003], source * 10 + turn))
    if RANK == 0:
        dist.send(x, 1)
        works = [dist.isend(x[:99] + t, 1, tag=t) for t in range(3)]
    elif RANK == 1:
        dist.recv(outs[0], 0)
        parts = [torch.zeros(99, dtype=torch.uint8, device=DEVICE) for _ in range(3)]
        works = [dist.irecv(p, 0, tag=t) for t, p in enumerate(parts)]
    else:
        works = []
    for work in works:
        work.wait()
    if RANK == 1:
        same(outs[0][::100_003], torch.full_like(outs[0][::100_003], 2))
        for t, p in enumerate(parts):
            same(p, torch.full_like(p, 2 + t))
    group = dist.group.WORLD
    assert KIND == "cpu" or group._main.comm._device.moves


@on_gpu
def calls_follow_the_current_stream() -> None:
    every = ranks_of(count=1 << 16)
    total = torch.stack(every).sum(0)
    for _ in range(3):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            x = torch.zeros_like(total)
            torch.cuda._sleep(LONG // 20)
            x.copy_(every[RANK])
            dist.all_reduce(x)
            doubled = x * 2
        stream.synchronize()
        same(doubled, total * 2)


@on_gpu
def waiting_does_not_block_the_host() -> None:
    x = torch.ones(1000, device=DEVICE)
    dist.all_reduce(x, async_op=True).wait()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda._sleep(LONG)
    work = dist.all_reduce(x, async_op=True)
    assert not work.is_completed()
    work.wait()
    future = dist.all_reduce(x, async_op=True).get_future()
    future.wait()
    after = torch.cuda.Event()
    after.record()
    assert not after.query(), "the host waited for the GPU"
    after.synchronize()
    assert work.is_completed()
    same(x, torch.full((1000,), float(N**3)))


@on_gpu
def a_barrier_waits_for_the_gpu() -> None:
    dist.all_reduce(torch.ones(1, device=DEVICE))
    torch.cuda._sleep(LONG)
    before = torch.cuda.Event()
    before.record()
    dist.barrier()
    assert before.query(), "the host did not wait for the GPU"


@on_gpu
def memory_lives_until_the_call_has_ended() -> None:
    """Inputs that are dropped at once, whose memory the allocator would give to the next tensor."""
    count = 1 << 18
    outs, works = [], []
    for turn in range(4):
        x = torch.full((count,), float(RANK + turn), device=DEVICE)
        out = torch.empty(N * count, device=DEVICE)
        torch.cuda._sleep(LONG // 50)
        works.append(dist.all_gather_into_tensor(out, x, async_op=True))
        outs.append(out)
        del x
        torch.full((count,), -1.0, device=DEVICE)
    for turn, (work, out) in enumerate(zip(works, outs, strict=True)):
        work.wait()
        same(out.view(N, count)[:, ::1009].amax(1), [float(r + turn) for r in range(N)])
        same(out.view(N, count)[:, ::1009].amin(1), [float(r + turn) for r in range(N)])


@on_gpu
def tensors_outlive_their_group() -> None:
    """torch marks the end of a tensor's memory on the streams that it was used on."""
    group = dist.new_group()
    x = torch.ones(1 << 20, device=DEVICE)
    dist.all_reduce(x, group=group, async_op=True).wait()
    dist.destroy_process_group(group)
    del group
    gc.collect()
    same(x[::99991], torch.full_like(x[::99991], float(N)))
    del x
    torch.ones(1 << 20, device=DEVICE)
    torch.cuda.synchronize()


@on_gpu
def another_gpu_may_be_current() -> None:
    """A tensor says where it is: its GPU's default stream is meant, not the current one's."""
    assert GPUS > 1
    x = torch.full((1 << 16,), float(RANK + 1), device=DEVICE)
    torch.cuda.set_device((DEVICE.index + 1) % GPUS)
    try:
        for asynchronous in (True, False):
            torch.cuda._sleep(LONG // 50)
            work = dist.all_reduce(x, async_op=asynchronous)
            if work is not None:
                work.wait()
            x /= N
        same(x[::997], torch.full_like(x[::997], (N + 1) / 2))
    finally:
        torch.cuda.set_device(DEVICE)


@on_gpu
def callbacks_of_futures_see_the_result() -> None:
    x = torch.full((1 << 16,), 1.0, device=DEVICE)
    torch.cuda._sleep(LONG // 20)
    future = dist.all_reduce(x, async_op=True).get_future().then(lambda f: f.value()[0] * 2)
    doubled = future.wait()
    same(doubled[::997], torch.full_like(doubled[::997], 2.0 * N))


@on_gpu
def graphs() -> None:
    x, y = torch.ones(4096, device=DEVICE), torch.ones(4096, device=DEVICE)
    dist.all_reduce(x)
    dist.all_reduce(y, async_op=True).wait()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(x)
        x.div_(N)
        work = dist.all_reduce(y, async_op=True)
        work.wait()
        y.div_(N)
    for turn in range(3):
        x.fill_(float(RANK + turn))
        y.fill_(float(RANK - turn))
        graph.replay()
        dist.all_reduce(z := torch.ones(8, device=DEVICE))  # one that is not captured, between
        torch.cuda.synchronize()
        mean = sum(range(N)) / N
        assert torch.allclose(x, torch.full_like(x, mean + turn))
        assert torch.allclose(y, torch.full_like(y, mean - turn))
        same(z, [float(N)] * 8)


@check
def compiled_functional_collectives() -> None:
    from torch.distributed import _functional_collectives as functional

    def step(x: torch.Tensor) -> torch.Tensor:
        summed = functional.all_reduce(x * 2, "sum", dist.group.WORLD)
        return functional.all_gather_tensor(summed + 1, 0, dist.group.WORLD)

    x = torch.ones(3, device=DEVICE)
    wanted = torch.full((3 * N,), 2.0 * N + 1)
    same(step(x) + 0, wanted)
    same(torch.compile(step, backend="aot_eager", fullgraph=True)(x) + 0, wanted)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(24, 24) for _ in range(4)))


def batch() -> torch.Tensor:
    return torch.randn(4 * N, 24, generator=torch.Generator().manual_seed(1))


def step(m: nn.Module, x: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    m(x).square().mean().backward()
    optimizer.step()


def equal(m: nn.Module, within: float) -> None:
    """`m` after a step on this rank's rows, to a model on the host after one on all rows."""
    reference = model()
    step(reference, batch())
    for p, q in zip(m.parameters(), reference.parameters(), strict=True):
        p = p.full_tensor() if hasattr(p, "full_tensor") else p
        assert (p.cpu() - q).abs().max() <= within, (p.cpu() - q).abs().max()


@check
def ddp_equals_training_on_the_host() -> None:
    mine = batch().chunk(N)[RANK].to(DEVICE)
    groups = [None]
    if 1 < N <= GPUS:
        groups.append(dist.new_group(backend="nccl"))
    for group in groups:
        m = model().to(DEVICE)
        step(DDP(m, process_group=group, bucket_cap_mb=0.003), mine)
        equal(m, 1e-5)
    for hook, state, within in (
        (default_hooks.fp16_compress_hook, None, 1e-3),
        (powerSGD_hook.powerSGD_hook,
         powerSGD_hook.PowerSGDState(None, 24, start_powerSGD_iter=2), 1e-5),
    ):  # fmt: skip
        m = model().to(DEVICE)
        ddp = DDP(m, bucket_cap_mb=0.003)
        ddp.register_comm_hook(state, hook)
        step(ddp, mine)
        equal(m, within)
    if type(dist.group.WORLD.allreduce).__name__ == "Method":
        m = model().to(DEVICE)  # a hook that reads the future in C++
        ddp = DDP(m, bucket_cap_mb=0.003)
        ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        step(ddp, mine)
        equal(m, 1e-3)


@check
def fsdp2_equals_training_on_the_host() -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh(KIND, (N,))
    for reshard in (True, False):
        m = model().to(DEVICE)
        for layer in m:
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(m, mesh=mesh, reshard_after_forward=reshard)
        step(m, batch().chunk(N)[RANK].to(DEVICE))
        equal(m, 1e-5)


if __name__ == "__main__":
    run_all()
