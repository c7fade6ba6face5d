"""The rendezvous over TCP: who may come in, and that strangers do not disturb a job."""

import contextlib
import json
import os
import socket
import struct
import threading
import time

import pytest
from bootstraps import LOOPBACK, SECRET, join, run_all, serving

from collectives.bootstrap import Tcp, client, is_loopback, listen, wire
from collectives.bootstrap import server as server_module
from collectives.errors import BootstrapError, ClosedError, CollectiveError


def test_a_missing_rank_is_named():
    with serving(4) as server:
        errors = run_all(*(lambda r=r: join(server, r, 4, timeout=0.3) for r in (0, 1, 3)))
    for error in errors:
        assert isinstance(error, BootstrapError) and error.peer == 2
        assert "ranks 0-1, 3 of 4 came, rank 2 is missing" in str(error)
        assert f":{server.address[1]}?" in str(error)


def test_ranks_that_try_again_meet():
    """Who comes late hears why the first try failed, and meets the others in the next one."""
    with serving(2) as server:
        for _ in range(2):
            with pytest.raises(BootstrapError, match="rank 0 of 2 came, rank 1 is missing"):
                join(server, 0, 2, timeout=0.2)
        with pytest.raises(BootstrapError, match="rank 0 of 2 came, rank 1 is missing"):
            join(server, 1, 2)
        ranks = run_all(*(lambda r=r: join(server, r, 2) for r in range(2)))
        assert run_all(*(rank.barrier for rank in ranks)) == [None, None]
        run_all(*(rank.close for rank in ranks))
        assert not server._meetings and not server._failed


def test_a_wrong_world_size_is_told_to_all():
    with serving(3) as server:
        errors = run_all(lambda: join(server, 0, 3), lambda: join(server, 1, 2))
    for error in errors:
        assert isinstance(error, BootstrapError)
        assert "rank 1 (" in str(error) and "was told that the world has 2 ranks" in str(error)
        assert "rank 0, which hosts the rendezvous, was told 3" in str(error)


def test_a_rank_that_comes_twice_is_told_to_all():
    with serving(3) as server:
        errors = run_all(
            *(lambda: join(server, 1, 3) for _ in range(2)), lambda: join(server, 0, 3)
        )
    for error in errors:
        assert isinstance(error, BootstrapError)
        assert "rank 1 came twice: " in str(error) and str(error).count(f"pid {os.getpid()}") == 2


def test_a_rank_out_of_range():
    with serving(2) as server:
        (error,) = run_all(lambda: join(server, 2, 2))
    assert "is no rank of a world of 2: ranks are 0 to 1" in str(error)


def test_a_complete_job_survives_late_comers():
    with serving(2) as server:
        ranks = run_all(*(lambda r=r: join(server, r, 2) for r in range(2)))
        for size in (2, 3):
            with pytest.raises(BootstrapError, match=r"came twice|world has 3"):
                join(server, 1, size)
        assert run_all(*(lambda r=r: r.all_gather(b"x") for r in ranks)) == [[b"x", b"x"]] * 2
        run_all(*(rank.close for rank in ranks))


def test_another_job_is_refused_and_the_first_goes_on():
    with serving(2, job="first") as server:

        def late(rank):
            time.sleep(0.3)
            return join(server, rank, 2, job="first")

        ranks = run_all(
            lambda: join(server, 0, 2, job="first"),
            lambda: join(server, 0, 2, job="second"),
            lambda: late(1),
        )
        assert isinstance(ranks[1], BootstrapError)
        assert "belongs to job 'first'" in str(ranks[1]) and "to job 'second'" in str(ranks[1])
        run_all(ranks[0].barrier, ranks[2].barrier)
        run_all(ranks[0].close, ranks[2].close)


def test_a_wrong_secret_is_refused_and_the_job_goes_on():
    with serving(2) as server:
        begin = time.monotonic()
        for wrong in (b"another secret of tests", b""):
            with pytest.raises(
                BootstrapError, match="refused the secret of rank 1: COLLECTIVES_SECRET"
            ):
                join(server, 1, 2, secret=wrong)
        assert time.monotonic() - begin < 2
        ranks = run_all(*(lambda r=r: join(server, r, 2) for r in range(2)))
        run_all(*(rank.barrier for rank in ranks))
        run_all(*(rank.close for rank in ranks))


def test_a_server_that_does_not_know_the_secret_is_refused():
    """A program that accepts any answer: the rank notices, and tells it nothing."""
    listener = listen(LOOPBACK)
    heard = []

    def pretend():
        sock, _ = listener.accept()
        with sock:
            sock.sendall(wire.MAGIC + bytes(32))
            heard.append(sock.recv(200))
            sock.sendall(wire.ACCEPTED + bytes(32))
            heard.append(sock.recv(200))

    thread = threading.Thread(target=pretend)
    thread.start()
    with pytest.raises(BootstrapError, match="does not know the secret of this job"):
        Tcp(listener.getsockname(), rank=0, size=2, secret=SECRET, timeout=5)
    thread.join()
    listener.close()
    assert len(heard[0]) == wire.ANSWER and heard[1] == b""


def test_another_program_at_the_port():
    listener = listen(LOOPBACK)

    def pretend():
        sock, _ = listener.accept()
        with sock:
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            sock.recv(10)

    thread = threading.Thread(target=pretend)
    thread.start()
    with pytest.raises(BootstrapError, match=r"is no rendezvous of this package.*said b'HTTP/1.1"):
        Tcp(listener.getsockname(), rank=0, size=2, secret=SECRET, timeout=5)
    thread.join()
    listener.close()


