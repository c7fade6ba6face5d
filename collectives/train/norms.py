"""Norms that do not depend on how the elements are spread over ranks, not even in their last bit.

A parameter is cut into chunks of CHUNK elements, counted from its own beginning. Shards end where
chunks end, so each chunk lies whole on one rank, and the sum of its squares is one floating-point
result wherever it is computed. These sums are then added exactly, as integers in fixed point, so
that neither order nor grouping matters; one all_reduce of integers joins the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import norms_on_gpu
from .fixed_point import CHUNK, LIMBS, LOWEST

if TYPE_CHECKING:
    from ..communicator import Communicator

_BLOCK = 256  # chunks that are looked at together: 512 KiB of float32 stay in the cache
_MASK = (1 << 32) - 1


class Spans(NamedTuple):
    """Parts of an array, each of which begins where a chunk begins.

    values     1-d array of numpy or cupy
    low, high  where the parts begin and end, int64
    group      with which others each is summed, int64
    """

    values: Any
    low: np.ndarray[Any, Any]
    high: np.ndarray[Any, Any]
    group: np.ndarray[Any, Any]


def whole(values: Any, group: int) -> Spans:
    """An array as one part."""
    low, high, of = (np.array([number], np.int64) for number in (0, values.size, group))
    return Spans(values, low, high, of)


def chunk_squares(x: Any) -> Any:
    """The sum of the squares of each chunk: in float64 where x is, or where it is beyond float32.
    The last chunk may be shorter.

    x  1-d array of numpy that begins where a chunk begins
    """
    wide = np.dtype(np.float64) if x.dtype == np.float64 else np.dtype(np.float32)
    found = np.empty(-(-x.size // CHUNK), np.float64)
    whole = x.size // CHUNK
    with np.errstate(over="ignore", invalid="ignore"):
        for low in range(0, whole, _BLOCK):
            high = min(whole, low + _BLOCK)
            block = x[low * CHUNK : high * CHUNK].astype(wide, copy=False)
            found[low:high] = _rows(block.reshape(-1, CHUNK))
        if whole * CHUNK < x.size:
            rest = x[whole * CHUNK :].astype(wide, copy=False)
            found[whole:] = _rows(rest.reshape(1, -1))
        beyond = np.flatnonzero(np.isinf(found[:whole]))
        chunks = x[: whole * CHUNK].reshape(-1, CHUNK)
        for low in range(0, beyond.size, _BLOCK):
            some = beyond[low : low + _BLOCK]
            found[some] = _rows(chunks[some].astype(np.float64))
        if np.isinf(found[whole:]).any():
            found[whole:] = _rows(x[whole * CHUNK :].astype(np.float64).reshape(1, -1))
    return found


def _rows(x: Any) -> Any:
    """The sum of the squares of each row; the same bits for a row among others or alone."""
    return np.einsum("ij,ij->i", x, x)


def exact(values: np.ndarray[Any, Any], rows: np.ndarray[Any, Any], count: int) -> Any:
    """Sums in fixed point: values[i] >= 0 is added to row rows[i] of `count` rows. int64 of shape
    (count, limbs + 1); such tables are added with integer +. The last column counts values that are
    not finite.
    """
    table = np.zeros((count, LIMBS + 1), np.int64)
    finite = np.isfinite(values)
    if not finite.all():
        np.add.at(table, (rows[~finite], LIMBS), 1)
        values, rows = values[finite], rows[finite]
    fraction, exponent = np.frexp(values)
    mantissa = (fraction * 2.0**53).astype(np.int64)
    place = exponent.astype(np.int64) - 53 - LOWEST
    limb, shift = place >> 5, place & 31
    low = ((mantissa & _MASK).astype(np.uint64) << shift.astype(np.uint64)).view(np.int64)
    high = (mantissa >> 32) << shift
    np.add.at(table, (rows, limb), low & _MASK)
    np.add.at(table, (rows, limb + 1), ((low >> 32) & _MASK) + (high & _MASK))
    np.add.at(table, (rows, limb + 2), high >> 32)
    return table


def value(row: np.ndarray[Any, Any]) -> float:
    """What a row of `exact` amounts to, rounded once; NaN if something was not finite."""
    if row[LIMBS]:
        return math.nan
    total = sum(limb << (32 * i) for i, limb in enumerate(row[:LIMBS].tolist()))
    shift = max(0, total.bit_length() - 64)
    if shift:  # to 64 bits, with a last bit that says whether anything was cut off
        total = (total >> shift) | bool(total & ((1 << shift) - 1))
    try:
        return math.ldexp(float(total), shift + LOWEST)
    except OverflowError:
        return math.inf


def sums_of_squares(
    spans: Sequence[Spans], count: int, comm: Communicator | None
) -> np.ndarray[Any, Any]:
    """The sums of squares of `count` groups of parts that are spread over the ranks of `comm`.

    spans  what this rank holds

    Returns float64, NaN for a group in which something is not finite: the same bits on all ranks,
    however the arrays are spread. Collective over `comm` (None: everything is here).
    """
    here = [span for span in spans if isinstance(span.values, np.ndarray)]
    there = [span for span in spans if not isinstance(span.values, np.ndarray)]
    found = [
        (group, chunk_squares(span.values[low:high]))
        for span in here
        for low, high, group in zip(span.low, span.high, span.group, strict=True)
    ]
    values = np.concatenate([v for _, v in found]) if found else np.empty(0)
    rows = np.repeat([g for g, _ in found], [v.size for _, v in found]).astype(np.int64)
    table = exact(values, rows, count)
    if there:
        table += norms_on_gpu.exact_squares(there, count)
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
