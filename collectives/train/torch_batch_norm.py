"""Synchronised batch normalisation as a torch module, which also works on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from .batch_norm import sync_batch_norm

if TYPE_CHECKING:
    from ..communicator import Communicator


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Any, weight: Any, bias: Any, comm: Communicator, eps: float, told: list[Any]
    ) -> Any:
        parts = [None if t is None else t.detach() for t in (weight, bias)]
        y, found, ctx.back = sync_batch_norm(comm, x.detach().contiguous(), *parts, eps=eps)
        ctx.dtypes = [None if t is None else t.dtype for t in (x, weight, bias)]
        told.append(found)
        return _as(y, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = grads[0]
        found = ctx.back(grad.contiguous())
        dx, dw, db = (
            None if dtype is None else _as(g, dtype)
            for g, dtype in zip(found, ctx.dtypes, strict=True)
        )
        return dx, dw, db, None, None, None


class SyncBatchNorm(torch.nn.modules.batchnorm._BatchNorm):
    """Batch normalisation over the batches of all ranks of a communicator, for inputs of shape
    (samples, channels, ...). Forward and backward are collective, in training.

    comm  for this module alone, e.g. `comm.duplicate()`: its calls must not mix with those of
          gradients, which are reduced in the background. Modules may share it, since they run one
          after another.

    Other arguments as of torch.nn.BatchNorm1d.
    """

    def __init__(self, num_features: int, comm: Communicator, **more: Any) -> None:
        super().__init__(num_features, **more)
        self.comm = comm

    def _check_input_dim(self, input: Any) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm needs (samples, channels, ...), not {input.dim()}-d")

    def forward(self, input: Any) -> Any:
        self._check_input_dim(input)
        if not (self.training or self.running_mean is None):
            return super().forward(input)
        told: list[Any] = []
        y = _Normalise.apply(input, self.weight, self.bias, self.comm, self.eps, told)
        found = told[0]
        if self.training and self.track_running_stats and self.running_mean is not None:
            assert self.num_batches_tracked is not None and self.running_var is not None
            self.num_batches_tracked += 1
            share = self.momentum
            if share is None:
                share = 1.0 / float(self.num_batches_tracked)
            var = found.var * (found.elements / max(1, found.elements - 1))
            with torch.no_grad():
                for running, value in ((self.running_mean, found.mean), (self.running_var, var)):
                    new = torch.as_tensor(value, dtype=running.dtype, device=running.device)
                    running.lerp_(new, share)
        return y

    @classmethod
    def convert(cls, module: Any, comm: Communicator) -> Any:
        """The module with every BatchNorm in it replaced by one of these, with its parameters and
        statistics; one that stands in several places by the same one in all of them.
        """
        made = {
            part: cls._in_place_of(part, comm)
            for part in module.modules()
            if isinstance(part, torch.nn.modules.batchnorm._BatchNorm) and not isinstance(part, cls)
        }
        for parent in list(module.modules()):
            for name, child in list(parent._modules.items()):
                if child in made:
                    setattr(parent, name, made[child])
        return made.get(module, module)

    @classmethod
    def _in_place_of(cls, module: Any, comm: Communicator) -> Any:
        made = cls(
            module.num_features,
            comm,
            eps=module.eps,
            momentum=module.momentum,
            affine=module.affine,
            track_running_stats=module.track_running_stats,
        )
        for part in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
            setattr(made, part, getattr(module, part))
        made.training = module.training
        return made


def _as(x: Any, dtype: Any) -> Any:
    """An array of numpy or cupy as a tensor."""
    if hasattr(x, "get"):
        return torch.from_dlpack(x).to(dtype)
    if x.dtype.name == "bfloat16":
        x = x.astype("float32")
    return torch.from_numpy(x).to(dtype)
