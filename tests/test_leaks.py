"""A thousand communicators that come and go, by all ways, leave nothing: no memory, descriptor,
mapping or thread. (What each call leaves is looked at by tests/soak.py, for as long as one likes.)
"""

from __future__ import annotations

import gc

import launch
import numpy as np
import pytest
import soak

import collectives as cc
from collectives import connect

# The heap settles within a few communicators. What one leaks shows: a region alone has 44 MB of
# address space, and the few pages of it that are touched make more than SLACK a thousand times.
WARM = 60
SLACK = 6 << 20  # bytes


def life(comm: cc.Communicator, i: int) -> None:
    """Made, used and closed, in the way that is the turn of number `i`."""
    part = comm.duplicate() if i % 2 else comm.split(0, key=-comm.rank)
    assert part is not None
    x = np.ones(100 + i % 3 * 3000, np.float32)
    match i % 5:
        case 0:
            part.all_reduce(x)
        case 1:
            part.all_reduce(x, async_op=True).wait()
        case 2:
            part.all_reduce(x, async_op=True)  # nobody waits for it
        case 3:
            part.all_reduce(part.empty(500, "float32"), algorithm="ring")
        case _:
            part.all_gather(x)
            part.sendrecv(x, (part.rank + 1) % part.size, x.copy(), (part.rank - 1) % part.size)
    if i % 7:
        part.close()  # else Python drops it


def lives(comm: cc.Communicator, count: int) -> tuple[soak.Held, soak.Held]:
    """What this process holds after a few, and after `count` more."""
    held = []
    for begin, end in ((0, WARM), (WARM, WARM + count)):
        for i in range(begin, end):
            life(comm, i)
        comm.barrier()
        held.append(soak.held() if comm.rank == 0 else None)
        comm.barrier()
    return held[0], held[1]


def growth(before: soak.Held, after: soak.Held) -> list[str]:
    words = [
        f"{what} grew from {getattr(before, what)} to {getattr(after, what)}"
        for what in ("descriptors", "mappings", "threads")
        if getattr(after, what) > getattr(before, what)
    ]
    if after.rss > before.rss + SLACK:
        words.append(f"memory grew from {before.rss} to {after.rss}")
    return words


def test_a_thousand_communicators_of_threads():
    before, after = cc.run_threads(2, lives, 1000, timeout=60)[0]
    assert not growth(before, after)


def test_worlds_of_threads():
    def body(comm):
        comm.all_reduce(np.ones(10))

    for _ in range(20):
        cc.run_threads(2, body)
    before = soak.held()
    for _ in range(300):
        cc.run_threads(2, body)
    assert not growth(before, soak.held())


def test_set_ups_of_threads_that_fail(tmp_path, monkeypatch):
    table = tmp_path / "table.json"
    table.write_text("{")
    monkeypatch.setenv("COLLECTIVES_TABLE", str(table))
    with pytest.raises(cc.ConfigError, match=r"table\.json"):
        cc.run_threads(2, lambda comm: None)
    gc.collect()
    assert not connect._thread_regions


def test_parts_of_threads_that_are_closed():
    def body(comm):
        for _ in range(3):
            comm.duplicate().close()
        comm.barrier()
        return len(comm._bootstrap._hub.children)

    assert cc.run_threads(3, body) == [0] * 3


@pytest.mark.parametrize(("launcher", "count"), [("run", 1000), ("openmpi", 300)])
def test_many_communicators_of_processes(launcher, count):
    got = launch.run(2, "leaking.py", count, launcher=launcher, timeout=110).expect(status=0)
    assert "rank 0: []" in got.output, got


def test_ranks_that_start_and_end():
    """A rendezvous that serves one world after another in one process."""
    got = launch.run(1, "leaking.py", "worlds", timeout=110).expect(status=0)
    assert "worlds: []" in got.output, got
