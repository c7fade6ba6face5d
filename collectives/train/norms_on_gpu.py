"""Sums of squares of arrays on a GPU, for `norms`: one kernel for all arrays of a dtype.

A warp adds the squares of a chunk, in one order wherever the chunk lies. A block adds its chunks in
fixed point, and what it has of a group then to the table of all.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UnsupportedError
from .fixed_point import CHUNK, LIMBS, LOWEST

if TYPE_CHECKING:
    from .norms import Spans

_BLOCKS = 4  # for each multiprocessor
_THREADS = 256

# What is loaded, and its value as a double.
_LOADS = {
    "float64": ("double", "x"),
    "float32": ("float", "(double)x"),
    "bfloat16": ("unsigned short", "(double)__uint_as_float((unsigned)x << 16)"),
    "float16": ("unsigned short", "(double)from_half(x)"),
}
# One value v, which is not negative, is added to a row; integers may be added in any order.
EXACT = f"""
if (!(v <= 1.7976931348623157e308)) {{ add({LIMBS}, 1ull); }}
else if (v > 0) {{
  int exponent;
  const double fraction = frexp(v, &exponent);
  const unsigned long long mantissa = (unsigned long long)(fraction * 9007199254740992.0);
  const int place = exponent - 53 - ({LOWEST});
  const int limb = place >> 5;
  const int shift = place & 31;
  const unsigned long long low = (mantissa & 0xffffffffull) << shift;
  const unsigned long long high = (mantissa >> 32) << shift;
  add(limb, low & 0xffffffffull);
  add(limb + 1, (low >> 32) + (high & 0xffffffffull));
  add(limb + 2, high >> 32);
}}
"""
_SOURCE = """
__device__ inline float from_half(unsigned short bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

struct Part {
  const LOADED* values;
  long long size;
  long long group;
  long long first;  // chunk of all
};

__device__ inline double squares(const LOADED* values, int size, int lane) {
  double sum = 0;
  if (size == CHUNK) {
#pragma unroll
    for (int i = 0; i < CHUNK / 32; ++i) {
      const LOADED x = values[lane + 32 * i];
      const double value = VALUE;
      sum += value * value;
    }
  } else {
    for (int i = lane; i < size; i += 32) {
      const LOADED x = values[i];
      const double value = VALUE;
      sum += value * value;
    }
  }
  for (int other = 16; other > 0; other >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, other);
  return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS)
collectives_squares(const Part* parts, int count, long long chunks, unsigned long long* table) {
  __shared__ unsigned long long row[LIMBS + 1];
  for (int i = threadIdx.x; i <= LIMBS; i += THREADS) row[i] = 0;
  __syncthreads();
  const int lane = threadIdx.x % 32;
  long long at = chunks * blockIdx.x / gridDim.x;
  const long long end = chunks * (blockIdx.x + 1) / gridDim.x;
  int low = 0, high = count;  // the part that chunk `at` belongs to
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (parts[middle].first <= at) low = middle; else high = middle;
  }
  for (int i = low; at < end; ++i) {
    const Part part = parts[i];
    const long long next = i + 1 < count ? parts[i + 1].first : chunks;
    const long long stop = next < end ? next : end;
    for (long long chunk = at + threadIdx.x / 32; chunk < stop; chunk += THREADS / 32) {
      const long long begin = (chunk - part.first) * CHUNK;
      const long long rest = part.size - begin;
      const double v = squares(part.values + begin, rest < CHUNK ? (int)rest : CHUNK, lane);
      if (lane == 0) {
        auto add = [&](int limb, unsigned long long x) { atomicAdd(&row[limb], x); };
        EXACT
      }
    }
    at = stop;
    if (at < end && parts[i + 1].group == part.group) continue;
    __syncthreads();
    for (int limb = threadIdx.x; limb <= LIMBS; limb += THREADS) {
      if (row[limb]) atomicAdd(&table[part.group * (LIMBS + 1) + limb], row[limb]);
      row[limb] = 0;
    }
    __syncthreads();
  }
}
"""


def source(dtype: str) -> str:
    """The text of the kernel for arrays of `dtype`. Raises UnsupportedError if there is none."""
    if dtype not in _LOADS:
        known = ", ".join(_LOADS)
        raise UnsupportedError(f"norms of arrays of {dtype} on a GPU; there are those of {known}")
    loaded, value = _LOADS[dtype]
    text = _SOURCE.replace("EXACT", EXACT).replace("LOADED", loaded).replace("VALUE", value)
    for name, number in (("CHUNK", CHUNK), ("LIMBS", LIMBS), ("THREADS", _THREADS)):
        text = text.replace(name, str(number))
    return text


@functools.cache
def _kernel(dtype: str) -> Any:
    return sys.modules["cupy"].RawKernel(source(dtype), "collectives_squares")


@functools.cache
def _most_blocks(ordinal: int) -> int:
    """Of a GPU. Asked once: cupy looks up all that a device can tell, each time."""
    device = sys.modules["cupy"].cuda.Device(ordinal)
    return _BLOCKS * int(device.attributes["MultiProcessorCount"])


def exact_squares(spans: Sequence[Spans], count: int) -> np.ndarray[Any, Any]:
    """The table of `norms.exact`, on the host, for the squares of parts of arrays of cupy, which
    the host waits for.
    """
    kinds: dict[tuple[int, Any], list[Spans]] = {}
    for span in spans:
        kinds.setdefault((span.values.data.device_id, span.values.dtype), []).append(span)
    cupy = sys.modules["cupy"]
    tables = []
    for (ordinal, dtype), mine in kinds.items():
        rows = _rows(mine)
        if not len(rows):
            continue
        chunks = -(-rows[:, 1] // CHUNK)
        rows[:, 3] = np.cumsum(chunks) - chunks
        total = int(chunks.sum())
        with cupy.cuda.Device(ordinal):
            table = cupy.zeros((count, LIMBS + 1), np.int64)
            blocks = min(total, _most_blocks(ordinal))
            arguments = (cupy.asarray(rows), np.int32(len(rows)), np.int64(total), table)
            _kernel(dtype.name)((blocks,), (_THREADS,), arguments)
        tables.append(table)
    whole = np.zeros((count, LIMBS + 1), np.int64)
    for table in tables:
        whole += table.get()
    return whole


def _rows(spans: Sequence[Spans]) -> np.ndarray[Any, Any]:
    """What the kernel reads of the parts that are not empty, `first` left out."""
    sizes = np.concatenate([span.high - span.low for span in spans])
    rows = np.empty((sizes.size, 4), np.int64)
    rows[:, 0] = np.concatenate(
        [span.values.data.ptr + span.low * span.values.itemsize for span in spans]
    )
    rows[:, 1] = sizes
    rows[:, 2] = np.concatenate([span.group for span in spans])
    return rows[sizes > 0]
