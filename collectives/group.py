"""Groups: calls that are noted in a `with` block, and run together at its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _core
from .array import View, from_pointer, view
from .calls import OPS, Calls
from .errors import CollectiveError
from .work import GroupWork, TransferWork

if TYPE_CHECKING:
    from types import TracebackType


class Group:
    """The calls between the begin and the end of `with comm.group():`."""

    def __init__(self, comm: Calls) -> None:
        self._comm = comm
        self._entries: list[tuple[Callable[[], Any], GroupWork]] = []
        self._packs: dict[
            tuple[str, str], list[tuple[View, View, Callable[[], Any], GroupWork]]
        ] = {}
        self._transfers: list[TransferWork] = []

    def __enter__(self) -> Group:
        if self._comm._group is not None:
            raise CollectiveError("groups do not nest", rank=self._comm.rank)
        self._comm._group = self
        return self

    def add(self, run: Callable[[], Any]) -> GroupWork:
        work = GroupWork()
        self._entries.append((run, work))
        return work

    def add_all_reduce(
        self, source: View, target: View, op: str, result: Callable[[], Any]
    ) -> GroupWork:
        work = GroupWork()
        pack = self._packs.get((source.dtype, op))
        if pack is None:
            pack = self._packs[source.dtype, op] = []
            self._entries.append((lambda: self._run_pack(source.dtype, op), GroupWork()))
        pack.append((source, target, result, work))
        return work

    def add_transfers(self, work: TransferWork) -> TransferWork:
        self._transfers.append(work)
        return work

    def _run_pack(self, dtype: str, op: str) -> None:
        comm = self._comm
        pack = self._packs[dtype, op]
        total = sum(s.nbytes for s, _, _, _ in pack)
        packed = np.empty(total, np.uint8)
        at = 0
        for source, _, _, _ in pack:
            if source.nbytes:
                packed[at : at + source.nbytes] = from_pointer(
                    source.pointer, (source.nbytes,), "uint8", owner=source.owner
                )
            at += source.nbytes
        v = view(packed, writable=True)
        count = total // _core.itemsizes[dtype]
        comm._run(
            "all_reduce",
            v,
            v,
            count=count,
            dtype=dtype,
            op=(OPS[op], 1.0, 0.0),
            nbytes=total,
            result=lambda: None,
        )
        at = 0
        for _, target, result, work in pack:
            if target.nbytes:
                from_pointer(target.pointer, (target.nbytes,), "uint8", owner=target.owner)[:] = (
                    packed[at : at + target.nbytes]
                )
            at += target.nbytes
            work.complete(result())

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
