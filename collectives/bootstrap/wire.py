"""The wire of Tcp: a handshake of fixed lengths, then frames with a MAC.

server -> rank   magic, nonce                                 greeting
rank -> server   magic, nonce, HMAC(secret, "rank", nonces)   answer
server -> rank   verdict, HMAC(secret, "server", nonces)
both ways        kind, length, MAC, payload                   frames
"""

from __future__ import annotations

import hmac
import itertools
import json
import socket
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..config import DEFAULT_HEARTBEAT
from ..errors import CollectiveError
from .groups import Failure

MAGIC = b"CLLCTV1\n"
ACCEPTED = b"ACCEPTED"
REFUSED = b"REFUSED\0"
NONCE = 32
MAC = 32
GREETING = len(MAGIC) + NONCE
ANSWER = len(MAGIC) + NONCE + MAC
VERDICT = len(ACCEPTED) + MAC
HEADER = struct.Struct("!BQ")

HELLO, WELCOME, CALL, RESULT, ERROR, GOODBYE, ABORT = range(1, 8)

HELLO_LIMIT = 1 << 16  # bytes of a frame from a rank that has not joined
FRAME_LIMIT = 1 << 28  # bytes of any other: far above what set-up needs, far below a host's memory
HANDSHAKE_SECONDS = 10.0
GRACE = 5.0  # seconds that a rank waits past its deadline for the server to say who is missing
FOREVER = 1e9  # seconds
_LONGEST_IDLE = 32767  # seconds: the kernel refuses more (MAX_TCP_KEEPIDLE)


def prove(secret: bytes, role: bytes, server_nonce: bytes, rank_nonce: bytes) -> bytes:
    return hmac.digest(secret, b"collectives " + role + b"\0" + server_nonce + rank_nonce, "sha256")


class Link:
    """One direction each way of an authenticated connection: frames out, frames in. Does no I/O."""

    def __init__(self, key: bytes, ours: bytes, theirs: bytes, limit: int) -> None:
        self.limit = limit
        self._key = key
        self._ours, self._theirs = ours, theirs
        self._sent = self._received = 0
        self._buffer = bytearray()

    def seal(self, kind: int, payload: bytes) -> bytes:
        if len(payload) > FRAME_LIMIT:
            raise CollectiveError(
                f"{len(payload)} bytes are too many for the rendezvous, which takes {FRAME_LIMIT}"
            )
        header = HEADER.pack(kind, len(payload))
        mac = self._mac(self._ours, self._sent, header, payload)
        self._sent += 1
        return header + mac + payload

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> tuple[int, bytes] | None:
        """The next whole frame. Raises ValueError for one that is too long, or that no holder of
        the key has sent.
        """
        begin = HEADER.size + MAC
        if len(self._buffer) < HEADER.size:
            return None
        kind, length = HEADER.unpack_from(self._buffer)
        if length > self.limit:
            raise ValueError(f"a frame of {length} bytes; the limit is {self.limit}")
        if len(self._buffer) < begin + length:
            return None
        header = bytes(self._buffer[: HEADER.size])
        mac = bytes(self._buffer[HEADER.size : begin])
        payload = bytes(self._buffer[begin : begin + length])
        if not hmac.compare_digest(mac, self._mac(self._theirs, self._received, header, payload)):
            raise ValueError("a frame with a wrong MAC")
        del self._buffer[: begin + length]
        self._received += 1
        return kind, payload

    def _mac(self, role: bytes, number: int, header: bytes, payload: bytes) -> bytes:
        return hmac.digest(self._key, role + struct.pack("!Q", number) + header + payload, "sha256")


def bounded(seconds: float) -> float:
    """A number of seconds that clocks and sockets can work with, whatever a peer sent."""
    return seconds if 0 <= seconds < FOREVER else FOREVER


# What is in frames. Whatever the bytes are, decoding ends in a value or in ValueError.

_CALL_HEADER = struct.Struct("!dH")


def pack_call(op: str, data: bytes, timeout: float) -> bytes:
    name = op.encode()
    return _CALL_HEADER.pack(timeout, len(name)) + name + data


