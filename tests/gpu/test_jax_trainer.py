"""The trainer with arrays of jax on GPUs: jax_training_worker.py has what is checked."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import launch
import pytest
from gpus import MARK, need_compiler

pytestmark = [MARK, pytest.mark.jax]
need_compiler()
pytest.importorskip("jax")
# jax has GPUs by a plugin of its own, without which its arrays lie on the host: the trainer with
# those is tested in tests/test_train_step.py. (Asked of what is installed: jax itself would take
# the GPU's memory to answer.)
if not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)):
    pytest.skip(
        "jax is installed without its plugin for CUDA: pip install jax[cuda13]",
        allow_module_level=True,
    )

WORKER = Path(__file__).resolve().parent / "jax_training_worker.py"
ENV = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONWARNINGS": "default"}


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_stages_train_alike(ranks: int) -> None:
    result = launch.run(ranks, WORKER, env=ENV, timeout=150)
    assert "trained alike" in result.expect(status=0).output
