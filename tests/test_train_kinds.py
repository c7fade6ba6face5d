"""Parameters of several dtypes beside each other, and those that the trainer refuses."""

from __future__ import annotations

import models
import numpy as np
import pytest
from training import MODES, NODES

import collectives as cc
from collectives.train import SGD, AdamW, Trainer

ml_dtypes = pytest.importorskip("ml_dtypes")


def mixed():
    random = np.random.default_rng(0)
    kinds = {"a": np.float32, "b": ml_dtypes.bfloat16, "c": np.float64, "d": ml_dtypes.bfloat16}
    return {name: random.normal(size=700).astype(kind) for name, kind in kinds.items()}


def decay(params, batch, emit):
    for name in reversed(list(params)):
        w = params[name]
        emit(name, (w * np.asarray(batch[0], w.dtype)).astype(w.dtype))
    return float(batch[0])


@pytest.mark.parametrize("reduced", [None, "float32", "float64"])
@pytest.mark.parametrize("master_weights", [True, False])
def test_dtypes_stay_what_they_are(reduced, master_weights):
    """Also where gradients of several are reduced in one dtype; the same bits in all stages."""

    def body(comm, mode):
        trainer = Trainer(
            decay, AdamW(lr=0.1), comm, params=mixed(), sharding=mode[0], shard_group=mode[1],
            reduce_dtype=reduced, master_weights=master_weights,
        )  # fmt: skip
        for step in range(3):
            trainer.step(np.full(2, 1 + step + comm.rank, np.float32))
        with trainer.gathered() as params:
            used = {name: str(params[name].dtype) for name in params}
        kept = trainer.parameters()
        return used, {name: str(x.dtype) for name, x in kept.items()}, models.bits(kept)

    found = [cc.run_threads(3, body, m, nodes=NODES[3], timeout=20)[0] for m in MODES]
    dtypes = {name: str(x.dtype) for name, x in mixed().items()}
    narrow = "float32" if master_weights else "bfloat16"
    for used, kept, bits in found:
        assert used == dtypes
        assert kept == dtypes | {"b": narrow, "d": narrow}
        assert bits == found[0][2]


@pytest.mark.torch
def test_dtypes_of_a_module_stay_what_they_are():
    torch = pytest.importorskip("torch")

    def body(comm, stage):
        net = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8).bfloat16())

        def loss(net, x):
            return net[1](net[0](x).bfloat16()).float().square().mean()

        trainer = Trainer(net, SGD(lr=0.1), comm, loss=loss, sharding=stage, reduce_dtype="float32")
        trainer.step(torch.ones(4, 8))
        with trainer.gathered() as whole:
            return [p.dtype for p in whole.parameters()]

    for stage in range(4):
        wanted = [torch.float32] * 2 + [torch.bfloat16] * 2
        assert cc.run_threads(2, body, stage, timeout=20) == [wanted] * 2


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2", "bfloat16", "float16"])
def test_parameters_of_few_bits_have_masters(kind):
    """AdamW moves them by 0.01 in a step, which is lost in a parameter of 8 bits."""
    dtype = np.dtype(getattr(ml_dtypes, kind, kind))

    def function(params, batch, emit):
        assert params["w"].dtype == dtype
        emit("w", np.ones(4, dtype))
        return 0.0

    def body(comm, stage):
        params = {"w": np.ones(4, dtype)}
        optimizer = AdamW(lr=0.01, weight_decay=0.0)
        trainer = Trainer(function, optimizer, comm, params=params, sharding=stage)
        for _ in range(30):
            trainer.step(np.ones(2))
        kept = trainer.parameters()["w"]
        with trainer.gathered() as seen:
            assert (seen["w"] == kept.astype(dtype)).all()
        return kept

    for stage in (0, 3):
        for kept in cc.run_threads(2, body, stage, timeout=20):
            assert kept.dtype == np.float32
            assert np.allclose(kept, 0.7, atol=1e-4)


def test_parameters_of_8_bits_need_masters():
    def body(comm):
        params = {"w": np.ones(4, ml_dtypes.float8_e4m3fn)}
        Trainer(decay, SGD(lr=0.1), comm, params=params, master_weights=False)

    with pytest.raises(ValueError, match="keeps parameters in float8_e4m3"):
        cc.run_threads(1, body, timeout=20)


def test_frozen_integers_stay_integers():
    """300 is none of bfloat16."""

    def function(params, batch, emit):
        assert params["table"].dtype == np.int64 and params["mask"].dtype == np.bool_
        assert params["table"][257] == 257
        emit("w", np.ones_like(params["w"]))
        return 0.0

    def body(comm):
        params = {
            "w": np.zeros(3, np.float32), "table": np.arange(300), "mask": np.ones(3, np.bool_)
        }  # fmt: skip
        trainer = Trainer(
            function, SGD(lr=0.1), comm, params=params, frozen=["table", "mask"], precision="bf16"
        )
        trainer.step(np.zeros(1))

    cc.run_threads(1, body, timeout=20)


@pytest.mark.torch
def test_frozen_integers_of_a_module_stay_integers():
    torch = pytest.importorskip("torch")

    def body(comm):
        net = torch.nn.Linear(2, 2)
        net.table = torch.nn.Parameter(torch.arange(300), requires_grad=False)
        Trainer(net, SGD(lr=0.1), comm, loss=lambda net, x: net(x).mean(), precision="bf16")
        return net.table.dtype, int(net.table[257])

    assert cc.run_threads(1, body, timeout=20) == [(torch.int64, 257)]


@pytest.mark.torch
@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("frozen", [True, False])
def test_parameters_of_a_module_in_a_dtype_that_numpy_lacks(name, frozen):
    torch = pytest.importorskip("torch")
    kind = getattr(torch, name)

    class Narrow(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.narrow = torch.nn.Parameter(torch.full((4,), 2.0).to(kind), not frozen)
            self.wide = torch.nn.Parameter(torch.ones(4))

        def forward(self, x):
            return x * self.narrow.float() * self.wide

    def body(comm, stage):
        net = Narrow()
        trainer = Trainer(
            net, SGD(lr=0.25), comm, loss=lambda net, x: net(x).sum(), sharding=stage
        )  # fmt: skip
        trainer.step(torch.ones(1, 4))
        assert net.narrow.dtype is kind
        with trainer.gathered():
            return net.narrow.float().tolist(), net.wide.tolist()

    for stage in range(4):
        found = cc.run_threads(2, body, stage, timeout=20)
        assert found == [([2.0 if frozen else 1.75] * 4, [0.5] * 4)] * 2


@pytest.mark.parametrize("kind", ["int32", "bool", "complex64"])
def test_what_is_no_real_float_is_refused(kind):
    def body(comm):
        params = {"w": np.zeros(3, np.float32), "odd": np.zeros(3, kind)}
        Trainer(decay, SGD(lr=0.1), comm, params=params)

    with pytest.raises(cc.ArrayTypeError, match=f"parameter 'odd' is {kind}"):
        cc.run_threads(1, body, timeout=20)


@pytest.mark.torch
def test_a_complex_parameter_of_a_module_is_refused():
    torch = pytest.importorskip("torch")

    def body(comm):
        net = torch.nn.Linear(2, 2, dtype=torch.complex64)
        Trainer(net, SGD(lr=0.1), comm, loss=lambda net, x: net(x).abs().mean())

    with pytest.raises(cc.ArrayTypeError, match="parameter 'weight' is complex64"):
        cc.run_threads(1, body, timeout=20)
