"""Several ways to do the same thing, timed in turns.

A way is a `Runner`: it makes a number of calls and returns when each began and ended on this rank.
The time of a call is the latest end over the ranks minus the latest begin: what the slowest rank
takes, without the time that it waited for others to come. Ranks of one host share a clock
(CLOCK_MONOTONIC); across hosts it is the longest duration instead.

Blocks of calls of all ways alternate several times, so that drift of the machine hits all alike.
The number of calls grows until a block takes long enough to mean something.

On GPUs a block is one window between two events, and its row the mean of its calls: `Windows`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import _core
from ..bootstrap import host_key
from ..communicator import Communicator
from ..errors import UnsupportedError
from .cases import Bound, Prepared

# (warm-up calls, timed calls) -> begin and end, nanoseconds, of each timed call, or of the mean of
# those that were timed together: shape (rows, 2)
Runner = Callable[[int, int], np.ndarray[Any, Any]]

_FEWEST_BLOCKS = 3  # where one call takes longer than the time for it
_MOST = 20000  # calls of a block
_PROBE_SHARE = 0.05  # of the time, spent to find out how long a call takes


@dataclass(frozen=True)
class Effort:
    """How long each way is timed: `iterations` calls if given, else about `seconds`; `warmup` calls
    before, and some before each block.

    rest  seconds that all ranks sleep before each block. Ranks that poll at real-time priority are
          stopped by the kernel for 50 ms in each second, if anything else wants their cores; so no
          more than one such call, not even to warm up, follows another without a rest.
    """

    seconds: float = 0.2
    iterations: int | None = None
    warmup: int = 5
    rest: float = 0.0


@dataclass(frozen=True)
class Sample:
    """Times of one way, in seconds, sorted; and how often each rank ended last."""

    times: np.ndarray[Any, Any]
    last: np.ndarray[Any, Any]

    @property
    def median(self) -> float:
        return float(np.median(self.times))

    @property
    def p99(self) -> float:
        """The time that 99 of 100 calls do not exceed."""
        return float(np.percentile(self.times, 99))


class Clock:
    """Brings the ranks' stamps together. Collective.

    blocks  turns of each way
    """

    blocks = 5

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        hosts = comm._bootstrap.all_gather(host_key().encode())
        self.shared = len(set(hosts)) == 1

    def gather(self, stamps: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Stamps of all ranks: shape (ranks, calls, 2)."""
        mine = np.ascontiguousarray(stamps, np.float64)
        everybody = self._comm.all_gather(mine.reshape(1, -1))
        return np.asarray(everybody).reshape(self._comm.size, -1, 2)

    def durations(self, gathered: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Seconds of each call."""
        begin, end = gathered[..., 0], gathered[..., 1]
        if self.shared:
            return np.asarray((end.max(axis=0) - begin.max(axis=0)) * 1e-9)
        return np.asarray((end - begin).max(axis=0) * 1e-9)

    def span(self, gathered: np.ndarray[Any, Any], calls: int) -> float:
        """Seconds from the first begin to the last end, on the rank where that is longest."""
        return float((gathered[:, -1, 1] - gathered[:, 0, 0]).max() * 1e-9)


class Windows(Clock):
    """Rows that are means over a window of calls: the slowest rank's counts, whatever the clocks
    say. A window has one row, so more of them are needed for a median.
    """

    blocks = 15

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.shared = False

    def span(self, gathered: np.ndarray[Any, Any], calls: int) -> float:
        """Seconds of `calls` calls on the slowest rank."""
        return float(self.durations(gathered).mean()) * calls


def take_turns(
    clock: Clock, runners: Sequence[Runner | None], effort: Effort
) -> list[Sample | None]:
    """Times all `runners` in turns; None for those that are None or raise UnsupportedError at
    once. Collective: all ranks pass the same kinds of runners.
    """
    active: dict[int, Runner] = {i: r for i, r in enumerate(runners) if r is not None}
    plans: dict[int, tuple[list[int], int]] = {}
    for i, runner in list(active.items()):
        try:
            plans[i] = _plan(clock, runner, effort)
        except UnsupportedError:
            del active[i]
    stamps: dict[int, list[np.ndarray[Any, Any]]] = {i: [] for i in active}
    for block in range(max((len(calls) for calls, _ in plans.values()), default=0)):
        for i, runner in active.items():
            calls_of, warmup = plans[i]
            if block >= len(calls_of):
                continue
            calls = calls_of[block]
            if effort.rest:
                time.sleep(effort.rest)
                warmup = 0 if calls == 1 else warmup
            stamps[i].append(runner(warmup, calls))
    samples: list[Sample | None] = [None] * len(runners)
    for i, parts in stamps.items():
        gathered = clock.gather(np.concatenate(parts))
        last = np.bincount(gathered[..., 1].argmax(axis=0), minlength=gathered.shape[0])
        samples[i] = Sample(np.sort(clock.durations(gathered)), last)
    return samples


def _plan(clock: Clock, runner: Runner, effort: Effort) -> tuple[list[int], int]:
    """Calls of each block, and warm-up calls before each. Equal on all ranks, since it is made of
    what all ranks know.
    """
    if effort.iterations is not None:
        runner(effort.warmup, 1)
        blocks = min(clock.blocks, effort.iterations)
        each, left = divmod(effort.iterations, blocks)
        return [each + (block < left) for block in range(blocks)], min(2, effort.warmup)
    calls, warmup = 2, min(1, effort.warmup)
    while True:
        gathered = clock.gather(runner(warmup, calls))
        span = clock.span(gathered, calls)
        if span >= effort.seconds * _PROBE_SHARE or calls >= _MOST:
            break
        warmup = 0 if calls > effort.warmup else effort.warmup
        calls *= 4
    one = max(span / calls, 1e-8)
    blocks = clock.blocks
    if one * blocks >= effort.seconds:
        return [1] * _FEWEST_BLOCKS, 1
    calls = int(min(_MOST, max(1, effort.seconds / blocks / one)))
    return [calls] * blocks, min(2, effort.warmup)


def core_loop(comm: Communicator, prepared: Prepared) -> Runner:
    """A loop in C++ over a call of ours."""
    touch = prepared.arguments[4] != 0  # the input's address; a rank may have none

    def run(warmup: int, iterations: int) -> np.ndarray[Any, Any]:
        stamps = _core.time_call(comm._core, warmup, iterations, touch, *prepared.arguments)
        return np.array(stamps, np.float64).reshape(-1, 2)

    return run


def python_loop(comm: Communicator, bound: Bound, body: Callable[[], Any]) -> Runner:
    """A loop in Python over any call: rewrites the input, meets the others, takes the time."""
    touched = bound.touched
    lines = None if touched is None else touched.reshape(-1).view(np.uint8)[::64]

    def run(warmup: int, iterations: int) -> np.ndarray[Any, Any]:
        stamps = np.empty((iterations, 2), np.float64)
        now = time.monotonic_ns
        for i in range(-warmup, iterations):
            if lines is not None:
                np.bitwise_or(lines, 0, out=lines)
            comm.barrier()
            begin = now()
            body()
            end = now()
            if i >= 0:
                stamps[i] = begin, end
        return stamps

    return run
