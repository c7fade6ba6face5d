"""Calls on device arrays beside the caller's stream: what the caller puts on its own stream next
runs meanwhile, and waits for the call only where it is told to.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from .work import Spanned, Work

Launch = Callable[..., Any]  # call(stream=...) puts a call there; None: the arrays are on the host


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
            self._streams[device] = SideStream(device)
        return self._streams[device]


class SideStream:
    """One of `SideStreams`, with a clock: when something happened on the GPU, by the host's
    time.monotonic().
    """

    def __init__(self, device: str) -> None:
        self._cuda = sys.modules["cupy"].cuda
        self._device = self._cuda.Device(int(device.partition(":")[2]))
        with self._device:
            self.stream = self._cuda.Stream(non_blocking=True)
            self._anchor = self._cuda.Event()
            self._anchor.record(self.stream)
            self._anchor.synchronize()
        self._anchored = time.monotonic()  # when the host saw the anchor, which is a little late

    def launch(self, call: Launch) -> SideWork:
        with self._device:
            self.stream.wait_event(self.mark())
            began, ended = self._cuda.Event(), self._cuda.Event()
            began.record(self.stream)
            work = call(stream=self.stream)
            ended.record(self.stream)
        return SideWork(self, work, began, ended)

    def mark(self) -> Any:
        """An event behind all that is on the current stream."""
        event = self._cuda.Event()
        event.record(self._cuda.get_current_stream())
        return event

    def follow(self, event: Any) -> None:
        """What comes next on the current stream waits for `event`."""
        self._cuda.get_current_stream().wait_event(event)

    def when(self, event: Any) -> float:
        """The time of an event that has happened, in seconds of time.monotonic()."""
        milliseconds: float = self._cuda.get_elapsed_time(self._anchor, event)
        return self._anchored + milliseconds / 1e3

    def anchor(self, event: Any) -> None:
        """Times are told from `event`, which has happened: the span to what comes next is a float32
        and should be short.
        """
        self._anchored, self._anchor = self.when(event), event


class SideWork(Spanned):
    """A call on a side stream. `wait` puts the wait on the current stream; the host goes on, so a
    failure is raised by the next call of the communicator, or by its `synchronize`.
    """

    def __init__(self, side: SideStream, work: Work, began: Any, ended: Any) -> None:
        self.side = side
        self._work: Work | None = work  # it holds the call's arrays
        self.began, self.ended = began, ended

    def done(self) -> bool:
        return bool(self.ended.done)

    def span(self) -> tuple[float, float]:
        """When the call began and ended, which it has, in seconds of time.monotonic()."""
        return self.side.when(self.began), self.side.when(self.ended)

    def _wait(self, timeout: float | None) -> bool:
        self.side.follow(self.ended)
        return True

    def _finish(self) -> None:
        return
