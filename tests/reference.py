"""What every collective gives, computed with numpy alone: no code of the package is used here.

Contributions are combined left to right in rank order. float16, bfloat16 and float8 are widened to
float32, combined there and rounded once; integers wrap; on booleans sum, max and bor mean or; prod,
min and band mean and. min and max give NaN where any operand is NaN, and the first of equal
operands. avg divides the accumulator. premul_sum rounds each product to the dtype, then sums.

Each function takes the arrays of all ranks and returns what every rank gets, None where a rank gets
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]

DTYPES: dict[str, np.dtype[Any]] = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "float8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    **{name: np.dtype(name) for name in ("int8", "int16", "int32", "int64")},
    **{name: np.dtype(name) for name in ("uint8", "uint16", "uint32", "uint64")},
    "bool": np.dtype(np.bool_),
    "complex64": np.dtype(np.complex64),
    "complex128": np.dtype(np.complex128),
}
NARROW = ("float16", "bfloat16", "float8_e4m3", "float8_e5m2")
FLOATS = (*NARROW, "float32", "float64")
COMPLEX = ("complex64", "complex128")
OPS = ("sum", "avg", "prod", "min", "max", "band", "bor", "bxor", "premul_sum")
REDUCING = ("all_reduce", "reduce", "reduce_scatter")


def is_defined(op: str, dtype: str) -> bool:
    """Whether `op` makes sense on `dtype`."""
    if op in ("sum", "prod"):
        return True
    if op in ("min", "max"):
        return dtype not in COMPLEX
    if op in ("avg", "premul_sum"):
        return dtype in FLOATS or dtype in COMPLEX
    return dtype not in FLOATS and dtype not in COMPLEX


PAIRS = [(dtype, op) for dtype in DTYPES for op in OPS if is_defined(op, dtype)]


def combine(arrays: Sequence[Array], op: str, factor: complex | None = None) -> Array:
    """All contributions of one element, left to right."""
    dtype = arrays[0].dtype
    with np.errstate(all="ignore"):
        if op == "premul_sum":
            assert factor is not None
            arrays = [_scaled(a, factor) for a in arrays]
        if dtype == np.bool_:
            return _combine_bools(arrays, op)
        wide = [_widened(a) for a in arrays]
        total = wide[0].copy()
        for operand in wide[1:]:
            total = _step(total, operand, op)
        if op == "avg":
            total = _divided(total, len(arrays))
        return total.astype(dtype)


def _widened(array: Array) -> Array:
    narrow = array.dtype in [DTYPES[name] for name in NARROW]
    return array.astype(np.float32) if narrow else array


def _step(total: Array, operand: Array, op: str) -> Array:
    match op:
        case "sum" | "avg" | "premul_sum":
            return total + operand
        case "prod":
            return _product(total, operand)
        case "min" | "max":
            better = operand < total if op == "min" else operand > total
            chosen = np.where(better, operand, total)
            if total.dtype.kind != "f":
                return chosen
            return np.where(np.isnan(total) | np.isnan(operand), total + operand, chosen)
        case "band":
            return total & operand
        case "bor":
            return total | operand
        case "bxor":
            return total ^ operand
    raise ValueError(op)


def _combine_bools(arrays: Sequence[Array], op: str) -> Array:
    stacked = np.stack(arrays)
    if op in ("sum", "max", "bor"):
        return stacked.any(axis=0)
    if op in ("prod", "min", "band"):
        return stacked.all(axis=0)
    return np.logical_xor.reduce(stacked, axis=0)


def _product(a: Array, b: Array) -> Array:
    if a.dtype.kind != "c":
        return a * b
    result = np.empty_like(a)
    result.real = a.real * b.real - a.imag * b.imag
    result.imag = a.real * b.imag + a.imag * b.real
    return result


def _divided(total: Array, n: int) -> Array:
    if total.dtype.kind != "c":
        return total / total.dtype.type(n)
    result = np.empty_like(total)
    result.real = total.real / result.real.dtype.type(n)
    result.imag = total.imag / result.real.dtype.type(n)
    return result


def _scaled(array: Array, factor: complex) -> Array:
    wide = _widened(array)
    factor = complex(factor)
    if wide.dtype.kind == "c" and factor.imag != 0:
        return _product(wide, np.full_like(wide, factor))
    if wide.dtype.kind == "c":
        result = np.empty_like(wide)
        result.real = wide.real * result.real.dtype.type(factor.real)
        result.imag = wide.imag * result.real.dtype.type(factor.real)
        return result
    return (wide * wide.dtype.type(factor.real)).astype(array.dtype)


def lengths(count: int, n: int) -> list[int]:
    """Lengths of n blocks of an array of `count` elements: the first get one more."""
    return [len(part) for part in np.array_split(np.empty(count, np.uint8), n)]


def cut(array: Array, counts: Sequence[int]) -> list[Array]:
    """Consecutive blocks of `counts` rows."""
    assert sum(counts) == len(array)
    ends = np.cumsum(counts)
    return [array[end - count : end] for end, count in zip(ends, counts, strict=True)]


def all_reduce(xs: Sequence[Array], op: str, factor: complex | None = None) -> list[Array]:
    total = combine(xs, op, factor)
    return [total] * len(xs)


def reduce(
    xs: Sequence[Array], root: int, op: str, factor: complex | None = None
) -> list[Array | None]:
    return [combine(xs, op, factor) if r == root else None for r in range(len(xs))]


def reduce_scatter(
    xs: Sequence[Array], op: str, factor: complex | None = None, counts: Sequence[int] | None = None
) -> list[Array]:
    total = combine(xs, op, factor).reshape(-1)
    return cut(total, lengths(total.size, len(xs)) if counts is None else counts)


def all_gather(xs: Sequence[Array]) -> list[Array]:
    return [np.concatenate(xs)] * len(xs)


def broadcast(xs: Sequence[Array], root: int) -> list[Array]:
    return [xs[root]] * len(xs)


def gather(xs: Sequence[Array], root: int) -> list[Array | None]:
    return [np.concatenate(xs) if r == root else None for r in range(len(xs))]


def scatter(x: Array, counts: Sequence[int]) -> list[Array]:
    return cut(x, counts)


def all_to_all(xs: Sequence[Array], counts: Sequence[Sequence[int]]) -> list[Array]:
    """counts[s][d] rows go from rank s to rank d."""
    blocks = [cut(x, row) for x, row in zip(xs, counts, strict=True)]
    return [np.concatenate([row[d] for row in blocks]) for d in range(len(xs))]
