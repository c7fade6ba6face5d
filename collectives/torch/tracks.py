"""Tracks: who makes which call when.

Ranks must make the calls on a communicator in one order. A program gives that order, as long as one
thread makes the calls. Callbacks of futures break it: they run when data have come, which is at
another moment on every rank. So a process group has two tracks, each with a communicator of its
own.

- The *main track* is for everything that the program itself calls. Calls are matched by their
  order.
- The *callback track* is for calls out of callbacks. Each has a *key*, made from what is the same
  on all ranks: the number of the call whose future has the callback, which callback of it that is,
  and which call in the callback. Rank 0 takes the calls as they come and announces the key of the
  next; the others make the call with that key next, once they have it. A call waits only for its
  own callback to come on all ranks, and callbacks that wait do not stop each other (see
  futures.py and completing.py), so there is no order in which callbacks can run that ends in a
  deadlock.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..array import Stream
from ..calls import COLLECTIVES, DTYPES
from ..communicator import Communicator
from ..device import DeviceEngine
from ..errors import AbortedError, ClosedError, CollectiveError, DeadlineError
from ..schedule import is_written
from ..work import Held

if TYPE_CHECKING:
    import torch

    from ..device import Transfer

# ---- keys ----------------------------------------------------------------------------------------

_MASK = (1 << 64) - 1


def mix(key: int, number: int) -> int:
    """The key of the `number`-th thing that follows from `key` (splitmix64's finaliser)."""
    z = (key + (number + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def key_of(name: str) -> int:
    """The key of a process group's calls."""
    key = 0
    for byte in name.encode():
        key = mix(key, byte)
    return key


class _Scope(threading.local):
    def __init__(self) -> None:
        self.key: int | None = None
        self.calls: dict[int, int] = {}  # by the key of the group


_scope = _Scope()


def next_key(group: int) -> int | None:
    """The key of the call that this thread makes now on a group, which has a key; None outside of
    callbacks. A callback's calls are counted for each group: not all ranks are in all groups.
    """
    if _scope.key is None:
        return None
    number = _scope.calls[group] = _scope.calls.get(group, 0) + 1
    return mix(mix(_scope.key, group), number)


def in_callback() -> bool:
    """True if this thread runs a callback of a future."""
    return _scope.key is not None


class Callback:
    """`with Callback(key):` runs a callback of a future: its calls go to the callback track."""

    def __init__(self, key: int) -> None:
        self._key = key

    def __enter__(self) -> None:
        self._outer = _scope.key, _scope.calls
        _scope.key, _scope.calls = self._key, {}

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _scope.key, _scope.calls = self._outer


# ---- calls ---------------------------------------------------------------------------------------


_ALL_REDUCE = COLLECTIVES["all_reduce"]

# Sends and receives that are under way, and are asked with each call whether they have ended. More
# than one, so that they go sooner than they come; few, since thousands may be under way.
_LOOKS = 4


class Step(NamedTuple):
    """One call of the core, before an algorithm is chosen. Addresses are of contiguous memory.

    blocks  as `_core` takes them: how the input and the output are divided
    nbytes  the size of the call, which the algorithm depends on
    device  None for host memory, else the torch device
    """

    collective: str
    dtype: int
    source: int
    target: int
    elements: int = 0
    in_blocks: Any = None
    out_blocks: Any = None
    op: int = 0
    root: int = 0
    factor: complex = 1.0
    nbytes: int = 0
    device: Any = None


class Plan(NamedTuple):
    """A call on device memory that is made again and again: a function of the core, and what it
    takes.
    """

    call: Callable[..., None]
    arguments: tuple[Any, ...]


_SOURCE, _TARGET = 6, 7  # among the arguments of a plan: addresses


def arguments(comm: Communicator, step: Step) -> tuple[Any, ...]:
    """A step as the core takes it."""
    algorithm = 0
    if step.device is None:
        algorithm = comm._algorithm(step.collective, step.nbytes, None, step.root)
    factor = complex(step.factor)
    return (
        COLLECTIVES[step.collective], step.dtype, step.op, step.root, step.source, step.target,
        step.elements, step.in_blocks, step.out_blocks, algorithm, 0, factor.real, factor.imag,
    )  # fmt: skip


def put_on_stream(comm: Communicator, step: Step, stream: Stream) -> None:
    """Puts a call on device memory on a stream."""
    comm._run_on_device(
        str(step.device), step.collective, arguments(comm, step), step.root, step.nbytes, None,
        0, stream,
    )  # fmt: skip


class MainTrack:
    """Calls in the order in which they are made, by any thread."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        # A blocking call runs on the calling thread, and the core takes one thread at a time.
        self._lock = threading.Lock()
        # Another lock: who sees a call end must not wait for a call that a thread is in.
        self._held_lock = threading.Lock()
        self._held: deque[Held] = deque()
        self._moving: deque[Held] = deque()  # of sends and receives, which end in any order
        self._all_reduce_choices = comm._table("all_reduce")
        self.calls = 0  # that the extension has made, which counts them
        # The program's own in host memory: as many on all ranks, whether or not they wait for them.
        self.numbered = 0

    def next_number(self) -> int:
        """The number of a call for which the core has nothing to do."""
        with self._lock:
            self.numbered += 1
            return self.numbered

    def call(self, step: Step, stream: Stream | None = None) -> int:
        """Makes a call, and returns its number; one on device memory is put on `stream`. That has
        none, nor has one out of a callback: theirs come in any order, and have keys instead.
        """
        number = 0
        with self._lock:
            if step.device is not None:
                assert stream is not None
                put_on_stream(self.comm, step, stream)
            else:
                if not in_callback():
                    self.numbered = number = self.numbered + 1
                self.comm._call(*arguments(self.comm, step))
        if self._held or self._moving:
            self.release()
        return number

    def all_reduce(
        self, dtype: int, pointer: int, count: int, op: int, factor: complex, nbytes: int
    ) -> None:
        """`call` of an all_reduce in place in host memory, for less: 1.5 us instead of 5."""
        comm = self.comm
        real, imag = factor.real, factor.imag
        algorithm = -1
        for limit, choice in self._all_reduce_choices:  # the last serves all sizes
            if nbytes <= limit:
                algorithm = choice
                break
        with self._lock:
            self.numbered += 1
            comm._call(
                _ALL_REDUCE, dtype, op, 0, pointer, pointer, count, None, None, algorithm, 0,
                real, imag,
            )  # fmt: skip
        if self._held or self._moving:
            self.release()

    @property
    def plans(self) -> bool:
        """True if calls on device memory can have plans: all ranks are on one node, and have made
        one before.
        """
        return type(self.comm._device) is DeviceEngine

    def plan(self, step: Step, stream: Stream) -> Plan | None:
        """How a call like this one is put on a stream by the shortest way; None where `call` must
        take a closer look.
        """
        engine = self.comm._device
        if type(engine) is not DeviceEngine or engine.device != stream.ordinal:
            return None
        algorithm = self.comm._checked_algorithm(step.collective, step.nbytes)
        if is_written(algorithm):
            return None
        known = engine.options(algorithm, step.collective, step.nbytes, stream.beside)
        return Plan(engine.call, (known, stream.handle, *arguments(self.comm, step)))

    def put(self, plan: Plan, source: int, target: int) -> None:
        """Makes a call with other addresses than the plan's."""
        before, after = plan.arguments[:_SOURCE], plan.arguments[_TARGET + 1 :]
        with self._lock:
            plan.call(*before, source, target, *after)

    def transfer(self, transfers: list[Transfer], device: torch.device, stream: int) -> None:
        """Puts sends and receives on device memory on `stream`."""
        with self._lock:
            self.comm._engine(str(device)).transfer(transfers, stream)

    def submit(self, step: Step, keep: Any) -> tuple[Any, int]:
        """A handle with done(), wait(seconds) and raise_error(), and the number of the call. `keep`
        lives until the call has ended, whether or not anybody holds the handle.
        """
        self.release()
        with self._lock:
            self.numbered += 1
            number, call, held = self.numbered, arguments(self.comm, step), Held((keep,))
            with self._held_lock:
                self._held.append(held)
            handle = self.comm._submit(*call)
            held.done = handle.done
        return handle, number

    def hold_moving(self, held: Held) -> None:
        """Keeps what a send or recv needs, until `held.done()`."""
        self.release()
        with self._held_lock:
            self._moving.append(held)

    def release(self) -> None:
        """Lets go of what was kept for calls, sends and receives that have ended; of the latter
        a few are asked each time.
        """
        if self.comm._core.lends:
            return
        ended = []  # freed without the lock: whatever hears of that may make calls
        with self._held_lock:
            while self._held and self._held[0].done():
                ended.append(self._held.popleft())
            for _ in range(min(_LOOKS, len(self._moving))):
                held = self._moving.popleft()
                if held.done():
                    ended.append(held)
                else:
                    self._moving.append(held)


class Job:
    """A call on the callback track. Only who makes it lets go of `keep`: it may end before, where
    another thread aborts.
    """

    def __init__(self, steps: list[Step], keep: Any) -> None:
        self.steps = steps
        self.keep = keep
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._listeners: list[Callable[[], None]] = []
        self._error: BaseException | None = None

    def end(self, error: BaseException | None = None) -> None:
        with self._lock:
            if self._ended.is_set():
                return
            self._error = error
            self._ended.set()
            listeners, self._listeners = self._listeners, []
        for tell in listeners:
            tell()

    def when_ended(self, tell: Callable[[], None]) -> None:
        """Calls `tell` once, from the track's thread, or at once if the call has ended."""
        with self._lock:
            if not self._ended.is_set():
                self._listeners.append(tell)
                return
        tell()

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self, seconds: float) -> bool:
        return self._ended.wait(None if seconds < 0 else seconds)

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error


class CallbackTrack:
    """Calls that are matched by key. Its communicator comes about with the first of them.

    join  makes a communicator of the ranks, collectively, unless the event is set meanwhile
    """

    def __init__(
        self, join: Callable[[threading.Event], Communicator], rank: int, timeout: float
    ) -> None:
        self._join = join
        self._rank = rank
        self._timeout = timeout
        self._changed = threading.Condition()
        self._waiting: dict[int, Job] = {}
        self._running: Job | None = None
        self._comm: Communicator | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._closing = threading.Event()

    def submit(self, key: int, steps: list[Step], keep: Any) -> Job:
        job = Job(steps, keep)
        with self._changed:
            if self._failure is not None:
                job.end(self._failure)
                return job
            if key in self._waiting:
                job.end(
                    CollectiveError(
                        "two callbacks make a call with the same key, so ranks cannot tell which "
                        "is which: make them from callbacks of different futures",
                        rank=self._rank,
                    )
                )
                return job
            self._waiting[key] = job
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="collectives-callbacks", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()
        return job

    def _run(self) -> None:
        try:
            comm = self._join(self._closing)
            with self._changed:
                self._comm = comm
            while True:
                job = self._next(comm)
                if job is None:
                    return
                self._make(comm, job)
        except BaseException as error:  # all calls of the track carry it
            self.fail(error)

    def _next(self, comm: Communicator) -> Job | None:
        with self._changed:
            while not self._waiting and not self._closing.is_set():
                self._changed.wait()
            if self._closing.is_set():
                return None
            announced = np.array([next(iter(self._waiting))], np.uint64)
        comm.broadcast(announced, root=0)
        key = int(announced[0])
        end = time.monotonic() + self._timeout
        with self._changed:
            while key not in self._waiting:
                left = end - time.monotonic()
                if self._closing.is_set():
                    return None
                if left <= 0:
                    raise DeadlineError(
                        f"rank 0 makes call {key:#x} out of a callback, and rank {self._rank} has "
                        f"not made it after {self._timeout:g} s; its callbacks made "
                        f"{[hex(k) for k in self._waiting]}. Callbacks must make the same calls on "
                        "all ranks",
                        rank=self._rank,
                    )
                self._changed.wait(left)
            self._running = self._waiting.pop(key)
            return self._running

    def _make(self, comm: Communicator, job: Job) -> None:
        try:
            for step in job.steps:
                comm._call(*arguments(comm, step))
        except CollectiveError as error:
            job.keep = None
            job.end(error)
            if comm._core.broken:
                raise
        else:
            job.keep = None
            job.end()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            if self._failure is None:
                self._failure = error
            jobs = list(self._waiting.values())
            self._waiting.clear()
        if self._running is not None and not self._running.done():
            jobs.append(self._running)
        for job in jobs:
            job.end(error)

    def set_timeout(self, seconds: float) -> None:
        self._timeout = seconds
        if self._comm is not None:
            self._comm._core.timeout = seconds

    def abort(self, reason: str) -> None:
        self.fail(AbortedError(reason, rank=self._rank))
        if self._comm is not None:
            self._comm.abort(reason)

    def close(self) -> None:
        """Ends the track; a call that is still under way, or comes later, ends with an error."""
        with self._changed:
            self._closing.set()
            thread, comm = self._thread, self._comm
            self._changed.notify_all()
        if comm is not None and (self._waiting or (self._running and not self._running.done())):
            comm.abort("the process group was closed")
        self.fail(ClosedError("the process group was closed", rank=self._rank))
        if thread is None:
            return
        if thread is not threading.current_thread():
            thread.join(self._timeout)
        if self._comm is not None:  # it may have come about meanwhile
            self._comm.close()


__all__ = [
    "DTYPES",
    "Callback",
    "CallbackTrack",
    "Job",
    "MainTrack",
    "Step",
    "in_callback",
    "key_of",
    "mix",
    "next_key",
]
