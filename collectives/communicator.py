"""The communicator: checks arguments, chooses an algorithm, runs the call.

Shapes. Collectives with blocks (reduce_scatter, all_gather, gather, scatter, all_to_all) split or join arrays along the first
axis. Where its length is no multiple of the number of ranks, reduce_scatter treats the array as flat and splits it like
numpy.array_split; the `_v` variants take the lengths of the blocks.

Memory. Arrays are worked on where they are; nothing is copied but into bounded staging slots. Immutable inputs (jax arrays,
bytes, numpy scalars) are never written: the call returns a new array.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _core
from . import schedule as _schedule
from .array import (
    View,
    check_overlap,
    dtype_name,
    finish,
    from_pointer,
    is_immutable,
    new_like,
    overlap,
    view,
)
from .bootstrap import Bootstrap, detect, host_key, node_key
from .config import Settings
from .errors import (
    ArrayError,
    BootstrapError,
    ClosedError,
    CollectiveError,
    UnsupportedError,
    did_you_mean,
)
from .tuning import Tuner, host_tuning, known_algorithm, region_sizes
from .work import CompletedWork, GroupWork, QueuedWork, TransferWork, Work

if TYPE_CHECKING:
    from types import TracebackType

_COLLECTIVE = {name: i for i, name in enumerate(_core.collectives)}
_DTYPE = {name: i for i, name in enumerate(_core.dtypes)}
_OP = {name: i for i, name in enumerate(_core.ops)}
_ORDER = {None: 0, "any": 0, "rank": 1}

_MPI_SLOT = 1 << 20
_MPI_DEPTH = 4
# Array bytes up to which group() packs all_reduce calls into one.
_PACK_BELOW = 256 << 10

# Regions of thread ranks, by the job of their bootstrap: the creator puts it here, the others find it.
_thread_regions: dict[str, Any] = {}


class Communicator:
    """One rank's end of a group of ranks. Made by `init`, `run_threads`, `from_mpi`, `split` or `duplicate`.

    rank, size               this rank, and how many there are
    node, nodes              index of this rank's node, and the node of every rank
    local_rank, local_size   the same within the node
    transports               what carries data: "threads", "shm", "mpi", "shm+mpi" or "self"

    Every collective is called by all ranks, in the same order and with matching arguments; a mismatch raises MismatchError on
    all of them before anything is written. One thread at a time.
    """

    def __init__(
        self,
        bootstrap: Bootstrap,
        settings: Settings | None = None,
        *,
        nodes: Sequence[int] | None = None,
    ) -> None:
        """Use `init` and the other constructors; collective over the bootstrap, which the communicator owns from here on."""
        settings = settings or Settings()
        self._bootstrap = bootstrap
        self._settings = settings
        self.rank = bootstrap.rank
        self.size = bootstrap.size
        self._closed = False
        self._children = itertools.count()
        self._segments = itertools.count(1)
        self._freed: list[int] = []
        self._group: _Group | None = None
        self._choices: dict[str, list[tuple[int, int]]] = {}
        self._forced: dict[tuple[str, str, int], int] = {}
        self._connect(settings, nodes)
        self._tuner = Tuner(
            self.nodes, bool(self._core.one_region) or self.size == 1, settings.algorithm
        )
        table = [(limit, i) for limit, i in self._table("all_reduce")]
        self._fast_all_reduce, self._call, self._submit = self._core.caller(table)

    # ---- set-up -------------------------------------------------------------------------------------------------------

    def _connect(self, settings: Settings, nodes: Sequence[int] | None) -> None:
        bootstrap = self._bootstrap
        threads = bootstrap.kind == "threads"
        has_mpi = bootstrap.kind == "mpi"
        mine = {
            "host": host_key(),
            "node": node_key(settings),
            "transport": settings.transport,
            "mpi": has_mpi,
            "pid": os.getpid(),
            "probe": _core.pull_probe(),
            "cpus": sorted(os.sched_getaffinity(0)),
        }
        infos = [json.loads(b) for b in bootstrap.all_gather(json.dumps(mine).encode())]
        transports = {i["transport"] for i in infos}
        if len(transports) > 1:
            raise BootstrapError(
                f"COLLECTIVES_TRANSPORT differs between ranks: {sorted(transports)}", rank=self.rank
            )
        transport = transports.pop()
        if transport == "mpi" and not has_mpi:
            raise UnsupportedError(
                f"COLLECTIVES_TRANSPORT=mpi, but the ranks met through {bootstrap.kind}, not MPI: start them with mpirun"
            )
        if transport == "threads" and not threads:
            raise UnsupportedError(
                "COLLECTIVES_TRANSPORT=threads, but the ranks are processes: use run_threads"
            )
        keys = [i["node"] for i in infos]
        order = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        self.nodes = list(nodes) if nodes is not None else [order[k] for k in keys]
        if len(self.nodes) != self.size:
            raise ValueError(f"nodes= names {len(self.nodes)} ranks, there are {self.size}")
        # Who shares a segment: the ranks of a host. With MPI, nodes set apart by COLLECTIVES_NODE really use it.
        reach = [i["host"] for i in infos] if not has_mpi else list(self.nodes)
        if transport == "mpi":
            reach = list(range(self.size))
        together = [r for r in range(self.size) if reach[r] == reach[self.rank]]
        self.node = self.nodes[self.rank]
        on_node = [r for r in range(self.size) if self.nodes[r] == self.node]
        self.local_rank, self.local_size = on_node.index(self.rank), len(on_node)
        cpus = {cpu for r in together for cpu in infos[r]["cpus"]}
        groups = [reach.count(key) for key in dict.fromkeys(reach)]
        self._tuning = host_tuning(len(together), len(cpus), messages=len(groups) > 1)

        region, failure = self._share_region(together, threads)
        pull = not threads and all(
            _core.can_read_process(infos[r]["pid"], *infos[r]["probe"]) for r in together
        )
        verdicts = [
            json.loads(b) for b in bootstrap.all_gather(json.dumps([failure, pull]).encode())
        ]
        failures = [failure for failure, _ in verdicts]
        pull = all(may for _, may in verdicts)
        if any(failures):
            words = "; ".join(f"rank {r}: {f}" for r, f in enumerate(failures) if f)
            if not has_mpi or transport == "shm":
                raise BootstrapError(f"the ranks cannot share memory: {words}", rank=self.rank)
            region, together = None, [self.rank]
            self.fallback = (
                f"MPI is used within nodes too, because the ranks cannot share memory: {words}"
            )
        else:
            self.fallback = ""
        mpi = None
        if has_mpi and (len(together) < self.size):
            from mpi4py import MPI

            mpi = _core.MpiTransport(
                MPI._handleof(bootstrap.comm),
                slot_bytes=_MPI_SLOT,
                depth=_MPI_DEPTH,
                timeout=bootstrap.timeout,
            )
        elif (
            any(
                len([r for r in range(self.size) if reach[r] == reach[q]]) < self.size
                for q in range(self.size)
            )
            and not has_mpi
        ):
            raise UnsupportedError(
                f"ranks {sorted(set(range(self.size)) - set(together))} are on other hosts than rank {self.rank}, and the ranks met through "
                f"{bootstrap.kind}: between hosts data go through MPI, so start the job with mpirun"
            )
        # Programs are cut to the smallest slot that any rank has, so that all cut alike.
        slots = [region_sizes(n).fifo_slot for n in groups if n > 1 and not self.fallback]
        slot_bytes = min(
            [*slots, *([_MPI_SLOT] if has_mpi and len(together) < self.size else [])],
            default=1 << 20,
        )
        self._core = _core.Communicator(
            rank=self.rank,
            nranks=self.size,
            node=self.nodes,
            local_of=[
                together.index(r) if r in together and region is not None else -1
                for r in range(self.size)
            ],
            region=region,
            mpi=mpi,
            threads=threads,
            tuning=self._tuning,
            can_pull=pull,
            slot_bytes=slot_bytes,
            timeout=bootstrap.timeout,
        )
        bootstrap.barrier()
        if region is not None and not threads:
            region.close_handle()
        _thread_regions.pop(bootstrap.job, None)
        self._mpi_transport = mpi

    def _share_region(self, together: list[int], threads: bool) -> tuple[Any, str]:
        """The segment of the ranks in `together`; ("", reason) if it cannot be shared. Collective over the bootstrap."""
        bootstrap = self._bootstrap
        sizes = region_sizes(len(together))._asdict()
        leader = self.rank == together[0]
        region, failure, handle = None, "", ""
        if leader and len(together) > 1:
            try:
                region = _core.make_region(not threads, len(together), **sizes)
                if threads:
                    _thread_regions[bootstrap.job] = region
                else:
                    handle = region.handle()
            except CollectiveError as error:
                failure = str(error)
        handles = bootstrap.all_gather(handle.encode())
        if not leader:
            try:
                region = (
                    _thread_regions[bootstrap.job]
                    if threads
                    else _core.open_region(handles[together[0]].decode(), len(together), **sizes)
                )
            except (CollectiveError, KeyError) as error:
                failure = str(error)
        return region, failure

    def split(
        self, color: int | None = None, key: int = 0, *, by: str | None = None
    ) -> Communicator | None:
        """New communicators of the ranks with equal `color`, ordered by `key`, then rank. Collective.

        color None: this rank gets none (None is returned). by="node": one for each node.
        """
        if by is not None:
            if by != "node":
                raise ValueError(f"by={by!r}; only 'node' is known")
            color = self.node
        self._check_open()
        answers = [
            json.loads(b) for b in self._bootstrap.all_gather(json.dumps([color, key]).encode())
        ]
        child = next(self._children)
        if color is None:
            return None
        members = sorted(
            (r for r, (c, _) in enumerate(answers) if c == color), key=lambda r: (answers[r][1], r)
        )
        name = f"split-{child}-{color}"
        nodes = [self.nodes[r] for r in members]
        renumbered = {node: i for i, node in enumerate(dict.fromkeys(nodes))}
        return Communicator(
            self._bootstrap.subgroup(members, name),
            self._settings,
            nodes=[renumbered[n] for n in nodes],
        )

    @classmethod
    def from_mpi(cls, comm: Any, *, timeout: float | None = None) -> Communicator:
        """The communicator of the ranks of an mpi4py communicator (or of a part of one). Collective over it."""
        return cls(detect(comm, timeout=timeout), Settings())

    def duplicate(self) -> Communicator:
        """A communicator of the same ranks whose calls never mix with this one's: for another thread, or a library. Collective."""
        twin = self.split(0, self.rank)
        assert twin is not None
        return twin

    def close(self) -> None:
        """Leaves the group and frees its memory. Calls after this raise ClosedError. Local; peers may close later."""
        if self._closed:
            return
        self._closed = True
        self._core.close()
        self._bootstrap.close()

    def abort(self, reason: str = "abort() was called") -> None:
        """Makes every rank's pending and later calls raise AbortedError. Local, any thread."""
        self._core.abort(reason)
        self._bootstrap.abort(reason)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        where = "closed" if self._closed else self.transports
        return f"<Communicator rank {self.rank} of {self.size}, {len(set(self.nodes))} node(s), {where}>"

    @property
    def transports(self) -> str:
        """What carries data: "threads", "shm", "mpi", "shm+mpi" or "self"."""
        return str(self._core.transports)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this communicator is closed", rank=self.rank)

    # ---- choosing -----------------------------------------------------------------------------------------------------

    def _intern(self, algorithm: str, collective: str, root: int = 0) -> int:
        """The core's number of an algorithm, which can then run `collective`."""
        key = (algorithm, collective, root)
        number = self._forced.get(key)
        if number is not None:
            return number
        known_algorithm(algorithm, (a.name for a in _schedule.algorithms()))
        why = _schedule.why_unsupported(
            algorithm, collective, self.size, root=root, node=self.nodes
        )
        if why:
            raise UnsupportedError(
                f"{algorithm} cannot do {collective} with these {self.size} ranks: {why}",
                rank=self.rank,
            )
        if _schedule.is_written(algorithm):
            written = _schedule.schedule(
                algorithm, collective, self.size, root=root, node=self.nodes
            )
            self._core.define(algorithm, written._core)
        number = self._forced[key] = self._core.intern(algorithm)
        return number

    def _table(self, collective: str) -> list[tuple[int, int]]:
        table = self._choices.get(collective)
        if table is None:
            table = [
                (c.limit, self._intern(c.algorithm, collective))
                for c in self._tuner.table(collective)
            ]
            self._choices[collective] = table
        return table

    def _algorithm(self, collective: str, nbytes: int, algorithm: str | None, root: int = 0) -> int:
        if algorithm is None or algorithm == "auto":
            if collective == "barrier":
                return -1  # the core's own: entering a call together is one
            return next(number for limit, number in self._table(collective) if nbytes <= limit)
        return self._intern(algorithm, collective, root)

    # ---- running ------------------------------------------------------------------------------------------------------

    def _op(self, op: str, dtype: str, factor: complex | None) -> tuple[int, float, float]:
        number = _OP.get(op)
        if number is None:
            raise ValueError(f"unknown op {op!r}; {did_you_mean(op, _core.ops)}")
        why = _core.why_op_unsupported(op, dtype)
        if why:
            raise UnsupportedError(why, rank=self.rank)
        if op == "premul_sum":
            if factor is None:
                raise ValueError("premul_sum multiplies every contribution: pass factor=")
            factor = complex(factor)
            if factor.imag and not dtype.startswith("complex"):
                raise ValueError(f"factor {factor} is complex, the arrays are {dtype}")
            return number, factor.real, factor.imag
        if factor is not None:
            raise ValueError(f"factor= belongs to op='premul_sum', not to {op!r}")
        return number, 1.0, 0.0

    def _root(self, root: int) -> int:
        if not 0 <= root < self.size:
            raise ValueError(f"root {root} is out of range: ranks are 0 to {self.size - 1}")
        return root

    def _run(
        self,
        collective: str,
        source: View | None,
        target: View | None,
        *,
        count: int = 0,
        in_blocks: Any = None,
        out_blocks: Any = None,
        dtype: str = "uint8",
        op: tuple[int, float, float] = (0, 1.0, 0.0),
        root: int = 0,
        nbytes: int = 0,
        algorithm: str | None = None,
        order: str | None = None,
        async_op: bool = False,
        result: Callable[[], Any],
        keep: tuple[Any, ...] = (),
    ) -> Any:
        """Runs or queues a call on checked views; what the user gets is `result()`, or a Work for it."""
        self._check_open()
        if order not in _ORDER:
            raise ValueError(f"order={order!r}; known: 'any', 'rank'")
        arguments = (
            _COLLECTIVE[collective],
            _DTYPE[dtype],
            op[0],
            root,
            source.pointer if source is not None else 0,
            target.pointer if target is not None else 0,
            count,
            in_blocks,
            out_blocks,
            self._algorithm(collective, nbytes, algorithm, root),
            _ORDER[order],
            op[1],
            op[2],
        )
        if self._group is not None:
            held = (source, target, *keep)  # must outlive the call, which the group makes later
            return self._group.add(lambda: (self._call(*arguments), result(), held)[1])
        if async_op:
            return QueuedWork(self._submit(*arguments), result, (source, target, *keep))
        self._call(*arguments)
        return result()

    def _in_out(
        self, what: str, x: Any, out: Any, shape: Callable[[View], Sequence[int]]
    ) -> tuple[View, View, Any, Callable[[], Any]]:
        """Input view, output view, output array and what to return, for a call whose output is another array."""
        source = view(x, writable=False, what=f"{what}: x")
        if out is None:
            buffer = new_like(x, tuple(shape(source)))
            return (
                source,
                view(buffer, writable=True, what=f"{what}: out"),
                buffer,
                lambda: finish(x, buffer),
            )
        target = view(out, writable=True, what=f"{what}: out")
        if target.dtype != source.dtype:
            raise ArrayError(
                f"{what}: x is {source.dtype}, out is {target.dtype}; both must be the same"
            )
        return source, target, out, lambda: out

    @staticmethod
    def _expect(what: str, name: str, got: int, expected: int) -> None:
        if got != expected:
            raise ArrayError(f"{what}: {name} has {got} elements, needed are {expected}")

    # ---- reductions ---------------------------------------------------------------------------------------------------

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
    ) -> Any:
        """Combines the arrays of all ranks element by element; every rank gets the result.

        x          array of any shape, the same count and dtype on all ranks
        op         "sum", "avg", "prod", "min", "max", "band", "bor", "bxor" or "premul_sum" (with `factor`)
        out        where the result goes; x itself if it can be written, else a new array
        algorithm  a registered name or a composition; chosen by size otherwise
        order      "rank": contributions are summed in rank order, left to right, whatever the algorithm
        async_op   returns a Work at once

        Returns the result array. Raises MismatchError on all ranks if they disagree, UnsupportedError for an op that the
        dtype lacks or an algorithm that cannot run here, ArrayError for strides, read-only or partly overlapping arrays.
        """
        if (
            out is None
            and algorithm is None
            and order is None
            and not async_op
            and op == "sum"
            and self._group is None
            and factor is None
        ):
            if self._fast_all_reduce(x):
                return x
        if out is None and not is_immutable(x):
            source = target = view(x, writable=True, what="all_reduce: x")
            buffer, result = x, lambda: x
        else:
            source, target, buffer, result = self._in_out("all_reduce", x, out, lambda v: v.shape)
            self._expect("all_reduce", "out", target.count, source.count)
            check_overlap(source, target, "all_reduce")
        operation = self._op(op, source.dtype, factor)
        if (
            self._group is not None
            and algorithm is None
            and order is None
            and source.nbytes < _PACK_BELOW
            and op != "premul_sum"
        ):
            return self._group.add_all_reduce(source, target, op, result)
        return self._run(
            "all_reduce", source, target, count=source.count, dtype=source.dtype, op=operation, nbytes=source.nbytes,
            algorithm=algorithm, order=order, async_op=async_op, result=result, keep=(x, buffer),
        )  # fmt: skip

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
    ) -> Any:
        """Combines the arrays of all ranks; `root` gets the result, in `out`, else in x. Others get None, their x is only read.

        Arguments and errors as for `all_reduce`.
        """
        root = self._root(root)
        if self.rank != root:
            source = view(x, writable=False, what="reduce: x")
            target, buffer, result = source, x, lambda: None
        elif out is None and not is_immutable(x):
            source = target = view(x, writable=True, what="reduce: x")
            buffer, result = x, lambda: x
        else:
            source, target, buffer, result = self._in_out("reduce", x, out, lambda v: v.shape)
            self._expect("reduce", "out", target.count, source.count)
            check_overlap(source, target, "reduce")
        scratch = None
        if self.rank != root:
            # Partial sums of trees pass through; they must not touch the caller's array.
            scratch = np.empty(source.nbytes, np.uint8)
            target = view(scratch, writable=True, what="reduce: scratch")
        return self._run(
            "reduce", source, target, count=source.count, dtype=source.dtype, op=self._op(op, source.dtype, factor), root=root,
            nbytes=source.nbytes, algorithm=algorithm, order=order, async_op=async_op, result=result, keep=(x, buffer, scratch),
        )  # fmt: skip

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
    ) -> Any:
        """Combines the arrays of all ranks; each rank gets one block of the result.

        x    shape (k·size, ...): rank r gets rows r·k to (r+1)·k, shape (k, ...). Otherwise x counts as flat and is split like
             numpy.array_split: the first ranks get one element more; shape (count,).
        out  where the block goes; may be this rank's own block of x. A new array otherwise.

        `all_gather` is the inverse (for unequal blocks with out= an array of the full size). Other arguments and errors as
        for `all_reduce`.
        """
        source = view(x, writable=False, what="reduce_scatter: x")
        even = bool(source.shape) and source.shape[0] % self.size == 0
        each, extra = divmod(source.count, self.size)
        mine = each + (self.rank < extra)
        shape = (source.shape[0] // self.size, *source.shape[1:]) if even else (mine,)
        source, target, buffer, result = self._in_out("reduce_scatter", x, out, lambda v: shape)
        self._expect("reduce_scatter", "out", target.count, mine)
        itemsize = source.nbytes // source.count if source.count else 1
        own = source.pointer + (self.rank * each + min(self.rank, extra)) * itemsize
        if target.pointer != own:
            check_overlap(source, target, "reduce_scatter")
        return self._run(
            "reduce_scatter", source, target, in_blocks=each if extra == 0 else (source.count,), dtype=source.dtype,
            op=self._op(op, source.dtype, factor), nbytes=source.nbytes, algorithm=algorithm, order=order, async_op=async_op,
            result=result, keep=(x, buffer),
        )  # fmt: skip

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
    ) -> Any:
        """`reduce_scatter` with blocks of `counts[r]` elements of the flat x for rank r; equal `counts` on all ranks."""
        lengths = self._counts(counts)
        source, target, buffer, result = self._in_out(
            "reduce_scatter_v", x, out, lambda v: (lengths[self.rank],)
        )
        self._expect("reduce_scatter_v", "x", source.count, sum(lengths))
        self._expect("reduce_scatter_v", "out", target.count, lengths[self.rank])
        check_overlap(source, target, "reduce_scatter_v")
        return self._run(
            "reduce_scatter", source, target, in_blocks=lengths, dtype=source.dtype, op=self._op(op, source.dtype, factor),
            nbytes=source.nbytes, algorithm=algorithm, order=order, async_op=async_op, result=result, keep=(x, buffer),
        )  # fmt: skip

    # ---- movements ----------------------------------------------------------------------------------------------------

    def broadcast(
        self, x: Any, root: int = 0, *, algorithm: str | None = None, async_op: bool = False
    ) -> Any:
        """Copies the array of `root` into x on every rank (a new array where x is immutable). Returns it.

        x  any shape; count and dtype equal on all ranks
        """
        root = self._root(root)
        if is_immutable(x):
            source, target, buffer, result = self._in_out("broadcast", x, None, lambda v: v.shape)
        else:
            source = target = view(x, writable=self.rank != root, what="broadcast: x")
            buffer, result = x, lambda: x
        return self._run(
            "broadcast", source, target, count=source.count, dtype=source.dtype, root=root, nbytes=source.nbytes,
            algorithm=algorithm, async_op=async_op, result=result, keep=(x, buffer),
        )  # fmt: skip

    def all_gather(
        self, x: Any, *, out: Any = None, algorithm: str | None = None, async_op: bool = False
    ) -> Any:
        """Joins the arrays of all ranks, in rank order, on every rank.

        x    shape (k, ...), equal on all ranks; the result has shape (size·k, ...); a scalar gives (size,)
        out  where the result goes (x may be this rank's own block of it). If its count is no multiple of size, blocks
             are those of numpy.array_split, as reduce_scatter makes them.
        """
        source = view(x, writable=False, what="all_gather: x")
        shape = (self.size * source.shape[0], *source.shape[1:]) if source.shape else (self.size,)
        source, target, buffer, result = self._in_out("all_gather", x, out, lambda v: shape)
        each, extra = divmod(target.count, self.size)
        mine = each + (self.rank < extra)
        if mine != source.count:
            raise ArrayError(
                f"all_gather: x has {source.count} elements and out {target.count}; with {self.size} ranks, rank {self.rank}'s block of out has "
                f"{mine}. For blocks of other lengths use all_gather_v"
            )
        itemsize = target.nbytes // target.count if target.count else 1
        if source.pointer != target.pointer + (self.rank * each + min(self.rank, extra)) * itemsize:
            check_overlap(source, target, "all_gather")
        return self._run(
            "all_gather", source, target, out_blocks=each if extra == 0 else (target.count,), dtype=source.dtype,
            nbytes=target.nbytes, algorithm=algorithm, async_op=async_op, result=result, keep=(x, buffer),
        )  # fmt: skip

    def all_gather_v(
        self,
        x: Any,
        counts: Sequence[int] | None = None,
        *,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """`all_gather` of arrays whose first axes differ in length.

        x       shape (counts[rank], ...); the result has shape (sum(counts), ...)
        counts  lengths of the first axes of all ranks, equal on all; found out with a small all_gather if not given
        """
        source = view(x, writable=False, what="all_gather_v: x")
        row = int(np.prod(source.shape[1:], dtype=np.int64)) if source.shape else 1
        rows = source.shape[0] if source.shape else 1
        lengths = (
            self._counts(counts)
            if counts is not None
            else [int(c) for c in self.all_gather(np.array([rows], np.int64))]
        )
        if lengths[self.rank] != rows:
            raise ArrayError(
                f"all_gather_v: x has {rows} rows, counts[{self.rank}] says {lengths[self.rank]}"
            )
        source, target, buffer, result = self._in_out(
            "all_gather_v", x, out, lambda v: (sum(lengths), *v.shape[1:])
        )
        self._expect("all_gather_v", "out", target.count, sum(lengths) * row)
        check_overlap(source, target, "all_gather_v")
        return self._run(
            "all_gather", source, target, out_blocks=[c * row for c in lengths], dtype=source.dtype, nbytes=target.nbytes,
            algorithm=algorithm, async_op=async_op, result=result, keep=(x, buffer),
        )  # fmt: skip

    def gather(
        self,
        x: Any,
        root: int = 0,
        *,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """`all_gather` whose result only `root` gets; the others get None."""
        return self._gather("gather", x, root, None, out, algorithm, async_op)

    def gather_v(
        self,
        x: Any,
        root: int = 0,
        counts: Sequence[int] | None = None,
        *,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """`all_gather_v` whose result only `root` gets; the others get None."""
        source = view(x, writable=False, what="gather_v: x")
        rows = source.shape[0] if source.shape else 1
        lengths = (
            self._counts(counts)
            if counts is not None
            else [int(c) for c in self.all_gather(np.array([rows], np.int64))]
        )
        if lengths[self.rank] != rows:
            raise ArrayError(
                f"gather_v: x has {rows} rows, counts[{self.rank}] says {lengths[self.rank]}"
            )
        return self._gather("gather_v", x, root, lengths, out, algorithm, async_op)

    def _gather(
        self,
        what: str,
        x: Any,
        root: int,
        lengths: list[int] | None,
        out: Any,
        algorithm: str | None,
        async_op: bool,
    ) -> Any:
        root = self._root(root)
        source = view(x, writable=False, what=f"{what}: x")
        row = int(np.prod(source.shape[1:], dtype=np.int64)) if source.shape else 1
        rows = (
            self.size * (source.shape[0] if source.shape else 1)
            if lengths is None
            else sum(lengths)
        )
        total = rows * row
        if self.rank == root:
            source, target, buffer, result = self._in_out(
                what, x, out, lambda v: (rows, *v.shape[1:])
            )
            self._expect(what, "out", target.count, total)
            offset = (
                self.rank * source.count if lengths is None else sum(lengths[: self.rank]) * row
            )
            if source.pointer != target.pointer + offset * (source.nbytes // max(1, source.count)):
                check_overlap(source, target, what)
        else:
            target, buffer, result = None, None, lambda: None  # type: ignore[assignment]
        itemsize = _core.itemsizes[source.dtype]
        return self._run(
            "gather", source, target, out_blocks=source.count if lengths is None else [c * row for c in lengths], dtype=source.dtype,
            root=root, nbytes=total * itemsize, algorithm=algorithm, async_op=async_op, result=result, keep=(x, buffer),
        )  # fmt: skip

    def scatter(
        self,
        x: Any,
        root: int = 0,
        *,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """Splits the array of `root` along its first axis; every rank gets its block.

        x    on root, shape (size·k, ...); ignored elsewhere (None is fine)
        out  where the block goes, shape (k, ...); needed on all ranks but root, which do not know shape and dtype otherwise
        """
        return self._scatter("scatter", x, root, None, out, algorithm, async_op)

    def scatter_v(
        self,
        x: Any,
        counts: Sequence[int],
        root: int = 0,
        *,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """`scatter` with blocks of `counts[r]` rows for rank r; equal `counts` on all ranks."""
        return self._scatter("scatter_v", x, root, self._counts(counts), out, algorithm, async_op)

    def _scatter(
        self,
        what: str,
        x: Any,
        root: int,
        lengths: list[int] | None,
        out: Any,
        algorithm: str | None,
        async_op: bool,
    ) -> Any:
        root = self._root(root)
        if self.rank == root:
            given = view(x, writable=False, what=f"{what}: x")
            rows = given.shape[0] if given.shape else 1
            if lengths is None and rows % self.size:
                raise ArrayError(
                    f"{what}: the first axis of x has length {rows}, no multiple of {self.size} ranks; use scatter_v"
                )
            if lengths is not None and sum(lengths) != rows:
                raise ArrayError(
                    f"{what}: the first axis of x has length {rows}, counts sum to {sum(lengths)}"
                )
            row = given.count // rows if rows else int(np.prod(given.shape[1:], dtype=np.int64))
            mine = rows // self.size if lengths is None else lengths[self.rank]
            source, target, buffer, result = self._in_out(
                what, x, out, lambda v: (mine, *v.shape[1:])
            )
            self._expect(what, "out", target.count, mine * row)
            blocks = [c * row for c in lengths] if lengths is not None else mine * row
        else:
            if out is None:
                raise ArrayError(
                    f"{what}: rank {self.rank} is not the root and must pass out= an array for its block"
                )
            source, target = None, view(out, writable=True, what=f"{what}: out")
            buffer, result = out, lambda: out
            if lengths is None:
                blocks = target.count
            else:
                rows = target.shape[0] if target.shape else 1
                if rows != lengths[self.rank]:
                    raise ArrayError(
                        f"{what}: out has {rows} rows, counts[{self.rank}] says {lengths[self.rank]}"
                    )
                row = int(np.prod(target.shape[1:], dtype=np.int64))
                blocks = [c * row for c in lengths]
        assert target is not None
        total = sum(blocks) if isinstance(blocks, list) else blocks * self.size
        return self._run(
            "scatter", source, target, in_blocks=blocks, dtype=target.dtype, root=root, nbytes=total * _core.itemsizes[target.dtype],
            algorithm=algorithm, async_op=async_op, result=result, keep=(x, buffer),
        )  # fmt: skip

    def all_to_all(
        self, x: Any, *, out: Any = None, algorithm: str | None = None, async_op: bool = False
    ) -> Any:
        """Sends block d of x to rank d; block s of the result came from rank s.

        x  shape (size·k, ...); the result has the same shape. With out=x the input is copied first.
        """
        source = view(x, writable=False, what="all_to_all: x")
        rows = source.shape[0] if source.shape else 1
        if rows % self.size:
            raise ArrayError(
                f"all_to_all: the first axis of x has length {rows}, no multiple of {self.size} ranks; use all_to_all_v"
            )
        source, target, buffer, result = self._in_out("all_to_all", x, out, lambda v: v.shape)
        self._expect("all_to_all", "out", target.count, source.count)
        check_overlap(source, target, "all_to_all")
        copy = None
        if overlap(source, target) == "same":
            copy = new_like(x, source.shape)
            copied = view(copy, writable=True)
            _copy(source, copied)
            source = copied
        each = source.count // self.size
        return self._run(
            "all_to_all", source, target, in_blocks=each, out_blocks=each, dtype=source.dtype, nbytes=source.nbytes,
            algorithm=algorithm, async_op=async_op, result=result, keep=(x, buffer, copy),
        )  # fmt: skip

    def all_to_all_v(
        self,
        x: Any,
        send_counts: Sequence[int],
        recv_counts: Sequence[int] | None = None,
        *,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """`all_to_all` with send_counts[d] rows of x for rank d.

        x            shape (sum(send_counts), ...); the result has shape (sum(recv_counts), ...)
        recv_counts  rows that come from each rank; found out with a small all_to_all if not given
        """
        sends = self._counts(send_counts)
        receives = (
            self._counts(recv_counts)
            if recv_counts is not None
            else [int(c) for c in self.all_to_all(np.array(sends, np.int64))]
        )
        source = view(x, writable=False, what="all_to_all_v: x")
        rows = source.shape[0] if source.shape else 1
        if sum(sends) != rows:
            raise ArrayError(
                f"all_to_all_v: the first axis of x has length {rows}, send_counts sum to {sum(sends)}"
            )
        row = int(np.prod(source.shape[1:], dtype=np.int64))
        source, target, buffer, result = self._in_out(
            "all_to_all_v", x, out, lambda v: (sum(receives), *v.shape[1:])
        )
        self._expect("all_to_all_v", "out", target.count, sum(receives) * row)
        if overlap(source, target) != "none":
            raise ArrayError("all_to_all_v: out shares memory with x; pass another array")
        return self._run(
            "all_to_all", source, target, in_blocks=[c * row for c in sends], out_blocks=[c * row for c in receives],
            dtype=source.dtype, nbytes=ANY_PAIR, algorithm=algorithm, async_op=async_op, result=result, keep=(x, buffer),
        )  # fmt: skip

    def barrier(self, *, algorithm: str | None = None, async_op: bool = False) -> Any:
        """Returns when all ranks have called it."""
        return self._run(
            "barrier", None, None, algorithm=algorithm, async_op=async_op, result=lambda: None
        )

    def _counts(self, counts: Sequence[int]) -> list[int]:
        lengths = [int(c) for c in counts]
        if len(lengths) != self.size:
            raise ValueError(f"counts has {len(lengths)} entries, there are {self.size} ranks")
        if min(lengths, default=0) < 0:
            raise ValueError(f"counts {lengths} has negative entries")
        return lengths

    # ---- point to point -----------------------------------------------------------------------------------------------

    def send(self, x: Any, dest: int, tag: int = 0, *, async_op: bool = False) -> Any:
        """Sends x to rank `dest`. Returns when x may be changed; a large message waits for its receiver.

        tag  0 to 2**32 - 1; matches a recv with the same tag
        """
        source = view(x, writable=False, what="send: x")
        posted = self._post("post_send", dest, tag, source, async_op or self._group is not None)
        return self._finish_transfers([posted], lambda: None, (x, source), async_op)

    def recv(self, out: Any, source: int, tag: int = 0, *, async_op: bool = False) -> Any:
        """Receives into `out` what rank `source` sends with `tag`; count and dtype must match. Returns out.

        Raises MismatchError if the message has another length or dtype; it is dropped then.
        """
        target = view(out, writable=True, what="recv: out")
        posted = self._post("post_recv", source, tag, target, async_op or self._group is not None)
        return self._finish_transfers([posted], lambda: out, (out, target), async_op)

    def sendrecv(
        self,
        x: Any,
        dest: int,
        out: Any,
        source: int,
        send_tag: int = 0,
        recv_tag: int = 0,
        *,
        async_op: bool = False,
    ) -> Any:
        """Sends x to `dest` and receives `out` from `source` at the same time: never a deadlock. Returns out."""
        outgoing = view(x, writable=False, what="sendrecv: x")
        incoming = view(out, writable=True, what="sendrecv: out")
        if overlap(outgoing, incoming) != "none":
            raise ArrayError("sendrecv: x and out share memory; pass two arrays")
        background = async_op or self._group is not None
        posted = [
            self._post("post_recv", source, recv_tag, incoming, background),
            self._post("post_send", dest, send_tag, outgoing, background),
        ]
        return self._finish_transfers(posted, lambda: out, (x, out, outgoing, incoming), async_op)

    def _post(self, method: str, peer: int, tag: int, v: View, background: bool) -> Any:
        self._check_open()
        if not 0 <= peer < self.size:
            raise ValueError(f"rank {peer} is out of range: ranks are 0 to {self.size - 1}")
        if not 0 <= tag < 1 << 32:
            raise ValueError(f"tag {tag} is out of range: 0 to 2**32 - 1")
        return getattr(self._core, method)(
            peer, tag, _DTYPE[v.dtype], v.pointer, v.nbytes, background
        )

    def _finish_transfers(
        self, posted: list[Any], result: Callable[[], Any], keep: tuple[Any, ...], async_op: bool
    ) -> Any:
        work = TransferWork(self._core, posted, result, keep)
        if self._group is not None:
            return self._group.add_transfers(work)
        if async_op:
            return work
        self._core.wait(posted)
        return result()

    # ---- groups -------------------------------------------------------------------------------------------------------

    def group(self) -> _Group:
        """Coalesces calls: inside `with comm.group():` calls are noted, and run together at its end.

        Small all_reduce calls with equal dtype and op become one; sends and receives progress together, whatever their order.
        Calls inside return a Work that is done after the block. All ranks group the same collectives.
        """
        self._check_open()
        return _Group(self)

    # ---- symmetric memory ---------------------------------------------------------------------------------------------

    def empty(
        self,
        shape: int | Sequence[int],
        dtype: Any = "float32",
        device: str = "cpu",
        *,
        kind: str = "numpy",
    ) -> Any:
        """An uninitialised symmetric array: mapped into all ranks of the node, so that collectives on it copy nothing. Collective.

        shape   equal on all ranks
        dtype   a name, or a numpy, torch, ml_dtypes or jax dtype
        kind    "numpy" or "torch"
        The memory lives as long as the array; ranks may drop theirs at different times.
        """
        if device != "cpu":
            raise UnsupportedError(
                f"device {device!r}: this build has symmetric memory on hosts only"
            )
        self._check_open()
        dims = (shape,) if isinstance(shape, int) else tuple(int(n) for n in shape)
        name = dtype_name(dtype)
        nbytes = int(np.prod(dims, dtype=np.int64)) * _core.itemsizes[name]
        freed, self._freed = self._freed, []
        mine = {"bytes": nbytes, "freed": freed, "handle": self._core.make_segment(nbytes)}
        answers = [json.loads(b) for b in self._bootstrap.all_gather(json.dumps(mine).encode())]
        sizes = {a["bytes"] for a in answers}
        if len(sizes) > 1:
            words = ", ".join(f"rank {r}: {a['bytes']} bytes" for r, a in enumerate(answers))
            raise ArrayError(f"empty: the ranks ask for different sizes ({words})")
        for gone in freed:
            self._core.release_segment(gone)
        segment = next(self._segments)
        pointer = self._core.open_segment(segment, nbytes, [a["handle"] for a in answers])
        owner = _SegmentOwner(self._core)
        weakref.finalize(owner, self._freed_list().append, segment).atexit = False
        self._bootstrap.barrier()
        return from_pointer(pointer, dims, name, owner=owner, kind=kind)

    def _freed_list(self) -> list[int]:
        return self._freed

    # ---- looking ------------------------------------------------------------------------------------------------------

    def explain(self, collective: str = "all_reduce", *, nbytes: int) -> str:
        """What would run for a call of `nbytes`, why, and what it is expected to take, as text."""
        from .tuning.explain import explain

        return explain(
            collective,
            nbytes,
            self.nodes,
            one_region=bool(self._core.one_region) or self.size == 1,
            tuner=self._tuner,
        )


# nbytes of an all_to_all_v: pairs have sizes of their own, which ranks cannot compare; the algorithm must not depend on them.
ANY_PAIR = 1 << 62


class _SegmentOwner:
    """Keeps a symmetric array's memory, and with it the core, alive."""

    def __init__(self, core: Any) -> None:
        self._core = core


def _copy(source: View, target: View) -> None:
    if source.nbytes:
        raw = from_pointer(target.pointer, (target.nbytes,), "uint8", owner=target.owner)
        raw[:] = from_pointer(source.pointer, (source.nbytes,), "uint8", owner=source.owner)


class _Group:
    """The calls between the begin and the end of `with comm.group():`."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._entries: list[tuple[Callable[[], Any], GroupWork]] = []
        self._packs: dict[
            tuple[str, str], list[tuple[View, View, Callable[[], Any], GroupWork]]
        ] = {}
        self._transfers: list[TransferWork] = []

    def __enter__(self) -> _Group:
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
            op=(_OP[op], 1.0, 0.0),
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


# ---- starting ----------------------------------------------------------------------------------------------------------


def init(source: Any = None, *, timeout: float | None = None) -> Communicator:
    """The communicator of all ranks of this job. Collective.

    source   how ranks find each other; by itself this finds mpirun, torchrun, `python -m collectives run`, or a world of one.
             Otherwise an mpi4py communicator, a Bootstrap, or "mpi", "tcp", "torchrun", "solo".
    timeout  seconds that any wait lasts at most (COLLECTIVES_TIMEOUT, else 300)

    Raises BootstrapError or DeadlineError in words if ranks are missing, come twice or belong to another job.
    """
    settings = Settings()
    return Communicator(detect(source, timeout=timeout), settings)


def from_mpi(comm: Any, *, timeout: float | None = None) -> Communicator:
    """The same as `Communicator.from_mpi`."""
    return Communicator.from_mpi(comm, timeout=timeout)


def run_threads(
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    nodes: Sequence[int] | None = None,
    timeout: float | None = None,
) -> list[Any]:
    """Runs fn(comm, *args) on n ranks that are threads of this process; returns their results in rank order.

    nodes    node of each rank, to try the algorithms for several nodes
    timeout  seconds that any wait lasts at most

    The first exception of any rank is raised, after the others were told and have ended.
    """
    from .bootstrap import Threads

    if n < 1:
        raise ValueError(f"run_threads needs at least one rank, not {n}")
    settings = Settings()
    ends = Threads.world(n, settings.timeout if timeout is None else timeout)
    results: list[Any] = [None] * n
    errors: list[BaseException | None] = [None] * n
    first: list[int] = []

    def body(rank: int) -> None:
        comm = None
        try:
            comm = Communicator(ends[rank], settings, nodes=nodes)
            results[rank] = fn(comm, *args)
        except BaseException as error:  # handed to the caller below, whatever it is
            errors[rank] = error
            first.append(rank)
            if comm is not None and not isinstance(error, CollectiveError):
                comm.abort(f"rank {rank} raised {type(error).__name__}: {error}")
            ends[rank].fail(error)
        finally:
            if comm is not None:
                comm.close()

    threads = [
        threading.Thread(target=body, args=(r,), name=f"rank-{r}", daemon=True) for r in range(n)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if first:
        error = errors[first[0]]
        assert error is not None
        raise error
    return results
