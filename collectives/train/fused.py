"""Optimizers on GPUs in one pass: parameter, gradient and state are read and written once, the
gradient unscaled and clipped on the way, and the parameter rounded to the dtype it is used in.

Every operation is the one of `optimizers`, in its order, rounded by itself (no fused multiply-add),
so a GPU gets the bits of the host. bfloat16 is taken as its 16 bits, which any cupy can do.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..array import namespace
from ..array.dtypes import name_of_numpy

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


def text(
    name: str, states: tuple[str, ...], numbers: tuple[str, ...], grad: str, used: str | None
) -> tuple[str, str, str]:
    """Parameters read, parameters written, and body of a kernel.

    grad, used  dtypes of the gradient and of the parameter as it is used; used may be None
    """
    reads = ["uint16 g" if grad == "bfloat16" else "G g", "T coefficient"]
    reads += [f"T {number}" for number in numbers]
    writes = [f"T {x}" for x in ("w", *states)]
    load = "from_bfloat16(g)" if grad == "bfloat16" else "(T)g"
    body = f"T x = {load}; x = x * coefficient; {OPERATIONS[name]}"
    if used is not None:
        writes.append("uint16 used" if used == "bfloat16" else "U used")
        body += " used = " + ("to_bfloat16((float)w);" if used == "bfloat16" else "(U)w;")
    return ", ".join(reads), ", ".join(writes), body


@functools.cache
def _kernel(
    name: str, states: tuple[str, ...], numbers: tuple[str, ...], grad: str, used: str | None
) -> Any:
    import cupy

    return cupy.ElementwiseKernel(
        *text(name, states, numbers, grad, used),
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

    w       parameters in full precision
    g       gradient, of any float dtype, which is only read
    states  arrays like w, written
    used    receives w in its own dtype, unless it is None
    """
    kinds = [None if x is None else name_of_numpy(x.dtype, "array") for x in (g, used)]
    kernel = _kernel(name, tuple(states), tuple(numbers), kinds[0] or "", kinds[1])
    arrays = [w, *states.values()]
    if used is not None:
        arrays.append(_bits(used))
    with namespace(w).cuda.Device(w.device.id):
        values = [w.dtype.type(value) for value in numbers.values()]
        kernel(_bits(g), w.dtype.type(coefficient), *values, *arrays)


def _bits(x: Any) -> Any:
    return x.view(np.uint16) if name_of_numpy(x.dtype, "array") == "bfloat16" else x
