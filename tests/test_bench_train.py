"""The benchmark of training against torch, on CPUs with a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from collectives.bench import machine

pytest.importorskip("torch")
pytestmark = pytest.mark.torch
SCRIPT = Path(__file__).parent.parent / "bench" / "train_gpu.py"


@pytest.mark.parametrize(
    ("ranks", "more"), [(1, ["--master-weights"]), (2, []), (2, ["--together"])]
)
def test_all_ways_are_told(ranks, more, tmp_path):
    told = tmp_path / "told.json"
    command = [sys.executable, "-m", "collectives", "run", "-n", str(ranks), str(SCRIPT), "--small"]
    command += ["--rounds", "1", "--steps", "2", "--warm", "0", "--batches", "1x16", *more]
    done = subprocess.run(
        [*command, "--json", str(told)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(told.read_text())
    assert found["header"]["ranks"] == ranks and found["header"]["commit"]
    rows = {row["name"]: row for row in found["rows"]}
    ours = [f"collectives {way}" for way in ("alone", "ZeRO-0", "ZeRO-1", "ZeRO-2", "ZeRO-3")]
    assert list(rows) == ["torch alone", "torch DDP", "torch FSDP2", *ours]
    assert all(row["median_ms"] > 0 and row["steps"] == 2 for row in rows.values())
    assert rows["torch alone"]["scaling_efficiency"] == 1
    stages = {rows[name]["first_loss"] for name in ours[1:]}
    assert len(stages) == 1  # bit for bit


def test_the_command_of_a_script_names_no_place_of_the_machine(monkeypatch):
    words = ["--rounds", "2", "--json", "/somewhere/out.json", "--name", "a b", "--json=x"]
    monkeypatch.setattr(sys, "argv", ["/somewhere/else/bench/train_gpu.py", *words])
    assert machine.command_of_script() == "bench/train_gpu.py --rounds 2 --name 'a b'"
