"""Training of a torch module on GPUs, by ranks that are processes: every stage gives the same bits,
with what the optimizer keeps on the GPU and on the host; and what the host gives but for rounding.
"""

from __future__ import annotations

import gc
import itertools
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np
import torch
from torch import nn

import collectives as cc
from collectives.array import device_name
from collectives.train import AdamW, Trainer

STEPS = 6


def model(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(6):
        parts += [nn.Linear(96, 96), nn.LayerNorm(96), nn.GELU()]
    parts[0].bias.requires_grad_(False)
    return nn.Sequential(*parts, nn.Linear(96, 1001)).to(device)


def loss(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return module(batch).float().square().mean()


def ours(module: nn.Module) -> Any:
    return AdamW(lr=1e-2)


def of_torch(module: nn.Module) -> Any:
    return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-2)


def train(
    comm: cc.Communicator,
    device: torch.device,
    optimizer: Callable[[nn.Module], Any] = ours,
    **options: Any,
) -> tuple[Any, list[Any]]:
    """Parameters after STEPS steps, and the metrics of each."""
    module = model(device)
    trainer = Trainer(
        module, optimizer(module), comm, loss=loss, accumulate=2, clip_norm=0.05,
        bucket_bytes=100_000, first_bucket_bytes=10_000, trace=True, **options,
    )  # fmt: skip
    here = "cpu" if options.get("offload") else str(device)
    for shard in trainer.store.shards:
        assert device_name(shard.used) == str(device)
        assert {device_name(x) for x in trainer.store.arrays(shard).values()} == {here}
    random = np.random.default_rng(comm.rank)
    told = []
    for _ in range(STEPS):
        rows = torch.from_numpy(random.standard_normal((8, 96)).astype(np.float32))
        told.append(trainer.step(rows.to(device)))
    for event in trainer.bucketer.trace():
        assert event["ph"] == "M" or event["dur"] >= 0
    spans = [e for e in trainer.bucketer.trace() if e.get("cat") == "wire"]
    assert len(spans) >= 2 * STEPS
    now = time.monotonic()
    for span in spans:  # the clock of a GPU is told in that of the host
        assert now - 600 < span["ts"] / 1e6 < now, (span, now)
    found = trainer.parameters()
    trainer.close()
    held = weakref.ref(trainer), weakref.ref(module)
    del trainer, module
    gc.collect()
    assert [r() for r in held] == [None, None], "a trainer that was closed is still there"
    return found, told


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rest = nn.Sequential(*(nn.Linear(96, 96) for _ in range(6)))
        self.one, self.two = nn.Linear(96, 96), nn.Linear(96, 96)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.rest(x)
        return self.one(x), self.two(x)


def one_or_both(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    one, two = module(batch)
    total = one.square().mean()
    return total if batch.detach().max() < 1 else total + two.square().mean()


def a_head_that_some_ranks_leave_alone(comm: cc.Communicator, device: torch.device) -> None:
    """The last rank alone has gradients for one of the heads."""
    batch = torch.full((4, 96), 2.0 if comm.rank == comm.size - 1 else 0.5, device=device)
    found = []
    for stage in range(4):
        trainer = Trainer(
            Heads().to(device), AdamW(lr=1e-2), comm, loss=one_or_both, sharding=stage,
            find_unused=True, bucket_bytes=40_000, first_bucket_bytes=10_000,
        )  # fmt: skip
        for _ in range(STEPS):
            trainer.step(batch)
        found.append({name: x.tobytes() for name, x in trainer.parameters().items()})
        trainer.close()
        assert found[stage] == found[0], stage


def main() -> None:
    with cc.init() as comm:
        device = torch.device("cuda", comm.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        cupy.cuda.Device(device.index).use()
        for precision, masters in ((None, True), ("bf16", True), ("bf16", False)):
            how: dict[str, Any] = {"precision": precision, "master_weights": masters}
            wanted, on_host = train(comm, torch.device("cpu"), **how)
            first: dict[str, Any] = {}
            for stage, offload, other in itertools.product(range(4), (None, "host"), (False, True)):
                stream = torch.cuda.Stream() if other else torch.cuda.default_stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    found, told = train(comm, device, sharding=stage, offload=offload, **how)
                stream.synchronize()
                first = first or found
                case = how, stage, offload, other
                for name, x in found.items():
                    assert x.tobytes() == first[name].tobytes(), (*case, name)
                for mine, theirs in zip(told, on_host, strict=True):
                    assert abs(mine.loss - theirs.loss) <= 2e-2 * abs(theirs.loss)
                    assert abs(mine.grad_norm - theirs.grad_norm) <= 5e-2 * theirs.grad_norm
            if precision is None:
                for name, x in wanted.items():
                    assert np.allclose(first[name], x, rtol=0, atol=2e-3), name
        for stage in (0, 3):  # torch rounds otherwise on the host
            there, _ = train(comm, device, of_torch, sharding=stage)
            found, _ = train(comm, device, of_torch, sharding=stage, offload="host")
            for name, x in there.items():
                assert np.allclose(found[name], x, rtol=0, atol=1e-5), (stage, name)
        a_head_that_some_ranks_leave_alone(comm, device)
        comm.barrier()
    print("trained alike")


if __name__ == "__main__":
    sys.exit(main())
