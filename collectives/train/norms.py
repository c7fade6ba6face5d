"""Norms that do not depend on how the elements are spread over ranks, not even in their last bit.

A parameter is cut into chunks of CHUNK elements, counted from its own beginning. Shards end where
chunks end, so each chunk lies whole on one rank, and the sum of its squares is one floating-point
result wherever it is computed. These sums are then added exactly, as integers in fixed point, so
that neither order nor grouping matters; one all_reduce of integers joins the ranks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..array import namespace

if TYPE_CHECKING:
    from ..communicator import Communicator

CHUNK = 512  # elements
_BLOCK = 256  # chunks that are looked at together: 512 KiB of float32 stay in the cache
# A float64 is a multiple of 2^-1074 below 2^1024; its 53 bits of mantissa reach 52 further down.
_LOWEST = -1130
_LIMBS = 69  # of 32 bits, in int64: 2^31 numbers may be added
_MASK = (1 << 32) - 1


def chunk_squares(x: Any) -> Any:
    """The sum of the squares of each chunk, float64 where x is; the last chunk may be shorter.

    x  1-d array of numpy or cupy that begins where a chunk begins
    """
    wide = np.dtype(np.float64) if x.dtype == np.float64 else np.dtype(np.float32)
    found = namespace(x).empty(-(-x.size // CHUNK), np.float64)
    whole = x.size // CHUNK
    with np.errstate(over="ignore", invalid="ignore"):
        # A GPU has no such cache, and waiting for it costs more than a sum.
        size = _BLOCK if isinstance(x, np.ndarray) else max(1, whole)
        for low in range(0, whole, size):
            high = min(whole, low + size)
            block = x[low * CHUNK : high * CHUNK].astype(wide, copy=False)
            found[low:high] = _rows(block.reshape(-1, CHUNK))
        if whole * CHUNK < x.size:
            rest = x[whole * CHUNK :].astype(wide, copy=False)
            found[whole:] = _rows(rest.reshape(1, -1))
    return found


def _rows(x: Any) -> Any:
    """The sum of the squares of each row; the same bits for a row among others or alone."""
    if isinstance(x, np.ndarray):
        return np.einsum("ij,ij->i", x, x)
    return _cupy_rows(x)


def _cupy_rows(x: Any) -> Any:
    xp = namespace(x)
    out = xp.empty(x.shape[0], np.float64)
    _kernel(
        "raw T x, int64 columns",
        "float64 out",
        "double s = 0; for (long long j = 0; j < columns; ++j) {"
        " const double v = x[i * columns + j]; s += v * v; } out = s;",
        "collectives_row_squares",
    )(xp.ascontiguousarray(x), x.shape[1], out)
    return out


@functools.cache
def _kernel(reads: str, writes: str, body: str, name: str) -> Any:
    import cupy

    return cupy.ElementwiseKernel(reads, writes, body, name)


# What `exact` does with one value v, for a table row that begins at `base`; integers may be added
# in any order. `add` is atomic.
EXACT = f"""
if (!(v <= 1.7976931348623157e308)) {{ add(base + {_LIMBS}, 1ull); }}
else if (v > 0) {{
  int exponent;
  const double fraction = frexp(v, &exponent);
  const unsigned long long mantissa = (unsigned long long)(fraction * 9007199254740992.0);
  const long long place = (long long)exponent - 53 - ({_LOWEST});
  const long long limb = base + (place >> 5);
  const int shift = (int)(place & 31);
  const unsigned long long low = (mantissa & 0xffffffffull) << shift;
  const unsigned long long high = (mantissa >> 32) << shift;
  add(limb, low & 0xffffffffull);
  add(limb + 1, (low >> 32) + (high & 0xffffffffull));
  add(limb + 2, high >> 32);
}}
"""


def _add_on_gpu(table: Any, row: int, values: Any) -> None:
    """Adds values, an array of cupy, to a row of a table of `exact` on the same GPU."""
    atomic = "auto add = [&](long long at, unsigned long long x) {"
    atomic += " atomicAdd((unsigned long long*)&table[at], x); };"
    kernel = _kernel(
        "float64 v, int64 base", "raw int64 table", atomic + EXACT, "collectives_exact_sum"
    )
    kernel(values, row * (_LIMBS + 1), table)


def exact(values: np.ndarray[Any, Any], rows: np.ndarray[Any, Any], count: int) -> Any:
    """Sums in fixed point: values[i] >= 0 is added to row rows[i] of `count` rows. int64 of shape
    (count, limbs + 1); such tables are added with integer +. The last column counts values that are
    not finite.
    """
    table = np.zeros((count, _LIMBS + 1), np.int64)
    finite = np.isfinite(values)
    if not finite.all():
        np.add.at(table, (rows[~finite], _LIMBS), 1)
        values, rows = values[finite], rows[finite]
    fraction, exponent = np.frexp(values)
    mantissa = (fraction * 2.0**53).astype(np.int64)
    place = exponent.astype(np.int64) - 53 - _LOWEST
    limb, shift = place >> 5, place & 31
    low = ((mantissa & _MASK).astype(np.uint64) << shift.astype(np.uint64)).view(np.int64)
    high = (mantissa >> 32) << shift
    np.add.at(table, (rows, limb), low & _MASK)
    np.add.at(table, (rows, limb + 1), ((low >> 32) & _MASK) + (high & _MASK))
    np.add.at(table, (rows, limb + 2), high >> 32)
    return table


def value(row: np.ndarray[Any, Any]) -> float:
    """What a row of `exact` amounts to, rounded once; NaN if something was not finite."""
    if row[_LIMBS]:
        return math.nan
    total = sum(int(limb) << (32 * i) for i, limb in enumerate(row[:_LIMBS]))
    shift = max(0, total.bit_length() - 64)
    if shift:  # to 64 bits, with a last bit that says whether anything was cut off
        total = (total >> shift) | bool(total & ((1 << shift) - 1))
    try:
        return math.ldexp(float(total), shift + _LOWEST)
    except OverflowError:
        return math.inf


def sums_of_squares(
    parts: Sequence[tuple[int, Any]], count: int, comm: Communicator | None
) -> np.ndarray[Any, Any]:
    """The sums of squares of `count` groups of arrays that are spread over the ranks of `comm`.

    parts  (group, 1-d array that begins where a chunk begins) for what this rank holds

    Returns float64, NaN for a group in which something is not finite: the same bits on all ranks,
    however the arrays are spread. Collective over `comm` (None: everything is here).
    """
    found, on_gpus = [], {}
    for group, x in parts:
        if isinstance(x, np.ndarray):
            found.append((group, chunk_squares(x)))
        elif x.size:
            with namespace(x).cuda.Device(x.device.id):
                if x.device.id not in on_gpus:
                    on_gpus[x.device.id] = namespace(x).zeros((count, _LIMBS + 1), np.int64)
                _add_on_gpu(on_gpus[x.device.id], group, chunk_squares(x))
    values = np.concatenate([v for _, v in found]) if found else np.empty(0)
    rows = np.repeat([g for g, _ in found], [v.size for _, v in found]).astype(np.int64)
    table = exact(values, rows, count)
    for there in on_gpus.values():
        table += there.get()
    if comm is not None and comm.size > 1:
        comm.all_reduce(table)
    return np.array([value(row) for row in table])


def finite(x: Any) -> bool:
    """False if an array of numpy holds a NaN or an infinity."""
    if x.dtype.itemsize == 2:  # numpy has no fast sum of these: look at the exponents
        exponent = np.uint16(0x7C00 if x.dtype == np.float16 else 0x7F80)
        return not ((x.view(np.uint16) & exponent) == exponent).any()
    with np.errstate(over="ignore", invalid="ignore"):
        total = x.sum()
        return bool(np.isfinite(total)) or bool(np.isfinite(x).all())
