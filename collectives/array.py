"""Arrays in and out: the only file that knows numpy, torch, jax, cupy, DLPack and the buffer
protocol.

`view(x)` looks at an array without copying it and says where its elements lie. Accepted are

    numpy           arrays (0-d too), scalars as input, and the ml_dtypes dtypes bfloat16,
                    float8_e4m3fn, float8_e5m2
    torch           dense tensors; one that requires grad may be read (the call is invisible to
                    autograd) and, outside of `torch.no_grad()`, not written
    jax             arrays on one device, as input only: they are immutable, so a collective returns
                    a new one
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

import ctypes
import math
import sys
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from .errors import ArrayError, ArrayTypeError, UnsupportedError, did_you_mean

# Bytes per element of each dtype, under the names that all layers share.
ITEM_SIZES: dict[str, int] = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}

# Our name -> the name in ml_dtypes, for those that numpy itself lacks.
_ML_DTYPES = {
    "bfloat16": "bfloat16",
    "float8_e4m3": "float8_e4m3fn",
    "float8_e5m2": "float8_e5m2",
}
# What torch, ml_dtypes and jax call a dtype -> our name. The ml_dtypes name "float8_e4m3" is
# another format (it has infinities), so it is not in here although it looks like one of ours.
_FOREIGN_NAMES = {n: n for n in ITEM_SIZES if n != "float8_e4m3"} | {"float8_e4m3fn": "float8_e4m3"}

_ALIGNMENT = 64  # bytes; jax takes a host buffer without a copy only when aligned to this


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
    stream    for device arrays, the stream on which the elements are ready, as an integer; else
              None
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


# -------------------------------------------------------------------------------------------------
# The interface


def view(x: Any, *, writable: bool, what: str = "array", gpu: bool = False) -> View:
    """Looks at `x` without a copy.

    x         any array of the kinds in this file's docstring, of any shape, C-contiguous
    writable  True if the collective will write into it
    what      how errors name it, e.g. "all_reduce: x"
    gpu       True if the caller can work on device memory

    Raises ArrayTypeError for an object or a dtype that no collective works on; ArrayError for
    strides, read-only or immutable memory where it would be written, and for values that are not
    simply in memory; UnsupportedError for device memory without `gpu`.
    """
    kind = _KINDS.get(type(x))
    if kind is None:
        kind = _recognise(x, what)
    return kind.view(x, writable, what, gpu)


def is_immutable(x: Any) -> bool:
    """True if `x` is of a kind that is never written (jax arrays, numpy scalars, bytes).

    A collective on such an `x` returns a new array. A read-only numpy array is not immutable in
    this sense: writing to it is an error.
    """
    return (_KINDS.get(type(x)) or _recognise(x, "array")).immutable(x)


def new_like(x: Any, shape: Sequence[int]) -> Any:
    """An uninitialised, writable, C-contiguous array of `shape` with the kind, dtype and device of
    `x`.

    numpy gives numpy and torch gives torch. For all else this is a numpy array to work in; `finish`
    turns it into what the user gets. Raises what `view` raises, and UnsupportedError for device
    arrays of other libraries.
    """
    kind = _KINDS.get(type(x)) or _recognise(x, "array")
    return kind.new_like(x, tuple(int(n) for n in shape))


def finish(x: Any, buffer: Any) -> Any:
    """What the user gets for `buffer`, an array made by `new_like(x, ...)` and filled since.

    jax: a jax array on the device of `x` that takes over the buffer without a copy (so write to it
    no more). bytes and 1-d: bytes. numpy scalar and 0-d: a numpy scalar. All else: the buffer
    itself.
    """
    return (_KINDS.get(type(x)) or _recognise(x, "array")).finish(x, buffer)


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


def dtype_name(dtype: Any) -> str:
    """Our name of a dtype given as such a name, a numpy, torch, ml_dtypes or jax dtype, or a Python
    type.

    Raises ArrayTypeError for one that no collective works on.
    """
    if isinstance(dtype, str) and dtype in ITEM_SIZES:
        return dtype
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(dtype, torch.dtype):
        return _torch_dtype(dtype, "dtype")
    if isinstance(dtype, str) and dtype in _FOREIGN_NAMES:
        return _FOREIGN_NAMES[dtype]
    if dtype is None:
        raise ArrayTypeError(
            "dtype is None; pass a name such as 'float32', or a numpy or torch dtype"
        )
    try:
        known = np.dtype(dtype)
    except TypeError:
        hint = did_you_mean(str(dtype), ITEM_SIZES)
        raise ArrayTypeError(f"unknown dtype {dtype!r}; {hint}") from None
    return _numpy_dtype(known, "dtype")


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype of our dtype `name`; imports ml_dtypes for bfloat16 and float8."""
    if name in _ML_DTYPES:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, _ML_DTYPES[name]))
    if name not in ITEM_SIZES:
        raise ArrayTypeError(f"unknown dtype {name!r}; {did_you_mean(name, ITEM_SIZES)}")
    return np.dtype(name)


