"""What the trainer refuses, and in which words: bad gradients, ranks that differ, settings."""

from __future__ import annotations

from functools import partial

import models
import numpy as np
import pytest
from training import MODES, NODES, batches, make
from worlds import outcomes

import collectives as cc
from collectives.train import SGD, AdamW, LossScale, Steps, Trainer, WarmUp


def refusal(n, body):
    ended = outcomes(n, body, timeout=60)
    assert all(isinstance(e, cc.CollectiveError) for e in ended), ended
    return "\n".join(map(str, ended))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_gradients_that_are_not_finite(mode, bad):
    """All ranks say which parameter and whose; nothing is written."""

    def function(params, batch, emit):
        def spoilt(name, grad):
            if batch[0][0, 0] > 1e8 and name in ("b2", "w2"):
                grad = grad.copy()
                grad.flat[-1] = bad
            emit(name, grad)

        spoilt.scale = emit.scale
        return models.loss_and_grads(params, batch, spoilt)

    def body(comm):
        trainer = make(comm, mode, function=function)
        batch = models.part_of(next(batches(1)), comm.rank, comm.size)
        trainer.step(batch)
        before = models.bits(trainer.parameters())
        spoilt = batch[0].copy()
        spoilt[0, 0] = 1e9 if comm.rank == 2 else 0
        with pytest.raises(cc.CollectiveError) as told:
            trainer.step((spoilt, batch[1]))
        assert models.bits(trainer.parameters()) == before
        trainer.step(batch)  # and it can go on
        trainer.close()
        comm.barrier()
        return str(told.value)

    for words in cc.run_threads(3, body, nodes=NODES[3], timeout=60):
        assert "step 2: gradients are not finite" in words
        assert "'w2' (rank 2)" in words and "'b2' (rank 2)" in words
        assert "w3" not in words


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"optimizer": SGD(lr=0.1)}, "setting 'optimizer' is"),
        ({"optimizer": AdamW(lr=0.5)}, "AdamW(lr=0.5"),
        ({"clip_norm": 1.0}, "setting 'clip_norm' is null on ranks 0, 2; 1.0 on rank 1"),
        ({"mode": (1, None)}, "setting 'sharding' is 0 on ranks 0, 2; 1 on rank 1"),
        ({"accumulate": 2}, "setting 'accumulate'"),
        ({"reduce_every": "micro-batch"}, "setting 'reduce_every'"),
        ({"precision": "bf16"}, "setting 'precision'"),
        ({"master_weights": False}, "setting 'master_weights' is true on ranks 0, 2; false on"),
        ({"schedule": Steps((1,))}, "setting 'schedule'"),
        ({"groups": [{"params": ["b*"], "lr": 1.0}]}, "setting 'optimizer'"),
        ({"params": models.parameters("float64")}, "parameter 'w1' is"),
        ({"params": {"w1": np.zeros(3, np.float32)}}, "parameter 'b1' is"),
        ({"frozen": ["b1"]}, "parameter 'b1' is"),
        ({"bucket_bytes": 5000}, "setting 'bucket_bytes' is 6000 on ranks 0, 2; 5000 on rank 1"),
    ],
    ids=lambda value: None if isinstance(value, str) else next(iter(value)),
)
def test_ranks_that_differ(more, words):
    def body(comm):
        make(comm, **(more if comm.rank == 1 else {}))

    told = refusal(3, body)
    assert words in told
    assert told.count("the ranks differ") == 3


@pytest.mark.parametrize("stage", [0, 3])
def test_a_gradient_of_another_shape(stage):
    def function(params, batch, emit):
        emit("b", np.zeros(3, np.float32))
        emit("a", np.zeros((2, 3) if batch[0, 0] == 1 else 6, np.float32))
        return 0.0

    def body(comm):
        params = {n: np.zeros(s, np.float32) for n, s in (("a", 6), ("b", 3))}
        trainer = Trainer(function, SGD(lr=1.0), comm, params=params, sharding=stage)
        trainer.step(np.full((1, 1), comm.rank))

    assert "rank 1: the gradient of 'a' has shape (2, 3), the parameter (6,)" in refusal(2, body)


