"""The trainer on functions over arrays: all stages take the same steps, bit for bit."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import models
import numpy as np
import pytest
from worlds import outcomes

import collectives as cc
from collectives.train import (
    LAMB,
    LARS,
    SGD,
    Adam,
    AdamW,
    LossScale,
    Metrics,
    Sampler,
    Steps,
    Trainer,
)
from collectives.train.progress import Bar

NODES = {1: [0], 2: [0, 1], 3: [0, 0, 1], 4: [0, 0, 1, 1], 5: [0, 0, 1, 1, 1]}
MODES = [(0, None), (1, None), (2, None), (3, None), (3, "node")]
SMALL = {"bucket_bytes": 6000, "first_bucket_bytes": 1000}


def make(comm, mode=(0, None), optimizer=None, **more):
    settings = {"params": models.parameters(), **SMALL, **more}
    function = settings.pop("function", models.loss_and_grads)
    stage, group = mode
    optimizer = optimizer or AdamW(lr=1e-2)
    return Trainer(function, optimizer, comm, sharding=stage, shard_group=group, **settings)


def batches(steps, size=24, count=240):
    x, y = models.data(count)
    for step in range(steps):
        low = step * size % (count - size)
        yield x[low : low + size], y[low : low + size]


def train(comm, mode, steps, **more):
    """Losses, gradient norms and the bits of all parameters after `steps`."""
    trainer = make(comm, mode, **more)
    told = [trainer.step(models.part_of(b, comm.rank, comm.size)) for b in batches(steps)]
    return [(m.loss, m.grad_norm, m.skipped) for m in told], models.bits(trainer.parameters())


def same_in_all_modes(n, steps, modes=MODES, **more):
    """Trains in every mode, on one communicator; returns what all ranks and modes have in
    common."""

    def body(comm):
        return [train(comm, mode, steps, **more) for mode in modes]

    found = cc.run_threads(n, body, nodes=NODES[n], timeout=60)
    first = found[0][0]
    for rank, results in enumerate(found):
        for mode, (told, parameters) in zip(modes, results, strict=True):
            assert told == first[0], (rank, mode)
            assert parameters == first[1], (rank, mode)
    return first


# ---- the headline -------------------------------------------------------------------------------


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
def test_unused_in_some_micro_batches(stage):
    """Each parameter has a gradient in one micro-batch of the first step, "b" in none of the
    second, so it stays then."""

    def backward(params, batch, emit):
        name = "ab"[int(batch[0])]
        emit(name, np.ones(700, np.float32) * (1 + params[name][0]))
        return 0.0

    def body(comm):
        params = {"a": np.zeros(700, np.float32), "b": np.zeros(700, np.float32)}
        more = {"params": params, "function": backward, "find_unused": True}
        more |= {"optimizer": SGD(lr=1.0), "reduce_every": "micro-batch", "accumulate": 2}
        trainer = make(comm, (stage, None), **more)
        trainer.step([np.zeros(1), np.ones(1)])
        first = trainer.parameters()
        trainer.step([np.zeros(1), np.zeros(1)])
        second = trainer.parameters()
        return [float(x[-1]) for x in (first["a"], first["b"], second["a"], second["b"])]

    assert cc.run_threads(2, body, timeout=20) == [[-0.5, -0.5, -1.0, -0.5]] * 2


@pytest.mark.parametrize("mode", [(1, "node"), (2, "node")])
def test_hybrid_stages(mode):
    same_in_all_modes(4, 5, [(0, None), mode], clip_norm=0.1)


def alone(steps, **more):
    """One process on the global batch."""
    return cc.run_threads(1, lambda comm: train(comm, (0, None), steps, **more))[0]


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


# ---- optimizers ---------------------------------------------------------------------------------

OPTIMIZERS = [
    SGD(lr=0.1, weight_decay=0.01),
    SGD(lr=0.1, momentum=0.9),
    SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    Adam(lr=0.01, weight_decay=0.01),
    AdamW(lr=0.01, weight_decay=0.1),
    LARS(lr=1.0, weight_decay=0.01, coefficient=0.02),
    LAMB(lr=0.02),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_optimizers_are_equal_in_all_stages(optimizer):
    told, _ = same_in_all_modes(3, 15, optimizer=optimizer, clip_norm=0.3)
    assert told[-1][0] < told[0][0]


@pytest.mark.torch
@pytest.mark.parametrize("optimizer", OPTIMIZERS[:5], ids=str)
def test_optimizers_as_torch_has_them(optimizer):
    torch = pytest.importorskip("torch")
    random = np.random.default_rng(0)
    w = random.normal(size=1000).astype(np.float32)
    theirs = torch.tensor(w.astype(np.float64), requires_grad=True)
    settings = {k: v for k, v in vars(optimizer).items() if not k.startswith("beta")}
    if isinstance(optimizer, Adam | AdamW):
        settings["betas"] = (optimizer.beta1, optimizer.beta2)
    other = getattr(torch.optim, type(optimizer).__name__)([theirs], **settings)
    state = {name: np.zeros_like(w) for name in optimizer.slots}
    for step in range(1, 20):
        g = random.normal(size=1000).astype(np.float32)
        theirs.grad = torch.tensor(g.astype(np.float64))
        other.step()
        optimizer.update(w, g, state, optimizer.lr, step, np.empty_like(g))
    assert np.allclose(w, theirs.detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("optimizer", [*OPTIMIZERS[3:5], Adam(lr=0.1), AdamW(1e-3, 0.0)], ids=str)
def test_one_pass_has_the_bits_of_many(optimizer, dtype):
    """At every length, alignment and size of numbers, also those that under- and overflow."""
    random = np.random.default_rng(0)
    for count, low in [(1, 0), (7, 1), (64, 3), (1000, 5)]:
        size = 10.0 ** random.integers(-25, 12, low + count)
        w, g, m, v = (
            (random.normal(size=low + count) * size).astype(dtype)[low:] for _ in range(4)
        )
        v = np.abs(v)
        g[0], m[0], v[0] = 0, -0.0, 0
        slow = {"first": m.copy(), "second": v.copy()}
        fast = {"first": m.copy(), "second": v.copy()}
        w_slow, w_fast = w.copy(), w.copy()
        with np.errstate(all="ignore"):
            for step in (1, 2, 9):
                scaled = g * np.dtype(dtype).type(0.3)
                optimizer.update(w_slow, scaled, slow, 0.01, step, np.empty_like(g))
                assert optimizer.fused(w_fast, g, 0.3, fast, 0.01, step)
        assert w_slow.tobytes() == w_fast.tobytes()
        assert models.bits(slow) == models.bits(fast)
    assert not optimizer.fused(w, np.zeros_like(g, np.float16), 1.0, fast, 0.01, 1)


def layerwise_by_the_paper(optimizer, w, grads):
    """LARS and LAMB as their papers write them, on one whole parameter in float64."""
    m = v = np.zeros_like(w)
    for t, g in enumerate(grads, 1):
        if isinstance(optimizer, LARS):
            wn, gn = np.linalg.norm(w), np.linalg.norm(g)
            rate = optimizer.coefficient * wn / (gn + optimizer.weight_decay * wn)
            m = optimizer.momentum * m + optimizer.lr * rate * (g + optimizer.weight_decay * w)
            w = w - m
        else:
            m = optimizer.beta1 * m + (1 - optimizer.beta1) * g
            v = optimizer.beta2 * v + (1 - optimizer.beta2) * g * g
            r = m / (1 - optimizer.beta1**t)
            r = r / (np.sqrt(v / (1 - optimizer.beta2**t)) + optimizer.eps)
            r = r + optimizer.weight_decay * w
            w = w - optimizer.lr * np.linalg.norm(w) / np.linalg.norm(r) * r
    return w


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS[5:], ids=str)
def test_layer_norms_across_shard_boundaries(optimizer, stage):
    """One parameter over three ranks: the norms must be those of all of it."""
    random = np.random.default_rng(3)
    w = random.normal(size=5000)
    grads = [random.normal(size=5000) for _ in range(6)]

    def body(comm):
        steps = iter(grads)

        def function(params, batch, emit):
            assert params["w"].shape == (5000,)
            emit("w", next(steps))
            return 0.0

        trainer = Trainer(function, optimizer, comm, params={"w": w}, sharding=stage)
        assert stage == 0 or 0 < trainer.store.shards[0].high - trainer.store.shards[0].low < 5000
        for _ in grads:
            trainer.step(np.zeros((1, 1)))
        return trainer.parameters()["w"]

    wanted = layerwise_by_the_paper(optimizer, w, grads)
    for got in cc.run_threads(3, body, timeout=20):
        assert np.allclose(got, wanted, rtol=1e-9, atol=1e-12)


# ---- what a step means --------------------------------------------------------------------------


def linear(params, batch, emit):
    """loss = mean of x·w: the gradient is the mean of x, whatever w is."""
    emit("w", batch.mean(axis=0))
    return float(batch.mean(axis=0) @ params["w"])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_mean_over_uneven_parts(stage):
    """Rank r has r samples, rank 0 none: the step is that of the mean over all of them."""
    x = np.random.default_rng(0).normal(size=(6, 3))

    def body(comm):
        trainer = Trainer(
            linear, SGD(lr=1.0), comm, params={"w": np.zeros(3)}, sharding=stage, accumulate=1
        )
        low = sum(range(comm.rank))
        for _ in range(2):
            metrics = trainer.step(x[low : low + comm.rank] if comm.rank else None)
        assert metrics.samples == 6
        assert metrics.loss == pytest.approx(-float(x.mean(axis=0) @ x.mean(axis=0)))
        return trainer.parameters()["w"]

    for w in cc.run_threads(4, body, timeout=20):
        assert np.allclose(w, -2 * x.mean(axis=0), atol=1e-15)


def test_the_mean_over_tokens():
    """Rank 0 has one sample of 2 tokens, rank 1 one of 6."""

    def body(comm):
        batch = np.full((1, 3), [2.0, 6.0][comm.rank])
        trainer = Trainer(
            linear,
            SGD(lr=1.0),
            comm,
            params={"w": np.zeros(3)},
            normalize="tokens",
            count=lambda b: int(b[0, 0]),
        )
        assert trainer.step(batch).samples == 8
        return trainer.parameters()["w"].tolist()

    mean = (2 * 2 + 6 * 6) / 8
    assert cc.run_threads(2, body) == [[-mean] * 3] * 2


@pytest.mark.parametrize("stage", [0, 3])
def test_join_goes_on_until_every_rank_is_through(stage):
    """Ranks with 1, 2 and 3 batches: three steps, as one process takes them on what there is."""
    x = np.random.default_rng(0).normal(size=(3, 3, 4, 3))  # step, rank, sample

    def body(comm):
        trainer = Trainer(linear, SGD(lr=1.0), comm, params={"w": np.zeros(3)}, sharding=stage)
        mine = (x[step, comm.rank] for step in range(comm.rank + 1))
        told = [trainer.step(batch) for batch in trainer.join(mine)]
        assert [m.samples for m in told] == [12, 8, 4]
        return trainer.parameters()["w"]

    wanted = -(x[0].mean((0, 1)) + x[1, 1:].mean((0, 1)) + x[2, 2].mean(0))
    for w in cc.run_threads(3, body, timeout=20):
        assert np.allclose(w, wanted)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_tied_frozen_and_grouped_parameters(stage):
    def function(params, batch, emit):
        assert params["in"] is not None and params["out"].shape == (600, 2)
        assert np.array_equal(params["in"], params["out"])
        emit("in", np.full((600, 2), 1.0))
        emit("out", np.full((600, 2), 2.0))
        emit("fixed", np.full(3, 9.0))  # of no use, and no error
        emit("slow", np.ones(700))
        emit("bias", np.ones(3))
        return 0.0

    def body(comm):
        shared = np.zeros((600, 2))
        params = {
            "in": shared,
            "fixed": np.full(3, 5.0),
            "out": shared,
            "slow": np.zeros(700),
            "bias": np.full(3, 1.0),
        }
        trainer = Trainer(
            function,
            SGD(lr=1.0, weight_decay=0.5),
            comm,
            params=params,
            sharding=stage,
            frozen=["fixed"],
            groups=[{"params": ["s*"], "lr": 0.1}, {"params": ["bias"], "weight_decay": 0.0}],
        )
        trainer.step(np.zeros((1, 1)))
        with trainer.gathered() as seen:
            assert np.array_equal(seen["out"], np.full((600, 2), -3.0))
            assert np.array_equal(seen["fixed"], np.full(3, 5.0))
        found = trainer.parameters()
        assert "fixed" not in found and "out" not in found
        return {name: x.ravel()[0] for name, x in found.items()}

    wanted = {"in": -3.0, "slow": -0.1, "bias": 0.0}
    assert cc.run_threads(2, body, timeout=20) == [wanted] * 2


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_unused_parameters_are_left_alone(stage, static):
    """Used on rank 1 alone: it is stepped. Used nowhere: no weight decay, no momentum."""

    def function(params, batch, emit):
        emit("a", np.ones(3))
        if batch[0, 0] == 1:
            emit("b", np.full(3, 4.0))
        return 0.0

    def body(comm):
        trainer = Trainer(
            function,
            SGD(lr=1.0, weight_decay=0.5),
            comm,
            params={n: np.ones(3) for n in "abc"},
            sharding=stage,
            find_unused=not static,
            static_graph=static,
        )
        found = []
        for _ in range(2):
            trainer.step(np.full((1, 1), comm.rank))
            found.append([trainer.parameters()[n][0] for n in "abc"])
        return found

    wanted = [[-0.5, -1.5, 1.0], [-1.25, -2.75, 1.0]]
    assert cc.run_threads(2, body, timeout=20) == [wanted] * 2


def test_a_model_begins_as_that_of_rank_0():
    def body(comm):
        trainer = make(comm, params=models.parameters(seed=comm.rank))
        return models.bits(trainer.parameters())

    assert cc.run_threads(3, body) == [models.bits(models.parameters())] * 3


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


@pytest.mark.jax
def test_jax():
    jax = pytest.importorskip("jax")
    jnp = jax.numpy

    @jax.jit
    def gradients(params, x, y):
        def loss(p):
            h = jnp.tanh(x @ p["w1"] + p["b1"])
            h = jax.nn.relu(h @ p["w2"] + p["b2"])
            return ((h @ p["w3"] * p["scale"] - y) ** 2).mean()

        return jax.value_and_grad(loss)(params)

    def function(params, batch, emit):
        assert all(isinstance(x, jax.Array) for x in params.values())
        return gradients(dict(params), *batch)

    def body(comm):
        params = {name: jnp.asarray(x) for name, x in models.parameters().items()}
        told = [train(comm, (stage, None), 5, function=function, params=params) for stage in (0, 3)]
        assert told[0] == told[1]
        return told[0][0][-1][0]

    losses = cc.run_threads(2, body, timeout=60)
    assert losses[0] == losses[1] == pytest.approx(alone(5)[0][-1][0], rel=1e-5)


# ---- fp16 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 3])
def test_an_overflow_on_one_rank_stops_all(stage):
    """The gradient that overflows lies in one rank's shard; no rank steps, all halve the scale."""

    def function(params, batch, emit):
        assert params["w"].dtype == np.float16
        grad = np.zeros(3000, np.float16)
        grad[0] = np.inf if batch[0, 0] == 1 and emit.scale == 8.0 else 0  # of rank 1, in rank 0's
        emit("w", grad)
        return 0.0

    def body(comm):
        trainer = Trainer(
            function,
            SGD(lr=1.0, weight_decay=0.5),
            comm,
            params={"w": np.ones(3000, np.float32)},
            sharding=stage,
            precision="fp16",
            loss_scale=LossScale(scale=8.0, interval=2),
        )
        told = []
        for _ in range(4):
            metrics = trainer.step(np.full((1, 1), comm.rank))
            told.append((metrics.skipped, metrics.scale, float(trainer.parameters()["w"][0])))
        return told, trainer.updates

    wanted = [(True, 8.0, 1.0), (False, 4.0, 0.5), (False, 4.0, 0.25), (True, 8.0, 0.25)]
    assert cc.run_threads(2, body, timeout=20) == [(wanted, 2)] * 2