def from_pointer(
    pointer: int, shape: Sequence[int], dtype: str, *, owner: object, kind: str = "numpy"
) -> Any:
    """A writable host array on memory that someone else allocated: no copy, and `owner` lives as
    long as it does.

    pointer  address of the first element
    shape    lengths of the dimensions
    dtype    one of `ITEM_SIZES`
    kind     "numpy" or "torch" (which the user must have imported)
    """
    shape = tuple(int(n) for n in shape)
    element = numpy_dtype(dtype)
    count = math.prod(shape)
    if count == 0:
        array = np.empty(shape, element)
    else:
        raw = np.asarray(_Memory(pointer, count * element.itemsize, owner))
        array = raw.view(element).reshape(shape)
    if kind == "numpy":
        return array
    if kind != "torch":
        raise ArrayTypeError(
            f"unknown kind of array {kind!r}; {did_you_mean(kind, ['numpy', 'torch'])}"
        )
    torch = sys.modules.get("torch")
    if torch is None:
        raise UnsupportedError(
            "a torch tensor was asked for, but torch is not imported: import torch first"
        )
    tensor = torch.from_numpy(array.reshape(-1).view(np.uint8))
    return tensor.view(_torch_dtype_of(torch, dtype)).reshape(shape)


# -------------------------------------------------------------------------------------------------
# Checks that the kinds share


class _Memory:
    """Memory as numpy takes it; the array keeps this object, and this object its owner."""

    def __init__(self, pointer: int, nbytes: int, owner: object) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
        }


def _strides_error(what: str, strides: Sequence[int], shape: Sequence[int], fix: str) -> ArrayError:
    order = ""
    if len(shape) > 1 and list(strides) == sorted(strides) and min(strides, default=0) > 0:
        order = " (Fortran order)"
    return ArrayError(
        f"{what}: array has strides {tuple(strides)} bytes at shape {tuple(shape)}{order}; only "
        f"C-contiguous arrays work: pass {fix}, which is a copy"
    )


def _readonly_error(what: str, fix: str) -> ArrayError:
    return ArrayError(f"{what}: the array is read-only and would be written; {fix}")


def _no_gpu_error(what: str, device: str) -> UnsupportedError:
    return UnsupportedError(
        f"{what}: the array is on {device}, but this communicator has no GPU engine; pass a copy "
        "on the host"
    )


_NUMPY_DTYPES: dict[np.dtype[Any], str] = {
    np.dtype(name): name for name in ITEM_SIZES if name not in _ML_DTYPES
}


def _numpy_dtype(dtype: np.dtype[Any], what: str) -> str:
    """Our name of a numpy dtype; remembers it for the next time."""
    known = _NUMPY_DTYPES.get(dtype)
    if known is not None:
        return known
    known = _FOREIGN_NAMES.get(dtype.name)
    if known is not None and dtype.isnative and dtype.type.__module__.startswith("ml_dtypes"):
        _NUMPY_DTYPES[dtype] = known
        return known
    if not dtype.isnative and dtype.names is None:
        raise ArrayTypeError(
            f"{what}: dtype {dtype.str!r} is not in this machine's byte order; pass "
            f"x.astype(x.dtype.newbyteorder('='))"
        )
    if dtype.names is not None:
        raise ArrayTypeError(
            f"{what}: dtype has fields {dtype.names}; a collective works on one plain dtype: pass "
            "one field, or x.view('u1') to move bytes"
        )
    if dtype.kind in "mM":
        raise ArrayTypeError(f"{what}: dtype {dtype} is a date or a duration; pass x.view('int64')")
    if dtype.kind == "O":
        raise ArrayTypeError(
            f"{what}: dtype object holds Python objects, which live in one process only; pass an "
            "array of numbers"
        )
    if dtype.name == "float8_e4m3":
        raise ArrayTypeError(
            f"{what}: dtype float8_e4m3 of ml_dtypes (with infinities) is not supported; pass "
            "float8_e4m3fn"
        )
    raise ArrayTypeError(
        f"{what}: dtype {dtype} is not supported; supported: {', '.join(ITEM_SIZES)}"
    )


