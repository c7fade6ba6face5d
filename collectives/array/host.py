"""Kinds that numpy itself understands: its arrays and scalars, and buffers."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import ArrayTypeError
from .dtypes import ITEM_SIZES, NUMPY_DTYPES, name_of_numpy
from .kind import Kind
from .memory import address
from .views import View, readonly_error, strides_error


class Numpy(Kind):
    name = "numpy"

    def view(self, x: Any, writable: bool, what: str, gpu: bool) -> View:
        dtype = NUMPY_DTYPES.get(x.dtype) or name_of_numpy(x.dtype, what)
        flags = x.flags
        if not flags.c_contiguous:
            raise strides_error(what, x.strides, x.shape, "numpy.ascontiguousarray(x)")
        readonly = not flags.writeable
        if readonly and writable:
            raise readonly_error(what, "pass x.copy(), or out= another array")
        return View(address(x), x.size, dtype, x.shape, readonly, "numpy", x)

    def new_like(self, x: Any, shape: tuple[int, ...]) -> Any:
        name_of_numpy(x.dtype, "array")
        return np.empty(shape, x.dtype)


class Masked(Kind):
    name = "masked"

    def view(self, x: Any, writable: bool, what: str, gpu: bool) -> View:
        raise ArrayTypeError(
            f"{what}: a masked array would be combined without its mask; pass x.filled(value) or "
            "x.data"
        )


class Scalar(Kind):
    """numpy scalars: a 0-d array as input, a new scalar as result."""

    name = "scalar"

    def view(self, x: Any, writable: bool, what: str, gpu: bool) -> View:
        if writable:
            raise readonly_error(what, "a numpy scalar is immutable: pass numpy.array(x)")
        array = np.asarray(x)
        dtype = name_of_numpy(array.dtype, what)
        return View(address(array), 1, dtype, (), True, "scalar", array)

    def immutable(self, x: Any) -> bool:
        return True

    def finish(self, x: Any, buffer: Any) -> Any:
        return buffer[()] if buffer.ndim == 0 else buffer


class Buffer(Kind):
    """Objects with the buffer protocol. While a view lives, Python refuses to resize them."""

    name = "buffer"

    def view(self, x: Any, writable: bool, what: str, gpu: bool) -> View:
        raw = memoryview(x)
        if not raw.c_contiguous:
            strides, shape = raw.strides or (), raw.shape or ()
            raise strides_error(what, strides, shape, "bytearray(x) or numpy.ascontiguousarray(x)")
        if raw.readonly and writable:
            raise readonly_error(
                what, f"a {type(x).__name__} of this sort cannot be written: pass a bytearray"
            )
        try:
            array = np.asarray(raw)
        except (ValueError, NotImplementedError):
            raise ArrayTypeError(
                f"{what}: elements of format {raw.format!r} are not supported; supported: "
                f"{', '.join(ITEM_SIZES)}"
            ) from None
        dtype = name_of_numpy(array.dtype, what)
        return View(address(array), array.size, dtype, array.shape, raw.readonly, "buffer", array)

    def immutable(self, x: Any) -> bool:
        return isinstance(x, bytes)

    def finish(self, x: Any, buffer: Any) -> Any:
        return buffer.tobytes() if isinstance(x, bytes) and buffer.ndim == 1 else buffer
