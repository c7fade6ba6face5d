"""Arrays on GPUs between nodes, beside MPI between host buffers in the same run.

    mpirun -n 2 python bench/nodes_gpu.py --json bench/results/nodes-gpu-2.json
    mpirun -n 4 python bench/nodes_gpu.py --nodes 2 --algorithms ring,halving_doubling

Each rank has a GPU, and the ranks are divided into `--nodes` nodes, of one each unless it is given,
by COLLECTIVES_NODE where that is not set. In turns, on arrays of float32, none in place but
broadcast's:

    gpu     ours on arrays of the GPUs, one call behind the other on a stream; the host waits for
            the last. Chosen by size: along rails where nodes have several GPUs each (the row says
            so)
    gpu A   the same by each algorithm A of `--algorithms` that can do the collective: a flat one
            stages whole arrays on every rank
    waited  the same, but the host waits for each
    host    ours on host arrays
    mpi     MPI's own collective on host arrays
    wire    bare messages of MPI between host arrays, of as many bytes as a rank must send to
            other nodes, all ranks at the same time, each to the like rank of the next node
            (broadcast: from the first node to the second)

A time is the median over windows of the slowest rank's mean of a call. Every element that each of
them gives, but bare messages, is compared before anything is timed; one that is wrong ends the run
with status 1. `--staging 1M,2M` adds "gpu" with slices of these sizes. `--straight`, for an MPI
that is CUDA-aware, adds

    straight   as gpu, but MPI is given the arrays as they are (COLLECTIVES_GPU_MPI=on; all others
               are staged then)
    mpi gpu    MPI's own collective on arrays of the GPUs
    wire gpu   bare messages of MPI between arrays of the GPUs

The file is written after each
row; what does not fit in `--limit` seconds is left out, and the file says so.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import cupy
import numpy as np
from mpi4py import MPI

import collectives as cc
from collectives import _core
from collectives.bench import gpus, machine
from collectives.device import keep_streams_apart
from collectives.rail_plan import place_of
from collectives.schedule import why_unsupported
from collectives.staging import StagedEngine
from collectives.tuning.rails import why_not_placed, why_staged

WORLD = MPI.COMM_WORLD
SIZES = "64K,256K,1M,4M,16M,64M,256M"
COLLECTIVES = "all_reduce,all_gather,broadcast,reduce_scatter,all_to_all"
PERIOD = 65521  # elements after which a rank's pattern repeats: a prime
MOST_CALLS = 20  # of a window
WINDOW_S = 0.01  # that a window shall take at least
WINDOWS = (5, 40)  # fewest and most of each way

Way = Callable[[], Any]


class Arrays(NamedTuple):
    """One rank's arrays of a row, on the host or on a GPU; `out` is `x` in place."""

    x: Any
    out: Any


@functools.cache
def base(rank: int) -> np.ndarray[Any, Any]:
    """Whole numbers so small that sums are exact."""
    numbers = np.random.default_rng(rank).integers(0, 100, PERIOD)
    return numbers.astype(np.float32)


