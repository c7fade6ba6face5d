"""Runs many cases, some at a time, each in processes of its own.

A case is a process that is forked from this one, which has imported torch and in which nothing of
it has run; the ranks are forked from there. It leads a process group, so that all of it can be
killed, and has a folder and a log of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
import unittest
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

Outcome = dict[str, Any]  # case, backend, outcome, why, seconds

LATE = 20  # seconds that a case has, once it ought to have ended, to say why it has not


class Task(NamedTuple):
    """A case on a backend."""

    case: str
    backend: str


class Running(NamedTuple):
    """A task under way. `scratch` is its folder."""

    task: Task
    pid: int
    scratch: Any
    began: float

    @property
    def said(self) -> Path:
        return Path(self.scratch.name) / "outcome.json"


def free_port() -> int:
    """A port whose next one is free."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1]) - 1


class _Result(unittest.TestResult):
    """What came of one case."""

    def __init__(self) -> None:
        super().__init__()
        self.said = {"outcome": "passed", "why": ""}

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self.said = {"outcome": "skipped", "why": reason}

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self.said = {"outcome": "failed", "why": str(err[1])}

    addError = addFailure


def _be_a_case(task: Task, seconds: int, scratch: Path, log: Path) -> None:
    import suite_cases

    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    to = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(to, 1)
    os.dup2(to, 2)
    os.environ["TMPDIR"] = tempfile.tempdir = str(scratch)
    suite_cases.use(task.backend, seconds, free_port())
    result = _Result()
    suite_cases.Cases(task.case).run(result)
    part = scratch / "outcome.part"
    part.write_text(json.dumps(result.said))
    part.rename(scratch / "outcome.json")


def start(task: Task, seconds: int, logs: Path) -> Running:
    scratch = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    log = logs / f"{task.backend}-{task.case}.log"
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            _be_a_case(task, seconds, Path(scratch.name), log)
        finally:
            os._exit(0)  # nothing of the process that it was forked from is to be ended here
    with contextlib.suppress(OSError):  # the case does it too, whoever comes first
        os.setpgid(pid, pid)
    return Running(task, pid, scratch, time.monotonic())


def kill(running: Running) -> None:
    """Ends what is left of a case."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(running.pid, signal.SIGKILL)


def outcome(running: Running, otherwise: str) -> Outcome:
    """What a case said before its end; `otherwise` is why it said nothing."""
    said = {"outcome": "failed", "why": otherwise}
    if running.said.exists():
        said = json.loads(running.said.read_text())
    running.scratch.cleanup()
    seconds = round(time.monotonic() - running.began, 1)
    return {**running.task._asdict(), **said, "seconds": seconds}


def run(
    tasks: Iterable[Task],
    note: Callable[[Outcome], None],
    *,
    jobs: int,
    seconds: int,
    logs: Path,
    limit: float | None = None,
    grace: float = 20.0,
) -> list[Task]:
    """Runs the tasks, `jobs` at a time, and calls `note` with each outcome as it is there. A case
    may take `seconds`. None starts later than `limit` seconds from now, and what then runs is
    killed `grace` seconds later. Returns the tasks without an outcome.
    """
    waiting, under_way = deque(tasks), list[Running]()
    began = time.monotonic()
    last = float("inf") if limit is None else began + limit
    not_run: list[Task] = []
    try:
        while waiting or under_way:
            now = time.monotonic()
            if now > last:
                not_run += waiting
                waiting.clear()
            while waiting and len(under_way) < jobs:
                under_way.append(start(waiting.popleft(), seconds, logs))
            for running in list(under_way):
                ended = os.waitpid(running.pid, os.WNOHANG)[0] != 0
                late = now > running.began + seconds + LATE
                if not (ended or late or now > last + grace):
                    continue
                kill(running)
                if not ended:
                    os.waitpid(running.pid, 0)
                under_way.remove(running)
                if ended or late or running.said.exists():
                    why = "the case's process ended without a word"
                    why = why if ended else f"killed, not over after {seconds + LATE} s"
                    note(outcome(running, why))
                else:
                    running.scratch.cleanup()
                    not_run.append(running.task)
            time.sleep(0.01)
    finally:
        for running in under_way:
            kill(running)
    return not_run
