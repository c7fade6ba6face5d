"""Tensors as the core sees them: numbers for dtypes and ops, contiguous memory, lists as one.

The core works on contiguous memory. A tensor that is not contiguous goes through scratch, and so do
lists of tensors that do not follow each other in memory. What is then to be copied back is noted in
a `Call`, and done once the data are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..array.dtypes import ITEM_SIZES, ML_DTYPES
from ..calls import DTYPES, OPS
from ..errors import ArrayError, ArrayTypeError, UnsupportedError
from .tracks import Step

# torch's number of a ReduceOp (which is its hash) -> the core's op.
_OP_NAMES = ("sum", "avg", "prod", "min", "max", "band", "bor", "bxor", "premul_sum")
_PREMUL = _OP_NAMES.index("premul_sum")
_BYTE = DTYPES["uint8"]

# torch's dtype -> the core's number, and how many of those an element is.
_NUMBERS = {getattr(torch, ML_DTYPES.get(n, n)): (DTYPES[n], 1) for n in ITEM_SIZES}
_REDUCED = _NUMBERS | {torch.complex32: (DTYPES["float16"], 2)}

# On bool, sum and product are logical, as with NCCL: a sum that wrapped would be of no use.
_LOGICAL = {"sum": "bor", "prod": "band", "max": "bor", "min": "band"}


class Op(NamedTuple):
    """An op for one dtype.

    number   the core's
    divide   True for an average of integers: a sum, then divided; see `divide_integers`
    """

    number: int
    factor: complex = 1.0
    divide: bool = False


SUM = Op(OPS["sum"])


def op_for(reduce_op: Any, dtype: torch.dtype) -> Op:
    """The op for a torch ReduceOp on `dtype`; UnsupportedError where the dtype has none."""
    code = hash(reduce_op)
    if code == 0 and dtype is not torch.bool:
        return SUM
    if not 0 <= code < len(_OP_NAMES):
        raise UnsupportedError(f"unknown ReduceOp {reduce_op!r}")
    name = _OP_NAMES[code]
    if dtype is torch.bool:
        if name in ("avg", "premul_sum"):
            raise UnsupportedError(f"{name} is not defined on bool tensors")
        return Op(OPS[_LOGICAL.get(name, name)])
    if name == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        return Op(OPS["sum"], divide=True)
    if dtype.is_complex and name not in ("sum", "avg", "premul_sum") and dtype is torch.complex32:
        raise UnsupportedError(f"{name} is not defined on complex32 tensors")
    if (dtype.is_floating_point or dtype.is_complex) and name in ("band", "bor", "bxor"):
        raise UnsupportedError(f"{name} works on integers and bool, not on {dtype}")
    if code == _PREMUL:
        if not dtype.is_floating_point and not dtype.is_complex:
            raise UnsupportedError(f"PREMUL_SUM works on floats, not on {dtype}")
        factor = reduce_op.factor if hasattr(reduce_op, "factor") else None
        if factor is None:
            factor = reduce_op.__getstate__()[1]
        return Op(OPS[name], factor.item() if isinstance(factor, Tensor) else factor)
    return Op(OPS[name])


def reduced(dtype: torch.dtype) -> tuple[int, int]:
    """The core's dtype for a reduction, and how many of it an element is."""
    known = _REDUCED.get(dtype)
    if known is None:
        raise ArrayTypeError(f"tensors of {dtype} cannot be reduced; convert to a float or integer")
    return known


def moved(tensor: Tensor) -> tuple[int, int]:
    """The core's dtype for a movement: any dtype can be moved, as bytes if need be."""
    return _NUMBERS.get(tensor.dtype) or (_BYTE, tensor.element_size())


def expect_strided(tensor: Tensor) -> None:
    """Raises ArrayTypeError for a sparse tensor."""
    if tensor.layout is not torch.strided:
        raise ArrayTypeError(f"a tensor of layout {tensor.layout} cannot be used here: to_dense()")


# Of torch's own tensors and parameters. A subclass that takes operations over from torch has
# another one, and may have no memory of its own.
PLAIN = Tensor.__torch_dispatch__


def with_memory(tensor: Tensor) -> Tensor:
    """The tensor, or what it stands for: the result of a functional collective is waited for.
    ArrayTypeError if it has no memory of its own, as a DTensor or a fake tensor.
    """
    if type(tensor).__torch_dispatch__ is not PLAIN and hasattr(tensor, "trigger_wait"):
        tensor = tensor.trigger_wait()
    # A view of no memory has its offset for an address.
    if tensor.data_ptr() == tensor.storage_offset() * tensor.element_size() and tensor.numel():
        raise ArrayTypeError(
            f"a {type(tensor).__name__} without memory of its own cannot be used here: pass the "
            "tensor that holds the data, such as to_local() of a DTensor"
        )
    return tensor


def dense(tensor: Tensor) -> Tensor:
    """The tensor, or a contiguous copy."""
    expect_strided(tensor)
    if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def device_of(tensor: Tensor) -> Any:
    """None on the host, else the CUDA device."""
    if tensor.is_cpu:
        return None
    if not tensor.is_cuda:
        raise ArrayTypeError(f"a tensor on {tensor.device}: this backend works on cpu and cuda")
    return tensor.device


