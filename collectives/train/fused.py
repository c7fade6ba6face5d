"""Optimizers on GPUs in one pass: parameter, gradient and state are read and written once, the
gradient unscaled and clipped on the way, and the parameter rounded to the dtype it is used in.

Every operation is the one of `optimizers`, in its order, rounded by itself (no fused multiply-add),
so a GPU gets the bits of the host. What is kept in 16 bits is computed with in float32 and rounded
once. bfloat16 is taken as its bits, which any cupy can do.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..array import namespace
from ..array.dtypes import name_of_numpy
from .precision import wide_dtype

# load and store: bfloat16 to float32 is exact, the other way rounds to nearest, ties to even.
PREAMBLE = """
__device__ inline float from_bfloat16(unsigned short bits) {
  union { unsigned int u; float f; } x; x.u = (unsigned int)bits << 16; return x.f;
}
__device__ inline unsigned short to_bfloat16(float f) {
  union { unsigned int u; float f; } x; x.f = f;
  if (f != f) return (unsigned short)((x.u >> 16) | 0x40);
  return (unsigned short)((x.u + 0x7fff + ((x.u >> 16) & 1)) >> 16);
}
"""

# What is done with x, the gradient times its coefficient, and w, the parameter.
_MOMENTS = """
first = first * beta1 + x * rest1;
second = second * beta2 + x * x * rest2;
x = first / (sqrt(second) + eps) * factor;
"""
OPERATIONS = {
    "sgd": "x = x + w * l2; x = x * lr; w = w - x;",
    "momentum": "x = x + w * l2; velocity = velocity * momentum + x; x = velocity * lr; w = w - x;",
    "nesterov": "x = x + w * l2; velocity = velocity * momentum + x;"
    " x = x + velocity * momentum; x = x * lr; w = w - x;",
    "adam": "x = x + w * l2;" + _MOMENTS + "w = w * decay - x;",
    "lamb": _MOMENTS + "direction = x + w * l2;",
    "lars": "x = x + w * l2; x = x * lr; velocity = velocity * momentum + x; w = w - velocity;",
    "step": "x = x * lr; w = w - x;",
}


_C = {"float32": "float", "float64": "double"}
Arrays = tuple[tuple[str, str], ...]  # names and dtypes: g, w, states, and perhaps used


def text(name: str, arrays: Arrays, numbers: tuple[str, ...]) -> tuple[str, str, str]:
    """Parameters read, parameters written, and body of a kernel. All but "g" are written, "used"
    is not read.
    """
    wide = wide_dtype(dict(arrays)["w"])
    reads = [f"{wide} {number}" for number in ("coefficient", *numbers)]
    writes, loads, stores = [], [], []
    for array, dtype in arrays:
        bits = "uint16" if dtype == "bfloat16" else dtype
        if array == "g":
            reads.insert(0, f"{bits} g")
            loads.append(f"{_C[wide]} x = {_load('g', dtype, wide)};")
        elif array == "used":
            writes.append(f"{bits} used")
            stores.append(f"used = {_store('w', dtype)};")
        elif dtype == wide:
            writes.append(f"{bits} {array}")
        else:
            writes.append(f"{bits} kept_{array}")
            loads.append(f"{_C[wide]} {array} = {_load('kept_' + array, dtype, wide)};")
            stores.append(f"kept_{array} = {_store(array, dtype)};")
    body = [*loads, "x = x * coefficient;", OPERATIONS[name], *stores]
    return ", ".join(reads), ", ".join(writes), " ".join(body)


def _load(x: str, dtype: str, wide: str) -> str:
    return f"from_bfloat16({x})" if dtype == "bfloat16" else f"({_C[wide]}){x}"


def _store(x: str, dtype: str) -> str:
    return f"to_bfloat16((float){x})" if dtype == "bfloat16" else f"({_C.get(dtype, dtype)}){x}"


@functools.cache
def _kernel(name: str, arrays: Arrays, numbers: tuple[str, ...]) -> Any:
    import cupy

    return cupy.ElementwiseKernel(
        *text(name, arrays, numbers),
        f"collectives_{name}",
        preamble=PREAMBLE,
        options=("--fmad=false",),
    )


def on_gpu(*arrays: Any) -> bool:
    """True if these are arrays that a kernel can step."""
    return not any(isinstance(x, np.ndarray) for x in arrays)


def run(
    name: str,
    w: Any,
    g: Any,
    coefficient: float,
    states: Mapping[str, Any],
    numbers: Mapping[str, float],
    used: Any = None,
) -> None:
    """Runs operation `name` of OPERATIONS on flat arrays of cupy.

    w       parameters as they are kept
    g       gradient, of any float dtype, which is only read
    states  arrays of w's dtype or of the one that is computed in, written
    used    receives w in its own dtype, unless it is None
    """
    arrays = {"g": g, "w": w, **states}
    if used is not None:
        arrays["used"] = used
    kinds = tuple((key, name_of_numpy(x.dtype, "array")) for key, x in arrays.items())
    kernel = _kernel(name, kinds, tuple(numbers))
    number = np.dtype(wide_dtype(dict(kinds)["w"])).type
    bits, *written = map(_bits, arrays.values())
    with namespace(w).cuda.Device(w.device.id):
        values = [number(value) for value in (coefficient, *numbers.values())]
        kernel(bits, *values, *written)


def _bits(x: Any) -> Any:
    return x.view(np.uint16) if name_of_numpy(x.dtype, "array") == "bfloat16" else x
