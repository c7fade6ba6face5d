"""Hosts that vanish without a word, where ranks met over TCP."""

from __future__ import annotations

import ctypes
import socket
import struct
import time

import pytest
from bootstraps import run_all

import collectives as cc
from collectives.bootstrap import Server, Tcp, listen
from collectives.bootstrap.wire import tune

SO_ATTACH_FILTER = 26


def vanish(sock: socket.socket) -> None:
    """From now on the kernel drops all that comes for this socket and acknowledges nothing, as if
    its host had lost its power.
    """
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF: return 0
    program = struct.pack("HL", 1, ctypes.addressof(drop_all))
    sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


def meet(size: int, heartbeat: float) -> tuple[Server, list[Tcp]]:
    server = Server(listen("127.0.0.1"), size=size, heartbeat=heartbeat)
    server.start()
    ranks = run_all(
        *(
            lambda r=r: Tcp(server.address, rank=r, size=size, timeout=60, heartbeat=heartbeat)
            for r in range(size)
        )
    )
    return server, ranks


@pytest.mark.faults
def test_a_host_that_vanishes_is_noticed_within_the_heartbeat():
    """Nothing is sent to it: the server's kernel asks, and gets no answer."""
    server, ranks = meet(3, 3)
    try:
        vanish(ranks[1]._sock)
        began = time.monotonic()
        with pytest.raises(cc.PeerDiedError, match=r"rank 1 \(.*\) is gone"):
            ranks[0].barrier(timeout=60)
        assert time.monotonic() - began < 20  # 3 s, and what a busy machine adds
        with pytest.raises(cc.PeerDiedError):
            ranks[2].barrier(timeout=60)
    finally:
        for rank in ranks:
            rank._sock.close()
        server.stop(seconds=0)


@pytest.mark.faults
def test_a_rank_notices_that_the_host_of_the_rendezvous_has_vanished():
    server, ranks = meet(2, 3)
    try:
        connection = next(c for c in server._connections if c.rank == 0)
        vanish(connection.sock)
        began = time.monotonic()
        with pytest.raises((cc.PeerDiedError, cc.DeadlineError), match="rendezvous"):
            ranks[0].barrier(timeout=60)
        assert time.monotonic() - began < 30
    finally:
        for rank in ranks:
            rank._sock.close()
        server.stop(seconds=0)


def test_what_the_kernel_is_told():
    with socket.socket() as sock:
        for seconds, expected in ((30.0, (15, 5)), (3.0, (2, 1)), (0.5, (1, 1)), (60.0, (30, 10))):
            tune(sock, seconds)
            options = [
                sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
                for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL")
            ]
            assert tuple(options) == expected
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == seconds * 1000


def test_a_heartbeat_longer_than_the_kernel_waits():
    """It refuses such times; so the server ended, and ranks found nobody."""
    with socket.socket() as sock:
        tune(sock, cc.config.LONGEST)
        seconds = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
        assert seconds == sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 32767
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 4 * seconds * 1000
    server, ranks = meet(2, 86400.0)
    run_all(*(rank.close for rank in ranks))
    server.stop()


def test_the_variable():
    assert cc.config.Settings({"COLLECTIVES_HEARTBEAT": "7.5"}).heartbeat == 7.5
