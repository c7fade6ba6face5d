"""Running the commands of `collectives` in tests, in this process or in one of their own."""

from __future__ import annotations

import subprocess
import sys

import launch

from collectives import cli
from collectives.bench import report

TINY = ("-b", "4", "-e", "64", "-f", "16", "-n", "3")


def run(capsys, *arguments):
    """Exit status, output and errors of a command in this process."""
    try:
        status = cli.main([str(a) for a in arguments])
    except SystemExit as end:
        status = end.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def start(*arguments, timeout=60):
    """The same in a process of its own."""
    _, environment = launch.command("run", 1)
    command = [sys.executable, "-m", "collectives", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
    return done.returncode, done.stdout, done.stderr


def check_rows(rows, **expected):
    """The rows of a result have all fields, times that can be, and what is expected."""
    assert rows
    for row in rows:
        assert tuple(row) == report.FIELDS
        assert row["time_us"] > 0
        assert row["p99_us"] >= row["time_us"]
        for name, value in expected.items():
            assert row[name] == value, (name, row)