def follow_each_other(tensors: Sequence[Tensor]) -> bool:
    """True if the tensors lie behind each other in memory without a gap."""
    at = None
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            return False
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes == 0:
            continue
        pointer = tensor.data_ptr()
        if at is not None and pointer != at:
            return False
        at = pointer + nbytes
    return True


class Call:
    """A call on tensors: the steps of the core, and what surrounds them.

    steps   calls of the core
    after   what is done with the results, in order: copies out of scratch
    keep    memory that must live until then
    device  None, or the CUDA device of all tensors
    """

    def __init__(self, sample: Tensor | None, title: str = "") -> None:
        self._title = title
        self.steps: list[Step] = []
        self.after: list[Callable[[], Any]] = []
        self.keep: list[Any] = []
        self.device = None if sample is None else device_of(sample)
        self._inference = torch.is_inference_mode_enabled()

    @property
    def title(self) -> str:
        """The name of torch's profiler for it: its collective's, unless it was given another."""
        return self._title or (self.steps[0].collective if self.steps else "empty")

    @property
    def finish(self) -> Callable[[], None] | None:
        if not self.after:
            return None

        def run() -> None:
            # In the mode of the call, which may have been made elsewhere, or by another thread.
            with torch.inference_mode(self._inference), torch.no_grad():
                for do in self.after:
                    do()

        return run

    def source(self, tensor: Tensor) -> Tensor:
        """Memory to read the tensor from."""
        held = dense(self._checked(tensor))
        self.keep.append(held)
        return held

    def target(self, tensor: Tensor, *, loaded: bool = False) -> Tensor:
        """Memory to write the tensor to; with `loaded`, it holds its values first."""
        tensor = self._checked(tensor)
        if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
            self.keep.append(tensor)
            return tensor
        tensor = tensor.detach()
        scratch = dense(tensor) if loaded else torch.empty(
            tensor.shape, dtype=tensor.dtype, device=tensor.device
        )  # fmt: skip
        if loaded and scratch.data_ptr() == tensor.data_ptr():
            scratch = tensor.clone(memory_format=torch.contiguous_format)
        self.keep.append(scratch)
        self.after.append(lambda: tensor.copy_(scratch))
        return scratch

    def source_of(self, tensors: Sequence[Tensor]) -> Tensor:
        """Memory to read the tensors from, one behind the other."""
        # Another list: the caller may change its own while the call goes on.
        tensors = [self._checked(tensor) for tensor in tensors]
        if follow_each_other(tensors):
            self.keep.append(tensors)
            return next((t for t in tensors if t.numel()), tensors[0])
        flat = _together(tensors)
        self.keep.append(flat)
        return flat

    def target_of(self, tensors: Sequence[Tensor], *, loaded: bool = False) -> Tensor:
        """Memory to write the tensors to, one behind the other; with `loaded`, it holds their
        values first.
        """
        tensors = [self._checked(tensor) for tensor in tensors]
        if follow_each_other(tensors):
            self.keep.append(tensors)
            return next((t for t in tensors if t.numel()), tensors[0])
        lengths = [t.numel() for t in tensors]
        flat = _together(tensors) if loaded else tensors[0].new_empty(sum(lengths))
        self.keep.append(flat)

        def spread() -> None:
            for tensor, part in zip(tensors, flat.split_with_sizes(lengths), strict=True):
                tensor.copy_(part.view_as(tensor))

        self.after.append(spread)
        return flat

    def _checked(self, tensor: Tensor) -> Tensor:
        expect_strided(tensor)
        if device_of(tensor) != self.device:
            raise ArrayError(
                f"tensors on {self.device or 'cpu'} and on {tensor.device} in one call; move them "
                "to the same device"
            )
        return with_memory(tensor)


def _together(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors]).detach()


def divide_integers(tensor: Tensor, by: int) -> None:
    """Divides a contiguous tensor of integers in place, exactly, and cuts towards zero."""
    if tensor.dtype in (torch.int32, torch.int64):
        tensor.div_(by, rounding_mode="trunc")
    elif tensor.dtype is not torch.uint64:
        # torch divides no uint16 and uint32, and takes `by` to the dtype, where it may not fit.
        tensor.copy_(tensor.to(torch.int64).div_(by, rounding_mode="trunc"))
    else:
        # As signed numbers, since torch divides no others. Half of x is none below zero; the
        # quotient made of it, twice that of the half, lacks one at most.
        x = tensor.view(torch.int64)
        quotient = ((x >> 1) & torch.iinfo(torch.int64).max).div_(by, rounding_mode="trunc").mul_(2)
        x.copy_(quotient + (x - quotient * by >= by))


def expect(what: str, got: int, wanted: int) -> None:
    """Raises ArrayError unless a tensor has the number of elements that is needed."""
    if got != wanted:
        raise ArrayError(f"{what} has {got} elements, needed are {wanted}")
