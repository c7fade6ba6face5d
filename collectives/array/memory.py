"""Host memory and numpy: where an array lies, and arrays on memory that others allocated."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import ArrayTypeError, UnsupportedError, did_you_mean
from .dtypes import numpy_dtype, torch_dtype

_ALIGNMENT = 64  # bytes; jax takes a host buffer without a copy only when aligned to this

# PyArrayInterface, which `__array_struct__` points to, holds the data pointer at this offset. This
# way takes 0.4 µs; `x.ctypes.data` and `x.__array_interface__` take 0.9.
_DATA_OFFSET = 2 * ctypes.sizeof(ctypes.c_int) * 2 + 8 + 2 * ctypes.sizeof(ctypes.c_void_p)
capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
capsule_pointer.restype = ctypes.c_void_p
capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_pointer_at = ctypes.c_void_p.from_address


def address(x: np.ndarray[Any, Any]) -> int:
    capsule: Any = x.__array_struct__
    return _pointer_at(capsule_pointer(capsule, None) + _DATA_OFFSET).value or 0


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
    skip = -address(raw) % _ALIGNMENT
    return raw[skip : skip + nbytes].view(dtype).reshape(shape)


class _Memory:
    """Memory as numpy takes it; the array keeps this object, and this object its owner."""

    def __init__(self, pointer: int, nbytes: int, owner: object) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
        }


def from_pointer(
    pointer: int, shape: Sequence[int], dtype: str, *, owner: object, kind: str = "numpy"
) -> Any:
    """A writable host array on memory that someone else allocated: no copy, and `owner` lives as
    long as it does.

    pointer  address of the first element
    shape    lengths of the dimensions
    dtype    one of `ITEM_SIZES`
    kind     "numpy" or "torch" (which the user must have imported)
    """
    shape = tuple(int(n) for n in shape)
    element = numpy_dtype(dtype)
    count = math.prod(shape)
    if count == 0:
        array = np.empty(shape, element)
    else:
        raw = np.asarray(_Memory(pointer, count * element.itemsize, owner))
        array = raw.view(element).reshape(shape)
    if kind == "numpy":
        return array
    if kind != "torch":
        raise ArrayTypeError(
            f"unknown kind of array {kind!r}; {did_you_mean(kind, ['numpy', 'torch'])}"
        )
    torch = sys.modules.get("torch")
    if torch is None:
        raise UnsupportedError(
            "a torch tensor was asked for, but torch is not imported: import torch first"
        )
    tensor = torch.from_numpy(array.reshape(-1).view(np.uint8))
    return tensor.view(torch_dtype(torch, dtype)).reshape(shape)
