"""Arrays of numpy and cupy as torch tensors on the same memory."""

from __future__ import annotations

from typing import Any

import torch

from ..array import dtype_name, from_pointer
from ..array.dtypes import ML_DTYPES


def tensor_of(x: Any) -> torch.Tensor:
    """A tensor on the memory of a C-contiguous array of numpy or cupy."""
    if hasattr(x, "get"):
        return torch.from_dlpack(x)
    name = dtype_name(x.dtype)
    if name in ML_DTYPES:  # numpy's own dtypes are all that from_numpy knows
        tensor: torch.Tensor = from_pointer(x.ctypes.data, x.shape, name, owner=x, kind="torch")
        return tensor
    return torch.from_numpy(x)
