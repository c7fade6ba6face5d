"""Ranks that are kept: processes that run one case after the other.

A new rank imports torch and, with CUDA tensors, makes a context on its GPU: seconds, when most
cases take a fraction of one. Kept ranks do so once. What runs in them is what runs in new ones, the
`_run` of the cases' class. In between they bring back what a case has changed: their environment
(here), and torch's state (suite_state.py). A rank that cannot do so says it, and one in which a
case went wrong exits as a new one would: their lane then ends.

Torch's class starts and watches processes. `Ranks.process` gives it objects that stand for kept
ranks while they run one case.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

CLEAN = 20  # seconds that a rank has to be as new, after a case
WATCH = 5  # seconds until a rank that waits looks whether its lane is still there


class Keep(NamedTuple):
    """How kept ranks are started: by multiprocessing's `method`. `load` imports the cases, in a
    process that was not forked from one that has them.
    """

    method: str
    load: Callable[[], Any]


def write_to(log: str) -> None:
    """From now on this process's output goes to the end of a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    to = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(to, 1)
    os.dup2(to, 2)
    os.close(to)


def surround(environ: dict[str, str], folder: str) -> None:
    """Gives this process an environment and a folder."""
    for name in set(os.environ) - set(environ):
        del os.environ[name]
    os.environ.update(environ)
    os.chdir(folder)
    tempfile.tempdir = None  # to be found from TMPDIR again


class Order(NamedTuple):
    """What a kept rank is to run: the arguments of `_run`, but for the pipe, which follows."""

    arguments: tuple[Any, ...]
    more: dict[str, Any]
    environ: dict[str, str]
    folder: str
    log: str


def exit_code(do: Callable[..., Any], *arguments: Any, **more: Any) -> int:
    """What a process that does only this would exit with."""
    try:
        do(*arguments, **more)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _be_as_new(order: Order, state: Any) -> str:
    """Undoes what a case did; returns why this is not possible, if so. What this raises ends the
    rank, and is in the case's log: the outcome stands, and the lane's ranks are replaced.
    """
    gc.collect()  # what a case holds may be on a GPU, or wait for a thread
    surround(order.environ, order.folder)
    state.restore()
    left = [
        thread.name
        for thread in threading.enumerate()
        if thread is not threading.main_thread()
        and (not thread.daemon or "_event_listener" in thread.name)
    ]
    return f"threads are left: {', '.join(left)}" if left else ""


def serve(line: Connection, load: Callable[[], Any]) -> None:
    """Is a rank: runs what comes on the line, and says each time the exit code, and then whether
    the process is as new (or why not).
    """
    if "suite_cases" not in sys.modules:
        load()
    import suite_cases

    gc.freeze()  # all modules: to look through them after each case would take longer than most
    state, lane = suite_cases.State(), os.getppid()
    line.send("there")
    while True:
        while not line.poll(WATCH):
            if os.getppid() != lane:
                return
        try:
            order: Order = line.recv()
            pipe = Connection(reduction.recv_handle(line))
        except (EOFError, OSError):
            return
        surround(order.environ, order.folder)
        write_to(order.log)
        code = exit_code(suite_cases.Cases._run, *order.arguments, pipe, **order.more)
        pipe.close()
        if code not in suite_cases.FINE:
            sys.exit(code)
        line.send(code)
        del pipe
        line.send(_be_as_new(order, state))
        sys.stdout.flush()


class _Rank:
    """A kept rank, as its lane sees it."""

    def __init__(self, keep: Keep, number: int) -> None:
        context: Any = multiprocessing.get_context(keep.method)
        self.line, there = context.Pipe()
        self.process = context.Process(
            target=serve, args=(there, keep.load), name=f"kept rank {number}"
        )
        self.process.start()
        there.close()
        self.ran = False  # a case, of which it has not said yet that it is undone

    def hear(self, limit: float) -> Any:
        """What the rank says within the limit; None if it says nothing, or has ended."""
        with contextlib.suppress(EOFError, OSError):
            if self.line.poll(limit):
                return self.line.recv()
        return None


class RankOfCase:
    """Stands for a rank's process while it runs one case: what torch's class asks of a process."""

    def __init__(self, rank: _Rank, order: Order, pipe: Connection, name: str | None) -> None:
        self._rank, self._order, self._pipe = rank, order, pipe
        self._code: int | None = None
        self.name, self.daemon = name, False

    def start(self) -> None:
        self._rank.ran = True
        self._rank.line.send(self._order)
        reduction.send_handle(self._rank.line, self._pipe.fileno(), self.pid)

    @property
    def pid(self) -> int:
        return int(self._rank.process.pid)

    @property
    def exitcode(self) -> int | None:
        if self._code is None:
            self._code = self._rank.hear(0)
        if self._code is None:
            self._code = self._rank.process.exitcode
        return self._code

    def is_alive(self) -> bool:
        return self.exitcode is None

    def join(self, timeout: float | None = None) -> None:
        until = float("inf") if timeout is None else time.monotonic() + timeout
        while self.is_alive() and time.monotonic() < until:
            time.sleep(0.01)

    def terminate(self) -> None:
        """Ends the rank, unless it has done its case: torch does this to all, at the end."""
        if self.is_alive():
            self._rank.process.terminate()

    def kill(self) -> None:
        if self.is_alive():
            self._rank.process.kill()


class Ranks:
    """The kept ranks of a lane. `log` is where their output goes, from the next case on."""

    log = os.devnull

    def __init__(self, keep: Keep) -> None:
        self._ranks = [_Rank(keep, number) for number in range(int(os.environ["WORLD_SIZE"]))]

    def missing(self, limit: float) -> str:
        """Waits until all ranks are there. Returns why they are not, if so, in words."""
        until = time.monotonic() + limit
        for number, rank in enumerate(self._ranks):
            if rank.hear(max(0.0, until - time.monotonic())) is None:
                rank.process.join(1)
                code = rank.process.exitcode
                how = f"not within {limit:g} s" if code is None else f"but ended with status {code}"
                return f"rank {number} did not start, {how}"
        return ""

    def process(
        self,
        target: Any = None,
        name: str | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> RankOfCase:
        """What torch's class starts instead of a process: the rank's number comes first in `args`,
        and a pipe last. All run the `_run` of the cases' class, whatever the target.
        """
        *arguments, pipe = args
        order = Order(tuple(arguments), kwargs or {}, dict(os.environ), os.getcwd(), self.log)
        return RankOfCase(self._ranks[arguments[0]], order, pipe, name)

    def unfit(self) -> str:
        """Why the ranks cannot run another case, if so."""
        for number, rank in enumerate(self._ranks):
            if rank.ran:
                why = rank.hear(CLEAN)
                if why != "":
                    return f"rank {number}: {why or 'has ended, or does not become as new'}"
                rank.ran = False
        return ""

    def kill(self) -> None:
        for rank in self._ranks:
            rank.process.kill()
