"""Step time of the trainer and of torch's DDP and FSDP2 on NCCL, in one run on GPUs.

    python -m collectives run -n 2 bench/train_gpu.py [--json bench/results/train-gpu-2.json]

A decoder of about 355 million parameters (24 layers of width 1024, tied embeddings; `--model` takes
another) in bfloat16, AdamW, on batches of 4 x 1024 and 1 x 256 tokens a rank. Parameters and both
moments are bfloat16 in all ways, as torch's AdamW keeps them; `--master-weights` gives the trainer
what it has unless it is told otherwise, float32 masters and moments. One way is set up at a time,
and its memory noted (of the GPU, but for what the runtime that it does not use holds there); the
ways take turns, as turns.py says, `--rounds` times or as often as fits in `--seconds`, and the
first steps of each turn are not counted. With `--together`
that is done once, for memory alone; then all ways are set up and stay, if a GPU has memory for
that, so that turns may be short: where the host is the bound, and gets slower and faster from one
minute to the next, neighbours are still alike. The file is written after each turn. "alone" is the
same model and step on each GPU by itself, in plain torch and in the trainer on one rank. Exposed
communication is the median of a way less that of its "alone", scaling efficiency their ratio (so
stages 1 to 3, whose ranks step a part of the parameters, are given the time that this saves).
Losses of all ways are compared before anything is told. Every step is as long as the slowest rank
takes. --small is a tiny model on CPUs over Gloo, to try the script.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_group
import turns
from torch import distributed, nn
from torch.nn import functional

import collectives as cc
from collectives.bench.machine import command_of_script, header
from collectives.train import AdamW, Trainer

VOCABULARY = 50304
Batch = tuple[torch.Tensor, torch.Tensor]
Turn = tuple[str, str]  # a batch, as it is written, and a way


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self, layers: int, width: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.place = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, width // 64) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    logits = model(batch[0])
    return functional.cross_entropy(logits.flatten(0, 1).float(), batch[1].flatten())


class OurStep:
    """A step of the trainer as a function of the batch, which a turn closes at its end."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def __call__(self, batch: Batch) -> float:
        return self._trainer.step(batch).loss

    def close(self) -> None:
        self._trainer.close()


