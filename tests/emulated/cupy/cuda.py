"""cupy.cuda: devices, memory, streams and graphs of the emulated runtime."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from typing import Any

from collectives import _core

_cuda = ctypes.CDLL(str(Path(_core.__file__).with_name("libemulated_cuda.so")))
_here = threading.local()
_MEMORY = 1 << 30  # bytes of a GPU


def _check(error: int) -> None:
    if error:
        raise RuntimeError(f"the emulated CUDA runtime returned error {error}")


def _pointer(value: int | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(value or 0)


class Device:
    def __init__(self, device: int | None = None) -> None:
        if device is None:
            now = ctypes.c_int()
            _check(_cuda.cudaGetDevice(ctypes.byref(now)))
            device = now.value
        self.id = device
        self._before: list[int] = []

    def use(self) -> None:
        _check(_cuda.cudaSetDevice(self.id))

    def synchronize(self) -> None:
        with self:
            _check(_cuda.cudaDeviceSynchronize())

    def __enter__(self) -> Device:
        self._before.append(Device().id)
        self.use()
        return self

    def __exit__(self, *_: object) -> None:
        Device(self._before.pop()).use()

    def __repr__(self) -> str:
        return f"<CUDA Device {self.id}>"


# What is free again, as cupy keeps it, by pool, device, stream and size. Nothing is given back:
# that waits for the device, and Python's collector does it in whatever thread it runs in, such as a
# rank's for which the kernels on the device wait.
_FREE: dict[tuple[bool, int, int, int], list[int]] = {}


class Memory:
    def __init__(self, size: int, pool: bool = False) -> None:
        self.size = size
        self.device = Device()
        stream = get_current_stream().ptr  # which orders its uses, as in cupy
        self._kept = _FREE.setdefault((pool, self.device.id, stream, size), [])
        try:
            self.ptr = self._kept.pop()
        except IndexError:
            self.ptr = self._allocate(pool)

    def _allocate(self, pool: bool) -> int:
        at, size = ctypes.c_void_p(), ctypes.c_size_t(self.size)
        if pool:
            _check(_cuda.cudaMallocAsync(ctypes.byref(at), size, None))
        else:
            _check(_cuda.cudaMalloc(ctypes.byref(at), size))
        return at.value or 0

    def __del__(self) -> None:
        if hasattr(self, "ptr"):
            self._kept.append(self.ptr)


class UnownedMemory:
    def __init__(self, ptr: int, size: int, owner: Any, device_id: int = -1) -> None:
        self.ptr, self.size, self.owner = ptr, size, owner
        self.device = Device(device_id if device_id >= 0 else None)


class MemoryPointer:
    def __init__(self, mem: Memory | UnownedMemory, offset: int) -> None:
        self.mem, self.offset = mem, offset
        self.ptr = mem.ptr + offset
        self.device = mem.device
        self.device_id = mem.device.id


def alloc(size: int) -> MemoryPointer:
    return MemoryPointer(Memory(size), 0)


def malloc_async(size: int) -> MemoryPointer:
    return MemoryPointer(Memory(size, pool=True), 0)


class Event:
    def __init__(self) -> None:
        self.ptr = ctypes.c_void_p()
        _check(_cuda.cudaEventCreateWithFlags(ctypes.byref(self.ptr), 0))

    def record(self, stream: Stream) -> None:
        _check(_cuda.cudaEventRecord(self.ptr, _pointer(stream.ptr)))

    def synchronize(self) -> None:
        _check(_cuda.cudaEventSynchronize(self.ptr))


def get_elapsed_time(begin: Event, end: Event) -> float:
    ms = ctypes.c_float()
    _check(_cuda.cudaEventElapsedTime(ctypes.byref(ms), begin.ptr, end.ptr))
    return ms.value


class Graph:
    def __init__(self, graph: ctypes.c_void_p) -> None:
        self._exec = ctypes.c_void_p()
        _check(_cuda.cudaGraphInstantiate(ctypes.byref(self._exec), graph, ctypes.c_ulonglong(0)))

    def launch(self, stream: Stream | None = None) -> None:
        _check(_cuda.cudaGraphLaunch(self._exec, _pointer((stream or get_current_stream()).ptr)))


class Stream:
    def __init__(self, null: bool = False, non_blocking: bool = False) -> None:
        self.ptr = 0
        self._before: list[Stream] = []
        if not null:
            made = ctypes.c_void_p()
            _check(_cuda.cudaStreamCreateWithFlags(ctypes.byref(made), int(non_blocking)))
            self.ptr = made.value or 0

    def __enter__(self) -> Stream:
        self._before.append(get_current_stream())
        _here.stream = self
        return self

    def __exit__(self, *_: object) -> None:
        _here.stream = self._before.pop()

    @classmethod
    def from_external(cls, other: Any) -> Stream:
        """A stream that somebody else has made."""
        made = cls(null=True)
        made.ptr = other.__cuda_stream__()[1]
        return made

    def synchronize(self) -> None:
        _check(_cuda.cudaStreamSynchronize(_pointer(self.ptr)))

    def begin_capture(self, mode: int | None = None) -> None:
        _check(_cuda.cudaStreamBeginCapture(_pointer(self.ptr), mode or 0))

    def end_capture(self) -> Graph:
        graph = ctypes.c_void_p()
        _check(_cuda.cudaStreamEndCapture(_pointer(self.ptr), ctypes.byref(graph)))
        return Graph(graph)


Stream.null = Stream(null=True)  # type: ignore[attr-defined]


def get_current_stream() -> Stream:
    found: Stream = getattr(_here, "stream", Stream.null)  # type: ignore[attr-defined]
    return found


class runtime:
    @staticmethod
    def malloc(size: int) -> int:
        at = ctypes.c_void_p()
        _check(_cuda.cudaMalloc(ctypes.byref(at), ctypes.c_size_t(size)))
        return at.value or 0

    @staticmethod
    def free(pointer: int) -> None:
        _check(_cuda.cudaFree(_pointer(pointer)))

    @staticmethod
    def memcpyAsync(to: int, source: int, size: int, kind: int, stream: int) -> None:
        _check(
            _cuda.cudaMemcpyAsync(
                _pointer(to), _pointer(source), ctypes.c_size_t(size), kind, _pointer(stream)
            )
        )

    @staticmethod
    def memcpy(to: int, source: int, size: int, kind: int) -> None:
        runtime.memcpyAsync(to, source, size, kind, 0)
        _check(_cuda.cudaStreamSynchronize(None))

    @staticmethod
    def memsetAsync(to: int, value: int, size: int, stream: int) -> None:
        _check(_cuda.cudaMemsetAsync(_pointer(to), value, ctypes.c_size_t(size), _pointer(stream)))

    @staticmethod
    def getDeviceCount() -> int:
        count = ctypes.c_int()
        _check(_cuda.cudaGetDeviceCount(ctypes.byref(count)))
        return count.value

    @staticmethod
    def memGetInfo() -> tuple[int, int]:
        """Nothing is counted: all of it is free."""
        return _MEMORY, _MEMORY

    @staticmethod
    def getDeviceProperties(device: int) -> dict[str, Any]:
        return {
            "name": f"emulated GPU {device}".encode(),
            "totalGlobalMem": _MEMORY,
            "multiProcessorCount": 1,
            "major": 9,
            "minor": 0,
        }

    @staticmethod
    def deviceGetPCIBusId(device: int) -> str:
        return f"0000:{device:02x}:00.0"

    @staticmethod
    def deviceCanAccessPeer(device: int, peer: int) -> int:
        can = ctypes.c_int()
        _check(_cuda.cudaDeviceCanAccessPeer(ctypes.byref(can), device, peer))
        return can.value

    @staticmethod
    def driverGetVersion() -> int:
        return 0

    @staticmethod
    def runtimeGetVersion() -> int:
        return 0


class nvtx:
    """Ranges that nobody looks at."""

    @staticmethod
    def RangePush(text: str) -> None:
        assert text

    @staticmethod
    def RangePop() -> None:
        pass
