"""What the commands share: help, errors, arguments and progress; and `info`."""

from __future__ import annotations

import argparse
import io
import json

import numpy as np
import pytest
from commands import run, start

import collectives
from collectives import _core
from collectives.bench import measuring
from collectives.bench.cases import Case
from collectives.cli import _common, _progress, _ranks

pytestmark = pytest.mark.usefixtures("no_launcher")

COMMANDS = ("info", "bench", "compare", "explain", "draw", "tune")


# ---- help and errors -----------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples(capsys, command):
    status, out, _ = run(capsys, command, "--help")
    assert status == 0
    assert "examples:" in out
    assert f"python -m collectives {command}" in out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("bench", "--collective", "all_redcue"), "did you mean 'all_reduce'?"),
        (("bench", "--collective", "all_reduce,brodcast"), "did you mean 'broadcast'?"),
        (("bench", "-a", "rnig"), "did you mean 'ring'?"),
        (("bench", "-a", "hierarchical(rnig, ring)"), "did you mean 'ring'?"),
        (("bench", "-d", "flaot32"), "did you mean 'float32'?"),
        (("bench", "-o", "summ"), "did you mean 'sum'?"),
        (("bench", "--peer", "glo"), "did you mean 'gloo'?"),
        (("bench", "-b", "4KB"), "KB may mean 1000 or 1024"),
        (("bench", "-b", "8", "-e", "4"), "below the smallest"),
        (("bench", "-f", "1"), "never end"),
        (("bench", "-i", "0"), "never end"),
        (("bench", "-n", "0"), "no whole number >= 1"),
        (("bench", "-n", "9" * 20), f"{'9' * 20} is more than 2147483647"),
        (("compare", "-w", "2147483648"), "2147483648 is more than 2147483647"),
        (("run", "-n", "9" * 20, "x.py"), f"{'9' * 20} is more than the 4194304 processes"),
        (("bench", "-r", "1"), "--root goes with broadcast, reduce, gather, scatter; leave it out"),
        (("bench", "--collective", "all_gather", "-o", "max"), "--op goes with all_reduce"),
        (("bench", "--collective", "barrier", "--order", "rank"), "--order goes with all_reduce"),
        (("compare", "-r", "1"), "--root goes with broadcast"),
        (("compare", "broadcast", "-o", "max"), "--op goes with all_reduce"),
        (("draw", "ring", "all_reduce", "-r", "1"), "--root goes with broadcast"),
        (("draw", "ring", "all_reduce", "-n", "5000"), "too many to draw; take fewer ranks"),
        (("explain", "barrier", "--bytes", "8"), "a barrier has no elements"),
        (("explain", "barrier", "-d", "int8", "--measure"), "a barrier has no elements"),
        (("bench", "--ranks", "2", "--threads", "2"), "give one of them"),
        (("bench", "--nodes", "2"), "give --ranks or --threads"),
        (("bench", "--threads", "2", "--nodes", "3"), "cannot be divided"),
        (("bench", "--threads", "2", "-r", "2", "--collective", "reduce"), "out of range"),
        (("bench", "--threads", "2", "-o", "avg", "-d", "int32"), "use sum and divide"),
        (("bench", "--threads", "2", "-a", "bruck"), "bruck cannot do all_reduce"),
        (("bench", "--threads", "2", "--peer", "mpi"), "collectives bench --peer mpi"),
        (("compare", "--threads", "2", "--peer", "mpi"), "collectives compare --peer mpi"),
        (("bench", "--threads", "2", "--peer", "gloo"), "--ranks instead of --threads"),
        (("bench", "--in-place", "--out-of-place"), "leave nothing"),
        (("bench", "--json", "/no/such/folder/file.json"), "/no/such/folder"),
        (("bench", "--import", "no_such_module"), "no_such_module"),
        (("bench", "--import", "no_such_file.py"), "no such file"),
        (("compare", "scater"), "did you mean 'scatter'?"),
        (("compare", "--only", "rign"), "did you mean 'ring'?"),
        (("compare", "barrier", "--png", "x.png"), "a barrier has none"),
        (("compare", "--threads", "2", "--png", "x.jpg"), "--png writes no .jpg; end it with .png"),
        (("compare", "--topology", "dgx-h100", "--png", "x.PDF"), "--png writes no .PDF"),
        (("plan", "--params", "7B", "--ranks", "8", "--png", "x.webp"), "--png writes no .webp"),
        (("explain", "all_reduce", "--ranks", "2", "--nodes", "3"), "cannot be divided"),
        (("explain", "all_reduce", "--transport", "smh"), "did you mean 'shm'?"),
        (("explain", "all_reduce", "--node", "0,x"), "no list with the node of each rank"),
        (("explain", "all_reduce", "--node", "0,1", "--ranks", "3"), "names 2 ranks"),
        (("explain", "all_reduce", "--transport", "shm", "--node", "0,1"), "of one node"),
        (("draw", "rign", "all_reduce"), "did you mean 'ring'?"),
        (("draw", "ring", "all_reduc"), "did you mean 'all_reduce'?"),
        (("draw", "bruck", "all_reduce"), "bruck cannot do all_reduce"),
        (("draw", "auto", "all_reduce"), "name an algorithm"),
        (("draw", "ring", "broadcast", "--root", "4"), "out of range"),
        (("draw", "ring", "all_reduce", "--format", "sgv"), "did you mean 'svg'?"),
        (("info", "--rank", "2"), "unrecognized arguments"),
        (("chaos", "--only", "3", "--rounds", "9"), "leave --rounds, --seconds and --jobs out"),
        (("chaos", "--only", "3", "--seconds", "9"), "--only plays one round"),
        (("chaos", "--only", "3", "--jobs", "2"), "--only plays one round"),
    ],
)
def test_errors_are_words_and_status_2(capsys, arguments, expected):
    status, _, err = run(capsys, *arguments)
    assert status == 2
    assert expected in err
    assert "Traceback" not in err


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_version(capsys, option):
    assert run(capsys, option) == (0, f"collectives {collectives.__version__}\n", "")


