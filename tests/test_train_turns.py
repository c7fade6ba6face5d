"""Shards are stepped in turns: on GPUs few kernels, on the host one shard after another."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from collectives.bucket_layout import Bucket, Slot
from collectives.train import LAMB, LARS, SGD, stepping
from collectives.train.sharding import Shard


class There:
    """An array that is on a GPU, as far as the stepper looks before it runs a kernel."""

    def __init__(self, size: int) -> None:
        self.size, self.dtype = size, np.dtype(np.float32)
        self.device = SimpleNamespace(id=0)
        self.data = SimpleNamespace(ptr=id(self))

    def __getitem__(self, part: slice) -> There:
        return There(len(range(*part.indices(self.size))))


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_shards_on_gpus_are_stepped_in_few_turns(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as travel one after another, one where none does; those on the host each alone."""
    made: list[int] = []

    def parts(name: str, numbers: Any, arrays: Any) -> Any:
        made.append(len(arrays))
        return SimpleNamespace(run=lambda told: None)

    monkeypatch.setattr(stepping, "Parts", parts)
    monkeypatch.setattr(stepping, "device_name", lambda x: "cuda:0")
    shards = []
    for index in range(14):
        slots = [Slot(f"w{index}", 0, 100, (100,))]
        shard = Shard(Bucket(index, "float32", "cuda:0", slots), "float32", 1, 0)
        here = index in (5, 6)
        shard.master = shard.used = np.zeros(100) if here else There(100)
        shard.grad = np.zeros(100) if here else There(100)
        shards.append(shard)
    store: Any = SimpleNamespace(shards=shards, comm=object() if stage else None, stage=stage)
    stepper = stepping.Stepper(store, [SGD(lr=0.1)], {f"w{i}": 0 for i in range(14)})
    turns = stepper._turns_of(frozenset())
    numbers = [list(turn.runs) for turn in turns]
    if stage == 1:
        first, second = [[0, 1, 2, 3], [4]], [[7, 8, 9, 10], [11, 12, 13]]
    else:
        first, second = [[0, 1, 2, 3, 4]], [[7, 8, 9, 10, 11, 12, 13]]
    assert numbers == [*first, [5], [6], *second]
    assert [turn.there for turn in turns] == [True] * len(first) + [False] * 2 + [True] * len(
        second
    )
    assert made == [len(turn) for turn in first + second]
    assert stepper._turns_of(frozenset()) is turns
    assert stepper._turns_of(frozenset({"w0"})) is not turns
    shards[3].grad = There(100)  # elsewhere, as lent memory may be
    assert stepper._turns_of(frozenset()) is not turns


@pytest.mark.parametrize("optimizer", [LAMB(lr=0.1), LARS(lr=0.1)], ids=str)
def test_all_layers_on_a_gpu_take_two_kernels(
    optimizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that finds directions, one that goes them, at a rate of its own for each layer."""
    ran: list[tuple[str, Any, Any]] = []

    def parts(name: str, numbers: Any, arrays: Any) -> Any:
        def run(told: Any) -> None:
            rates = [dict(zip(numbers, t[1:], strict=True)) for t in told]
            ran.append((name, [list(a) for a in arrays], rates))

        return SimpleNamespace(run=run)

    monkeypatch.setattr(stepping, "Parts", parts)
    monkeypatch.setattr(stepping, "device_name", lambda x: "cuda:0")
    monkeypatch.setattr(stepping, "_like", lambda x: There(x.size))
    # The norms of w and of the direction, of each of three layers.
    monkeypatch.setattr(
        stepping, "sums_of_squares", lambda *_: np.array([4.0, 1.0, 9.0, 1.0, 16.0, 1.0])
    )
    slots = [Slot(f"w{i}", 10 * i, 10, (10,)) for i in range(3)]
    shard = Shard(Bucket(0, "float32", "cuda:0", slots), "float32", 1, 0)
    shard.master = shard.used = There(30)
    shard.grad = There(30)
    shard.state = {slot: There(30) for slot in optimizer.kept}
    pieces = [(shard, piece) for piece in shard.pieces]
    store: Any = SimpleNamespace(
        shards=[shard], comm=None, stage=0, pieces=lambda: iter(pieces), publish=lambda shard: None
    )
    stepper = stepping.Stepper(store, [optimizer], {f"w{i}": 0 for i in range(3)})
    stepper.step(0, 1.0, 0.5, frozenset({"w1"}))
    (first, found, _), (second, gone, rates) = ran
    if isinstance(optimizer, LAMB):
        assert (first, second) == ("lamb", "step")
        assert found == [["g", "w", "first", "second", "direction"]] * 2
        assert gone == [["g", "w"]] * 2
    else:
        assert (first, second) == ("gradient", "lars")
        assert found == [["g", "w", "direction"]] * 2
        assert gone == [["g", "w", "velocity"]] * 2
    wanted = [0.1 * optimizer.trust(norm, 1.0) for norm in (2.0, 4.0)]
    assert [rate["lr"] for rate in rates] == wanted
