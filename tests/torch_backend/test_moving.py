"""Sends and receives of CUDA tensors that go on together, on stand-ins for streams: no GPU is
needed.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from with_torch import torch

from collectives.array import Stream
from collectives.errors import UnsupportedError
from collectives.torch import moving, streams, transfers

pytestmark = pytest.mark.torch


class Sides:
    """The side streams of a group: notes what is put there, and what ends it."""

    def __init__(self) -> None:
        self.used: list[Any] = []

    def run(self, device: Any, put_on: Any, finish: Any, outputs: Any, used: Any) -> Any:
        put_on(Stream(7, 1, beside=True))
        if finish is not None:
            finish()
        self.used.append((outputs, used))
        return SimpleNamespace(_stream="side", _ended=f"event {len(self.used)}")


class Operation:
    """One of a batch, as far as it is looked at, and what torch does for it."""

    def __init__(self, make: Callable[[], Any], *, is_cuda: bool = True) -> None:
        self.make = make
        self.tensor = SimpleNamespace(is_cuda=is_cuda)


class Group:
    """As much of a process group as sends and receives need."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "main")
        self.sides, self.said = Sides(), []
        self.moving = moving.Moving()
        self.track: Any = SimpleNamespace(transfer=self.transfer)

    def transfer(self, listed: list[Any], device: Any, stream: int) -> None:
        assert (device, stream) == ("cuda:1", 7)
        self.said.append([t[1] for t in listed])

    def operation(self, number: int) -> Operation:
        """One of a batch, with rank `number`."""
        device: Any = "cuda:1"
        sides: Any = self.sides

        def finish() -> None:
            self.said.append([f"after {number}"])

        def make() -> Any:
            work = moving.MovedWork([f"tensor {number}"], device, number)
            transfer = (True, number, 0, 0, 0, 0)
            if self.moving.add(transfer, work, finish, f"held {number}"):
                self.moving.go(self.track, sides, device)
            return work

        return Operation(make)


def batch_isend_irecv(p2p_op_list: list[Operation]) -> list[Any]:
    return [op.make() for op in p2p_op_list]


def test_a_batch_goes_on_together(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(monkeypatch)
    alone = group.operation(9).make()
    works = batch_isend_irecv([group.operation(q) for q in range(3)])
    assert group.said == [[9], ["after 9"], [0, 1, 2], ["after 0"], ["after 1"], ["after 2"]]
    assert [work.source_rank() for work in (alone, *works)] == [9, 0, 1, 2]
    assert [work._ended for work in (alone, *works)] == ["event 1"] + ["event 2"] * 3
    assert [work.result() for work in works] == [[f"tensor {q}"] for q in range(3)]
    assert group.sides.used[1][1] == [f"held {q}" for q in range(3)]


def test_two_batches_do_not_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(monkeypatch)
    for _ in range(2):
        batch_isend_irecv([group.operation(q) for q in range(2)])
    assert [said for said in group.said if said[0] in (0, 1)] == [[0, 1]] * 2


def test_host_tensors_of_a_batch_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(monkeypatch)
    batch_isend_irecv([group.operation(4), Operation(lambda: None, is_cuda=False)])
    assert group.said[0] == [4]


def test_a_batch_that_failed_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(monkeypatch)

    def fails() -> None:
        raise ValueError("no tensor")

    with pytest.raises(ValueError, match="no tensor"):
        batch_isend_irecv([group.operation(0), Operation(fails)])
    group.operation(5).make()
    assert group.said[0] == [5]


def test_torch_has_batches_as_they_are_seen_here() -> None:
    assert "p2p_op_list" in torch.distributed.batch_isend_irecv.__code__.co_varnames


def test_the_way_is_the_same_on_all_ranks() -> None:
    """By way of the host until the engine is set up, and then too if a rank has sent so before."""
    tensor = SimpleNamespace(is_cuda=True)
    comm = SimpleNamespace(_device=None, _moved_by_host=False)
    group: Any = SimpleNamespace(_main=SimpleNamespace(comm=comm), _rank=0)
    from_gpu = transfers.Transfers._from_gpu
    assert not from_gpu(group, SimpleNamespace(is_cuda=False)) and not comm._moved_by_host
    assert not from_gpu(group, tensor) and comm._moved_by_host
    comm._device = SimpleNamespace(moves=False)
    assert not from_gpu(group, tensor)
    comm._device = SimpleNamespace(moves=True)
    assert from_gpu(group, tensor)
    group._from_gpu = lambda t: from_gpu(group, t)
    group._tag = transfers.Transfers._tag
    with pytest.raises(UnsupportedError, match="name the rank"):
        transfers.Transfers.recv_anysource(group, [tensor])
    assert issubclass(moving.MovedWork, streams.StreamWork)