def unpack_call(payload: bytes) -> tuple[str, bytes, float]:
    begin = _CALL_HEADER.size
    if len(payload) < begin:
        raise ValueError(f"a call of {len(payload)} bytes")
    timeout, length = _CALL_HEADER.unpack_from(payload)
    if len(payload) < begin + length:
        raise ValueError(f"a call whose name has {length} bytes, of {len(payload)} in all")
    return payload[begin : begin + length].decode(), payload[begin + length :], timeout


def pack_list(parts: Sequence[bytes]) -> bytes:
    return struct.pack(f"!I{len(parts)}Q", len(parts), *map(len, parts)) + b"".join(parts)


def unpack_list(payload: bytes) -> list[bytes]:
    count = int.from_bytes(payload[:4], "big")
    if len(payload) < 4 + 8 * count:
        raise ValueError(f"a list of {count} parts in {len(payload)} bytes")
    lengths = [length for (length,) in struct.iter_unpack("!Q", payload[4 : 4 + 8 * count])]
    ends = list(itertools.accumulate(lengths, initial=4 + 8 * count))
    if ends[-1] != len(payload):
        raise ValueError(f"a list of {ends[-1]} bytes in {len(payload)}")
    return [payload[a:b] for a, b in itertools.pairwise(ends)]


def unpack_fields(payload: bytes) -> dict[str, Any]:
    """A JSON object."""
    try:
        fields = json.loads(payload)
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None
    if not isinstance(fields, dict):
        raise ValueError(f"JSON of a {type(fields).__name__}, where an object should be")
    return fields


class Hello(NamedTuple):
    """What a rank says of itself when it joins a group.

    timeout  seconds that it still waits
    asked    seconds that its user gave it
    """

    rank: int
    size: int
    group: str
    job: str
    timeout: float
    asked: float
    host: str
    pid: int


def pack_hello(hello: Hello) -> bytes:
    return json.dumps(hello._asdict()).encode()


def unpack_hello(payload: bytes) -> Hello:
    fields = unpack_fields(payload)
    kinds: list[Any] = [int, int, str, str, (int, float), (int, float), str, int]
    for name, kind in zip(Hello._fields, kinds, strict=True):
        got = fields.get(name)
        if not isinstance(got, kind) or isinstance(got, bool):
            raise ValueError(f"a hello whose {name} is {got!r:.40}")
    return Hello(**{name: fields[name] for name in Hello._fields})


class Welcome(NamedTuple):
    """What a rank hears when all have come: the group's job, and who runs the server."""

    job: str
    host: str


def pack_welcome(welcome: Welcome) -> bytes:
    return json.dumps(welcome._asdict()).encode()


def unpack_welcome(payload: bytes) -> Welcome:
    fields = unpack_fields(payload)
    return Welcome(str(fields.get("job", "")), str(fields.get("host", "")))


def pack_failure(failure: Failure) -> bytes:
    return json.dumps(failure._asdict()).encode()


def unpack_failure(payload: bytes) -> Failure:
    fields = unpack_fields(payload)
    peer = fields.get("peer")
    return Failure(
        str(fields.get("kind")), str(fields.get("message")), peer if isinstance(peer, int) else None
    )


def tune(sock: socket.socket, heartbeat: float = DEFAULT_HEARTBEAT) -> None:
    """Small messages at once; and the kernel asks the other host now and then whether it is there,
    so that one which vanished without a word is noticed within `heartbeat` seconds (3 at least, and
    a day and a half at most, the longest that the kernel waits).

    The kernels of both hosts do it, whatever the programs compute; the end of a process they tell
    of at once.
    """
    idle = min(max(1, round(heartbeat / 2)), _LONGEST_IDLE)  # so long quiet, then three questions
    every = min(max(1, int((heartbeat - idle) / 3)), _LONGEST_IDLE)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", idle),
        ("TCP_KEEPINTVL", every),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", max(1, int(min(heartbeat, idle + 3 * every) * 1000))),
    ):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
