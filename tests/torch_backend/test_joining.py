"""What the ranks of a process group say to each other through torch's store."""

from __future__ import annotations

import threading

import pytest

import collectives as cc

dist = pytest.importorskip("torch.distributed")
pytestmark = pytest.mark.torch


def test_a_monitored_barrier_waits_in_a_store_that_served_a_group_before() -> None:
    """Keys of the first group's barrier are still there."""
    from collectives.torch.joining import Meeting
    from collectives.torch.monitoring import monitored_barrier

    store = dist.HashStore()
    meetings = [Meeting(store, rank, 2, 5.0, []) for rank in range(2)]

    def barrier(rank: int, timeout: float) -> None:
        attempt = meetings[rank].attempt("group")
        monitored_barrier(meetings[rank], f"{attempt}/0", timeout)

    peer = threading.Thread(target=barrier, args=(1, 5.0))
    peer.start()
    barrier(0, 5.0)
    peer.join()
    with pytest.raises(cc.DeadlineError, match="rank 1 did not come"):
        barrier(0, 0.05)


def test_a_group_takes_keys_of_its_own_for_barriers() -> None:
    """Two groups of one rank, one after the other in one store."""
    from collectives.torch.base import BaseGroup
    from collectives.torch.joining import Meeting

    store = dist.HashStore()
    attempts = []
    for _ in range(2):
        group = BaseGroup(Meeting(store, 0, 1, 5.0, []), "group")
        attempts.append(group._attempt)
        group.shutdown()
    assert attempts == [1, 2]
