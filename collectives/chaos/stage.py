"""Where a round takes place: starts the ranks, deals the blows, gathers the reports.

Ranks are forked from this process, which has no threads and no communicator of its own, so that a
round takes milliseconds and not the import of the package for every rank.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import secrets
import select
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ..bootstrap import Server, listen
from ..children import die_with_parent
from .gauge import Gauge
from .plan import STOPPED, Plan
from .rank import Rank, seconds_starved

_LIMIT = {"cpu": 60.0, "cuda": 120.0}  # seconds of a round; far above what any may take
_LEAVING = 5.0  # seconds for a rank whose reports have ended
_DUMPING = 1.0  # seconds for a stuck rank to write its flight recorder


class Report(NamedTuple):
    rank: int
    what: str
    at: float
    facts: dict[str, Any]


class Outcome(NamedTuple):
    """What came of a round.

    blows     when each victim was hit, seconds of CLOCK_MONOTONIC
    statuses  exit status of each rank, negative for a signal
    stuck     ranks that had not come to their end at the limit, as their flight recorders have it
    left      what remained behind, in words
    starved   seconds in which this process or a rank was ready to run and got no processor
    """

    plan: Plan
    reports: list[Report]
    blows: dict[int, float]
    statuses: list[int]
    stuck: list[str]
    left: list[str]
    seconds: float
    starved: float


class Stage:
    """One round; with a `gauge`, the memory of GPUs is looked after too."""

    def __init__(self, plan: Plan, gauge: Gauge | None = None) -> None:
        self._plan = plan
        self._gauge = gauge
        self._reports: list[Report] = []
        self._blows: dict[int, float] = {}
        self._pending: list[tuple[float, int]] = []  # (when, rank) of blows to be dealt
        self._pids: list[int] = []
        self._pipes: dict[int, int] = {}  # descriptor -> rank
        self._partial: dict[int, bytes] = {}
        self._gate = (-1, -1)
        self._awaited = set(range(plan.ranks)) if plan.device == "cuda" else set[int]()

    def run(self) -> Outcome:
        before, starved = _traces(), seconds_starved()
        free = self._gauge.free() if self._gauge else []
        began = time.monotonic()
        # Bound and not listening, so the port is ours until rank 0 listens on it.
        reserved = socket.socket()
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        secret = secrets.token_hex(16)
        self._gate = os.pipe()
        stuck: list[str] = []
        with tempfile.TemporaryDirectory(prefix="collectives-chaos-") as folder:
            server = 0
            try:
                if self._plan.server == "apart":
                    reserved.close()
                    listener = listen("127.0.0.1", port)
                    server = self._fork(lambda: self._serve(listener, secret))
                    listener.close()
                for rank in range(self._plan.ranks):
                    self._start(rank, port, secret, folder)
                self._watch(began + _LIMIT[self._plan.device])
                stuck = self._end_stuck(Path(folder))
            finally:
                statuses = [_reap(pid, kill=True) for pid in self._pids]
                if server:
                    _reap(server, kill=True)
                reserved.close()
                for descriptor in (*self._pipes, *self._gate):
                    os.close(descriptor)
        seconds = time.monotonic() - began
        left = [f"{name} is left" for name in sorted(_traces() - before)]
        if self._gauge:
            left += [f"{words} are not free again" for words in self._gauge.lost(free)]
        hungry = [r.facts["starved"] for r in self._reports if "starved" in r.facts]
        hungry.append(seconds_starved() - starved)
        return Outcome(
            self._plan,
            self._reports,
            self._blows,
            statuses,
            stuck,
            left,
            seconds,
            max(hungry),
        )

    # ---- processes -------------------------------------------------------------------------------

    def _fork(self, body: Callable[[], None], last: Callable[[], None] | None = None) -> int:
        """A child that runs `body`; `last` comes just before its end, if it has failed."""
        stage = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            die_with_parent(stage)
            # What this process has inherited is not its own.
            atexit._clear()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            for descriptor in self._pipes:
                os.close(descriptor)
            body()
            status = 0
        except SystemExit as leaving:
            status = int(leaving.code or 0)
        except BaseException:
            status = 1
        finally:
            # As the end of an interpreter: handlers, objects, then the process.
            with contextlib.suppress(BaseException):
                atexit._run_exitfuncs()
                gc.collect()
                if status and last is not None:
                    last()
            os._exit(status)
        raise AssertionError("not reached")

    def _serve(self, listener: socket.socket, secret: str) -> None:
        server = Server(listener, size=self._plan.ranks, secret=secret.encode(), host="the stage")
        server.start()
        while True:
            signal.pause()

    def _start(self, rank: int, port: int, secret: str, folder: str) -> None:
        ours, theirs = os.pipe()

        def body() -> None:
            os.close(ours)
            for name in [name for name in os.environ if name.startswith("COLLECTIVES_")]:
                del os.environ[name]
            os.environ.update(
                COLLECTIVES_RANK=str(rank),
                COLLECTIVES_WORLD_SIZE=str(self._plan.ranks),
                COLLECTIVES_ADDR="127.0.0.1",
                COLLECTIVES_PORT=str(port),
                COLLECTIVES_SECRET=secret,
                COLLECTIVES_RENDEZVOUS="rank0" if self._plan.server == "rank 0" else "launcher",
                COLLECTIVES_DUMP=folder,
            )
            actor.run()

        actor = Rank(self._plan, rank, theirs, self._gate[0])
        self._pids.append(self._fork(body, lambda: actor.report("ends")))
        os.close(theirs)
        self._pipes[ours] = rank
        self._partial[ours] = b""

    # ---- watching --------------------------------------------------------------------------------

    def _watch(self, limit: float) -> None:
        """Until all ranks have ended, or only victims are left that never will."""
        open_pipes = set(self._pipes)
        while open_pipes and time.monotonic() < limit:
            if {self._pipes[d] for d in open_pipes} <= self._hit_for_good():
                return
            now = time.monotonic()
            wait = min([limit - now, 0.5, *(max(0.0, when - now) for when, _ in self._pending)])
            ready, _, _ = select.select(list(open_pipes), [], [], wait)
            for descriptor in ready:
                data = os.read(descriptor, 1 << 16)
                if not data:
                    open_pipes.discard(descriptor)
                    self._ready(self._pipes[descriptor])
                self._take(descriptor, data)
            self._deal()

    def _ready(self, rank: int) -> None:
        """The rank has started CUDA, or never will. The last one opens the gate."""
        if self._awaited:
            self._awaited.discard(rank)
            if not self._awaited:
                os.write(self._gate[1], b"." * self._plan.ranks)

    def _hit_for_good(self) -> set[int]:
        return set(self._blows) if self._plan.kind == "sigstop" else set()

    def _take(self, descriptor: int, data: bytes) -> None:
        *lines, self._partial[descriptor] = (self._partial[descriptor] + data).split(b"\n")
        for line in lines:
            facts = json.loads(line)
            report = Report(self._pipes[descriptor], facts.pop("what"), facts.pop("at"), facts)
            self._reports.append(report)
            if report.what == "ready":
                self._ready(report.rank)
            elif report.what == "armed":
                self._pending.append((report.at + self._plan.delay, report.rank))
            elif report.what == "ends":
                # One that raises ends when Python has left: the last report counts.
                self._blows[report.rank] = report.at

    def _deal(self) -> None:
        kind = self._plan.kind
        for when, rank in [p for p in self._pending if p[0] <= time.monotonic()]:
            self._pending.remove((when, rank))
            if rank in self._blows and kind in STOPPED:
                os.kill(self._pids[rank], signal.SIGCONT)
                continue
            self._blows[rank] = time.monotonic()
            os.kill(self._pids[rank], signal.SIGKILL if kind == "sigkill" else signal.SIGSTOP)
            if kind in STOPPED:
                self._pending.append((time.monotonic() + self._plan.stopped, rank))

    def _end_stuck(self, folder: Path) -> list[str]:
        """Ranks that should have ended and have not: what their flight recorders say."""
        from ..doctor.merging import diagnose, read

        # Their reports end a little before they do.
        limit = time.monotonic() + _LEAVING
        while running := self._running():
            if time.monotonic() > limit:
                break
            time.sleep(1e-3)
        if not running:
            return []
        for rank in running:
            os.kill(self._pids[rank], signal.SIGUSR1)
        time.sleep(_DUMPING)
        found = diagnose(read(sorted(folder.glob("*.json"))))
        return [f"rank {rank} did not end" for rank in running] + found

    def _running(self) -> list[int]:
        return [
            rank
            for rank, pid in enumerate(self._pids)
            if rank not in self._hit_for_good() and _reap(pid, kill=False) == _RUNNING
        ]


_RUNNING = 1 << 20
_statuses: dict[int, int] = {}


def _reap(pid: int, *, kill: bool) -> int:
    """The exit status of a child, _RUNNING if it has none."""
    if pid in _statuses:
        return _statuses[pid] if not kill else _statuses.pop(pid)
    if kill:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    found, status = os.waitpid(pid, 0 if kill else os.WNOHANG)
    if not found:
        return _RUNNING
    code = os.waitstatus_to_exitcode(status)
    if not kill:
        _statuses[pid] = code
    return code


def _traces() -> set[str]:
    """What a job could leave behind: names in /dev/shm, children, descriptors of this process."""
    shared = {
        f"/dev/shm/{entry.name}"
        for entry in os.scandir("/dev/shm")
        if "collectives" in entry.name and entry.stat(follow_symlinks=False).st_uid == os.getuid()
    }
    descriptors = {
        f"descriptor {entry} of this process"
        for entry in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{entry}")
    }
    me = os.getpid()
    children = {
        f"process {pid}" for pid in Path(f"/proc/{me}/task/{me}/children").read_text().split()
    }
    return shared | descriptors | children
