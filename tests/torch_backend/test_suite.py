"""How torch's suite is run: each outcome is told, nothing hangs, a run that is cut off says what
it did not run; and what is compared.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
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


@contextlib.contextmanager
def kept(folder: Path, what: str) -> Iterator[subprocess.Popen[str]]:
    """A run of stand-ins in kept ranks, whose temporary files are in `folder`/tmp."""
    pytest.importorskip("torch")
    pytest.importorskip("expecttest", reason="torch's class for cases needs expecttest")
    (folder / "tmp").mkdir()
    worker = str(HERE / "workers" / "suite_of_kept_stand_ins.py")
    with subprocess.Popen(
        [sys.executable, worker, str(folder), what], text=True,
        env={**os.environ, "TMPDIR": str(folder / "tmp")},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as run:  # fmt: skip
        try:
            yield run
        finally:
            run.kill()


def left_in(folder: Path) -> list[str]:
    """Temporary files, but for the cache that torch makes when it is imported."""
    names = [path.name for path in (folder / "tmp").iterdir()]
    return [name for name in names if not name.startswith("torchinductor_")]


def found_in_kept(folder: Path, what: str) -> dict[str, Any]:
    with kept(folder, what) as run:
        out, errors = run.communicate(timeout=100)
    assert run.returncode == 0, out + errors
    assert left_in(folder) == []
    found: dict[str, Any] = json.loads(out)
    assert not [pid for pids in found["ranks"].values() for pid in pids if alive(int(pid))]
    return found


def alive(pid: int, seconds: float = 10) -> bool:
    """Is there such a process, after so long?"""
    state, until = Path(f"/proc/{pid}/stat"), time.monotonic() + seconds
    while time.monotonic() < until:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if state.read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.01)
                continue
        return False
    return True


def test_cases_in_kept_ranks(tmp_path: Path) -> None:
    told = found_in_kept(tmp_path, "all")
    outcomes = [(one["case"].removeprefix("test_"), one["outcome"]) for one in told["found"]]
    assert outcomes == [
        ("changes_all", "passed"),
        ("finds_all_as_new", "passed"),
        ("fails_after_others", "passed"),
        ("is_skipped", "skipped"),
        ("fails", "failed"),
        ("passes", "passed"),
        ("dies", "failed"),
        ("one_dies", "passed"),
        ("one_exits", "passed"),
        ("leaves_a_thread", "passed"),
        ("breaks_its_rank", "passed"),
        ("is_skipped", "skipped"),
        ("hangs", "failed"),
    ]
    again = {one["case"]: one["again"] for one in told["found"] if one["again"]}
    words = {
        "test_fails_after_others": "it is not the first",
        "test_fails": "as it should",
        "test_dies": "Expected exit code 0 but got 3",
        "test_hangs": "timed out",
    }
    assert again.keys() == words.keys()
    assert all(words[case] in again[case] for case in words)
    why = {one["case"]: one["why"] for one in told["found"] if one["outcome"] == "failed"}
    assert all(words[case] in why[case] for case in why)

    unfit = {one["case"]: one["unfit"] for one in told["found"] if one.get("unfit")}
    assert unfit.pop("test_leaves_a_thread").startswith("rank 0: threads are left: Thread-")
    assert unfit.pop("test_one_dies").startswith("rank 1: has ended")
    assert unfit.pop("test_breaks_its_rank").startswith("rank 0: has ended")
    log = (tmp_path / "one-test_breaks_its_rank.log").read_text()
    assert "AttributeError: 'State' object has no attribute 'restore'" in log
    assert list(unfit) == ["test_one_exits"]

    def ranks(case: str) -> list[set[str]]:
        """Those of each of its runs."""
        pids = told["ranks"][f"one-test_{case}"]
        return [set(pids[i : i + 2]) for i in range(0, len(pids), 2)]

    first, anew = ranks("fails_after_others")
    assert ranks("changes_all") == ranks("finds_all_as_new") == [first]
    assert ranks("is_skipped")[0] == ranks("fails")[0] == anew
    # After a failure, and where a rank is gone or not as new, the ranks are others.
    cases = ("fails", "dies", "one_dies", "one_exits", "leaves_a_thread", "hangs")
    later = [pids for case in cases for pids in ranks(case)]
    assert len(set.union(first, *later)) == 2 * (1 + len(later))
    assert ranks("passes")[0] == ranks("dies")[0]


def test_backends_take_turns_in_kept_ranks(tmp_path: Path) -> None:
    told = found_in_kept(tmp_path, "turns")
    turns = [(one["case"].removeprefix("test_"), one["backend"]) for one in told["found"]]
    assert turns == [
        (case, backend) for case in ("passes", "fails", "is_skipped") for backend in ("one", "two")
    ]
    assert not set(told["ranks"]["one-test_passes"]) & set(told["ranks"]["two-test_passes"])


def test_a_failed_case_gets_new_ranks_while_others_are_idle(tmp_path: Path) -> None:
    told = found_in_kept(tmp_path, "two at a time")
    assert {one["outcome"] for one in told["found"]} == {"passed", "skipped"}
    assert len(told["found"]) == 5
    pids = told["ranks"]["one-test_fails_after_others_late"]
    others = told["ranks"]["one-test_takes_a_second"] + told["ranks"]["one-test_passes"]
    assert len(pids) == 4 and not set(pids[2:]) & set(others)


def test_ranks_that_do_not_start(tmp_path: Path) -> None:
    told = found_in_kept(tmp_path, "never there")
    assert [one["outcome"] for one in told["found"]] == ["failed", "failed"]
    why = "did not start, but ended with status 1; RuntimeError: no GPU is here"
    assert all(one["why"].endswith(why) for one in told["found"])


def test_a_run_that_is_ended_leaves_nothing(tmp_path: Path) -> None:
    ranks = tmp_path / "one-test_hangs"
    with kept(tmp_path, "hangs") as run:
        until = time.monotonic() + 60
        while not ranks.exists() or ranks.read_text().count("\n") < 2:
            assert time.monotonic() < until and run.poll() is None
            time.sleep(0.01)
        run.send_signal(signal.SIGTERM)
        assert run.wait(30) == 143
    assert not any(alive(int(pid)) for pid in ranks.read_text().split())
    assert left_in(tmp_path) == []


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
    told = {**said(b="passed")["b"], "case": "b", "backend": "gloo", "again": "E\nError: x\n"}
    record.note({**told, "unfit": "rank 0"})
    about = json.loads(path.read_text())["about"]
    assert about["again"] == [["b", "gloo", "Error: x"]]
    assert about["unfit"] == [["b", "gloo", "rank 0"]]
    with pytest.raises(SystemExit, match="name another file"):
        suite.Record(path, {"of": {"torch": "3"}}, True)


def test_table(suite: ModuleType) -> None:
    text = suite.table({"gloo": said(a="passed", b="failed"), "collectives": said(a="skipped")}, {})
    first, second, failed = text.splitlines()
    assert first.split()[:7] == ["collectives", "0", "passed", "0", "failed", "1", "skipped"]
    assert second.split()[:5] == ["gloo", "1", "passed", "1", "failed"]
    assert failed == "gloo: b: "
