"""Groups: calls that are noted in a `with` block, and run together at its end."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from itertools import dropwhile
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import _core
from .array import View, from_pointer, overlap, view
from .calls import COLLECTIVES, DTYPES, OPS, Calls
from .device import DeviceWork
from .errors import CollectiveError
from .work import GroupWork, TransferWork, Work

if TYPE_CHECKING:
    from types import TracebackType

    from .device import DeviceEngine, Transfer


class _Span(NamedTuple):
    """Of a view that is not there."""

    pointer: int
    nbytes: int


class _Ranges:
    """Bytes of memory, as ranges that rise and do not meet."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []

    def add(self, v: View | _Span) -> None:
        if not v.nbytes:
            return
        begin, end = v.pointer, v.pointer + v.nbytes
        low, high = bisect_left(self._ends, begin), bisect_right(self._begins, end)
        if low < high:  # these become one
            begin, end = min(begin, self._begins[low]), max(end, self._ends[high - 1])
        self._begins[low:high] = [begin]
        self._ends[low:high] = [end]

    def touch(self, v: View | _Span) -> bool:
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
        comm, place = self._comm, view(packed, writable=True).pointer
        comm._check_open()
        counts = [s.count for s, _, _ in self._calls]
        # What is packed is no call of its own to ranks that pack otherwise, if the sum is the same.
        parts = (counts,) if len(counts) > 1 else ()
        comm._call_with(
            (packed,),
            COLLECTIVES["all_reduce"], DTYPES[self._dtype], OPS[self._op], 0,
            place, place, sum(counts), None, None,
            comm._algorithm("all_reduce", total, None), 0, 1.0, 0.0, *parts,
        )  # fmt: skip
        at = 0
        for (_, target, result), work in zip(self._calls, self.works, strict=True):
            if target.nbytes:
                _bytes(target)[:] = packed[at : at + target.nbytes]
            at += target.nbytes
            work.complete(result())


class _Late:
    """Sends and receives that start when what is before them has run, whose arrays they need."""

    posted: TransferWork  # once it has run

    def __init__(self, post: Callable[[], TransferWork]) -> None:
        self._post = post
        self.works = [GroupWork()]

    def run(self) -> None:
        self.posted = self._post()
        self.works[0].complete(self.posted)


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
        self._sent, self._received = _Ranges(), _Ranges()
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
        for sends, span in _spans(transfers):
            (self._sent if sends else self._received).add(span)
        work = GroupWork()
        self._calls.append((result, keep, in_order))
        self.works.append(work)
        return work

    def before(self, transfers: list[Transfer]) -> bool:
        """True if some of these must come after those in here."""
        return any(
            self._received.touch(span) or (not sends and self._sent.touch(span))
            for sends, span in _spans(transfers)
        )

    def run(self) -> None:
        with ExitStack() as streams:
            for _, _, in_order in self._calls:
                streams.enter_context(in_order)
            self.engine.transfer(self._transfers, self.stream)
        for (result, keep, _), work in zip(self._calls, self.works, strict=True):
            work.complete(DeviceWork(self.engine, result, keep, self.stream))


def _spans(transfers: list[Transfer]) -> list[tuple[bool, _Span]]:
    """Of each: does it send, and its memory."""
    return [
        (sends, _Span(pointer, count * _core.itemsizes[_core.dtypes[dtype]]))
        for sends, _, _, dtype, pointer, count in transfers
    ]


def _meet(some: Iterable[View], others: Sequence[View]) -> bool:
    return any(overlap(v, other) != "none" for v in some for other in others)


def _bytes(v: View) -> Any:
    return from_pointer(v.pointer, (v.nbytes,), "uint8", owner=v.owner)


class Group:
    """The calls between the begin and the end of `with comm.group():`.

    They give what they give in the order written. all_reduce calls of one dtype and op that need
    not run one after the other, by the memory that they read and write, are packed; calls of other
    dtypes and ops may stand between them, other collectives may not. So the arrays of a group
    overlap alike on all ranks, or these raise MismatchError, as they do if the counts of packed
    calls differ.

    Sends and receives start as they are noted, but for those whose memory something before them
    has to do with, and those behind such ones: the messages of two ranks keep their order. A
    receive into what is sent before it waits until that was taken.
    """

    def __init__(self, comm: Calls) -> None:
        self._comm = comm
        self._entered = False
        self._thread = 0
        self._entries: list[_Call | _Pack | _Late | _Together] = []
        self._read, self._written = _Ranges(), _Ranges()  # by calls on the host so far
        # Packs that may still grow, in the order in which they run.
        self._open: dict[tuple[str, str], _Pack] = {}
        self._transfers: list[_Moving] = []
        self._late = False  # one of them is
        self._sent, self._received = _Ranges(), _Ranges()
        self._together: _Together | None = None  # sends and receives on a GPU that may still grow

    def __enter__(self) -> Group:
        if (group := self._comm._group) is not None:
            group.check_thread()
            raise CollectiveError("groups do not nest", rank=self._comm.rank)
        if self._entered:
            raise CollectiveError("a group is used once; call group() again", rank=self._comm.rank)
        self._entered = True
        self._thread = threading.get_ident()
        self._comm._group = self
        return self

    def check_thread(self) -> None:
        """Raises in another thread than that whose `with` block this is."""
        if threading.get_ident() != self._thread:
            raise CollectiveError(
                "this call was not made: another thread has a group() of this communicator open, "
                "and gathers its own calls; for each further thread make a communicator with "
                "duplicate()",
                rank=self._comm.rank,
            )

    def add(
        self, run: Callable[[], Any], source: View | None = None, target: View | None = None
    ) -> GroupWork:
        """Notes any call; later ones may need its result, so packs end here.

        source, target  what it reads and writes on the host
        """
        self.check_thread()
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
        self.check_thread()
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
        """A call on the host reads and writes these."""
        read, written = ([v] if v is not None else [] for v in (source, target))
        self._await_transfers(read, written)
        for v in read:
            self._read.add(v)
        for v in written:
            self._written.add(v)

    def _await_transfers(self, read: Sequence[View], written: Sequence[View]) -> bool:
        """Receives into the same memory end before what reads and writes these, and sends from what
        it writes. True if there are any.
        """
        meets = any(self._received.touch(v) for v in (*read, *written)) or any(
            self._sent.touch(v) for v in written
        )
        if meets:
            awaited = [
                moving.work
                for moving in self._transfers
                if _meet((*read, *written), moving.received) or _meet(written, moving.sent)
            ]
            self._open.clear()
            self._entries.append(_Call(lambda: self._wait(awaited)))
        return meets

    def add_transfers(
        self, post: Callable[[], TransferWork], sent: Sequence[View], received: Sequence[View]
    ) -> Work:
        """Notes sends and receives. They start now, unless what is before them has to do with their
        arrays, or starts later itself.
        """
        self.check_thread()
        self._late |= (
            self._await_transfers(sent, received)
            or any(self._written.touch(v) for v in (*sent, *received))
            or any(self._read.touch(v) for v in received)
        )
        work = _Late(post) if self._late else post()
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
        started = [work.posted if isinstance(work, _Late) else work for work in works]
        self._comm._core.wait([p for t in started for p in t.posted])
        for transfer in started:
            transfer.done()  # which lets go of its arrays

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
        together, but for a receive and what uses its memory before or after it.
        """
        self.check_thread()
        together = self._together
        if (
            together is None
            or (together.engine, together.stream) != (engine, stream)
            or together.before(transfers)
        ):
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
            self._wait(moving.work for moving in self._transfers)

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
