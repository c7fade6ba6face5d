"""When buckets were filled, launched and finished: statistics, and a trace in Chrome's format."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .agreement import exchange, on_rank_0
from .side_stream import SideWork
from .work import ThenWork, Work

if TYPE_CHECKING:
    from .bucket_layout import Bucket, Slot
    from .communicator import Communicator


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


class _Counted(NamedTuple):
    """What is kept of a bucket's reduction: nothing that would keep its memory.

    step    number of the pass; `number` is that of the bucket
    called  when backward was over
    """

    step: int
    called: float
    number: int
    nbytes: int
    dtype: str
    slots: Sequence[Slot]
    times: BucketTimes

    @property
    def exposed(self) -> float:
        return max(0.0, self.times.finished - max(self.times.began, self.called))


class _Pass:
    """What is known of a pass: buckets with their times and works, and when backward was over."""

    def __init__(
        self,
        done: list[tuple[Bucket, BucketTimes, Work | None]],
        called: float,
        ended: float,
        mark: Any,
    ) -> None:
        self.done = done
        self.called = called
        self._ended = ended
        self._mark = mark
        works = [inner(work) for _, _, work in done]
        self._there = [work for work in works if isinstance(work, SideWork)]

    def over(self) -> bool:
        """True if GPUs are through with it."""
        return all(work.done() for work in self._there)

    def tell_times(self) -> None:
        """Waits for the GPUs, and asks when what happened."""
        for there in self._there:
            there.ended.wait()
        if self._there and self._mark is not None:
            side = self._there[0].side
            self._mark.wait()
            self.called = side.when(self._mark)
        for _, times, work in self.done:
            span = getattr(work, "span", None)  # one that the user's `reduce` made may have none
            times.began, times.finished = span() if span else (times.launched, self._ended)
        if self._there and self._mark is not None:
            side.anchor(self._mark)


class Trace:
    """The times of one rank's buckets: of the last step, or with `keep` of all."""

    def __init__(self, rank: int, *, keep: bool) -> None:
        self.statistics = Statistics()
        self._rank = rank
        self._keep = keep
        self._counted: list[_Counted] = []  # from which events are made when they are asked for
        self._unsettled: list[_Pass] = []

    def end_pass(
        self, buckets: Sequence[Bucket], called: float, ended: float, mark: Any = None
    ) -> None:
        """All works were waited for. `called` is when backward was over, `ended` when the wait was;
        on a GPU, which may not have come so far, backward is over at the event `mark`.
        """
        step = _Pass([(b, b.times, b.work) for b in buckets], called, ended, mark)
        self._unsettled.append(step)
        self.settle()

    def settle(self, *, wait: bool = False) -> None:
        """Counts the passes that GPUs are through with; with `wait` all of them."""
        while self._unsettled and (wait or self._unsettled[0].over()):
            step = self._unsettled.pop(0)
            step.tell_times()
            self._count(step)

    def _count(self, step: _Pass) -> None:
        if not self._keep:
            self._counted = []
        told = self.statistics
        for b, times, _ in step.done:
            of = _Counted(told.steps, step.called, b.index, b.nbytes, b.dtype, b.slots, times)
            self._counted.append(of)
            told.nbytes += of.nbytes
            told.busy += times.finished - times.began
            told.exposed += of.exposed
        told.steps += 1
        told.buckets += len(step.done)

    def events(self) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": self._rank, "args": {"name": "rank"}}
        ]
        for thread in ("gradients", "queue", "wire", "exposed"):
            about = {"ph": "M", "name": "thread_name", "pid": self._rank, "tid": _TIDS[thread]}
            events.append(about | {"args": {"name": thread}})
        for of in self._counted:
            events += self._events_of(of)
        return events

    def _events_of(self, of: _Counted) -> Iterator[dict[str, Any]]:
        times = of.times
        spans = [
            ("filled", "gradients", times.first, times.filled),
            ("waits", "queue", times.launched, times.began),
            ("reduced", "wire", times.began, times.finished),
        ]
        if of.exposed:
            spans.append(("exposed", "exposed", max(times.began, of.called), times.finished))
        about = {
            "step": of.step,
            "bytes": of.nbytes,
            "dtype": of.dtype,
            "parameters": [slot.name for slot in of.slots],
            "exposed_us": of.exposed * 1e6,
        }
        for what, thread, begin, end in spans:
            yield {
                "ph": "X",
                "name": f"bucket {of.number} {what}",
                "cat": thread,
                "pid": self._rank,
                "tid": _TIDS[thread],
                "ts": begin * 1e6,
                "dur": max(0.0, end - begin) * 1e6,
                "args": about,
            }


_TIDS = {"gradients": 0, "queue": 1, "wire": 2, "exposed": 3}


def inner(work: Work | None) -> Work | None:
    """The collective of a work that does something once that is over."""
    return inner(work.first) if isinstance(work, ThenWork) else work


def write_events(comm: Communicator, events: list[dict[str, Any]], path: str | Path) -> None:
    """Writes the events of all ranks to one JSON file, by rank 0. Collective. Raises OSError on all
    ranks if rank 0 cannot.
    """
    parts = exchange(comm, events)

    def write() -> None:
        text = json.dumps({"traceEvents": [*chain(*parts)], "displayTimeUnit": "ms"})
        Path(path).write_text(text, encoding="utf-8")

    on_rank_0(comm, "write the trace", write)


class NvtxRange:
    """In this block Nsight Systems shows a range, for work on a GPU; nothing on the host."""

    __slots__ = ("_nvtx", "_text")

    def __init__(self, device: str, text: str) -> None:
        self._nvtx = None if device == "cpu" else sys.modules["cupy"].cuda.nvtx
        self._text = text

    def __enter__(self) -> None:
        if self._nvtx is not None:
            self._nvtx.RangePush(self._text)

    def __exit__(self, *raised: object) -> None:
        if self._nvtx is not None:
            self._nvtx.RangePop()
