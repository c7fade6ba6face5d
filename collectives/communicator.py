"""The communicator: what users call.

Shapes. Collectives with blocks (reduce_scatter, all_gather, gather, scatter, all_to_all) split or
join arrays along the first axis. Where its length is no multiple of the number of ranks,
reduce_scatter treats the array as flat and splits it like numpy.array_split; the `_v` variants take
the lengths of the blocks.

Memory. Arrays are worked on where they are; nothing is copied but into bounded staging slots.
Immutable inputs (jax arrays, bytes, numpy scalars) are never written: the call returns a new array.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from . import _core
from .bootstrap import Bootstrap, detect
from .calls import integer
from .config import Settings, checked_seconds
from .connect import connect
from .device import checked_blocks, keep_streams_apart, view, wait_for
from .errors import ArrayError, ClosedError, CollectiveError, DeadlineError, UnsupportedError
from .flight_recorder import dump_when_told, starting, write_dump
from .group import Group
from .movements import Movements
from .point_to_point import PointToPoint
from .reductions import Reductions
from .registration import Registration
from .shrinking import Shrinking
from .staging import StagedEngine
from .symmetric import SymmetricMemory
from .tuning import Tuner
from .tuning.device import DeviceTuner
from .words import counted
from .work import InFlight

if TYPE_CHECKING:
    from types import TracebackType


def _lengths(shape: Any) -> tuple[int, ...]:
    """Of axes; a number, in an array of numpy too, is that of the only one."""
    alone = not isinstance(shape, Iterable) or getattr(shape, "shape", None) == ()
    return tuple(integer(n, "shape") for n in ((shape,) if alone else shape))


class Communicator(Reductions, Movements, PointToPoint):
    """One rank's end of a group of ranks. Made by `init`, `run_threads`, `from_mpi`, `split` or
    `duplicate`.

    rank, size               this rank, and how many there are
    node, nodes              index of this rank's node, and the node of every rank
    local_rank, local_size   the same within the node
    transports               what carries data: "threads", "shm", "mpi", "shm+mpi" or "self"
    fallback                 why MPI is used between ranks of one machine; "" if it is not, or if
                             that was asked for
    max_blocks               bound for the thread blocks of calls on device arrays; 0: none

    Every collective is called by all ranks, in the same order and with matching arguments; a
    mismatch raises MismatchError on all of them before anything is written. One thread at a time.
    """

    def __init__(
        self,
        bootstrap: Bootstrap,
        settings: Settings | None = None,
        *,
        nodes: Sequence[int] | None = None,
        device: int | None = None,
        max_blocks: int = 0,
    ) -> None:
        """Use `init` and the other constructors; collective over the bootstrap, which the
        communicator owns from here on.

        device      this rank's GPU, if the GPU engine is to be set up now rather than by the first
                    call on device arrays
        max_blocks  thread blocks that a call on device arrays may take at most: see `init`
        """
        if not hasattr(bootstrap, "subgroup"):
            raise TypeError(
                f"a communicator is made of a Bootstrap, not of a {type(bootstrap).__name__}; "
                "init() and from_mpi() find one"
            )
        settings = settings or Settings()
        dump_when_told(settings.dump)
        keep_streams_apart()
        try:
            self.max_blocks = checked_blocks(max_blocks)
            connection = connect(bootstrap, settings, nodes)
        except BaseException:
            bootstrap.close()
            raise
        self._bootstrap = bootstrap = connection.bootstrap
        self._settings = settings
        self._core = connection.core
        self._tuning = connection.tuning
        self.fallback = connection.fallback
        self._gpu_path = settings.gpu_path
        self._transports = connection.transports
        self.rank = bootstrap.rank
        self.size = bootstrap.size
        self.nodes = connection.nodes
        self.node = self.nodes[self.rank]
        on_node = [r for r in range(self.size) if self.nodes[r] == self.node]
        self.local_rank, self.local_size = on_node.index(self.rank), len(on_node)
        self._closed = False
        self._device = self._known = None
        self._ordinal = self.local_rank  # of this rank's GPU, while there is no engine
        self._moved_by_host = False
        self._group = None
        self._in_flight = InFlight(self._core)
        self._children = itertools.count()
        self._shrinking = Shrinking(self._core.council, self.rank, self._kind)
        self._memory = SymmetricMemory(self._core, bootstrap)
        self._choices = {}
        self._forced = {}
        self._hardware = connection.hardware
        self._tuner = Tuner(self.nodes, self._one_region, settings.algorithm, connection.table)
        self._gpu_table = connection.gpu_table
        self._choose_by(DeviceTuner(self.size, settings.algorithm))
        functions = self._core.caller()
        self._fast_sum, self._plain, self._transfer = functions[:3]
        self._choose, self._call, self._submit = functions[3:]
        self._table("all_reduce")  # which `_fast_sum` goes by
        if device is not None:
            self._set_up_device(device)

    def split(
        self,
        color: int | None = None,
        key: int = 0,
        *,
        by: str | None = None,
        timeout: float | None = None,
        max_blocks: int | None = None,
    ) -> Communicator | None:
        """New communicators of the ranks with equal `color`, ordered by `key`, then rank.
        Collective.

        color, key  integers; color None: this rank gets none (None is returned)
        by          "node": one for each node
        timeout     seconds that any wait of it lasts at most; as this one's unless given
        max_blocks  see `init`; this communicator's bound unless given
        """
        bound = self.max_blocks if max_blocks is None else checked_blocks(max_blocks)
        timeout = checked_seconds(timeout, "timeout")
        if by is not None:
            if by != "node":
                raise ValueError(f"by={by!r}; only 'node' is known")
            color = self.node
        key = integer(key, "key")
        if color is not None:
            color = integer(color, "color")
        self._check_open()
        mine = json.dumps([color, key]).encode()
        answers = [json.loads(b) for b in self._bootstrap.all_gather(mine, what="split")]
        child = next(self._children)
        if color is None:
            return None
        members = sorted(
            (r for r, (c, _) in enumerate(answers) if c == color), key=lambda r: (answers[r][1], r)
        )
        name = f"split-{child}-{color}"
        bootstrap = self._bootstrap.subgroup(members, name, timeout=timeout)
        return self._made_of(bootstrap, members, max_blocks=bound)

    @classmethod
    def from_mpi(
        cls, comm: Any, *, timeout: float | None = None, max_blocks: int = 0
    ) -> Communicator:
        """The communicator of the ranks of an mpi4py communicator (or of a part of one). Collective
        over it. Arguments as for `init`.
        """
        settings, timeout = Settings(), checked_seconds(timeout, "timeout")
        with starting(settings.dump, None, None):
            return cls(detect(comm, timeout=timeout), settings, max_blocks=max_blocks)

    def duplicate(
        self, timeout: float | None = None, *, max_blocks: int | None = None
    ) -> Communicator:
        """A communicator of the same ranks whose calls never mix with this one's: for another
        thread, or a library. Collective.

        timeout     seconds that any wait of it lasts at most; as this one's unless given
        max_blocks  see `init`; this communicator's bound unless given
        """
        twin = self.split(0, self.rank, timeout=timeout, max_blocks=max_blocks)
        assert twin is not None
        return twin

    def shrink(self, timeout: float | None = None) -> Communicator:
        """The communicator of the ranks that are left, after a failure or before: those that have
        not ended, have not closed, and call this too. They keep their order; numbers close ranks.
        Collective over them.

        timeout  seconds to wait for a rank that lives and does not come; then the others go on
                 without it, and its own call raises AbortedError (the communicator's own timeout
                 unless given)

        Call it where a call has raised PeerDiedError, AbortedError, DeadlineError or ClosedError.
        Asynchronous calls that are still queued end first: with their result on a communicator that
        works, with an error on one that does not. What a failed call has left in its arrays is
        undefined. This communicator stays as it was; close it. A rank that dies meanwhile is left
        out too.

        Works wherever all ranks share memory: as threads, as processes of one host however they
        met, and under mpirun where the MPI lets ranks outlive another. Raises UnsupportedError
        between nodes after a failure: an MPI communicator does not outlive a rank. A part that is
        on one node still can.
        """
        if self._closed:
            raise ClosedError("this communicator is closed", rank=self.rank)
        timeout = checked_seconds(timeout, "timeout")
        seconds = self._bootstrap.timeout if timeout is None else timeout
        if self.size > 1 and self._core.council is None:
            return self._shrink_over_mpi(seconds)
        if not self._core.drain(seconds):
            raise DeadlineError(
                f"shrink: {self._core.queued} asynchronous calls are not done after {seconds:g} s",
                rank=self.rank,
            )

        own = self._bootstrap.timeout
        made, members = self._shrinking.run(seconds, self._made_of, own)
        # `timeout` was for meeting the others; calls have as long as on this communicator.
        made._bootstrap.timeout, made._core.timeout = own, self._core.timeout
        if len(members) < self.size and not self._core.broken:
            # Who was left out may live, and wait in a call.
            self._core.abort(f"ranks {members} went on without the others (shrink)")
        return made

    def _shrink_over_mpi(self, seconds: float) -> Communicator:
        why = self._core.why_broken
        if not why:
            try:  # somebody may have died, and this rank not have noticed
                self._bootstrap.all_gather(b"", timeout=seconds, what="shrink")
                return self.duplicate()
            except CollectiveError as error:
                why = str(error)
        raise UnsupportedError(
            f"shrink: the ranks are on several nodes, and met through {self._bootstrap.kind}. "
            "Between nodes MPI carries everything, and an MPI communicator "
            "does not outlive a rank: MPI's extension for that, ULFM, is not used. Start the job "
            "again from its last checkpoint; a communicator of one node, if the program has one "
            f"(comm.split(comm.node), made before), can be shrunk (what failed: {why})",
            rank=self.rank,
        )

    def _of_ranks(self, members: Sequence[int], name: str) -> Communicator:
        """A communicator of some of the ranks, for an engine: what COLLECTIVES_ALGORITHM says is
        not about its calls. Collective over them.
        """
        settings = copy.copy(self._settings)
        settings.algorithm = ()
        bootstrap = self._bootstrap.subgroup(list(members), f"{name}-{members[0]}")
        return self._made_of(bootstrap, members, settings=settings)

    def _made_of(
        self,
        bootstrap: Bootstrap,
        members: Sequence[int],
        *,
        settings: Settings | None = None,
        max_blocks: int | None = None,
        **more: Any,
    ) -> Communicator:
        """A communicator of some of the ranks, who meet through `bootstrap` and keep their GPUs.
        What is None is as here; `more` is for a class derived from this one. Collective over them.
        """
        made = type(self)(
            bootstrap,
            settings or self._settings,
            nodes=self._nodes_of(members),
            max_blocks=self.max_blocks if max_blocks is None else max_blocks,
            **more,
        )
        made._ordinal = self._gpu
        return made

    @property
    def _gpu(self) -> int:
        """Ordinal of this rank's GPU, of those that there are."""
        return self._device.device if self._device is not None else self._ordinal

    def _nodes_of(self, members: Sequence[int]) -> list[int]:
        """Node of each of some ranks, numbered from 0."""
        nodes = [self.nodes[r] for r in members]
        renumbered = {node: i for i, node in enumerate(dict.fromkeys(nodes))}
        return [renumbered[n] for n in nodes]

    @property
    def _kind(self) -> str:
        return "threads" if self._core.transports == "threads" else "shm"

    def dump(self, path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
        """What the flight recorder holds of this communicator: its last calls with their states
        and times, what it waits for, and the last error. Local, any thread.

        path  a file to write it to as JSON too, for `python -m collectives doctor FILES...`

        The members are listed on the documentation's page *Flight recorder*.
        """
        found: dict[str, Any] = json.loads(self._core.dump())
        if path is not None:
            write_dump(found, path)
        return found

    def close(self) -> None:
        """Leaves the group and frees its memory. Calls after this raise ClosedError. Local; peers
        may close later.
        """
        if self._closed:
            return
        self._closed = True
        self._known = None
        if self._device is not None:
            self._device.close()
        try:
            while not self._core.drain(0.1):  # here handlers of signals run
                pass
        except CollectiveError:  # it is broken, so what is queued ends; or this is a forked child
            pass
        except BaseException as error:  # Ctrl-C
            self._core.abort(f"close() was interrupted by {type(error).__name__}")
            raise
        finally:
            self._core.close()
            self._memory.close()
            self._in_flight.forget()
            self._bootstrap.close()

    def __del__(self) -> None:
        # The queue ends before the arrays that it works on are freed.
        if hasattr(self, "_in_flight"):
            self._core.end_queue()

    def abort(self, reason: str = "abort() was called") -> None:
        """Makes every rank's pending and later calls raise AbortedError. Local, any thread."""
        reason = str(reason).encode("utf-8", "backslashreplace").decode()  # it goes to others
        # On the host first: where a peer's kernel leaves, its host finds the reason there.
        self._core.abort(reason)
        if self._device is not None:
            self._device.abort(reason)
        self._bootstrap.abort(reason)

    def synchronize(self, timeout: float | None = None) -> None:
        """Waits until all calls on device arrays have ended, and raises what went wrong in them.

        timeout  seconds; DeadlineError after them (a call's own deadline is the communicator's)
        """
        self._check_open()
        wait_for(self._device, timeout)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, KeyboardInterrupt) and self._core.queued:
            self.abort(f"rank {self.rank} was interrupted")  # what is queued may wait for long
        self.close()

    def __repr__(self) -> str:
        where = "closed" if self._closed else self.transports
        nodes = counted(len(set(self.nodes)), "node")
        return f"<Communicator rank {self.rank} of {self.size}, {nodes}, {where}>"

    @property
    def transports(self) -> str:
        """What carries data between ranks: "threads", "shm", "mpi", "shm+mpi" or "self"."""
        return self._transports

    @property
    def _one_region(self) -> bool:
        return self._core.one_region or self.size == 1

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a communicator cannot be copied or pickled: duplicate() makes another of its ranks"
        )

    def group(self) -> Group:
        """Coalesces calls: inside `with comm.group():` calls are noted, and run together at its
        end.

        Small all_reduce calls with equal dtype and op become one; sends and receives progress
        together, whatever their order, but for those on the same memory. Calls inside return a Work
        that is done after the block. All ranks group the same collectives, and one thread does.
        """
        self._check_open()
        return Group(self)

    def empty(
        self,
        shape: int | Sequence[int],
        dtype: Any = "float32",
        device: str = "cpu",
        *,
        kind: str | None = None,
    ) -> Any:
        """An uninitialised symmetric array: mapped into all ranks of the node, so that collectives
        on it copy nothing. Collective.

        shape   equal on all ranks
        dtype   a name, or a numpy, torch, ml_dtypes or jax dtype
        device  "cpu"; "cuda": this rank's GPU; or "cuda:N"
        kind    "numpy" (the default) or "torch"; on a GPU "cupy" or "torch" (by default the one
                that is imported)

        The memory lives as long as the array; ranks may drop theirs at different times. It is freed
        when the next one is made or the communicator is closed: until then calls may be at work in
        it. A part of a symmetric array on GPUs is passed by all ranks alike: the same array, at the
        same place in it; else MismatchError.
        """
        self._check_open()
        lengths = _lengths(shape)
        if not isinstance(device, str):
            raise TypeError(f"device must be 'cpu', 'cuda' or 'cuda:N', not {device!r}")
        if kind is not None and not isinstance(kind, str):
            raise TypeError(f"kind must be a name such as 'numpy', not {kind!r}")
        if device != "cpu":
            kind_of_device, _, number = device.partition(":")
            if kind_of_device != "cuda" or (device != "cuda" and not number.isdecimal()):
                raise ValueError(f"device={device!r}; known: 'cpu', 'cuda', 'cuda:N'")
            if device == "cuda":
                device = f"cuda:{self._gpu % max(_core.device_count()[0], 1)}"
            return self._engine(device).memory.empty(lengths, dtype, kind)
        return self._memory.empty(lengths, dtype, kind or "numpy")

    def register(self, array: Any) -> Registration:
        """Maps an array on a GPU that `empty` has not made into all ranks, so that calls on it, or
        on parts of it, copy nothing. Collective.

        array  of cupy, torch, or with the CUDA array interface: contiguous and writable, of as many
               bytes on all ranks. It may lie anywhere in its allocation, and elsewhere on each
               rank; but if it overlaps others that are registered, it does so alike on all.

        Works for memory that CUDA IPC exports: of cudaMalloc, and so of the default pools of cupy
        and torch. For any other the registration has `zero_copy` False and says `why`, on all ranks
        alike; calls work all the same, through FIFOs.

        While it is open, a part of it is passed by all ranks alike: the same registered array, at
        the same place in it; else MismatchError. It keeps the array, and ends with `close` or with
        the communicator. A call on memory that was freed meanwhile raises MismatchError on all
        ranks; what is allocated there later is an array as any other.

        Raises ArrayError on all ranks if sizes differ.
        """
        self._check_open()
        seen = view(array, writable=True, what="register: array")
        if seen.device == "cpu":
            raise ArrayError(
                "register is for arrays on GPUs, and this one is on the host; "
                "Communicator.empty makes symmetric arrays there"
            )
        return self._engine(seen.device).memory.register(array, seen)

    def explain(self, collective: str = "all_reduce", *, nbytes: int) -> str:
        """What would run for a call of `nbytes`, why, and what it is expected to take, as text."""
        from .tuning.explain import explain

        return explain(
            collective,
            nbytes,
            self.nodes,
            one_region=self._one_region,
            tuner=self._tuner,
            transport=self.transports if self.size > 1 else None,
            between=self._device.between if isinstance(self._device, StagedEngine) else None,
        )
