"""Benchmarks on GPUs: arrays in device memory, calls on a stream one by one or in a CUDA graph.

The time of a call is the mean over a window of calls between two events on the rank's stream, and
the slowest rank's counts. Before a window all ranks meet on the host, and calls that are not timed
go first, so that the kernels of all ranks have met when the first event is recorded.

    stream   calls are launched one by one, from Python, by the methods that users call
    graph    a graph of several calls is captured once and replayed

Needs cupy, which makes streams, events, graphs and memory, and copies. It computes nothing: ranks
that are threads may share a GPU, and the first launch of a kernel would wait for those of others.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from .. import _core
from ..array import view
from ..bootstrap import host_key
from ..communicator import Communicator
from ..device_table import Gpus, gpus_of, why_no_table
from ..errors import CollectiveError, UnsupportedError
from ..tuning.work import GPU, GPU_SYMMETRIC
from . import gpus
from .backends import Backend
from .cases import Areas, Bound, Memory, as_user
from .timing import Runner, Windows

# Calls of one graph, so that launching it costs little beside them; of large arrays few are enough.
_GRAPH_CALLS = 10
_LARGE = 16 << 20  # bytes
_LARGE_CALLS = 2
_WARM = 3  # calls before a capture
_HOST_CALLS = 64  # launched at once to see what one takes on the host: no queue is full by then
_HOST_ROUNDS = 9  # of them, on a stream with nothing else on it each time
_HOST_BYTES = 4 << 20  # at most, which is enough: larger ones are launched alike
_TO_DEVICE, _TO_HOST = 1, 2  # cudaMemcpyKind


def graph_calls(nbytes: int) -> int:
    """Calls that a graph of a benchmark holds."""
    return _GRAPH_CALLS if nbytes <= _LARGE else _LARGE_CALLS


class DeviceArray:
    """Elements of device memory: what `cases.bind` slices, and an array for any call.

    It has the CUDA array interface, version 3, also for dtypes that cupy lacks.
    """

    def __init__(self, gpu: Gpu, pointer: int, nbytes: int, dtype: Any, owner: Any) -> None:
        self.gpu = gpu
        self.device = gpu.device
        self.pointer = pointer
        self.nbytes = nbytes
        self.dtype = np.dtype(dtype)
        self._owner = owner

    def __len__(self) -> int:
        return self.nbytes // self.dtype.itemsize

    def __getitem__(self, part: slice) -> DeviceArray:
        begin, end, step = part.indices(len(self))
        assert step == 1
        size = self.dtype.itemsize
        nbytes = max(0, end - begin) * size
        return DeviceArray(self.gpu, self.pointer + begin * size, nbytes, self.dtype, self._owner)

    def view(self, dtype: Any) -> DeviceArray:
        return DeviceArray(self.gpu, self.pointer, self.nbytes, dtype, self._owner)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        kind = self.dtype.str if self.dtype.kind != "V" else f"|V{self.dtype.itemsize}"
        return {
            "version": 3,
            "shape": (len(self),),
            "typestr": kind,
            "data": (self.pointer, False),
            "strides": None,
            "stream": self.gpu.stream.ptr or 1,
        }


class Gpu:
    """This rank's GPU and the stream that all its calls are put on: the few lines that use cupy.

    ordinal  the GPU's number in this process
    """

    def __init__(self, cupy: Any, ordinal: int) -> None:
        self.cupy = cupy
        self.ordinal = ordinal
        self.device = cupy.cuda.Device(ordinal)
        self.device.use()
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._begin, self._end = cupy.cuda.Event(), cupy.cuda.Event()

    def allocate(self, nbytes: int) -> DeviceArray:
        memory = self.cupy.cuda.alloc(nbytes)
        return DeviceArray(self, memory.ptr, nbytes, np.uint8, memory)

    def copy(self, to: int, source: int, nbytes: int, kind: int) -> None:
        """Copies and waits for the stream."""
        if nbytes:
            self.cupy.cuda.runtime.memcpyAsync(to, source, nbytes, kind, self.stream.ptr)
        self.stream.synchronize()

    def set(self, to: int, byte: int, nbytes: int) -> None:
        """Sets bytes and waits for the stream."""
        if nbytes:
            self.cupy.cuda.runtime.memsetAsync(to, byte, nbytes, self.stream.ptr)
        self.stream.synchronize()

    def array(self, x: DeviceArray) -> Any:
        """The same memory as a cupy array, or `x` itself where cupy lacks its dtype."""
        if not len(x) or x.dtype.type.__module__.partition(".")[0] != "numpy":
            return x
        cupy = self.cupy
        memory = cupy.cuda.UnownedMemory(x.pointer, x.nbytes, x, self.ordinal)
        return cupy.ndarray((len(x),), x.dtype, cupy.cuda.MemoryPointer(memory, 0))

    def nothing(self) -> Callable[[], None]:
        """A function that launches a kernel which does nothing: what no call can go below."""
        kernel = self.cupy.RawKernel('extern "C" __global__ void nothing() {}', "nothing")
        return lambda: kernel((1,), (1,), ())

    def capture(self, body: Callable[[], Any], calls: int) -> Callable[[], None]:
        """A function that replays a graph of `calls` calls."""
        with self.stream:
            self.stream.begin_capture()
            try:
                for _ in range(calls):
                    body()
            finally:
                graph = self.stream.end_capture()

        def launch() -> None:
            graph.launch(self.stream)

        return launch

    def elapsed_ns(self, launch: Callable[[], None], times: int) -> float:
        """Nanoseconds from the first to the last of `times` launches on the stream."""
        self._begin.record(self.stream)
        for _ in range(times):
            launch()
        self._end.record(self.stream)
        self._end.synchronize()
        return float(self.cupy.cuda.get_elapsed_time(self._begin, self._end)) * 1e6


class DeviceMemory:
    """Fills device arrays from staging arrays on the host, and reads them into such."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    @contextmanager
    def writing(self, array: DeviceArray) -> Iterator[np.ndarray[Any, Any]]:
        values = np.empty(len(array), array.dtype)
        yield values
        self._gpu.copy(array.pointer, values.ctypes.data, values.nbytes, _TO_DEVICE)

    def reading(self, array: DeviceArray) -> np.ndarray[Any, Any]:
        values = np.empty(len(array), array.dtype)
        self._gpu.copy(values.ctypes.data, array.pointer, values.nbytes, _TO_HOST)
        return values

    def set(self, array: DeviceArray, byte: int) -> None:
        self._gpu.set(array.pointer, byte, array.nbytes)

    def given(self, array: DeviceArray) -> Any:
        return self._gpu.array(array)


