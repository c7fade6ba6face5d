"""Runs stand-ins for torch's cases in ranks that are kept, of torch's class for such cases:
`python suite_of_kept_stand_ins.py FOLDER [WHAT]`. Prints a line of JSON: the outcomes, and the
processes of the ranks of each case.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["WORLD_SIZE"] = "2"

import suite_kept
import suite_running
import suite_state
import torch
from suite_running import Outcome, Task
from torch.testing._internal import common_distributed

FOLDER = Path(sys.argv[1])
SKIPS = common_distributed.TEST_SKIPS
ran = 0  # cases, in this process


class Cases(common_distributed.MultiProcessTestCase):
    kept: Any = None
    world_size = 2

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(self.kept.process)

    @classmethod
    def _run(cls, rank: int, name: str, *args: Any, **kwargs: Any) -> None:
        global ran
        ran += 1
        with (FOLDER / f"{os.environ['BACKEND_HERE']}-{name}").open("a") as ranks:
            ranks.write(f"{os.getpid()}\n")
        super()._run(rank, name, *args, **kwargs)

    def test_changes_all(self) -> None:
        os.environ.update(CHANGED="yes", HOME="/nowhere")
        os.chdir("/")
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        torch.use_deterministic_algorithms(True)
        torch.set_num_threads(3)
        random.seed(1)

    def test_finds_all_as_new(self) -> None:
        assert "CHANGED" not in os.environ and os.environ["HOME"] != "/nowhere"
        assert Path.cwd() != Path("/")
        assert Path(os.environ["TMPDIR"]).is_dir()
        assert torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled()
        assert not torch.are_deterministic_algorithms_enabled()
        assert torch.get_num_threads() == 1

    def test_passes(self) -> None: ...

    def test_fails(self) -> None:
        raise ValueError("as it should")

    def test_fails_after_others(self) -> None:
        assert ran == 1, "it is not the first"

    def test_takes_a_second(self) -> None:
        time.sleep(1)

    def test_fails_after_others_late(self) -> None:
        time.sleep(1.5)
        assert ran == 1, "it is not the first"

    def test_is_skipped(self) -> None:
        sys.exit(SKIPS["small_worldsize"].exit_code)

    def test_dies(self) -> None:
        os._exit(3)

    def test_one_dies(self) -> None:
        if self.rank == 1:  # of which torch takes no notice
            os._exit(3)

    def test_one_exits(self) -> None:
        if self.rank == 1:
            sys.exit(3)

    def test_breaks_its_rank(self) -> None:
        delattr(suite_state.State, "restore")

    def test_leaves_a_thread(self) -> None:
        threading.Thread(target=time.sleep, args=(100,)).start()

    def test_hangs(self) -> None:
        while self.rank == 1:
            time.sleep(1)


class NeverThere:
    """The state of a rank that does not start."""

    def __init__(self) -> None:
        raise RuntimeError("no GPU is here")


def main() -> None:
    what = sys.argv[2] if len(sys.argv) > 2 else "all"
    torch.set_num_threads(1)
    common_distributed.TIMEOUT_DEFAULT = 2
    stand_in = types.ModuleType("suite_cases")
    stand_in.__dict__.update(
        Cases=Cases,
        FINE={0, *(skip.exit_code for skip in SKIPS.values())},
        State=NeverThere if what == "never there" else suite_state.State,
        use=lambda backend, *_: os.environ.update(BACKEND_HERE=backend),
    )
    sys.modules["suite_cases"] = stand_in
    if what == "hangs":
        common_distributed.TIMEOUT_DEFAULT = 100
        signal.signal(signal.SIGTERM, suite_running.stop)
    found: list[Outcome] = []
    cases = {
        "all": ["changes_all", "finds_all_as_new", "fails_after_others", "is_skipped", "fails",
                "passes", "dies", "one_dies", "one_exits", "leaves_a_thread", "breaks_its_rank",
                "is_skipped",
                "hangs"],
        "turns": ["passes", "passes two", "fails", "fails two", "is_skipped", "is_skipped two"],
        # The fourth runs while the third fails, and what has run the second is idle.
        "two at a time": ["passes", "takes_a_second", "fails_after_others_late",
                          "takes_a_second two", "is_skipped"],
        "never there": ["passes", "fails"],
        "hangs": ["hangs"],
    }[what]  # fmt: skip
    tasks = [case.partition(" ") for case in cases]
    not_run = suite_running.run(
        [Task(f"test_{case}", backend or "one") for case, _, backend in tasks],
        found.append, jobs=2 if what == "two at a time" else 1, seconds=100, logs=FOLDER,
        keep=suite_kept.Keep("fork", lambda: None),
    )  # fmt: skip
    assert not not_run
    ranks = {path.name: path.read_text().split() for path in FOLDER.glob("*-test_*[a-z]")}
    ranks = {name: pids for name, pids in ranks.items() if not name.endswith(".log")}
    print(json.dumps({"found": found, "ranks": ranks}))


if __name__ == "__main__":
    main()
