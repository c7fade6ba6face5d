"""Calls of a rank on arrays on its GPU, by cupy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..bench.cuda import DeviceArray, Gpu
from .verify import Call, Prepared, WrongResult, check, numbers, once

if TYPE_CHECKING:
    from ..communicator import Communicator

_TO_DEVICE, _TO_HOST, _ON_DEVICE = 1, 2, 3  # cudaMemcpyKind
_NOTHING = 0xA5  # in every byte of a result before the call
_TRIED = 1 << 20  # bytes


class OnGpu:
    """Arrays on GPU `rank` modulo their number. Making one starts CUDA in this process."""

    def __init__(self, rank: int) -> None:
        import cupy

        self.gpu = Gpu(cupy, rank % int(cupy.cuda.runtime.getDeviceCount()))

    def prepare(self, comm: Communicator, call: Call) -> Prepared:
        if "graph" in call.way:  # which cannot be captured before the engine is set up
            once(self, comm, Call("all_reduce", 1, "float32"), "the first call")
        return _OnGpu(self.gpu, comm, call)

    def check_usable(self) -> None:
        """Writes, copies and reads memory of the GPU, with none of the communicators."""
        gpu = self.gpu
        before = np.arange(_TRIED // 8)
        after = np.zeros_like(before)
        one, other = gpu.allocate(_TRIED), gpu.allocate(_TRIED)
        gpu.set(other.pointer, _NOTHING, _TRIED)
        gpu.copy(one.pointer, before.ctypes.data, _TRIED, _TO_DEVICE)
        gpu.copy(other.pointer, one.pointer, _TRIED, _ON_DEVICE)
        gpu.copy(after.ctypes.data, other.pointer, _TRIED, _TO_HOST)
        if not np.array_equal(before, after):
            raise WrongResult("this rank's GPU does not keep what is copied to it")


class _OnGpu:
    """A call with its arrays. What it passes is put there anew each time, and the result wiped."""

    def __init__(self, gpu: Gpu, comm: Communicator, call: Call) -> None:
        self._gpu, self._comm, self._call = gpu, comm, call
        x, self._expected = numbers(call, comm.rank, comm.size)
        self._nbytes = x.nbytes
        self._source = gpu.allocate(max(1, x.nbytes))
        gpu.copy(self._source.pointer, x.ctypes.data, x.nbytes, _TO_DEVICE)
        most = max(1, call.elements, call.room) * x.itemsize
        self._x = self._array(len(x), most)
        self._out: Any = None
        if call.collective != "broadcast" and self._expected is not None:
            self._out = self._array(len(self._expected), most * comm.size)
        elif call.collective == "reduce" and "symmetric" in call.way:
            self._array(0, most * comm.size)  # the root's is made by all
        self._work: Any = None
        self._launch = self._make
        if "graph" in call.way:
            self._launch = gpu.capture(self._make, 1)

    def _array(self, count: int, most: int) -> tuple[Any, DeviceArray]:
        """`count` elements of `most` bytes: as what calls take, and as memory."""
        gpu, dtype = self._gpu, np.dtype(self._call.dtype)
        if "symmetric" in self._call.way:
            whole = self._comm.empty((most,), "uint8", f"cuda:{gpu.ordinal}", kind="cupy")
            memory = DeviceArray(gpu, whole.data.ptr, most, np.uint8, whole)
        else:
            memory = gpu.allocate(most)
        part = memory.view(dtype)[:count]
        return gpu.array(part), part

    def _make(self) -> None:
        call, comm = self._call, self._comm
        out = {"out": self._out[0]} if self._out is not None else {}
        self._work = getattr(comm, call.collective)(self._x[0], **out, **call.options(comm.size))

    def start(self) -> None:
        runtime, stream = self._gpu.cupy.cuda.runtime, self._gpu.stream
        with stream:
            if self._nbytes:
                runtime.memcpyAsync(
                    self._x[1].pointer, self._source.pointer, self._nbytes, _ON_DEVICE, stream.ptr
                )
            if self._out is not None and self._out[1].nbytes:
                memory = self._out[1]
                runtime.memsetAsync(memory.pointer, _NOTHING, memory.nbytes, stream.ptr)
            self._launch()

    def finish(self, what: str) -> None:
        call = self._call
        if "graph" in call.way:  # of whose launch the communicator knows nothing
            self._gpu.stream.synchronize()
        elif call.async_op:
            self._work.wait()
        self._comm.synchronize()
        if self._expected is None:
            return
        memory = (self._x if call.collective == "broadcast" else self._out)[1]
        got = np.empty(len(memory), memory.dtype)
        self._gpu.copy(got.ctypes.data, memory.pointer, got.nbytes, _TO_HOST)
        check(got, self._expected, what)