class DeviceAreas:
    """Two areas of device memory."""

    def __init__(self, memory: Memory, first: DeviceArray, second: DeviceArray) -> None:
        self.memory = memory
        self.first = first
        self.second = second


class Cuda(Backend):
    """Arrays on this rank's GPU. Collective to make; sets the GPU engine up."""

    device = "cuda"
    modes = ("stream", "graph")
    loops = "calls on a stream from Python, or in a CUDA graph"

    def __init__(self, comm: Communicator, gpu: Gpu) -> None:
        super().__init__(comm)
        self.gpu = gpu
        self.memory = DeviceMemory(gpu)
        self.clock = Windows(comm)
        self.transport = "threads" if comm._bootstrap.kind == "threads" else "cuda_ipc"
        self.links = GPU
        self.nccl_version = ""  # once such a peer is connected
        self.host_us: list[float] = []  # of a call of ours, for each way that was launched
        self.nothing_us = 0.0  # the same of an empty kernel
        one = gpu.allocate(256)
        comm.barrier()
        with gpu.stream:
            # Forced, since a table of other GPUs stands in the way of nothing here.
            comm.all_reduce(one.view(np.uint8), algorithm="direct_one_shot")
        self.finish()
        self.tuner = comm._gpu_tuner

    def finish(self) -> None:
        """Waits for this rank's calls, raises what went wrong in them, and meets the others."""
        self.gpu.stream.synchronize()
        self.comm.synchronize()
        self.comm.barrier()

    def areas(self, nbytes: int, symmetric: bool) -> Areas:
        nbytes = max(1, nbytes)
        if not symmetric:
            found = [self.gpu.allocate(nbytes) for _ in range(2)]
        else:
            found = []
            for _ in range(2):
                array = self.comm.empty((nbytes,), "uint8", f"cuda:{self.gpu.ordinal}")
                pointer = view(array, writable=False, gpu=True).pointer
                found.append(DeviceArray(self.gpu, pointer, nbytes, np.uint8, array))
        return DeviceAreas(self.memory, *found)

    def body(self, bound: Bound) -> Callable[[], Any]:
        """Our call, as a user writes it."""
        if bound.case.collective == "barrier":
            stream = self.gpu.stream.ptr
            return lambda: self.comm.barrier(stream=stream)
        return as_user(self.comm, bound)

    def call(self, bound: Bound) -> None:
        self.once(self.body(bound))

    def once(self, body: Callable[[], Any]) -> None:
        """Makes a call, ours or a peer's, and waits for it."""
        with self.gpu.stream:
            body()
        self.finish()

    def runner(self, bound: Bound, mode: str) -> Runner:
        body = self.body(bound)
        runner = self.loop(body, bound.nbytes, mode)
        if mode == "stream" and bound.nbytes <= _HOST_BYTES:
            if not self.host_us:
                self.nothing_us = self._launching_us(self.gpu.nothing())
            self.host_us.append(self._launching_us(body))
        return runner

    def _launching_us(self, body: Callable[[], Any]) -> float:
        """Microseconds of the host for each of several calls put on the stream: the median of the
        rounds, and of the slowest rank. Collective.
        """
        mine = []
        for _ in range(_HOST_ROUNDS):
            self.comm.barrier()
            with self.gpu.stream:
                begin = time.perf_counter()
                for _ in range(_HOST_CALLS):
                    body()
                mine.append((time.perf_counter() - begin) / _HOST_CALLS * 1e6)
            self.finish()
        return float(np.max(self.comm.all_gather(np.array([np.median(mine)]))))

    def notes(self) -> dict[str, str]:
        if not self.host_us:
            return {}
        least, median = min(self.host_us), float(np.median(self.host_us))
        return {
            "host time of a call that is launched": f"median {median:.2f} us over all tables, "
            f"least {least:.2f} us; of an empty kernel, by cupy: {self.nothing_us:.2f} us"
        }

    def loop(self, body: Callable[[], Any], nbytes: int, mode: str) -> Runner:
        """A timed loop over any call that is put on the stream. Collective."""
        gpu, calls = self.gpu, 1
        for _ in range(_WARM):
            self.once(body)
        launch: Callable[[], Any] = body
        if mode == "graph":
            calls = graph_calls(nbytes)
            launch = gpu.capture(body, calls)
            self.comm.barrier()

        def run(warmup: int, iterations: int) -> np.ndarray[Any, Any]:
            launches = max(1, math.ceil(iterations / calls))
            self.comm.barrier()
            with gpu.stream:
                for _ in range(max(1, math.ceil(warmup / calls))):
                    launch()
                mean = gpu.elapsed_ns(launch, launches) / (launches * calls)
            self.comm.synchronize()
            return np.array([[0.0, mean]])

        return run

    def links_of(self, symmetric: bool) -> str:
        return GPU_SYMMETRIC if symmetric else GPU

    def gpus(self) -> list[str]:
        return self._gpus().names

    def why_no_table(self) -> str:
        engine = self.comm._device
        assert engine is not None, "making this backend set it up"
        return why_no_table(engine, self._gpus())

    def _gpus(self) -> Gpus:
        return gpus_of(self.comm._bootstrap, self.gpu.ordinal)

    def facts(self) -> dict[str, dict[str, Any]]:
        mine = json.dumps(gpus.rank_facts(self.gpu.cupy, self.gpu.ordinal)).encode()
        ranks = [json.loads(b) for b in self.comm._bootstrap.all_gather(mine)]
        versions = gpus.versions(self.gpu.cupy)
        settings = {}
        if self.nccl_version:
            versions["nccl"] = self.nccl_version
            settings["NCCL_NVLS_ENABLE"] = os.environ.get("NCCL_NVLS_ENABLE", "")
        return {"machine": {"gpus": ranks}, "versions": versions, "settings": settings}

    def shared_gpus(self) -> list[list[int]]:
        """The groups of ranks that share a GPU. Collective."""
        mine = f"{host_key()} {gpus.bus_id(self.gpu.cupy, self.gpu.ordinal)}"
        places: dict[str, list[int]] = {}
        for rank, place in enumerate(self.comm._bootstrap.all_gather(mine.encode())):
            places.setdefault(place.decode(), []).append(rank)
        return [ranks for ranks in places.values() if len(ranks) > 1]


