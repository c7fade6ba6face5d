"""Training of a torch module on GPUs, by ranks that are processes: every stage gives the same bits,
and what the host gives but for rounding.
"""

from __future__ import annotations

import gc
import sys
import time
import weakref
from typing import Any

import cupy
import numpy as np
import torch
from torch import nn

import collectives as cc
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


def train(comm: cc.Communicator, device: torch.device, **options: Any) -> tuple[Any, list[Any]]:
    """Parameters after STEPS steps, and the metrics of each."""
    module = model(device)
    trainer = Trainer(
        module, AdamW(lr=1e-2), comm, loss=loss, accumulate=2, clip_norm=0.05,
        bucket_bytes=100_000, first_bucket_bytes=10_000, trace=True, **options,
    )  # fmt: skip
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


def main() -> None:
    with cc.init() as comm:
        device = torch.device("cuda", comm.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        cupy.cuda.Device(device.index).use()
        for precision, masters in ((None, True), ("bf16", True), ("bf16", False)):
            how: dict[str, Any] = {"precision": precision, "master_weights": masters}
            wanted, on_host = train(comm, torch.device("cpu"), **how)
            first: dict[str, Any] = {}
            for stage in range(4):
                for other in (False, True):
                    stream = torch.cuda.Stream() if other else torch.cuda.default_stream()
                    stream.wait_stream(torch.cuda.current_stream())
                    with torch.cuda.stream(stream):
                        found, told = train(comm, device, sharding=stage, **how)
                    stream.synchronize()
                    first = first or found
                    for name, x in found.items():
                        assert x.tobytes() == first[name].tobytes(), (how, stage, other, name)
                    for mine, theirs in zip(told, on_host, strict=True):
                        assert abs(mine.loss - theirs.loss) <= 2e-2 * abs(theirs.loss)
                        assert abs(mine.grad_norm - theirs.grad_norm) <= 5e-2 * theirs.grad_norm
            if precision is None:
                for name, x in wanted.items():
                    assert np.allclose(first[name], x, rtol=0, atol=2e-3), name
        comm.barrier()
    print("trained alike")


if __name__ == "__main__":
    sys.exit(main())
