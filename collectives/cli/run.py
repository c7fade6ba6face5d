"""Start a Python program as several ranks on this host, without MPI.

Each rank is a process of its own that runs the program; `collectives.init()` in it finds the other
ranks. If a rank fails, the others are stopped, and this command ends with the failed rank's exit
status (128 + N if signal N ended it) after telling which rank that was. With --keep-going the
others run on, for programs that call `Communicator.shrink`, and the job has succeeded if any rank
has. Signals that this command gets are passed on to all ranks, but those that it was told to ignore
(nohup); those that end, stop (Ctrl-Z) or continue ranks reach what they have started too. No rank
outlives it, even if it is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import IO

from ..bootstrap import Server, listen
from ..children import die_with_parent
from ..config import Settings, parse_seconds
from ..errors import ConfigError

EXAMPLES = """\
examples:
  python -m collectives run -n 4 train.py --epochs 3
  python -m collectives run -n 2 --label -m package.module argument
  python -m collectives run -n 8 --nodes 2 script.py      two nodes of four ranks, on this host

how ranks meet:
  This command hosts the rendezvous itself: it listens on a free port before any rank starts, so no
  other program can take the port in between. A fresh secret goes to the ranks in their environment,
  which other users cannot read.
"""

_MOST = 1 << 22  # Linux numbers no more (PID_MAX_LIMIT)
_GRACE = 5.0  # seconds between asking a rank to end and killing it
_PASSED_ON = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGTSTP,
    signal.SIGCONT,
)
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGKILL)
_TO_GROUPS = (*_ENDING, signal.SIGTSTP, signal.SIGCONT)
_FIRST_ENDS = 3.0  # seconds that the rank that failed first has to end, once another has
_CURES = {
    errno.EMFILE: "; raise the limit of open files (ulimit -n)",
    errno.EAGAIN: "; raise the limit of processes (ulimit -u)",
}
_TIMED_OUT = 124  # exit status of --limit, as that of timeout(1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = f"{parser.prog} -n RANKS [options] [--] (SCRIPT | -m MODULE) [arguments]"
    parser.add_argument("-n", "--ranks", type=_positive, required=True, help="number of ranks")
    parser.add_argument(
        "--nodes", type=_positive, default=1, help="nodes to divide the ranks into (default 1)"
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        metavar="S",
        help="seconds until a wait of a rank fails (COLLECTIVES_TIMEOUT)",
    )
    parser.add_argument(
        "--limit",
        type=_seconds,
        metavar="S",
        help=f"stop all after so long, with status {_TIMED_OUT}",
    )
    parser.add_argument(
        "--bind",
        default="127.0.0.1",
        metavar="ADDR",
        help="address where ranks meet (default 127.0.0.1)",
    )
    parser.add_argument(
        "--keep-going",
        action="store_true",
        help="when a rank fails, leave the others running; status 0 if any rank ends with 0",
    )
    parser.add_argument(
        "--label", action="store_true", help="begin each line of output with its rank: [3] ..."
    )
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, help="run a module, as python -m does"
    )
    parser.add_argument("script", nargs=argparse.REMAINDER, help="the program and its arguments")
    # Ranks of a command of this package end at Ctrl-C without a word, wherever they are.
    parser.set_defaults(quietly=False)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number >= 1")
    if int(text) > _MOST:
        raise argparse.ArgumentTypeError(f"{text} is more than the {_MOST} processes of a host")
    return int(text)


def _seconds(text: str) -> float:
    try:
        return parse_seconds(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(args: argparse.Namespace) -> int:
    program = [*(args.module or ()), *args.script]  # of a module's arguments, what follows a --
    ended = program[:1] == ["--"]  # our options
    program = program[ended:]
    if args.module is not None:
        program.insert(0, "-m")
    as_module = args.module is not None or (ended and program[:1] == ["-m"])
    if len(program) <= as_module:
        raise ConfigError("no program to run; write run -n 4 SCRIPT, or run -n 4 -m MODULE")
    if program[0].startswith("-") and not as_module:
        raise ConfigError(f"unknown option {program[0]!r}; see run --help")
    if args.ranks < args.nodes:
        raise ConfigError(f"{args.ranks} ranks cannot be divided into {args.nodes} nodes")
    job = _Job(args)
    return job.run([sys.executable, *program])


class _Rank:
    """A rank's process, which leads a group with what it starts. It stays a zombie until `reap`, so
    that nobody else gets the number of the group meanwhile.
    """

    def __init__(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self.rank = rank
        self.process = process
        self._code: int | None = None

    def poll(self) -> int | None:
        """Its status, -N if signal N ended it; None while it runs."""
        if self._code is None:
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            ended = os.waitid(os.P_PID, self.process.pid, options)
            if ended is not None:
                exited = ended.si_code == os.CLD_EXITED
                self._code = ended.si_status if exited else -ended.si_status
        return self._code

    def signal(self, number: signal.Signals) -> None:
        """To the rank, if it runs; and if it is to end, stop or continue, to what it has started
        too.
        """
        if number in _TO_GROUPS:
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:  # it has left its group
                if self.poll() is None:
                    os.kill(self.process.pid, number)
        elif self.poll() is None:
            os.kill(self.process.pid, number)

    def reap(self) -> None:
        self.process.wait()


class _Job:
    """The ranks while they run. Signals are blocked and waited for, so that nothing happens in a
    signal handler.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._ranks: list[_Rank] = []
        self._printers: list[_Printer] = []
        self._status: int | None = None
        # What the launcher was told to ignore, as by nohup, its ranks ignore too.
        heard = (s for s in _PASSED_ON if signal.getsignal(s) is not signal.SIG_IGN)
        # By SIGPIPE a rank tells that nobody reads on what it writes: see `_ranks`.
        self._waited = {signal.SIGCHLD, signal.SIGPIPE, *heard}
        self._told: set[int] = set()  # ranks whose failure --keep-going has told of
        self._kill_at: float | None = None
        self._judge_at: float | None = None

    def run(self, command: Sequence[str]) -> int:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._waited)
        children = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else nobody keeps their status
        try:
            return self._run(command, mask)
        finally:
            signal.signal(signal.SIGCHLD, children or signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _run(self, command: Sequence[str], mask: Set[int]) -> int:
        args, heartbeat = self._args, Settings().heartbeat
        listener = listen(args.bind, backlog=args.ranks + 128)
        secret = secrets.token_hex(32)
        job = secrets.token_hex(8)
        server = Server(
            listener,
            size=args.ranks,
            secret=secret.encode(),
            job=job,
            host="the launcher",
            heartbeat=heartbeat,
        )
        try:
            # All ranks are forked before the first thread starts: what runs between fork and exec
            # is safe only so. Those that are early find the socket listening already, and wait for
            # the server to accept them.
            for rank in range(args.ranks):
                environment = self._environment(rank, server.address, secret, job)
                self._ranks.append(self._start(rank, command, environment, mask))
            server.start()
            self._start_printers()
            limit = time.monotonic() + args.limit if args.limit else None
            while any(started.poll() is None for started in self._ranks):
                self._wait(limit)
                self._judge(server.lost)
            self._judge(server.lost)
            # Where ranks failed or were told to end, what they have started ends with the job.
            while self._status is not None and self._kill_at is not None and self._left():
                self._wait(None, 0.05)
                if time.monotonic() > self._kill_at:
                    break
        finally:
            for started in self._ranks:
                if self._status is not None or started.poll() is None:
                    started.signal(signal.SIGKILL)
            codes = [started.poll() or 0 for started in self._ranks]
            for started in self._ranks:
                started.reap()
            server.stop(seconds=0)
            ended = time.monotonic()
            for printer in self._printers:
                printer.finish(ended, _GRACE)
        if args.keep_going and self._status is None:
            worst = next((code for code in codes if code), 0)
            return 0 if 0 in codes else worst if worst > 0 else 128 - worst
        return self._status or 0

    def _environment(
        self, rank: int, address: tuple[str, int], secret: str, job: str
    ) -> dict[str, str]:
        args = self._args
        environment = dict(os.environ)
        node = rank * args.nodes // args.ranks
        first = -(-node * args.ranks // args.nodes)
        environment.update(
            COLLECTIVES_RANK=str(rank),
            COLLECTIVES_WORLD_SIZE=str(args.ranks),
            COLLECTIVES_LOCAL_RANK=str(rank - first),
            COLLECTIVES_ADDR=address[0],
            COLLECTIVES_PORT=str(address[1]),
            COLLECTIVES_JOB=job,
            COLLECTIVES_SECRET=secret,
            COLLECTIVES_RENDEZVOUS="launcher",
        )
        environment.pop("COLLECTIVES_SECRET_FILE", None)
        if args.nodes > 1:
            environment["COLLECTIVES_NODE"] = str(node)
        if args.timeout:
            environment["COLLECTIVES_TIMEOUT"] = repr(args.timeout)
        return environment

    def _start(
        self,
        rank: int,
        command: Sequence[str],
        environment: dict[str, str],
        mask: Set[int],
    ) -> _Rank:
        pipe = subprocess.PIPE if self._args.label else None
        reads = rank == 0 and sys.stdin is not None and not sys.stdin.isatty()
        try:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=None if reads else subprocess.DEVNULL,
                stdout=pipe,
                stderr=pipe,
                preexec_fn=_before_exec(os.getpid(), mask),
            )
        except OSError as error:
            cure = _CURES.get(error.errno or 0, "")
            raise ConfigError(f"cannot start rank {rank}: {error.strerror}{cure}") from error
        return _Rank(rank, process)

    def _left(self) -> bool:
        """Does anything still run that a rank has started, and did not put elsewhere?"""
        groups = {rank.process.pid for rank in self._ranks}
        for entry in os.scandir("/proc"):
            if entry.name.isdecimal() and int(entry.name) not in groups:
                with contextlib.suppress(OSError, ValueError):  # it has just ended
                    text = Path(entry.path, "stat").read_text(errors="replace")
                    state, _, group = text.rpartition(")")[2].split()[:3]
                    if int(group) in groups and state != "Z":
                        return True
        return False

    def _wait(self, limit: float | None, longest: float = 1.0) -> None:
        """Waits for the next signal or deadline, and acts on it."""
        now = time.monotonic()
        ends = [
            now + longest,
            self._kill_at,
            self._judge_at,
            limit if self._status is None else None,
        ]
        got = signal.sigtimedwait(
            self._waited, max(0.0, min(e for e in ends if e is not None) - now)
        )
        if got is not None and got.si_signo in _PASSED_ON:
            number = signal.Signals(got.si_signo)
            quiet = self._args.quietly and number == signal.SIGINT
            self._signal_all(signal.SIGTERM if quiet else number)
            if number in _ENDING:
                self._stop(128 + number, None)
            elif number == signal.SIGTSTP:
                _suspend()
        elif got is not None and got.si_signo == signal.SIGPIPE and got.si_pid != os.getpid():
            self._stop(1, signal.SIGTERM)
        now = time.monotonic()
        if limit is not None and now >= limit and self._status is None:
            running = [rank.rank for rank in self._ranks if rank.poll() is None]
            _tell(f"ran for {self._args.limit:g} s, the limit; stopping {_count(running)}")
            self._stop(_TIMED_OUT, signal.SIGTERM)
        if self._kill_at is not None and now >= self._kill_at:
            self._signal_all(signal.SIGKILL)

    def _judge(self, lost: Sequence[int]) -> None:
        """Ends the job if a rank has failed.

        The first to fail takes others with it, which may end sooner than the first itself does. The
        rendezvous has seen in which order they left, in `lost`; the first has _FIRST_ENDS.
        """
        failed = [rank for rank in self._ranks if rank.poll()]
        if self._status is not None or not failed:
            return
        if self._args.keep_going:
            for rank in failed:
                if rank.rank not in self._told:
                    self._told.add(rank.rank)
                    how = _end_in_words(rank.poll() or 0)
                    _tell(f"rank {rank.rank} (pid {rank.process.pid}) {how}; going on without it")
            return
        first = self._ranks[lost[0]] if lost else failed[0]
        if first.poll() is None:
            now = time.monotonic()
            self._judge_at = self._judge_at or now + _FIRST_ENDS
            if now < self._judge_at:
                return
        order = {rank: place for place, rank in enumerate(lost)}
        culprit = min(failed, key=lambda rank: order.get(rank.rank, -1))
        code = culprit.poll() or 0
        running = [rank.rank for rank in self._ranks if rank.poll() is None]
        how = _end_in_words(code)
        also = f"; stopping {_count(running)}" if running else ""
        _tell(f"rank {culprit.rank} (pid {culprit.process.pid}) {how}{also}")
        self._judge_at = None
        self._stop(code if code > 0 else 128 - code, signal.SIGTERM)

    def _stop(self, status: int, number: signal.Signals | None) -> None:
        """Ends the job with `status`, unless it is ending already."""
        if self._status is None:
            self._status = status
            self._kill_at = time.monotonic() + _GRACE
            if number is not None:
                self._signal_all(number)

    def _signal_all(self, number: signal.Signals) -> None:
        for rank in self._ranks:
            rank.signal(number)

    def _start_printers(self) -> None:
        # By file, which both streams may be: lines do not mix, and where nobody reads the one
        # stream the other goes on.
        locks: dict[tuple[int, int], threading.Lock] = {}
        for rank in self._ranks:
            for source, target in (
                (rank.process.stdout, sys.stdout),
                (rank.process.stderr, sys.stderr),
            ):
                if source is not None:
                    closed = target is None  # by who started this
                    into = os.open(os.devnull, os.O_WRONLY) if closed else target.fileno()
                    file = os.fstat(into)
                    lock = locks.setdefault((file.st_dev, file.st_ino), threading.Lock())
                    printer = _Printer(source, into, rank.rank, lock)
                    printer.start()
                    self._printers.append(printer)


def _suspend() -> None:
    """Stops this process by the signal that it has blocked, until SIGCONT, which is heard next."""
    signal.raise_signal(signal.SIGTSTP)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTSTP})
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTSTP})


