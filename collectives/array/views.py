"""What a collective knows of an array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ..errors import ArrayError, UnsupportedError
from .dtypes import ITEM_SIZES


class View:
    """Where an array's elements lie. Valid while the array is neither resized nor freed; `owner`
    keeps it alive.

    pointer   address of the first element (0 allowed where `count` is 0)
    count     number of elements
    dtype     one of `ITEM_SIZES`
    shape     lengths of the dimensions, () for a scalar
    nbytes    count * bytes per element
    readonly  True where the elements must not be written
    device    "cpu" or "cuda:N"
    stream    for device arrays, the stream on which the elements are ready, as an integer; None if
              they are ready now and their library knows of no other stream, and on the host
    kind      "numpy", "scalar", "torch", "jax", "buffer", "dlpack" or "cuda"
    owner     the object to keep alive
    """

    __slots__ = (
        "count",
        "device",
        "dtype",
        "kind",
        "nbytes",
        "owner",
        "pointer",
        "readonly",
        "shape",
        "stream",
    )

    def __init__(
        self,
        pointer: int,
        count: int,
        dtype: str,
        shape: tuple[int, ...],
        readonly: bool,
        kind: str,
        owner: object,
        device: str = "cpu",
        stream: int | None = None,
    ) -> None:
        self.pointer = pointer
        self.count = count
        self.dtype = dtype
        self.shape = shape
        self.nbytes = count * ITEM_SIZES[dtype]
        self.readonly = readonly
        self.kind = kind
        self.owner = owner
        self.device = device
        self.stream = stream

    def __repr__(self) -> str:
        access = "readonly" if self.readonly else "writable"
        what = f"{self.kind} {self.dtype}{list(self.shape)}"
        return f"View({what} at {self.pointer:#x}, {self.device}, {access})"


def overlap(a: View, b: View) -> Literal["none", "same", "partial"]:
    """How two views share memory: not at all, begin and length equal, or anything in between."""
    if a.nbytes == 0 or b.nbytes == 0 or a.device != b.device:
        return "none"
    if a.pointer == b.pointer and a.nbytes == b.nbytes:
        return "same"
    if a.pointer < b.pointer + b.nbytes and b.pointer < a.pointer + a.nbytes:
        return "partial"
    return "none"


def check_overlap(source: View, target: View, what: str) -> None:
    """Raises ArrayError if `target` shares some, but not all, of its memory with `source`."""
    if overlap(source, target) == "partial":
        raise ArrayError(
            f"{what}: input and output overlap in part: input is bytes {source.pointer:#x} to "
            f"{source.pointer + source.nbytes:#x}, output {target.pointer:#x} to "
            f"{target.pointer + target.nbytes:#x}; pass the same array for both, or two that share "
            "no memory"
        )


# Checks that the kinds share


def is_c_contiguous(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    if 0 in shape:
        return True
    expected = itemsize
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1:
            if stride != expected:
                return False
            expected *= length
    return True


def strides_error(what: str, strides: Sequence[int], shape: Sequence[int], fix: str) -> ArrayError:
    order = ""
    if len(shape) > 1 and list(strides) == sorted(strides) and min(strides, default=0) > 0:
        order = " (Fortran order)"
    return ArrayError(
        f"{what}: array has strides {tuple(strides)} bytes at shape {tuple(shape)}{order}; only "
        f"C-contiguous arrays work: pass {fix}, which is a copy"
    )


def readonly_error(what: str, fix: str) -> ArrayError:
    return ArrayError(f"{what}: the array is read-only and would be written; {fix}")


def no_gpu_error(what: str, device: str) -> UnsupportedError:
    return UnsupportedError(
        f"{what}: the array is on {device}, but this communicator has no GPU engine; pass a copy "
        "on the host"
    )