# PyArrayInterface, which `__array_struct__` points to, holds the data pointer at this offset. This
# way takes 0.4 µs; `x.ctypes.data` and `x.__array_interface__` take 0.9.
_DATA_OFFSET = 2 * ctypes.sizeof(ctypes.c_int) * 2 + 8 + 2 * ctypes.sizeof(ctypes.c_void_p)
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_pointer_at = ctypes.c_void_p.from_address


def _address(x: np.ndarray[Any, Any]) -> int:
    capsule: Any = x.__array_struct__
    return _pointer_at(_capsule_pointer(capsule, None) + _DATA_OFFSET).value or 0


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
    skip = -_address(raw) % _ALIGNMENT
    return raw[skip : skip + nbytes].view(dtype).reshape(shape)


# -------------------------------------------------------------------------------------------------
# One class per kind of array


class _Kind:
    """What there is to know about one kind of array; the defaults are those of a host array that
    numpy understands.
    """

    name = ""

    def view(self, x: Any, writable: bool, what: str, gpu: bool) -> View:
        raise NotImplementedError

    def immutable(self, x: Any) -> bool:
        return False

    def new_like(self, x: Any, shape: tuple[int, ...]) -> Any:
        return _aligned_empty(shape, numpy_dtype(self.view(x, False, "array", False).dtype))

    def finish(self, x: Any, buffer: Any) -> Any:
        return buffer


class _Numpy(_Kind):
    name = "numpy"

    def view(self, x: Any, writable: bool, what: str, gpu: bool) -> View:
        dtype = _NUMPY_DTYPES.get(x.dtype) or _numpy_dtype(x.dtype, what)
        flags = x.flags
        if not flags.c_contiguous:
            raise _strides_error(what, x.strides, x.shape, "numpy.ascontiguousarray(x)")
        readonly = not flags.writeable
        if readonly and writable:
            raise _readonly_error(what, "pass x.copy(), or out= another array")
        return View(_address(x), x.size, dtype, x.shape, readonly, "numpy", x)

    def new_like(self, x: Any, shape: tuple[int, ...]) -> Any:
        _numpy_dtype(x.dtype, "array")
        return np.empty(shape, x.dtype)


class _Masked(_Kind):
    name = "masked"

    def view(self, x: Any, writable: bool, what: str, gpu: bool) -> View:
        raise ArrayTypeError(
            f"{what}: a masked array would be combined without its mask; pass x.filled(value) or "
            "x.data"
        )


class _Scalar(_Kind):
    """numpy scalars: a 0-d array as input, a new scalar as result."""

    name = "scalar"

    def view(self, x: Any, writable: bool, what: str, gpu: bool) -> View:
        if writable:
            raise _readonly_error(what, "a numpy scalar is immutable: pass numpy.array(x)")
        array = np.asarray(x)
        dtype = _numpy_dtype(array.dtype, what)
        return View(_address(array), 1, dtype, (), True, "scalar", array)

    def immutable(self, x: Any) -> bool:
        return True

    def finish(self, x: Any, buffer: Any) -> Any:
        return buffer[()] if buffer.ndim == 0 else buffer


