"""Throws random and mutated messages at the rendezvous: it must neither fall, nor hang, nor grow,
nor disturb the job that it serves.

    python tests/fuzz_rendezvous.py --messages 1000000 --seed 0 --json build/fuzz.json

parsers    what decodes bytes, in this process: each ends in a value or in ValueError
server     the server's own code behind sockets that are lists of bytes: strangers that know no
           secret, and peers that know it and do not keep to the protocol
client     a rank whose server says anything: each call ends in a CollectiveError
wire       real connections to a server that serves a job of two ranks all the while, whose every
           exchange is checked

A message is random bytes, a mutation of what a real rank or server sends (bits flipped; pieces
cut, doubled, swapped or put in; numbers made extreme), or a right one at a wrong time. Peers that
know the secret send their mutations under right MACs. The same seed gives the same messages.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import math
import os
import platform
import random
import resource
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from collectives.bootstrap import Server, Tcp, client, listen, wire
from collectives.errors import CollectiveError

SECRET = b"the secret of the fuzzed job"
LOOPBACK = "127.0.0.1"
# What may be held at the end beyond what was after the first tenth: broken groups that are
# remembered for those who come late, at most.
GROWTH = 4 << 20  # bytes
PEAK = 32 << 20  # bytes that may be held at any moment beyond that

NUMBERS: list[Any] = [0, 1, -1, 2, 3, 255, 256, 65535, 1 << 31, 1 << 32, 1 << 63, 1 << 64, 10**30]
NUMBERS += [0.5, -0.0, 1e308, math.inf, -math.inf, math.nan]
ODD: list[Any] = [*NUMBERS, None, True, "", "x", "world", "\0", "\ud800", "é" * 300, [], {}, [[[]]]]


# ---- messages -----------------------------------------------------------------------------------


def mutate(rng: random.Random, data: bytes) -> bytes:
    """`data` with one to four things done to it."""
    out = bytearray(data)
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(out) + 1)
        end = min(len(out), at + rng.randrange(1, 40))
        match rng.randrange(7):
            case 0 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 1:
                out[at:end] = b""
            case 2:
                out[at:at] = out[at:end]
            case 3:
                out[at:at] = rng.randbytes(rng.randrange(1, 40))
            case 4:
                out[at:end] = rng.randbytes(end - at)
            case 5:
                width = rng.choice([1, 2, 4, 8])
                number = rng.choice([0, 1, (1 << 8 * width) - 1, 1 << 8 * width - 1])
                out[at : at + width] = number.to_bytes(width, "big")
            case _:
                del out[at:]
    return bytes(out)


def hello(**fields: Any) -> bytes:
    said = {
        "rank": 0,
        "size": 2,
        "group": "world",
        "job": "",
        "timeout": 5.0,
        "asked": 5.0,
        "host": "h",
        "pid": 1,
    }
    return json.dumps(said | fields).encode()


def odd_hello(rng: random.Random) -> bytes:
    """JSON as it should be, with values as they should not."""
    fields = {"group": f"group {rng.randrange(2000)}", "rank": rng.randrange(3)}
    for name in rng.sample(["rank", "size", "group", "job", "timeout", "host", "pid"], k=2):
        fields[name] = rng.choice(ODD)
    text = hello(**fields)
    return mutate(rng, text) if rng.random() < 0.3 else text


def odd_frame(rng: random.Random) -> tuple[int, bytes]:
    """A frame of a peer that knows the secret: kind and payload."""
    kind = rng.choice([*range(1, 8), rng.randrange(256)])
    match rng.randrange(6):
        case 0:
            return kind, rng.randbytes(rng.randrange(200))
        case 1:
            return wire.HELLO, odd_hello(rng)
        case 2:
            timeout = float(rng.choice([n for n in NUMBERS if n != 10**30]))
            call = wire.pack_call(rng.choice(["barrier", "all_gather", "x" * 300]), b"abc", timeout)
            return wire.CALL, mutate(rng, call) if rng.random() < 0.5 else call
        case 3:
            return wire.ABORT, rng.randbytes(rng.randrange(50))
        case 4:
            parts = [rng.randbytes(rng.randrange(20)) for _ in range(rng.randrange(4))]
            return wire.RESULT, mutate(rng, wire.pack_list(parts))
        case _:
            return kind, mutate(rng, odd_hello(rng))


def conversation(rng: random.Random) -> list[tuple[int, bytes]]:
    """What a rank of a group of its own says from beginning to end, disturbed."""
    size = rng.choice([1, 1, 2])
    frames = [(wire.HELLO, hello(group=f"group {rng.randrange(2000)}", size=size))]
    for _ in range(rng.randrange(4)):
        frames.append((wire.CALL, wire.pack_call("all_gather", rng.randbytes(9), 5.0)))
    frames.append((wire.GOODBYE, b""))
    for _ in range(rng.randrange(3)):
        at = rng.randrange(len(frames))
        match rng.randrange(4):
            case 0:
                frames.insert(at, odd_frame(rng))
            case 1:
                frames.insert(at, frames[rng.randrange(len(frames))])
            case 2:
                frames[at] = (frames[at][0], mutate(rng, frames[at][1]))
            case _ if len(frames) > 1:
                del frames[at]
    return frames


def garbage(rng: random.Random) -> bytes:
    """What a stranger sends who knows no secret."""
    answer = wire.MAGIC + rng.randbytes(wire.NONCE + wire.MAC)
    match rng.randrange(4):
        case 0:
            return rng.randbytes(rng.randrange(300))
        case 1:
            return mutate(rng, answer)
        case 2:
            return answer[: rng.randrange(len(answer))]
        case _:
            return answer + rng.randbytes(rng.randrange(100))


def sealed(rng: random.Random, link: wire.Link) -> tuple[bytes, int]:
    """Frames under right MACs, now and then disturbed on their way; and how many messages."""
    frames = conversation(rng) if rng.random() < 0.5 else [odd_frame(rng)]
    stream = b"".join(link.seal(kind, payload) for kind, payload in frames)
    if rng.random() < 0.2:
        stream = mutate(rng, stream)
    return stream, len(frames)


# ---- in this process ----------------------------------------------------------------------------


WELCOME = wire.pack_welcome(wire.Welcome("job", "host"))


def fuzz_parsers(rng: random.Random, messages: int) -> None:
    decoders: list[tuple[Callable[[bytes], Any], bytes]] = [
        (wire.unpack_call, wire.pack_call("all_gather", b"data", 5.0)),
        (wire.unpack_list, wire.pack_list([b"a", b"", b"bcd"])),
        (wire.unpack_failure, b'{"kind": "PeerDiedError", "message": "rank 1", "peer": 1}'),
        (wire.unpack_hello, hello()),
        (wire.unpack_welcome, WELCOME),
    ]
    key = bytes(32)
    for _ in range(messages):
        decode, right = rng.choice(decoders)
        data = rng.randbytes(rng.randrange(100)) if rng.random() < 0.2 else mutate(rng, right)
        with contextlib.suppress(ValueError):
            value = decode(data)
            if decode is wire.unpack_list and wire.pack_list(value) != data:
                raise AssertionError(f"{data!r} was taken for the list {value!r}")
        link = wire.Link(key, b"server", b"rank", wire.HELLO_LIMIT)
        stream = wire.Link(key, b"rank", b"server", 0).seal(rng.randrange(256), data)
        with contextlib.suppress(ValueError):
            for begin in range(0, len(stream), 50):
                link.feed(stream[begin : begin + 50])
            if link.next() != (stream[0], data):
                raise AssertionError("a frame came out otherwise than it went in")
            link.feed(mutate(rng, stream))
            if link.next() is not None:
                raise AssertionError("a frame was taken that nobody has sent")


class Pipe:
    """A socket with what a peer has sent in it."""

    def __init__(self) -> None:
        self.incoming = bytearray()
        self.outgoing = bytearray()
        self.ended = False

    def recv(self, count: int) -> bytes:
        if not self.incoming and not self.ended:
            raise BlockingIOError
        data = bytes(self.incoming[:count])
        del self.incoming[:count]
        return data

    def send(self, data: bytes) -> int:
        self.outgoing += data
        return len(data)

    def close(self) -> None:
        self.ended = True


class NoSelector:
    """In place of a selector: the fuzzer says what is ready."""

    def register(self, *_: Any) -> None: ...
    def unregister(self, *_: Any) -> None: ...
    def modify(self, *_: Any) -> None: ...
    def close(self) -> None: ...
    def get_key(self, _: Any) -> Any:
        return type("Key", (), {"events": selectors.EVENT_READ})


class Inside:
    """A server that is not started, and peers that it sees through pipes."""

    def __init__(self) -> None:
        self.server = Server(listen(LOOPBACK), size=2, secret=SECRET, job="job")
        self.server._selector.close()
        self.server._selector = NoSelector()  # type: ignore[assignment]

    def connect(self) -> tuple[Any, Pipe]:
        pipe = Pipe()
        connection = self.server._admit(pipe, "nowhere")  # type: ignore[arg-type]
        self.serve(connection)
        return connection, pipe

    def serve(self, connection: Any) -> None:
        """Until there is nothing to read, and all is sent."""
        pipe = connection.sock
        while connection in self.server._connections:
            reads = bool(pipe.incoming or pipe.ended)
            self.server._serve(
                connection, selectors.EVENT_WRITE | (selectors.EVENT_READ if reads else 0)
            )
            if not reads:
                return

    def prove(self, connection: Any, pipe: Pipe) -> wire.Link:
        theirs, ours = connection.nonce, bytes(wire.NONCE)
        pipe.incoming += wire.MAGIC + ours + wire.prove(SECRET, b"rank", theirs, ours)
        self.serve(connection)
        assert wire.ACCEPTED in pipe.outgoing
        return wire.Link(wire.prove(SECRET, b"key", theirs, ours), b"rank", b"server", 0)

    def end(self, connection: Any, pipe: Pipe) -> None:
        pipe.ended = True
        self.serve(connection)
        self.server._close(connection)


def fuzz_server(rng: random.Random, messages: int) -> None:
    inside = Inside()
    job = [inside.connect() for _ in range(2)]
    links = [inside.prove(*peer) for peer in job]
    for rank, (connection, pipe) in enumerate(job):
        pipe.incoming += links[rank].seal(wire.HELLO, hello(rank=rank))
        inside.serve(connection)
    done = exchanged = 0
    while done < messages:
        connection, pipe = inside.connect()
        if rng.random() < 0.3:
            data, count = garbage(rng), 1
        else:
            data, count = sealed(rng, inside.prove(connection, pipe))
        while data and connection in inside.server._connections:
            cut = rng.randrange(1, 200)
            pipe.incoming += data[:cut]
            data = data[cut:]
            inside.serve(connection)
        inside.end(connection, pipe)
        done += count
        if rng.random() < 0.01:  # the job goes on
            exchanged += 1
            for rank, (member, _) in enumerate(job):
                call = wire.pack_call("all_gather", b"%d" % rank, 5.0)
                member.sock.incoming += links[rank].seal(wire.CALL, call)
                inside.serve(member)
            for rank, (member, other) in enumerate(job):
                inside.serve(member)
                if exchanged == 1:
                    del other.outgoing[: wire.GREETING + wire.VERDICT]
                links[rank].limit = 1 << 20
                links[rank].feed(bytes(other.outgoing))
                other.outgoing.clear()
                frame = links[rank].next()
                if exchanged == 1:
                    assert frame is not None and frame[0] == wire.WELCOME
                    frame = links[rank].next()
                assert frame == (wire.RESULT, wire.pack_list([b"0", b"1"])), frame
    assert exchanged or messages < 1000
    inside.server.close_sockets()


# ---- on the wire --------------------------------------------------------------------------------


def fuzz_client(rng: random.Random, messages: int) -> None:
    """One connection for each message: a server that proves the secret, then says anything."""
    with listen(LOOPBACK) as listener:
        address = listener.getsockname()
        stop = threading.Event()

        def pretend() -> None:
            while not stop.is_set():
                sock, _ = listener.accept()
                with sock, contextlib.suppress(OSError):
                    if stop.is_set():
                        return
                    theirs = secrets.token_bytes(wire.NONCE)
                    sock.sendall(wire.MAGIC + theirs)
                    answer = client.receive_exactly(sock, wire.ANSWER) or b""
                    ours = answer[len(wire.MAGIC) : -wire.MAC]
                    if rng.random() < 0.2:
                        sock.sendall(mutate(rng, wire.ACCEPTED + bytes(wire.MAC)))
                        continue
                    sock.sendall(wire.ACCEPTED + wire.prove(SECRET, b"server", theirs, ours))
                    link = wire.Link(
                        wire.prove(SECRET, b"key", theirs, ours), b"server", b"rank", 1 << 20
                    )
                    frames = [] if rng.random() < 0.4 else [(wire.WELCOME, WELCOME)]
                    frames += [odd_frame(rng) for _ in range(rng.randrange(3))]
                    sock.sendall(b"".join(link.seal(*frame) for frame in frames))
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(1 << 16):
                        pass

        thread = threading.Thread(target=pretend)
        thread.start()
        for _ in range(messages):
            with contextlib.suppress(CollectiveError):
                rank = Tcp(address, rank=0, size=2, secret=SECRET, timeout=0.2)
                try:
                    rank.all_gather(b"x", timeout=0.2)
                finally:
                    rank.close()
        stop.set()
        socket.create_connection(address).close()
        thread.join()


def speak(address: tuple[str, int]) -> tuple[socket.socket, wire.Link]:
    """A connection that has proved the secret."""
    sock = socket.create_connection(address, timeout=20)
    greeting = client.receive_exactly(sock, wire.GREETING) or b""
    theirs, ours = greeting[len(wire.MAGIC) :], bytes(wire.NONCE)
    sock.sendall(wire.MAGIC + ours + wire.prove(SECRET, b"rank", theirs, ours))
    client.receive_exactly(sock, wire.VERDICT)
    return sock, wire.Link(wire.prove(SECRET, b"key", theirs, ours), b"rank", b"server", 0)


def fuzz_wire(rng: random.Random, messages: int) -> None:
    server = Server(listen(LOOPBACK), size=2, secret=SECRET, job="job")
    server.start()
    over = threading.Event()
    exchanges = [0, 0]
    errors: list[BaseException] = []

    def rank(me: int) -> None:
        """A rank of the job: call after call, each with the right answer."""
        try:
            comm = Tcp(server.address, rank=me, size=2, secret=SECRET, timeout=60)
            ends = False
            while not ends:
                ends = b"end" in comm.all_gather(b"end" if over.is_set() else b"go")
                assert comm.all_gather(b"%d" % me) == [b"0", b"1"]
                exchanges[me] += 1
                time.sleep(0.005)
            comm.close()
        except BaseException as error:  # told below
            errors.append(error)

    ranks = [threading.Thread(target=rank, args=(me,)) for me in range(2)]
    for thread in ranks:
        thread.start()
    done = 0
    lingering: list[socket.socket] = []
    while done < messages and not errors:
        with contextlib.suppress(OSError):  # it hung up on us, as it should
            if rng.random() < 0.5:
                sock = socket.create_connection(server.address, timeout=20)
                data, count = garbage(rng), 1
            else:
                sock, link = speak(server.address)
                data, count = sealed(rng, link)
            done += count
            lingering.append(sock)  # half open, until others have come
            sock.sendall(data)
        while len(lingering) > 100:
            lingering.pop(rng.randrange(len(lingering))).close()
    over.set()
    for thread in ranks:
        thread.join(60)
    for sock in lingering:
        sock.close()
    alive = server._thread.is_alive()
    server.stop(1)
    if errors:
        raise errors[0]
    assert alive and min(exchanges) > 0, (alive, exchanges)


# ---- all of it ----------------------------------------------------------------------------------

TARGETS: dict[str, tuple[Callable[[random.Random, int], None], float]] = {
    "parsers": (fuzz_parsers, 0.35),
    "server": (fuzz_server, 0.5),
    "client": (fuzz_client, 0.01),
    "wire": (fuzz_wire, 0.14),
}


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def fuzz(name: str, messages: int, seed: int) -> dict[str, Any]:
    """Runs one target; raises whatever it should not have let through."""
    target, _ = TARGETS[name]
    began = time.monotonic()
    target(random.Random(f"{name} {seed} warm"), max(10, messages // 10))
    before, files, threads = resident(), descriptors(), threading.active_count()
    forget_peak()
    target(random.Random(f"{name} {seed}"), messages)
    after, peak = resident(), most_resident()
    assert descriptors() == files, f"{name}: descriptors grew from {files} to {descriptors()}"
    assert threading.active_count() == threads, f"{name}: a thread was left"
    assert after - before < GROWTH, f"{name}: memory grew from {before} to {after} bytes"
    assert peak - before < PEAK, f"{name}: memory went from {before} to {peak} bytes for a while"
    return {
        "messages": messages + max(10, messages // 10),
        "seconds": round(time.monotonic() - began, 1),
        "memory": [before, after, peak],
        "descriptors": files,
    }


def resident() -> int:
    """Bytes, after all that can be given back was given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def forget_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def most_resident() -> int:
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["VmHWM"].split()[0]) << 10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=1_000_000, help="in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", default="build/fuzz.json")
    parser.add_argument("--targets", nargs="*", choices=list(TARGETS), default=list(TARGETS))
    args = parser.parse_args()
    results = {}
    for name in args.targets:
        results[name] = fuzz(name, int(args.messages * TARGETS[name][1]), args.seed)
        r = results[name]
        print(
            f"{name:8s} {r['messages']:8d} messages in {r['seconds']:.0f} s, memory "
            f"{r['memory'][0] / 2**20:.1f} -> {r['memory'][1] / 2**20:.1f} MiB, "
            f"at most {r['memory'][2] / 2**20:.1f}",
            flush=True,
        )
    os.makedirs(os.path.dirname(os.path.abspath(args.json)), exist_ok=True)
    machine = {"machine": platform.platform(), "python": platform.python_version()}
    with open(args.json, "w") as file:
        json.dump({**machine, "seed": args.seed, "targets": results}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
