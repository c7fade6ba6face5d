"""Shards are stepped in turns: on GPUs few kernels, on the host one shard after another."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from collectives.bucket_layout import Bucket, Slot
from collectives.train import SGD, stepping
from collectives.train.sharding import Shard


class There:
    """An array that is on a GPU, as far as the stepper looks before it runs a kernel."""

    def __init__(self, size: int) -> None:
        self.size, self.dtype = size, np.dtype(np.float32)
        self.device = SimpleNamespace(id=0)

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
