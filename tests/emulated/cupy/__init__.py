"""As much of cupy as the tests of the GPU engine use, on the emulated CUDA runtime."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np

from . import cuda

float32 = np.float32


class ndarray:
    """An array in emulated device memory."""

    def __init__(
        self,
        shape: int | tuple[int, ...],
        dtype: Any = float,
        memptr: cuda.MemoryPointer | None = None,
        strides: tuple[int, ...] | None = None,
    ) -> None:
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.dtype = np.dtype(dtype)
        self.size = int(np.prod(self.shape, dtype=np.int64))
        self.nbytes = self.size * self.dtype.itemsize
        self.data = memptr if memptr is not None else cuda.alloc(self.nbytes)
        self.itemsize = self.dtype.itemsize
        following = [self.shape[i + 1 :] for i in range(len(self.shape))]
        self.strides = strides or tuple(math.prod(n) * self.itemsize for n in following)
        self.device = self.data.device
        self.flags = SimpleNamespace(c_contiguous=self.size == 0 or strides is None)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        stream = cuda.get_current_stream().ptr
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.data.ptr, False),
            "strides": None if self.flags.c_contiguous else self.strides,
            "stream": stream or 1,
        }

    def set(self, array: np.ndarray[Any, Any]) -> None:
        held = np.ascontiguousarray(array, self.dtype)
        stream = cuda.get_current_stream()
        cuda.runtime.memcpyAsync(self.data.ptr, held.ctypes.data, held.nbytes, 1, stream.ptr)

    def get(self) -> np.ndarray[Any, Any]:
        array = np.empty(self.shape, self.dtype)
        cuda.runtime.memcpy(array.ctypes.data, self.data.ptr, array.nbytes, 2)
        return array

    def reshape(self, shape: int | tuple[int, ...]) -> ndarray:
        assert self.flags.c_contiguous
        return ndarray(self.size if shape == -1 else shape, self.dtype, self.data)

    def fill(self, value: int) -> None:
        self[...] = value

    def __setitem__(self, key: Any, value: ndarray | int) -> None:
        """Copies on the current stream, or fills with zeros."""
        to = self if key is Ellipsis else self[key]
        stream = cuda.get_current_stream().ptr
        if isinstance(value, ndarray):
            assert value.nbytes == to.nbytes
            cuda.runtime.memcpyAsync(to.data.ptr, value.data.ptr, to.nbytes, 3, stream)
        else:
            assert value == 0
            cuda.runtime.memsetAsync(to.data.ptr, 0, to.nbytes, stream)

    def __getitem__(self, key: slice) -> ndarray:
        begin, end, step = key.indices(self.shape[0])
        size = self.dtype.itemsize
        data = cuda.MemoryPointer(self.data.mem, self.data.offset + begin * size)
        strides = None if step == 1 else (step * size,)
        return ndarray((len(range(begin, end, step)),), self.dtype, data, strides)


class RawKernel:
    """One that does nothing."""

    def __init__(self, source: str, name: str) -> None:
        assert f"{name}() {{}}" in source

    def __call__(self, grid: tuple[int], block: tuple[int], arguments: tuple[()]) -> None:
        pass


def empty(shape: int | tuple[int, ...], dtype: Any = float) -> ndarray:
    return ndarray(shape, dtype)
