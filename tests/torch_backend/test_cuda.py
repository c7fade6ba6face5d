"""torch.distributed on CUDA tensors: ranks on GPUs of their own where there are enough, else two
ranks that take turns on one. workers/on_gpus.py has the checks.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import launch
import pytest

from collectives import _core

WORKER = Path(__file__).resolve().parent / "workers" / "on_gpus.py"
QUIET = {"PYTHONWARNINGS": "default", "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}


@functools.cache
def why_not() -> str:
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    if not _core.has_cuda:
        return "this build of collectives has no CUDA"
    import torch

    return "" if torch.cuda.is_available() else "torch sees no GPU"


pytestmark = [pytest.mark.torch, pytest.mark.gpu]

CHECKS = (
    "every_reduction",
    "every_movement",
    "calls_that_are_like_ones_before",
    "sends_and_receives",
    "calls_follow_the_current_stream",
    "waiting_does_not_block_the_host",
    "a_barrier_waits_for_the_gpu",
    "memory_lives_until_the_call_has_ended",
    "tensors_outlive_their_group",
    "another_gpu_may_be_current",
    "callbacks_of_futures_see_the_result",
    "graphs",
    "compiled_functional_collectives",
    "ddp_equals_training_on_the_host",
    "fsdp2_equals_training_on_the_host",
)


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_on_gpus(ranks: int, name: str) -> None:
    if why_not():
        pytest.skip(why_not())
    if name == "another_gpu_may_be_current" and _core.device_count()[0] < 2:
        pytest.skip("needs a GPU that is not the current one: see tests/gpu/test_side_stream.py")
    result = launch.run(ranks, WORKER, name, launcher="fork", env=QUIET, timeout=110)
    assert "all checks passed" in result.expect(status=0).output


def test_all_checks_are_run() -> None:
    """Those of the worker, each by its name."""
    text = WORKER.read_text()
    found = [
        part.split("(")[0] for marker in ("@check\ndef ", "@on_gpu\ndef ")
        for part in text.split(marker)[1:]
    ]  # fmt: skip
    assert sorted(found) == sorted(CHECKS)


def test_the_checks_themselves_on_the_host() -> None:
    """What does not need a GPU, on CPU tensors: so the checks are right before a GPU sees them."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    env = QUIET | {"COLLECTIVES_TEST_DEVICE": "cpu"}
    result = launch.run(2, WORKER, launcher="fork", env=env, timeout=110)
    assert "all checks passed" in result.expect(status=0).output