class _Buffer(_Kind):
    """Objects with the buffer protocol. While a view lives, Python refuses to resize them."""

    name = "buffer"

    def view(self, x: Any, writable: bool, what: str, gpu: bool) -> View:
        raw = memoryview(x)
        if not raw.c_contiguous:
            strides, shape = raw.strides or (), raw.shape or ()
            raise _strides_error(what, strides, shape, "bytearray(x) or numpy.ascontiguousarray(x)")
        if raw.readonly and writable:
            raise _readonly_error(
                what, f"a {type(x).__name__} of this sort cannot be written: pass a bytearray"
            )
        try:
            array = np.asarray(raw)
        except (ValueError, NotImplementedError):
            raise ArrayTypeError(
                f"{what}: elements of format {raw.format!r} are not supported; supported: "
                f"{', '.join(ITEM_SIZES)}"
            ) from None
        dtype = _numpy_dtype(array.dtype, what)
        return View(_address(array), array.size, dtype, array.shape, raw.readonly, "buffer", array)

    def immutable(self, x: Any) -> bool:
        return isinstance(x, bytes)

    def finish(self, x: Any, buffer: Any) -> Any:
        return buffer.tobytes() if isinstance(x, bytes) and buffer.ndim == 1 else buffer


class _Torch(_Kind):
    name = "torch"

    def __init__(self, torch: Any) -> None:
        self.torch = torch

    def view(self, x: Any, writable: bool, what: str, gpu: bool) -> View:
        torch = self.torch
        dtype = _TORCH_DTYPES.get(x.dtype) or _torch_dtype(x.dtype, what)
        if x.layout is not torch.strided:
            raise ArrayTypeError(
                f"{what}: a tensor of layout {x.layout} has no dense memory; pass x.to_dense()"
            )
        if not x.is_contiguous():
            size = x.element_size()
            raise _strides_error(what, [s * size for s in x.stride()], x.shape, "x.contiguous()")
        if x.is_conj() or x.is_neg():
            raise ArrayError(
                f"{what}: the tensor is a lazy conjugate or negative, so its memory does not hold "
                "its values; pass x.resolve_conj() or x.resolve_neg()"
            )
        if writable:
            if x.requires_grad and torch.is_grad_enabled():
                leaf = "a leaf that requires grad" if x.is_leaf else "part of an autograd graph"
                raise ArrayError(
                    f"{what}: the tensor is {leaf} and would be written, which autograd cannot "
                    "follow; pass x.detach() or x.grad, or call under torch.no_grad()"
                )
            if not x.is_inference():
                # Autograd notices, at backward, that a tensor it saved has been written since.
                torch.autograd.graph.increment_version(x)
        device, stream = "cpu", None
        if not x.is_cpu:
            device = str(x.device)
            if not x.is_cuda:
                raise ArrayTypeError(
                    f"{what}: a tensor on {device} has no memory to work on; pass x.to('cpu')"
                )
            if not gpu:
                raise _no_gpu_error(what, device)
            stream = int(torch.cuda.current_stream(x.device).cuda_stream)
        try:
            pointer = x.data_ptr()
        except RuntimeError as error:
            raise ArrayTypeError(
                f"{what}: this tensor ({type(x).__name__}) has no memory: {error}"
            ) from error
        return View(pointer, x.numel(), dtype, tuple(x.shape), False, "torch", x, device, stream)

    def new_like(self, x: Any, shape: tuple[int, ...]) -> Any:
        _torch_dtype(x.dtype, "array")
        return self.torch.empty(shape, dtype=x.dtype, device=x.device)


class _TorchWrapper(_Kind):
    """Tensor subclasses that hold other tensors, such as DTensor: their own memory is not their
    value.
    """

    name = "torch wrapper"

    def view(self, x: Any, writable: bool, what: str, gpu: bool) -> View:
        name = type(x).__name__
        fix = "x.to_local()" if hasattr(x, "to_local") else "the tensor inside"
        raise ArrayTypeError(
            f"{what}: a {name} wraps other tensors and has no memory of its own; pass {fix}"
        )


_TORCH_DTYPES: dict[Any, str] = {}


def _torch_dtype(dtype: Any, what: str) -> str:
    known = _FOREIGN_NAMES.get(str(dtype).removeprefix("torch."))
    if known is None:
        raise ArrayTypeError(
            f"{what}: dtype {dtype} is not supported; supported: {', '.join(ITEM_SIZES)}"
        )
    _TORCH_DTYPES[dtype] = known
    return known


def _torch_dtype_of(torch: Any, name: str) -> Any:
    foreign = _ML_DTYPES.get(name, name)
    dtype = getattr(torch, foreign, None)
    if dtype is None:
        raise UnsupportedError(f"torch {torch.__version__} has no dtype {foreign}")
    return dtype