def _cupy() -> tuple[Any, str]:
    """cupy, or why there is none that works."""
    count, why = _core.device_count()
    if not count:
        return None, why
    try:
        import cupy
    except ImportError as error:
        return None, (
            f"the benchmark on GPUs needs cupy, which does not load ({error}): "
            "pip install cupy-cuda12x, or cupy-cuda13x for a driver of CUDA 13"
        )
    return cupy, ""


def told_by(comm: Communicator, why: str) -> str:
    """What ranks say why they cannot go on, each reason once; "" if none does. Collective."""
    ranks: dict[str, list[int]] = {}
    for rank, answer in enumerate(comm._bootstrap.all_gather(why.encode())):
        if answer:
            ranks.setdefault(answer.decode(), []).append(rank)
    return "; ".join(
        reason if len(who) == comm.size else f"rank {', '.join(map(str, who))}: {reason}"
        for reason, who in ranks.items()
    )


def connect(comm: Communicator) -> Cuda:
    """The backend of this rank: GPU `local_rank` modulo their number. Collective.

    Raises UnsupportedError on all ranks, in words, if one has no GPU or no cupy.
    """
    cupy, why = _cupy()
    words = told_by(comm, why)
    if words:
        raise UnsupportedError(f"--device cuda: {words}")
    gpu: Gpu | None = None
    for rank in range(comm.size):  # making streams is not for several threads at once
        if rank == comm.rank:
            ordinal = comm.local_rank % int(cupy.cuda.runtime.getDeviceCount())
            gpu = Gpu(cupy, ordinal)
        comm.barrier()
    if gpu is None:
        raise CollectiveError("no rank has this rank's number", rank=comm.rank)
    return Cuda(comm, gpu)


def thread_devices() -> list[int]:
    """GPUs for ranks that are threads: all there are. Raises UnsupportedError if there is none."""
    count, why = _core.device_count()
    if not count:
        raise UnsupportedError(f"--device cuda: {why}")
    return list(range(count))
