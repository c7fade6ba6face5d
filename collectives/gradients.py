"""Arithmetic on gradients: what buckets do with arrays of numpy and cupy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .array import namespace
from .errors import ArrayError, ArrayTypeError

if TYPE_CHECKING:
    from .bucket_layout import Spec


def address(x: Any) -> int:
    """Where an array's memory begins."""
    return int(x.ctypes.data if isinstance(x, np.ndarray) else x.data.ptr)


def meets(x: Any, part: Any) -> bool:
    """True if the memory that a gradient spans has some of its place in a bucket."""
    (low, high), (begin, end) = _span(x), _span(part)
    return bool(x.size) and low < end and begin < high


def _span(x: Any) -> tuple[int, int]:
    steps = [(n - 1) * stride for n, stride in zip(x.shape, x.strides, strict=True)]
    begin = address(x)
    low, high = (sum(s for s in steps if (s < 0) == down) for down in (True, False))
    return begin + low, begin + high + x.itemsize


def settled(x: Any, part: Any) -> Any:
    """A gradient that meets its place: the place itself if each element lies where it belongs, else
    a copy, since writing the place changes x.
    """
    same = address(x) == address(part) and x.dtype == part.dtype and x.flags.c_contiguous
    return part if same else x.copy()


def misfit(
    name: str, spec: Spec, shape: tuple[int, ...], dtype: str, device: str, rank: int
) -> ArrayError | None:
    """What is wrong with a gradient of the parameter `name` on `rank`."""
    here = f"rank {rank}: the gradient of {name!r} has"
    if shape != spec.shape:
        return ArrayError(f"{here} shape {shape}, the parameter {spec.shape}", rank=rank)
    if dtype not in (spec.dtype, spec.carried):
        return ArrayTypeError(f"{here} dtype {dtype}; expected is {spec.dtype}", rank=rank)
    if device != spec.device:
        return ArrayError(
            f"{here} its memory on {device}, the parameter on {spec.device}", rank=rank
        )
    return None


def listed(names: Sequence[str]) -> str:
    """At most eight names, in words."""
    shown = ", ".join(repr(n) for n in names[:8])
    return shown + (f" and {len(names) - 8} more" if len(names) > 8 else "")


@np.errstate(over="ignore", invalid="ignore")  # float16 overflows: the caller looks at the result
def put(target: Any, source: Any, scale: float, *, add: bool) -> None:
    """target = source * scale, or target += source * scale, for arrays of numpy or cupy. What is
    smaller than float32 is computed in float32 and rounded once.
    """
    if scale == 1.0 and not add:
        target[...] = source
        return
    xp = namespace(target)
    wide = np.dtype(np.float32) if target.dtype.itemsize < 4 else target.dtype
    term = source.astype(wide, copy=False)
    if scale != 1.0:
        direct = not add and wide == target.dtype
        term = xp.multiply(term, wide.type(scale), out=target if direct else None)
    if add:
        term = target.astype(wide, copy=False) + term if wide != target.dtype else target + term
    if term is not target:
        target[...] = term
