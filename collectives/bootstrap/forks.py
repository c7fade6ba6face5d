"""What fork() leaves in the child: objects whose threads, connections and peers belong to the
parent.

In the child, what was made before the fork refuses calls, and its sockets are closed there, so that
a peer sees the parent's end when the parent ends, and not the child's.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

from ..errors import ClosedError


class _HasSockets(Protocol):
    def close_sockets(self) -> None: ...


_alive: weakref.WeakSet[_HasSockets] = weakref.WeakSet()


def close_sockets_in_child(owner: _HasSockets) -> None:
    """Calls owner.close_sockets() in every process that this one forks while `owner` lives."""
    _alive.add(owner)


def _in_child() -> None:
    for owner in list(_alive):
        owner.close_sockets()
    _alive.clear()


os.register_at_fork(after_in_child=_in_child)


class Birth:
    """The process that an object was made in."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def in_child(self) -> bool:
        return os.getpid() != self._pid

    def check(self, rank: int) -> None:
        """Raises ClosedError in a forked child."""
        if self.in_child():
            raise ClosedError(
                f"this process was forked from process {self._pid} after the communicator was "
                "made, which belongs to that process: call it there, or start the process by "
                "another method than fork (spawn) and give it ranks of its own",
                rank=rank,
            )
