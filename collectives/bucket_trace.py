"""When buckets were filled, launched and finished: statistics, and a trace in Chrome's format."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .work import QueuedWork, ThenWork

if TYPE_CHECKING:
    from .bucket_layout import Bucket


@dataclasses.dataclass
class BucketTimes:
    """Seconds of time.monotonic(); 0 where it has not happened.

    first, filled    the first and the last gradient came
    launched         the collective was put into the queue
    began, finished  the collective ran
    """

    first: float = 0.0
    filled: float = 0.0
    launched: float = 0.0
    began: float = 0.0
    finished: float = 0.0


@dataclasses.dataclass
class Statistics:
    """Sums over steps.

    steps, buckets, nbytes  reductions that were done
    busy                    seconds in which a collective ran
    exposed                 seconds of them in which the caller waited: at the end of backward, or
                            before it for the memory of a transient bucket
    """

    steps: int = 0
    buckets: int = 0
    nbytes: int = 0
    busy: float = 0.0
    exposed: float = 0.0

    @property
    def overlap(self) -> float:
        """How much of the communication was hidden behind backward, in percent."""
        return 100.0 * max(0.0, 1.0 - self.exposed / self.busy) if self.busy else 100.0


class Trace:
    """The times of one rank's buckets: of the last step, or with `keep` of all."""

    def __init__(self, rank: int, *, keep: bool) -> None:
        self.statistics = Statistics()
        self._rank = rank
        self._keep = keep
        self._events: list[dict[str, Any]] = []

    def end_pass(self, buckets: Sequence[Bucket], called: float, ended: float) -> None:
        """All works are done. `called` is when backward was over, `ended` when the wait was."""
        if not self._keep:
            self._events = []
        busy = exposed = 0.0
        step = self.statistics.steps
        for bucket in buckets:
            times, work = bucket.times, bucket.work
            if isinstance(work, (QueuedWork, ThenWork)):
                times.began, times.finished = work.span()
            else:  # a stream orders it: the host knows when it launched, and when it waited
                times.began, times.finished = times.launched, ended
            busy += times.finished - times.began
            hidden = max(0.0, times.finished - max(times.began, called))
            exposed += hidden
            name = f"bucket {bucket.index}"
            about = {
                "step": step,
                "bytes": bucket.nbytes,
                "dtype": bucket.dtype,
                "parameters": [slot.name for slot in bucket.slots],
                "exposed_us": hidden * 1e6,
            }
            self._add(f"{name} filled", "gradients", times.first, times.filled, about)
            self._add(f"{name} waits", "queue", times.launched, times.began, about)
            self._add(f"{name} reduced", "wire", times.began, times.finished, about)
            if hidden:
                start = max(times.began, called)
                self._add(f"{name} exposed", "exposed", start, times.finished, about)
        self.statistics.steps += 1
        self.statistics.buckets += len(buckets)
        self.statistics.nbytes += sum(bucket.nbytes for bucket in buckets)
        self.statistics.busy += busy
        self.statistics.exposed += exposed

    def events(self) -> list[dict[str, Any]]:
        names: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": self._rank, "args": {"name": "rank"}}
        ]
        for thread in ("gradients", "queue", "wire", "exposed"):
            about = {"ph": "M", "name": "thread_name", "pid": self._rank, "tid": _TIDS[thread]}
            names.append(about | {"args": {"name": thread}})
        return names + self._events

    def _add(self, name: str, thread: str, begin: float, end: float, about: dict[str, Any]) -> None:
        self._events.append(
            {
                "ph": "X",
                "name": name,
                "cat": thread,
                "pid": self._rank,
                "tid": _TIDS[thread],
                "ts": begin * 1e6,
                "dur": max(0.0, end - begin) * 1e6,
                "args": about,
            }
        )


_TIDS = {"gradients": 0, "queue": 1, "wire": 2, "exposed": 3}


@contextlib.contextmanager
def nvtx_range(device: str, text: str) -> Iterator[None]:
    """A range that Nsight Systems shows, for work on a GPU; nothing on the host."""
    if device == "cpu":
        yield
        return
    nvtx = sys.modules["cupy"].cuda.nvtx
    nvtx.RangePush(text)
    try:
        yield
    finally:
        nvtx.RangePop()
