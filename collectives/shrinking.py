"""`Communicator.shrink`: the ranks that are left agree who they are, and go on.

Within one host the ranks use nothing but the memory that they share and the operating system's word
on which processes live, so that it does not matter who died: not rank 0, not the launcher.

An attempt has a number, the same on all ranks, and three parts:

1. **Joining.** A rank announces the attempt and waits until every other has joined it too, or has
   ended, or has closed, or the time is over.
2. **Deciding.** It proposes those that have joined. The first proposal wins, by one
   compare-and-swap, and is what everybody takes (csrc/council.hpp). Who is not in it has come too
   late, and raises.
3. **Building.** The members set up a communicator over mailboxes in the old region. If one of them
   dies meanwhile, or does not move on in time, some may have got further than others; so the end
   is again settled by one compare-and-swap: either all return it or all begin the next attempt.

Between hosts MPI carries everything, and an MPI communicator does not outlive a rank, so there only
a communicator that is whole can be shrunk (to all of its ranks).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from . import _core
from .bootstrap import Bootstrap, Solo
from .bootstrap.groups import name_ranks
from .bootstrap.mailboxes import Mailboxes
from .errors import (
    AbortedError,
    ClosedError,
    CollectiveError,
    DeadlineError,
    PeerDiedError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")

_ENDING = 0.5  # seconds that a process takes to end, generously

# How an attempt ended.
BUILT, AGAIN, BROKEN = 1, 2, 3

# Errors of the building that another attempt without the ranks in question can cure.
_CURABLE = (PeerDiedError, ClosedError, DeadlineError, AbortedError)


class Shrinking:
    """The attempts of one communicator; kept as long as it, since attempts are numbered."""

    def __init__(self, council: _core.Council | None, rank: int, kind: str) -> None:
        self._council = council
        self._rank = rank
        self._kind = kind
        self._attempt = 0

    def run(
        self, timeout: float, build: Callable[[Bootstrap, list[int]], T], own_timeout: float
    ) -> tuple[T, list[int]]:
        """What `build(bootstrap, members)` made on all members, and the members.

        timeout      seconds for each wait of an attempt
        own_timeout  that of the new communicator
        """
        council = self._council
        if council is None:  # alone
            return build(Solo(own_timeout), [0]), [0]
        while True:
            self._attempt += 1
            members = self._decide(council, self._attempt, timeout)
            made = self._build(council, members, timeout, build, own_timeout)
            if made is not None:
                return made, members

    # ---- joining and deciding --------------------------------------------------------------------

    def _decide(self, council: _core.Council, attempt: int, timeout: float) -> list[int]:
        council.join(attempt)
        end = time.monotonic() + timeout
        pause = 0.0
        while (members := council.decided(attempt)) is None:
            here = [q for q in range(council.size) if council.joined(q) >= attempt]
            missing = [q for q in range(council.size) if q not in here and not council.gone(q)]
            if not missing or time.monotonic() > end:
                members = council.propose(attempt, [q for q in here if council.gone(q) != "died"])
                break
            time.sleep(pause)
            pause = min(1e-3, pause * 1.5 + 10e-6)
        if self._rank not in members:
            words = f"{name_ranks(members)} went on" if members else "the others went on long ago,"
            raise AbortedError(
                f"shrink: {words} without rank {self._rank}, which came too late; nothing is left "
                "for it to join",
                rank=self._rank,
            )
        return members

    @staticmethod
    def _lost(council: _core.Council, members: Sequence[int]) -> bool:
        """True if a member has ended, which is then what made the building fail: its files are
        gone a little before the kernel says so of itself.
        """
        end = time.monotonic() + _ENDING
        while not any(council.gone(q) for q in members):
            if time.monotonic() > end:
                return False
            time.sleep(1e-3)
        return True

    # ---- building --------------------------------------------------------------------------------

    def _build(
        self,
        council: _core.Council,
        members: Sequence[int],
        timeout: float,
        build: Callable[[Bootstrap, list[int]], T],
        own_timeout: float,
    ) -> T | None:
        """The new communicator; None if another attempt is needed."""
        attempt = self._attempt
        if len(members) == 1:
            return build(Solo(own_timeout), list(members))

        def trouble() -> str:
            return "a member gave this attempt up" if council.settled(attempt) > BUILT else ""

        made: T | None = None
        error: Exception | None = None
        try:
            meeting = Mailboxes(
                council,
                members,
                f"shrink {attempt}",
                kind=self._kind,
                timeout=timeout,
                trouble=trouble,
            )
            made = build(meeting, list(members))
            outcome = council.settle(attempt, BUILT)
        except _CURABLE as curable:
            error = curable
            outcome = council.settle(attempt, AGAIN)
        except Exception as other:
            error = other
            outcome = council.settle(attempt, AGAIN if self._lost(council, members) else BROKEN)
        if outcome == BUILT and made is not None:
            return made
        close = getattr(made, "close", None)
        if close is not None:
            close()
        if outcome == BROKEN:
            if error is not None and not isinstance(error, _CURABLE):
                raise error
            raise CollectiveError(
                "shrink: another rank could not set up the new communicator; its error says why",
                rank=self._rank,
            ) from error
        if outcome == BUILT:  # the others have finished, and this rank failed in its last step
            raise CollectiveError(
                f"shrink: the new communicator stands, and rank {self._rank} failed to join it: "
                f"{error}",
                rank=self._rank,
            ) from error
        return None
