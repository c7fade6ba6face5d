"""How many GPUs there are and how much of their memory is free, asked by a process of its own: the
one that forks the ranks must not start CUDA, which does not survive a fork.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import signal
import socket
import time
from collections.abc import Sequence
from typing import Any

from .. import _core
from ..children import die_with_parent
from ..errors import CollectiveError, UnsupportedError

# The driver gives back what a process held a little after its end; and what it keeps for itself
# varies by some MiB. What a rank of ours holds is more than SLACK.
_RETURNING = 5.0  # seconds
SLACK = 64 << 20  # bytes


class Gauge:
    """A process that uses every GPU, and tells how much memory is free there.

    count  of GPUs

    Raises UnsupportedError where there is no GPU, or no cupy.
    """

    def __init__(self) -> None:
        if not _core.has_cuda:
            raise UnsupportedError(f"--device cuda: {_core.device_count()[1]}")
        try:
            importlib.import_module("cupy")  # once, and not by every rank of every round
        except ImportError as error:
            raise UnsupportedError(
                f"--device cuda: chaos on GPUs needs cupy, which does not load ({error}): "
                "pip install cupy-cuda12x, or cupy-cuda13x for a driver of CUDA 13"
            ) from None
        self._ours, theirs = socket.socketpair()
        this = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            die_with_parent(this)
            self._ours.close()
            _answer(theirs)
        theirs.close()
        try:
            first = self._ask()
            if first["why"]:
                raise UnsupportedError(f"--device cuda: {first['why']}")
        except BaseException:
            self.close()
            raise
        self.count = len(first["free"])

    def free(self) -> list[int]:
        """Bytes on each GPU."""
        return [int(n) for n in self._ask()["free"]]

    def lost(self, before: Sequence[int]) -> list[str]:
        """What has not come back since `before` was free, in words; waits a little for it."""
        end = time.monotonic() + _RETURNING
        while True:
            words = lost(before, self.free())
            if not words or time.monotonic() > end:
                return words
            time.sleep(0.05)

    def _ask(self) -> dict[str, Any]:
        self._ours.sendall(b"?")
        answer = b""
        while not answer.endswith(b"\n"):
            data = self._ours.recv(1 << 16)
            if not data:
                raise CollectiveError("the process that watches the GPUs has ended")
            answer += data
        found: dict[str, Any] = json.loads(answer)
        return found

    def close(self) -> None:
        self._ours.close()
        if self._pid:
            os.waitpid(self._pid, 0)
            self._pid = 0


def lost(before: Sequence[int], after: Sequence[int]) -> list[str]:
    """GPUs of which less is free than before, by more than SLACK."""
    return [
        f"{(was - now) >> 20} MiB of GPU {ordinal}"
        for ordinal, (was, now) in enumerate(zip(before, after, strict=True))
        if was - now > SLACK
    ]


def _answer(asked: socket.socket) -> None:
    """Answers until nobody asks any more, and ends the process."""
    status = 1
    try:
        atexit._clear()  # what the other process has inherited is not its own
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one that asks ends this one
        while asked.recv(1):
            asked.sendall(json.dumps(_look()).encode() + b"\n")
        status = 0
    finally:
        os._exit(status)


def _look() -> dict[str, Any]:
    import cupy

    count, why = _core.device_count()
    free = []
    for ordinal in range(count):
        with cupy.cuda.Device(ordinal):
            free.append(int(cupy.cuda.runtime.memGetInfo()[0]))
    return {"free": free, "why": why if not count else ""}
