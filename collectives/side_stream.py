"""Calls on device arrays beside the caller's stream: what the caller puts on its own stream next
runs meanwhile, and waits for the call only where it is told to.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

from . import _core
from .array import Stream
from .array.streams import cupy_stream
from .work import Spanned, Work

Launch = Callable[..., Any]  # call(stream=...) puts a call there; None: the arrays are on the host
_Made = TypeVar("_Made")


def quietest(
    ordinal: int, computing: int, make: Callable[[], _Made], handle: Callable[[_Made], int]
) -> _Made:
    """A new stream of GPU `ordinal` that does not slow small kernels on `computing` down while it
    waits for peers, as half of all streams do; if none of four is such, the one that does least.
    The host waits for what is on `computing`.
    """
    quiet = 1.4  # times as long; those that disturb make it 2
    made: list[tuple[float, _Made]] = []  # all live, since the next might get the queue of one
    while len(made) < 4 and (not made or min(slower for slower, _ in made) > quiet):
        one = make()
        made.append((_core.slowdown(ordinal, computing, handle(one)), one))
    return min(made, key=lambda each: each[0])[1]


class SideStreams:
    """A stream for each GPU, made when a call needs it. All ranks must put the calls of one
    communicator here in the same order.
    """

    def __init__(self) -> None:
        self._streams: dict[str, SideStream] = {}

    def launch(self, device: str, call: Launch) -> Spanned:
        """Runs `call(stream=...)` with the side stream of `device`, after all that is on cupy's
        current stream; on the host, with None. Returns its work: on a GPU, one whose `wait` makes
        the stream that is then current wait, and the host not.
        """
        if device == "cpu":
            work: Spanned = call(stream=None)
            return work
        return self.of(device).launch(call)

    def of(self, device: str) -> SideStream:
        if device not in self._streams:
            self._streams[device] = SideStream(int(device.partition(":")[2]))
        return self._streams[device]


class SideStream:
    """One of `SideStreams`, with a clock: when something happened on the GPU, by the host's
    time.monotonic().
    """

    def __init__(self, ordinal: int) -> None:
        self._current = sys.modules["cupy"].cuda.get_current_stream
        self._core = quietest(
            ordinal,
            self._current().ptr,
            lambda: _core.SideStream(ordinal),
            lambda side: side.handle,
        )
        self._stream = Stream(self._core.handle, ordinal, beside=True)
        self._anchor = self._core.end()
        self._anchor.wait()
        self._anchored = time.monotonic()  # when the host saw the anchor, which is a little late
        self._last = self._anchor  # the end of the last call

    def launch(self, call: Launch) -> SideWork:
        ready = self._core.begin(self._current().ptr)
        work = call(stream=self._stream)
        ended = self._core.end()
        before, self._last = self._last, ended
        return SideWork(self, work, ready, before, ended)

    def mark(self) -> _core.Mark:
        """The place behind all that is on the current stream."""
        return self._core.mark(self._current().ptr)

    def follow(self, mark: _core.Mark) -> None:
        """What comes next on the current stream waits for `mark`."""
        mark.hold(self._current().ptr)

    def beside(self, do: Callable[[], None]) -> Callable[[], None]:
        """`do` for another thread, with this stream as cupy's current one, behind all that is on
        the current stream now: its calls wait for nothing that comes there later.
        """
        cuda = sys.modules["cupy"].cuda
        begin = self.mark()

        def on_this_stream() -> None:
            ordinal = self._stream.ordinal
            with cuda.Device(ordinal), cupy_stream(self._stream.handle, ordinal) as stream:
                self.follow(begin)
                try:
                    do()
                finally:
                    stream.synchronize()  # whoever waits for the thread uses what it used

        return on_this_stream

    def when(self, mark: _core.Mark) -> float:
        """The time of a mark that the GPU has passed, in seconds of time.monotonic()."""
        return self._anchored + mark.seconds_since(self._anchor)

    def anchor(self, mark: _core.Mark) -> None:
        """Times are told from `mark`, which the GPU has passed: the span to what comes next is a
        float32 and should be short.
        """
        self._anchored, self._anchor = self.when(mark), mark


class SideWork(Spanned):
    """A call on a side stream. `wait` puts the wait on the current stream; the host goes on, so a
    failure is raised by the next call of the communicator, or by its `synchronize`.

    ready   where its arrays were ready
    before  where the call before it ended
    ended   where it ended
    """

    def __init__(
        self, side: SideStream, work: Work, ready: _core.Mark, before: _core.Mark, ended: _core.Mark
    ) -> None:
        self.side = side
        self._work = work  # it holds the call's arrays
        self._ready, self._before = ready, before
        self.ended = ended

    def done(self) -> bool:
        return self.ended.done()

    def span(self) -> tuple[float, float]:
        """When the call began and ended, which it has, in seconds of time.monotonic()."""
        when = self.side.when
        return max(when(self._ready), when(self._before)), when(self.ended)

    def _wait(self, timeout: float | None) -> bool:
        self.side.follow(self.ended)
        return True

    def _finish(self) -> None:
        return
