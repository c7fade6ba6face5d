"""The trainer with arrays of cupy on GPUs: cupy_training_worker.py has what is checked."""

from __future__ import annotations

from pathlib import Path

import launch
import pytest
from gpus import MARK, need_compiler

pytestmark = MARK
need_compiler()

WORKER = Path(__file__).resolve().parent / "cupy_training_worker.py"


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_stages_train_alike(ranks: int) -> None:
    result = launch.run(ranks, WORKER, env={"PYTHONWARNINGS": "default"}, timeout=110)
    assert "trained alike" in result.expect(status=0).output
