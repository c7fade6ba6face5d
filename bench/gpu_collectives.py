"""Collectives on GPUs, one process a GPU, in CUDA graphs, beside NCCL in the same run.

    python -m collectives run -n 2 bench/gpu_collectives.py --json bench/results/gpu-nccl-2.json

float32 sums, out of place; each result is checked before it is timed. A graph holds ten calls; a
window replays it, and the slowest rank's mean counts; shown are medians over windows, all ways and
NCCL in turn. "any" are arrays of cupy, "symmetric" such from `Communicator.empty`; with --ways each
way that the kernels made by hand can take is measured too. Last comes the time that the host needs
for a call that is not captured, and what such calls take one by one. Without NCCL
(cupy.cuda.nccl) only ours is measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import cupy
import numpy as np

import collectives as cc
from collectives import _core
from collectives import device as engines
from collectives.tuning.device import Launch, device_launch

CALLS = 10
WINDOWS = 7
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")
SIZES = [
    *(256 << 2 * i for i in range(5)), 128 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20,
    8 << 20, 16 << 20, 64 << 20, 256 << 20,
]  # fmt: skip


class Way(NamedTuple):
    """One way to make a call: an algorithm, and how its kernel goes about it."""

    algorithm: str | None = None
    launch: Launch | None = None
    symmetric: bool = False
    most: int = 1 << 40  # bytes
    least: int = 0


TWO_SHOT = "direct_two_shot"
MIB = 1 << 20
WAYS = {
    "packets": Way("direct_one_shot", Launch(), most=MIB // 2),
    "lines": Way("direct_one_shot", Launch(lines=True), least=64 << 10, most=4 * MIB),
    "lines128": Way(
        "direct_one_shot", Launch(lines=True, blocks=128), least=MIB // 4, most=4 * MIB
    ),
    "push": Way(TWO_SHOT, Launch(), least=MIB // 4),
    "push64": Way(TWO_SHOT, Launch(blocks=64), least=MIB),
    "push8": Way(TWO_SHOT, Launch(blocks=8), least=16 * MIB),
    "push-64K": Way(TWO_SHOT, Launch(chunk=64 << 10), least=16 * MIB),
    "push-32K": Way(TWO_SHOT, Launch(chunk=32 << 10), least=4 * MIB),
    "s-pull": Way(TWO_SHOT, Launch(pull=True), True, least=64 << 10),
    "s-pull64": Way(TWO_SHOT, Launch(pull=True, blocks=64), True, least=MIB),
    "s-push": Way(TWO_SHOT, Launch(), True, least=MIB),
    "s-push64": Way(TWO_SHOT, Launch(blocks=64), True, least=MIB),
    "s-push8": Way(TWO_SHOT, Launch(blocks=8), True, least=16 * MIB),
    "s-push-64K": Way(TWO_SHOT, Launch(chunk=64 << 10), True, least=16 * MIB),
    "ring": Way("ring", least=MIB),
}


class Peer:
    """NCCL by way of cupy, or why it is not there."""

    def __init__(self, comm: cc.Communicator) -> None:
        self.call: Callable[[str, Any, Any, Any], None] | None = None
        try:
            from cupy.cuda import nccl

            mine = nccl.get_unique_id() if comm.rank == 0 else bytes(128)
            unique = np.frombuffer(mine, np.uint8).copy()
            comm.broadcast(unique)
            end = nccl.NcclCommunicator(comm.size, unique.tobytes(), comm.rank)
        except Exception as error:  # whatever is missing: the table says so
            self.version = f"none: {type(error).__name__}: {error}"
            return
        self.version = str(nccl.get_version())
        number, total = nccl.NCCL_FLOAT32, nccl.NCCL_SUM

        def call(collective: str, x: Any, out: Any, stream: Any) -> None:
            if collective == "all_reduce":
                end.allReduce(x.data.ptr, out.data.ptr, x.size, number, total, stream.ptr)
            elif collective == "reduce_scatter":
                end.reduceScatter(x.data.ptr, out.data.ptr, out.size, number, total, stream.ptr)
            else:
                end.allGather(x.data.ptr, out.data.ptr, x.size, number, stream.ptr)

        self.call = call


class Arrays:
    """Input and output of a collective on `nbytes` bytes, with data whose sums are exact."""

    def __init__(self, comm: cc.Communicator, collective: str, nbytes: int, symmetric: bool):
        self.comm, self.collective = comm, collective
        count = nbytes // 4
        part = count // comm.size
        lengths = {"all_gather": (part, count), "reduce_scatter": (count, part)}
        sizes = lengths.get(collective, (count, count))
        device = f"cuda:{cupy.cuda.Device().id}"
        make = (lambda n: comm.empty(n, "float32", device)) if symmetric else (
            lambda n: cupy.empty(n, np.float32))  # fmt: skip
        self.x, self.out = (make(n) for n in sizes)
        pattern = np.resize(np.arange(977, dtype=np.float32), sizes[0])
        self.x.set(pattern + comm.rank * 3)
        n, rank = comm.size, comm.rank
        if collective == "all_gather":
            self.expected = np.concatenate([pattern + r * 3 for r in range(n)])
        else:
            self.expected = pattern * n + 3 * (n * (n - 1) // 2)
        if collective == "reduce_scatter":
            self.expected = self.expected[rank * part : (rank + 1) * part]

    def is_right(self) -> bool:
        """On all ranks."""
        mine = np.array_equal(self.out.get(), self.expected)
        return bool(self.comm.all_gather(np.array([mine])).all())


def our_call(comm: cc.Communicator, way: Way) -> Callable[[str, Any, Any, Any], None]:
    def call(collective: str, x: Any, out: Any, stream: Any) -> None:
        launch = way.launch
        engines.device_launch = device_launch if launch is None else (lambda *_: launch)
        getattr(comm, collective)(x, out=out, algorithm=way.algorithm)

    return call


def time_graph(
    comm: cc.Communicator, call: Callable[[Any, Any, Any], None], arrays: Arrays, stream: Any
) -> Callable[[], float]:
    """A function that times one window, in µs a call of the slowest rank; checks the result."""
    x, out = arrays.x, arrays.out
    cupy.cuda.runtime.memsetAsync(out.data.ptr, 0xFF, out.nbytes, stream.ptr)
    stream.synchronize()
    comm.barrier()
    for _ in range(2):
        call(x, out, stream)
    stream.synchronize()
    assert arrays.is_right(), f"wrong: {arrays.collective} of {max(x.nbytes, out.nbytes)} bytes"
    stream.begin_capture()
    for _ in range(CALLS):
        call(x, out, stream)
    graph = stream.end_capture()
    replays = 20 if max(x.nbytes, out.nbytes) <= 4 << 20 else 3
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


def ways_of(collective: str, nbytes: int, all_ways: bool, only: set[str]) -> Iterator[Any]:
    yield "any", Way()
    yield "symmetric", Way(symmetric=True)
    for name, way in WAYS.items() if all_ways else ():
        fits = collective == "all_reduce" or way.algorithm != "direct_one_shot"
        if way.least <= nbytes <= way.most and fits and (not only or name in only):
            yield name, way


def measure(
    comm: cc.Communicator, peer: Peer, collective: str, nbytes: int, arguments: Any, stream: Any
) -> dict[str, Any]:
    arrays = {s: Arrays(comm, collective, nbytes, s) for s in (False, True)}
    windows = {}
    failed = {}
    only = set(filter(None, arguments.only.split(",")))
    for name, way in ways_of(collective, nbytes, arguments.ways, only):
        ours = our_call(comm, way)
        try:
            windows[name] = time_graph(
                comm, lambda *a, ours=ours: ours(collective, *a), arrays[way.symmetric], stream
            )
        except AssertionError as error:
            failed[name] = str(error)
    if peer.call is not None:
        theirs = peer.call
        windows["nccl"] = time_graph(comm, lambda *a: theirs(collective, *a), arrays[False], stream)
    times: dict[str, list[float]] = {name: [] for name in windows}
    for _ in range(WINDOWS):
        for name, window in windows.items():
            times[name].append(window())
    comm.synchronize()
    medians = {name: statistics.median(t[1:]) for name, t in times.items()}
    return {
        "collective": collective, "bytes": nbytes, "us": medians, "windows": times,
        "failed": failed,
    }  # fmt: skip


def one_by_one(comm: cc.Communicator, peer: Peer, nbytes: int, stream: Any) -> dict[str, Any]:
    """µs of the host for a call, and µs a call until all are done; not captured."""
    arrays = Arrays(comm, "all_reduce", nbytes, False)
    engines.device_launch = device_launch
    x, out = arrays.x, arrays.out
    loops: dict[str, Callable[[], Any]] = {"any": lambda: comm.all_reduce(x, out=out)}
    if peer.call is not None:
        theirs = peer.call
        loops["nccl"] = lambda: theirs("all_reduce", x, out, stream)
    found: dict[str, Any] = {"bytes": nbytes}
    for name, call in loops.items():
        hosts, totals = [], []
        for _ in range(5):
            comm.barrier()
            begin = time.perf_counter()
            for _ in range(500):
                call()
            hosts.append((time.perf_counter() - begin) * 1e6 / 500)
            stream.synchronize()
            totals.append((time.perf_counter() - begin) * 1e6 / 500)
        found[name] = {"host": statistics.median(hosts), "all": statistics.median(totals)}
    return found


def commit() -> str:
    known = str(_core.commit)
    if known != "unknown":
        return known
    answer = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return answer.stdout.strip() or "unknown"


def save(comm: cc.Communicator, path: str, peer: Peer, rows: Any, singles: Any) -> None:
    if comm.rank != 0 or not path:
        return
    gpus = cupy.cuda.runtime.getDeviceCount()
    record = {
        "what": "float32 sums, out of place, CUDA graph, median us a call of the slowest rank",
        "device": cupy.cuda.runtime.getDeviceProperties(0)["name"].decode(),
        "ranks": comm.size,
        "gpus": min(gpus, comm.size),
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "runtime": cupy.cuda.runtime.runtimeGetVersion(),
        "nccl": peer.version,
        "commit": commit(),
        "rows": rows,
        "one_by_one": singles,
    }
    with open(path, "w", encoding="utf-8") as file:
        json.dump(record, file, indent=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", default="", help="file to write")
    parser.add_argument("--min", type=int, default=256, help="smallest size in bytes")
    parser.add_argument("--max", type=int, default=64 << 20, help="largest size in bytes")
    parser.add_argument("--collectives", default=",".join(COLLECTIVES), help="comma-separated")
    parser.add_argument("--ways", action="store_true", help="also every way that kernels can take")
    parser.add_argument("--only", default="", help="of these ways, comma-separated")
    arguments = parser.parse_args()
    comm = cc.init(timeout=20)
    gpus = cupy.cuda.runtime.getDeviceCount()
    cupy.cuda.Device(comm.rank % gpus).use()
    stream = cupy.cuda.Stream(non_blocking=True)
    rows, singles = [], []
    with stream:
        peer = Peer(comm)
        if comm.rank == 0:
            print(f"{comm.size} ranks on {min(gpus, comm.size)} GPUs, NCCL {peer.version}")
        for collective in arguments.collectives.split(","):
            for nbytes in (s for s in SIZES if arguments.min <= s <= arguments.max):
                row = measure(comm, peer, collective, nbytes, arguments, stream)
                rows.append(row)
                save(comm, arguments.json, peer, rows, singles)
                if comm.rank == 0:
                    words = " ".join(f"{name} {us:.2f}" for name, us in row["us"].items())
                    print(collective, nbytes, words, *row["failed"].values(), flush=True)
        if arguments.min <= 256:
            singles = [one_by_one(comm, peer, nbytes, stream) for nbytes in (256, 64 << 10)]
            if comm.rank == 0:
                print("one by one, us:", json.dumps(singles), flush=True)
            save(comm, arguments.json, peer, rows, singles)
    comm.close()


main()