class Bench:
    """What all ways have in common on this rank."""

    def __init__(
        self, comm: cc.Communicator, layers: int, width: int, *, small: bool, masters: bool
    ) -> None:
        self.comm, self.layers, self.width, self.small = comm, layers, width, small
        self.masters = masters
        self.device = torch.device("cpu")
        if not small:
            self.device = torch.device("cuda", comm.local_rank)
            torch.cuda.set_device(self.device)
            import cupy

            cupy.cuda.Device(comm.local_rank).use()
        self.solo = comm.split(comm.rank)
        torch_group.start(comm, "gloo" if small else "nccl")
        # Bytes that each runtime holds on the GPU from its first calls on: what a way on the other
        # takes is told without them.
        self.held = {"torch": 0, "collectives": 0}
        if not small:
            self.held["torch"] = self.taken_by(self.first_calls_of_torch)
            self.held["collectives"] = self.taken_by(self.first_calls_of_ours)

    def first_calls_of_torch(self) -> None:
        for count in (1 << 10, 1 << 25):  # NCCL connects as an algorithm needs it
            part = torch.ones(count, device=self.device, dtype=torch.bfloat16)
            whole = part.repeat(self.comm.size)
            distributed.all_reduce(part)
            distributed.reduce_scatter_tensor(part, whole)
            distributed.all_gather_into_tensor(whole, part)

    def first_calls_of_ours(self) -> None:
        for comm in (self.comm, self.solo):
            comm.all_reduce(torch.ones(1, device=self.device))

    def taken_by(self, calls: Callable[[], None]) -> int:
        """Bytes of the GPU that are gone after some calls, but for the allocator's."""
        torch.cuda.empty_cache()
        before = torch.cuda.mem_get_info()[0]
        calls()
        self.wait()
        torch.cuda.empty_cache()
        return before - torch.cuda.mem_get_info()[0]

    def model(self) -> Decoder:
        torch.manual_seed(0)
        sizes = (2, 64, 256, 64) if self.small else (self.layers, self.width, VOCABULARY, 1024)
        return Decoder(*sizes).to(self.device, torch.bfloat16)

    def batch(self, size: int, length: int) -> Batch:
        random = np.random.default_rng(self.comm.rank)
        tokens = random.integers(0, 256, (size, length + 1))
        whole = torch.from_numpy(tokens).to(self.device)
        return whole[:, :-1].contiguous(), whole[:, 1:].contiguous()

    def wait(self) -> None:
        if not self.small:
            torch.cuda.synchronize()

    def torch_step(self, model: nn.Module) -> Callable[[Batch], float]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)

        def step(batch: Batch) -> float:
            optimizer.zero_grad()
            value = loss(model, batch)
            value.backward()
            optimizer.step()
            return float(value.detach())

        return step

    def alone(self) -> Callable[[Batch], float]:
        return self.torch_step(self.model())

    def ddp(self) -> Callable[[Batch], float]:
        wrapped = nn.parallel.DistributedDataParallel(self.model(), gradient_as_bucket_view=True)
        return self.torch_step(wrapped)

    def fsdp2(self) -> Callable[[Batch], float]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model = self.model()
        mesh = init_device_mesh(self.device.type, (self.comm.size,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return self.torch_step(model)

    def ours(self, stage: int, comm: cc.Communicator) -> OurStep:
        settings: dict[str, Any] = {"sharding": stage, "master_weights": self.masters}
        return OurStep(Trainer(self.model(), AdamW(lr=1e-4), comm, loss=loss, **settings))

    def turn(
        self, name: str, make: Callable[[], Any], batch: Batch, steps: int, warm: int
    ) -> dict[str, Any]:
        """`measure` of a way that is set up for that alone, and bytes at most and by whom."""
        gc.collect()
        if not self.small:
            import cupy

            cupy.get_default_memory_pool().free_all_blocks()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        step = make()
        found = self.measure(step, batch, steps, warm)
        free = found.pop("free")
        # Of the device, not of torch's allocator alone: cupy and NCCL have memory of their own.
        if not self.small:
            others = sum(
                held for runtime, held in self.held.items() if not name.startswith(runtime)
            )
            found["memory"] = {
                "device_peak_bytes": torch.cuda.mem_get_info()[1] - min(free) - others,
                "torch_peak_bytes": torch.cuda.max_memory_allocated(),
                "torch_reserved_bytes": torch.cuda.max_memory_reserved(),
                "cupy_bytes": cupy.get_default_memory_pool().total_bytes(),
            }
        getattr(step, "close", lambda: None)()
        return found

    def measure(
        self, step: Callable[[Batch], float], batch: Batch, steps: int, warm: int
    ) -> dict[str, Any]:
        """Seconds of `steps` steps, the loss of the first, and what of the device was free."""
        seconds, first = [], 0.0
        free = [] if self.small else [torch.cuda.mem_get_info()[0]]
        for number in range(warm + steps):
            self.wait()
            self.comm.barrier()
            began = time.perf_counter()
            value = step(batch)
            self.wait()
            self.comm.barrier()  # so this is the time of the slowest rank
            if number >= warm:
                seconds.append(time.perf_counter() - began)
            if number == 0:  # ours is the mean over ranks already
                first = float(self.comm.all_reduce(np.array([value]), "avg")[0])
            if not self.small:
                free.append(torch.cuda.mem_get_info()[0])
        memory: dict[str, Any] = {"device_peak_bytes": None}
        return {"seconds": seconds, "memory": memory, "loss": first, "free": free}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="without --seconds")
    parser.add_argument("--seconds", type=float, help="as many rounds as fit in these")
    parser.add_argument("--steps", type=int, default=8, help="of each in a round")
    parser.add_argument("--warm", type=int, default=3, help="steps that are not counted")
    parser.add_argument("--batches", default="4x1024,1x256", help="sequences x tokens a rank")
    parser.add_argument("--model", default="24x1024", help="layers x width, in heads of 64")
    parser.add_argument("--together", action="store_true", help="all ways stay set up")
    parser.add_argument("--ways", help="only those whose names hold one of these, by commas")
    parser.add_argument(
        "--master-weights", action="store_true", help="the trainer keeps float32 masters and state"
    )
    parser.add_argument("--small", action="store_true", help="a tiny model on CPUs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    until = None if args.seconds is None else time.monotonic() + args.seconds
    with cc.init() as comm:
        layers, width = map(int, args.model.split("x"))
        bench = Bench(comm, layers, width, small=args.small, masters=args.master_weights)
        ways: dict[str, Callable[[], Any]] = {"torch alone": bench.alone, "torch DDP": bench.ddp}
        ways["torch FSDP2"] = bench.fsdp2
        ways["collectives alone"] = lambda: bench.ours(0, bench.solo)
        for stage in range(4):
            name = f"collectives ZeRO-{stage}"
            ways[name] = lambda stage=stage: bench.ours(stage, comm)
        if args.ways:
            wanted = ["alone", *args.ways.split(",")]
            ways = {n: make for n, make in ways.items() if any(w in n for w in wanted)}
        batches = {
            text: bench.batch(*map(int, text.split("x"))) for text in args.batches.split(",")
        }
        about = header(comm, command_of_script())
        about["parameters"] = sum(p.numel() for p in bench.model().parameters())
        about["ranks"] = comm.size
        about["held_bytes"] = bench.held  # of each runtime, counted for its own ways alone
        about["gpu"] = None if args.small else torch.cuda.get_device_name()
        about["nccl"] = None if args.small else ".".join(map(str, torch.cuda.nccl.version()))

        def agree(wish: bool) -> bool:
            wishes = np.array([wish])
            comm.broadcast(wishes)
            return bool(wishes[0])

        def told(found: dict[Turn, list[dict[str, Any]]]) -> None:
            rows = compare(found)
            if comm.rank == 0:
                turns.write(args.json, {"header": about, "rows": rows})

        every = [(text, name) for text in batches for name in ways]

        def turn(of: Turn) -> dict[str, Any]:
            return bench.turn(of[1], ways[of[1]], batches[of[0]], args.steps, args.warm)

        measure, made = turn, {}
        if args.together:
            apart = {of: turn(of) for of in every}
            made = {name: make() for name, make in ways.items()}

            def measure(of: Turn) -> dict[str, Any]:
                step, batch = made[of[1]], batches[of[0]]
                # Of one that stays the loss depends on what it was trained with before.
                told = {key: apart[of][key] for key in ("memory", "loss")}
                return bench.measure(step, batch, args.steps, args.warm) | told

        found = turns.in_turns(
            every,
            measure,
            told,
            rounds=args.rounds,
            until=until,
            agree=agree,
        )
        for step in made.values():
            getattr(step, "close", lambda: None)()
        if comm.rank == 0:
            for row in compare(found):
                print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()})
        distributed.destroy_process_group()