def test_parameters_used_in_different_orders():
    """Under stage 3 that would hand one parameter out as another."""

    def function(params, batch, emit):
        order = "ab" if batch[0, 0] == 0 else "ba"
        for name in order:
            params[name].sum()
        for name in "ba":
            emit(name, np.zeros(900, np.float32))
        return 0.0

    def body(comm, differs_at):
        params = {n: np.zeros(900, np.float32) for n in "ab"}
        trainer = Trainer(
            function, SGD(lr=1.0), comm, params=params, sharding=3,
            bucket_bytes=1, first_bucket_bytes=1,
        )  # fmt: skip
        for step in range(3):
            trainer.step(np.full((1, 1), comm.rank if step == differs_at else 0))

    for step in (0, 2):
        ended = outcomes(2, lambda comm, step=step: body(comm, step), timeout=60)
        assert any(isinstance(e, cc.MismatchError) for e in ended), ended
        assert all(isinstance(e, cc.CollectiveError) for e in ended), ended


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"mode": (4, None)}, "sharding=4"),
        ({"mode": (1, "rack")}, "only 'node' is known"),
        ({"mode": (0, "node")}, "with sharding=0 nothing is sharded"),
        ({"precision": "fp8"}, "known: float32, bf16"),
        ({"normalize": "token"}, "did you mean 'tokens'"),
        ({"normalize": "tokens"}, "needs count="),
        ({"reduce_every": "microbatch"}, "micro-batch"),
        ({"accumulate": 0}, "at least one micro-batch"),
        ({"clip_norm": 0.0}, "must be positive"),
        ({"offload": "disk"}, "only 'host'"),
        ({"loss_scale": LossScale()}, "loss_scale= is for precision='fp16'"),
        ({"frozen": ["w11"]}, "did you mean 'w1'"),
        ({"groups": [{"params": ["x*"], "lr": 1.0}]}, "no parameter is like 'x*'"),
        ({"groups": [{"params": ["w1"], "rate": 1.0}]}, "rate"),
        ({"groups": [{"lr": 1.0}]}, "groups: {'lr': 1.0} does not say whose it is"),
        (
            {"groups": [{"params": ["w1"], "lr": 1.0}, {"params": ["w*"], "lr": 1.0}]},
            "groups: 'w1' is in two groups",
        ),
        ({"reduce_dtype": "int32"}, "reduce_dtype='int32' cannot hold gradients"),
        ({"reduce_dtype": "bool"}, "reduce_dtype='bool'"),
        ({"reduce_dtype": np.complex64}, "reduce_dtype='complex64'"),
        ({"groups": [{"params": ["w1"], "lr": -1.0}]}, "lr=-1.0 must be a finite number, >= 0"),
        (
            {"groups": [{"params": ["w1"], "lr": "1e-3"}]},
            "AdamW: lr='1e-3' must be a finite number",
        ),
        ({"groups": [{"params": [], "lr": 1.0}]}, "groups: {'params': [], 'lr': 1.0} names no"),
        (
            {"groups": [{"params": [np.ones(2)]}]},
            "groups: 'params' holds a ndarray; it takes names",
        ),
        ({"groups": {"params": ["w1"]}}, "groups is a list of dicts, such as"),
        ({"groups": ["w1"]}, "groups is a list of dicts, such as"),
    ],
    ids=lambda value: None if isinstance(value, str) else next(iter(value)),
)
def test_wrong_settings(more, words):
    with pytest.raises(ValueError) as told:
        cc.run_threads(1, lambda comm: make(comm, **more))
    assert words in str(told.value)


def test_names_and_patterns_of_groups():
    """A name stands for itself; patterns of one group may overlap; one alone need be in no list."""

    def body(comm, patterns):
        def function(params, batch, emit):
            for name in params:
                emit(name, np.ones(2))
            return 0.0

        names = ("layers[0].w", "layers0.w", "a.bias")
        trainer = Trainer(
            function, SGD(lr=1.0), comm, params={name: np.zeros(2) for name in names},
            groups=[{"params": patterns, "lr": 0.0}],
        )  # fmt: skip
        trainer.step(np.ones(2))
        return [name for name, w in trainer.parameters().items() if not w.any()]

    for patterns, wanted in (
        (["layers[0].w"], ["layers[0].w"]),
        (["layers[0-9].w"], ["layers0.w"]),
        (["*bias", "a.*"], ["a.bias"]),
        ("*bias", ["a.bias"]),
    ):
        assert cc.run_threads(1, body, patterns) == [wanted]


