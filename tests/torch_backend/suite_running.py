"""Runs many cases, some at a time, in lanes.

A lane is a process that runs cases on one backend, one after the other. It is forked from this one,
which has imported torch and in which nothing of it has run; its ranks are its children. It leads a
process group, so that all of it can be killed. A case has a folder and a log of its own.

Without `keep` a lane takes one case, whose ranks torch starts. With it the lane starts its ranks
once (see suite_kept.py), and takes cases as long as they pass or are skipped. A case that fails in
ranks that ran others before it may fail because of those: it runs again, first in a new lane. So
that none waits for ranks to start, each backend that has cases left has a *spare* lane.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
import unittest
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import suite_kept

# case, backend, outcome, why, seconds; again: why it failed at first; unfit: see _be_a_lane
Outcome = dict[str, Any]

START = 120  # seconds that ranks have until they are there: to import torch, all at once
LATE = 20  # seconds that a case has, once it ought to have ended, to say why it has not
THERE = "there"  # what a lane says once cases can run in it


class Task(NamedTuple):
    """A case on a backend."""

    case: str
    backend: str


class Wanted(NamedTuple):
    """A task to be run. `again` is why it has failed, in ranks that had run others before."""

    task: Task
    again: str | None = None


_stopped = False


def stop(*_: Any) -> None:
    """A handler of SIGTERM, which ends `run`. It raises nothing itself: an exception is lost where
    Python does not let one through, as in a finalizer.
    """
    global _stopped
    _stopped = True


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


def _be_a_lane(
    line: Connection, backend: str, seconds: int, keep: suite_kept.Keep | None, scratch: Path
) -> None:
    """Runs the cases that come on the line, and says what came of each, and of one that has not
    failed in kept ranks why they are unfit for another one ("" if they are not). `scratch` is the
    lane's folder, with one in it for the case that runs.
    """
    import suite_cases

    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    environ, folder, ranks = dict(os.environ), os.getcwd(), None
    try:
        if keep is not None:
            suite_kept.write_to(str(scratch / "log"))
            suite_kept.surround({**environ, "TMPDIR": str(scratch)}, folder)
            ranks = suite_cases.Cases.kept = suite_kept.Ranks(keep)
            if lacking := ranks.missing(START):
                line.send(_failed(f"{lacking}; {_last_error(scratch / 'log')}"))
                return
        line.send(THERE)
        while True:
            case, log = line.recv()
            suite_kept.write_to(log)
            result = _Result()
            with tempfile.TemporaryDirectory(dir=scratch, ignore_cleanup_errors=True) as own:
                suite_kept.surround({**environ, "TMPDIR": own}, folder)
                suite_cases.use(backend, seconds, free_port())
                if ranks is not None:
                    ranks.log = log
                suite_cases.Cases(case).run(result)
                if ranks is not None and result.said["outcome"] != "failed":
                    result.said["unfit"] = ranks.unfit()
            line.send(result.said)
    except (EOFError, BrokenPipeError):  # the process that gives out the cases is gone
        return
    finally:
        if ranks is not None:
            ranks.kill()


def _failed(why: str) -> dict[str, Any]:
    return {"outcome": "failed", "why": why}


def _last_error(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return ([line for line in lines if re.match(r"[\w.]*Error\b", line)] or lines or [""])[-1]


class Lane:
    """A lane, as seen by who gives it cases: `given` so far, `wanted` the one that it runs, if any,
    `there` once it can.
    """

    def __init__(
        self, backend: str, seconds: int, keep: suite_kept.Keep | None,
        scratch: Path, others: list[Lane],
    ) -> None:  # fmt: skip
        scratch.mkdir()
        self.backend, self.given, self.there = backend, 0, False
        self.wanted: Wanted | None = None
        self._seconds, self._scratch = seconds, scratch
        self._began, self._ended = time.monotonic(), False
        self._line, line = multiprocessing.Pipe()
        sys.stdout.flush()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                for lane in (self, *others):  # whose ends must close when this process is gone
                    lane._line.close()
                _be_a_lane(line, backend, seconds, keep, scratch)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)  # nothing of the process that it was forked from is to be ended here
        line.close()
        with contextlib.suppress(OSError):  # the lane does it too, whoever comes first
            os.setpgid(self._pid, self._pid)

    @property
    def spare(self) -> bool:
        return self.given == 0

    def takes(self, wanted: Wanted) -> bool:
        """Can this one run here, now?"""
        return (
            self.wanted is None
            and self.backend == wanted.task.backend
            and (self.spare or wanted.again is None)
        )

    def give(self, wanted: Wanted, logs: Path) -> None:
        self.wanted = wanted
        self.given += 1
        log = (logs / f"{self.backend}-{wanted.task.case}.log").absolute()
        if wanted.again is None:
            log.write_text("")
        if self.there:
            self._began = time.monotonic()
        with contextlib.suppress(OSError):  # it has just ended, as `said` is to find out
            self._line.send((wanted.task.case, str(log)))

    def said(self) -> dict[str, Any] | None:
        """What came of the case, if it is over; that it failed, if it takes too long, or if the
        lane is not there in time or has ended.
        """
        self._ended = self._ended or os.waitpid(self._pid, os.WNOHANG)[0] != 0
        with contextlib.suppress(EOFError, OSError):
            while self._line.poll():
                word = self._line.recv()
                if word != THERE:
                    return dict(word)
                self._began, self.there = time.monotonic(), True
        if self._ended:
            return _failed("the case's process ended without a word")
        limit = LATE + (self._seconds if self.there else START)
        if (self.there and self.wanted is None) or time.monotonic() <= self._began + limit:
            return None
        what = "not over" if self.there else "its ranks were not there"
        return _failed(f"killed, {what} after {limit} s")

    def leave(self) -> float:
        """Its case is over: forgets it, and returns the seconds that it took."""
        self.wanted = None
        return round(time.monotonic() - self._began, 1)

    def end(self) -> None:
        """Kills all of it."""
        self._line.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        if not self._ended:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._ended = True
        shutil.rmtree(self._scratch, ignore_errors=True)


class _Lanes:
    """The lanes of a run, in a folder."""

    def __init__(
        self, folder: Path, logs: Path, seconds: int, keep: suite_kept.Keep | None
    ) -> None:
        self._folder, self._logs = folder, logs
        self._seconds, self._keep = seconds, keep
        self._lanes: list[Lane] = []
        self._started = 0
        self._no_spares: set[str] = set()  # backends whose spare lanes do not start

    def __iter__(self) -> Iterator[Lane]:
        return iter(list(self._lanes))

    def busy(self) -> int:
        return sum(lane.wanted is not None for lane in self._lanes)

    def _start(self, backend: str) -> Lane:
        self._started += 1
        scratch = self._folder / str(self._started)
        lane = Lane(backend, self._seconds, self._keep, scratch, self._lanes)
        self._lanes.append(lane)
        return lane

    def give(self, wanted: Wanted) -> None:
        """To a lane that has run others, if possible, else to a spare or a new one."""
        able = [lane for lane in self._lanes if lane.takes(wanted)]
        able.sort(key=lambda lane: (lane.spare, not lane.there))
        (able[0] if able else self._start(wanted.task.backend)).give(wanted, self._logs)

    def keep_spares(self, backends: set[str]) -> None:
        """Ends idle lanes of other backends, and starts a spare one for each of these, after those
        that have cases.
        """
        for lane in self:
            if lane.wanted is None and lane.backend not in backends:
                self.end(lane)
        if self._keep is not None:
            for backend in backends - self._no_spares:
                own = [lane for lane in self._lanes if lane.backend == backend]
                if all(lane.there and not lane.spare for lane in own):
                    self._start(backend)

    def end(self, lane: Lane, broken: bool = False) -> None:
        lane.end()
        self._lanes.remove(lane)
        if broken and lane.spare:
            self._no_spares.add(lane.backend)

    def end_all(self) -> None:
        for lane in self:
            self.end(lane)


def run(
    tasks: Iterable[Task],
    note: Callable[[Outcome], None],
    *,
    jobs: int,
    seconds: int,
    logs: Path,
    keep: suite_kept.Keep | None = None,
    limit: float | None = None,
    grace: float = 20.0,
) -> list[Task]:
    """Runs the tasks, `jobs` at a time, and calls `note` with each outcome as it is there. A case
    may take `seconds`. None starts later than `limit` seconds from now, and what then runs is
    killed `grace` seconds later. Returns the tasks without an outcome. SystemExit after `stop`.

    Tasks start in their order, whichever lanes are free: so a lane may wait for its backend's turn,
    and each backend may have `jobs` lanes, and its spare.
    """
    waiting = deque(Wanted(task) for task in tasks)
    began = time.monotonic()
    last = float("inf") if limit is None else began + limit
    not_run: list[Task] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        lanes = _Lanes(Path(folder), logs, seconds, keep)
        try:
            while waiting or lanes.busy():
                if _stopped:
                    raise SystemExit(143)
                now = time.monotonic()
                if now > last:
                    not_run += [wanted.task for wanted in waiting]
                    waiting.clear()
                while waiting and lanes.busy() < jobs:
                    lanes.give(waiting.popleft())
                for lane in lanes:
                    said, wanted = lane.said(), lane.wanted
                    if said is None and (wanted is None or now <= last + grace):
                        continue
                    took = lane.leave()
                    if said is None or said.get("unfit") != "":
                        lanes.end(lane, broken=said is not None)
                    if wanted is None:
                        continue
                    if said is None:
                        not_run.append(wanted.task)
                    elif said["outcome"] == "failed" and lane.given > 1:
                        waiting.appendleft(Wanted(wanted.task, again=said["why"] or "failed"))
                    else:
                        task = wanted.task._asdict()
                        note({**task, **said, "seconds": took, "again": wanted.again})
                lanes.keep_spares({wanted.task.backend for wanted in waiting})
                time.sleep(0.01)
        finally:
            lanes.end_all()
    return not_run