def elements(collective: str, nbytes: int) -> tuple[int, int]:
    """Of x and out, for a whole vector of about `nbytes`."""
    n = WORLD.size
    block = max(1, nbytes // 4 // n)
    whole = block * n
    return {
        "all_gather": (block, whole),
        "reduce_scatter": (whole, block),
    }.get(collective, (whole, whole))


def given(collective: str, count: int) -> np.ndarray[Any, Any]:
    """What this rank contributes."""
    if collective == "broadcast" and WORLD.rank != 0:
        return np.full(count, -1, np.float32)
    return np.resize(base(WORLD.rank), count)


def expected(collective: str, count: int, block: int) -> np.ndarray[Any, Any]:
    """What this rank must get: `count` elements, in blocks of `block`."""
    ranks = range(WORLD.size)
    if collective == "broadcast":
        return np.resize(base(0), count)
    if collective == "all_gather":
        return np.concatenate([np.resize(base(r), block) for r in ranks])
    if collective == "all_to_all":
        mine = range(WORLD.rank * block, (WORLD.rank + 1) * block)
        return np.concatenate([np.resize(np.roll(base(r), -mine.start), block) for r in ranks])
    total = sum((base(r) for r in ranks), np.zeros(PERIOD, np.float32))
    first = WORLD.rank * block if collective == "reduce_scatter" else 0
    return np.resize(np.roll(total, -first), count)


def ours(comm: cc.Communicator, collective: str, on: Arrays, algorithm: str | None = None) -> Way:
    call = functools.partial(getattr(comm, collective), algorithm=algorithm)
    if collective == "broadcast":
        return lambda: call(on.x)
    return lambda: call(on.x, out=on.out)


def theirs(collective: str, on: Arrays) -> Way:
    if collective == "broadcast":
        return lambda: WORLD.Bcast(on.x)
    name = {"reduce_scatter": "Reduce_scatter_block", "all_reduce": "Allreduce"}.get(collective)
    call = getattr(WORLD, name or {"all_gather": "Allgather", "all_to_all": "Alltoall"}[collective])
    return lambda: call(on.x, on.out)


def put(array: Any, values: np.ndarray[Any, Any]) -> None:
    """Into an array on the host or on a GPU."""
    if isinstance(array, np.ndarray):
        array[:] = values
    else:
        array.set(values)


def bare(module: Any, collective: str, nbytes: int, nodes: list[int]) -> Way:
    """Messages of as many bytes as a rank must send to other nodes for a vector of `nbytes`,
    between arrays of `module`: numpy or cupy.
    """
    apart = nodes if not why_not_placed(nodes) else list(range(WORLD.size))
    place = place_of(apart, WORLD.rank)
    n, rail = len(place.members), place.rail
    share = {"broadcast": 1.0, "all_reduce": 2 * (n - 1) / n}.get(collective, (n - 1) / n)
    if collective != "all_to_all":
        share /= len(place.members[0])
    outgoing, incoming = (module.empty(int(nbytes * share), "uint8") for _ in range(2))
    for array in (outgoing, incoming):
        put(array, np.ones(array.shape, np.uint8))  # else the host's are one page of zeros
    if collective == "broadcast":
        return {
            0: lambda: WORLD.Send(outgoing, rail[1]),
            1: lambda: WORLD.Recv(incoming, rail[0]),
        }.get(place.node, lambda: None)
    right, left = rail[(place.node + 1) % n], rail[(place.node - 1) % n]
    return lambda: WORLD.Sendrecv(outgoing, right, 0, incoming, left, 0)


class Bench:
    """One rank: its communicators, its GPU and its stream."""

    def __init__(
        self,
        nodes: int,
        algorithms: list[str],
        staging: list[str],
        straight: bool,
        seconds: float,
    ) -> None:
        self.seconds = seconds
        self.straight = straight
        self.algorithms = algorithms
        keep_streams_apart()  # before CUDA is used
        self.gpu = WORLD.rank % cupy.cuda.runtime.getDeviceCount()
        cupy.cuda.Device(self.gpu).use()
        self.stream = cupy.cuda.Stream(non_blocking=True)
        number = WORLD.rank * (nodes or WORLD.size) // WORLD.size
        os.environ.setdefault("COLLECTIVES_NODE", f"node{number}")
        self.comm = cc.init(timeout=60)
        found = len(set(self.comm.nodes))
        if found < 2 or found != (nodes or found):
            raise SystemExit(
                f"nodes_gpu: {nodes or 'several'} nodes are needed, not nodes {self.comm.nodes} "
                "(COLLECTIVES_NODE)"
            )
        variable = "COLLECTIVES_GPU_MPI"
        if straight:
            os.environ[variable] = "off"
        self.staged = {"gpu": self.comm}
        self._set_up(self.comm, variable, os.environ.get(variable, ""))
        twins = [(f"gpu {size}", "COLLECTIVES_STAGING", size) for size in staging]
        twins += [("straight", variable, "on")] if straight else []
        for name, variable, value in twins:
            self.staged[name] = twin = self.comm.duplicate()
            self._set_up(twin, variable, value)

    def _set_up(self, comm: cc.Communicator, variable: str, value: str) -> None:
        """With a variable of the environment set meanwhile."""
        usual = os.environ.get(variable, "")
        os.environ[variable] = value
        with self.stream:
            comm.all_reduce(cupy.empty(8, "float32"))
        comm.synchronize()
        os.environ[variable] = usual

    def ways(self, collective: str, nbytes: int) -> dict[str, tuple[Way, Arrays | None]]:
        """Each way's call, and the arrays that it works on."""
        counts = elements(collective, nbytes)
        in_place = collective == "broadcast"

        def arrays(module: Any) -> Arrays:
            x = module.empty(counts[0], "float32")
            return Arrays(x, x if in_place else module.empty(counts[1], "float32"))

        on_gpu, on_host = arrays(cupy), arrays(np)
        found: dict[str, tuple[Way, Arrays | None]] = {
            name: (ours(comm, collective, on_gpu), on_gpu) for name, comm in self.staged.items()
        }
        size = WORLD.size
        for algorithm in self.algorithms:
            if not why_unsupported(algorithm, collective, size, node=self.comm.nodes):
                way = ours(self.comm, collective, on_gpu, algorithm)
                found[f"gpu {algorithm}"] = (way, on_gpu)
        call = found["gpu"][0]

        def waited() -> None:
            call()
            self.stream.synchronize()

        found["waited"] = (waited, on_gpu)
        found["host"] = (ours(self.comm, collective, on_host), on_host)
        found["mpi"] = (theirs(collective, on_host), on_host)
        found["wire"] = (bare(np, collective, nbytes, self.comm.nodes), None)
        if self.straight:
            found["mpi gpu"] = (theirs(collective, on_gpu), on_gpu)
            found["wire gpu"] = (bare(cupy, collective, nbytes, self.comm.nodes), None)
        return found

    def along_rails(self, collective: str, nbytes: int) -> bool:
        """Whether "gpu" goes along rails."""
        engine = self.comm._device
        assert isinstance(engine, StagedEngine), "the ranks are on several nodes"
        return engine.rails is not None and not why_staged(collective, nbytes, None, None)

    def verify(self, name: str, way: Way, on: Arrays, data: Arrays) -> int:
        """How many elements are wrong, on all ranks together; `data` has the input and what must
        come out.
        """
        for array, values in ((on.out, np.full(on.out.size, -2, np.float32)), (on.x, data.x)):
            put(array, values)
        self.stream.synchronize()
        WORLD.Barrier()
        way()
        self.stream.synchronize()
        self.comm.synchronize()
        got = on.out if isinstance(on.out, np.ndarray) else on.out.get()
        total = int(WORLD.allreduce(int((got != data.out).sum())))
        if total and WORLD.rank == 0:
            print(f"{name}: {total} wrong elements", file=sys.stderr, flush=True)
        return total

    def window(self, way: Way, calls: int) -> float:
        """Seconds of a call on this rank."""
        WORLD.Barrier()
        began = time.perf_counter()
        for _ in range(calls):
            way()
        self.stream.synchronize()
        return (time.perf_counter() - began) / calls

    def row(self, collective: str, nbytes: int) -> dict[str, Any]:
        """Verifies, then times. Collective."""
        with self.stream:
            ways = self.ways(collective, nbytes)
            counts = elements(collective, nbytes)
            block = min(counts) if collective != "all_to_all" else counts[0] // WORLD.size
            data = Arrays(given(collective, counts[0]), expected(collective, counts[1], block))
            wrong = {
                name: self.verify(f"{collective} of {nbytes} bytes, {name}", way, on, data)
                for name, (way, on) in ways.items()
                if on is not None
            }
            row: dict[str, Any] = {
                "collective": collective,
                "bytes": nbytes,
                "algorithm": self.comm._tuner.choose(collective, nbytes),
                "rails": self.along_rails(collective, nbytes),
                "wrong": sum(wrong.values()),
                "times": {},
            }
            if row["wrong"]:
                return row
            ways_only = {name: way for name, (way, _) in ways.items()}
            first = {name: self.window(way, 2) for name, way in ways_only.items()}
            slowest = float(WORLD.allreduce(max(first.values()), MPI.MAX))
            calls = int(min(MOST_CALLS, max(1, WINDOW_S / slowest)))
            round_s = float(WORLD.allreduce(sum(first.values()), MPI.MAX)) * calls
            windows = int(min(WINDOWS[1], max(WINDOWS[0], self.seconds / round_s)))
            times: dict[str, list[float]] = {name: [] for name in ways_only}
            for _ in range(windows):
                for name, way in ways_only.items():
                    times[name].append(self.window(way, calls))
        row |= {"calls": calls, "windows": windows}
        for name, took in times.items():
            worst = np.array(took)
            WORLD.Allreduce(MPI.IN_PLACE, worst, MPI.MAX)
            median, p90 = np.percentile(worst * 1e6, [50, 90])
            row["times"][name] = {"us": round(median, 2), "p90_us": round(p90, 2)}
        return row


def line(row: dict[str, Any]) -> str:
    us = {name: of["us"] for name, of in row["times"].items()}
    cells = [f"{row['collective']:14} {row['bytes']:>10} B"]
    cells += [f"{name} {value:.1f}" for name, value in us.items()]
    return "  ".join(cells) + f"  mpi/gpu {us['mpi'] / us['gpu']:.2f}"


def parsed(text: str) -> int:
    """64K as bytes."""
    scale = {"K": 10, "M": 20, "G": 30}.get(text[-1:].upper())
    return int(text) if scale is None else int(text[:-1]) << scale


def header(bench: Bench) -> dict[str, Any]:
    """What stands above the results. Collective."""
    facts = WORLD.allgather(gpus.rank_facts(cupy, bench.gpu))
    versions = gpus.versions(cupy) | {"mpi": machine.mpi_name(str(_core.loaded_mpi()["version"]))}
    more: dict[str, dict[str, Any]] = {"machine": {"gpus": facts}, "versions": versions}
    return machine.header(bench.comm, machine.command_of_script(), more)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--collectives", default=COLLECTIVES)
    parser.add_argument("--bytes", default=SIZES)
    parser.add_argument("--nodes", type=int, default=0, help="nodes of ranks; a rank each")
    parser.add_argument(
        "--algorithms", default="", help="beside what is chosen on GPU arrays, such as ring,pat"
    )
    parser.add_argument("--staging", default="", help="further sizes of slices, such as 1M,2M")
    parser.add_argument(
        "--straight", action="store_true", help="give MPI arrays of the GPUs too: it is CUDA-aware"
    )
    parser.add_argument("--seconds", type=float, default=0.7, help="of a row's windows, about")
    parser.add_argument("--limit", type=float, default=80.0, help="seconds for all rows")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    began = time.monotonic()
    if not 0 <= options.nodes <= WORLD.size or options.nodes == 1:
        parser.error(f"--nodes {options.nodes}: {WORLD.size} ranks make 2 to {WORLD.size} nodes")
    algorithms = [a.strip() for a in re.split(r",(?![^(]*\))", options.algorithms) if a.strip()]
    staging = [s for s in options.staging.split(",") if s]
    bench = Bench(options.nodes, algorithms, staging, options.straight, options.seconds)
    content: dict[str, Any] = {"header": header(bench), "rows": [], "left_out": []}
    for collective in options.collectives.split(","):
        for nbytes in map(parsed, options.bytes.split(",")):
            if WORLD.allreduce(time.monotonic() - began, MPI.MAX) > options.limit:
                content["left_out"].append(f"{collective} of {nbytes} bytes")
            else:
                content["rows"].append(bench.row(collective, nbytes))
                if WORLD.rank == 0 and content["rows"][-1]["times"]:
                    print(line(content["rows"][-1]), flush=True)
            if WORLD.rank == 0 and options.json:
                options.json.write_text(json.dumps(content, indent=1) + "\n")
    if WORLD.rank == 0 and content["left_out"]:
        print(f"left out after {options.limit:.0f} s: {', '.join(content['left_out'])}")
    for comm in bench.staged.values():
        comm.close()
    return int(any(row["wrong"] for row in content["rows"]))


if __name__ == "__main__":
    sys.exit(main())
