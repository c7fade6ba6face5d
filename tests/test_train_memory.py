"""How much of parameters, gradients and optimizer state a rank holds."""

from __future__ import annotations

import numpy as np
import pytest
from training import make

import collectives as cc
from collectives.train import SGD, Trainer


@pytest.mark.parametrize("stage", [2, 3])
def test_whole_gradients_are_not_held_when_each_micro_batch_is_reduced(stage):
    """Bytes of gradients beside buckets and shards, most at a time."""
    params = {f"w{i}": np.zeros((64, 512), np.float32) for i in range(8)}

    def backward(params, batch, emit):
        for name in reversed(list(params)):
            emit(name, np.full((64, 512), batch.mean(), np.float32))
        return 0.0

    def body(comm, every):
        more = {"params": params, "function": backward, "bucket_bytes": 1 << 18}
        trainer = make(comm, (stage, None), accumulate=4, reduce_every=every, **more)
        for _ in range(2):
            trainer.step(np.ones(8))
        return trainer.bucketer.peak

    whole = 8 * 64 * 512 * 4
    assert cc.run_threads(2, lambda c: body(c, "step"), timeout=20) == [whole] * 2
    assert cc.run_threads(2, lambda c: body(c, "micro-batch"), timeout=20) == [0] * 2


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_memory_of_a_rank(stage):
    """float32 with Adam: 4 bytes of parameters, 4 of gradients, 8 of state, each in part or
    whole."""

    def body(comm):
        params = {f"w{i}": np.zeros((64, 512), np.float32) for i in range(8)}
        trainer = make(comm, (stage, None), params=params, bucket_bytes=1 << 18)
        return trainer.nbytes()

    whole = 8 * 64 * 512 * 4
    for sizes in cc.run_threads(4, body, timeout=20):
        part = [1 if stage < 3 else 4, 1 if stage < 2 else 4, 1 if stage < 1 else 4]
        assert sizes == {
            "parameters": whole // part[0],
            "gradients": whole // part[1],
            "state": 2 * whole // part[2],
        }


def test_stage_3_holds_few_parameters_at_a_time():
    """Ten layers, a bucket each: what is gathered at a time is a few of them, each twice a step."""
    count = 3000

    def function(params, batch, emit):
        for i in range(10):
            assert params[f"w{i}"][0] == 1
        for i in reversed(range(10)):
            emit(f"w{i}", params[f"w{i}"] * 0)
        return 0.0

    def body(comm):
        params = {f"w{i}": np.ones(count, np.float32) for i in range(10)}
        trainer = Trainer(
            function, SGD(lr=1.0), comm, params=params, sharding=3,
            bucket_bytes=1, first_bucket_bytes=1,
        )  # fmt: skip
        calls = []
        for _ in range(3):
            trainer.step(np.zeros((1, 1)))
            calls.append(len(trainer._gatherer._record))
        return trainer._gatherer.peak / (4 * count), calls

    for peak, calls in cc.run_threads(2, body, timeout=20):
        assert peak <= 4, (peak, calls)
        assert calls == [18] * 3


@pytest.mark.parametrize("static", [False, True])
def test_a_rank_without_data_holds_no_gradients(static):
    """Where gradients may be missing: those that count as zero are made bucket by bucket."""
    params = {f"w{i}": np.zeros(1000, np.float32) for i in range(10)}

    def backward(params, batch, emit):
        for name in reversed(list(params)):
            if name != "w3":
                emit(name, np.full(1000, batch.mean(), np.float32))
        return 0.0

    def body(comm):
        more = {"params": params, "function": backward, "bucket_bytes": 1, "optimizer": SGD(lr=1.0)}
        more |= {"static_graph": True} if static else {"find_unused": True}
        trainer = make(comm, (3, None), **more)
        trainer.step(np.ones(1))
        trainer.bucketer.peak = 0
        trainer.step(None if comm.rank else np.ones(1))
        after = {name: float(x[-1]) for name, x in trainer.parameters().items()}
        return trainer.bucketer.peak, after

    (_, first), (peak, second) = cc.run_threads(2, body, timeout=20)
    assert peak == 0
    assert first == second == {name: 0.0 if name == "w3" else -2.0 for name in params}
