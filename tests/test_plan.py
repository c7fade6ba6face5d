"""The planner: the figures that are well known, and what it refuses."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

import collectives as cc
from collectives.cli import main
from collectives.train import Adam, Trainer
from collectives.train.plan import Job, plan


def told(capsys, *arguments):
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def test_seven_billion_parameters(capsys):
    """Rajbhandari et al., section 3.1 and figure 1: 16 bytes a parameter with Adam."""
    text = told(capsys, "--params", "7e9", "--ranks", "8")
    assert "16 bytes a parameter, 112 GB unsharded" in text
    assert "ZeRO-0  16 P = 112 GB" in text
    assert "ZeRO-1  4 P + 12 P / 8 = 28 + 84/8 = 38.5 GB" in text
    assert "ZeRO-2  2 P + 14 P / 8 = 14 + 98/8 = 26.25 GB" in text
    assert "ZeRO-3  16 P / 8 = 112/8 = 14 GB" in text
    assert "ZeRO-0  2(N-1)/N x 14 GB gradients = 24.5 GB" in text
    assert "(N-1)/N x 14 GB gradients + 2 x (N-1)/N x 14 GB parameters = 36.75 GB" in text


def test_without_master_weights(capsys):
    """2 bytes each of parameter, gradient and two moments; in float32 there are no masters."""
    seven = ("--params", "7e9", "--ranks", "8")
    assert "12 (optimizer state: 4 master weights + 2 x 4) = 16 bytes" in told(capsys, *seven)
    text = told(capsys, *seven, "--no-master-weights")
    assert "4 (optimizer state: 2 x 2) = 8 bytes a parameter, 56 GB unsharded" in text
    assert "ZeRO-1  4 P + 4 P / 8 = 28 + 28/8 = 31.5 GB" in text
    wide = (*seven, "--precision", "float32")
    assert told(capsys, *wide) == told(capsys, *wide, "--no-master-weights")


def test_the_figures_of_the_paper():
    """Figure 1: 7.5 B parameters on 64 ranks, GB: 120, 31.4, 16.6, 1.9."""
    memory = [s.memory / 1e9 for s in plan(Job(7.5e9, 64))]
    assert memory == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.05)


def test_hybrid_and_batch(capsys):
    arguments = "--params 1e9 --ranks 16 --node 4 --hybrid --micro 2 --accumulate 3 --tokens 10"
    text = told(capsys, *arguments.split())
    assert "global batch 96 samples = 2 (micro) x 16 (ranks) x 3 (accumulation), 960 tokens" in text
    added = "2 P of it whole gradients while micro-batches are added up"
    assert "ZeRO-1  4 P + 12 P / 4 = 4 + 12/4 = 7 GB\n" in text
    assert f"ZeRO-2  4 P + 14 P / 4 = 4 + 14/4 = 7.5 GB, {added}" in text
    assert f"ZeRO-3  2 P + 16 P / 4 = 2 + 16/4 = 6 GB, {added}" in text
    assert "6 x (4-1)/4 x 2 GB parameters" in text
    # All ranks get every sum, of all nodes, so that its order is that of ZeRO-0.
    assert text.count("2(N-1)/N x 2 GB gradients") == 4


def test_time_and_efficiency():
    """One rank has nothing to send; without overlap all of the traffic shows."""
    job = {"params": 1e9, "tokens": 1000, "flops": 1e14, "latency": 1e-12}
    compute = 6 * 1e9 * 1000 / 1e14
    for stage in plan(Job(ranks=1, **job)):
        assert (stage.seconds, stage.efficiency) == (pytest.approx(compute), 1.0)
    bare, *_ = plan(Job(ranks=2, bandwidth=1e11, overlap=0, **job))
    assert bare.seconds == pytest.approx(compute + 2e9 / 1e11)
    hidden, first, _, third = plan(Job(ranks=2, bandwidth=1e11, **job))
    assert hidden.seconds == pytest.approx(compute)
    assert first.seconds == pytest.approx(compute + 1e9 / 1e11)  # the gather after the step
    assert third.seconds == pytest.approx(compute)
    job["latency"] = 1e-3
    _, first, _, third = plan(Job(ranks=5, bandwidth=1e15, **job))
    assert first.exposed == pytest.approx(4e-3, rel=1e-2)  # messages of the gather, not hidden
    assert third.exposed == 0
    # Of four micro-batches the backward of the last alone hides the reduction, of 0.1 s.
    job |= {"latency": 1e-12, "accumulate": 4}
    last, *_ = plan(Job(ranks=2, bandwidth=2e10, **job))
    assert last.seconds == pytest.approx(4 * compute + 2e9 / 2e10 - compute * 2 / 3)
    del job["accumulate"]
    again, *_ = plan(Job(ranks=1, checkpoint=True, **job))
    assert again.seconds == pytest.approx(compute * 4 / 3)


@pytest.mark.parametrize("masters", [True, False])
@pytest.mark.parametrize(
    ("precision", "reduced"),
    [("float32", None), ("bf16", None), ("bf16", "float32"), ("float32", "bf16")],
)
def test_a_trainer_holds_what_is_planned(precision, reduced, masters):
    """With Adam, on 4 ranks."""

    def body(comm):
        params = {f"w{i}": np.zeros(4096, np.float32) for i in range(8)}
        how = {"params": params, "precision": precision, "master_weights": masters}
        how["reduce_dtype"] = "bfloat16" if reduced == "bf16" else reduced
        trainers = [Trainer(print, Adam(lr=1), comm, sharding=s, **how) for s in range(4)]
        return [sum(trainer.nbytes().values()) for trainer in trainers]

    job = Job(8 * 4096, 4, precision=precision, reduced=reduced, masters=masters)
    planned = [s.memory for s in plan(job)]
    assert cc.run_threads(4, body, timeout=30) == [planned] * 4


def test_files(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    png, figures = tmp_path / "plan.png", tmp_path / "plan.json"
    arguments = f"--params 3e8 --ranks 2 --tokens 4096 --flops 3e14 --png {png} --json {figures}"
    text = told(capsys, *arguments.split())
    assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 10_000
    told(capsys, "--params", "3e8", "--ranks", "2", "--png", str(tmp_path / "plan.svg"))
    assert (tmp_path / "plan.svg").read_bytes().startswith(b"<?xml")
    stages = json.loads(figures.read_text())["stages"]
    assert [s["stage"] for s in stages] == [0, 1, 2, 3]
    assert re.search(r"ZeRO-0 .* 100.0%", text)


def test_quantities_may_have_units(capsys):
    plain = ["--params", "7e9", "--ranks", "8", "--flops", "300e12", "--bandwidth", "50e9"]
    units = ["--params", "7B", "--ranks", "8", "--flops", "300 TFLOP/s", "--bandwidth", "400 Gb/s"]
    said = []
    for arguments in ([*plain, "--latency", "2e-6"], [*units, "--latency", "2 us"]):
        assert main(["plan", *arguments]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--params 0 --ranks 2", "no positive number"),
        ("--params 1e9 --ranks 6 --node 4 --hybrid", "6 ranks are no whole nodes of 4"),
        ("--params 1e9 --ranks 8 --node 4", "--node goes with --hybrid"),
        ("--params 1e9 --ranks 8 --bandwidth 1e9", "--bandwidth goes with --flops"),
        ("--params 1e9 --ranks 8 --latency 1e-3", "--latency goes with --flops"),
        ("--params 1e9 --ranks 8 --overlap 0", "--overlap goes with --flops"),
        ("--params 1e9 --ranks 8 --checkpointing", "--checkpointing goes with --flops"),
        ("--params 1e9 --ranks 6 --hybrid", "--hybrid needs --node"),
        ("--params 1e9 --ranks 2 --optimizer adma", "did you mean 'adam'"),
        (
            "--params 1e9 --ranks 2 --precision fp16 --no-master-weights",
            "second moments in float16",
        ),
        ("--params 1e9 --ranks 2 --overlap 2", "no share between 0 and 1"),
        ("--params 7X --ranks 2", "no positive number such as 7e9 or 7B"),
        ("--params 1e9 --ranks 2 --bandwidth 400Gb", "did you mean"),
        ("--params 1e9 --ranks 2 --bandwidth 0", "no positive number such as 100e9 or '400 Gb/s'"),
        ("--params 1e9 --ranks 2 --latency fast", "a time such as"),
        ("--params 1e9 --ranks 2 --json /proc/x", "/proc/x cannot be written: No such file"),
    ],
)
def test_what_is_refused(arguments, words, capsys):
    try:
        status = main(["plan", *arguments.split()])
    except SystemExit as end:
        status = end.code
    assert status == 2
    assert words in capsys.readouterr().err
