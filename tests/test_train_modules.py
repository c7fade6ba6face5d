"""Modules of torch: who has them, what is left of them, and what of them ZeRO-3 cannot gather."""

from __future__ import annotations

import models
import numpy as np
import pytest
from worlds import outcomes

import collectives as cc
from collectives.train import SGD, AdamW, Trainer

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

BATCH = torch.from_numpy(np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32))


def square(net, batch):
    return net(batch).square().mean()


def net_of(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Linear(9, 3))


@pytest.mark.parametrize("stage", range(4))
def test_a_module_that_is_released_is_whole_and_can_be_trained_on(stage):
    def body(comm):
        net = net_of()
        first = Trainer(net, AdamW(lr=0.1), comm, loss=square, sharding=stage)
        first.step(BATCH)
        wanted = first.parameters()
        first.release()
        for name, p in net.named_parameters():
            assert np.array_equal(p.detach().numpy(), wanted[name])
        second = Trainer(net, AdamW(lr=0.1), comm, loss=square, sharding=3 - stage)
        assert second.step(BATCH).loss > 0

    cc.run_threads(2, body, timeout=20)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_module_of_another_trainer_is_refused(stage):
    """Also a part of it; not if that trainer was never finished, or is gone or closed."""

    def body(comm):
        net = net_of()
        with pytest.raises(ValueError, match="no parameter is like"):
            groups = [{"params": ["x"], "lr": 1.0}]
            Trainer(net, SGD(lr=0.1), comm, loss=square, sharding=stage, groups=groups)
        first = Trainer(net, SGD(lr=0.1), comm, loss=square, sharding=stage)
        for part, name in ((net, "0.weight"), (net[1], "weight")):
            with pytest.raises(cc.CollectiveError, match=f"'{name}' belongs to another trainer"):
                Trainer(part, SGD(lr=0.1), comm, loss=square, sharding=stage)
        first.step(BATCH)
        first.close()
        if stage:
            with pytest.raises(cc.CollectiveError, match=r"'0.weight' is empty.*release\(\)"):
                Trainer(net, SGD(lr=0.1), comm, loss=square)
            return
        second = Trainer(net, SGD(lr=0.1), comm, loss=square)
        second.step(BATCH)
        del second
        Trainer(net, SGD(lr=0.1), comm, loss=square).step(BATCH)

    cc.run_threads(1, body, timeout=20)


@pytest.mark.parametrize("again", ["close", "release"])
@pytest.mark.parametrize("stage", range(3))
def test_a_trainer_that_is_ended_twice_takes_nothing_from_the_next(stage, again):
    def body(comm):
        net = net_of()
        first = Trainer(net, SGD(lr=0.1), comm, loss=square, sharding=stage)
        first.release()
        second = Trainer(net, SGD(lr=0.1), comm, loss=square, sharding=stage)
        getattr(first, again)()
        assert second.step(BATCH).loss > second.step(BATCH).loss
        with pytest.raises(cc.CollectiveError, match="belongs to another trainer"):
            Trainer(net, SGD(lr=0.1), comm, loss=square)

    cc.run_threads(2, body, timeout=20)


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        self.layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.layer(self.mix(x, x, x)[0])


@pytest.mark.parametrize("bucket_bytes", [1, 700, 1 << 20])
def test_attention_of_torch_wherever_buckets_end(bucket_bytes):
    """It uses the parameters of a module inside of it that it never calls."""
    torch.manual_seed(0)
    state = Attention().state_dict()
    x = torch.randn(4, 5, 8)

    def body(comm, stage):
        net = Attention()
        net.load_state_dict(state)
        trainer = Trainer(
            net, AdamW(lr=0.01), comm, loss=square, sharding=stage,
            bucket_bytes=bucket_bytes, first_bucket_bytes=bucket_bytes,
        )  # fmt: skip
        told = [trainer.step(x[comm.rank :: comm.size]).loss for _ in range(3)]
        return told, models.bits(trainer.parameters())

    found = [cc.run_threads(2, body, stage, timeout=20)[0] for stage in (0, 3)]
    assert found[0] == found[1]


class Borrows(torch.nn.Module):
    """Uses a parameter of a module that it does not call: as an attribute, or handed on."""

    def __init__(self, how):
        super().__init__()
        self.first, self.other = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        self.how = how

    def forward(self, x):
        x = self.first(x)
        if self.how == "attribute":
            return torch.nn.functional.linear(x, self.other.weight) + self.other.bias
        return self.handed(x, self.other.weight)

    def handed(self, x, weight):
        return x @ weight