class Linear:
    """A schedule without a repr of its own."""

    def __init__(self, steps):
        self.steps = steps

    def __call__(self, step):
        return 1 - step / self.steps


def half(step):
    return 0.5


def scaled(step, by):
    return by


@pytest.mark.parametrize(
    ("one", "same", "other"),
    [
        (Linear(5), Linear(5), Linear(6)),
        (WarmUp(3, Linear(5)), WarmUp(3, Linear(5)), WarmUp(3, Linear(6))),
        (half, half, scaled),
        (partial(scaled, by=2), partial(scaled, by=2), partial(scaled, by=3)),
        (Linear(5).__call__, Linear(5).__call__, Linear(6).__call__),
    ],
)
def test_schedules_are_compared_by_what_they_hold(one, same, other, tmp_path):
    def body(comm, schedules):
        return make(comm, schedule=schedules[comm.rank])

    cc.run_threads(2, body, [one, same])
    told = refusal(2, lambda comm: body(comm, [one, other]))
    assert "setting 'schedule' is" in told
    assert " at 0x" not in told  # where it lies differs between processes


def test_schedules_that_cannot_be_compared():
    bound = 3

    def closure(step):
        return bound

    for schedule in (lambda step: 1.0, closure):
        with pytest.raises(ValueError, match="cannot be compared between ranks"):
            cc.run_threads(1, lambda comm, schedule=schedule: make(comm, schedule=schedule))


@pytest.mark.parametrize("stage", range(4))
def test_a_gradient_that_is_emitted_twice(stage):
    def twice(params, batch, emit):
        for _ in range(2):
            emit("w", params["w"])
        return 0.0

    def body(comm):
        trainer = Trainer(
            twice, SGD(lr=1), comm, params={"v": np.ones(2), "w": np.ones(2)}, sharding=stage
        )
        trainer.step(np.ones(1))

    assert "'w' became ready twice in one pass" in (told := refusal(2, body))
    assert "emit each gradient once in a call of the function" in told and "finish()" not in told


@pytest.mark.torch
@pytest.mark.parametrize("stage", range(4))
def test_a_shared_layer_under_reentrant_checkpointing(stage):
    torch = pytest.importorskip("torch")

    class Shared(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.layer = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x, reentrant):
            x = self.first(x)
            for _ in range(2):
                x = torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=reentrant)
            return x.square().mean()

    def body(comm, reentrant):
        Trainer(
            Shared(), SGD(lr=0.1), comm, loss=lambda net, x: net(x, reentrant), sharding=stage
        ).step(torch.ones(2, 4))

    told = refusal(2, lambda comm: body(comm, True))
    assert "'layer." in told and "twice in one backward" in told
    assert "checkpoint(..., use_reentrant=False)" in told and "finish()" not in told
    cc.run_threads(2, body, False, timeout=20)


def test_no_model():
    with pytest.raises(TypeError, match="a function with params="):
        cc.run_threads(1, lambda comm: Trainer(models.loss_and_grads, SGD(lr=1), comm))
    with pytest.raises(TypeError, match="pass one of"):
        cc.run_threads(1, lambda comm: make(comm, optimizer="adam"))
    with pytest.raises(TypeError, match="returns its loss itself: no loss="):
        cc.run_threads(1, lambda comm: make(comm, loss=lambda *_: 0.0))


@pytest.mark.parametrize("n", ["2", 2.0, None])
def test_no_number_of_threads(n):
    with pytest.raises(TypeError, match="run_threads takes a number of ranks, not"):
        cc.run_threads(n, len)
    with pytest.raises(ValueError, match="at least one rank"):
        cc.run_threads(0, len)
