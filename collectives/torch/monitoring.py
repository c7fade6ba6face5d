"""A barrier over torch's store, which knows who did not come."""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from ..bootstrap.groups import name_ranks
from ..errors import AbortedError, DeadlineError
from .joining import Meeting, await_heard, tell_heard

# Rank 0 speaks first: the others wait this much longer for what it says, in seconds.
_GRACE = 5.0


def monitored_barrier(
    meeting: Meeting,
    number: int,
    timeout: timedelta | float | None,
    *,
    wait_all_ranks: bool = False,
) -> None:
    """Returns when all ranks have called it; on rank 0 when they have heard so.

    number          sets this barrier apart from all others in the meeting's store
    timeout         a timedelta or seconds; that of the group if None
    wait_all_ranks  rank 0 waits until the timeout and names all ranks that are missing; otherwise
                    it names the first that is

    Raises DeadlineError on rank 0, which names the missing ranks, and AbortedError with the same
    words on the ranks that came.
    """
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if seconds is None:
        seconds = meeting.timeout
    if seconds < 0:
        raise ValueError(f"monitored_barrier: timeout is {seconds:g} s; it must not be negative")
    store, where = meeting.store, f"monitored/{number}"
    end = time.monotonic() + seconds
    if meeting.rank:
        store.set(f"{where}/{meeting.rank}", b"")
        if not _wait_for(store, f"{where}/said", end + _GRACE):
            raise DeadlineError(
                f"monitored_barrier: rank {meeting.rank} came, and heard nothing from rank 0 "
                f"within {seconds:g} s",
                rank=meeting.rank,
                peer=0,
            )
        said = bytes(store.get(f"{where}/said")).decode()
        tell_heard(store, f"{where}/{meeting.rank}/heard")
        if said != "all came":
            raise AbortedError(
                f"monitored_barrier: rank {meeting.rank} came, but {said}", rank=meeting.rank
            )
        return
    missing = []
    for rank in range(1, meeting.size):
        if not _wait_for(store, f"{where}/{rank}", end):
            missing.append(rank)
            if not wait_all_ranks:
                break
    store.set(f"{where}/said", _words(missing, seconds) if missing else "all came")
    came = [r for r in range(1, meeting.size) if not missing or store.check([f"{where}/{r}"])]
    await_heard(store, [f"{where}/{rank}/heard" for rank in came])
    if missing:
        raise DeadlineError(
            f"monitored_barrier: {_words(missing, seconds)}", rank=0, peer=missing[0]
        )


def _words(missing: Iterable[int], seconds: float) -> str:
    return f"{name_ranks(missing)} did not come within {seconds:g} s"


def _wait_for(store: Any, key: str, end: float) -> bool:
    pause = 2e-4
    while not store.check([key]):
        if time.monotonic() >= end:
            return False
        time.sleep(pause)
        pause = min(0.02, pause * 1.5)
    return True
