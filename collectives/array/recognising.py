"""Which kind an object is of. What is known of a library loads with its first array."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ..errors import ArrayTypeError
from .host import Buffer, Masked, Numpy, Scalar
from .kind import Kind

KINDS: dict[type, Kind] = {np.ndarray: Numpy(), bytes: Buffer(), bytearray: Buffer()}


def recognise(x: Any, what: str) -> Kind:
    """The kind of an object whose type was not seen before; remembers it for the next time."""
    kind = _kind_of(x, what)
    KINDS[type(x)] = kind
    return kind


def _kind_of(x: Any, what: str) -> Kind:
    if isinstance(x, np.ndarray):
        masked = sys.modules.get("numpy.ma")
        return Masked() if masked is not None and isinstance(x, masked.MaskedArray) else Numpy()
    if isinstance(x, np.generic):
        return Scalar()
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        from .torch_tensors import Torch, TorchWrapper

        wraps = hasattr(type(x), "__tensor_flatten__") or hasattr(type(x), "to_local")
        return TorchWrapper() if wraps else Torch(torch)
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(x, jax.Array):
        from .jax_arrays import Jax

        return Jax(jax)
    if hasattr(x, "__cuda_array_interface__"):
        from .device import Cuda, Cupy

        cupy = sys.modules.get("cupy")
        return Cupy(cupy) if cupy is not None and type(x) is cupy.ndarray else Cuda()
    try:
        memoryview(x)
    except TypeError:
        pass
    else:
        return Buffer()
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        from .dlpack import Dlpack

        return Dlpack()
    name = type(x).__name__
    if isinstance(x, (bool, int, float, complex)):
        fix = f"pass a numpy array of a chosen dtype, e.g. numpy.array({x!r}, 'float32')"
    elif isinstance(x, (list, tuple)):
        fix = "pass numpy.array(x); the result could not be put back into a list"
    else:
        fix = "pass an array of numpy, torch or jax, or anything with a buffer or __dlpack__"
    raise ArrayTypeError(f"{what}: a {name} is not an array; {fix}")