def test_loss_scale():
    scale = LossScale(scale=4.0, interval=2)
    for overflow, wanted in [(False, 4), (False, 8), (True, 4), (False, 4), (False, 8), (True, 4)]:
        scale.update(overflow)
        assert scale.scale == wanted
    for _ in range(9):
        scale.update(True)
    assert scale.scale == 1


# ---- what is refused ----------------------------------------------------------------------------


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
        ({"precision": "fp8"}, "known: float32, bf16"),
        ({"normalize": "token"}, "did you mean 'tokens'"),
        ({"normalize": "tokens"}, "needs count="),
        ({"reduce_every": "microbatch"}, "micro-batch"),
        ({"accumulate": 0}, "at least one micro-batch"),
        ({"clip_norm": 0.0}, "must be positive"),
        ({"offload": "disk"}, "only 'host'"),
        ({"frozen": ["w11"]}, "did you mean 'w1'"),
        ({"groups": [{"params": ["x*"], "lr": 1.0}]}, "no parameter is like 'x*'"),
        ({"groups": [{"params": ["w1"], "rate": 1.0}]}, "rate"),
        ({"groups": [{"params": ["w1"], "lr": -1.0}]}, "must be >= 0"),
    ],
    ids=lambda value: None if isinstance(value, str) else next(iter(value)),
)
def test_wrong_settings(more, words):
    with pytest.raises(ValueError) as told:
        cc.run_threads(1, lambda comm: make(comm, **more))
    assert words in str(told.value)


