"""Groups: calls that are noted in a `with` block, and run together at its end."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from itertools import dropwhile
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import _core
from .array import View, from_pointer, overlap, view
from .calls import OPS, Calls
from .device import DeviceWork
from .errors import CollectiveError
from .work import GroupWork, TransferWork, Work

if TYPE_CHECKING:
    from types import TracebackType

    from .device import DeviceEngine, Transfer


class _Ranges:
    """Bytes of memory, as ranges that rise and do not meet."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []

    def add(self, v: View) -> None:
        if not v.nbytes:
            return
        begin, end = v.pointer, v.pointer + v.nbytes
        low, high = bisect_left(self._ends, begin), bisect_right(self._begins, end)
        if low < high:  # these become one
            begin, end = min(begin, self._begins[low]), max(end, self._ends[high - 1])
        self._begins[low:high] = [begin]
        self._ends[low:high] = [end]

    def touch(self, v: View) -> bool:
        """True if a byte of `v` is in here."""
        first = bisect_right(self._ends, v.pointer)
        known = v.nbytes and first < len(self._begins)
        return bool(known) and self._begins[first] < v.pointer + v.nbytes


class _Call:
    """A call that runs by itself."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self._run = run
        self.work = GroupWork()

    @property
    def works(self) -> list[GroupWork]:
        return [self.work]

    def run(self) -> None:
        self.work.complete(self._run())


class _Pack:
    """all_reduce calls of one dtype and op that run as one: all inputs are read, then all results
    are written, in the order of the calls.
    """

    def __init__(self, comm: Calls, dtype: str, op: str) -> None:
        self._comm = comm
        self._dtype = dtype
        self._op = op
        self._calls: list[tuple[View, View, Callable[[], Any]]] = []
        self.works: list[GroupWork] = []
        self.read = _Ranges()
        self.written = _Ranges()

    def add(self, source: View, target: View, result: Callable[[], Any]) -> GroupWork:
        work = GroupWork()
        self._calls.append((source, target, result))
        self.works.append(work)
        self.read.add(source)
        self.written.add(target)
        return work

    def before(self, source: View, target: View) -> bool:
        """True if a call that reads `source` and writes `target` must run after those in here."""
        return self.written.touch(source) or self.written.touch(target) or self.read.touch(target)

    def run(self) -> None:
        total = sum(s.nbytes for s, _, _ in self._calls)
        packed = np.empty(total, np.uint8)
        at = 0
        for source, _, _ in self._calls:
            if source.nbytes:
                packed[at : at + source.nbytes] = _bytes(source)
            at += source.nbytes
        v = view(packed, writable=True)
        self._comm._run(
            "all_reduce",
            v,
            v,
            count=total // _core.itemsizes[self._dtype],
            dtype=self._dtype,
            op=(OPS[self._op], 1.0, 0.0),
            nbytes=total,
            result=lambda: None,
        )
        at = 0
        for (_, target, result), work in zip(self._calls, self.works, strict=True):
            if target.nbytes:
                _bytes(target)[:] = packed[at : at + target.nbytes]
            at += target.nbytes
            work.complete(result())


class _Late:
    """Sends and receives that start when the calls before them have run, whose arrays they need."""

    def __init__(self, post: Callable[[], TransferWork]) -> None:
        self._post = post
        self.posted: TransferWork | None = None
        self.works = [GroupWork()]

    def run(self) -> None:
        self.posted = self._post()


class _Moving(NamedTuple):
    """Sends and receives, and their arrays."""

    work: TransferWork | _Late
    sent: Sequence[View]
    received: Sequence[View]


class _Together:
    """Sends and receives on a GPU that go on together."""

    def __init__(self, engine: DeviceEngine, stream: int) -> None:
        self.engine = engine
        self.stream = stream
        self._transfers: list[Transfer] = []
        self._calls: list[tuple[Callable[[], Any], Any, AbstractContextManager[None]]] = []
        self.works: list[GroupWork] = []

    def add(
        self,
        transfers: list[Transfer],
        result: Callable[[], Any],
        keep: tuple[Any, ...],
        in_order: AbstractContextManager[None],
    ) -> GroupWork:
        self._transfers += transfers
        work = GroupWork()
        self._calls.append((result, keep, in_order))
        self.works.append(work)
        return work

    def run(self) -> None:
        with ExitStack() as streams:
            for _, _, in_order in self._calls:
                streams.enter_context(in_order)
            self.engine.transfer(self._transfers, self.stream)
        for (result, keep, _), work in zip(self._calls, self.works, strict=True):
            work.complete(DeviceWork(self.engine, result, keep, self.stream))


def _meet(some: Iterable[View], others: Sequence[View]) -> bool:
    return any(overlap(v, other) != "none" for v in some for other in others)


def _bytes(v: View) -> Any:
    return from_pointer(v.pointer, (v.nbytes,), "uint8", owner=v.owner)


class Group:
    """The calls between the begin and the end of `with comm.group():`.

    They give what they give in the order written. all_reduce calls of one dtype and op that need
    not run one after the other, by the memory that they read and write, are packed; calls of other
    dtypes and ops may stand between them, other collectives may not. So the arrays of a group
    overlap alike on all ranks, or these raise MismatchError.
    """

    def __init__(self, comm: Calls) -> None:
        self._comm = comm
        self._entered = False
        self._entries: list[_Call | _Pack | _Late | _Together] = []
        self._read, self._written = _Ranges(), _Ranges()  # by calls on the host so far
        # Packs that may still grow, in the order in which they run.
        self._open: dict[tuple[str, str], _Pack] = {}
        self._transfers: list[_Moving] = []
        self._sent, self._received = _Ranges(), _Ranges()
        self._together: _Together | None = None  # sends and receives on a GPU that may still grow

    def __enter__(self) -> Group:
        if self._comm._group is not None:
            raise CollectiveError("groups do not nest", rank=self._comm.rank)
        if self._entered:
            raise CollectiveError("a group is used once; call group() again", rank=self._comm.rank)
        self._entered = True
        self._comm._group = self
        return self

    def add(
        self, run: Callable[[], Any], source: View | None = None, target: View | None = None
    ) -> GroupWork:
        """Notes any call; later ones may need its result, so packs end here.

        source, target  what it reads and writes on the host
        """
        self._open.clear()
        self._together = None
        self._use(source, target)
        call = _Call(run)
        self._entries.append(call)
        return call.work

    def add_all_reduce(
        self, source: View, target: View, op: str, result: Callable[[], Any]
    ) -> GroupWork:
        """Notes an all_reduce that may be packed with others."""
        self._together = None
        self._use(source, target)
        kind = (source.dtype, op)
        pack = self._open.get(kind)
        if pack is not None:
            # In this pack, the call runs before those of the packs that were begun later.
            later = dropwhile(lambda other: other is not pack, self._open.values())
            next(later)
            if pack.written.touch(source) or any(p.before(source, target) for p in later):
                self._open.clear()
                pack = None
        if pack is None:
            pack = self._open[kind] = _Pack(self._comm, *kind)
            self._entries.append(pack)
        return pack.add(source, target, result)

    def _use(self, source: View | None, target: View | None) -> None:
        """A call on the host reads and writes these: receives into the same memory end before it,
        and sends from what it writes.
        """
        read, written = ([v] if v is not None else [] for v in (source, target))
        if any(self._received.touch(v) for v in (*read, *written)) or any(
            self._sent.touch(v) for v in written
        ):
            awaited = [
                moving.work
                for moving in self._transfers
                if _meet((*read, *written), moving.received) or _meet(written, moving.sent)
            ]
            self._open.clear()
            self._entries.append(_Call(lambda: self._wait(awaited)))
        for v in read:
            self._read.add(v)
        for v in written:
            self._written.add(v)

    def add_transfers(
        self, post: Callable[[], TransferWork], sent: Sequence[View], received: Sequence[View]
    ) -> Work:
        """Notes sends and receives. They start now, unless a call before has to do with their
        arrays.
        """
        after = any(self._written.touch(v) for v in (*sent, *received))
        late = after or any(self._read.touch(v) for v in received)
        work = _Late(post) if late else post()
        self._transfers.append(_Moving(work, sent, received))
        for v in sent:
            self._sent.add(v)
        for v in received:
            self._received.add(v)
        if isinstance(work, TransferWork):
            return work
        self._open.clear()
        self._entries.append(work)
        return work.works[0]

    def _wait(self, works: Iterable[TransferWork | _Late]) -> None:
        started = (work.posted if isinstance(work, _Late) else work for work in works)
        self._comm._core.wait([p for t in started if t is not None for p in t.posted])

    def add_device_transfers(
        self,
        engine: DeviceEngine,
        transfers: list[Transfer],
        stream: int,
        result: Callable[[], Any],
        keep: tuple[Any, ...],
        in_order: AbstractContextManager[None],
    ) -> GroupWork:
        """Notes sends and receives on a GPU. Those that follow each other, on one stream, go on
        together.
        """
        together = self._together
        if together is None or (together.engine, together.stream) != (engine, stream):
            self._open.clear()
            together = self._together = _Together(engine, stream)
            self._entries.append(together)
        return together.add(transfers, result, keep, in_order)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        comm = self._comm
        comm._group = None
        if error is not None:
            self._give_up("the with block of its group()", error)
            return
        for entry in self._entries:
            try:
                entry.run()
            except BaseException as failed:
                for work in entry.works:
                    work.fail(failed)
                self._give_up("a call before it in its group()", failed)
                raise
        if self._transfers:
            works = [moving.work for moving in self._transfers]
            late = [work for work in works if isinstance(work, _Late)]
            try:
                self._wait(works)
            except BaseException as failed:
                for transfer in late:
                    transfer.works[0].fail(failed)
                raise
            for transfer in late:
                assert transfer.posted is not None, "all entries have run"
                transfer.works[0].complete(transfer.posted.wait())

    def _give_up(self, what: str, error: BaseException) -> None:
        """Settles the works of calls that have not ended."""
        why = CollectiveError(
            f"this call was not made: {what} raised {type(error).__name__}: {error}",
            rank=self._comm.rank,
        )
        why.__cause__ = error
        for entry in self._entries:
            for work in entry.works:
                work.fail(why)
