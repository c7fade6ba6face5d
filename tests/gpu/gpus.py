"""For tests on GPUs: a module that imports this is skipped where there are none, and says so."""

from __future__ import annotations

import os

import pytest

from collectives import _core

# Before CUDA is used: what `run_threads` sets, too, for ranks that share a GPU.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
GPUS, WHY = _core.device_count()
if not GPUS:
    pytest.skip(f"no GPU: {WHY}", allow_module_level=True)
cupy = pytest.importorskip("cupy")
MARK = pytest.mark.gpu
# What is told from another GPU cannot be where there is one.
TWO_GPUS = pytest.mark.skipif(
    GPUS < 2, reason="one GPU here; tests/emulated, in continuous integration, has two"
)


def need_compiler() -> None:
    """Skips a module whose kernels cupy compiles, from CUDA C++, when they are first called: on the
    emulated CUDA runtime there is nothing that could, and no GPU to run what it makes. There
    tests/test_train_fused.py compiles the text of these kernels for the host and compares its bits,
    and tests/test_train_*.py have the trainer.
    """
    if not hasattr(cupy, "RawModule"):
        pytest.skip("the emulated cupy has no compiler for CUDA C++", allow_module_level=True)


def free_memory() -> int:
    """Bytes of the GPU; always the same on tests/emulated, where it is the host's."""
    return int(cupy.cuda.runtime.memGetInfo()[0])


__all__ = ["GPUS", "MARK", "TWO_GPUS", "cupy", "free_memory", "need_compiler"]
