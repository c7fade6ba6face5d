"""Device arrays with the CUDA array interface, such as those of cupy."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from .. import _core
from ..errors import ArrayTypeError, UnsupportedError
from .dtypes import NUMPY_DTYPES, name_of_numpy
from .kind import Kind
from .streams import LEGACY_STREAM
from .views import View, is_c_contiguous, no_gpu_error, readonly_error, strides_error


class Cuda(Kind):
    name = "cuda"

    def view(self, x: Any, writable: bool, what: str, gpu: bool) -> View:
        ordinal = getattr(getattr(x, "device", None), "id", None)
        if ordinal is None and gpu:
            interface = x.__cuda_array_interface__
            pointer = interface["data"][0]
            # An array without elements may be anywhere.
            ordinal = _core.gpu_of(pointer if 0 not in interface["shape"] else 0)
            if ordinal < 0:
                raise ArrayTypeError(
                    f"{what}: no GPU has memory at {pointer:#x}, where a {type(x).__name__} has "
                    "its elements"
                )
        return cuda_view(x, writable, what, gpu, "cuda" if ordinal is None else f"cuda:{ordinal}")

    def new_like(self, x: Any, shape: tuple[int, ...]) -> Any:
        if type(x).__module__.partition(".")[0] == "cupy":
            cupy = sys.modules["cupy"]
            with x.device:
                return cupy.empty(shape, x.dtype)
        raise UnsupportedError(f"cannot make a device array like a {type(x).__name__}; pass out=")


class Cupy(Cuda):
    """cupy's own arrays, read without the interface, which takes them 2 µs to make."""

    plain = True

    def __init__(self, cupy: Any) -> None:
        self._current_stream = cupy.cuda.get_current_stream

    def stream(self) -> int:
        """cupy's current stream, as an integer."""
        return self._current_stream().ptr or LEGACY_STREAM

    def current_stream(self, ordinal: int) -> int:
        return self.stream()

    def view(self, x: Any, writable: bool, what: str, gpu: bool) -> View:
        if not gpu or not x.flags.c_contiguous:
            return super().view(x, writable, what, gpu)  # says why not
        dtype, data = x.dtype, x.data
        return View(
            data.ptr,
            x.size,
            NUMPY_DTYPES.get(dtype) or name_of_numpy(dtype, what),
            x.shape,
            False,
            "cuda",
            x,
            f"cuda:{data.device_id}",
            self.stream(),
        )


def cuda_view(x: Any, writable: bool, what: str, gpu: bool, device: str) -> View:
    """Reads the CUDA array interface, version 3, which says everything but the device."""
    if not gpu:
        raise no_gpu_error(what, device)
    interface = getattr(x, "__cuda_array_interface__", None)  # asked once: cupy makes it each time
    if interface is None:
        raise ArrayTypeError(
            f"{what}: a {type(x).__name__} on {device} has no __cuda_array_interface__"
        )
    element = getattr(x, "dtype", None)
    if not isinstance(element, np.dtype):
        element = np.dtype(interface["typestr"])
    dtype = name_of_numpy(element, what)
    shape = tuple(interface["shape"])
    pointer, readonly = interface["data"]
    strides = interface.get("strides")
    if strides is not None and not is_c_contiguous(shape, strides, element.itemsize):
        raise strides_error(
            what, strides, shape, "a contiguous copy, e.g. cupy.ascontiguousarray(x)"
        )
    if readonly and writable:
        raise readonly_error(what, "pass a copy, or out= another array")
    stream = interface.get("stream")
    return View(
        pointer, math.prod(shape), dtype, shape, readonly, "cuda", x, device, int(stream or 0)
    )
