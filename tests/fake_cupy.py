"""As much of cupy, its NCCL and the GPU engine as the benchmark on GPUs touches, for machines
without a GPU: "device memory" is host memory, and a stream has a clock of its own that calls move.

    install(monkeypatch, gpus=2)

A call of ours takes CALL_NS of the stream it is put on, one of NCCL's NCCL_NS; a graph as long as
the calls that were captured took. Names and order of arguments are those of cupy's documentation.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import types
from typing import Any, ClassVar

import numpy as np

from collectives import _core, array, calls
from collectives.array import View
from collectives.array import device as device_arrays

CALL_NS = 1000.0
NCCL_NS = 3000.0
NODE_NS = 250.0  # of a graph, beside its calls

_here = threading.local()


def current() -> Stream:
    return _here.stream


class Stream:
    count = 0

    def __init__(self, non_blocking: bool = False) -> None:
        assert non_blocking, "ranks that share a GPU need streams that wait for nothing"
        Stream.count += 1
        self.ptr = 0x1000 + Stream.count
        self.device_id = _here.device
        self.ns = 0.0
        self.captured: float | None = None
        self._before: list[Any] = []

    def __enter__(self) -> Stream:
        self._before.append(getattr(_here, "stream", None))
        _here.stream = self
        return self

    def __exit__(self, *_: object) -> None:
        _here.stream = self._before.pop()

    def advance(self, ns: float) -> None:
        if self.captured is None:
            self.ns += ns
        else:
            self.captured += ns

    def synchronize(self) -> None:
        assert self.captured is None, "a stream that captures cannot be waited for"

    def begin_capture(self, mode: Any = None) -> None:
        self.captured = 0.0

    def end_capture(self) -> Graph:
        assert self.captured is not None
        graph, self.captured = Graph(self.captured + NODE_NS), None
        return graph


class Graph:
    launches = 0

    def __init__(self, ns: float) -> None:
        self.ns = ns

    def launch(self, stream: Stream) -> None:
        Graph.launches += 1
        stream.advance(self.ns)


class Event:
    ns: float | None = None

    def record(self, stream: Stream) -> None:
        self.ns = stream.ns

    def synchronize(self) -> None:
        assert self.ns is not None


class RawKernel:
    """Does nothing, as its source."""

    def __init__(self, source: str, name: str) -> None:
        assert f"{name}() {{}}" in source

    def __call__(self, grid: tuple[int], block: tuple[int], arguments: tuple[()]) -> None:
        pass


class Device:
    def __init__(self, ordinal: int) -> None:
        self.id = ordinal

    def use(self) -> None:
        _here.device = self.id


class Allocation:
    def __init__(self, nbytes: int) -> None:
        self.memory = np.zeros(nbytes, np.uint8)
        self.ptr = self.memory.ctypes.data


class UnownedMemory:
    def __init__(self, ptr: int, size: int, owner: Any, device_id: int = -1) -> None:
        self.ptr, self.size, self.owner, self.device_id = ptr, size, owner, device_id


class MemoryPointer:
    def __init__(self, mem: UnownedMemory, offset: int) -> None:
        self.mem, self.ptr, self.device_id = mem, mem.ptr + offset, mem.device_id


class ndarray:
    def __init__(self, shape: tuple[int, ...], dtype: Any, memptr: MemoryPointer) -> None:
        self.dtype, self.data = np.dtype(dtype), memptr
        assert self.dtype.type.__module__ == "numpy", f"cupy has no {dtype}"
        self.device, self.shape = Device(memptr.mem.device_id), shape
        self.size = int(np.prod(shape))
        # Looked at through the interface, then, and so by what `install` puts in place of that.
        self.flags = types.SimpleNamespace(c_contiguous=False)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.data.ptr, False),
            "stream": current().ptr,
        }


class Runtime:
    def __init__(self, gpus: int) -> None:
        self.gpus = gpus

    def getDeviceCount(self) -> int:
        return self.gpus

    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:
        assert kind in (1, 2) and stream > 0x1000
        ctypes.memmove(dst, src, size)

    def memsetAsync(self, ptr: int, value: int, size: int, stream: int) -> None:
        assert stream > 0x1000
        ctypes.memset(ptr, value, size)

    def driverGetVersion(self) -> int:
        return 13000

    def runtimeGetVersion(self) -> int:
        return 12090

    def deviceGetPCIBusId(self, ordinal: int) -> str:
        return f"0000:{0x18 + ordinal:02X}:00.0"

    def getDeviceProperties(self, ordinal: int) -> dict[str, Any]:
        return {
            "name": b"Fake H100",
            "totalGlobalMem": 80 << 30,
            "multiProcessorCount": 132,
            "major": 9,
            "minor": 0,
        }

    def deviceCanAccessPeer(self, a: int, b: int) -> int:
        return int({a, b} != {0, 2})


# ---- NCCL ----------------------------------------------------------------------------------------


class _World:
    """The ranks, which are threads, of one NCCL communicator."""

    def __init__(self, n: int) -> None:
        self.meet = threading.Barrier(n)
        self.given: dict[int, Any] = {}


def _at(pointer: int, count: int, dtype: int) -> np.ndarray[Any, Any]:
    name = {v: k for k, v in Nccl.numbers.items()}[dtype]
    return array.from_pointer(pointer, (count,), name, owner=None)


class NcclCommunicator:
    worlds: ClassVar[dict[Any, _World]] = {}
    lock = threading.Lock()
    destroyed = 0
    wrong = False  # makes all_reduce wrong, for the test of that

    @staticmethod
    def initAll(devices: list[int]) -> list[NcclCommunicator]:
        assert len(set(devices)) == len(devices)
        return [NcclCommunicator(len(devices), Nccl.unique, r) for r in range(len(devices))]

    def __init__(self, ndev: int, comm_id: Any, rank: int) -> None:
        assert comm_id == Nccl.unique, "every rank needs the id of rank 0, of the type it has there"
        with self.lock:
            self._world = self.worlds.setdefault(comm_id, _World(ndev))
        self._rank, self._n = rank, ndev
        self.queue: list[tuple[str, int, int, int, int]] = []

    def _everybody(self, mine: Any) -> list[Any]:
        world = self._world
        world.given[self._rank] = mine
        world.meet.wait(30)
        found = [world.given[r] for r in range(self._n)]
        world.meet.wait(30)
        if not Nccl.grouping():
            current().advance(NCCL_NS)
        return found

    def allReduce(self, send: int, recv: int, count: int, dtype: int, op: int, stream: int) -> None:
        found = self._everybody(_at(send, count, dtype).copy())
        _at(recv, count, dtype)[:] = Nccl.combine(op, found)
        if self.wrong:
            _at(recv, count, dtype)[-1:] += 1

    def reduceScatter(
        self, send: int, recv: int, count: int, dtype: int, op: int, stream: int
    ) -> None:
        found = self._everybody(_at(send, count * self._n, dtype).copy())
        total = Nccl.combine(op, found)
        _at(recv, count, dtype)[:] = total[self._rank * count : (self._rank + 1) * count]

    def allGather(self, send: int, recv: int, count: int, dtype: int, stream: int) -> None:
        found = self._everybody(_at(send, count, dtype).copy())
        _at(recv, count * self._n, dtype)[:] = np.concatenate(found)

    def reduce(
        self, send: int, recv: int, count: int, dtype: int, op: int, root: int, stream: int
    ) -> None:
        found = self._everybody(_at(send, count, dtype).copy())
        if self._rank == root:
            _at(recv, count, dtype)[:] = Nccl.combine(op, found)

    def broadcast(
        self, send: int, recv: int, count: int, dtype: int, root: int, stream: int
    ) -> None:
        found = self._everybody(_at(send, count, dtype).copy())
        _at(recv, count, dtype)[:] = found[root]

    def send(self, send: int, count: int, dtype: int, peer: int, stream: int) -> None:
        Nccl.group().append((self, "send", send, count, dtype, peer))

    def recv(self, recv: int, count: int, dtype: int, peer: int, stream: int) -> None:
        Nccl.group().append((self, "recv", recv, count, dtype, peer))

    def exchange(self, calls: list[Any]) -> None:
        sent = [
            (peer, _at(pointer, count, dtype).copy())
            for _, what, pointer, count, dtype, peer in calls
            if what == "send"
        ]
        found = self._everybody(sent)
        for _, what, pointer, count, dtype, peer in calls:
            if what == "recv":
                mine = [data for to, data in found[peer] if to == self._rank]
                assert len(mine) == 1, "a receive without its send"
                _at(pointer, count, dtype)[:] = mine[0]

    def destroy(self) -> None:
        NcclCommunicator.destroyed += 1


class Nccl(types.ModuleType):
    """cupy.cuda.nccl."""

    available = True
    unique: Any = tuple(range(-64, 64))
    numbers: ClassVar = {"int8": 0, "uint8": 1, "int32": 2, "int64": 4, "float32": 7, "float64": 8}
    NCCL_INT8, NCCL_UINT8, NCCL_INT32, NCCL_INT64, NCCL_FLOAT32, NCCL_FLOAT64 = 0, 1, 2, 4, 7, 8
    NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN = 0, 1, 2, 3
    NcclCommunicator = NcclCommunicator

    @staticmethod
    def combine(op: int, found: list[Any]) -> Any:
        step = (np.add, np.multiply, np.maximum, np.minimum)[op]
        total = found[0].copy()
        for other in found[1:]:
            total = step(total, other)
        return total

    @classmethod
    def get_unique_id(cls) -> Any:
        return cls.unique

    @staticmethod
    def get_version() -> int:
        return 22809

    @staticmethod
    def grouping() -> bool:
        return getattr(_here, "group", None) is not None

    @staticmethod
    def group() -> list[Any]:
        return _here.group

    @staticmethod
    def groupStart() -> None:
        _here.group = []

    @staticmethod
    def groupEnd() -> None:
        # Every rank of this fake has a call in every group, so all of them meet here.
        queued, _here.group = _here.group, None
        queued[0][0].exchange(queued)


# ---- the engine ----------------------------------------------------------------------------------


class _Core:
    def close(self) -> None:
        pass

    def abort(self, reason: str, kind: str = "aborted", about: int = -1) -> None:
        pass

    def known_calls(self, *of: Any) -> tuple[Any, Any, Any]:
        """None is known, and none is learnt."""
        return (lambda *call: None), (lambda *how: None), (lambda: 0)


class Engine:
    """Stands for `DeviceEngine`. Arrays are seen as host arrays, so only barriers come here."""

    bounds: ClassVar[list[int]] = []

    def __init__(
        self,
        bootstrap: Any,
        host: Any,
        nodes: Any,
        device: int,
        max_blocks: int = 0,
        path: str = "auto",
        moved_by_host: bool = False,
    ) -> None:
        self.device, self.core, self._bootstrap = device, _Core(), bootstrap
        self.host = host
        self.place = f"cuda:{device}"
        self.path, self.bound = "peer", max_blocks
        self.bounds.append(max_blocks)

    def run(self, arguments: Any, algorithm: str, stream: int, *more: Any) -> None:
        assert stream == current().ptr
        self._bootstrap.barrier()
        current().advance(CALL_NS)

    def wait(self, timeout: float | None) -> bool:
        return True

    def close(self) -> None:
        pass


def _cuda_view(x: Any, writable: bool, what: str, gpu: bool, device: str) -> View:
    interface = x.__cuda_array_interface__
    dtype = array.dtype_name(x.dtype)
    shape = tuple(interface["shape"])
    assert interface["stream"] == current().ptr
    if writable:
        current().advance(CALL_NS)
    return View(interface["data"][0], int(np.prod(shape)), dtype, shape, False, "cuda", x)


def install(monkeypatch: Any, gpus: int = 2) -> Any:
    """Puts all of it in place, for `gpus` GPUs; returns the module `cupy`."""
    cuda: Any = types.ModuleType("cupy.cuda")
    cupy: Any = types.ModuleType("cupy")
    nccl = Nccl("cupy.cuda.nccl")
    NcclCommunicator.worlds.clear()
    NcclCommunicator.destroyed = 0
    Engine.bounds.clear()
    Graph.launches = 0
    for each in (Stream, Event, Device, UnownedMemory, MemoryPointer):
        setattr(cuda, each.__name__, each)
    cuda.get_current_stream = current
    cuda.alloc = Allocation
    cuda.runtime = Runtime(gpus)
    cuda.nccl = nccl
    cuda.get_elapsed_time = lambda a, b: (b.ns - a.ns) / 1e6
    cupy.RawKernel = RawKernel
    cupy.cuda, cupy.ndarray = cuda, ndarray
    for module in (cupy, cuda, nccl):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(_core, "device_count", lambda: (gpus, "" if gpus else "no GPU was found"))
    monkeypatch.setattr(device_arrays, "cuda_view", _cuda_view)
    monkeypatch.setattr(calls, "DeviceEngine", Engine)
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING", "NCCL_NVLS_ENABLE"):
        monkeypatch.setenv(name, "")  # so that what the commands set is taken back
        monkeypatch.delenv(name)
    return cupy
