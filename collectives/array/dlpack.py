"""Arrays of any other library, through DLPack.

The structures are those of https://dmlc.github.io/dlpack/latest/c_api.html. numpy.from_dlpack would
do, but for bfloat16 and float8.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

from ..errors import ArrayTypeError, UnsupportedError
from .device import cuda_view
from .dtypes import ITEM_SIZES
from .kind import Kind
from .memory import capsule_pointer
from .views import View, is_c_contiguous, readonly_error, strides_error


class _DLDevice(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _DLDataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    )


_DL_READONLY = 1  # bit of _DLVersioned.flags
_DL_HOST = (1, 3, 11)  # host memory; the same, pinned for CUDA or for ROCm
_DL_CUDA = (2, 13)  # device memory; managed memory
_DL_DTYPES = {
    **{(0, bits): f"int{bits}" for bits in (8, 16, 32, 64)},
    **{(1, bits): f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{(2, bits): f"float{bits}" for bits in (16, 32, 64)},
    **{(5, bits): f"complex{bits}" for bits in (64, 128)},
    (4, 16): "bfloat16",
    (6, 8): "bool",
    (10, 8): "float8_e4m3",
    (12, 8): "float8_e5m2",
}
_capsule_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_capsule_is_valid.restype = ctypes.c_int
_capsule_is_valid.argtypes = [ctypes.py_object, ctypes.c_char_p]


class Dlpack(Kind):
    name = "dlpack"

    def view(self, x: Any, writable: bool, what: str, gpu: bool) -> View:
        device, ordinal = x.__dlpack_device__()
        if device in _DL_CUDA:
            return cuda_view(x, writable, what, gpu, f"cuda:{ordinal}")
        if device not in _DL_HOST:
            raise UnsupportedError(
                f"{what}: the array is on DLPack device {int(device)}; pass a copy on the host"
            )
        try:
            capsule = x.__dlpack__(max_version=(1, 0))
        except TypeError:  # an exporter from before DLPack 1.0
            capsule = x.__dlpack__()
        # The capsule is not consumed: it frees the tensor when the view, its only holder, goes.
        tensor, readonly = self._tensor(capsule, what)
        code, bits, lanes = tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes
        dtype = _DL_DTYPES.get((code, bits))
        if dtype is None or lanes != 1:
            raise ArrayTypeError(
                f"{what}: DLPack dtype (code {code}, {bits} bits, {lanes} lanes) is not supported; "
                f"supported: {', '.join(ITEM_SIZES)}"
            )
        size = ITEM_SIZES[dtype]
        shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
        if tensor.strides:
            strides = [tensor.strides[i] * size for i in range(tensor.ndim)]
            if not is_c_contiguous(shape, strides, size):
                raise strides_error(what, strides, shape, "a contiguous copy")
        if readonly and writable:
            raise readonly_error(what, "pass a copy, or out= another array")
        pointer = (tensor.data or 0) + tensor.byte_offset
        return View(pointer, math.prod(shape), dtype, shape, readonly, "dlpack", (x, capsule))

    @staticmethod
    def _tensor(capsule: object, what: str) -> tuple[_DLTensor, bool]:
        if _capsule_is_valid(capsule, b"dltensor_versioned"):
            versioned = _DLVersioned.from_address(capsule_pointer(capsule, b"dltensor_versioned"))
            if versioned.major != 1:
                raise UnsupportedError(
                    f"{what}: DLPack version {versioned.major} is not supported, only 1"
                )
            return versioned.tensor, bool(versioned.flags & _DL_READONLY)
        if _capsule_is_valid(capsule, b"dltensor"):
            return _DLTensor.from_address(capsule_pointer(capsule, b"dltensor")), False
        raise ArrayTypeError(f"{what}: __dlpack__ returned no DLPack tensor")
