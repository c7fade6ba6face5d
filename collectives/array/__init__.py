"""Arrays in and out: the only package that knows numpy, torch, jax, cupy, DLPack and the
buffer protocol.

`view(x)` looks at an array without copying it and says where its elements lie. Accepted are

    numpy           arrays (0-d too), scalars as input, and the ml_dtypes dtypes bfloat16,
                    float8_e4m3fn, float8_e5m2
    torch           dense tensors; one that requires grad may be read (the call is invisible to
                    autograd) and, outside of `torch.no_grad()`, not written
    jax             arrays on one device, host or GPU, as input only: they are immutable, so a
                    collective returns a new one
    buffers         bytearray, array.array, memoryview, mmap, ctypes arrays; bytes as input
    others          with `__dlpack__` on the host, or with `__cuda_array_interface__`

torch, jax and cupy are never imported here: an object of theirs proves that the user has done so.

Only C-contiguous arrays work, and nothing is ever copied to make one: a silent copy would break
in-place calls and symmetric buffers. Fortran order is refused as well, although its memory has no
gaps: if one rank held C order and another Fortran order, elements that do not belong together would
be combined in silence. Elements need not be aligned.

A view of a numpy array takes about 1 µs, of a torch tensor about 1.5 µs, of a jax array about 5 µs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .dtypes import ITEM_SIZES, dtype_name, numpy_dtype
from .gpus import GpuFacts, gpu_facts
from .memory import from_pointer
from .namespace import device_name, empty, namespace, native, release
from .recognising import KINDS, recognise
from .streams import LEGACY_STREAM, Stream, stream_of
from .views import View, check_overlap, overlap


def view(x: Any, *, writable: bool, what: str = "array", gpu: bool = False) -> View:
    """Looks at `x` without a copy.

    x         any array of the kinds named above, of any shape, C-contiguous
    writable  True if the collective will write into it
    what      how errors name it, e.g. "all_reduce: x"
    gpu       True if the caller can work on device memory

    Raises ArrayTypeError for an object or a dtype that no collective works on; ArrayError for
    strides, read-only or immutable memory where it would be written, and for values that are not
    simply in memory; UnsupportedError for device memory without `gpu`.
    """
    kind = KINDS.get(type(x))
    if kind is None:
        kind = recognise(x, what)
    return kind.view(x, writable, what, gpu)


def is_immutable(x: Any, what: str = "array") -> bool:
    """True if `x` is of a kind that is never written (jax arrays, numpy scalars, bytes).

    A collective on such an `x` returns a new array. A read-only numpy array is not immutable in
    this sense: writing to it is an error.
    """
    return (KINDS.get(type(x)) or recognise(x, what)).immutable(x)


def new_like(x: Any, shape: Sequence[int]) -> Any:
    """An uninitialised, writable, C-contiguous array of `shape` with the kind, dtype and device of
    `x`.

    numpy gives numpy, torch gives torch and cupy gives cupy. For all else this is an array to work
    in, on the GPU for a jax array there, of numpy otherwise; `finish` turns it into what the user
    gets. Raises what `view` raises, and UnsupportedError for device arrays of other libraries.
    """
    kind = KINDS.get(type(x)) or recognise(x, "array")
    return kind.new_like(x, tuple(int(n) for n in shape))


def finish(x: Any, buffer: Any) -> Any:
    """What the user gets for `buffer`, an array made by `new_like(x, ...)` and filled since.

    jax: a jax array on the device of `x` that takes over the buffer without a copy: write to it no
    more, and on a GPU call this when the writing has ended, since jax knows of no other stream.
    bytes and 1-d: bytes. numpy scalar and 0-d: a numpy scalar. All else: the buffer itself.
    """
    return (KINDS.get(type(x)) or recognise(x, "array")).finish(x, buffer)


__all__ = [
    "ITEM_SIZES",
    "LEGACY_STREAM",
    "GpuFacts",
    "Stream",
    "View",
    "check_overlap",
    "device_name",
    "dtype_name",
    "empty",
    "finish",
    "from_pointer",
    "gpu_facts",
    "is_immutable",
    "namespace",
    "native",
    "new_like",
    "numpy_dtype",
    "overlap",
    "release",
    "stream_of",
    "view",
]
