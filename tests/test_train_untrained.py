"""Buffers and frozen parameters: what ranks begin with, and what checkpoints keep of them."""

from __future__ import annotations

import models
import numpy as np
import pytest
from worlds import outcomes

import collectives as cc
from collectives.train import SGD, Trainer

WHOLE = np.array([1.001, 2.002, -3.003], np.float32)  # bfloat16 has none of them


@pytest.fixture(autouse=True)
def needs_safetensors():
    pytest.importorskip("safetensors")


def function(params, batch, emit):
    emit("w", params["w"] * 0)
    return 0.0


def trainer_of(comm, fixed=WHOLE, **more):
    params = {"w": np.zeros(3, np.float32), "fixed": fixed}
    return Trainer(function, SGD(lr=0.1), comm, params=params, frozen=["fixed"], **more)


def seen(trainer):
    with trainer.gathered() as params:
        return params["fixed"]


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_frozen_parameters_stay_what_they_were(precision, stage, tmp_path):
    """Through trainers that use them in 16 bits, and ranks that come and go."""

    more = {"precision": precision, "sharding": stage}

    def body(comm, loads, saves, more):
        trainer = trainer_of(comm, WHOLE if loads is None else 0 * WHOLE, **more)
        if loads is not None:
            trainer.load(tmp_path / loads)
        trainer.step(np.ones(2))
        trainer.save(tmp_path / saves)
        return seen(trainer)

    cc.run_threads(2, body, None, "0", more, timeout=20)
    for x in cc.run_threads(3, body, "0", "1", more, timeout=20):
        assert x.dtype.itemsize == 2 and np.array_equal(x, WHOLE.astype(x.dtype))
    for x in cc.run_threads(2, body, "1", "2", {}, timeout=20):
        assert x.dtype == np.float32 and np.array_equal(x, WHOLE)


def test_frozen_parameters_that_the_model_writes(tmp_path):
    """A teacher that follows, say: what was written is kept, and what was not, as it came in."""

    def body(comm):
        trainer = trainer_of(comm, precision="bf16")
        seen(trainer)[1] = 7
        trainer.save(tmp_path)
        other = trainer_of(comm, 0 * WHOLE)
        other.load(tmp_path)
        return seen(other).tolist()

    wanted = [float(WHOLE[0]), 7.0, float(WHOLE[2])]
    assert cc.run_threads(2, body, timeout=20) == [wanted] * 2


@pytest.mark.parametrize(
    ("there", "here", "words"),
    [
        (np.ones(2, np.float32), np.ones(2, np.int64), "is float32 in the checkpoint and would be"),
        (np.ones(2, np.float64), np.ones(2, np.float32), "is .* be rounded to float32 here"),
        (np.ones(2, np.int64), np.ones(2, np.int32), "is .* be rounded to int32 here"),
        (np.ones(2), np.ones((2, 1)), r"has shape \[2\] in the checkpoint, \[2, 1\] here"),
        (np.ones(2), np.ones(3), r"has shape \[2\] in the checkpoint, \[3\] here"),
        (np.ones(1), np.ones(()), r"has shape \[1\] in the checkpoint, \[\] here"),
        (np.ones(2, np.int16), np.ones(2, np.float32), None),
        (np.ones(2, np.float32), np.ones(2, np.float64), None),
    ],
)
def test_what_would_change_is_refused(there, here, words, tmp_path):
    def body(comm):
        trainer_of(comm, 3 * there).save(tmp_path)
        trainer = trainer_of(comm, here)
        trainer.load(tmp_path)
        return seen(trainer).tolist()

    for ended in outcomes(2, body):
        if words is None:
            assert ended == (3 * there).tolist()
        else:
            with pytest.raises(cc.CollectiveError, match=f"parameter 'fixed' {words}"):
                raise ended


# ---- modules ------------------------------------------------------------------------------------


def counting():
    torch = pytest.importorskip("torch")

    class Counting(torch.nn.Module):
        """Whose forward puts others in the place of its buffers."""

        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(2, 1)
            self.register_buffer("seen", torch.zeros(()))
            self.register_buffer("table", torch.zeros(1), persistent=False)

        def forward(self, x):
            self.seen = self.seen + len(x)
            self.table = torch.arange(float(self.seen))  # grows
            return self.linear(x)

    return Counting()


def square(net, batch):
    return net(batch).square().mean()


@pytest.mark.torch
@pytest.mark.parametrize("stage", [0, 3])
def test_buffers_that_forward_replaces(stage, tmp_path):
    """What the module has now is saved and set; not what torch leaves out of its state."""
    torch = pytest.importorskip("torch")

    def body(comm):
        nets = [counting() for _ in range(2)]
        trainers = [Trainer(net, SGD(lr=0.1), comm, loss=square, sharding=stage) for net in nets]
        for _ in range(3):
            trainers[0].step(torch.ones(4, 2))
        trainers[0].save(tmp_path)
        for trainer in trainers:  # into buffers that were replaced, and into the first ones
            trainer.load(tmp_path)
        told = [(float(net.seen), len(net.table)) for net in nets]
        trainers[0].step(torch.ones(4, 2))
        trainers[0].load(tmp_path)
        return told, float(nets[0].seen)

    assert cc.run_threads(2, body, timeout=20) == [([(12.0, 12), (12.0, 1)], 12.0)] * 2


