"""The threads that complete futures.

A future is never completed on the core's own thread, since callbacks may wait for further calls. Of
the threads here one, the *leader*, waits for the next call to end. When it has, the leader makes
another thread the leader, if more calls are waited for, and only then completes the future. So
callbacks may wait as long as they like: whatever they wait for is completed by another thread. In
most programs callbacks do not wait, and there are one or two threads.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol


class _Threads:
    """As many threads as are busy at once; a thread that is done waits for the next task."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tasks: deque[Callable[[], None]] = deque()
        self._idle = 0

    def run(self, task: Callable[[], None]) -> None:
        with self._changed:
            self._tasks.append(task)
            if self._idle >= len(self._tasks):
                self._changed.notify()
                return
        threading.Thread(target=self._work, name="collectives-callback", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._tasks:
                    self._idle += 1
                    self._changed.wait()
                    self._idle -= 1
                task = self._tasks.popleft()
            task()
            del task  # and what it holds: the next may be long in coming


_threads = _Threads()


def _forget_threads() -> None:
    global _threads
    _threads = _Threads()


os.register_at_fork(after_in_child=_forget_threads)  # a child has none of its parent's threads


def run_on_a_thread(task: Callable[[], None]) -> None:
    """Runs a task on a thread that does nothing else meanwhile."""
    _threads.run(task)


class Completion(Protocol):
    def await_end(self) -> None:
        """Returns when the call has ended, well or not."""

    def complete(self) -> None:
        """Completes the future, which runs its callbacks."""


class Completer:
    """Completes the futures of calls that end in the order in which they are handed over. (A call
    that waited behind one that ends later might be what that one waits for.)
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[Completion] = deque()
        self._leader = False
        self._idle = 0
        self._closed = False
        self._threads: list[threading.Thread] = []

    def watch(self, completion: Completion) -> None:
        with self._changed:
            self._queue.append(completion)
            self._need_leader()

    def _need_leader(self) -> None:
        if self._leader or not self._queue:
            return
        if self._idle:
            self._changed.notify()
            return
        thread = threading.Thread(target=self._run, name="collectives-futures", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._leader or not self._queue:
                    if self._closed:
                        return
                    self._idle += 1
                    self._changed.wait()
                    self._idle -= 1
                self._leader = True
                completion = self._queue.popleft()
            completion.await_end()
            with self._changed:
                self._leader = False
                self._need_leader()
            completion.complete()
            del completion

    def close(self) -> None:
        """Ends the threads, once the calls that are watched have ended."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(10)
