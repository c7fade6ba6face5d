"""How communicators of all ranks come about: `init`, `from_mpi` and `run_threads`."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .bootstrap import Threads, claimed, detect
from .calls import integer
from .communicator import Communicator
from .config import Settings, checked_seconds
from .device import keep_streams_apart
from .errors import CollectiveError, described
from .flight_recorder import starting


def init(source: Any = None, *, timeout: float | None = None, max_blocks: int = 0) -> Communicator:
    """The communicator of all ranks of this job. Collective.

    source      how ranks find each other; by itself this finds mpirun, torchrun, `python -m
                collectives run`, or a world of one. Otherwise an mpi4py communicator, a Bootstrap,
                or "mpi", "tcp", "torchrun", "solo".
    timeout     seconds that any wait lasts at most (COLLECTIVES_TIMEOUT, else 300)
    max_blocks  thread blocks that a call on device arrays may take at most, and so an upper bound
                for the multiprocessors that it takes from other kernels; 0: as many as help. Where
                ranks differ, the smallest bound counts for all.

    Raises BootstrapError or DeadlineError in words if ranks are missing, come twice or belong to
    another job.
    """
    settings, timeout = Settings(), checked_seconds(timeout, "timeout")
    with starting(settings.dump, *claimed(os.environ, settings)):
        return Communicator(detect(source, timeout=timeout), settings, max_blocks=max_blocks)


def from_mpi(comm: Any, *, timeout: float | None = None, max_blocks: int = 0) -> Communicator:
    """The same as `Communicator.from_mpi`."""
    return Communicator.from_mpi(comm, timeout=timeout, max_blocks=max_blocks)


class _Family:
    """The communicators that a rank which is a thread has: those of a process end with it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._members: weakref.WeakSet[Communicator] = weakref.WeakSet()
        self._reason = ""  # once it was aborted

    def add(self, made: Communicator) -> None:
        with self._lock:
            self._members.add(made)
            reason = self._reason
        if reason:
            made.abort(reason)

    def abort(self, reason: str) -> None:
        """Aborts those that live, and those that are still being made."""
        with self._lock:
            self._reason = reason
            members = list(self._members)
        for made in members:
            made.abort(reason)


class _Rank(Communicator):
    """A rank that is a thread.

    family  what was made of the first one, and of that; its own if it is the first
    """

    def __init__(self, *arguments: Any, family: _Family | None = None, **more: Any) -> None:
        self.family = family or _Family()  # before others are made in there
        super().__init__(*arguments, **more)

    def _made_of(self, *arguments: Any, **more: Any) -> Communicator:
        made = super()._made_of(*arguments, **more, family=self.family)
        self.family.add(made)
        return made


def _numbers(given: Any, name: str, what: str) -> list[int]:
    """An argument that names nodes or GPUs, as a list."""
    try:
        found = list(given)
    except TypeError as error:
        raise TypeError(f"{name} must be a list of numbers, such as [0], not {given!r}") from error
    numbers = [integer(number, name) for number in found]
    if any(not 0 <= number < 1 << 31 for number in numbers):
        raise ValueError(f"{name}={numbers}: a {what} is a number from 0 on")
    return numbers


def run_threads(
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    nodes: Sequence[int] | None = None,
    devices: Sequence[int] | None = None,
    timeout: float | None = None,
    max_blocks: int = 0,
) -> list[Any]:
    """Runs fn(comm, *args) on n ranks that are threads of this process; returns their results in
    rank order.

    nodes       node of each rank, to try the algorithms for several nodes
    devices     GPUs that the ranks work on, in turn, so that [0] is one for all. Ranks that share a
                GPU need a stream each (not the default one). Sets CUDA_DEVICE_MAX_CONNECTIONS and
                CUDA_MODULE_LOADING unless they are set, which works only before CUDA is used.
    timeout     seconds that any wait lasts at most
    max_blocks  of the communicators: see `init`

    The first exception of any rank is raised, after the others were told, also in what was split
    or duplicated of their communicators, and have ended. Where the caller is interrupted (Ctrl-C)
    the ranks are told too, and end at their next call.
    """
    if not isinstance(n, (int, np.integer)):
        raise TypeError(f"run_threads takes a number of ranks, not {n!r}")
    if n < 1:
        raise ValueError(f"run_threads needs at least one rank, not {n}")
    if devices is not None:
        devices = _numbers(devices, "devices", "GPU")
        if not devices:
            raise ValueError("devices=[] names no GPU; pass [0] for one that all ranks share")
        # (And no kernel may be loaded while another waits.)
        keep_streams_apart()
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    if nodes is not None:
        nodes = _numbers(nodes, "nodes", "node")
    settings, timeout = Settings(), checked_seconds(timeout, "timeout")
    ends = Threads.world(n, settings.timeout if timeout is None else timeout)
    results: list[Any] = [None] * n
    errors: list[BaseException | None] = [None] * n
    first: list[int] = []
    comms: list[_Rank] = []
    interruption: list[str] = []

    def body(rank: int) -> None:
        comm = None
        try:
            device = devices[rank % len(devices)] if devices is not None else None
            comm = _Rank(ends[rank], settings, nodes=nodes, device=device, max_blocks=max_blocks)
            comms.append(comm)
            for reason in interruption:
                comm.abort(reason)
            results[rank] = fn(comm, *args)
        except BaseException as error:  # handed to the caller below, whatever it is
            errors[rank] = error
            first.append(rank)
            words = f"rank {rank} raised {described(error)}"
            if comm is not None and not isinstance(error, CollectiveError):
                comm.abort(words)
            if comm is not None:
                comm.family.abort(words)
            ends[rank].fail(error)
        finally:
            if comm is not None:
                comm.close()

    threads = [
        threading.Thread(target=body, args=(r,), name=f"rank-{r}", daemon=True) for r in range(n)
    ]
    try:
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    except BaseException as cause:
        interruption.append(f"run_threads was interrupted by {type(cause).__name__}")
        ends[0].fail(cause)
        for made in list(comms):
            made.abort(interruption[0])
            made.family.abort(interruption[0])
        raise
    if first:
        error = errors[first[0]]
        assert error is not None
        raise error
    return results
