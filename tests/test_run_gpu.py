"""What `make test-gpu` picks on machines with any number of GPUs."""

from __future__ import annotations

import sys

import pytest
import run_gpu
from run_gpu import Machine, Step

from collectives import cli
from collectives.cli import bench


def runs(plan):
    return [step.what for step in plan if not step.why_not]


@pytest.mark.parametrize("gpus", range(1, 9))
def test_what_runs_follows_the_gpus(gpus):
    plan = run_gpu.steps(Machine(gpus))
    processes = {
        n for n in range(2, 9) if f"every collective, {n} processes on {n} GPUs" in runs(plan)
    }
    assert processes == set(range(2, gpus + 1))
    assert any(what.startswith("tests/gpu") for what in runs(plan))
    assert "every collective, 8 ranks, threads" in runs(plan)
    beside = [what for what in runs(plan) if "NCCL" in what]
    assert beside == ([f"every collective beside NCCL, on {gpus} GPUs"] if gpus > 1 else [])
    words = "\n".join(run_gpu.left_out(plan))
    for n in range(gpus + 1, 9):
        assert f"{n} processes on {n} GPUs: {n} GPUs are needed" in words
    assert "compute-sanitizer is not on PATH" in words


def test_all_of_it_on_a_whole_machine():
    plan = run_gpu.steps(Machine(8, sanitizer="/cuda/bin/compute-sanitizer"))
    assert run_gpu.left_out(plan) == []
    assert [s.command[:3] for s in plan if "sanitizer" in s.what] == [
        ["/cuda/bin/compute-sanitizer", "--tool", tool] for tool in ("memcheck", "racecheck")
    ]


def test_nothing_to_test_on_is_said_once_and_fails(capsys):
    plan = run_gpu.steps(Machine(0, "no driver"))
    (line,) = run_gpu.left_out(plan)
    assert line.startswith("left out: tests/gpu") and line.endswith(": no driver")
    assert run_gpu.run(plan) == 1
    without = run_gpu.steps(Machine(2, cupy=False))
    assert [step.why_not for step in without] == ["cupy is not installed"] * len(without)
    assert "this cupy finds no NCCL" in "".join(
        run_gpu.left_out(run_gpu.steps(Machine(2, nccl=False)))
    )


def test_the_commands_are_commands():
    """Options that the benchmark has, so that a step cannot fail for its command line."""
    for step in run_gpu.steps(Machine(8)):
        if "collectives" in step.command:
            at = step.command.index("bench")
            args = cli._parser("bench", bench).parse_args(step.command[at + 1 :])
            assert args.device == "cuda" and (args.ranks or args.threads)


def test_a_failing_step_is_shown_and_counts(capsys):
    plan = [
        Step("good", [sys.executable, "-c", "print('quiet')"]),
        Step("bad", [sys.executable, "-c", "raise SystemExit('what went wrong')"]),
        Step("no", ["/nowhere"], "no reason"),
    ]
    assert run_gpu.run(plan) == 1
    out = capsys.readouterr().out
    assert "quiet" not in out and "what went wrong" in out
    assert run_gpu.run(plan[:1]) == 0


def test_listing(capsys):
    assert run_gpu.main(["--list"]) == 0
    out = capsys.readouterr().out
    assert "would run" in out or "left out" in out
