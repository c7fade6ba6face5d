"""What the ranks of a process group say to each other through torch's store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

import collectives as cc

dist = pytest.importorskip("torch.distributed")
pytestmark = pytest.mark.torch


def on_two_ranks(store: Any, body: Callable[[Any], object]) -> list[object]:
    """What body(group) returns on two ranks, threads whose group meets in `store`; or raises."""
    from collectives.torch.base import BaseGroup
    from collectives.torch.joining import Meeting

    found: list[object] = [None, None]

    def run(rank: int) -> None:
        try:
            group = BaseGroup(Meeting(store, rank, 2, 20.0, []), "group")
            found[rank] = body(group)
            group.shutdown()
        except Exception as error:
            found[rank] = error

    ranks = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    return found


def test_a_monitored_barrier_waits_in_a_store_that_served_a_group_before() -> None:
    """Keys of the first group's barriers are still there."""
    store = dist.HashStore()

    def both(group: Any) -> None:
        group.monitored_barrier(5.0)
        group.monitored_barrier(5.0)

    def rank_0_alone(group: Any) -> None:
        group.monitored_barrier(5.0)
        if group.rank() == 0:
            with pytest.raises(cc.DeadlineError, match="rank 1 did not come"):
                group.monitored_barrier(0.05)

    assert on_two_ranks(store, both) == [None, None]
    assert on_two_ranks(store, rank_0_alone) == [None, None]
