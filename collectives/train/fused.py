"""Optimizers on GPUs in one pass: parameter, gradient and state are read and written once, the
gradient unscaled and clipped on the way, and the parameter rounded to the dtype it is used in. One
kernel steps all arrays of the same dtypes.

Every operation is the one of `optimizers`, in its order, rounded by itself (no fused multiply-add),
so a GPU gets the bits of the host. What is kept in 16 bits is computed with in float32 and rounded
once.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..array import ITEM_SIZES, namespace
from ..array.dtypes import name_of_numpy
from .precision import wide_dtype

_THREADS = 256
_TILE = 4096  # elements of one array that a block steps

TYPES = """
typedef unsigned short uint16;
typedef float float32;
typedef double float64;
"""
HALF = """
struct float16 {
  unsigned short bits;
  float16() = default;
  __device__ inline explicit operator float() const {
    float value; asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits)); return value;
  }
  __device__ inline explicit float16(float value) {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  }
};
"""
# bfloat16 to float32 is exact, the other way rounds to nearest, ties to even.
BFLOAT = """
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
    "gradient": "direction = x;",
    "step": "x = x * lr; w = w - x;",
}

_C = {"float32": "float", "float64": "double"}
Kinds = tuple[tuple[str, str], ...]  # names and dtypes: g, w, states, and perhaps used

# ELEMENTS lie in memory together as 16 bytes or a multiple. A block finds its part by the number of
# its tile; what begins elsewhere than at 16 bytes, and the last tile of a part, goes one by one.
_KERNEL = """
template <class T>
struct alignas(16) Pack { T at[ELEMENTS]; };

struct Part {
  POINTERS
  long long length;
  long long tile;  // its first of all
  double numbers[COUNT];
};

extern "C" __global__ void __launch_bounds__(THREADS)
NAME(const Part* parts, int count) {
  const long long tile = blockIdx.x;
  int low = 0, high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (parts[middle].tile <= tile) low = middle; else high = middle;
  }
  const Part part = parts[low];
  NUMBERS
  const long long begin = (tile - part.tile) * TILE;
  const long long rest = part.length - begin;
  if (rest >= TILE && (ADDRESSES) % 16 == 0) {
    for (int i = threadIdx.x * ELEMENTS; i < TILE; i += THREADS * ELEMENTS) {
      LOAD_PACKS
#pragma unroll
      for (int e = 0; e < ELEMENTS; ++e) {
        IN_PACKS
        BODY
      }
      STORE_PACKS
    }
    return;
  }
  const int end = rest < TILE ? (int)rest : TILE;
  for (int i = threadIdx.x; i < end; i += THREADS) {
    IN_MEMORY
    BODY
  }
}
"""


