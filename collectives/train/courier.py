"""A thread that hands gradients over while backward goes on.

Where layers are small the host is the bound: it puts one kernel of backward behind the other, for
which torch needs no Python. What a hook does with the gradients of a bucket is Python, and backward
would wait for it.
"""

from __future__ import annotations

import enum
import sys
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from ..array.torch_streams import follow_stream, stream_to_follow

Errand = Callable[[], None]


class _Ask(enum.Enum):
    REPORT = enum.auto()
    LEAVE = enum.auto()


_Asked = SimpleQueue[tuple[Errand, Any] | _Ask]
_Reports = SimpleQueue[BaseException | None]


class Courier:
    """Does errands in a thread of its own, one after the other, each with the current stream of
    torch, on GPU `ordinal`, of where it was given. The thread begins with the first errand and ends
    with the courier.

    ordinal  None: errands are on no GPU
    """

    def __init__(self, ordinal: int | None) -> None:
        self._ordinal = ordinal
        self._asked: _Asked = SimpleQueue()
        self._reports: _Reports = SimpleQueue()
        self._under_way = False  # errands since the last report
        self._started = False

    def give(self, errand: Errand) -> None:
        """Has an errand done; left out if one before it raised since the last `wait`."""
        if not self._started:
            self._start()
        self._under_way = True
        ordinal = self._ordinal
        self._asked.put((errand, None if ordinal is None else stream_to_follow(ordinal)))

    def wait(self) -> None:
        """Until all errands are done. Raises what one of them raised."""
        error = self.end()
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback has this frame

    def end(self) -> BaseException | None:
        """Waits until all errands are done; what one of them raised."""
        if not self._under_way:
            return None
        self._under_way = False
        self._asked.put(_Ask.REPORT)
        return self._reports.get()

    def close(self) -> None:
        """Ends the thread, after its errands."""
        if self._started:
            self._started = False
            self._leave()

    def _start(self) -> None:
        self._started = True
        threading.Thread(
            target=_run,
            args=(self._ordinal, self._asked, self._reports),
            name="collectives: hands gradients over",
            daemon=True,
        ).start()
        self._leave = weakref.finalize(self, self._asked.put, _Ask.LEAVE)


def _run(ordinal: int | None, asked: _Asked, reports: _Reports) -> None:
    if ordinal is not None:
        sys.modules["cupy"].cuda.Device(ordinal).use()
    error: BaseException | None = None
    followed = None
    while (ask := asked.get()) is not _Ask.LEAVE:
        if isinstance(ask, _Ask):
            reports.put(error)
            error = None
            continue
        errand, stream = ask
        try:
            if error is None:
                if stream is not None and stream != followed:
                    follow_stream(stream)
                    followed = stream
                errand()
        except BaseException as raised:
            error = raised
        del ask, errand  # what they hold
