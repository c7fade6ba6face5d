"""What a case may change in torch's process-wide state, and how it is brought back.

For ranks that run one case after the other (suite_kept.py): afterwards torch is as it was in a
process in which no case has run. What is not here (modules that stay imported, warnings that come
once) no case minds, or it fails and is run again in new ranks.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

# How each is asked for, and set. (cudnn's flags are fixed once torch's code for tests is imported.)
SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (torch.get_default_device, torch.set_default_device),
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "detecting anomalies": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "deterministic algorithms": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "float32 matmul": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "warnings that come always": (torch.is_warn_always_enabled, torch.set_warn_always),
}


class State:
    """torch's state now, to be had again."""

    def __init__(self) -> None:
        self._values = {name: ask() for name, (ask, _) in SETTINGS.items()}
        self._seed = torch.initial_seed()

    def restore(self) -> None:
        """Raises what torch raises, after which this process is of no more use."""
        if dist.is_initialized():  # as it is after a case that a rank skips
            dist.destroy_process_group()
        dist.set_debug_level_from_env()
        for name, (ask, put) in SETTINGS.items():
            if ask() != self._values[name]:
                put(self._values[name])
        torch.manual_seed(self._seed)
        random.seed()
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
        if torch.cuda.is_initialized():
            self._restore_cuda()

    def _restore_cuda(self) -> None:
        """The GPUs idle, their memory given back, the first one current, and on default streams."""
        for device in range(torch.cuda.device_count()):
            if torch._C._cuda_hasPrimaryContext(device):  # none is made here
                torch.cuda.synchronize(device)
                torch.cuda.set_stream(torch.cuda.default_stream(device))
        torch.cuda.empty_cache()
        torch.cuda.set_device(0)