def _before_exec(parent: int, mask: Set[int]) -> Callable[[], None]:
    """What a rank does before it becomes the program: lead a group, die with its parent, take
    signals again.
    """

    def prepare() -> None:
        os.setpgid(0, 0)
        die_with_parent(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    return prepare


class _Printer(threading.Thread):
    """Passes on what a rank writes. Where that fails the rank's own writing fails too, as it would
    without labels: a pipe that nobody reads would stop it for ever.
    """

    def __init__(self, source: IO[bytes], target: int, rank: int, lock: threading.Lock) -> None:
        super().__init__(name=f"collectives: what rank {rank} writes", daemon=True)
        self._source = source
        self._target = target
        self._rank = rank
        self._lock = lock
        self._writes = False
        self._moved = time.monotonic()

    def run(self) -> None:
        with self._source:
            try:
                for line in self._source:
                    self._writes = True
                    with self._lock:
                        self._pass_on(f"[{self._rank}] ".encode() + line.rstrip(b"\n") + b"\n")
                    self._moved, self._writes = time.monotonic(), False
            except BrokenPipeError:
                pass  # the reader of our output, such as `head`, has seen enough
            except OSError as error:
                _tell(f"what rank {self._rank} writes cannot be passed on: {error.strerror}")

    def finish(self, ended: float, seconds: float) -> None:
        """Waits until all is passed on, however slowly that is read; or until nothing has come for
        so long since the ranks `ended`: a process that one of them started keeps the pipe open.
        """
        while self.is_alive():
            self.join(0.05)
            if not self._writes and time.monotonic() - max(self._moved, ended) > seconds:
                return

    def _pass_on(self, text: bytes) -> None:
        rest = memoryview(text)
        while rest:
            try:
                rest = rest[os.write(self._target, rest) :]
            except BlockingIOError:  # whoever started this reads later
                ready = select.poll()
                ready.register(self._target, select.POLLOUT)
                ready.poll()


def _end_in_words(code: int) -> str:
    return f"exited with status {code}" if code > 0 else f"was ended by {_signal_name(-code)}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _count(running: Sequence[int]) -> str:
    return f"rank {running[0]}" if len(running) == 1 else f"{len(running)} ranks that still run"


def _tell(text: str) -> None:
    # In one piece, so that what a rank writes cannot come between the line and its end.
    if sys.stderr is not None:
        sys.stderr.write(f"collectives run: {text}\n")
        sys.stderr.flush()
