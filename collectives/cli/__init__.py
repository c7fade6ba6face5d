"""The command line, `python -m collectives COMMAND`.

Each module in this package whose name has no leading underscore is a command; a file that is added
here is a new one. It has

    a docstring               its first line says in the list of commands what it does, all of it is
    the help text
    add_arguments(parser)     declares its arguments on an argparse parser
    run(args) -> int | None   does the work; the exit status, None for 0
    EXAMPLES                  optional text with examples, at the end of the help text

Only the command that runs is imported; the list of commands reads docstrings without running any
module. An error of this package ends a command with its message and status 2, without a traceback
unless COLLECTIVES_DEBUG=trace; Ctrl-C with "interrupted" and status 130.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import io
import os
import pkgutil
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from ..errors import CollectiveError, did_you_mean
from . import _progress

_PROGRAM = "python -m collectives"
INTERRUPTED = 130  # exit status, as shells have it for a program that SIGINT ended
NO_MEMORY = "there is not enough memory for this; ask for fewer ranks, nodes or bytes"


def commands() -> list[str]:
    """The names of all commands."""
    found = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(name for name in found if not name.startswith("_"))


def summary(command: str) -> str:
    """The first line of a command's docstring, read from its file."""
    for folder in __path__:
        file = Path(folder, f"{command}.py")
        if not file.exists():
            file = Path(folder, command, "__init__.py")
        if file.exists():
            text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
            return text.partition("\n")[0]
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that `argv` (by default the arguments of this process) names; returns its
    exit status.
    """
    _open_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else ""
    try:
        status = _run(name, arguments)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return _interrupted(name)
    except BrokenPipeError:  # the reader of our output, such as `head`, has seen enough
        drop_unwritten()
        return 1
    except (CollectiveError, MemoryError, OSError) as error:
        if os.environ.get("COLLECTIVES_DEBUG") in ("trace", "2"):
            raise
        drop_unwritten()
        words = NO_MEMORY if isinstance(error, MemoryError) else error
        print(f"{_PROGRAM} {name}".rstrip() + f": {words}", file=sys.stderr)
        return 2


def _run(name: str, arguments: Sequence[str]) -> int:
    if name in ("", "-h", "--help", "help"):
        print(_overview())
        return 0 if name else 2
    if name in ("-V", "--version"):
        from .. import __version__

        print(f"collectives {__version__}")
        return 0
    known = commands()
    if name not in known:
        kind = "option" if name.startswith("-") else "command"
        print(f"{_PROGRAM}: unknown {kind} {name!r}; {did_you_mean(name, known)}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"{__name__}.{name}")
    try:
        args = _parser(name, module).parse_args(arguments[1:])
    except SystemExit:  # after the help text
        sys.stdout.flush()
        raise
    return int(module.run(args) or 0)


def drop_unwritten() -> None:
    """What cannot be written to standard output goes nowhere, and fails no more."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_streams() -> None:
    """A standard stream that was closed before Python began is None; what is written goes nowhere
    instead.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, io.TextIOWrapper(io.FileIO(os.devnull, "w"), write_through=True))


def _interrupted(name: str) -> int:
    """Says so, once for all ranks; the exit status."""
    from ._ranks import rank_hint

    if rank_hint() == 0:
        _progress.clear_line()
        print(f"{_PROGRAM} {name}: interrupted", file=sys.stderr)
    if any(thread.daemon for thread in threading.enumerate()):
        # Ranks that are threads, in calls: the interpreter cannot end under them.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(INTERRUPTED)
    return INTERRUPTED


def _parser(name: str, module: ModuleType) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{_PROGRAM} {name}",
        description=module.__doc__,
        epilog=getattr(module, "EXAMPLES", None),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    return parser


def _overview() -> str:
    known = commands()
    width = max(map(len, known), default=0)
    lines = [f"usage: {_PROGRAM} COMMAND [arguments]", "", "commands:"]
    lines += [f"  {name:{width}}  {summary(name)}" for name in known]
    lines += ["", f"`{_PROGRAM} COMMAND --help` tells more of each, --version the version."]
    return "\n".join(lines)