class _Jax(_Kind):
    name = "jax"

    def __init__(self, jax: Any) -> None:
        self.jax = jax

    def view(self, x: Any, writable: bool, what: str, gpu: bool) -> View:
        if isinstance(x, self.jax.core.Tracer):
            raise ArrayTypeError(
                f"{what}: a jax array inside jit, grad or vmap has no values yet; call the "
                "collective outside, or through jax.experimental.io_callback"
            )
        if writable:
            raise _readonly_error(
                what, "jax arrays are immutable: use the array that the collective returns"
            )
        if x.is_deleted():
            raise ArrayError(f"{what}: this jax array was deleted or donated")
        devices = x.devices()
        if len(devices) != 1 or not x.is_fully_addressable:
            raise ArrayError(
                f"{what}: this jax array is spread over {len(devices)} devices; pass one shard of "
                "it: x.addressable_shards[i].data"
            )
        device = next(iter(devices))
        if device.platform != "cpu":
            return _cuda_view(x, writable, what, gpu, f"{device.platform}:{device.id}")
        # On the host this waits for the value and wraps the same memory (jax keeps the wrapper for
        # the next time).
        array = np.asarray(x)
        dtype = _numpy_dtype(array.dtype, what)
        if not array.flags.c_contiguous:
            raise _strides_error(what, array.strides, array.shape, "jax.numpy.array(x, copy=True)")
        return View(_address(array), array.size, dtype, array.shape, True, "jax", (x, array))

    def immutable(self, x: Any) -> bool:
        return True

    def finish(self, x: Any, buffer: Any) -> Any:
        return self.jax.device_put(buffer, x.sharding, may_alias=True)


class _Cuda(_Kind):
    name = "cuda"

    def view(self, x: Any, writable: bool, what: str, gpu: bool) -> View:
        ordinal = getattr(getattr(x, "device", None), "id", 0)
        return _cuda_view(x, writable, what, gpu, f"cuda:{ordinal}")

    def new_like(self, x: Any, shape: tuple[int, ...]) -> Any:
        raise UnsupportedError(f"cannot make a device array like a {type(x).__name__}; pass out=")


def _cuda_view(x: Any, writable: bool, what: str, gpu: bool, device: str) -> View:
    """Reads the CUDA array interface, version 3, which says everything but the device."""
    if not gpu:
        raise _no_gpu_error(what, device)
    if not hasattr(x, "__cuda_array_interface__"):
        raise ArrayTypeError(
            f"{what}: a {type(x).__name__} on {device} has no __cuda_array_interface__"
        )
    interface = x.__cuda_array_interface__
    element = getattr(x, "dtype", None)
    if not isinstance(element, np.dtype):
        element = np.dtype(interface["typestr"])
    dtype = _numpy_dtype(element, what)
    shape = tuple(interface["shape"])
    pointer, readonly = interface["data"]
    strides = interface.get("strides")
    if strides is not None and not _is_c_contiguous(shape, strides, element.itemsize):
        raise _strides_error(
            what, strides, shape, "a contiguous copy, e.g. cupy.ascontiguousarray(x)"
        )
    if readonly and writable:
        raise _readonly_error(what, "pass a copy, or out= another array")
    stream = interface.get("stream")
    return View(
        pointer, math.prod(shape), dtype, shape, readonly, "cuda", x, device, int(stream or 0)
    )


