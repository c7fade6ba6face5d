"""The trainer on functions over arrays: all stages take the same steps, bit for bit."""

from __future__ import annotations

import models
import numpy as np
import pytest
from training import MODES, NODES, alone, batches, make, same_in_all_modes, train

import collectives as cc
from collectives.train import SGD, LossScale, Trainer


@pytest.mark.parametrize(
    ("n", "precision"),
    [*((n, p) for n in (2, 3, 4, 5) for p in (None, "bf16")), (2, "fp16"), (3, "fp16")],
)
def test_stages_are_equal_bit_for_bit(n, precision):
    """100 steps with accumulation and clipping; the clip norm is what a shard could change."""
    more = {"loss_scale": LossScale(scale=2.0**24, interval=20)} if precision == "fp16" else {}
    told, _ = same_in_all_modes(n, 100, precision=precision, accumulate=2, clip_norm=0.05, **more)
    norms = [norm for _, norm, skipped in told if not skipped]
    assert min(norms) > 0.05 or sum(norm > 0.05 for norm in norms) > 50  # it did clip
    assert told[-1][0] < 0.9 * told[0][0]  # it did learn
    assert any(skipped for _, _, skipped in told) == (precision == "fp16")


@pytest.mark.parametrize(("n", "precision"), [(2, None), (3, "bf16"), (4, "fp16")])
def test_stages_are_equal_when_each_micro_batch_is_reduced(n, precision):
    """Bit for bit; against one reduction in a step to rounding."""
    more = {"loss_scale": LossScale(scale=2.0**24, interval=20)} if precision == "fp16" else {}
    more |= {"precision": precision, "accumulate": 3, "clip_norm": 0.05}
    modes = [*MODES, (2, "node")]
    told, found = same_in_all_modes(n, 20, modes, reduce_every="micro-batch", **more)
    if precision is None:
        once, wanted = same_in_all_modes(n, 20, [(0, None)], **more)
        assert found != wanted
        np.testing.assert_allclose([t[0] for t in told], [t[0] for t in once], rtol=1e-4)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_unused_in_some_micro_batches(stage):
    """Each parameter has a gradient in one micro-batch of the first step, "b" in none of the
    second, so it stays then."""

    def backward(params, batch, emit):
        name = "ab"[int(batch[0][0])]
        emit(name, np.ones(700, np.float32) * (1 + params[name][0]))
        return 0.0

    def body(comm):
        params = {"a": np.zeros(700, np.float32), "b": np.zeros(700, np.float32)}
        more = {"params": params, "function": backward, "find_unused": True}
        more |= {"optimizer": SGD(lr=1.0), "reduce_every": "micro-batch", "accumulate": 2}
        trainer = make(comm, (stage, None), **more)
        trainer.step([(np.zeros(1),), (np.ones(1),)])
        first = trainer.parameters()
        trainer.step([(np.zeros(1),), (np.zeros(1),)])
        second = trainer.parameters()
        return [float(x[-1]) for x in (first["a"], first["b"], second["a"], second["b"])]

    assert cc.run_threads(2, body, timeout=20) == [[-0.5, -0.5, -1.0, -0.5]] * 2


@pytest.mark.parametrize("mode", [(1, "node"), (2, "node")])
def test_hybrid_stages(mode):
    same_in_all_modes(4, 5, [(0, None), mode], clip_norm=0.1)


@pytest.mark.parametrize("mode", MODES)
def test_as_one_process_on_the_global_batch(mode):
    """Uneven parts of the batch (24 = 9 + 8 + 7 samples over 2 micro-batches), 30 steps."""

    def body(comm):
        trainer = make(comm, mode, accumulate=2, clip_norm=0.05, params=models.parameters())
        for x, y in batches(30):
            cut = [0, 9, 17, 24]
            low, high = cut[comm.rank], cut[comm.rank + 1]
            trainer.step((x[low:high], y[low:high]))
        return trainer.parameters()

    _, wanted = alone(30, clip_norm=0.05)
    for got in cc.run_threads(3, body, nodes=NODES[3], timeout=60):
        for name, x in got.items():
            exact = np.frombuffer(wanted[name], np.float32).reshape(x.shape)
            assert np.linalg.norm(x - exact) <= 1e-6 * np.linalg.norm(exact), name


def test_the_number_of_buckets_does_not_matter():
    def body(comm):
        return [
            train(comm, (stage, None), 10, bucket_bytes=size, first_bucket_bytes=1)[1]
            for stage in (0, 2)
            for size in (1, 9000, 1 << 20)
        ]

    first, *others = cc.run_threads(3, body, timeout=60)[0]
    assert all(other == first for other in others)


def test_reduce_dtype():
    """bf16 gradients that are reduced in float32 are another sum, the same in all stages."""
    low = same_in_all_modes(3, 8, precision="bf16")
    high = same_in_all_modes(3, 8, precision="bf16", reduce_dtype="float32")
    assert low != high
    assert abs(low[0][-1][0] - high[0][-1][0]) < 1e-2


def test_offloading_changes_nothing():
    assert same_in_all_modes(2, 3, offload="host") == same_in_all_modes(2, 3)


def test_double_precision():
    first, _ = same_in_all_modes(3, 5, params=models.parameters("float64"), clip_norm=0.05)
    assert first[0][0] > first[-1][0]


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_what_the_program_writes_into_parameters(stage, precision):
    """Stays, before the first step too, after which buckets are filled in another order; but
    masters are what counts where there are any.
    """
    names = "abc"

    def function(params, batch, emit):
        seen.append([float(params[name][0]) for name in names])
        for name in names:
            emit(name, np.ones(700, params[name].dtype))
        return 0.0

    def body(comm):
        params = {name: np.zeros(700, np.float32) for name in names}
        trainer = Trainer(
            function, SGD(lr=0.5), comm, params=params, sharding=stage, precision=precision,
            bucket_bytes=1000, first_bucket_bytes=1000,
        )  # fmt: skip
        found = []
        for step in range(2):
            with trainer.gathered() as whole:
                for i, name in enumerate(names):
                    whole[name][...] = 8 * step + i
            trainer.step(np.ones(1))
            found.append([[float(x[i]) for i in (0, -1)] for x in trainer.parameters().values()])
        assert trainer.bucketer.rebuilt == (stage < 2)
        return found

    seen: list[list[float]] = []
    wanted = [[[8 * step + i - 0.5] * 2 for i in range(3)] for step in range(2)]
    if precision:
        wanted = [[[-0.5] * 2] * 3, [[-1.0] * 2] * 3]
    assert cc.run_threads(2, body, timeout=20) == [wanted] * 2
    assert sorted(seen) == [[0.0, 1.0, 2.0]] * 2 + [[8.0, 9.0, 10.0]] * 2
