"""Groups: calls that are noted in a `with` block, and run together at its end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _core
from .array import View, from_pointer, view
from .calls import OPS, Calls
from .errors import CollectiveError
from .work import GroupWork, TransferWork

if TYPE_CHECKING:
    from types import TracebackType

    from .device import DeviceEngine, Transfer


class _Pack:
    """all_reduce calls of one dtype and op that run as one."""

    def __init__(self, dtype: str, op: str) -> None:
        self.dtype = dtype
        self.op = op
        self.calls: list[tuple[View, View, Callable[[], Any], GroupWork]] = []
        self.written: set[int] = set()  # addresses of the results

    def depends(self, source: View) -> bool:
        """True if a call on `source` needs the result of one that is in here."""
        return source.nbytes != 0 and source.pointer in self.written

    def add(self, source: View, target: View, result: Callable[[], Any]) -> GroupWork:
        work = GroupWork()
        self.calls.append((source, target, result, work))
        self.written.add(target.pointer)
        return work

    def run(self, comm: Calls) -> None:
        total = sum(s.nbytes for s, _, _, _ in self.calls)
        packed = np.empty(total, np.uint8)
        at = 0
        for source, _, _, _ in self.calls:
            if source.nbytes:
                packed[at : at + source.nbytes] = _bytes(source)
            at += source.nbytes
        v = view(packed, writable=True)
        comm._run(
            "all_reduce",
            v,
            v,
            count=total // _core.itemsizes[self.dtype],
            dtype=self.dtype,
            op=(OPS[self.op], 1.0, 0.0),
            nbytes=total,
            result=lambda: None,
        )
        at = 0
        for _, target, result, work in self.calls:
            if target.nbytes:
                _bytes(target)[:] = packed[at : at + target.nbytes]
            at += target.nbytes
            work.complete(result())


class _Together:
    """Sends and receives on a GPU that go on together."""

    def __init__(self, engine: DeviceEngine, stream: int) -> None:
        self.engine = engine
        self.stream = stream
        self._transfers: list[Transfer] = []
        self._calls: list[tuple[Callable[[], Any], GroupWork, Any]] = []

    def add(
        self, transfers: list[Transfer], result: Callable[[], Any], keep: tuple[Any, ...]
    ) -> GroupWork:
        self._transfers += transfers
        work = GroupWork()
        self._calls.append((result, work, keep))
        return work

    def run(self) -> None:
        self.engine.transfer(self._transfers, self.stream)
        for result, work, _ in self._calls:
            work.complete(result())


def _bytes(v: View) -> Any:
    return from_pointer(v.pointer, (v.nbytes,), "uint8", owner=v.owner)


class Group:
    """The calls between the begin and the end of `with comm.group():`.

    They run in the order written; all_reduce calls that follow each other, and do not need each
    other's results, are packed.
    """

    def __init__(self, comm: Calls) -> None:
        self._comm = comm
        self._entries: list[tuple[Callable[[], Any], GroupWork]] = []
        self._open: dict[tuple[str, str], _Pack] = {}  # packs that may still grow
        self._transfers: list[TransferWork] = []
        self._together: _Together | None = None  # sends and receives on a GPU that may still grow

    def __enter__(self) -> Group:
        if self._comm._group is not None:
            raise CollectiveError("groups do not nest", rank=self._comm.rank)
        self._comm._group = self
        return self

    def add(self, run: Callable[[], Any]) -> GroupWork:
        """Notes any call; later ones may need its result, so packs end here."""
        self._open.clear()
        self._together = None
        work = GroupWork()
        self._entries.append((run, work))
        return work

    def add_all_reduce(
        self, source: View, target: View, op: str, result: Callable[[], Any]
    ) -> GroupWork:
        """Notes an all_reduce that may be packed with others."""
        self._together = None
        if any(pack.depends(source) for pack in self._open.values()):
            self._open.clear()
        pack = self._open.get((source.dtype, op))
        if pack is None:
            pack = self._open[source.dtype, op] = _Pack(source.dtype, op)
            self._entries.append((partial(pack.run, self._comm), GroupWork()))
        return pack.add(source, target, result)

    def add_transfers(self, work: TransferWork) -> TransferWork:
        """Notes sends and receives that are under way."""
        self._transfers.append(work)
        return work

    def add_device_transfers(
        self,
        engine: DeviceEngine,
        transfers: list[Transfer],
        stream: int,
        result: Callable[[], Any],
        keep: tuple[Any, ...],
    ) -> GroupWork:
        """Notes sends and receives on a GPU. Those that follow each other, on one stream, go on
        together.
        """
        together = self._together
        if together is None or (together.engine, together.stream) != (engine, stream):
            together = _Together(engine, stream)
            self.add(together.run)
            self._together = together
        return together.add(transfers, result, keep)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        comm = self._comm
        comm._group = None
        if error is not None:
            return
        for run, work in self._entries:
            work.complete(run())
        if self._transfers:
            comm._core.wait([p for t in self._transfers for p in t.posted])
