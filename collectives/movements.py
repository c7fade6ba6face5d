"""The collectives that move arrays without combining them.

`stream=` is that of `all_reduce`: for arrays on a GPU, the CUDA stream that the call is put on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import _core
from .array import (
    View,
    check_overlap,
    from_pointer,
    is_immutable,
    new_like,
    overlap,
    stream_of,
)
from .calls import ANY_PAIR, COLLECTIVES, Calls, room
from .device import view
from .errors import ArrayError
from .point_to_point import _landing

_ANY = -(1 << 62)  # place for a result: it will be made, or shares no memory with x


class Movements(Calls):
    """broadcast, the gathers, the scatters, all_to_all and barrier of a communicator."""

    def broadcast(
        self,
        x: Any,
        root: int = 0,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        stream: Any = None,
    ) -> Any:
        """Copies the array of `root` into x on every rank (a new array where x is immutable).
        Returns it.

        x  any shape; count and dtype equal on all ranks
        """
        key = None
        if algorithm is None and not async_op and type(root) is int:
            key = self._again(x, None, stream, "broadcast", root, writes=self.rank != root)
            if key == ():
                return x
        plain = not async_op and stream is None and type(x) is np.ndarray
        if plain and self._at_once("broadcast", x, None, algorithm, root=root):
            return x
        root = self._root(root)
        if is_immutable(x, "broadcast: x"):
            source = view(x, writable=False, what="broadcast: x")
            target, buffer, result = self._target(
                "broadcast", x, source, None, source.shape, stream
            )
        else:
            source = target = view(x, writable=self.rank != root, what="broadcast: x")
            buffer, result = x, lambda: x
        return self._run(
            "broadcast",
            source,
            target,
            count=source.count,
            dtype=source.dtype,
            root=root,
            nbytes=source.nbytes,
            algorithm=algorithm,
            async_op=async_op,
            stream=stream,
            result=result,
            keep=(x, buffer),
            key=key,
        )

    def all_gather(
        self,
        x: Any,
        *,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
        stream: Any = None,
    ) -> Any:
        """Joins the arrays of all ranks, in rank order, on every rank.

        x    shape (k, ...), equal on all ranks; the result has shape (size·k, ...); a scalar gives
             (size,)
        out  where the result goes (x may be this rank's own block of it). If its count is no
             multiple of size, blocks are those of numpy.array_split, as reduce_scatter makes them.
        """
        key = None
        if out is not None and algorithm is None and not async_op:
            key = self._again(x, out, stream, "all_gather")
            if key == ():
                return out
        if not async_op and stream is None and type(x) is np.ndarray:
            joined = room(x, self._joined(x.shape)) if out is None else out
            if self._at_once("all_gather", x, joined, algorithm):
                return joined
        source = view(x, writable=False, what="all_gather: x")
        shape = self._joined(source.shape)
        target, buffer, result = self._target("all_gather", x, source, out, shape, stream)
        each, extra = divmod(target.count, self.size)
        mine = each + (self.rank < extra)
        if mine != source.count:
            raise ArrayError(
                f"all_gather: x has {source.count} elements and out {target.count}; with "
                f"{self.size} ranks, rank {self.rank}'s block of out has {mine}. For blocks of "
                "other lengths use all_gather_v"
            )
        itemsize = target.nbytes // target.count if target.count else 1
        if source.pointer != target.pointer + (self.rank * each + min(self.rank, extra)) * itemsize:
            check_overlap(source, target, "all_gather")
        return self._run(
            "all_gather",
            source,
            target,
            out_blocks=each if extra == 0 else (target.count,),
            dtype=source.dtype,
            nbytes=target.nbytes,
            algorithm=algorithm,
            async_op=async_op,
            stream=stream,
            result=result,
            keep=(x, buffer),
            key=key,
        )

    def _told_at_once(self, collective: str, mine: list[int], out: int) -> list[int]:
        """What `collective` makes of the integers of all ranks: `out` of them. Inside a group too
        it is called now: the call that needs them is noted with its shapes.
        """
        self._check_open()
        if (group := self._group) is not None:
            group.check_thread()
        self._table(collective)
        told = np.empty(out, np.int64)
        made = self._plain(COLLECTIVES[collective], np.array(mine, np.int64), told, 0, 0, None)
        assert made, "two arrays of numpy"
        return [int(c) for c in told]

    def _lengths(
        self,
        what: str,
        source: View,
        counts: Sequence[int] | None,
        out: Any,
        forced: str | None,
        root: int = 0,
    ) -> list[int]:
        """Rows of all ranks, found out if `counts` is None: after all that can be wrong on one rank
        alone, so that it does not fall out of step. What the others must know for that, each tells
        them: of an `out` that does not fit all raise.

        forced  the algorithm, where the user named one
        """
        rows = source.shape[0] if source.shape else 1
        row = math.prod(source.shape[1:])
        if counts is not None:
            lengths = self._counts(counts)
            if lengths[self.rank] != rows:
                raise ArrayError(
                    f"{what}: x has {rows} rows, counts[{self.rank}] says {lengths[self.rank]}"
                )
            return lengths
        self._algorithm(what.removesuffix("_v"), source.nbytes, forced, root)
        room = at = _ANY
        if out is not None:
            target, _, _ = self._target(what, None, source, out, (), None)
            room = target.count
            if overlap(source, target) != "none":
                at = source.pointer - target.pointer
        told = self._told_at_once("all_gather", [rows, row, room, at], 4 * self.size)
        lengths = told[::4]
        size = _core.itemsizes[source.dtype]
        for rank, (row, room, at) in enumerate(
            zip(told[1::4], told[2::4], told[3::4], strict=True)
        ):
            if room not in (_ANY, sum(lengths) * row):
                raise ArrayError(
                    f"{what}: out has {room} elements on rank {rank}, needed are "
                    f"{sum(lengths) * row}"
                )
            if at not in (_ANY, sum(lengths[:rank]) * row * size):
                raise ArrayError(f"{what}: x overlaps out on rank {rank}, not as its own block")
        return lengths

    def all_gather_v(
        self,
        x: Any,
        counts: Sequence[int] | None = None,
        *,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
        stream: Any = None,
    ) -> Any:
        """`all_gather` of arrays whose first axes differ in length.

        x       shape (counts[rank], ...); the result has shape (sum(counts), ...). It may be this
                rank's own block of out.
        counts  lengths of the first axes of all ranks, equal on all; found out with a small
                all_gather if not given (at once, in a group too)
        """
        key = None
        if out is not None and counts is not None and algorithm is None and not async_op:
            counts = self._counts(counts)
            key = self._again(x, out, stream, "all_gather_v", *counts)
            if key == ():
                return out
        source = view(x, writable=False, what="all_gather_v: x")
        lengths = self._lengths("all_gather_v", source, counts, out, algorithm)
        row = math.prod(source.shape[1:])
        total = sum(lengths)
        shape = (total, *source.shape[1:])
        target, buffer, result = self._target("all_gather_v", x, source, out, shape, stream)
        self._expect("all_gather_v", "out", target.count, total * row)
        own = target.pointer + sum(lengths[: self.rank]) * row * _core.itemsizes[target.dtype]
        if source.pointer != own:
            check_overlap(source, target, "all_gather_v")
        return self._run(
            "all_gather",
            source,
            target,
            out_blocks=[c * row for c in lengths],
            dtype=source.dtype,
            nbytes=target.nbytes,
            algorithm=algorithm,
            async_op=async_op,
            stream=stream,
            result=result,
            keep=(x, buffer),
            key=key,
        )

    def gather(
        self,
        x: Any,
        root: int = 0,
        *,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
        stream: Any = None,
    ) -> Any:
        """`all_gather` whose result only `root` gets; the others get None."""
        if not async_op and stream is None and type(x) is np.ndarray:
            joined = None
            if self.rank == root:
                joined = room(x, self._joined(x.shape)) if out is None else out
            if self._at_once("gather", x, joined, algorithm, root=root):
                return joined
        return self._gather("gather", x, root, None, out, algorithm, async_op, stream)

    def gather_v(
        self,
        x: Any,
        root: int = 0,
        counts: Sequence[int] | None = None,
        *,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
        stream: Any = None,
    ) -> Any:
        """`all_gather_v` whose result only `root` gets; the others get None."""
        source = view(x, writable=False, what="gather_v: x")
        root = self._root(root)
        at_root = out if self.rank == root else None
        lengths = self._lengths("gather_v", source, counts, at_root, algorithm, root)
        return self._gather("gather_v", x, root, lengths, out, algorithm, async_op, stream)

    def _gather(
        self,
        what: str,
        x: Any,
        root: int,
        lengths: list[int] | None,
        out: Any,
        algorithm: str | None,
        async_op: bool,
        stream: Any,
    ) -> Any:
        root = self._root(root)
        source = view(x, writable=False, what=f"{what}: x")
        row = math.prod(source.shape[1:]) if source.shape else 1
        rows = (
            self.size * (source.shape[0] if source.shape else 1)
            if lengths is None
            else sum(lengths)
        )
        total = rows * row
        if self.rank == root:
            shape = (rows, *source.shape[1:])
            target, buffer, result = self._target(what, x, source, out, shape, stream)
            self._expect(what, "out", target.count, total)
            offset = (
                self.rank * source.count if lengths is None else sum(lengths[: self.rank]) * row
            )
            if source.pointer != target.pointer + offset * (source.nbytes // max(1, source.count)):
                check_overlap(source, target, what)
        else:
            target, buffer, result = None, None, lambda: None
        itemsize = _core.itemsizes[source.dtype]
        return self._run(
            "gather",
            source,
            target,
            out_blocks=source.count if lengths is None else [c * row for c in lengths],
            dtype=source.dtype,
            root=root,
            nbytes=total * itemsize,
            algorithm=algorithm,
            async_op=async_op,
            stream=stream,
            result=result,
            keep=(x, buffer),
        )

    def scatter(
        self,
        x: Any,
        root: int = 0,
        *,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
        stream: Any = None,
    ) -> Any:
        """Splits the array of `root` along its first axis; every rank gets its block.

        x    on root, shape (size·k, ...); ignored elsewhere (None is fine)
        out  where the block goes, shape (k, ...); needed on all ranks but root, which do not know
             shape and dtype otherwise. jax arrays are never written: one says what comes, and a new
             one is returned
        """
        if not async_op and stream is None:
            block = out
            if out is None and self.rank == root and type(x) is np.ndarray:
                block = room(x, self._divided(x.shape))
            if self._at_once("scatter", x, block, algorithm, root=root):
                return block
        return self._scatter("scatter", x, root, None, out, algorithm, async_op, stream)

    def scatter_v(
        self,
        x: Any,
        counts: Sequence[int],
        root: int = 0,
        *,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
        stream: Any = None,
    ) -> Any:
        """`scatter` with blocks of `counts[r]` rows for rank r; equal `counts` on all ranks."""
        return self._scatter(
            "scatter_v", x, root, self._counts(counts), out, algorithm, async_op, stream
        )

    def _scatter(
        self,
        what: str,
        x: Any,
        root: int,
        lengths: list[int] | None,
        out: Any,
        algorithm: str | None,
        async_op: bool,
        stream: Any,
    ) -> Any:
        root = self._root(root)
        if self.rank == root:
            given = view(x, writable=False, what=f"{what}: x")
            rows = given.shape[0] if given.shape else 1
            if lengths is None and rows % self.size:
                raise ArrayError(
                    f"{what}: the first axis of x has length {rows}, no multiple of {self.size} "
                    "ranks; use scatter_v"
                )
            if lengths is not None and sum(lengths) != rows:
                raise ArrayError(
                    f"{what}: the first axis of x has length {rows}, counts sum to {sum(lengths)}"
                )
            row = given.count // rows if rows else math.prod(given.shape[1:])
            mine = rows // self.size if lengths is None else lengths[self.rank]
            source = given
            shape = (mine, *given.shape[1:])
            if out is None:
                target, buffer, result = self._target(what, x, source, None, shape, stream)
            else:
                (target, result), buffer = _landing(out, f"{what}: out"), out
                if target.dtype != source.dtype:
                    raise ArrayError(
                        f"{what}: x is {source.dtype}, out is {target.dtype}; both must be the same"
                    )
            self._expect(what, "out", target.count, mine * row)
            before = self.rank * mine if lengths is None else sum(lengths[: self.rank])
            own = source.pointer + before * row * _core.itemsizes[source.dtype]
            if target.pointer != own:
                check_overlap(source, target, what)
            blocks = [c * row for c in lengths] if lengths is not None else mine * row
        else:
            if out is None:
                raise ArrayError(
                    f"{what}: rank {self.rank} is not the root and must pass out= an array for its "
                    "block"
                )
            source, buffer = None, out
            target, result = _landing(out, f"{what}: out")
            if lengths is None:
                blocks = target.count
            else:
                rows = target.shape[0] if target.shape else 1
                if rows != lengths[self.rank]:
                    raise ArrayError(
                        f"{what}: out has {rows} rows, counts[{self.rank}] says "
                        f"{lengths[self.rank]}"
                    )
                row = math.prod(target.shape[1:])
                blocks = [c * row for c in lengths]
        assert target is not None
        total = sum(blocks) if isinstance(blocks, list) else blocks * self.size
        return self._run(
            "scatter",
            source,
            target,
            in_blocks=blocks,
            dtype=target.dtype,
            root=root,
            nbytes=total * _core.itemsizes[target.dtype],
            algorithm=algorithm,
            async_op=async_op,
            stream=stream,
            result=result,
            keep=(x, buffer),
        )

    def all_to_all(
        self,
        x: Any,
        *,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
        stream: Any = None,
    ) -> Any:
        """Sends block d of x to rank d; block s of the result came from rank s.

        x  shape (size·k, ...); the result has the same shape. With out=x the input is copied first.
        """
        key = None
        if out is not None and algorithm is None and not async_op:
            shape = getattr(x, "shape", None)
            key = self._again(x, out, stream, "all_to_all", shape, x is out)
            if key == ():
                return out
        if not async_op and stream is None and type(x) is np.ndarray:
            received = room(x, x.shape) if out is None else out
            if self._at_once("all_to_all", x, received, algorithm):
                return received
        source = view(x, writable=False, what="all_to_all: x")
        rows = source.shape[0] if source.shape else 1
        if rows % self.size:
            raise ArrayError(
                f"all_to_all: the first axis of x has length {rows}, no multiple of {self.size} "
                "ranks; use all_to_all_v"
            )
        target, buffer, result = self._target("all_to_all", x, source, out, source.shape, stream)
        self._expect("all_to_all", "out", target.count, source.count)
        check_overlap(source, target, "all_to_all")
        copy = None
        if overlap(source, target) == "same" and source.device == "cpu":
            copy = new_like(x, source.shape)
            copied, given = view(copy, writable=True), source
            if (group := self._group) is None:
                _copy(given, copied)
            else:  # calls and receives before it may change x
                group.add(lambda: _copy(given, copied), given, copied)
            source = copied
        each = source.count // self.size
        return self._run(
            "all_to_all",
            source,
            target,
            in_blocks=each,
            out_blocks=each,
            dtype=source.dtype,
            nbytes=source.nbytes,
            algorithm=algorithm,
            async_op=async_op,
            stream=stream,
            result=result,
            keep=(x, buffer, copy),
            key=key,
        )

    def all_to_all_v(
        self,
        x: Any,
        send_counts: Sequence[int],
        recv_counts: Sequence[int] | None = None,
        *,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
        stream: Any = None,
    ) -> Any:
        """`all_to_all` with send_counts[d] rows of x for rank d.

        x            shape (sum(send_counts), ...); the result has shape (sum(recv_counts), ...)
        recv_counts  rows that come from each rank; found out with a small all_to_all if not given
                     (at once, in a group too)
        """
        sends = self._counts(send_counts)
        source = view(x, writable=False, what="all_to_all_v: x")
        rows = source.shape[0] if source.shape else 1
        if sum(sends) != rows:
            raise ArrayError(
                f"all_to_all_v: the first axis of x has length {rows}, send_counts sum to "
                f"{sum(sends)}"
            )
        if recv_counts is not None:
            receives = self._counts(recv_counts)
        else:  # after what can be wrong on this rank alone, but for the length of out
            self._algorithm("all_to_all", ANY_PAIR, algorithm)
            if out is not None:
                self._target("all_to_all_v", None, source, out, (), None)
            receives = self._told_at_once("all_to_all", sends, self.size)
        row = math.prod(source.shape[1:])
        shape = (sum(receives), *source.shape[1:])
        target, buffer, result = self._target("all_to_all_v", x, source, out, shape, stream)
        self._expect("all_to_all_v", "out", target.count, sum(receives) * row)
        if overlap(source, target) != "none":
            raise ArrayError("all_to_all_v: out shares memory with x; pass another array")
        return self._run(
            "all_to_all",
            source,
            target,
            in_blocks=[c * row for c in sends],
            out_blocks=[c * row for c in receives],
            dtype=source.dtype,
            nbytes=ANY_PAIR,
            algorithm=algorithm,
            async_op=async_op,
            stream=stream,
            result=result,
            keep=(x, buffer),
        )

    def barrier(
        self, *, algorithm: str | None = None, async_op: bool = False, stream: Any = None
    ) -> Any:
        """Returns when all ranks have called it.

        stream  a CUDA stream, an object or a handle: what is put on it after this call runs once
                the streams of all ranks have come this far; the host does not wait. Needs device
                arrays before, or run_threads(devices=...).
        """
        if stream is not None:
            return self._barrier_on(stream_of(stream, "barrier"), async_op)
        if not async_op and self._at_once("barrier", None, None, algorithm):
            if self._in_flight.held:
                self._in_flight.tidy()
            return None
        return self._run(
            "barrier", None, None, algorithm=algorithm, async_op=async_op, result=lambda: None
        )


def _copy(source: View, target: View) -> None:
    if source.nbytes:
        raw = from_pointer(target.pointer, (target.nbytes,), "uint8", owner=target.owner)
        raw[:] = from_pointer(source.pointer, (source.nbytes,), "uint8", owner=source.owner)
