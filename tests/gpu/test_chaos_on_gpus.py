"""Faults on arrays of GPUs: chosen rounds, drawn ones, and rounds that must not pass."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import launch
import pytest
from gpus import GPUS, MARK
from on_device import EMULATED

from collectives.chaos import gauge, plan

pytestmark = [MARK, pytest.mark.faults]


def run(*command: object, timeout: float = 110) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("COLLECTIVES_")}
    env["OPENBLAS_NUM_THREADS"] = "1"
    words = [sys.executable, *map(str, command)]
    return subprocess.run(words, capture_output=True, text=True, timeout=timeout, env=env)


def test_every_fault_and_every_way_of_calling() -> None:
    """Rounds at a time only where GPUs are emulated: real ones that are shared are slow."""
    got = run(launch.WORKERS / "every_fault.py", "gpus", 8 if EMULATED else 1)
    assert got.returncode == 0, got.stdout + got.stderr
    played = re.search(r"(\d+) rounds, 0 not as promised", got.stdout)
    assert played and int(played[1]) > 7, got.stdout


def test_rounds_that_are_drawn(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    what = ("--device", "cuda", "--rounds", 50, "--seed", 36, "--seconds", 0.1, "--within", 20)
    got = run("-m", "collectives", "chaos", *what, "--json", file)
    assert got.returncode == 0, got.stdout + got.stderr
    assert f"rounds of seed 36 on {GPUS} GPU" in got.stdout
    rounds = json.loads(file.read_text())["rounds"]
    assert 0 < len(rounds) < 50  # there was no time for all
    assert all(r["device"] == "cuda" and r["ranks"] <= max(2, GPUS) for r in rounds)


# What is done to the rank that is left in a round, and what must be said of it then.
WRONG = {
    "a result that is wrong in one byte": (
        "launch = on_gpu._OnGpu.finish\n"
        "def finish(self, what):\n"
        "    if self._out is not None and self._call.elements == 9000:\n"
        "        self._gpu.set(self._out[1].pointer, 0xee, 1)\n"
        "    launch(self, what)\n"
        "on_gpu._OnGpu.finish = finish\n",
        r"rank \d: WrongResult: all_reduce of 9000 on 2 ranks: 1 of 9000 elements are wrong",
    ),
    "a rank that hangs": (
        "stage._LIMIT['cuda'], stage._LEAVING = 2.0, 0.1\n"
        "def wait(self):\n"
        "    self.report('raised', kind='PeerDiedError', text='rank 1', peer=1, where='call')\n"
        "    time.sleep(60)\n"
        "rank.Rank._go_on = lambda self, comm: wait(self)\n",
        r"rank \d did not end",
    ),
    "a GPU that is of no further use": (
        "def copy(self, to, source, nbytes, kind):\n"
        "    if nbytes != on_gpu._TRIED:\n"
        "        whole(self, to, source, nbytes, kind)\n"
        "whole = on_gpu.Gpu.copy\n"
        "on_gpu.Gpu.copy = copy\n",
        r"rank \d: WrongResult: this rank's GPU does not keep",
    ),
    "memory that is not free again": (
        "gauge._RETURNING = 0.1\n"
        "free = gauge.Gauge.free\n"
        "asked = []\n"
        "gauge.Gauge.free = lambda self: [f - (len(asked) << 27) for f in free(self)"
        " if asked.append(f) is None]\n",
        r"\d+ MiB of GPU 0 are not free again",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_noticed(what: str) -> None:
    number = next(
        n
        for n in range(1000)
        if (p := plan.draw(1, n, 2, "cuda")).kind == "sigkill" and p.moment == "between calls"
    )
    breaking, words = WRONG[what]
    program = (
        "import sys, time\n"
        "from collectives.chaos import gauge, on_gpu, rank, stage\n"
        "from collectives.cli import main\n"
        f"{breaking}"
        "sys.exit(main(['chaos', '--device', 'cuda', '--seed', '1', '--ranks', '2', '--within', "
        f"'20', '--only', '{number}']))\n"
    )
    got = run("-c", program)
    assert got.returncode == 1, got.stdout + got.stderr
    assert re.search("WRONG: .*" + words, got.stdout), got.stdout
    assert "1 not as promised" in got.stdout


def test_a_gauge_counts_the_gpus() -> None:
    program = (
        "import contextlib\n"
        "from collectives.chaos import gauge\n"
        "gauge._RETURNING = 0.1\n"
        "with contextlib.closing(gauge.Gauge()) as one:\n"
        "    more = [n + (1 << 30) for n in one.free()]\n"
        "    print(one.count, one.lost(one.free()), one.lost(more))\n"
    )
    got = run("-c", program)
    lost = [f"1024 MiB of GPU {g}" for g in range(GPUS)]
    assert got.stdout.strip() == f"{GPUS} [] {lost}", got
    assert gauge.lost([gauge.SLACK + 5, 7], [5, 7]) == []
