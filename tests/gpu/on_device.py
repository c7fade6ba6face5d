"""Runs the cases of tests/cases.py on device arrays: a communicator that takes host arrays, copies
them to the GPU with all that lies around them, calls, and copies everything back.

Guard bytes and addresses modulo 16 survive the way, so what a case checks on the host it checks
here. Between the steps all ranks meet on the host: nothing is allocated, copied or loaded while a
kernel of another rank waits, which on a shared GPU could wait for that kernel.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy
import numpy as np

import collectives as cc
from collectives import _core

Array = np.ndarray[Any, Any]
# Is this the emulated runtime?
EMULATED = Path(_core.__file__).with_name("libemulated_cuda.so").exists()
_ROOM = 24 << 20
_H2D, _D2H = 1, 2


def some(cases: list[Any]) -> list[Any]:
    """All cases on a GPU; as many as EMULATED_THIN leaves on a CPU (tests/emulated), and where
    processes share a GPU.
    """
    return cases[:: int(os.environ.get("EMULATED_THIN", "1"))]


class DeviceArray:
    """The least that is an array: the CUDA array interface, version 3."""

    def __init__(self, pointer: int, like: Array, stream: int, device: int) -> None:
        self.dtype = like.dtype
        self.device = cupy.cuda.Device(device)
        typestr = like.dtype.str if like.dtype.kind != "V" else f"|V{like.dtype.itemsize}"
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": like.shape,
            "typestr": typestr,
            "data": (pointer, False),
            "strides": None,
            "stream": stream,
        }


def root_of(array: Array) -> Array:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


class OnDevice:
    """`comm`, but arrays go by way of the GPU `device`; in a symmetric buffer, if they shall."""

    def __init__(self, comm: cc.Communicator, device: int = 0, symmetric: bool = False) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.device = device
        cupy.cuda.Device(device).use()
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.symmetric = symmetric
        if symmetric:  # kept, because its memory is
            self.array = comm.empty(2 * _ROOM, "uint8", f"cuda:{device}", kind="cupy")
            self.memory = self.array.data
        else:
            self.memory = cupy.cuda.alloc(2 * _ROOM)
        self.graph = False
        self.meets = True  # on the host, around each call; False where ranks shall not all come

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def method(*arguments: Any, **more: Any) -> Any:
            return self._call(name, list(arguments), more)

        return method

    def meet(self) -> None:
        if self.meets:
            self.comm.barrier()

    def barrier(self, **more: Any) -> None:
        more.pop("algorithm", None)
        self.meet()
        self.comm.barrier(stream=self.stream.ptr, **more)
        self.finish()

    def copy(self, to: int, source: int, nbytes: int, kind: int) -> None:
        if nbytes:
            cupy.cuda.runtime.memcpyAsync(to, source, nbytes, kind, self.stream.ptr)
        self.stream.synchronize()

    def finish(self) -> None:
        self.stream.synchronize()
        self.comm.synchronize()
        self.meet()

    def _call(self, name: str, arguments: list[Any], more: dict[str, Any]) -> Any:
        host = [a for a in (arguments[0], more.get("out")) if isinstance(a, np.ndarray)]
        roots: dict[int, tuple[Array, int]] = {}
        devices: dict[int, DeviceArray] = {}
        for array in host:
            root = root_of(array)
            if id(root) not in roots:
                # Ranks may differ in their addresses, but not in a symmetric buffer.
                modulus = 16 if self.symmetric else 256
                base = self.memory.ptr + len(roots) * _ROOM + root.ctypes.data % modulus
                assert root.nbytes + 256 <= _ROOM
                roots[id(root)] = (root, base)
                self.copy(base, root.ctypes.data, root.nbytes, _H2D)
            root, base = roots[id(root)]
            pointer = base + array.ctypes.data - root.ctypes.data
            devices[id(array)] = DeviceArray(pointer, array, self.stream.ptr, self.device)
        arguments[0] = devices.get(id(arguments[0]))
        back = {id(d): a for a in host for d in [devices[id(a)]]}
        if more.get("out") is not None:
            more["out"] = devices[id(more["out"])]
        self.meet()
        method = getattr(self.comm, name)
        if self.graph:
            got = self._in_graph(lambda: method(*arguments, **more))
        else:
            got = method(*arguments, **more)
        self.finish()
        for root, base in roots.values():
            self.copy(root.ctypes.data, base, root.nbytes, _D2H)
        return None if got is None else back[id(got)]

    def _in_graph(self, call: Callable[[], Any]) -> Any:
        self.stream.begin_capture()
        try:
            got = call()
        finally:
            graph = self.stream.end_capture()
        self.meet()
        graph.launch(self.stream)
        return got


def run_on(
    n: int,
    devices: list[int],
    body: Callable[[OnDevice], Any],
    symmetric: bool = False,
    **more: Any,
) -> list[Any]:
    """body(OnDevice) on n ranks that are threads."""
    # Making streams and memory is not for several threads at once; symmetric memory is for all.
    lock = contextlib.nullcontext() if symmetric else threading.Lock()

    def wrapped(comm: cc.Communicator) -> Any:
        with lock:
            proxy = OnDevice(comm, devices[comm.rank % len(devices)], symmetric)
        comm.barrier()
        return body(proxy)

    return cc.run_threads(n, wrapped, devices=devices, **more)


def filled(comm: OnDevice, count: int, value: float, at: int = 0) -> Any:
    """A cupy array of one value, float32, in the memory of `comm`."""
    memory = cupy.cuda.MemoryPointer(comm.memory.mem, at)
    array = cupy.ndarray((count,), cupy.float32, memory)
    host = np.full(count, value, np.float32)
    comm.copy(array.data.ptr, host.ctypes.data, host.nbytes, _H2D)
    return array


def back(comm: OnDevice, array: Any) -> Array:
    """What is in an array of float32."""
    host = np.empty(array.shape, np.float32)
    comm.copy(host.ctypes.data, array.data.ptr, host.nbytes, _D2H)
    return host