def test_no_model():
    with pytest.raises(TypeError, match="a function with params="):
        cc.run_threads(1, lambda comm: Trainer(models.loss_and_grads, SGD(lr=1), comm))
    with pytest.raises(TypeError, match="pass one of"):
        cc.run_threads(1, lambda comm: make(comm, optimizer="adam"))


# ---- what is told -------------------------------------------------------------------------------


class Terminal:
    def __init__(self, is_one):
        self.text, self.is_one = "", is_one

    def isatty(self):
        return self.is_one

    def write(self, text):
        self.text += text

    def flush(self):
        pass


def test_metrics_and_progress(tmp_path, capsys):
    def body(comm):
        sampler = Sampler(96, comm, micro=4, accumulate=2, seed=3)
        x, y = models.data(96)
        trainer = make(comm, accumulate=2, metrics=tmp_path / "metrics.jsonl", trace=True)
        for indices in trainer.progress(sampler):
            trainer.step((x[indices], y[indices]))
        trainer.write_trace(tmp_path / "trace.json")
        return trainer.global_batch

    words = cc.run_threads(3, body, timeout=20)
    assert words == ["global batch 24 = 4 (micro) x 3 (ranks) x 2 (accumulation)"] * 3
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["samples"] == 24 and line["grad_norm"] > 0 for line in lines)
    assert all(0 <= line["overlap"] <= 100 and line["exposed"] >= 0 for line in lines)
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    told = capsys.readouterr()
    assert told.out == told.err == ""  # no terminal: not a word


def test_the_bar_is_for_terminals():
    metrics = Metrics(
        step=1, loss=0.5, lr=0.1, samples=100, grad_norm=math.nan, skipped=True, scale=1.0,
        seconds=0.1, exposed=0.002, overlap=90.0,
    )  # fmt: skip
    for rank, terminal, shown in [(0, True, True), (0, False, False), (1, True, False)]:
        stream = Terminal(terminal)
        bar = Bar(1, rank, stream)
        bar.step(metrics, "global batch 100")
        bar.close()
        assert stream.text.startswith("global batch 100\n") == shown
        assert ("step 1/1  loss 0.5000  1,000 samples/s  exposed 2.0 ms" in stream.text) == shown
    assert json.loads(metrics.json())["grad_norm"] is None


def test_numpy_users_import_nothing_else():
    """Neither torch, jax, cupy nor safetensors, and no drawing library."""
    code = (
        "import sys, collectives.train, collectives.bucketing, collectives.train.batch_norm;"
        "heavy = {'torch', 'jax', 'cupy', 'safetensors', 'matplotlib'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
