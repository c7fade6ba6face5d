"""Step time of the trainer and of torch's DistributedDataParallel on Gloo, in one run on hosts.

    python -m collectives run -n 2 bench/train_host.py [--json bench/results/train-host.json]

A network of 10.3 million float32 parameters (five layers of 1,436) and AdamW, on batches of 64 a
rank, one thread a rank. All take the same steps from the same parameters, in turns, so that what
else the machine does meets all alike; the first rounds are not counted. DDP has torch's fused
AdamW, and gradients that are views of its buckets. Rank 0 prints the median and the 90th percentile
of the steps, each as long as the slowest rank took, and what of our communication backward hid;
--trace writes a trace for Chrome or Perfetto.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch_group
from torch import distributed, nn

import collectives as cc
from collectives.bench.machine import command_of_script, header
from collectives.train import AdamW, Trainer

WIDTH, LAYERS, BATCH = 1436, 5, 64


def network() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers)


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def ddp_step() -> Callable[[tuple[torch.Tensor, torch.Tensor]], float]:
    model = nn.parallel.DistributedDataParallel(network(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> float:
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        return float(value.detach())

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=4, help="of each in a round")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--trace", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with cc.init() as comm:
        torch_group.start(comm, "gloo")
        trainers = {
            f"collectives, ZeRO-{stage}": Trainer(
                network(), AdamW(lr=1e-3), comm, loss=loss, sharding=stage, trace=True
            )
            for stage in (0, 1)
        }
        ways: dict[str, Callable[..., object]] = {
            f"torch {torch.__version__} DDP, Gloo": ddp_step()
        }
        ways |= {name: trainer.step for name, trainer in trainers.items()}
        random = np.random.default_rng(comm.rank)
        batch = tuple(
            torch.from_numpy(random.normal(size=(BATCH, WIDTH)).astype(np.float32)) for _ in "xy"
        )
        times: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(args.rounds):
            for name, step in ways.items():
                for _ in range(args.steps):
                    comm.barrier()
                    began = time.perf_counter()
                    step(batch)
                    comm.barrier()  # so this is the time of the slowest rank
                    if turn >= 2:
                        times[name].append(time.perf_counter() - began)
        rows = []
        for name, seconds in times.items():
            row: dict[str, object] = {
                "name": name,
                "median_ms": 1e3 * float(np.median(seconds)),
                "p90_ms": 1e3 * float(np.quantile(seconds, 0.9)),
                "steps": len(seconds),
            }
            if name in trainers:
                told = trainers[name].bucketer.statistics
                row |= {
                    "overlap_percent": told.overlap,
                    "exposed_ms": 1e3 * told.exposed / told.steps,
                    "communication_ms": 1e3 * told.busy / told.steps,
                    "buckets": len(trainers[name].bucketer.buckets),
                }
            rows.append(row)
        if args.trace:
            trainers["collectives, ZeRO-0"].write_trace(args.trace)
        about = header(comm, command_of_script())
        if comm.rank == 0:
            count = sum(p.numel() for p in network().parameters())
            for row in rows:
                print({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()})
            if args.json:
                about |= {"parameters": count, "batch": BATCH, "threads": torch.get_num_threads()}
                args.json.write_text(json.dumps({"header": about, "rows": rows}, indent=1) + "\n")
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