@pytest.mark.parametrize("how", ["attribute", "handed on"])
def test_a_parameter_that_is_not_gathered_is_named(how):
    def body(comm):
        trainer = Trainer(
            Borrows(how), SGD(lr=0.1), comm, loss=square, sharding=3, find_unused=True,
            bucket_bytes=1, first_bucket_bytes=1,
        )  # fmt: skip
        trainer.step(BATCH)

    for error in outcomes(2, body):
        assert isinstance(error, cc.CollectiveError)
        assert "'other.weight'" in str(error) and "outside of the forward" in str(error)
        assert "first" not in str(error)


def test_other_errors_of_a_module_stay_what_they_are():
    def body(comm):
        trainer = Trainer(net_of(), SGD(lr=0.1), comm, loss=square, sharding=3)
        trainer.step(torch.ones(4, 5))

    for error in outcomes(2, body):
        assert type(error) is RuntimeError and "shape" in str(error)


@pytest.mark.parametrize("loss", [None, 0.5, (torch.ones(()),)], ids=repr)
def test_a_loss_that_is_no_tensor_is_named(loss):
    def body(comm):
        trainer = Trainer(net_of(), SGD(lr=0.1), comm, loss=lambda net, batch: loss)
        with pytest.raises(TypeError, match=f"loss= returned a {type(loss).__name__}; return the"):
            trainer.step(BATCH)

    cc.run_threads(2, body, timeout=20)


def test_weights_of_micro_batches_are_not_rounded_in_float64():
    """A third of the global batch is none of float32."""

    def body(comm):
        batch = BATCH[:3].double()
        net, alone = net_of().double(), net_of().double()
        Trainer(net, SGD(lr=1.0), comm, loss=square, accumulate=3).step(batch)
        square(alone, batch).backward()
        for ours, theirs in zip(net.parameters(), alone.parameters(), strict=True):
            wanted = (theirs - theirs.grad).detach()
            torch.testing.assert_close(ours.detach(), wanted, rtol=1e-14, atol=1e-14)

    cc.run_threads(1, body, timeout=20)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_batch_normalisation_keeps_its_dtype(precision, stage):
    """Beside an input of 16 bits torch wants parameters like the running statistics."""

    def body(comm):
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            torch.nn.Linear(6, 9), torch.nn.BatchNorm1d(9),
            torch.nn.BatchNorm1d(9).requires_grad_(False), torch.nn.Linear(9, 3),
        )  # fmt: skip
        trainer = Trainer(
            net, AdamW(lr=0.01), comm, loss=square, sharding=stage, precision=precision
        )
        losses = [trainer.step(BATCH).loss for _ in range(5)]
        with trainer.gathered() as whole:
            dtypes = {p.dtype for part in whole[1:3] for p in part.parameters()}
            dtypes |= {whole[1].running_mean.dtype}
            assert whole[0].weight.dtype != torch.float32
            assert whole[1].running_mean.any()
        assert dtypes == {torch.float32}
        return losses, models.bits(trainer.parameters())

    found = cc.run_threads(2, body, timeout=20)
    assert found[0] == found[1]
    assert found[0][0][-1] < found[0][0][0]


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("where", ["forward", "loss", "backward"])
def test_a_module_that_raises_leaves_nothing_for_the_next_step(stage, where):
    """In the first of two micro-batches, on all ranks, before and after the first step."""

    class Fault(Exception):
        pass

    state = net_of().state_dict()  # made here: ranks that are threads share torch's generator

    def body(comm, faults):
        net = net_of()
        net.load_state_dict(state)
        fails = [False]

        def fault(*_):
            if fails[0]:
                raise Fault

        def loss(net, batch):
            value = square(net, batch)
            if where == "loss":
                fault()
            return value

        if where == "forward":
            net[1].register_forward_pre_hook(fault)
        if where == "backward":
            net[1].register_full_backward_hook(fault)
        trainer = Trainer(
            net, AdamW(lr=0.1), comm, loss=loss, sharding=stage, accumulate=2,
            bucket_bytes=1, first_bucket_bytes=1,
        )  # fmt: skip
        done = []
        for step in range(3):
            if step in faults:
                fails[0] = True
                with pytest.raises(Fault):
                    trainer.step(BATCH)
                fails[0] = False
            done.append(trainer.step(BATCH * (comm.rank + 1)))
        return [(m.loss, m.grad_norm) for m in done], models.bits(trainer.parameters())

    wanted = cc.run_threads(2, body, (), timeout=20)
    assert cc.run_threads(2, body, (0, 2), timeout=20) == wanted
