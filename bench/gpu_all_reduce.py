"""all_reduce on GPUs, one process a GPU, in CUDA graphs, beside NCCL in the same run.

    python -m collectives run -n 2 bench/gpu_all_reduce.py --json bench/results/gpu-2.json

float32 sums, out of place, on random data; every result is checked before it is timed. A graph
holds ten calls; a window replays it, and the slowest rank's mean counts; shown are medians over
windows, ours and NCCL's in turn. Without NCCL (cupy.cuda.nccl) only ours is measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np

import collectives as cc
from collectives import _core

CALLS = 10
WINDOWS = 9
Call = Callable[[Any, Any, Any], None]


def nccl_call(comm: cc.Communicator) -> tuple[Call | None, str]:
    try:
        from cupy.cuda import nccl

        mine = nccl.get_unique_id() if comm.rank == 0 else bytes(128)
        unique = np.frombuffer(mine, np.uint8).copy()
        comm.broadcast(unique)
        peer = nccl.NcclCommunicator(comm.size, unique.tobytes(), comm.rank)
    except Exception as error:  # whatever is missing: the table says so
        return None, f"none: {type(error).__name__}: {error}"

    def call(x: Any, out: Any, stream: Any) -> None:
        peer.allReduce(
            x.data.ptr, out.data.ptr, x.size, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream.ptr
        )

    return call, str(nccl.get_version())


def our_call(comm: cc.Communicator, algorithm: str | None) -> Call:
    def call(x: Any, out: Any, stream: Any) -> None:
        comm.all_reduce(x, out=out, algorithm=algorithm)

    return call


def time_graph(comm: cc.Communicator, call: Call, x: Any, out: Any, stream: Any) -> Any:
    """A function that times one window, in µs a call of the slowest rank."""
    for _ in range(3):
        call(x, out, stream)
    stream.synchronize()
    stream.begin_capture()
    for _ in range(CALLS):
        call(x, out, stream)
    graph = stream.end_capture()
    replays = 20 if x.nbytes <= 4 << 20 else 3
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()

    def window() -> float:
        comm.barrier()
        graph.launch(stream)
        begin.record(stream)
        for _ in range(replays):
            graph.launch(stream)
        end.record(stream)
        end.synchronize()
        mine = cupy.cuda.get_elapsed_time(begin, end) * 1e3 / (replays * CALLS)
        return float(comm.all_gather(np.array([mine])).max())

    return window


def verify(comm: cc.Communicator, call: Call, x: Any, out: Any, stream: Any) -> None:
    out.fill(np.nan)
    call(x, out, stream)
    stream.synchronize()
    xs = comm.all_gather(x.get())
    total = xs.reshape(comm.size, -1).astype(np.float64).sum(axis=0)
    assert np.allclose(out.get(), total, rtol=1e-5, atol=1e-5), f"wrong at {x.nbytes} bytes"


def commit() -> str:
    known = str(_core.commit)
    if known != "unknown":
        return known
    answer = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return answer.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", default="", help="file to write")
    parser.add_argument("--max", type=int, default=64 << 20, help="largest size in bytes")
    parser.add_argument("--algorithms", default="", help="also these, comma-separated")
    arguments = parser.parse_args()
    comm = cc.init()
    gpus = cupy.cuda.runtime.getDeviceCount()
    cupy.cuda.Device(comm.rank % gpus).use()
    stream = cupy.cuda.Stream(non_blocking=True)
    rows = []
    with stream:
        peer, peer_version = nccl_call(comm)
        calls: dict[str, Call] = {"auto": our_call(comm, None)}
        for name in filter(None, arguments.algorithms.split(",")):
            calls[name] = our_call(comm, name)
        if peer is not None:
            calls["nccl"] = peer
        if comm.rank == 0:
            print(f"{comm.size} ranks on {min(gpus, comm.size)} GPUs, NCCL {peer_version}")
            print("bytes".rjust(10), *(name.rjust(16) for name in calls), "nccl/auto")
        nbytes = 256
        while nbytes <= arguments.max:
            rng = np.random.default_rng([comm.rank, nbytes])
            x = cupy.asarray(rng.standard_normal(nbytes // 4, np.float32))
            out = cupy.empty_like(x)
            windows = {}
            for name, call in calls.items():
                verify(comm, call, x, out, stream)
                windows[name] = time_graph(comm, call, x, out, stream)
            times: dict[str, list[float]] = {name: [] for name in calls}
            for _ in range(WINDOWS):
                for name, window in windows.items():
                    times[name].append(window())
            medians = {name: statistics.median(t[1:]) for name, t in times.items()}
            rows.append({"bytes": nbytes, "us": medians, "windows": times})
            comm.synchronize()
            if comm.rank == 0:
                ratio = medians["nccl"] / medians["auto"] if peer is not None else float("nan")
                print(
                    str(nbytes).rjust(10),
                    *(f"{t:16.2f}" for t in medians.values()),
                    f"{ratio:8.2f}",
                    flush=True,
                )
            nbytes *= 2 if 256 << 10 <= nbytes < 4 << 20 else 4
    if comm.rank == 0 and arguments.json:
        device = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
        record = {
            "what": "all_reduce float32 sum, out of place, CUDA graph, median µs a call",
            "device": device,
            "ranks": comm.size,
            "gpus": min(gpus, comm.size),
            "driver": cupy.cuda.runtime.driverGetVersion(),
            "runtime": cupy.cuda.runtime.runtimeGetVersion(),
            "nccl": peer_version,
            "commit": commit(),
            "rows": rows,
        }
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=1)
    comm.close()


main()
