"""Gradients that are torch tensors on a GPU: they wait until their bucket is full, and go there in
one call of torch. One by one a copy costs the host 40 µs, more than torch takes for backward itself
of a small layer.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .array.dtypes import TORCH_DTYPES, torch_dtype
from .array.streams import cupy_stream
from .array.torch_streams import current_stream

if TYPE_CHECKING:
    from .bucket_layout import Bucket, Slot


def dtype_of(grad: torch.Tensor) -> str | None:
    """The name of the dtype; None for a tensor that must be looked at more closely: one that is not
    dense in the memory of a GPU, or of a dtype that buckets do not know.
    """
    if not grad.is_cuda or grad.layout is not torch.strided:
        return None
    return TORCH_DTYPES.get(grad.dtype)


class Known:
    """What was found right for the gradient of a parameter, so that the next one like it is.

    place  its address in a lasting bucket
    """

    __slots__ = ("bucket", "dtype", "ordinal", "place", "shape", "waiting")

    def __init__(self, bucket: Bucket, waiting: Waiting, grad: torch.Tensor, place: int) -> None:
        self.bucket = bucket
        self.waiting = waiting
        self.dtype = grad.dtype
        self.shape = grad.shape
        self.ordinal = grad.get_device()
        self.place = place

    def like(self, grad: Any) -> bool:
        return (
            type(grad) is torch.Tensor
            and grad.dtype is self.dtype
            and grad.get_device() == self.ordinal
            and grad.shape == self.shape
            and grad.layout is torch.strided
        )


class Waiting:
    """The gradients of one bucket that wait. It keeps the tensors: nobody else may write them.

    dtype  of the bucket, in which gradients of one name are added up
    """

    def __init__(self, dtype: str) -> None:
        self.dtype = torch_dtype(torch, dtype)
        self._grads: dict[str, torch.Tensor] = {}
        self._added: set[str] = set()  # those that are added to what the bucket holds
        self._views: tuple[int, dict[str, torch.Tensor]] = (0, {})  # of the bucket at an address
        self.nbytes = 0

    def put(self, name: str, grad: torch.Tensor, *, add: bool) -> None:
        """Takes a gradient; one more of the same name is added to the first, as `gradients.put`
        adds them.
        """
        held = self._grads.get(name)
        if held is not None:
            if held.dtype is not self.dtype:
                self.nbytes -= held.nbytes
                held = self._grads[name] = held.to(self.dtype)
                self.nbytes += held.nbytes
            held.add_(grad)
            return
        self._grads[name] = grad
        self.nbytes += grad.nbytes
        if add:
            self._added.add(name)

    def put_all(self, grads: Mapping[str, torch.Tensor], *, add: bool) -> bool:
        """Takes all gradients of the bucket, in the order of its slots; False if some wait."""
        if self._grads:
            return False
        self._grads.update(grads)
        self.nbytes = sum(grad.nbytes for grad in grads.values())
        if add:
            self._added.update(grads)
        return True

    def flush(self, bucket: Bucket) -> None:
        """Puts all that wait into the bucket's memory, on torch's current stream. What is smaller
        than float32 is added in float32 and rounded once.
        """
        if not self._grads:
            return
        views = self._views_of(bucket)
        for names, do in (
            ([n for n in self._grads if n not in self._added], torch._foreach_copy_),
            ([n for n in self._grads if n in self._added], torch._foreach_add_),
        ):
            if names:
                do([views[n] for n in names], [self._grads[n] for n in names])
        self.discard()

    def discard(self) -> None:
        """Forgets all that wait."""
        self._grads.clear()
        self._added.clear()
        self.nbytes = 0

    def _views_of(self, bucket: Bucket) -> dict[str, torch.Tensor]:
        address = bucket.buffer.data.ptr
        if self._views[0] != address:
            whole = torch.from_dlpack(bucket.buffer)
            views = {
                s.name: whole[s.start : s.start + s.length].view(s.shape) for s in bucket.slots
            }
            self._views = (address, views)
        return self._views[1]


class TorchGradients:
    """The gradients of a bucketer that are tensors of torch on GPU `ordinal`.

    lasting  the buckets keep their memory, and gradients that were added up without a reduction;
             else these wait until the bucket has memory
    """

    def __init__(self, ordinal: int, *, lasting: bool) -> None:
        self._ordinal = ordinal
        self._lasting = lasting
        self._known: dict[str, Known] = {}
        self.nbytes = 0  # of those that wait for buckets that have no memory

    def like_before(self, name: str, grad: Any) -> Known | None:
        """What is known of the parameter, if the gradient is like the one before."""
        known = self._known.get(name)
        return known if known is not None and known.like(grad) else None

    def admit(self, bucket: Bucket, slot: Slot, grad: torch.Tensor) -> Known:
        """Notes that the gradient was found right."""
        if bucket.waiting is None:
            bucket.waiting = Waiting(bucket.dtype)
        place = 0
        if self._lasting:
            place = bucket.buffer.data.ptr + slot.start * bucket.buffer.itemsize
        known = self._known[slot.name] = Known(bucket, bucket.waiting, grad, place)
        return known

    def put(self, name: str, grad: torch.Tensor, known: Known, *, again: bool) -> None:
        """Keeps a gradient; `again`: the bucket holds one already that is to be added to."""
        waiting = known.waiting
        if not self._lasting:
            before = waiting.nbytes
            waiting.put(name, grad, add=False)
            self.nbytes += waiting.nbytes - before
        elif not grad.numel() or grad.data_ptr() != known.place:
            waiting.put(name, grad, add=again)
        elif grad.dtype is not waiting.dtype or not grad.is_contiguous():
            # It begins where its place does, and the elements lie otherwise.
            waiting.put(name, grad.clone(), add=False)
        # Else it was written in place.

    def put_all(self, bucket: Bucket, grads: Mapping[str, torch.Tensor], *, again: bool) -> bool:
        """`put` for all gradients of a bucket, in the order of its slots; False, and nothing done,
        if some of them wait already. They are like their parameters: torch has seen to that.
        """
        waiting = bucket.waiting
        if waiting is None or not waiting.put_all(grads, add=again and self._lasting):
            return False
        if not self._lasting:
            self.nbytes += waiting.nbytes
        return True

    def flush(self, bucket: Bucket) -> None:
        """The gradients of a bucket go there, if it has memory."""
        if bucket.waiting is not None and bucket.buffer is not None:
            if not self._lasting:
                self.nbytes -= bucket.waiting.nbytes
            bucket.waiting.flush(bucket)

    def discard(self, buckets: Sequence[Bucket]) -> None:
        """Forgets all gradients that wait for these buckets."""
        for bucket in buckets:
            if bucket.waiting is not None:
                bucket.waiting.discard()
        self.nbytes = 0

    def forget(self) -> None:
        """The buckets are others now."""
        self._known.clear()

    def stream(self) -> contextlib.AbstractContextManager[None]:
        """What cupy does in this block is ordered with what torch does."""
        return CupyFollows(self._ordinal)


_streams: dict[tuple[int, int], Any] = {}  # of cupy, by handles of torch's and their GPUs


class CupyFollows:
    """In this block cupy's current stream is torch's current stream of GPU `ordinal`."""

    __slots__ = ("_ordinal", "_stream")

    def __init__(self, ordinal: int) -> None:
        self._ordinal = ordinal
        self._stream: Any = None

    def __enter__(self) -> None:
        handle = current_stream(self._ordinal)
        cuda = sys.modules["cupy"].cuda
        if cuda.get_current_stream().ptr == handle:
            return
        key = handle, self._ordinal
        if key not in _streams:
            _streams[key] = cupy_stream(*key)
        self._stream = _streams[key]
        self._stream.__enter__()

    def __exit__(self, *raised: object) -> None:
        if self._stream is not None:
            self._stream.__exit__(*raised)
