"""Dtypes: the names that all layers share, and what the libraries call them."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ..errors import ArrayTypeError, UnsupportedError, did_you_mean

# Bytes per element of each dtype, under the names that all layers share.
ITEM_SIZES: dict[str, int] = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}

# Our name -> the name in ml_dtypes, for those that numpy itself lacks.
ML_DTYPES = {
    "bfloat16": "bfloat16",
    "float8_e4m3": "float8_e4m3fn",
    "float8_e5m2": "float8_e5m2",
}
# What torch, ml_dtypes and jax call a dtype -> our name. The ml_dtypes name "float8_e4m3" is
# another format (it has infinities), so it is not in here although it looks like one of ours.
_FOREIGN_NAMES = {n: n for n in ITEM_SIZES if n != "float8_e4m3"} | {"float8_e4m3fn": "float8_e4m3"}


def dtype_name(dtype: Any) -> str:
    """Our name of a dtype given as such a name, a numpy, torch, ml_dtypes or jax dtype, or a Python
    type.

    Raises ArrayTypeError for one that no collective works on.
    """
    if isinstance(dtype, str) and dtype in ITEM_SIZES:
        return dtype
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(dtype, torch.dtype):
        return name_of_torch(dtype, "dtype")
    if isinstance(dtype, str) and dtype in _FOREIGN_NAMES:
        return _FOREIGN_NAMES[dtype]
    if dtype is None:
        raise ArrayTypeError(
            "dtype is None; pass a name such as 'float32', or a numpy or torch dtype"
        )
    try:
        known = np.dtype(dtype)
    except TypeError:
        hint = did_you_mean(str(dtype), ITEM_SIZES)
        raise ArrayTypeError(f"unknown dtype {dtype!r}; {hint}") from None
    return name_of_numpy(known, "dtype")


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype of our dtype `name`; imports ml_dtypes for bfloat16 and float8."""
    if name in ML_DTYPES:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, ML_DTYPES[name]))
    if name not in ITEM_SIZES:
        raise ArrayTypeError(f"unknown dtype {name!r}; {did_you_mean(name, ITEM_SIZES)}")
    return np.dtype(name)


NUMPY_DTYPES: dict[np.dtype[Any], str] = {
    np.dtype(name): name for name in ITEM_SIZES if name not in ML_DTYPES
}


def name_of_numpy(dtype: np.dtype[Any], what: str) -> str:
    """Our name of a numpy dtype; remembers it for the next time."""
    known = NUMPY_DTYPES.get(dtype)
    if known is not None:
        return known
    known = _FOREIGN_NAMES.get(dtype.name)
    if known is not None and dtype.isnative and dtype.type.__module__.startswith("ml_dtypes"):
        NUMPY_DTYPES[dtype] = known
        return known
    if not dtype.isnative and dtype.names is None:
        raise ArrayTypeError(
            f"{what}: dtype {dtype.str!r} is not in this machine's byte order; pass "
            f"x.astype(x.dtype.newbyteorder('='))"
        )
    if dtype.names is not None:
        raise ArrayTypeError(
            f"{what}: dtype has fields {dtype.names}; a collective works on one plain dtype: pass "
            "one field, or x.view('u1') to move bytes"
        )
    if dtype.kind in "mM":
        raise ArrayTypeError(f"{what}: dtype {dtype} is a date or a duration; pass x.view('int64')")
    if dtype.kind == "O":
        raise ArrayTypeError(
            f"{what}: dtype object holds Python objects, which live in one process only; pass an "
            "array of numbers"
        )
    if dtype.name == "float8_e4m3":
        raise ArrayTypeError(
            f"{what}: dtype float8_e4m3 of ml_dtypes (with infinities) is not supported; pass "
            "float8_e4m3fn"
        )
    raise ArrayTypeError(
        f"{what}: dtype {dtype} is not supported; supported: {', '.join(ITEM_SIZES)}"
    )


TORCH_DTYPES: dict[Any, str] = {}


def name_of_torch(dtype: Any, what: str) -> str:
    known = _FOREIGN_NAMES.get(str(dtype).removeprefix("torch."))
    if known is None:
        raise ArrayTypeError(
            f"{what}: dtype {dtype} is not supported; supported: {', '.join(ITEM_SIZES)}"
        )
    TORCH_DTYPES[dtype] = known
    return known


def torch_dtype(torch: Any, name: str) -> Any:
    foreign = ML_DTYPES.get(name, name)
    dtype = getattr(torch, foreign, None)
    if dtype is None:
        raise UnsupportedError(f"torch {torch.__version__} has no dtype {foreign}")
    return dtype
