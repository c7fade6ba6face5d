"""The collectives that combine arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import _core
from .array import check_overlap, is_immutable
from .calls import Calls, room
from .device import view
from .tuning import PACK_BELOW


class Reductions(Calls):
    """all_reduce, reduce and reduce_scatter of a communicator."""

    def all_reduce(
        self,
        x: Any,
        op: str = "sum",
        *,
        out: Any = None,
        factor: complex | None = None,
        algorithm: str | None = None,
        order: str | None = None,
        async_op: bool = False,
        stream: Any = None,
    ) -> Any:
        """Combines the arrays of all ranks element by element; every rank gets the result.

        x          array of any shape, the same count and dtype on all ranks
        op         "sum", "avg", "prod", "min", "max", "band", "bor", "bxor" or "premul_sum" (with
                   `factor`)
        out        where the result goes; x itself if it can be written, else a new array
        algorithm  a registered name or a composition; chosen by size otherwise
        order      "rank": contributions are summed in rank order, left to right, whatever the
                   algorithm
        async_op   returns a Work at once
        stream     for arrays on a GPU, the CUDA stream that the call is put on: an object of cupy,
                   torch or another library, or its handle as an integer. The current stream of the
                   array's library otherwise.

        Returns the result array. Raises MismatchError on all ranks if they disagree,
        UnsupportedError for an op that the dtype lacks or an algorithm that cannot run here,
        ArrayError for strides, read-only or partly overlapping arrays.
        """
        key = None
        if algorithm is None and not async_op and factor is None and self._group is None:
            # Loaded before it is called: as a method CPython would look it up in all bases first,
            # which takes 12 of 230 ns.
            known = self._known
            if known is not None:
                key = known.call(x, out, stream, ("all_reduce", op, order))
                if key == ():
                    return x if out is None else out
            if op == "sum" and order is None and stream is None:
                plain_sum = self._fast_sum
                if out is None:
                    if plain_sum(x):
                        return x
                elif plain_sum(x, out):
                    return out
        plain = type(x) is np.ndarray and factor is None and order is None and stream is None
        if plain and not async_op and self._at_once("all_reduce", x, out, algorithm, op=op):
            return x if out is None else out
        if out is None and not is_immutable(x, "all_reduce: x"):
            source = target = view(x, writable=True, what="all_reduce: x")
            buffer, result = x, lambda: x
        else:
            source = view(x, writable=False, what="all_reduce: x")
            target, buffer, result = self._target(
                "all_reduce", x, source, out, source.shape, stream
            )
            self._expect("all_reduce", "out", target.count, source.count)
            check_overlap(source, target, "all_reduce")
        operation = self._op(op, source.dtype, factor)
        if (
            (group := self._group) is not None
            and algorithm is None
            and order is None
            and source.nbytes < PACK_BELOW
            and source.device == "cpu"
            and op != "premul_sum"
            and stream is None
        ):
            return group.add_all_reduce(source, target, op, result)
        return self._run(
            "all_reduce",
            source,
            target,
            count=source.count,
            dtype=source.dtype,
            op=operation,
            nbytes=source.nbytes,
            algorithm=algorithm,
            order=order,
            async_op=async_op,
            stream=stream,
            result=result,
            keep=(x, buffer),
            key=key,
        )

    def reduce(
        self,
        x: Any,
        root: int = 0,
        op: str = "sum",
        *,
        out: Any = None,
        factor: complex | None = None,
        algorithm: str | None = None,
        order: str | None = None,
        async_op: bool = False,
        stream: Any = None,
    ) -> Any:
        """Combines the arrays of all ranks; `root` gets the result, in `out`, else in x. Others get
        None, their x is only read.

        Arguments and errors as for `all_reduce`.
        """
        plain = type(x) is np.ndarray and factor is None and order is None and stream is None
        if plain and not async_op and self._at_once("reduce", x, out, algorithm, op=op, root=root):
            return None if self.rank != root else x if out is None else out
        root = self._root(root)
        if self.rank != root:
            source = view(x, writable=False, what="reduce: x")
            target, buffer, result = source, x, lambda: None
        elif out is None and not is_immutable(x, "reduce: x"):
            source = target = view(x, writable=True, what="reduce: x")
            buffer, result = x, lambda: x
        else:
            source = view(x, writable=False, what="reduce: x")
            target, buffer, result = self._target("reduce", x, source, out, source.shape, stream)
            self._expect("reduce", "out", target.count, source.count)
            check_overlap(source, target, "reduce")
        return self._run(
            "reduce",
            source,
            target,
            count=source.count,
            dtype=source.dtype,
            op=self._op(op, source.dtype, factor),
            root=root,
            nbytes=source.nbytes,
            algorithm=algorithm,
            order=order,
            async_op=async_op,
            stream=stream,
            result=result,
            keep=(x, buffer),
        )

    def reduce_scatter(
        self,
        x: Any,
        op: str = "sum",
        *,
        out: Any = None,
        factor: complex | None = None,
        algorithm: str | None = None,
        order: str | None = None,
        async_op: bool = False,
        stream: Any = None,
    ) -> Any:
        """Combines the arrays of all ranks; each rank gets one block of the result.

        x    shape (k·size, ...): rank r gets rows r·k to (r+1)·k, shape (k, ...). Otherwise x
             counts as flat and is split like numpy.array_split: the first ranks get one element
             more; shape (count,).
        out  where the block goes; may be this rank's own block of x. A new array otherwise.

        `all_gather` is the inverse (for unequal blocks with out= an array of the full size). Other
        arguments and errors as for `all_reduce`.
        """
        key = None
        if out is not None and algorithm is None and factor is None and not async_op:
            key = self._again(x, out, stream, "reduce_scatter", op, order)
            if key == ():
                return out
        plain = type(x) is np.ndarray and factor is None and order is None and stream is None
        if plain and not async_op:
            block = room(x, self._divided(x.shape)) if out is None else out
            if self._at_once("reduce_scatter", x, block, algorithm, op=op):
                return block
        source = view(x, writable=False, what="reduce_scatter: x")
        each, extra = divmod(source.count, self.size)
        mine = each + (self.rank < extra)
        shape = self._divided(source.shape) or (mine,)
        target, buffer, result = self._target("reduce_scatter", x, source, out, shape, stream)
        self._expect("reduce_scatter", "out", target.count, mine)
        itemsize = source.nbytes // source.count if source.count else 1
        own = source.pointer + (self.rank * each + min(self.rank, extra)) * itemsize
        if target.pointer != own:
            check_overlap(source, target, "reduce_scatter")
        return self._run(
            "reduce_scatter",
            source,
            target,
            in_blocks=each if extra == 0 else (source.count,),
            dtype=source.dtype,
            op=self._op(op, source.dtype, factor),
            nbytes=source.nbytes,
            algorithm=algorithm,
            order=order,
            async_op=async_op,
            stream=stream,
            result=result,
            keep=(x, buffer),
            key=key,
        )

    def reduce_scatter_v(
        self,
        x: Any,
        counts: Sequence[int],
        op: str = "sum",
        *,
        out: Any = None,
        factor: complex | None = None,
        algorithm: str | None = None,
        order: str | None = None,
        async_op: bool = False,
        stream: Any = None,
    ) -> Any:
        """`reduce_scatter` with blocks of `counts[r]` elements of the flat x for rank r; equal
        `counts` on all ranks. `out` may be this rank's own block of x.
        """
        lengths = self._counts(counts)
        key = None
        if out is not None and algorithm is None and factor is None and not async_op:
            key = self._again(x, out, stream, "reduce_scatter_v", op, order, *lengths)
            if key == ():
                return out
        source = view(x, writable=False, what="reduce_scatter_v: x")
        target, buffer, result = self._target(
            "reduce_scatter_v", x, source, out, (lengths[self.rank],), stream
        )
        self._expect("reduce_scatter_v", "x", source.count, sum(lengths))
        self._expect("reduce_scatter_v", "out", target.count, lengths[self.rank])
        own = source.pointer + sum(lengths[: self.rank]) * _core.itemsizes[source.dtype]
        if target.pointer != own:
            check_overlap(source, target, "reduce_scatter_v")
        return self._run(
            "reduce_scatter",
            source,
            target,
            in_blocks=lengths,
            dtype=source.dtype,
            op=self._op(op, source.dtype, factor),
            nbytes=source.nbytes,
            algorithm=algorithm,
            order=order,
            async_op=async_op,
            stream=stream,
            result=result,
            keep=(x, buffer),
            key=key,
        )
