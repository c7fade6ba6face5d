"""Training of a decoder with 370 million parameters by torch, on this runtime and on NCCL in turns.

    torchrun --nproc-per-node 2 bench/torch_gpu.py --json bench/results/torch-gpu-2.json

One GPU for each rank, bfloat16. Measured are steps of DistributedDataParallel and of FSDP2
(fully_shard), on both backends, and the same step without synchronisation: what a step takes longer
than that is the communication that is exposed. All variants take turns, a window each, as
turns.py says; a figure is the median over windows of the slowest rank. Before anything is
timed, both backends must have trained alike. `--seconds S` ends the script within S seconds after
its imports, if that is enough for two windows of each; the file is written after each window.
`--small` tries the script on a small model, also without GPUs (beside Gloo).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast stays off, for both

import torch
import torch.distributed as dist
import turns
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

from collectives.bench import machine


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        together = self.qkv(self.norms[0](x)).unflatten(2, (3, self.heads, -1))
        q, k, v = together.permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norms[1](x))))


class Decoder(nn.Module):
    def __init__(self, layers: int, width: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, width // 64) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


Step = Callable[[], torch.Tensor]


def shape_of(options: argparse.Namespace) -> tuple[int, int, int, int]:
    """What a Decoder is made of."""
    return (2, 128, 512, options.length) if options.small else (24, 1024, 32768, options.length)


def variants(options: argparse.Namespace, device: torch.device, peer: str) -> dict[str, Step]:
    """A step of each: forward, backward, optimiser. Each returns its loss."""
    shape = shape_of(options)
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(shape[2], (options.batch, options.length + 1), generator=generator)
    tokens = tokens.to(device)
    x, y = tokens[:, :-1], tokens[:, 1:].flatten()

    def model() -> Decoder:
        torch.manual_seed(0)
        return Decoder(*shape).to(device, torch.bfloat16)

    def stepping(m: nn.Module, synchronised: bool = True) -> Step:
        optimizer = torch.optim.SGD(m.parameters(), lr=0.01)

        def step() -> torch.Tensor:
            with contextlib.nullcontext() if synchronised else m.no_sync():
                loss = cross_entropy(m(x).flatten(0, 1).float(), y)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    made: dict[str, Step] = {}
    groups = {"collectives": dist.group.WORLD, peer: dist.new_group(backend=peer)}
    for name, group in groups.items():
        made[f"ddp {name}"] = stepping(DistributedDataParallel(model(), process_group=group))
    made["alone"] = stepping(DistributedDataParallel(model()), synchronised=False)
    for name, group in groups.items():
        mesh = dist.DeviceMesh.from_group(group, device.type)
        sharded = model()
        for block in sharded.blocks:
            fully_shard(block, mesh=mesh)
        made[f"fsdp2 {name}"] = stepping(fully_shard(sharded, mesh=mesh))
    return made


def window(step: Step, times: int, device: torch.device) -> float:
    """Milliseconds of a step, of the slowest rank."""
    dist.barrier()
    began = time.perf_counter()
    for _ in range(times):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    taken = torch.tensor([(time.perf_counter() - began) / times * 1e3], dtype=torch.float64)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return taken.item()


def agree(wish: bool) -> bool:
    """What rank 0 wishes."""
    wishes = torch.tensor([wish])
    dist.broadcast(wishes, 0)
    return bool(wishes.item())


def figures(windows: dict[str, list[float]], peer: str) -> dict[str, Any]:
    """What the windows say, once each variant has had one."""
    step_ms = {name: statistics.median(ms) for name, ms in windows.items()}
    alone = windows["alone"]
    exposed = {
        name: [a - b for a, b in zip(ms, alone, strict=False)]
        for name, ms in windows.items()
        if name != "alone"
    }
    return {
        "step_ms": step_ms,
        "spread_ms": {name: turns.spread(ms) for name, ms in windows.items()},
        "exposed_ms": {name: step_ms[name] - step_ms["alone"] for name in exposed},
        "exposed_spread_ms": {name: turns.spread(ms) for name, ms in exposed.items()},
        "of_peer": {
            kind: {
                "step": turns.ratios(windows[f"{kind} collectives"], windows[f"{kind} {peer}"]),
                "exposed": turns.ratios(exposed[f"{kind} collectives"], exposed[f"{kind} {peer}"]),
            }
            for kind in ("ddp", "fsdp2")
        },
    }


def show(found: dict[str, Any], peer: str) -> None:
    for name, ms in found["step_ms"].items():
        least, most = found["spread_ms"][name]
        exposed = found["exposed_ms"].get(name)
        tail = "" if exposed is None else f", {exposed:7.2f} ms exposed"
        print(f"{name:18} {ms:8.2f} ms a step ({least:.2f} to {most:.2f}){tail}")
    for kind, ratio in found["of_peer"].items():
        for what, of in ratio.items():
            if of["median"] is not None:
                least, most = of["spread"]
                print(f"{kind}: {what} {of['median']:.2f}x of {peer}'s ({least:.2f} to {most:.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a rank")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--windows", type=int, default=9, help="of each, without --seconds")
    parser.add_argument("--seconds", type=float, help="as many windows as fit in these")
    parser.add_argument("--steps", type=int, default=10, help="steps of a window")
    parser.add_argument("--small", action="store_true", help="a small model")
    options = parser.parse_args()
    until = None if options.seconds is None else time.monotonic() + options.seconds
    on_gpus = torch.cuda.is_available()
    if not (on_gpus or options.small):
        parser.error("no GPU here; --small tries the script without")
    dist.init_process_group("collectives")
    device = torch.device("cuda", dist.get_rank()) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    peer = "nccl" if on_gpus else "gloo"
    steps = variants(options, device, peer)

    losses = {name: [step().item() for _ in range(5)] for name, step in steps.items()}
    for kind in ("ddp", "fsdp2"):
        ours, theirs = losses[f"{kind} collectives"], losses[f"{kind} {peer}"]
        worst = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
        assert worst < 0.02 * abs(theirs[0]), f"{kind}: losses {ours} and {theirs}"

    about: dict[str, Any] = {
        "header": machine.header(dist.group.WORLD._main.comm, machine.command_of_script()),
        "ranks": dist.get_world_size(),
        "device": torch.cuda.get_device_name() if on_gpus else "cpu",
        "peer": peer,
        "peer_version": ".".join(map(str, torch.cuda.nccl.version())) if on_gpus else "",
        "model": "2 layers of width 128" if options.small else "24 layers of width 1024",
        "parameters": sum(p.numel() for p in Decoder(*shape_of(options)).parameters()),
        "batch": options.batch,
        "length": options.length,
        "steps_of_a_window": options.steps,
    }

    def told(windows: dict[str, list[float]]) -> None:
        if dist.get_rank() == 0 and all(windows.values()):
            about.update(figures(windows, peer), windows_ms=windows)
            turns.write(options.json, about)

    turns.in_turns(
        list(steps),
        lambda name: window(steps[name], options.steps, device),
        told,
        rounds=options.windows,
        until=until,
        agree=agree,
    )
    if dist.get_rank() == 0:
        show(about, peer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
