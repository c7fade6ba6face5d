"""Parameters of 16 bits with and without master weights: what is kept, and with which bits."""

from __future__ import annotations

import models
import numpy as np
import pytest
from optimizers import OPTIMIZERS
from training import MODES, NODES, batches, make, same_in_all_modes

import collectives as cc
from collectives.array import numpy_dtype
from collectives.train import LAMB, LARS, SGD, Adam, AdamW, LossScale, Trainer
from collectives.train.norms import sums_of_squares, whole

COUNT = 70_001  # more than the host steps at a time
MOMENTUM = SGD(lr=0.1, momentum=0.9)
PURE = {"master_weights": False}


def by_hand(optimizer, w, grads):
    """What all steps come to: everything in float32, and rounded once in each."""
    low = w.dtype
    kept = {name: np.zeros_like(w) for name in optimizer.kept}
    for step, g in enumerate(grads, 1):
        x, wide = g.astype(np.float32), w.astype(np.float32)
        state = {name: s.astype(np.float32) for name, s in kept.items()}
        work = np.empty_like(x)
        if optimizer.layerwise:
            optimizer.direction(wide, x, state, step, work)
            norms = np.sqrt(sums_of_squares([whole(wide, 0), whole(x, 1)], 2, None))
            optimizer.apply(wide, x, state, optimizer.lr * optimizer.trust(*map(float, norms)))
        else:
            optimizer.update(wide, x, state, optimizer.lr, step, work)
        w, kept = wide.astype(low), {name: s.astype(low) for name, s in state.items()}
    return {"master": w} | kept


def may_do_without(optimizer, dtype):
    return dtype != "float16" or "second" not in optimizer.kept


CASES = [
    (optimizer, dtype, reduced)
    for optimizer in OPTIMIZERS
    for dtype, reduced in (("bfloat16", None), ("bfloat16", "float32"), ("float16", None))
    if may_do_without(optimizer, dtype)
]


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(("optimizer", "dtype", "reduced"), CASES, ids=str)
def test_a_step_rounds_once(optimizer, dtype, reduced, stage):
    random = np.random.default_rng(3)
    w = random.normal(size=COUNT).astype(numpy_dtype(dtype))
    # Two ranks give the same: their mean is exact.
    grads = [random.normal(size=COUNT).astype(numpy_dtype(dtype)) for _ in range(3)]

    def body(comm):
        steps = iter(grads)

        def function(params, batch, emit):
            assert params["w"].dtype == w.dtype
            emit("w", next(steps))
            return 0.0

        trainer = make(
            comm, (stage, None), optimizer=optimizer, function=function, params={"w": w},
            reduce_dtype=reduced, **PURE,
        )  # fmt: skip
        for _ in grads:
            trainer.step(np.zeros((1, 1)))
        return {key: trainer.whole(key)["w"] for key in ("master", *optimizer.kept)}

    wanted = by_hand(optimizer, w, grads)
    for found in cc.run_threads(2, body, timeout=60):
        for key, x in wanted.items():
            assert found[key].dtype == w.dtype
            assert found[key].tobytes() == x.tobytes(), key


@pytest.mark.parametrize(
    ("precision", "optimizer"),
    [
        *(("bf16", optimizer) for optimizer in OPTIMIZERS),
        ("fp16", MOMENTUM),
        ("fp16", LARS(lr=1.0, weight_decay=0.01, coefficient=0.02)),
    ],
    ids=str,
)
def test_stages_are_equal_bit_for_bit(precision, optimizer):
    """With accumulation and clipping; it is not the training with masters, and it learns."""
    more = {"precision": precision, "optimizer": optimizer, "accumulate": 2, "clip_norm": 0.3}
    if precision == "fp16":
        more["loss_scale"] = LossScale(scale=2.0**24, interval=10)
    told, found = same_in_all_modes(3, 20, [*MODES, (2, "node")], **more, **PURE)
    assert told[-1][0] < told[0][0]
    assert any(skipped for _, _, skipped in told) == (precision == "fp16")
    assert len(found["w1"]) == 2 * 11 * 60
    assert len(same_in_all_modes(3, 1, [(0, None)], **more)[1]["w1"]) == 4 * 11 * 60


def test_what_comes_in_as_bfloat16_is_the_same_as_what_is_made_so():
    low = models.parameters(numpy_dtype("bfloat16"))
    came = same_in_all_modes(2, 10, params=low, clip_norm=0.3, **PURE)
    assert came == same_in_all_modes(2, 10, precision="bf16", clip_norm=0.3, **PURE)


