"""The flight recorder: where its dumps go, and when they are written.

The core keeps the last calls of every communicator (csrc/recorder.hpp). `Communicator.dump` reads
one of them; a dump of the whole process is written to the directory COLLECTIVES_DUMP at every error
of a call, and on SIGUSR1.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import stat
import time
from collections.abc import Iterator
from typing import Any

from . import _core
from .calls import integer
from .errors import CollectiveError, ConfigError

FORMAT = "collectives flight recorder"
VERSION = 1

# Where COLLECTIVES_DUMP led when it was first read: the program may go to another directory.
_directories: dict[str, str] = {}
try:
    _BEGAN = os.getcwd()  # where relative ones count from, wherever the program goes
except OSError:  # it is gone
    _BEGAN = ""


def dump_when_told(directory: str) -> None:
    """Sets up what COLLECTIVES_DUMP asks for; nothing where it is empty.

    SIGUSR1 is taken only where nothing else has: a program's own handler stays.
    """
    if not directory:
        return
    whole = _directories.get(directory) or os.path.abspath(os.path.join(_BEGAN, directory))
    _set_directory(whole, "COLLECTIVES_DUMP")
    _directories[directory] = whole
    if signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
        _core.dump_on_signal(signal.SIGUSR1)


def _in_utf8(text: str) -> str:
    """The same, but for what is no Unicode, such as odd bytes of file names: the core has none."""
    return text.encode("utf-8", "backslashreplace").decode()


def _set_directory(whole: str, name: str) -> None:
    if _in_utf8(whole) != whole:
        raise ConfigError(f"{name} {whole!r} is no text in UTF-8; dumps need another place")
    if not os.path.isdir(whole):
        raise ConfigError(f"{name} {whole!r} is no directory: make it first")
    _core.set_dump_directory(whole)


@contextlib.contextmanager
def starting(directory: str, rank: int | None, size: int | None) -> Iterator[None]:
    """While ranks meet: a dump says that this one is at it since when, and if it fails, with what
    error, which names the ranks that came; then one is written.

    directory   COLLECTIVES_DUMP, "" for none
    rank, size  this rank and how many there shall be, where the environment says so
    """
    dump_when_told(directory)
    if not directory:
        yield
        return
    start: dict[str, Any] = {"begin": time.time()}
    start |= {} if rank is None else {"rank": rank}
    start |= {} if size is None else {"size": size}
    _core.note_start(json.dumps(start))
    try:
        yield
    except BaseException as error:
        failure: dict[str, Any] = {
            "kind": type(error).__name__,
            "message": str(error),
            "time": time.time(),
        }
        if isinstance(error, CollectiveError):
            failure |= {} if error.peer is None else {"peer": error.peer}
            if rank is None and error.rank is not None:
                start["rank"] = error.rank
        _core.note_start(json.dumps({**start, "error": failure}))
        _core.dump_process(_in_utf8(f"init failed: {error}"))
        raise
    _core.note_start("")


def dump_on_signal(number: int = signal.SIGUSR1, directory: str | os.PathLike[str] = ".") -> None:
    """From now on, signal `number` makes this process write what its flight recorders hold to
    `directory`, as collectives-HOST-PID.json. It replaces the signal's handler.

    Works in whatever the process is stuck: the file is written by a thread that needs no lock of
    Python's. Raises ConfigError if there is no such directory.
    """
    number = integer(number, "number")
    _set_directory(os.path.abspath(os.fsdecode(directory)), "directory")
    _core.dump_on_signal(number)


def write_dump(communicator: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Writes one communicator's dump as a file that the doctor reads, for this user alone (0600).

    Raises ConfigError for a symbolic link: it may lead anywhere.
    """
    whole = {
        "format": FORMAT,
        "version": VERSION,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "time": time.time(),
        "reason": "dump() was called",
        "communicators": [communicator],
    }
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ConfigError(f"{path} is a symbolic link: name the file itself") from error
        raise
    with os.fdopen(descriptor, "w") as file:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.fchmod(descriptor, 0o600)  # it may have been there before
        json.dump(whole, file, indent=1)
