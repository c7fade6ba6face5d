"""What an all_reduce costs a stream that computes beside it, on GPUs of one host.

    python -m collectives run -n 2 bench/beside_gpu.py --json bench/results/beside-gpu-2.json

The computing stream multiplies matrices as the backward pass of a decoder of width 1024 does, 16 x
1024 tokens a rank; behind each layer an all_reduce of as many bfloat16 gradients goes on a stream
beside it, as with DDP:

    none      nothing goes there
    nccl      NCCL, without multicast
    fifos     a kernel of 32 thread blocks, on an ordinary array
    straight  a kernel of 16 thread blocks, on a symmetric buffer
    copies    by copy engines, as calls beside a computing stream go here

"computing" is until the matrices are done, "all" until the last all_reduce is too, "alone" the
all_reduces without the matrices. Ways take turns in changing orders; figures are medians over the
rounds. Results are compared before anything is timed. --small tries the script on one GPU or an
emulated one, with small matrices.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast stays off

import torch
import torch_group
import turns
from torch import distributed

import collectives as cc
from collectives.array import Stream
from collectives.bench import machine

LAYERS = 24
WIDTH, TOKENS = 1024, 16 << 10
BESIDE = 13 << 20  # elements of a layer's gradients
# Output and input features of a layer's matrices, in multiples of its width.
SHAPES = ((3, 1), (1, 1), (4, 1), (1, 4))


class Layer:
    """The matrices of a layer's backward pass."""

    def __init__(self, width: int, tokens: int, device: torch.device) -> None:
        def made(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, device=device, dtype=torch.bfloat16)

        self._of_shape = [
            (made(tokens, out * width), made(tokens, of * width), made(out * width, of * width))
            for out, of in SHAPES
        ]
        self._gradients = [
            (torch.empty_like(x), torch.empty_like(weight)) for _, x, weight in self._of_shape
        ]

    def run(self) -> None:
        for (above, x, weight), (to_x, to_weight) in zip(
            self._of_shape, self._gradients, strict=True
        ):
            torch.mm(above, weight, out=to_x)
            torch.mm(above.t(), x, out=to_weight)


class Bench:
    """One rank's arrays, streams and ways."""

    def __init__(self, comm: cc.Communicator, small: bool) -> None:
        self.comm = comm
        self.device = torch.device("cuda", comm.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(self.device)
        torch_group.start(comm, "gloo" if small else "nccl")
        self.side = torch.cuda.Stream()
        self.layer = Layer(WIDTH // 16 if small else WIDTH, TOKENS // 64 if small else TOKENS,
                           self.device)  # fmt: skip
        self.count = BESIDE // 8 if small else BESIDE
        self.plain = torch.empty(self.count, device=self.device, dtype=torch.bfloat16)
        few, fewer = comm.duplicate(max_blocks=32), comm.duplicate(max_blocks=16)
        place = f"cuda:{self.device.index}"
        straight = fewer.empty(self.count, torch.bfloat16, place, kind="torch")
        plain, beside = self.plain, Stream(self.side.cuda_stream, self.device.index, beside=True)
        self.ways: dict[str, Callable[[], Any] | None] = {
            "none": None,
            "fifos": lambda: few.all_reduce(plain, stream=self.side),
            "straight": lambda: fewer.all_reduce(straight, stream=self.side),
            "copies": lambda: comm.all_reduce(plain, stream=beside),
        }
        self.arrays = {"straight": straight}
        if not small:
            self.ways["nccl"] = self.nccl

    def nccl(self) -> None:
        with torch.cuda.stream(self.side):
            distributed.all_reduce(self.plain)

    def check(self) -> None:
        for name, call in self.ways.items():
            x = self.arrays.get(name, self.plain)
            x.fill_(self.comm.rank + 1)
            torch.cuda.synchronize()
            if call is not None:
                call()
                torch.cuda.synchronize()
                wanted = self.comm.size * (self.comm.size + 1) // 2
                assert bool((x == wanted).all()), name
            x.zero_()

    def measure(self, way: tuple[str, bool]) -> dict[str, float]:
        """Milliseconds of a way, with the matrices or alone, on the slowest rank."""
        name, alone = way
        call, main = self.ways[name], torch.cuda.current_stream()
        began, computed, ended = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        torch.cuda.synchronize()
        distributed.barrier()
        torch.cuda.synchronize()
        torch.cuda._sleep(5_000_000)  # meanwhile the host goes ahead
        began.record()
        self.side.wait_stream(main)
        for _ in range(LAYERS):
            if not alone:
                self.layer.run()
                self.side.wait_stream(main)
            if call is not None:
                call()
        computed.record()
        main.wait_stream(self.side)
        ended.record()
        torch.cuda.synchronize()
        both = torch.tensor([began.elapsed_time(computed), began.elapsed_time(ended)]).double()
        both = both if distributed.get_backend() == "gloo" else both.to(self.device)
        distributed.all_reduce(both, op=distributed.ReduceOp.MAX)
        computing, all_of_it = both.tolist()
        return {"alone": all_of_it} if alone else {"computing": computing, "all": all_of_it}

    def agree(self, wish: bool) -> bool:
        """What rank 0 wishes."""
        wishes: list[Any] = [wish]
        distributed.broadcast_object_list(wishes)
        return bool(wishes[0])


def figures(found: dict[tuple[str, bool], list[dict[str, float]]]) -> dict[str, Any]:
    """Of each way: medians in ms, their spreads, and what it costs by rounds."""
    told: dict[str, Any] = {}
    none = found["none", False]
    for (name, _), rounds in found.items():
        one = told.setdefault(name, {})
        for what in rounds[0]:
            times = [r[what] for r in rounds]
            one[what] = statistics.median(times)
            one[f"{what}_spread"] = turns.spread(times)
            if what != "alone":
                one[f"{what}_more"] = statistics.median(
                    [a - b[what] for a, b in zip(times, none, strict=False)]
                )
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--rounds", type=int, default=20, help="of each way, without --seconds")
    parser.add_argument("--seconds", type=float, help="as many rounds as fit in these")
    parser.add_argument("--small", action="store_true", help="small matrices, and no NCCL")
    options = parser.parse_args()
    until = None if options.seconds is None else time.monotonic() + options.seconds
    if not torch.cuda.is_available():
        parser.error("no GPU here")
    with cc.init() as comm:
        bench = Bench(comm, options.small)
        bench.check()
        names = [(name, False) for name in bench.ways]
        names += [(name, True) for name, call in bench.ways.items() if call is not None]
        for name in names:
            bench.measure(name)
        about: dict[str, Any] = {
            "header": machine.header(comm, machine.command_of_script()),
            "ranks": comm.size,
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "layers": LAYERS,
            "bytes": 2 * bench.count,
        }
        found = turns.in_turns(
            names, bench.measure, lambda _: None, rounds=options.rounds, until=until,
            agree=bench.agree,
        )  # fmt: skip
        about["rounds"] = len(found["none", False])
        about["ways"] = figures(found)
        if comm.rank == 0:
            turns.write(options.json, about)
            print(f"{'':8}  computing, more    all, more   alone (ms)")
            for name, one in about["ways"].items():
                alone = f"{one['alone']:8.2f}" if "alone" in one else ""
                print(
                    f"{name:8}{one['computing']:9.2f}{one['computing_more']:8.2f}"
                    f"{one['all']:9.2f}{one['all_more']:8.2f}{alone}"
                )
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