def test_each_micro_batch_and_offloading():
    more = {"precision": "bf16", "accumulate": 3, "clip_norm": 0.05, **PURE}
    same_in_all_modes(2, 10, reduce_every="micro-batch", **more)
    plain = same_in_all_modes(2, 3, **more)
    assert same_in_all_modes(2, 3, offload="host", **more) == plain


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_wider_parameters_have_no_masters_in_any_case(dtype):
    params = models.parameters(dtype)
    assert same_in_all_modes(2, 3, params=params, **PURE) == same_in_all_modes(2, 3, params=params)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_frozen_and_unused_parameters_stay(stage):
    def function(params, batch, emit):
        assert params["fixed"].dtype == params["a"].dtype
        emit("a", np.ones(700, params["a"].dtype))
        return 0.0

    def body(comm):
        params = {n: np.ones(700, numpy_dtype("bfloat16")) for n in ("a", "b", "fixed")}
        trainer = make(
            comm, (stage, None), optimizer=AdamW(lr=0.5, weight_decay=0.1), function=function,
            params=params, frozen=["fixed"], find_unused=True, **PURE,
        )  # fmt: skip
        trainer.step(np.zeros((1, 1)))
        found = trainer.parameters()
        return sorted(found), float(found["a"][-1]), float(found["b"][-1])

    # 1 - 0.5 - 0.05, as bfloat16 has it.
    wanted = (["a", "b"], float(np.float32(0.45).astype(numpy_dtype("bfloat16"))), 1.0)
    assert cc.run_threads(2, body, timeout=20) == [wanted] * 2


