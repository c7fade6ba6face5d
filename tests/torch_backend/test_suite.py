"""How torch's suite is run: each outcome is told, nothing hangs, a run that is cut off says what
it did not run; and what is compared.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(HERE))
    spec = importlib.util.spec_from_file_location("suite", HERE / "suite.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def said(**outcomes: str) -> dict[str, Any]:
    return {case: {"outcome": o, "why": "", "seconds": 1.0} for case, o in outcomes.items()}


def test_outcomes_of_cases(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(HERE / "workers" / "suite_of_stand_ins.py"), str(tmp_path)],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    told = json.loads(run.stdout)
    outcomes = {one["case"]: (one["outcome"], one["why"]) for one in told["found"]}
    assert outcomes == {
        "test_passes": ("passed", ""),
        "test_fails": ("failed", "as it should"),
        "test_is_skipped": ("skipped", "for a reason"),
        "test_dies": ("failed", "the case's process ended without a word"),
        "test_hangs": ("failed", "killed, not over after 2 s"),
    }
    assert told["not_run"] == [["test_passes", "two"], ["test_hangs", "two"]]


def test_what_is_missing(suite: ModuleType) -> None:
    ours = said(a="passed", b="failed", c="failed", d="skipped", e="failed", f="failed")
    peer = said(a="passed", b="passed", c="failed", d="passed", e="skipped", f="passed")
    results = {"collectives": ours, "gloo": peer}
    assert suite.missing(results, "gloo", {"f": "a reason"}) == ["b", "d", "e"]
    assert suite.missing({"collectives": said(a="failed")}, "gloo", {}) == ["a"]


def test_outcomes_are_kept_for_the_next_run(suite: ModuleType, tmp_path: Path) -> None:
    path, about = tmp_path / "found.json", {"of": {"torch": "2", "device": "cpu", "world": 3}}
    record = suite.Record(path, about, True)
    record.note({"case": "a", "backend": "gloo", "outcome": "passed", "why": "", "seconds": 1.0})
    assert suite.Record(path, about, True).results == {"gloo": said(a="passed")}
    assert suite.Record(path, about, False).results == {}
    with pytest.raises(SystemExit, match="name another file"):
        suite.Record(path, {"of": {"torch": "3"}}, True)


def test_table(suite: ModuleType) -> None:
    text = suite.table({"gloo": said(a="passed", b="failed"), "collectives": said(a="skipped")}, {})
    first, second, failed = text.splitlines()
    assert first.split()[:7] == ["collectives", "0", "passed", "0", "failed", "1", "skipped"]
    assert second.split()[:5] == ["gloo", "1", "passed", "1", "failed"]
    assert failed == "gloo: b: "
