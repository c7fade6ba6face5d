"""Sends and receives between two GPUs, on this runtime and on NCCL in turns.

    python -m collectives run -n 2 bench/transfers_gpu.py --json bench/results/transfers-gpu-2.json

    both      each rank sends and receives at the same time: sendrecv, or a group of NCCL's
    one way   rank 0 sends, rank 1 receives
    and back  a message there, then one back: two latencies

A graph of several calls is replayed; a figure is the median, and the 99th percentile, over windows
of the slowest rank's mean. What arrives is compared before anything is timed. Needs cupy; without
its NCCL, or with `--no-nccl`, ours is measured alone.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast stays off

import cupy
import numpy as np

import collectives as cc
from collectives.bench import gpus, machine, nccl

SIZES = "8,4096,65536,262144,1048576,4194304,16777216,67108864,268435456"
CALLS = 10  # of a graph


class Bench:
    """One rank's arrays and stream."""

    def __init__(self, comm: cc.Communicator, with_nccl: bool) -> None:
        self.comm, self.other = comm, 1 - comm.rank
        self.gpu = comm.rank % cupy.cuda.runtime.getDeviceCount()
        cupy.cuda.Device(self.gpu).use()
        self.stream = cupy.cuda.Stream(non_blocking=True)
        with self.stream:
            comm.all_reduce(cupy.empty(8, "float32"))  # sets the engine up
        comm.synchronize()
        self.nccl = None
        if with_nccl:
            from cupy.cuda import nccl as library

            self.library = library
            self.nccl = nccl.join(comm, library, self.gpu)

    def calls(self, x: Any, out: Any) -> dict[str, dict[str, Callable[[], Any]]]:
        """What is measured -> whose -> the call."""
        comm, other, rank = self.comm, self.other, self.comm.rank

        def ours(*sends: int) -> None:  # by turns: who sends
            for who in sends:
                comm.send(x, other) if rank == who else comm.recv(out, other)

        found: dict[str, dict[str, Callable[[], Any]]] = {
            "both": {"collectives": lambda: comm.sendrecv(x, other, out, other)},
            "one way": {"collectives": lambda: ours(0)},
            "and back": {"collectives": lambda: ours(0, 1)},
        }
        if self.nccl is None:
            return found
        peer, byte, stream = self.nccl, self.library.NCCL_UINT8, self.stream.ptr

        def send() -> None:
            peer.send(x.data.ptr, x.nbytes, byte, other, stream)

        def recv() -> None:
            peer.recv(out.data.ptr, x.nbytes, byte, other, stream)

        def both() -> None:
            self.library.groupStart()
            send()
            recv()
            self.library.groupEnd()

        def theirs(*sends: int) -> None:
            for who in sends:
                send() if rank == who else recv()

        found["both"]["nccl"] = both
        found["one way"]["nccl"] = lambda: theirs(0)
        found["and back"]["nccl"] = lambda: theirs(0, 1)
        return found

    def verify(self, what: str, call: Callable[[], Any], x: Any, out: Any) -> None:
        """Calls once; raises ValueError if something else has come than the other rank sent."""
        pattern = np.arange(x.nbytes, dtype=np.uint32).astype(np.uint8)
        x.set(pattern + self.comm.rank)
        out.set(np.zeros_like(pattern))
        self.stream.synchronize()
        self.comm.barrier()
        call()
        self.stream.synchronize()
        self.comm.synchronize()
        wanted = pattern + self.other
        if not (what == "one way" and self.comm.rank == 0) and (out.get() != wanted).any():
            raise ValueError(f"{what}, {x.nbytes} bytes: not what rank {self.other} sent")
        self.comm.barrier()

    def capture(self, call: Callable[[], Any]) -> Any:
        self.stream.begin_capture()
        for _ in range(CALLS):
            call()
        return self.stream.end_capture()

    def window(self, graph: Any) -> float:
        """Microseconds of a call, of the slower rank."""
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        self.comm.barrier()
        graph.launch(self.stream)  # the ranks meet
        begin.record(self.stream)
        graph.launch(self.stream)
        end.record(self.stream)
        end.synchronize()
        took = cupy.cuda.get_elapsed_time(begin, end) * 1e3 / CALLS
        return float(self.comm.all_reduce(np.array([took]), op="max")[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bytes", default=SIZES)
    parser.add_argument("--windows", type=int, default=30)
    parser.add_argument("--no-nccl", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    comm = cc.init(timeout=60)
    if comm.size != 2:
        raise SystemExit(f"transfers_gpu: 2 ranks are needed, not {comm.size}")
    bench = Bench(comm, not options.no_nccl)
    rows = []
    for nbytes in map(int, options.bytes.split(",")):
        with bench.stream:
            x, out = cupy.empty(nbytes, "uint8"), cupy.empty(nbytes, "uint8")
            for what, whose in bench.calls(x, out).items():
                for call in whose.values():
                    bench.verify(what, call, x, out)
                graphs = {name: bench.capture(call) for name, call in whose.items()}
                times: dict[str, list[float]] = {name: [] for name in graphs}
                for _ in range(options.windows):
                    for name, graph in graphs.items():
                        times[name].append(bench.window(graph))
                for name, took in times.items():
                    median, p99 = np.percentile(took, [50, 99])
                    rows.append(
                        {"bytes": nbytes, "what": what, "name": name, "us": median, "p99_us": p99}
                    )
                    if comm.rank == 0:
                        speed = nbytes * (2 if what == "and back" else 1) / median / 1e3
                        print(
                            f"{nbytes:>10} B  {what:9} {name:12} {median:9.2f} us (p99 {p99:.2f})"
                            f"  {speed:7.1f} GB/s",
                            flush=True,
                        )
    comm.synchronize()
    header = machine.header(comm, machine.command_of_script())
    if comm.rank == 0 and options.json:
        header["gpu"] = gpus.rank_facts(cupy, bench.gpu) | gpus.versions(cupy)
        options.json.write_text(json.dumps({"header": header, "rows": rows}, indent=1) + "\n")
    if bench.nccl is not None:
        nccl.leave(comm, bench.nccl)
    comm.close()


if __name__ == "__main__":
    main()
