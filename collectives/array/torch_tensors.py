"""Tensors of torch."""

from __future__ import annotations

from typing import Any

from ..errors import ArrayError, ArrayTypeError
from .dtypes import TORCH_DTYPES, name_of_torch
from .kind import Kind
from .views import View, no_gpu_error, strides_error


class Torch(Kind):
    name = "torch"

    def __init__(self, torch: Any) -> None:
        from .torch_streams import current_stream

        self.torch = torch
        self._current_stream = current_stream

    def glance(self, x: Any) -> tuple[int, int, Any, int] | None:
        if not x.is_cuda or x.requires_grad or x.layout is not self.torch.strided:
            return None
        if not x.is_contiguous() or x.is_conj() or x.is_neg():
            return None
        return x.data_ptr(), x.numel(), x.dtype, x.get_device()

    def current_stream(self, ordinal: int) -> int:
        return self._current_stream(ordinal)

    def has_written(self, x: Any) -> None:
        if not x.is_inference():
            self.torch.autograd.graph.increment_version(x)

    def view(self, x: Any, writable: bool, what: str, gpu: bool) -> View:
        torch = self.torch
        dtype = TORCH_DTYPES.get(x.dtype) or name_of_torch(x.dtype, what)
        if x.layout is not torch.strided:
            raise ArrayTypeError(
                f"{what}: a tensor of layout {x.layout} has no dense memory; pass x.to_dense()"
            )
        if not x.is_contiguous():
            size = x.element_size()
            raise strides_error(what, [s * size for s in x.stride()], x.shape, "x.contiguous()")
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
            device = f"cuda:{x.get_device()}" if x.is_cuda else str(x.device)
            if not x.is_cuda:
                raise ArrayTypeError(
                    f"{what}: a tensor on {device} has no memory to work on; pass x.to('cpu')"
                )
            if not gpu:
                raise no_gpu_error(what, device)
            stream = self.current_stream(x.get_device())
        try:
            pointer = x.data_ptr()
        except RuntimeError as error:
            raise ArrayTypeError(
                f"{what}: this tensor ({type(x).__name__}) has no memory: {error}"
            ) from error
        return View(pointer, x.numel(), dtype, tuple(x.shape), False, "torch", x, device, stream)

    def new_like(self, x: Any, shape: tuple[int, ...]) -> Any:
        name_of_torch(x.dtype, "array")
        return self.torch.empty(shape, dtype=x.dtype, device=x.device)


class TorchWrapper(Kind):
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
