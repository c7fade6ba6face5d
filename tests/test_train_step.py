"""What a step of the trainer means: means over uneven parts, which parameters it moves, fp16."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import models
import numpy as np
import pytest
from training import alone, make, train

import collectives as cc
from collectives.train import SGD, LossScale, Trainer
from collectives.train.functional import FunctionModel


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


def over_tokens(comm, count):
    weights = {"w": np.zeros(3)}
    return Trainer(linear, SGD(lr=1.0), comm, params=weights, normalize="tokens", count=count)


def test_the_mean_over_tokens():
    """Rank 0 has one sample of 2 tokens, rank 1 one of 6."""

    def body(comm):
        batch = np.full((1, 3), [2.0, 6.0][comm.rank])
        trainer = over_tokens(comm, lambda b: int(b[0, 0]))
        assert trainer.step(batch).samples == 8
        return trainer.parameters()["w"].tolist()

    mean = (2 * 2 + 6 * 6) / 8
    assert cc.run_threads(2, body) == [[-mean] * 3] * 2


@pytest.mark.parametrize("wrong", [2.5, -1, math.nan, math.inf, None, "2", np.ones(2)])
def test_what_is_counted_are_whole_things(wrong):
    """Anything else raises and changes nothing; a sum of floats that is whole is a number."""

    def body(comm):
        told = [wrong, np.float32(3)]
        trainer = over_tokens(comm, lambda b: told.pop(0))
        with pytest.raises(ValueError, match=re.escape(f"count= returned {wrong!r}")):
            trainer.step(np.ones((1, 3)))
        assert trainer.step(np.ones((1, 3))).samples == 6
        return trainer.parameters()["w"].tolist()

    assert cc.run_threads(2, body) == [[-1.0] * 3] * 2


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


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize(("emitted", "moved"), [("ab", -11.0), ("a", -1.0), ("b", -10.0)])
def test_a_tied_parameter_gets_what_is_emitted(stage, find_unused, emitted, moved):
    """Under whichever of its names, out of memory that the function uses again."""

    def function(params, batch, emit):
        scratch = np.empty(())
        for name in emitted:
            scratch[...] = {"a": 1.0, "b": 10.0}[name]
            emit(name, scratch)
        scratch[...] = 99.0
        return 0.0

    def body(comm):
        tied = np.zeros(())
        trainer = Trainer(
            function, SGD(lr=1.0), comm, params={"a": tied, "b": tied}, sharding=stage,
            find_unused=find_unused,
        )  # fmt: skip
        trainer.step(np.zeros(1))
        return float(trainer.parameters()["a"])

    assert cc.run_threads(2, body, timeout=20) == [moved] * 2


@pytest.mark.parametrize(
    ("emitted", "words"),
    [
        ({"a": (3,), "b": (1,)}, r"gradient of 'b' has shape \(1,\), that of what it is tied with"),
        ([("a", 3), ("a", 3)], "gradient of 'a' was emitted twice"),
        ([("a", 3), ("b", 3), ("b", 3)], "gradient of 'b' was emitted twice"),
    ],
)
def test_wrong_gradients_of_a_tied_parameter(emitted, words):
    def function(params, batch, emit):
        for name, shape in emitted.items() if isinstance(emitted, dict) else emitted:
            emit(name, np.ones(shape))
        return 0.0

    def body(comm):
        tied = np.zeros(3)
        trainer = Trainer(function, SGD(lr=1.0), comm, params={"a": tied, "b": tied})
        with pytest.raises((ValueError, cc.ArrayError), match=words):
            trainer.step(np.zeros(1))
        assert not trainer.parameters()["a"].any()

    cc.run_threads(1, body, timeout=20)


def test_a_frozen_parameter_of_two_names():
    def function(params, batch, emit):
        for name in "wab":
            emit(name, np.ones(3))
        return 0.0

    def body(comm):
        tied = np.zeros(3)
        trainer = Trainer(
            function, SGD(lr=1.0), comm, params={"a": tied, "b": tied, "w": np.zeros(3)},
            frozen=["a", "b"],
        )  # fmt: skip
        trainer.step(np.zeros(1))
        return trainer.parameters()["w"].tolist()

    assert cc.run_threads(1, body, timeout=20) == [[-1.0] * 3]


def test_one_frozen_parameter_need_be_in_no_list():
    """Its letters are not taken for names."""

    def body(comm):
        params = {name: np.zeros(3) for name in ("a", "b", "ab")}
        return Trainer(linear, SGD(lr=1.0), comm, params=params, frozen="ab").names

    assert cc.run_threads(1, body, timeout=20) == [["a", "b"]]


@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 2])
def test_no_gradient_is_none_in_words(stage, precision):
    """Not the one of the step before."""
    emitted = [1, 1]  # by rank

    def function(params, batch, emit):
        rank = int(batch[0])
        emitted[rank] += 1
        emit("w", None if emitted[rank] == 3 else params["w"] * 0 + 1)
        return 0.0

    def body(comm):
        trainer = Trainer(
            function, SGD(lr=1.0), comm, params={"w": np.zeros(2, np.float32)}, sharding=stage,
            precision=precision,
        )  # fmt: skip
        batch = np.full(1, comm.rank)
        trainer.step(batch)
        before = models.bits(trainer.parameters())
        with pytest.raises(ValueError, match=r"emit\('w', None\) is no gradient"):
            trainer.step(batch)
        assert models.bits(trainer.parameters()) == before
        trainer.step(batch)

    cc.run_threads(2, body, timeout=20)


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


def test_jax_gets_copies_of_parameters_on_a_gpu_that_are_there():
    """The trainer writes its parameters on a stream that jax knows nothing of."""
    said = []

    def array(x, *, copy):
        said.append((x, copy))
        return SimpleNamespace(block_until_ready=lambda: "a copy that is there")

    there = SimpleNamespace(device=SimpleNamespace(id=1))
    model = FunctionModel(lambda *_: 0.0, {"w": np.ones(2), "fixed": np.ones(2)}, ["fixed"])
    model.frozen["fixed"] = there
    model._jax = SimpleNamespace(
        numpy=SimpleNamespace(from_dlpack=lambda x: ("the same memory", x), array=array)
    )
    assert model.array("fixed") == "a copy that is there"
    assert said == [(("the same memory", there), True)]


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
    for wrong in ({"scale": 0.0}, {"scale": -8.0}, {"scale": math.inf}, {"least": 0.0}):
        with pytest.raises(ValueError, match=r"LossScale: \w+=.* must be a finite number above 0"):
            LossScale(**wrong)


def test_an_overflow_begins_the_count_of_good_steps_anew():
    """The scale doubles after `interval` good steps in a row."""
    scale = LossScale(scale=8.0, interval=3)
    for overflow in (False, False, True, False, False):
        scale.update(overflow)
    assert (scale.scale, scale.good) == (4.0, 2)
    scale.update(False)
    assert (scale.scale, scale.good) == (8.0, 0)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("count", [3, 700])
def test_gradients_whose_squares_are_beyond_float32(stage, count):
    """They are finite, and their norm too."""

    def function(params, batch, emit):
        emit("w", np.full(count, 1e20, np.float32))
        return 0.0

    def body(comm):
        params = {"w": np.zeros(count, np.float32)}
        trainer = Trainer(function, SGD(lr=1.0), comm, params=params, sharding=stage, clip_norm=1.0)
        norm = trainer.step(np.zeros((1, 1))).grad_norm
        return norm, float(np.linalg.norm(trainer.parameters()["w"]))

    for norm, moved in cc.run_threads(2, body, timeout=20):
        assert norm == pytest.approx(1e20 * count**0.5, rel=1e-6)
        assert moved == pytest.approx(1.0, rel=1e-6)