def _is_c_contiguous(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    if 0 in shape:
        return True
    expected = itemsize
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1:
            if stride != expected:
                return False
            expected *= length
    return True


# DLPack (https://dmlc.github.io/dlpack/latest/c_api.html). numpy.from_dlpack would do, but for
# bfloat16 and float8.


class _DLDevice(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _DLDataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    )


_DL_READONLY = 1  # bit of _DLVersioned.flags
_DL_HOST = (1, 3, 11)  # host memory; the same, pinned for CUDA or for ROCm
_DL_CUDA = (2, 13)  # device memory; managed memory
_DL_DTYPES = {
    **{(0, bits): f"int{bits}" for bits in (8, 16, 32, 64)},
    **{(1, bits): f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{(2, bits): f"float{bits}" for bits in (16, 32, 64)},
    **{(5, bits): f"complex{bits}" for bits in (64, 128)},
    (4, 16): "bfloat16",
    (6, 8): "bool",
    (10, 8): "float8_e4m3",
    (12, 8): "float8_e5m2",
}
_capsule_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_capsule_is_valid.restype = ctypes.c_int
_capsule_is_valid.argtypes = [ctypes.py_object, ctypes.c_char_p]


class _Dlpack(_Kind):
    name = "dlpack"

    def view(self, x: Any, writable: bool, what: str, gpu: bool) -> View:
        device, ordinal = x.__dlpack_device__()
        if device in _DL_CUDA:
            return _cuda_view(x, writable, what, gpu, f"cuda:{ordinal}")
        if device not in _DL_HOST:
            raise UnsupportedError(
                f"{what}: the array is on DLPack device {int(device)}; pass a copy on the host"
            )
        try:
            capsule = x.__dlpack__(max_version=(1, 0))
        except TypeError:  # an exporter from before DLPack 1.0
            capsule = x.__dlpack__()
        # The capsule is not consumed: it frees the tensor when the view, its only holder, goes.
        tensor, readonly = self._tensor(capsule, what)
        code, bits, lanes = tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes
        dtype = _DL_DTYPES.get((code, bits))
        if dtype is None or lanes != 1:
            raise ArrayTypeError(
                f"{what}: DLPack dtype (code {code}, {bits} bits, {lanes} lanes) is not supported; "
                f"supported: {', '.join(ITEM_SIZES)}"
            )
        size = ITEM_SIZES[dtype]
        shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
        if tensor.strides:
            strides = [tensor.strides[i] * size for i in range(tensor.ndim)]
            if not _is_c_contiguous(shape, strides, size):
                raise _strides_error(what, strides, shape, "a contiguous copy")
        if readonly and writable:
            raise _readonly_error(what, "pass a copy, or out= another array")
        pointer = (tensor.data or 0) + tensor.byte_offset
        return View(pointer, math.prod(shape), dtype, shape, readonly, "dlpack", (x, capsule))

    @staticmethod
    def _tensor(capsule: object, what: str) -> tuple[_DLTensor, bool]:
        if _capsule_is_valid(capsule, b"dltensor_versioned"):
            versioned = _DLVersioned.from_address(_capsule_pointer(capsule, b"dltensor_versioned"))
            if versioned.major != 1:
                raise UnsupportedError(
                    f"{what}: DLPack version {versioned.major} is not supported, only 1"
                )
            return versioned.tensor, bool(versioned.flags & _DL_READONLY)
        if _capsule_is_valid(capsule, b"dltensor"):
            return _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor")), False
        raise ArrayTypeError(f"{what}: __dlpack__ returned no DLPack tensor")


_KINDS: dict[type, _Kind] = {np.ndarray: _Numpy(), bytes: _Buffer(), bytearray: _Buffer()}


def _recognise(x: Any, what: str) -> _Kind:
    """The kind of an object whose type was not seen before; remembers it for the next time."""
    kind = _kind_of(x, what)
    _KINDS[type(x)] = kind
    return kind


def _kind_of(x: Any, what: str) -> _Kind:
    if isinstance(x, np.ndarray):
        masked = sys.modules.get("numpy.ma")
        return _Masked() if masked is not None and isinstance(x, masked.MaskedArray) else _Numpy()
    if isinstance(x, np.generic):
        return _Scalar()
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        wraps = hasattr(type(x), "__tensor_flatten__") or hasattr(type(x), "to_local")
        return _TorchWrapper() if wraps else _Torch(torch)
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(x, jax.Array):
        return _Jax(jax)
    if hasattr(x, "__cuda_array_interface__"):
        return _Cuda()
    try:
        memoryview(x)
    except TypeError:
        pass
    else:
        return _Buffer()
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return _Dlpack()
    name = type(x).__name__
    if isinstance(x, (bool, int, float, complex)):
        fix = f"pass a numpy array of a chosen dtype, e.g. numpy.array({x!r}, 'float32')"
    elif isinstance(x, (list, tuple)):
        fix = "pass numpy.array(x); the result could not be put back into a list"
    else:
        fix = "pass an array of numpy, torch or jax, or anything with a buffer or __dlpack__"
    raise ArrayTypeError(f"{what}: a {name} is not an array; {fix}")
