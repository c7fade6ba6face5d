"""NCCL's cases without a GPU: their tensors stay on the host, while the cases believe in two GPUs.

So what a backend does in these cases is tried everywhere, but for streams and kernels. What torch
itself refuses or cannot do on the host fails on every backend alike.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.cuda.nccl
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

GPUS = 2


def is_gpu(place: Any) -> bool:
    """Does this argument name a GPU: as a number, a device or a text?"""
    if isinstance(place, torch.device):
        return place.type == "cuda"
    if isinstance(place, str):
        return place.startswith("cuda")
    return type(place) is int


class OnHost(TorchFunctionMode):
    """In this mode tensors that are to be on a GPU are on the host."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if is_gpu(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to:
            args = (args[0], *("cpu" if is_gpu(a) else a for a in args[1:]))
        return func(*args, **kwargs)


def before_the_cases() -> None:
    """What torch's suite asks for while it is imported."""
    dist.is_nccl_available = dist.distributed_c10d.is_nccl_available = lambda: True
    torch.cuda.nccl.version = lambda: (2, 28, 9)


def believe(suite_cases: Any) -> None:
    """The cases, which are imported, see GPUs from now on."""
    from torch.testing._internal import common_distributed

    common_distributed.TEST_CUDA = True
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: GPUS
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda _=None: SimpleNamespace(
        name="pretended", major=9, minor=0, total_memory=1 << 37, multi_processor_count=132
    )
    for name in ("set_device", "synchronize", "empty_cache", "manual_seed", "manual_seed_all",
                 "init", "_lazy_init"):  # fmt: skip
        setattr(torch.cuda, name, lambda *_, **__: None)
    to, init = torch.nn.Module.to, DistributedDataParallel.__init__

    def module_to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_gpu(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return to(self, *("cpu" if is_gpu(a) else a for a in args), **kwargs)

    def ddp(
        self: Any,
        module: Any,
        device_ids: Any = None,
        output_device: Any = None,
        *args: Any,
        **more: Any,
    ) -> None:
        init(self, module, None, None, *args, **more)

    torch.nn.Module.to = module_to
    torch.nn.Module.cuda = lambda self, device=None: self
    DistributedDataParallel.__init__ = ddp

    class Cases(suite_cases.Cases):
        @classmethod
        def _run(cls, *args: Any, **kwargs: Any) -> None:
            with OnHost():
                super()._run(*args, **kwargs)

    suite_cases.Cases = Cases
