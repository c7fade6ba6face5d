"""As much of cupy as the tests of the GPU engine use, on the emulated CUDA runtime."""

from __future__ import annotations

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
        self.strides = strides
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
            "strides": self.strides,
            "stream": stream or 1,
        }

    def set(self, array: np.ndarray[Any, Any]) -> None:
        held = np.ascontiguousarray(array, self.dtype)
        cuda.runtime.memcpy(self.data.ptr, held.ctypes.data, held.nbytes, 1)

    def get(self) -> np.ndarray[Any, Any]:
        array = np.empty(self.shape, self.dtype)
        cuda.runtime.memcpy(array.ctypes.data, self.data.ptr, array.nbytes, 2)
        return array

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