def source(name: str, kinds: Kinds, numbers: Sequence[str]) -> str:
    """The text of the kernel for operation `name` on arrays of these dtypes, without HALF and
    BFLOAT. "g" is only read, "used" is only written.

    numbers  what the operation is told of each part, behind "coefficient"
    """
    wide = wide_dtype(dict(kinds)["w"])
    types = {array: "uint16" if dtype == "bfloat16" else dtype for array, dtype in kinds}
    # A number of the dtype that is computed in is worked on where it is, by its own name.
    names = {a: a if a in ("g", "used") or d == wide else f"kept_{a}" for a, d in kinds}
    loads = [f"{_C[wide]} x = {_load('g', dict(kinds)['g'], wide)};"]
    stores = []
    for array, dtype in kinds:
        if array == "used":
            stores.append(f"used = {_store('w', dtype)};")
        elif names[array] != array:
            loads.append(f"{_C[wide]} {array} = {_load(names[array], dtype, wide)};")
            stores.append(f"{names[array]} = {_store(array, dtype)};")

    def each(line: str, arrays: Sequence[str] = tuple(types)) -> str:
        return " ".join(line.format(a=a, t=types[a], n=names[a]) for a in arrays)

    written = [array for array in types if array != "g"]
    told = ("coefficient", *numbers)
    found = {
        "NAME": f"collectives_{name}",
        "POINTERS": each("{t}* {a};"),
        "NUMBERS": " ".join(
            f"const {_C[wide]} {n} = ({_C[wide]})part.numbers[{i}];" for i, n in enumerate(told)
        ),
        "ADDRESSES": " | ".join(f"(unsigned long long)part.{a}" for a in types),
        "LOAD_PACKS": each("Pack<{t}> pack_{a};", ("used",) if "used" in types else ())
        + each(
            "Pack<{t}> pack_{a} = *(const Pack<{t}>*)(part.{a} + begin + i);",
            [a for a in types if a != "used"],
        ),
        "IN_PACKS": each("{t}& {n} = pack_{a}.at[e];"),
        "STORE_PACKS": each("*(Pack<{t}>*)(part.{a} + begin + i) = pack_{a};", written),
        "IN_MEMORY": each("{t}& {n} = part.{a}[begin + i];"),
        "BODY": " ".join([*loads, "x = x * coefficient;", OPERATIONS[name], *stores]),
        "COUNT": str(len(told)),
        "ELEMENTS": str(16 // min(ITEM_SIZES[dtype] for _, dtype in kinds)),
        "THREADS": str(_THREADS),
        "TILE": str(_TILE),
    }
    text = TYPES + _KERNEL
    for key, value in found.items():
        text = text.replace(key, value)
    return text


def _load(x: str, dtype: str, wide: str) -> str:
    return f"from_bfloat16({x})" if dtype == "bfloat16" else f"({_C[wide]}){x}"


def _store(x: str, dtype: str) -> str:
    return f"to_bfloat16((float){x})" if dtype == "bfloat16" else f"({_C.get(dtype, dtype)}){x}"


@functools.cache
def _kernel(name: str, kinds: Kinds, numbers: tuple[str, ...]) -> Any:
    import cupy

    text = HALF + BFLOAT + source(name, kinds, numbers)
    return cupy.RawKernel(text, f"collectives_{name}", options=("--fmad=false",))


def on_gpu(*arrays: Any) -> bool:
    """True if these are arrays that a kernel can step."""
    return not any(isinstance(x, np.ndarray) for x in arrays)


def kinds_of(arrays: Mapping[str, Any]) -> Kinds:
    """The dtypes of the arrays of a part."""
    return tuple((key, name_of_numpy(x.dtype, "array")) for key, x in arrays.items())


class Parts:
    """Flat arrays of cupy that one kernel steps.

    name     operation of OPERATIONS
    numbers  the names of what it is told of each part
    parts    of one GPU and with the same dtypes, each
             g       gradient, of any float dtype, which is only read
             w       parameters as they are kept
             states  arrays of w's dtype or of the one that is computed in, by name, written
             used    receives w in its own dtype, if it is there
    """

    def __init__(
        self, name: str, numbers: Sequence[str], parts: Sequence[Mapping[str, Any]]
    ) -> None:
        self._kernel = _kernel(name, kinds_of(parts[0]), tuple(numbers))
        self._device = namespace(parts[0]["w"]).cuda.Device(parts[0]["w"].device.id)
        self._held = [*parts]  # their addresses are noted here
        count = len(parts[0])
        sizes = np.array([part["w"].size for part in parts], np.int64)
        tiles = -(-sizes // _TILE)
        self._tiles = int(tiles.sum())
        self._rows = np.empty((len(parts), count + 2 + 1 + len(numbers)), np.int64)
        self._rows[:, :count] = [[x.data.ptr for x in part.values()] for part in parts]
        self._rows[:, count] = sizes
        self._rows[:, count + 1] = np.cumsum(tiles) - tiles
        self._numbers = self._rows[:, count + 2 :].view(np.float64)

    def run(self, numbers: Sequence[Sequence[float]]) -> None:
        """Steps all parts.

        numbers  for each part what its gradient is multiplied by, and its numbers
        """
        if not self._tiles:
            return
        self._numbers[...] = numbers
        cupy = namespace(self._held[0]["w"])
        with self._device:
            rows = cupy.asarray(self._rows)
            self._kernel((self._tiles,), (_THREADS,), (rows, np.int32(len(self._rows))))
