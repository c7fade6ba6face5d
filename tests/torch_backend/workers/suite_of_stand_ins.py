"""Runs stand-ins for torch's cases as suite.py runs those: `python suite_of_stand_ins.py FOLDER`.
Prints a line of JSON: the outcomes, what was not run, and which processes are left.
"""

from __future__ import annotations

import json
import os
import sys
import time
import types
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import suite_running
from suite_running import Outcome, Task

FOLDER = Path(sys.argv[1])


class Cases(unittest.TestCase):
    def test_passes(self) -> None:
        assert os.environ["BACKEND_HERE"] == "one"

    def test_fails(self) -> None:
        raise ValueError("as it should")

    @unittest.skip("for a reason")
    def test_is_skipped(self) -> None: ...

    def test_dies(self) -> None:
        os._exit(3)

    def test_hangs(self) -> None:
        child = os.fork()  # a rank, which must not outlive its case
        if child:
            (FOLDER / "rank").write_text(str(child))
        while True:
            time.sleep(1)


def alive(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


def main() -> None:
    stand_in = types.ModuleType("suite_cases")
    stand_in.__dict__["Cases"] = Cases
    stand_in.__dict__["use"] = lambda backend, *_: os.environ.update(BACKEND_HERE=backend)
    sys.modules["suite_cases"] = stand_in
    suite_running.LATE = 0
    found: list[Outcome] = []
    first = ["hangs", "passes", "fails", "is_skipped", "dies"]
    tasks = [Task(f"test_{name}", "one") for name in first]
    left = suite_running.run(tasks, found.append, jobs=2, seconds=2, logs=FOLDER)
    assert not left
    rank = int((FOLDER / "rank").read_text())
    late = [Task("test_hangs", "two"), Task("test_passes", "two")]
    not_run = suite_running.run(
        late, found.append, jobs=1, seconds=100, logs=FOLDER, limit=0.5, grace=0.5
    )
    for pid in (rank, int((FOLDER / "rank").read_text())):
        for _ in range(3000):
            if not alive(pid):
                break
            time.sleep(0.01)
        else:
            raise SystemExit(f"process {pid} is still there")
    print(json.dumps({"found": found, "not_run": not_run}))


if __name__ == "__main__":
    main()