@pytest.mark.torch
def test_buffers_that_are_not_contiguous(tmp_path):
    torch = pytest.importorskip("torch")

    def body(comm):
        net = torch.nn.Linear(2, 1)
        net.register_buffer("turned", (torch.arange(6.0).view(2, 3) + comm.rank).t())
        net.register_buffer("spread", torch.full((1,), 5.0 + comm.rank).expand(4))
        trainer = Trainer(net, SGD(lr=0.1), comm, loss=square)
        told = [net.turned.tolist(), net.spread.tolist()]
        trainer.save(tmp_path)
        net.turned.zero_()
        trainer.load(tmp_path)
        return told, net.turned.tolist()

    turned = [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert cc.run_threads(2, body, timeout=20) == [([turned, [5.0] * 4], turned)] * 2


@pytest.mark.torch
def test_buffers_of_many_dtypes(tmp_path):
    torch = pytest.importorskip("torch")
    kinds = (
        torch.bool, torch.int8, torch.uint8, torch.int64, torch.complex64, torch.complex128,
        torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn,
    )  # fmt: skip

    def body(comm):
        nets = [torch.nn.Linear(2, 1) for _ in range(2)]
        for at, net in enumerate(nets):
            for i, kind in enumerate(kinds):
                net.register_buffer(f"b{i}", torch.full((2, 3), 1 - at).to(kind).t())
            net.register_buffer("number", torch.tensor(5 - at))
            net.register_buffer("nothing", torch.zeros(0))
        trainers = [Trainer(net, SGD(lr=0.1), comm, loss=square) for net in nets]
        trainers[0].save(tmp_path)
        trainers[1].load(tmp_path)
        found = [getattr(nets[1], f"b{i}") for i in range(len(kinds))]
        assert tuple(x.dtype for x in found) == kinds
        return [bool((x.to(torch.complex128) == 1).all()) for x in found], int(nets[1].number)

    told = [True] * len(kinds), 5
    assert cc.run_threads(2, body, timeout=20) == [told] * 2


@pytest.mark.torch
@pytest.mark.parametrize("stage", [0, 3])
def test_frozen_parameters_of_a_module_stay_what_they_were(stage, tmp_path):
    """Also those of batch normalisation, which keep their dtype in forward."""
    torch = pytest.importorskip("torch")

    def body(comm, precision, fill):
        net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        net[0].bias.requires_grad_(False)
        net[1].weight.requires_grad_(False)
        with torch.no_grad():
            for p in (net[0].bias, net[1].weight):
                p.copy_(torch.from_numpy(WHOLE) * fill)
        trainer = Trainer(net, SGD(lr=0.1), comm, loss=square, sharding=stage, precision=precision)
        if not fill:
            trainer.load(tmp_path)
        else:
            trainer.step(torch.ones(4, 2))
            trainer.save(tmp_path)
        return [p.detach().numpy() for p in (net[0].bias, net[1].weight) if p.dtype.itemsize == 4]

    assert models.bits(dict(enumerate(cc.run_threads(2, body, "bf16", 1)[0]))) == models.bits(
        {0: WHOLE}
    )
    for kept in cc.run_threads(2, body, None, 0, timeout=20):
        assert models.bits(dict(enumerate(kept))) == models.bits({0: WHOLE, 1: WHOLE})


@pytest.mark.torch
def test_sparse_gradients_are_refused_by_name():
    torch = pytest.importorskip("torch")

    def body(comm):
        net = torch.nn.Sequential(torch.nn.Embedding(10, 4, sparse=True), torch.nn.Linear(4, 1))
        Trainer(net, SGD(lr=0.1), comm, loss=square).step(torch.arange(4))

    with pytest.raises(cc.CollectiveError, match=r"'0.weight': a tensor of layout .*sparse"):
        cc.run_threads(1, body, timeout=20)


@pytest.mark.torch
def test_sparse_buffers_are_refused_by_name(tmp_path):
    """On all ranks, also where one of them alone has such a buffer by now."""
    torch = pytest.importorskip("torch")

    def body(comm, late):
        net = torch.nn.Linear(2, 1)
        net.register_buffer("few", torch.eye(3) if late else torch.eye(3).to_sparse())
        trainer = Trainer(net, SGD(lr=0.1), comm, loss=square)
        if comm.rank == 0:
            net.few = torch.eye(3).to_sparse()
        trainer.save(tmp_path)

    for late in (False, True):
        for ended in outcomes(2, lambda comm, late=late: body(comm, late)):
            assert isinstance(ended, cc.CollectiveError)
            assert "buffer 'few': a tensor of layout torch.sparse" in str(ended)
