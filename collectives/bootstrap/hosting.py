"""Servers that run in the process of a rank, and how that rank joins its world."""

from __future__ import annotations

import atexit
import threading
from collections import Counter
from typing import ClassVar

from ..config import DEFAULT_HEARTBEAT
from ..errors import BootstrapError
from .addresses import is_loopback, listen
from .client import Tcp
from .server import Server


class Hosted:
    """A server that runs in this process while any communicator here uses it."""

    _lock = threading.Lock()
    _live: ClassVar[dict[tuple[str, int], Hosted]] = {}

    def __init__(self, server: Server, key: tuple[str, int]) -> None:
        self.server = server
        self._key = key
        self._users = 1

    @classmethod
    def open(
        cls,
        host: str,
        port: int,
        *,
        size: int,
        secret: bytes,
        job: str,
        heartbeat: float = DEFAULT_HEARTBEAT,
    ) -> Hosted:
        """The server at this address: one that is there already, for the same world, or a new
        one.
        """
        with cls._lock:
            hosted = cls._live.get((host, port)) if port else None
            if hosted is not None:
                hosted._users += 1
                return hosted
            server = Server(
                listen(host, port, backlog=size + 128),
                size=size,
                secret=secret,
                job=job,
                heartbeat=heartbeat,
            )
            hosted = cls(server, (host, server.address[1]))
            cls._live[hosted._key] = hosted
            server.start()
            return hosted

    def share(self) -> Hosted:
        with self._lock:
            self._users += 1
        return self

    def release(self) -> None:
        """Ends the server with its last user."""
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
atexit.register(Hosted.stop_all)

# How many worlds this process has had at an address: a second world there has a name of its own.
_worlds: Counter[tuple[str, int]] = Counter()


def world_name(key: tuple[str, int]) -> str:
    """That of the next world there."""
    count = _worlds[key]
    return f"world {count}" if count else "world"


def count_world(key: tuple[str, int]) -> None:
    """It is had, and the next one is another."""
    _worlds[key] += 1


def meet(
    host: str,
    port: int,
    *,
    rank: int,
    size: int,
    secret: bytes,
    job: str,
    timeout: float,
    hosts: bool,
    heartbeat: float = DEFAULT_HEARTBEAT,
) -> Tcp:
    """Joins the world at an address; `hosts`: this rank runs the server there.

    After a failure another try is for the same world, since ranks may have tried more or less
    often.
    """
    if not secret and not is_loopback(host):
        raise BootstrapError(
            f"ranks would meet at {host}, which other hosts can reach, without a secret: anybody "
            "could join. Set COLLECTIVES_SECRET on all ranks to the same text, e.g. of `python -c "
            "'import secrets; print(secrets.token_hex(16))'`, or COLLECTIVES_SECRET_FILE to a file "
            "with it",
            rank=rank,
        )
    hosted = None
    if hosts:
        hosted = Hosted.open(host, port, size=size, secret=secret, job=job, heartbeat=heartbeat)
    met = Tcp(
        (host, port),
        rank=rank,
        size=size,
        secret=secret,
        job=job,
        timeout=timeout,
        group=world_name((host, port)),
        hosted=hosted,
        heartbeat=heartbeat,
    )
    count_world((host, port))
    return met
