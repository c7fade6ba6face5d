"""Arithmetic on the host and on GPUs with one text: numpy and cupy under one name.

Code that computes on arrays of any library looks at their memory through `native`, and calls the
functions of `namespace`.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ..errors import UnsupportedError
from .dtypes import numpy_dtype
from .memory import from_pointer
from .recognising import KINDS, recognise


def native(x: Any, what: str = "array") -> Any:
    """The same memory as a numpy array (host) or a cupy array (GPU), without a copy.

    numpy and cupy arrays come back as they are, with any strides. Immutable arrays give one that
    cannot be written. Raises what `view` raises.
    """
    if isinstance(x, np.ndarray):
        return x
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(x, cupy.ndarray):
        return x
    kind = KINDS.get(type(x)) or recognise(x, what)
    v = kind.view(x, False, what, True)
    if v.device == "cpu":
        array = from_pointer(v.pointer, v.shape, v.dtype, owner=(x, v.owner))
        array.flags.writeable = not v.readonly
        return array
    if cupy is None:
        raise UnsupportedError(f"{what}: arithmetic on {v.device} is done by cupy: import cupy")
    memory = cupy.cuda.UnownedMemory(v.pointer, v.nbytes, x, int(v.device.partition(":")[2] or 0))
    pointer = cupy.cuda.MemoryPointer(memory, 0)
    return cupy.ndarray(v.shape, numpy_dtype(v.dtype), pointer)


def namespace(x: Any) -> Any:
    """numpy, or cupy, for an array that `native` gave."""
    return np if isinstance(x, np.ndarray) else sys.modules["cupy"]


def device_name(x: Any) -> str:
    """ "cpu", or "cuda:N", of an array that `native` gave."""
    return "cpu" if isinstance(x, np.ndarray) else f"cuda:{x.device.id}"


def empty(shape: Any, dtype: str, device: str) -> Any:
    """An uninitialised array of numpy (device "cpu") or cupy ("cuda:N")."""
    if device == "cpu":
        return np.empty(shape, numpy_dtype(dtype))
    cupy = sys.modules["cupy"]
    with cupy.cuda.Device(int(device.partition(":")[2])):
        return cupy.empty(shape, numpy_dtype(dtype))


def release(device: str) -> None:
    """Gives the memory of arrays that are gone back to a GPU ("cuda:N"): cupy and torch keep it for
    arrays of their own, cupy for those of the same size. Nothing on the host.
    """
    if device == "cpu":
        return
    cupy = sys.modules["cupy"]
    with cupy.cuda.Device(int(device.partition(":")[2])):
        cupy.get_default_memory_pool().free_all_blocks()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
