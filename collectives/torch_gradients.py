"""Gradients that are torch tensors on a GPU: they wait until their bucket is full, and go there in
one call of torch. One by one a copy costs the host 40 µs, more than torch takes for backward itself
of a small layer.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from .array.dtypes import TORCH_DTYPES

if TYPE_CHECKING:
    from .bucket_layout import Bucket


def dtype_of(grad: torch.Tensor) -> str | None:
    """The name of the dtype; None for a tensor that must be looked at more closely: one that is not
    dense in the memory of a GPU, and of a dtype that buckets know.
    """
    if not grad.is_cuda or grad.layout is not torch.strided or grad.is_conj() or grad.is_neg():
        return None
    return TORCH_DTYPES.get(grad.dtype)


class Waiting:
    """The gradients of one bucket that wait. It keeps the tensors: nobody else may write them."""

    def __init__(self) -> None:
        self._grads: dict[str, torch.Tensor] = {}
        self._added: set[str] = set()  # those that are added to what the bucket holds
        self._views: tuple[int, dict[str, torch.Tensor]] = (0, {})  # of the bucket at an address
        self.nbytes = 0

    def __contains__(self, name: str) -> bool:
        return name in self._grads

    def put(self, name: str, grad: torch.Tensor, *, add: bool) -> None:
        """Takes a gradient; one more of the same name is added to the first."""
        held = self._grads.get(name)
        if held is not None:
            held.add_(grad)
            return
        self._grads[name] = grad
        self.nbytes += grad.nbytes
        if add:
            self._added.add(name)

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


@contextlib.contextmanager
def cupy_follows(ordinal: int) -> Iterator[None]:
    """In this block cupy's current stream is torch's current stream of GPU `ordinal`."""
    cuda = sys.modules["cupy"].cuda
    stream = torch.cuda.current_stream(ordinal).cuda_stream
    if cuda.get_current_stream().ptr == stream:
        yield
        return
    with cuda.ExternalStream(stream, ordinal):
        yield
