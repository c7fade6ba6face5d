"""What the server of Tcp knows of its connections, and of the groups that they join."""

from __future__ import annotations

import math
import secrets
import socket
import time
from collections.abc import Callable
from typing import NamedTuple

from .groups import Group, Round
from .wire import MAGIC, NONCE, Link


class Connection:
    """One connection as the server sees it."""

    def __init__(self, sock: socket.socket, address: str) -> None:
        self.sock = sock
        self.address = address
        self.nonce = secrets.token_bytes(NONCE)
        self.answer = bytearray()
        self.outgoing = bytearray(MAGIC + self.nonce)
        self.link: Link | None = None  # once it has proved the secret
        self.meeting: Meeting | None = None  # once it has joined a group
        self.rank = -1
        self.who = address
        self.ending = False  # close it when all is sent
        self.told = False  # knows of its group's failure
        self.alarm = math.inf  # when the server next looks whether its wait is over
        self.timers: list[Timer] = []
        self.came = time.monotonic()

    @property
    def where(self) -> str:
        return f"rank {self.rank} ({self.who})"


class Timer:
    """What happens when it is `when`, unless it was cancelled."""

    def __init__(self, when: float, action: Callable[[], None]) -> None:
        self.when = when
        self.action: Callable[[], None] | None = action

    def __lt__(self, other: Timer) -> bool:
        return self.when < other.when


class Wait(NamedTuple):
    """A rank's pending call, and until when it waits."""

    round: Round
    deadline: float
    seconds: float


class Meeting:
    """A group of ranks on the server: who is in, and the call that each waits in."""

    def __init__(self, name: str, size: int, host: Connection) -> None:
        self.group = Group(name, size)
        self.founder = host
        self.members: dict[int, Connection] = {}
        self.waiting: dict[int, Wait] = {}
        self.timers: list[Timer] = []  # of those who wait for the others to come
        self.complete = False
        self.told: set[int] = set()  # ranks that know why it failed
        self.crowded = False  # it failed since there is no room for all: the others come to hear so