def test_nothing_listens():
    with listen(LOOPBACK) as sock:
        address = sock.getsockname()
    with pytest.raises(BootstrapError, match=r"rank 1 of 2 reached no rendezvous at .* in 0.3 s"):
        Tcp(address, rank=1, size=2, timeout=0.3)


def test_a_name_that_no_host_can_have():
    """Python's resolver has an error of its own for these."""
    for name in ("node..7", "n" * 64, "\udcff"):
        with pytest.raises(BootstrapError, match="is no name of a host"):
            Tcp((name, 1), rank=1, size=2, timeout=5)
        with pytest.raises(BootstrapError, match="is unknown"):
            listen(name)
        assert not is_loopback(name)


def strangers():
    """What may arrive at an open port, as functions of a fresh socket; all leave it open."""
    yield lambda s: None  # a scanner that says nothing
    yield lambda s: s.sendall(b"GET / HTTP/1.1\r\n\r\n" * 50)
    yield lambda s: s.sendall(os.urandom(4096))
    yield lambda s: s.sendall(wire.MAGIC)  # right so far, and then silence
    yield lambda s: s.sendall(wire.MAGIC + bytes(64))  # a proof that is wrong
    yield lambda s: s.close()
    yield lambda s: (
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)),
        s.close(),
    )


def speak(server, after):
    """A peer that knows the secret and then sends `after`, which makes its bytes from the link."""
    sock = socket.create_connection(server.address)
    greeting = client.receive_exactly(sock, wire.GREETING)
    theirs, ours = greeting[8:], bytes(32)
    proof = wire.prove(SECRET, b"rank", theirs, ours)
    sock.sendall(wire.MAGIC + ours + proof)
    assert client.receive_exactly(sock, wire.VERDICT).startswith(wire.ACCEPTED)
    key = wire.prove(SECRET, b"key", theirs, ours)
    sock.sendall(after(wire.Link(key, b"rank", b"server", 1 << 20)))
    sock.settimeout(5)
    return sock


def hangs_up(sock):
    """True if the server sends no more, and ends the connection."""
    sock.settimeout(5)
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_garbage_does_not_disturb_a_job():
    with serving(2) as server:
        opened = []
        for stranger in strangers():
            sock = socket.create_connection(server.address)
            with contextlib.suppress(OSError):
                stranger(sock)
            opened.append(sock)
        # Those who know the secret, and do not keep to the protocol.
        huge = wire.HEADER.pack(wire.HELLO, 1 << 62)
        forged = wire.HEADER.pack(wire.HELLO, 2) + bytes(32) + b"{}"
        for after in (
            lambda link: huge,
            lambda link: forged,
            lambda link: link.seal(wire.HELLO, b"no json"),
            lambda link: link.seal(wire.HELLO, b"{}"),
            lambda link: link.seal(wire.HELLO, json.dumps({"rank": []}).encode()),
            lambda link: link.seal(wire.HELLO, b"[" * 60_000),
            lambda link: link.seal(wire.CALL, b""),
            lambda link: link.seal(99, b""),
        ):
            with speak(server, after) as sock:
                assert hangs_up(sock)
        ranks = run_all(*(lambda r=r: join(server, r, 2) for r in range(2)))
        for rank in ranks:
            assert isinstance(rank, Tcp), rank
        more = [socket.create_connection(server.address) for _ in range(20)]
        assert run_all(*(lambda r=r: r.all_gather(b"x") for r in ranks)) == [[b"x", b"x"]] * 2
        run_all(*(rank.close for rank in ranks))
        for sock in opened + more:
            sock.close()


def test_silent_strangers_are_dropped(monkeypatch):
    monkeypatch.setattr(server_module, "HANDSHAKE_SECONDS", 0.1)
    with serving(2) as server, socket.create_connection(server.address) as sock:
        sock.settimeout(5)
        assert sock.recv(wire.GREETING).startswith(wire.MAGIC)
        assert hangs_up(sock)


def test_strangers_are_limited_in_number(monkeypatch):
    monkeypatch.setattr(server_module, "STRANGERS", 2)
    with serving(1) as server:
        socks = [socket.create_connection(server.address) for _ in range(5)]
        for sock in socks[:2]:  # the oldest make room
            sock.settimeout(5)
            while sock.recv(100):
                pass
        rank = join(server, 0, 1)
        rank.close()
        for sock in socks:
            sock.close()


def test_a_frame_cannot_be_replayed():
    with serving(1) as server:
        hello = {
            "rank": 0,
            "size": 1,
            "group": "world",
            "job": "",
            "timeout": 5,
            "asked": 5,
            "host": "h",
            "pid": 1,
        }

        links = []

        def greet(link):
            links.append(link)
            return link.seal(wire.HELLO, json.dumps(hello).encode())

        def answer():
            while (frame := links[0].next()) is None:
                links[0].feed(sock.recv(1 << 16))
            return frame[0]

        with speak(server, greet) as sock:
            assert answer() == wire.WELCOME
            call = links[0].seal(wire.CALL, wire.pack_call("barrier", b"", 5))
            sock.sendall(call)
            assert answer() == wire.RESULT
            sock.sendall(call)
            assert hangs_up(sock)


def test_tcp_limits():
    with serving(1) as server:
        rank = join(server, 0, 1)
        assert rank.all_gather(b"") == [b""]
        with pytest.raises(CollectiveError, match="too many for the rendezvous"):
            rank.all_gather(bytes(wire.FRAME_LIMIT))
        rank.close()


def test_a_server_that_stops_is_noticed():
    with serving(2) as server:
        ranks = run_all(*(lambda r=r: join(server, r, 2) for r in range(2)))
        server.stop(1)
        with pytest.raises(ClosedError, match="rank 0, which hosts the rendezvous, has closed"):
            ranks[1].barrier()
        for rank in ranks:
            rank.close()
