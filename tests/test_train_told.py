"""What the trainer tells of itself: metrics, progress, traces; and what it does not import."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import models
import pytest
from training import make
from worlds import outcomes

import collectives as cc
from collectives.train import Metrics, Sampler, checkpoint
from collectives.train.progress import Bar


class Terminal:
    def __init__(self, is_one):
        self.text, self.is_one = "", is_one

    def isatty(self):
        return self.is_one

    def write(self, text):
        self.text += text

    def flush(self):
        pass


def test_metrics_and_progress(tmp_path, capsys):
    def body(comm):
        sampler = Sampler(96, comm, micro=4, accumulate=2, seed=3)
        x, y = models.data(96)
        trainer = make(comm, accumulate=2, metrics=tmp_path / "metrics.jsonl", trace=True)
        for indices in trainer.progress(sampler):
            trainer.step((x[indices], y[indices]))
        trainer.write_trace(tmp_path / "trace.json")
        return trainer.global_batch

    words = cc.run_threads(3, body, timeout=20)
    assert words == ["global batch 24 = 4 (micro) x 3 (ranks) x 2 (accumulation)"] * 3
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["samples"] == 24 and line["grad_norm"] > 0 for line in lines)
    assert all(0 <= line["overlap"] <= 100 and line["exposed"] >= 0 for line in lines)
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    told = capsys.readouterr()
    assert told.out == told.err == ""  # no terminal: not a word


def test_metrics_that_cannot_be_written_raise_on_all_ranks(tmp_path):
    def body(comm):
        make(comm, metrics=tmp_path / "missing" / "metrics.jsonl")

    ended = outcomes(2, body)
    assert all(isinstance(e, OSError) and "rank 0 cannot write" in str(e) for e in ended), ended


def test_metrics_that_cannot_be_written_any_more_end_no_step(tmp_path):
    """A disk that is full, say. Each rank has taken the step by then."""

    def body(comm):
        x, y = models.data(8)
        trainer = make(comm, metrics="/dev/full")
        trainer.step((x, y))
        trainer.step((x, y))
        return trainer.updates

    with pytest.warns(RuntimeWarning, match="metrics of step 1 and all after it") as told:
        assert cc.run_threads(2, body) == [2, 2]
    assert len(told) == 1


@pytest.mark.parametrize("call", ["save", "load"])
def test_a_rank_without_memory_tells_the_others(call, tmp_path, monkeypatch):
    """They wait for it, in the middle of a checkpoint."""
    pytest.importorskip("safetensors")
    where = {"save": (checkpoint, "_write"), "load": (Path, "open")}[call]
    ordinary = getattr(*where)

    def fails(path, *args, **more):
        if path.name == "rank-1.safetensors":
            raise MemoryError
        return ordinary(path, *args, **more)

    def body(comm):
        trainer = make(comm, (1, None))
        trainer.save(tmp_path)
        comm.barrier()
        monkeypatch.setattr(*where, fails)
        comm.barrier()
        with pytest.raises(cc.CollectiveError, match=r"^rank 1.*: MemoryError$"):
            getattr(trainer, call)(tmp_path)

    cc.run_threads(2, body, timeout=20)


def test_the_bar_is_for_terminals():
    metrics = Metrics(
        step=1, loss=0.5, lr=0.1, samples=100, grad_norm=math.nan, skipped=True, scale=1.0,
        seconds=0.1, exposed=0.002, overlap=90.0,
    )  # fmt: skip
    for rank, terminal, shown in [(0, True, True), (0, False, False), (1, True, False)]:
        stream = Terminal(terminal)
        bar = Bar(1, rank, stream)
        bar.step(metrics, "global batch 100")
        bar.close()
        assert stream.text.startswith("global batch 100\n") == shown
        assert ("step 1/1  loss 0.5000  1,000 samples/s  exposed 2.0 ms" in stream.text) == shown
    assert json.loads(metrics.json())["grad_norm"] is None


def test_numpy_users_import_nothing_else():
    """Neither torch, jax, cupy nor safetensors, and no drawing library."""
    code = (
        "import sys, collectives.train, collectives.bucketing, collectives.train.batch_norm;"
        "heavy = {'torch', 'jax', 'cupy', 'safetensors', 'matplotlib'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
