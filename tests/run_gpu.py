"""What `make test-gpu` runs: every test that the GPUs here can do, from one to eight, and in
words what was left out and why.

    python tests/run_gpu.py             runs it
    python tests/run_gpu.py --list      only says what would run, and what would not

The status is 1 if a test failed, or if there is nothing to test on.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from collectives import _core

ROOT = Path(__file__).resolve().parents[1]
MOST = 8  # GPUs of a machine that are tried together
# Short tests with real peers: under the sanitizer a kernel takes a hundred times longer.
SANITIZED = "test_new_arrays_and_streams or test_other_counts_raise_everywhere"


class Machine(NamedTuple):
    """What there is to test on.

    gpus       how many
    why        why there is none
    cupy       cupy is installed
    nccl       cupy has NCCL
    sanitizer  path of compute-sanitizer, "" if there is none
    """

    gpus: int
    why: str = ""
    cupy: bool = True
    nccl: bool = True
    sanitizer: str = ""


class Step(NamedTuple):
    """One command, or the reason why it does not run ("" if it does)."""

    what: str
    command: list[str]
    why_not: str = ""


def find() -> Machine:
    """Looks at this machine."""
    gpus, why = _core.device_count()
    cupy = importlib.util.find_spec("cupy") is not None
    nccl = False
    if gpus and cupy:
        try:
            from cupy.cuda import nccl as module

            nccl = bool(getattr(module, "available", True))
        except ImportError:
            pass
    return Machine(gpus, why, cupy, nccl, shutil.which("compute-sanitizer") or "")


def steps(machine: Machine, python: str = sys.executable) -> list[Step]:
    """All that could run, in order, each with the reason if it cannot."""
    tests = [python, "-m", "pytest", "--quiet", "tests/gpu"]
    bench = [python, "-m", "collectives", "bench", "--device", "cuda", "--seconds", "0.02"]
    every = ["--collective", "all", "-b", "4", "-e", "1M", "-f", "64", "--mode", "both"]
    found = [Step("tests/gpu: thread ranks, processes on one GPU and on two", tests)]
    for n in (1, 2, 3, 8):
        ranks = f"{n} rank{'s' * (n > 1)}, threads"
        found.append(Step(f"every collective, {ranks}", [*bench, *every, "--threads", str(n)]))
    for n in range(2, MOST + 1):
        missing = "" if n <= machine.gpus else f"{n} GPUs are needed"
        command = [*bench, *every, "--ranks", str(n)]
        found.append(Step(f"every collective, {n} processes on {n} GPUs", command, missing))
    n = min(machine.gpus, MOST)
    missing = "" if machine.gpus > 1 else "2 GPUs are needed, NCCL takes one rank for each"
    missing = missing or ("" if machine.nccl else "this cupy finds no NCCL")
    beside = [*bench, *every, "--ranks", str(max(2, n)), "--peer", "nccl"]
    found.append(Step(f"every collective beside NCCL, on {max(2, n)} GPUs", beside, missing))
    for tool in ("memcheck", "racecheck"):
        missing = "" if machine.sanitizer else "compute-sanitizer is not on PATH (CUDA toolkit)"
        checked = [machine.sanitizer, "--tool", tool, "--error-exitcode", "1"]
        checked += ["--target-processes", "all", *tests, "-k", SANITIZED]
        found.append(Step(f"a part of tests/gpu under compute-sanitizer {tool}", checked, missing))
    if not machine.gpus:
        found = [step._replace(why_not=machine.why) for step in found]
    elif not machine.cupy:
        found = [step._replace(why_not="cupy is not installed") for step in found]
    return found


def left_out(plan: list[Step]) -> list[str]:
    """What does not run, by reason, in words."""
    reasons: dict[str, list[str]] = {}
    for step in plan:
        if step.why_not:
            reasons.setdefault(step.why_not, []).append(step.what)
    return [f"left out: {'; '.join(what)}: {why}" for why, what in reasons.items()]


def run(plan: list[Step]) -> int:
    """Runs what can run; 1 if a step failed or none could run."""
    environment = dict(os.environ)
    path = [str(ROOT / "tests"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    failed = 0
    for step in plan:
        if step.why_not:
            continue
        print(f"{step.what:64}", end="", flush=True)
        start = time.monotonic()
        done = subprocess.run(
            step.command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        seconds = time.monotonic() - start
        print(f" {'ok' if done.returncode == 0 else 'failed'}, {seconds:.0f} s", flush=True)
        if done.returncode:
            failed += 1
            print(done.stdout, flush=True)
    return 1 if failed or all(step.why_not for step in plan) else 0


def main(arguments: list[str]) -> int:
    machine = find()
    plan = steps(machine)
    print(f"{machine.gpus} GPU{'s' * (machine.gpus != 1)}")
    status = 0
    if "--list" in arguments:
        for step in plan:
            if not step.why_not:
                print(f"would run: {step.what}")
    else:
        status = run(plan)
    for line in left_out(plan):
        print(line)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
