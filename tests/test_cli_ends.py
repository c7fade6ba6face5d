"""How commands end that cannot do what was asked, or are interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading

import pytest
from commands import start

from collectives import UnsupportedError, cli
from collectives.cli import _progress, explain


@pytest.mark.parametrize("ranks", ["--ranks", "--threads"])
def test_ctrl_c_says_one_line(ranks):
    command = ["bench", ranks, "2", "-b", "1K", "-e", "4K", "--seconds", "0.2", "-n", "9999999"]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    with subprocess.Popen(
        [sys.executable, "-m", "collectives", *command], env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        # What a shell runs in the background ignores SIGINT, and so does all that it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:  # fmt: skip
        watchdog = threading.Timer(60, os.killpg, (process.pid, signal.SIGKILL))
        watchdog.start()
        try:
            assert process.stdout is not None
            while "algorithm" not in process.stdout.readline():  # the table's head: it measures
                assert process.poll() is None
            os.killpg(process.pid, signal.SIGINT)
            _, err = process.communicate(timeout=30)
        finally:
            watchdog.cancel()
            process.kill()
    assert (process.returncode, err) == (130, "python -m collectives bench: interrupted\n")


def test_an_interrupt_takes_the_bar_away_and_only_rank_0_tells(capsys, monkeypatch):
    def interrupted(args):
        raise KeyboardInterrupt

    cleared = []
    monkeypatch.setattr(explain, "run", interrupted)
    monkeypatch.setattr(_progress, "clear_line", lambda: cleared.append(True))
    monkeypatch.setattr(threading, "enumerate", list)  # other tests may have left threads
    assert cli.main(["explain", "all_reduce"]) == 130
    assert capsys.readouterr().err == "python -m collectives explain: interrupted\n"
    assert cleared
    monkeypatch.setenv("COLLECTIVES_RANK", "1")
    assert cli.main(["explain", "all_reduce"]) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", ["explain", "run"])
def test_too_little_memory_is_told_in_words(capsys, monkeypatch, command):
    def greedy(*_, **__):
        raise MemoryError

    if command == "run":  # which has no part in `in_words`
        monkeypatch.setattr("collectives.cli.run.run", greedy)
    monkeypatch.setattr(explain, "explain", greedy)
    words = {"explain": ["all_reduce"], "run": ["-n", "2", "x.py"]}[command]
    assert cli.main([command, *words]) == 2
    assert "not enough memory for this; ask for fewer ranks" in capsys.readouterr().err


def test_explain_of_many_ranks_names_simulate(capsys):
    assert cli.main(["explain", "all_to_all", "--ranks", "4096", "--nodes", "512"]) == 0
    out = capsys.readouterr().out
    assert "runs " in out and "why " in out and "by size " in out and "costs" not in out
    assert "up to 512 ranks" in out
    assert "simulate all_to_all --topology dgx-h100 --nodes 512 --bytes 1M" in out
    assert cli.main(["explain", "all_reduce", "--ranks", "9000000"]) == 2
    assert "more than the 1048576 that can be described" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", [["chaos", "--json"], ["draw", "ring", "all_reduce", "-o"]], ids=lambda c: c[0]
)
def test_a_file_that_cannot_be_written_is_told_before_any_work(
    capsys, monkeypatch, tmp_path, command
):
    from collectives.cli import chaos, draw

    monkeypatch.setattr(chaos, "_play", lambda *_: pytest.fail("it played"))
    monkeypatch.setattr(chaos.threading, "active_count", lambda: 1)
    monkeypatch.setattr(draw, "schedule", lambda *_, **__: pytest.fail("it drew"))
    path = tmp_path / "none" / "found.svg"
    assert cli.main([*command, str(path)]) == 2
    assert f"{path} cannot be written: No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        ["doctor"],
        ["bench", "--threads", "2", "--json"],
        ["draw", "ring", "all_reduce", "-o"],
        ["tune", "--threads", "2", "-o"],
    ],
    ids=lambda c: c[0],
)
def test_a_pipe_is_not_waited_for(tmp_path, command):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    status, _, err = start(*command, path)
    assert status == 2 and f"{path} " in err and "is no file" in err


def test_a_table_has_an_end():
    status, _, err = start("tune", "--threads", 2, "-o", "/dev/full")
    assert status == 2 and "the table /dev/full is no file; name another" in err


@pytest.mark.parametrize("path", ["/dev/null", "/dev/stdout"])
def test_results_may_go_to_a_device_or_to_standard_output(path):
    status, out, err = start("bench", "--threads", 2, "-e", 64, "-n", 3, "--json", path)
    assert (status, err) == (0, "")
    assert ('"rows"' in out) == (path == "/dev/stdout")


@pytest.mark.parametrize("buffered", [False, True])
@pytest.mark.parametrize("command", [["--help"], ["draw", "--help"], ["info", "--ranks", "2"]])
def test_a_full_disk_is_told_once(command, buffered):
    environment = {**os.environ, "PYTHONUNBUFFERED": "" if buffered else "1"}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "collectives", *command], env=environment, text=True,
            stdout=full, stderr=subprocess.PIPE, timeout=60,
        )  # fmt: skip
    if command == ["draw", "--help"] and not buffered:
        assert (done.returncode, done.stderr) == (0, "")  # argparse says nothing
        return
    lines = done.stderr.splitlines()
    assert done.returncode == 2
    assert lines[0] == f"python -m collectives {command[0]}: [Errno 28] No space left on device"
    assert all(line.startswith("collectives run: rank 0 ") for line in lines[1:])


@pytest.mark.parametrize("buffered", [False, True])
@pytest.mark.parametrize(
    "command",
    [
        ["bench", "--ranks", "2", "-e", "64K", "--seconds", "0.05"],
        ["compare", "--ranks", "2", "-e", "64K", "--seconds", "0.05"],
        ["tune", "--ranks", "2", "--dry-run", "--collective", "broadcast", "-e", "4K"],
        ["info", "--ranks", "2"],
        ["bench", "--threads", "2", "-e", "64K", "--seconds", "0.05"],
    ],
    ids=lambda c: " ".join(c[:2]),
)
def test_who_reads_no_more_hears_no_more(command, buffered):
    environment = {**os.environ, "PYTHONUNBUFFERED": "" if buffered else "1"}
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run(
        [sys.executable, "-m", "collectives", *command], env=environment, text=True,
        stdout=theirs, stderr=subprocess.PIPE, timeout=60,
    )  # fmt: skip
    os.close(theirs)
    assert (done.returncode, done.stderr) == (1, "")


def test_chaos_on_gpus_names_what_is_missing_first(monkeypatch):
    from collectives.chaos import gauge

    monkeypatch.setattr(gauge._core, "has_cuda", False)
    monkeypatch.setattr(gauge._core, "device_count", lambda: (0, "this build has no GPU support"))
    with pytest.raises(UnsupportedError, match="--device cuda: this build has no GPU support"):
        gauge.Gauge()


@pytest.mark.parametrize("closed", ["stdout", "stderr", "both"])
@pytest.mark.parametrize("ranks", ["--ranks", "--threads"])
def test_standard_streams_may_be_closed(tmp_path, closed, ranks):
    file = tmp_path / "found.json"
    command = ["bench", ranks, "2", "-e", "64", "-n", "3", "--json", str(file)]
    ways = {"stdout": ">&-", "stderr": "2>&-", "both": ">&- 2>&-"}
    done = subprocess.run(
        [
            "sh",
            "-c",
            f'exec "$@" {ways[closed]}',
            "sh",
            sys.executable,
            "-m",
            "collectives",
            *command,
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(file.read_text())["rows"]


def test_a_refused_command_leaves_no_file(capsys, tmp_path):
    path, kept = tmp_path / "new.svg", tmp_path / "kept.svg"
    kept.write_text("kept")
    for file in (path, kept):
        assert cli.main(["draw", "pat", "all_reduce", "-o", str(file)]) == 2
        assert "cannot do all_reduce" in capsys.readouterr().err
    assert not path.exists() and kept.read_text() == "kept"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", "2", "--nodes", "3", "x.py"], "2 ranks cannot be divided into 3 nodes"),
        (["-n", "2", "--bind", "foo.invalid", "x.py"], "the address 'foo.invalid' is unknown"),
    ],
)
def test_run_ends_with_2_where_it_cannot_start(capsys, arguments, words):
    assert cli.main(["run", *arguments]) == 2
    assert words in capsys.readouterr().err
