"""Ranks for a command: those of a launcher, processes or threads that it starts itself, or one."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..bootstrap.sources import mpi_launcher
from ..communicator import Communicator
from ..errors import CollectiveError, ConfigError
from ..starting import init, run_threads

EVERYWHERE = "everywhere"  # attribute of an error that every rank raises

_ENDED = 10.0  # seconds by which the launcher has ended a rank

# Not passed on to the ranks that a command starts.
_OURS = ("ranks", "nodes")


@contextmanager
def on_every_rank() -> Iterator[None]:
    """Errors inside are equal on all ranks, so that one of them tells is enough."""
    try:
        yield
    except (CollectiveError, ValueError) as error:
        setattr(error, EVERYWHERE, True)
        raise


def add_arguments(parser: argparse.ArgumentParser, positive: Callable[[str], int]) -> None:
    """--ranks, --threads and --nodes."""
    group = parser.add_argument_group("ranks (by themselves those of mpirun, torchrun or run)")
    group.add_argument(
        "--ranks", type=positive, metavar="N", help="start N ranks as processes of this host"
    )
    group.add_argument(
        "--threads", type=positive, metavar="N", help="start N ranks as threads of one process"
    )
    group.add_argument(
        "--nodes",
        type=positive,
        metavar="N",
        help="divide the ranks that are started here into N nodes (default 1)",
    )
    # What `arguments_of` goes through.
    parser.set_defaults(_parser=parser)


def launched() -> bool:
    """True if something has started this process as one of several ranks."""
    names = ("COLLECTIVES_RANK", "COLLECTIVES_WORLD_SIZE", "TORCHELASTIC_RUN_ID")
    plain = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    return plain or any(n in os.environ for n in names) or mpi_launcher(os.environ) is not None


def rank_hint() -> int:
    """The rank that the launcher's environment tells, before ranks have met; 0 if none does."""
    launcher = mpi_launcher(os.environ)
    for name in ("COLLECTIVES_RANK", launcher.rank if launcher else "RANK", "RANK"):
        text = os.environ.get(name, "")
        if text.isdecimal():
            return int(text)
    return 0


def arguments_of(args: argparse.Namespace, *, without: tuple[str, ...] = ()) -> list[str]:
    """A command line that is parsed to `args`, of options that differ from their defaults."""
    words: list[str] = []
    positional: list[str] = []
    for action in args._parser._actions:
        value = getattr(args, action.dest, None)
        if action.dest in ("help", *without) or value is None or value == action.default:
            continue
        if not action.option_strings:
            positional += [str(v) for v in value] if isinstance(value, list) else [str(value)]
            continue
        option = max(action.option_strings, key=len)
        if action.nargs == 0:
            words.append(option)
        elif isinstance(value, list):
            words += [f"{option}={v}" for v in value]
        else:
            words.append(f"{option}={value}")
    return [*words, *positional]


def command_of(args: argparse.Namespace, command: str) -> str:
    """The command line, for a header, without the file that it is written to."""
    words = arguments_of(args, without=("json",))
    return shlex.join(["python", "-m", "collectives", command, *words])


def with_ranks(
    args: argparse.Namespace,
    command: str,
    body: Callable[[Communicator], int],
    *,
    max_blocks: int = 0,
) -> int:
    """Runs `body(comm)` on the ranks that `args` ask for; its result on rank 0 is the exit status.

    max_blocks  of the communicator: see `init`

    Raises ConfigError where ranks are asked for that cannot be had, UnsupportedError where threads
    are to work on GPUs and there is none.
    """
    with on_every_rank():
        _check(args)
    if args.threads:
        nodes = [r * (args.nodes or 1) // args.threads for r in range(args.threads)]
        devices = None
        if getattr(args, "device", "cpu") == "cuda":
            from ..bench.cuda import thread_devices

            devices = thread_devices()
        return int(
            run_threads(args.threads, body, nodes=nodes, devices=devices, max_blocks=max_blocks)[0]
        )
    if args.ranks:
        return _start(args, command)
    with init(max_blocks=max_blocks) as comm:
        try:
            status = body(comm)
            sys.stdout.flush()
        except BrokenPipeError:
            _end_all_quietly()
            raise
        return status if comm.rank == 0 else 0


def _end_all_quietly() -> None:
    """The reader of the output, such as `head`, has seen enough: the launcher, where it is `run`,
    ends all ranks before any of them can tell that another has closed the communicator.
    """
    child = os.getpgrp() == os.getpid()  # of `run` itself, whose ranks lead groups
    if child and os.environ.get("COLLECTIVES_RENDEZVOUS") == "launcher":
        os.kill(os.getppid(), signal.SIGPIPE)
        time.sleep(_ENDED)


def _check(args: argparse.Namespace) -> None:
    wanted = args.ranks or args.threads
    if args.ranks and args.threads:
        raise ConfigError("--ranks starts processes and --threads threads; give one of them")
    if args.nodes and not wanted:
        raise ConfigError("--nodes divides ranks that are started here; give --ranks or --threads")
    if args.nodes and args.nodes > wanted:
        raise ConfigError(f"{wanted} ranks cannot be divided into {args.nodes} nodes")
    if wanted and launched():
        option = "--ranks" if args.ranks else "--threads"
        raise ConfigError(
            f"{option} starts ranks, but this process is a rank of a launcher already; leave "
            f"{option} out, or start the command without the launcher"
        )


def _start(args: argparse.Namespace, command: str) -> int:
    from . import INTERRUPTED, run

    words = arguments_of(args, without=_OURS)
    sys.stdout.flush()
    status = run.run(
        argparse.Namespace(
            ranks=args.ranks,
            nodes=args.nodes or 1,
            timeout=None,
            limit=None,
            bind="127.0.0.1",
            label=False,
            keep_going=False,
            module=["collectives", command, *words],
            script=[],
            quietly=True,
        )
    )
    if status == INTERRUPTED:
        raise KeyboardInterrupt
    return status