def test_ranks_are_not_started_by_a_rank(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    status, _, err = run(capsys, "info", "--ranks", "2")
    assert status == 2
    assert "rank of a launcher already" in err


def test_what_every_rank_finds_is_told_once():
    status, _, err = start("bench", "--ranks", 2, "-o", "band")
    assert status == 2
    assert err.count("band is not defined on float32") == 1
    assert "Traceback" not in err


# ---- info ----------------------------------------------------------------------------------------


def test_info(capsys):
    status, out, _ = run(capsys, "info", "--threads", 2)
    assert status == 0
    for word in ("ranks        2", "threads", _core.simd_level(), "MPI", "numpy", "avg"):
        assert word in out


def test_info_shows_settings_as_they_are_written(capsys, monkeypatch):
    monkeypatch.setenv("COLLECTIVES_ALGORITHM", "all_reduce:0-64K=ring;broadcast:ring")
    monkeypatch.setenv("COLLECTIVES_SECRET", "sixteen letters or so")
    status, out, _ = run(capsys, "info", "--json")
    assert status == 0
    shown = json.loads(out)["environment"]
    assert shown["COLLECTIVES_ALGORITHM"] == "all_reduce:0-64K=ring;broadcast:ring"
    assert shown["COLLECTIVES_SECRET"] == "(set)"


def test_info_of_processes_as_json():
    status, out, err = start("info", "--ranks", 2, "--nodes", 2, "--json")
    assert status == 0, err
    facts = json.loads(out)
    assert (facts["ranks"], facts["nodes"], facts["node_of_rank"]) == (2, 2, [0, 1])
    assert facts["met_through"] == "tcp"
    assert facts["cpu"]["cores"] >= 1
    assert facts["versions"]["numpy"] == np.__version__
    assert facts["limits"]["timeout_s"] > 0
    assert "missing" in facts["mpi"] or {"path", "version", "threads"} <= set(facts["mpi"])


def test_info_without_any_mpi(capsys, monkeypatch):
    from collectives.bench import machine

    monkeypatch.setattr(machine, "_ASK_MPI", "raise RuntimeError('cannot load MPI library')")
    status, out, _ = run(capsys, "info")
    assert status == 0
    assert "cannot load MPI library" in out or "mpi4py is not installed" in out


# ---- parts ---------------------------------------------------------------------------------------


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_shows_after_two_seconds_and_only_on_terminals(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(_progress.time, "monotonic", lambda: now[0])
    terminal, pipe = _Terminal(), io.StringIO()
    shown = _progress.Progress(4, stream=terminal)
    hidden = _progress.Progress(4, stream=pipe)
    for moment in (1.0, 3.0):
        now[0] = moment
        shown.step("all_reduce")
        hidden.step("all_reduce")
        if moment == 1.0:
            assert terminal.getvalue() == ""
    assert "50%" in terminal.getvalue() and "3 s left" in terminal.getvalue()
    shown.clear()
    assert terminal.getvalue().endswith("\r")
    assert pipe.getvalue() == ""


@pytest.mark.parametrize(("columns", "width"), [(200, 79), (80, 79), (40, 39), (0, 79)])
def test_progress_fits_into_a_line(monkeypatch, columns, width):
    size = _progress.os.terminal_size((columns, 24))
    monkeypatch.setattr(_progress.os, "get_terminal_size", lambda fd: size)
    monkeypatch.setattr(_progress, "_AFTER", 0.0)
    terminal = _Terminal()
    terminal.fileno = lambda: 2
    bar = _progress.Progress(1, stream=terminal)
    bar.step("all_reduce " * 9)
    bar.clear()
    assert [len(part) for part in terminal.getvalue().split("\r")] == [0, width, width, 0]


def test_sizes():
    assert measuring.sizes(4, 64, 4, None) == [4, 16, 64]
    assert measuring.sizes(0, 2, 2, None) == [0, 1, 2]
    assert measuring.sizes(4, 10, 2, 3) == [4, 7, 10]
    blocked = Case("all_gather", 3)
    assert measuring.elements_of(blocked, [4, 8, 16, 32]) == [3, 6]
    assert _common.size("64K") == 65536


def test_arguments_survive_the_way_to_the_ranks():
    from collectives.cli import bench

    def parse(words):
        parser = argparse.ArgumentParser()
        bench.add_arguments(parser)
        return parser.parse_args(words)

    words = ["-b", "1K", "-a", "ring", "-a", "hierarchical(ring, ring)", "--python", "--seconds=1"]
    first = parse([*words, "--ranks", "3"])
    again = parse(_ranks.arguments_of(first, without=("ranks",)))
    assert again.ranks is None
    for name in ("minbytes", "algorithm", "python", "seconds", "maxbytes", "collective"):
        assert getattr(first, name) == getattr(again, name)
