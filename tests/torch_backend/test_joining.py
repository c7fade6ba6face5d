"""How the ranks of a process group meet through torch's store, and what they say to each other
there.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import launch
import pytest

import collectives as cc

dist = pytest.importorskip("torch.distributed")
pytestmark = pytest.mark.torch

HERE = Path(__file__).resolve().parent


def met(
    store: Any,
    ranks: list[int],
    body: Callable[[Any], object],
    *,
    size: int = 2,
    seconds: float = 20.0,
) -> list[object]:
    """What body(group) returns on some ranks of a group, threads that meet in `store`; or raises.
    `seconds` is the timeout of the group.
    """
    from collectives.torch.base import BaseGroup
    from collectives.torch.joining import Meeting

    found: dict[int, object] = {}

    def run(rank: int) -> None:
        try:
            group = BaseGroup(Meeting(store, rank, size, seconds, []), "group")
            found[rank] = body(group)
            group.shutdown()
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in ranks]


def numbered(group: Any) -> int:
    group.monitored_barrier(5.0)
    return int(group.rank())


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

    assert met(store, [0, 1], both) == [None, None]
    assert met(store, [0, 1], rank_0_alone) == [None, None]


@pytest.mark.faults
def test_rank_0_waits_a_second_for_a_rank_that_came_and_is_gone() -> None:
    from collectives.torch.joining import Meeting
    from collectives.torch.monitoring import monitored_barrier

    store = dist.HashStore()
    store.set("monitored/0/1", b"")
    began = time.monotonic()
    with pytest.raises(cc.DeadlineError, match=r"rank 2 did not come within 0\.05 s"):
        monitored_barrier(Meeting(store, 0, 3, 20.0, []), 0, 0.05)
    assert 1.05 <= time.monotonic() - began < 10


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["HashStore", "FileStore", "TCPStore"])
def test_ranks_meet_although_others_came_alone_before(kind: str, tmp_path: Path) -> None:
    """As after a restart on the same store, when a rank had died before it came to the group."""
    store = {
        "HashStore": lambda: dist.HashStore(),
        "FileStore": lambda: dist.FileStore(str(tmp_path / "store"), 3),
        "TCPStore": lambda: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
    }[kind]()
    for error in met(store, [0, 2], numbered, size=3, seconds=0.3):
        assert isinstance(error, cc.BootstrapError), error
        assert "ranks 0, 2 of 3 came, rank 1 is missing" in str(error)
        assert error.peer == 1
    for _ in range(2):
        assert met(store, [0, 1, 2], numbered, size=3) == [0, 1, 2]
    assert met(store, [0, 1, 2], numbered, size=3) == [0, 1, 2]


@pytest.mark.faults
def test_ranks_that_come_before_rank_0_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank 0 of an earlier attempt said is in the store, and means nobody who comes now."""
    from collectives.torch import joining

    store = dist.HashStore()
    assert met(store, [0, 1], numbered) == [0, 1]
    for error in met(store, [0], numbered, seconds=0.1):
        assert "rank 1 is missing" in str(error)
    found: list[object] = []
    late = threading.Thread(target=lambda: found.extend(met(store, [1], numbered)))
    late.start()
    time.sleep(0.2)
    assert met(store, [0], numbered) == [0]
    late.join()
    assert found == [1]
    monkeypatch.setattr(joining, "GRACE", 0.0)
    (error,) = met(store, [1], numbered, seconds=0.1)
    assert isinstance(error, cc.BootstrapError)
    assert "rank 1 heard nothing from rank 0 within 0.1 s" in str(error)


@pytest.mark.faults
def test_torchrun_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank dies before the first group of a program, and then before the second."""
    start, environment = launch.command("torchrun", 2)
    # Which would have a store for each attempt.
    start.remove("--standalone")
    monkeypatch.setattr(launch, "command", lambda *_: (start, environment))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    result = launch.run(
        2, HERE / "workers" / "restarts.py", tmp_path, launcher="torchrun",
        options=("--max-restarts", "2", "--master-port", str(port)),
        env={"PYTHONWARNINGS": "default", "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
        timeout=110,
    ).expect(status=0)  # fmt: skip
    for rank in range(2):
        assert f"rank {rank} is through in attempt 2" in result.output