@pytest.mark.parametrize("masters", [True, False])
@pytest.mark.parametrize("given", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_memory_of_a_rank(stage, given, masters):
    """bfloat16 with Adam: 2 bytes of parameters, 2 of gradients, 4 of state; 12 with masters."""

    def body(comm):
        params = {f"w{i}": np.zeros((64, 512), numpy_dtype(given)) for i in range(8)}
        more = {"bucket_bytes": 1 << 18, "precision": "bf16", "master_weights": masters}
        return make(comm, (stage, None), params=params, **more).nbytes()

    count = 8 * 64 * 512
    for sizes in cc.run_threads(4, body, timeout=20):
        part = [1 if stage < 3 else 4, 1 if stage < 2 else 4, 1 if stage < 1 else 4]
        assert sizes == {
            "parameters": 2 * count // part[0],
            "gradients": 2 * count // part[1],
            "state": (12 if masters else 4) * count // part[2],
        }


@pytest.mark.parametrize("more", [{"precision": "fp16"}, {"params": models.parameters("float16")}])
@pytest.mark.parametrize("optimizer", [Adam(lr=0.1), AdamW(lr=0.1), LAMB(lr=0.1)], ids=str)
def test_second_moments_of_float16_are_refused(optimizer, more):
    with pytest.raises(ValueError, match="second moments in float16"):
        cc.run_threads(2, lambda comm: make(comm, optimizer=optimizer, **more, **PURE))
    cc.run_threads(2, lambda comm: make(comm, optimizer=optimizer, **more))


# ---- checkpoints --------------------------------------------------------------------------------


def trained(comm, mode, steps, path=None, **more):
    """A trainer that has gone on from `path`, if there is one, for some steps."""
    trainer = make(comm, mode, **more)
    if path is not None:
        trainer.load(path)
    for batch in list(batches(trainer.steps + steps))[trainer.steps :]:
        trainer.step(models.part_of(batch, comm.rank, comm.size))
    return trainer


def bits(trainer):
    return [models.bits(trainer.whole(key)) for key in ("master", *trainer.slots)]


@pytest.mark.parametrize(
    ("mode", "more"),
    [
        ((0, None), {"precision": "bf16"}),
        ((2, None), {"params": models.parameters(numpy_dtype("bfloat16"))}),
        ((3, "node"), {"precision": "fp16", "optimizer": MOMENTUM}),
    ],
    ids=["made", "came", "fp16"],
)
def test_a_resumed_run_equals_an_unbroken_one(mode, more, tmp_path):
    """Bit for bit, and in another stage on other ranks what was saved."""
    pytest.importorskip("safetensors")
    more = more | PURE

    def unbroken(comm):
        trainer = trained(comm, mode, 4, **more)
        trainer.save(tmp_path)
        saved = bits(trainer)
        for batch in list(batches(8))[4:]:
            trainer.step(models.part_of(batch, comm.rank, comm.size))
        return saved, bits(trainer)

    saved, wanted = cc.run_threads(3, unbroken, nodes=NODES[3], timeout=60)[0]
    resumed = cc.run_threads(
        3, lambda comm: bits(trained(comm, mode, 4, tmp_path, **more)), nodes=NODES[3], timeout=60
    )
    assert resumed == [wanted] * 3
    moved = cc.run_threads(2, lambda comm: bits(trained(comm, (1, None), 0, tmp_path, **more)))
    assert moved == [saved] * 2


def test_masters_are_not_rounded_in_silence(tmp_path):
    """Nor is state; what has none is taken by a trainer with masters, without another value."""
    pytest.importorskip("safetensors")

    def save(comm):
        trained(comm, (2, None), 3, precision="bf16").save(tmp_path / "with")
        low = trained(comm, (2, None), 3, precision="bf16", **PURE)
        low.save(tmp_path / "without")
        return [low.whole(key) for key in ("master", *low.slots)]

    def load(comm):
        low = trained(comm, (1, None), 1, precision="bf16", **PURE)
        before = bits(low)
        with pytest.raises(cc.CollectiveError, match="is float32 in the checkpoint") as told:
            low.load(tmp_path / "with")
        assert "would be rounded to bfloat16 here" in str(told.value)
        assert "master_weights=True" in str(told.value)
        assert bits(low) == before
        trained(comm, (3, None), 1, tmp_path / "with", precision="bf16")
        high = trained(comm, (3, None), 0, tmp_path / "without", precision="bf16")
        found = [high.whole(key) for key in ("master", *high.slots)]
        high.step(models.part_of(next(batches(1)), comm.rank, comm.size))
        return found

    wanted = cc.run_threads(2, save, timeout=60)[0]
    for found in cc.run_threads(3, load, timeout=60):
        for mine, theirs in zip(found, wanted, strict=True):
            for name, x in mine.items():
                assert x.dtype == np.float32
                assert (x == theirs[name].astype(np.float32)).all(), name


@pytest.mark.parametrize("names", ["ab", "ba"])
def test_one_bucket_of_what_was_kept_in_two_dtypes(names, tmp_path):
    """Written in bfloat16 and in float32, and used in one dtype by who loads it."""
    pytest.importorskip("safetensors")
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    given = {name: np.linspace(0.1, 0.7, 9).astype(np.float32) for name in names}
    given["a"] = given["a"].astype(bfloat16)

    def body(comm):
        optimizer = SGD(lr=0.1, momentum=0.9)
        old = Trainer(function, optimizer, comm, params=given, master_weights=False)
        old.step(np.ones(1))
        old.save(tmp_path)
        new = Trainer(function, optimizer, comm, params=given, precision="bf16")
        new.load(tmp_path)
        for key in ("master", "velocity"):
            there, here = old.whole(key), new.whole(key)
            assert all((here[n] == there[n].astype(np.float32)).all() for n in names), key

    def function(params, batch, emit):
        for name in reversed(names):
            emit(name, params[name])
        return 0.0

    cc.run_threads(2, body, timeout=20)


# ---- torch --------------------------------------------------------------------------------------


@pytest.mark.torch
def test_modules_of_torch_and_its_optimizers():
    """A module in bfloat16: ours is the same in all stages; torch's SGD is given parameters and
    clipped gradients, rounded once, and steps as it does alone.
    """
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    state = torch.nn.Linear(30, 40).to(torch.bfloat16).state_dict()
    batch = torch.randn(8, 30).to(torch.bfloat16)

    def module():
        made = torch.nn.Linear(30, 40).to(torch.bfloat16)
        made.load_state_dict(state)
        return made

    def loss(net, x):
        return net(x).float().square().mean()

    def theirs(net):
        return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def body(comm, ours, stage, masters):
        net = module()
        optimizer = AdamW(lr=1e-2) if ours else theirs(net)
        trainer = Trainer(
            net, optimizer, comm, loss=loss, sharding=stage, master_weights=masters,
            clip_norm=0.02, bucket_bytes=1000, first_bucket_bytes=1000,
        )  # fmt: skip
        norms = [trainer.step(batch).grad_norm for _ in range(5)]
        return trainer.nbytes(), trainer.parameters(), norms

    def run(*how):
        return cc.run_threads(2, body, *how, timeout=60)[0]

    found = [models.bits(run(True, stage, False)[1]) for stage in range(4)]
    assert all(f == found[0] for f in found)
    sizes, parameters, norms = run(False, 0, False)
    assert sizes["state"] == 0  # but what torch keeps
    net = module()
    optimizer = theirs(net)
    for norm in norms:
        assert norm > 0.02
        optimizer.zero_grad()
        loss(net, batch).backward()
        for p in net.parameters():
            p.grad = (p.grad.float() * (0.02 / norm)).to(torch.bfloat16)
        optimizer.step()
    for name, x in parameters.items():
        assert (x.astype(np.float32) == net.get_parameter(name).detach().float().numpy()).all()
    sizes, parameters, _ = run(False, 0, True)
    assert sizes["state"] == 4 * 31 * 40
    assert all(x.dtype == np.float32 for x in parameters.values())
