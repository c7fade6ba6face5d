"""The optimizers: one result in all stages, and the formulas of torch and of the papers."""

from __future__ import annotations

import models
import numpy as np
import pytest
from optimizers import ELEMENTWISE
from training import MODES, NODES, batches, make, same_in_all_modes

import collectives as cc
from collectives.train import LAMB, LARS, SGD, Adam, AdamW, Trainer

# That need norms of whole parameters; LARS with a coefficient with which it learns in few steps.
LAYERWISE = [LARS(lr=1.0, weight_decay=0.01, coefficient=0.02), LAMB(lr=0.02)]


@pytest.mark.parametrize("optimizer", [*ELEMENTWISE, *LAYERWISE], ids=str)
def test_optimizers_are_equal_in_all_stages(optimizer):
    told, _ = same_in_all_modes(3, 15, optimizer=optimizer, clip_norm=0.3)
    assert told[-1][0] < told[0][0]


@pytest.mark.torch
@pytest.mark.parametrize("optimizer", ELEMENTWISE, ids=str)
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
@pytest.mark.parametrize("optimizer", [*ELEMENTWISE[3:], Adam(lr=0.1), AdamW(1e-3, 0.0)], ids=str)
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
@pytest.mark.parametrize("optimizer", LAYERWISE, ids=str)
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


@pytest.mark.parametrize("optimizer", LAYERWISE, ids=str)
def test_parameters_that_begin_at_zero_are_stepped(optimizer):
    """Their norm gives no ratio, so it is 1; so it is for gradients that are zero."""

    def body(comm):
        def function(params, batch, emit):
            emit("zero", np.ones(3))
            emit("still", np.zeros(3))
            return 0.0

        params = {"zero": np.zeros(3), "still": np.ones(3)}
        trainer = Trainer(function, optimizer, comm, params=params)
        trainer.step(np.ones(2))
        return trainer.parameters()

    (found,) = cc.run_threads(1, body)
    assert found["zero"] == pytest.approx(-optimizer.lr)
    assert np.isfinite(found["still"]).all()


@pytest.mark.parametrize("optimizer", [AdamW(lr=0.01), LAMB(lr=0.01)], ids=str)
def test_steps_are_counted_for_each_parameter(optimizer, tmp_path):
    """One that is used from the 21st step on is stepped then as "early" was in the first: its bias
    corrections begin there. The same in all stages, and after a checkpoint.
    """
    pytest.importorskip("safetensors")
    begin = np.linspace(1, 2, 700)

    def function(params, batch, emit):
        for name in ("late", "early")[int(batch[0]) < 20 :]:
            emit(name, np.cos(begin))
        return 0.0

    def body(comm, mode):
        def fresh():
            return Trainer(
                function, optimizer, comm, params={"early": begin, "late": begin.copy()},
                sharding=mode[0], shard_group=mode[1], find_unused=True,
            )  # fmt: skip

        trainer, moved = fresh(), []
        for step in range(24):
            if step == 22:
                trainer.save(tmp_path / str(mode))
                trainer = fresh()
                trainer.load(tmp_path / str(mode))
            trainer.step(np.full(2, step))
            moved.append(trainer.parameters())
        return moved

    found = [cc.run_threads(3, body, m, nodes=NODES[3], timeout=20)[0] for m in MODES]
    for moved in found:
        for step in range(4):
            assert np.array_equal(moved[20 + step]["late"], moved[step]["early"])
        assert [models.bits(x) for x in moved] == [models.bits(x) for x in found[0]]


def test_sgd_keeps_a_velocity_only_for_momentum():
    """Of any group."""

    def body(comm, **more):
        trainer = make(comm, (1, None), optimizer=SGD(lr=0.1), **more)
        trainer.step(models.part_of(next(batches(1)), comm.rank, comm.size))
        return trainer.nbytes()["state"]

    assert cc.run_threads(1, body, timeout=20) == [0]
    groups = [{"params": ["w2"], "momentum": 0.9}]
    whole = sum(x.nbytes for x in models.parameters().values())
    assert cc.run_threads(1, lambda comm: body(comm, groups=groups), timeout=20) == [whole]


def plain(w, g, lr):
    g *= 2 * lr
    w -= g


class OwnAdam(Adam):
    def update(self, w, g, state, lr, step, work):
        plain(w, g, lr)


class Heir(OwnAdam):
    pass


class Beside(AdamW):
    def fused(self, w, g, coefficient, state, lr, step):
        g = g * coefficient
        plain(w, g, lr)
        return True

    def update(self, w, g, state, lr, step, work):
        plain(w, g, lr)

    def on_gpu(self, lr, step):
        return "sgd", {"l2": 0.0, "lr": 2 * lr}


@pytest.mark.parametrize("kind", [OwnAdam, Heir, Beside])
def test_a_step_of_its_own(kind):
    """Of a subclass is what is done, in one pass too, and on GPUs, if it has that."""

    def function(params, batch, emit):
        emit("w", np.full(5, 3.0))
        return 0.0

    def body(comm):
        trainer = Trainer(function, kind(lr=0.25), comm, params={"w": np.zeros(5)})
        trainer.step(np.ones(1))
        return trainer.parameters()["w"].tolist()

    assert cc.run_threads(1, body) == [[-1.5] * 5]
    if kind is Beside:
        assert kind(lr=0.25).on_gpu(0.25, 1)[0] == "sgd"
    else:
        with pytest.raises(cc.UnsupportedError, match=rf"{kind.__name__} has .*: give it on_gpu"):
            kind(lr=0.25).on_gpu(0.25, 1)


def test_a_direction_or_its_step_of_its_own_has_no_kernel_of_another():
    class Direction(LAMB):
        def direction(self, w, g, state, step, work):
            g *= 2

    class Apply(LARS):
        def apply(self, w, g, state, lr):
            w -= g

    assert Direction(lr=0.1).on_gpu(0.1, 1) == LAMB(lr=0.1).on_gpu(0.1, 1)
    assert Apply(lr=0.1).direction_on_gpu(1) == LARS(lr=0.1).direction_on_gpu(1)
    with pytest.raises(cc.UnsupportedError, match=r"give it direction_on_gpu\(\)"):
        Direction(lr=0.1).direction_on_gpu(1)
    with pytest.raises(cc.UnsupportedError, match=r"give it on_gpu\(\)"):
        Apply(lr=0.1).on_gpu(0.1, 1)