def compare(found: dict[Turn, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row for each way that has had a turn, and its "alone" too. SystemExit if one does not
    compute what torch does alone.
    """
    rows = []
    for (text, name), had in found.items():
        plain, alone = found[text, "torch alone"], found[text, f"{name.split()[0]} alone"]
        if not (had and plain and alone):
            continue
        first, wanted = had[0]["loss"], plain[0]["loss"]
        if first is not None and not abs(first - wanted) <= 1e-2 * abs(wanted):
            raise SystemExit(f"{text}: the first loss of {name} is {first}, alone it is {wanted}")
        base = float(np.median([s for turn in alone for s in turn["seconds"]]))
        seconds = [s for turn in had for s in turn["seconds"]]
        median = float(np.median(seconds))
        rows.append(
            {
                "name": name,
                "batch": text,
                "median_ms": 1e3 * median,
                "p90_ms": 1e3 * float(np.quantile(seconds, 0.9)),
                "turns_ms": [1e3 * float(np.median(turn["seconds"])) for turn in had],
                "exposed_ms": 1e3 * (median - base),
                "scaling_efficiency": base / median,
                **max((turn["memory"] for turn in had), key=lambda m: m["device_peak_bytes"] or 0),
                "first_loss": first,
                "steps": len(seconds),
            }
        )
    return rows


if __name__ == "__main__":
    main()
