"""What commands share: types of arguments, and errors in words."""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import os
import re
import stat
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from .. import _core
from ..array import ITEM_SIZES
from ..bench import backends
from ..bench.cases import REDUCING, ROOTED
from ..config import parse_size
from ..errors import CollectiveError, ConfigError, did_you_mean
from ..schedule import LARGEST, algorithms
from ..tuning import known_algorithm
from . import NO_MEMORY, drop_unwritten
from ._ranks import EVERYWHERE, on_every_rank, rank_hint

USAGE = 2  # exit status of a command that could not do what was asked


def positive(text: str) -> int:
    """A whole number >= 1."""
    return _at_least(text, 1)


def natural(text: str) -> int:
    """A whole number >= 0."""
    return _at_least(text, 0)


def _at_least(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number >= {least}")
    if int(text) > LARGEST:
        raise argparse.ArgumentTypeError(f"{text} is more than {LARGEST}")
    return int(text)


def size(text: str) -> int:
    """Bytes: 4, 64K, 1M, 2G."""
    try:
        return parse_size(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def step(text: str) -> int:
    """What sizes grow by, in bytes."""
    number = size(text)
    if number < 1:
        raise argparse.ArgumentTypeError("0 would never end; sizes grow by a byte or more")
    return number


def factor(text: str) -> int:
    """What sizes grow by."""
    number = positive(text)
    if number < 2:
        raise argparse.ArgumentTypeError("1 would never end; sizes grow by a factor of 2 or more")
    return number


def seconds(text: str) -> float:
    """A positive number of seconds."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 < number < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number of seconds")
    return number


def one_of(kind: str, known: Iterable[str]) -> Callable[[str], str]:
    """A name among `known`; the nearest right one is told for another."""
    names = list(known)

    def parse(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(
                f"unknown {kind} {text!r}; {did_you_mean(text, names)}"
            )
        return text

    return parse


collective = one_of("collective", _core.collectives)
op = one_of("op", _core.ops)
dtype = one_of("dtype", ITEM_SIZES)


def algorithm(text: str) -> str:
    """Checks the name of an algorithm or composition, once all --import are done."""
    if text != "auto":
        known_algorithm(text, [*(a.name for a in algorithms()), "auto"])
    return text


def add_device(parser: argparse._ActionsContainer) -> None:
    """--device."""
    parser.add_argument(
        "--device",
        type=one_of("device", backends.DEVICES),
        default="cpu",
        metavar="NAME",
        help="cpu, or cuda: arrays on GPUs, rank by rank on those there are (cpu)",
    )


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    """--device, --mode and --max-blocks, of commands that time calls."""
    group = parser.add_argument_group("GPUs")
    add_device(group)
    group.add_argument(
        "--mode",
        type=one_of("mode", ("stream", "graph", "both")),
        metavar="NAME",
        help="on GPUs: stream, calls launched one by one from Python; graph, CUDA graphs; both "
        "(graph)",
    )
    group.add_argument(
        "--max-blocks",
        type=natural,
        default=0,
        metavar="N",
        help="thread blocks that a call may take on a GPU; 0: as many as help (0)",
    )


def check_device(args: argparse.Namespace) -> None:
    """Raises ConfigError for options that belong to the other kind of device."""
    backends.check_options(args.device, args.mode, args.python, args.peer or ())
    if args.max_blocks and args.device == "cpu":
        raise ConfigError("--max-blocks bounds kernels on a GPU; add --device cuda")


def check_used(
    collectives: Sequence[str], *, root: int = 0, op: str = "sum", order: str | None = None
) -> None:
    """Raises ConfigError for an option that none of the collectives goes by."""
    for option, given, users in (
        ("--root", root != 0, ROOTED),
        ("--op", op != "sum", REDUCING),
        ("--order", order is not None, REDUCING),
    ):
        if given and not set(users) & set(collectives):
            raise ConfigError(
                f"{option} goes with {', '.join(users)}; leave it out for {', '.join(collectives)}"
            )


def nodes_list(text: str) -> list[int]:
    """Node of each rank: 0,0,1,1."""
    parts = text.split(",")
    if not all(p.strip().isdecimal() for p in parts):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no list with the node of each rank, such as 0,0,1,1"
        )
    nodes = [int(p) for p in parts]
    if max(nodes) > LARGEST:
        raise argparse.ArgumentTypeError(f"node {max(nodes)} is more than {LARGEST}")
    return nodes


def import_algorithms(names: Iterable[str]) -> None:
    """Imports modules, or files that end in .py, that register algorithms."""
    for name in names:
        try:
            if name.endswith(".py"):
                path = Path(name)
                spec = importlib.util.spec_from_file_location(path.stem, path)
                if spec is None or spec.loader is None or not path.is_file():
                    raise ConfigError(f"--import {name}: there is no such file")
                module = importlib.util.module_from_spec(spec)
                sys.modules.setdefault(path.stem, module)
                spec.loader.exec_module(module)
            else:
                if "" not in sys.path:
                    sys.path.insert(0, "")
                importlib.import_module(name)
        except CollectiveError:
            raise
        except Exception as error:
            words = f"{type(error).__name__}: {error}"
            raise ConfigError(f"--import {name}: it does not load ({words})") from error


def add_rest(parser: argparse._ActionsContainer) -> None:
    """`--rest` of those who time calls."""
    parser.add_argument(
        "--rest",
        type=seconds,
        default=0.0,
        metavar="S",
        help="seconds that all ranks sleep before each block of calls (0): ranks that poll at "
        "real-time priority are stopped by the kernel for a part of each second",
    )


# What matplotlib and others write by such an ending, and --png does not.
_OTHER_PICTURES = {
    *(".bmp", ".eps", ".gif", ".jpeg", ".jpg", ".pdf", ".pgf", ".ps"),
    *(".svgz", ".tif", ".tiff", ".webp"),
}


def check_picture(path: str | None) -> None:
    """Raises ConfigError if a file of --png is named as a picture of another kind than PNG or SVG,
    or matplotlib is missing.
    """
    if not path:
        return
    ending = Path(path).suffix
    if ending.lower() in _OTHER_PICTURES:
        raise ConfigError(f"{path}: --png writes no {ending}; end it with .png, or .svg for SVG")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--png needs matplotlib: pip install matplotlib")


def check_writable(*paths: str | None) -> None:
    """Raises ConfigError, before any work is done, if one of the files cannot be written by rank
    0, or two are the same.
    """
    named = [path for path in paths if path]
    places = [os.path.realpath(path) for path in named]
    with on_every_rank():
        for i, path in enumerate(named):
            if places[i] in places[:i]:
                raise ConfigError(f"{path} would hold two results: name a file for each")
    for path in named:
        if rank_hint() == 0:
            new = not os.path.lexists(path)
            if _is_pipe(path):
                raise ConfigError(f"{path} cannot be written: it is no file")
            try:
                open(path, "ab").close()
                if new:  # nothing is left where the command is refused later
                    os.remove(path)
            except OSError as error:
                raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


def _is_pipe(path: str) -> bool:
    """Is it neither a file nor a character device, and none of our own streams? Who opens a pipe
    waits for its other end.
    """
    try:
        found = os.stat(path)
    except OSError:
        return False  # opening it says why
    if any(kind(found.st_mode) for kind in (stat.S_ISREG, stat.S_ISCHR, stat.S_ISDIR)):
        return False
    streams = [stream for stream in (sys.__stdout__, sys.__stderr__) if stream is not None]
    return not any(os.path.samestat(found, os.fstat(stream.fileno())) for stream in streams)


def count(text: str) -> float:
    """A positive number: 7e9, 350M, 7B."""
    match = re.fullmatch(r"([0-9.]+(?:[eE]\+?\d+)?)([KMBT]?)", text.strip())
    try:
        number = float(match[1]) if match else 0.0
    except ValueError:
        number = 0.0
    if match is None or not 0 < number < 1e18:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number such as 7e9 or 7B")
    return number * {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[match[2]]


def quantity(parse: Callable[[str], float], example: str) -> Callable[[str], float]:
    """A positive number in base units, as 7e9, or with a unit that `parse` knows."""

    def parsed(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            try:
                value = parse(text)
            except ValueError as error:
                raise argparse.ArgumentTypeError(str(error)) from None
        if not 0 < value < 1e30:
            raise argparse.ArgumentTypeError(f"{text!r} is no positive number such as {example}")
        return value

    return parsed


def in_words(
    run: Callable[[argparse.Namespace], int],
) -> Callable[[argparse.Namespace], int]:
    """Makes errors of the user, and of a run, a message and status 2. COLLECTIVES_DEBUG=trace shows
    where they came from.
    """

    @functools.wraps(run)
    def wrapped(args: argparse.Namespace) -> int:
        try:
            return run(args)
        except BrokenPipeError:
            raise
        except (CollectiveError, ValueError, OSError, MemoryError) as error:
            if os.environ.get("COLLECTIVES_DEBUG") in ("trace", "2"):
                raise
            drop_unwritten()
            rank = rank_hint()
            if rank == 0 or not getattr(error, EVERYWHERE, False):
                where = f" (rank {rank})" if rank else ""
                name = run.__module__.rpartition(".")[2]
                words = NO_MEMORY if isinstance(error, MemoryError) else error
                # In one piece: other ranks may write to the same pipe.
                sys.stderr.write(f"python -m collectives {name}{where}: {words}\n")
            return USAGE

    return wrapped
