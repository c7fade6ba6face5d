"""Futures whose callbacks may wait, and make calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.futures

from .completing import run_on_a_thread
from .tracks import Callback, mix


class Future(torch.futures.Future):
    """torch's future, whose callbacks have keys, so that the calls that they make can be matched
    with those of other ranks.

    A callback never runs in the program's own thread, nor behind another callback that may wait:
    another rank may reach them in the other order, and wait for the one that has not begun here. So
    where torch would run a callback at once, because the future is complete, a thread runs it. Of
    the callbacks of one future all but one run on threads of their own, and that one on the thread
    that completes the future.
    """

    def __init__(self, key: int) -> None:
        super().__init__()
        self._key = key
        self._branches = 0
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self._hooked = False
        self._hooking: int | None = None  # the thread that registers `_fire`

    def then(self, callback: Callable[[Any], Any]) -> Future:
        key = self._branch()
        child = Future(key)

        def run() -> None:
            try:
                with Callback(key):
                    value = callback(self)
            except BaseException as error:  # it is the child's, as torch does it
                child.set_exception(as_future_error(error))
            else:
                child.set_result(value)

        self._when_complete(run)
        return child

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        key = self._branch()

        def run() -> None:
            with Callback(key):
                callback(self)

        self._when_complete(run)

    def _branch(self) -> int:
        with self._lock:
            self._branches += 1
            return mix(self._key, self._branches)

    def _when_complete(self, run: Callable[[], None]) -> None:
        with self._lock:
            late = self.done()
            if not late:
                self._callbacks.append(run)
            first, self._hooked = not late and not self._hooked, self._hooked or not late
        if late:
            run_on_a_thread(run)
        elif first:
            # It fires within this call if the future has become complete in the meantime.
            self._hooking = threading.get_ident()
            super().add_done_callback(self._fire)
            self._hooking = None

    def _fire(self, _: Any) -> None:
        with self._lock:
            callbacks, self._callbacks = self._callbacks, []
        mine = None if self._hooking == threading.get_ident() or not callbacks else callbacks.pop()
        for run in callbacks:
            run_on_a_thread(run)
        if mine is not None:
            mine()


def as_future_error(error: BaseException) -> Exception:
    """An error as a future takes it."""
    return error if isinstance(error, Exception) else RuntimeError(repr(error))
