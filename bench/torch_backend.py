"""torch.distributed on this runtime beside Gloo, in the same processes, in turns.

    torchrun --nproc-per-node 2 bench/torch_backend.py --json bench/results/torch-cpu-2.json

CPU tensors, float32. Measured are a blocking dist.all_reduce (and alone in a group of one rank,
where only Python is left), and the gradient synchronisation of DistributedDataParallel with ten
million parameters: a step's time less that of the same step under no_sync(). Times are medians over
windows of the slowest rank; results are checked before they are timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from collectives.bench import machine

WINDOWS = 9


def slowest(seconds: float) -> float:
    """The longest of all ranks' times; also a barrier."""
    x = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    return float(x[0])


def window(call: Callable[[], object], times: int) -> float:
    dist.barrier()
    began = time.perf_counter()
    for _ in range(times):
        call()
    return slowest((time.perf_counter() - began) / times)


def all_reduce(groups: dict[str, Any], count: int) -> dict[str, float]:
    """Microseconds of dist.all_reduce on `count` floats, for each group."""
    x = torch.ones(count)
    for group in groups.values():
        x.fill_(1)
        dist.all_reduce(x, group=group)
        assert bool((x == group.size()).all())
    x.fill_(0)  # sums stay finite, however often
    times = max(20, min(300, 3_000_000 // max(1, count)))
    taken: dict[str, list[float]] = {name: [] for name in groups}
    for _ in range(WINDOWS):
        for name, group in groups.items():
            taken[name].append(window(lambda g=group: dist.all_reduce(x, group=g), times))
    return {name: statistics.median(t) * 1e6 for name, t in taken.items()}


def gradient_sync(groups: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Milliseconds of a step with and without synchronisation, for each group."""
    models = {}
    for name, group in groups.items():
        torch.manual_seed(0)
        layers = [nn.Linear(1000, 1000) for _ in range(10)]
        models[name] = DistributedDataParallel(nn.Sequential(*layers), process_group=group)
    x = torch.randn(1, 1000)
    gradients = []
    for model in models.values():
        model.zero_grad()
        model(x * (1 + dist.get_rank())).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert all(torch.allclose(gradients[0], g, rtol=1e-4, atol=1e-6) for g in gradients)

    def step(model: Any) -> None:
        model(x).sum().backward()

    def alone(model: Any) -> None:
        with model.no_sync():
            model(x).sum().backward()

    taken: dict[str, dict[str, list[float]]] = {n: {"step": [], "alone": []} for n in models}
    for _ in range(WINDOWS + 1):
        for name, model in models.items():
            taken[name]["alone"].append(window(lambda m=model: alone(m), 3))
            taken[name]["step"].append(window(lambda m=model: step(m), 3))
    result = {}
    for name, t in taken.items():
        step_ms, alone_ms = (statistics.median(t[k][1:]) * 1e3 for k in ("step", "alone"))
        result[name] = {"step": step_ms, "no_sync": alone_ms, "sync": step_ms - alone_ms}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where the figures go")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("collectives")
    rank = dist.get_rank()
    groups = {"collectives": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    one = dist.new_group([rank], use_local_synchronization=True)
    rows: list[dict[str, Any]] = []
    for count in (1, 256, 16_384, 262_144, 4_194_304):
        times = all_reduce(groups, count)
        rows.append(
            {"what": "all_reduce", "ranks": dist.get_world_size(), "bytes": 4 * count, "us": times}
        )
    alone = all_reduce({"collectives": one}, 1)
    rows.append({"what": "all_reduce", "ranks": 1, "bytes": 4, "us": alone})
    synced = gradient_sync(groups)
    rows.append({"what": "ddp", "ranks": dist.get_world_size(), "parameters": 10_010_000,
                 "ms": synced})  # fmt: skip
    header = machine.header(groups["collectives"]._main.comm, machine.command_of_script())
    if rank == 0:
        for row in rows:
            print(json.dumps(row))
        if options.json:
            text = json.dumps({"header": header, "rows": rows}, indent=1)
            options.json.write_text(text + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
