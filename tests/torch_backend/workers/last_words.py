"""Rank 0 holds the store, and its program ends with what it says: the others hear that. The
argument is a part.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import torch.distributed as dist

import collectives as cc
from collectives.bootstrap import store as through_store
from collectives.torch.joining import Meeting
from collectives.torch.monitoring import monitored_barrier

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LATE = 0.5  # seconds, by which the others look at the store seldom


def expect(kind: type[Exception], words: str, do: Callable[[], object]) -> None:
    try:
        do()
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"{kind.__name__} was expected")


def missing(met: Meeting) -> None:
    """The last rank does not come to a monitored barrier."""
    met = met.set_apart("group")
    if RANK < SIZE - 1:
        expect(
            cc.AbortedError if RANK else cc.DeadlineError,
            f"rank {SIZE - 1} did not come within {LATE} s",
            lambda: monitored_barrier(met, 0, LATE),
        )


def all_came(met: Meeting) -> None:
    met = met.set_apart("group")
    if RANK == 0:
        time.sleep(LATE)
    monitored_barrier(met, 0, None)


def not_met(met: Meeting) -> None:
    """The last rank does not come to the group."""
    if RANK < SIZE - 1:
        met = met._replace(timeout=LATE)
        words = f"rank {SIZE - 1} is missing"
        expect(cc.BootstrapError, words, lambda: met.set_apart("group"))


def not_connected(met: Meeting) -> None:
    """Rank 0 finds no port."""

    def no_port(*_: object, **__: object) -> None:
        time.sleep(LATE)
        raise cc.BootstrapError("no port is free", rank=0)

    through_store.Hosted.open = no_port  # of this process
    expect(cc.BootstrapError, "no port is free", met.set_apart("group").connect)


def main() -> None:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    outer = dist.TCPStore(host, port, is_master=False)
    if RANK == 0:
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        outer.set("port", str(store.port))
    else:
        store = dist.TCPStore(host, int(outer.get("port")), is_master=False)
    # Whoever does not come has a connection to the store, and does not use it.
    outer.set(f"there/{RANK}", b"")
    outer.wait([f"there/{rank}" for rank in range(SIZE)])
    globals()[sys.argv[1]](Meeting(store, RANK, SIZE, 20.0, []))
    if RANK and (RANK < SIZE - 1 or sys.argv[1] in ("all_came", "not_connected")):
        print("heard it", flush=True)
    os._exit(0)  # at once, and the store with it


if __name__ == "__main__":
    main()
