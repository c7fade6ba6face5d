"""Batch normalisation over the global batch, as one process computes it."""

from __future__ import annotations

import numpy as np
import pytest

import collectives as cc
from collectives.train.batch_norm import global_statistics, sync_batch_norm

# Uneven parts, and none at all.
CUTS = {1: [0, 9], 2: [0, 2, 9], 3: [0, 4, 4, 9], 4: [0, 1, 2, 6, 9]}


def parts(x, rank, n):
    return x[CUTS[n][rank] : CUTS[n][rank + 1]]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_statistics(n):
    """Of numbers that are large beside their spread; a sum of squares would lose everything."""
    x = 1e6 + np.random.default_rng(0).normal(size=(9, 3, 4))

    def body(comm):
        return global_statistics(comm, parts(x, comm.rank, n))

    found = cc.run_threads(n, body)
    for mean, var, count in found:
        assert np.allclose(mean, x.mean((0, 2)), rtol=1e-14)
        assert np.allclose(var, x.var((0, 2)), rtol=1e-8)
        assert count == 36
        assert mean.tobytes() == found[0].mean.tobytes()
        assert var.tobytes() == found[0].var.tobytes()


def test_nothing_to_normalise():
    with pytest.raises(ValueError, match="no rank has an element"):
        cc.run_threads(2, lambda comm: global_statistics(comm, np.zeros((0, 3))))


@pytest.mark.torch
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_function_as_torch_on_the_whole_batch(n, dtype):
    torch = pytest.importorskip("torch")
    random = np.random.default_rng(1)
    x, g = (random.normal(1, 2, size=(9, 3, 4)).astype(dtype) for _ in range(2))
    w, b = (random.normal(size=3).astype(dtype) for _ in range(2))
    tensors = [torch.tensor(a.astype(np.float64), requires_grad=True) for a in (x, w, b)]
    y = torch.nn.functional.batch_norm(tensors[0], None, None, *tensors[1:], training=True)
    y.backward(torch.tensor(g.astype(np.float64)))

    def body(comm):
        y, _, backward = sync_batch_norm(comm, parts(x, comm.rank, n), w, b)
        dx, dw, db = backward(parts(g, comm.rank, n))
        assert y.dtype == dx.dtype == dw.dtype == np.dtype(dtype)
        return y, dx, comm.all_reduce(dw), comm.all_reduce(db)

    found = cc.run_threads(n, body)
    tolerance = 1e-5 if dtype == "float32" else 1e-12
    y_and_dx = (np.concatenate([f[i] for f in found]) for i in (0, 1))
    got = (*y_and_dx, *found[0][2:])
    wanted = (y.detach(), *(t.grad for t in tensors))
    for ours, theirs in zip(got, wanted, strict=True):
        assert np.allclose(ours, theirs.numpy(), rtol=tolerance, atol=tolerance)


@pytest.mark.torch
@pytest.mark.parametrize(
    "how", [{}, {"affine": False}, {"momentum": None}, {"momentum": 0.3, "eps": 0.1}], ids=str
)
def test_module(how):
    """Outputs, gradients and running statistics are those of BatchNorm on the whole batch; in
    evaluation it is BatchNorm.
    """
    torch = pytest.importorskip("torch")
    from collectives.train.torch_batch_norm import SyncBatchNorm

    def net():
        torch.manual_seed(0)
        return torch.nn.Sequential(
            torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3, **how), torch.nn.Linear(3, 2)
        )

    nets = [net() for _ in range(4)]
    x = torch.randn(9, 5)
    whole = nets[3]
    for times in (1, 2):
        whole(times * x).square().sum().backward()

    def body(comm):
        mine = SyncBatchNorm.convert(nets[comm.rank], comm.duplicate())
        assert isinstance(mine[1], SyncBatchNorm)
        for times in (1, 2):
            y = mine(parts(times * x, comm.rank, 3))
            y.square().sum().backward()
        grads = [comm.all_reduce(p.grad.numpy()) for p in mine.parameters()]
        mine.eval()
        return y.detach(), grads, dict(mine.state_dict()), mine(x).detach()

    found = cc.run_threads(3, body, timeout=30)
    y = whole(2 * x).detach()
    state = whole.state_dict()
    whole.eval()
    assert torch.allclose(torch.cat([f[0] for f in found]), y, atol=1e-5)
    for _, grads, _, _ in found:
        for ours, p in zip(grads, whole.parameters(), strict=True):
            assert np.allclose(ours, p.grad.numpy(), rtol=1e-4, atol=1e-4)
    # The line above ran `whole` once more, so its running statistics are of three batches.
    fresh = net()
    for times in (1, 2):
        fresh(times * x)
    for _, _, got, evaluated in found:
        for key, value in fresh.state_dict().items():
            assert torch.allclose(got[key].double(), value.double(), atol=1e-6), key
        assert torch.allclose(evaluated, fresh.eval()(x).detach(), atol=1e-5)
    assert set(state) == set(found[0][2])


@pytest.mark.torch
def test_module_refuses_other_shapes():
    torch = pytest.importorskip("torch")
    from collectives.train.torch_batch_norm import SyncBatchNorm

    with pytest.raises(ValueError, match="1-d"):
        cc.run_threads(1, lambda comm: SyncBatchNorm(3, comm)(torch.zeros(3)))


@pytest.mark.torch
@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_gradients_of_weight_and_bias_have_their_dtype(precision):
    """Sums over a batch are more than float16 holds, and finer than bfloat16."""
    torch = pytest.importorskip("torch")
    from collectives.train.torch_batch_norm import SyncBatchNorm

    torch.manual_seed(0)
    x, g = (torch.randn(64, 4, 50).to(getattr(torch, precision)) for _ in "xg")
    g *= 1000
    module = torch.nn.BatchNorm1d(4).double()
    module(x.double()).backward(g.double())

    def body(comm):
        mine = SyncBatchNorm(4, comm)
        mine(x).backward(g)
        return [mine.weight.grad, mine.bias.grad]

    wanted = [module.weight.grad, module.bias.grad]
    assert max(abs(w).max() for w in wanted) > 65504
    for ours, theirs in zip(cc.run_threads(1, body)[0], wanted, strict=True):
        assert torch.allclose(ours.double(), theirs, rtol=1e-5)


@pytest.mark.torch
def test_one_module_in_several_places_is_converted_in_all():
    torch = pytest.importorskip("torch")
    from collectives.train.torch_batch_norm import SyncBatchNorm

    norm = torch.nn.BatchNorm1d(3)
    net = torch.nn.Sequential(norm, torch.nn.ReLU(), norm, torch.nn.Sequential(norm))
    mine = cc.run_threads(1, lambda comm: SyncBatchNorm.convert(net, comm))[0]
    assert isinstance(mine[0], SyncBatchNorm)
    assert mine[0] is mine[2] is mine[3][0]
    assert mine[0].weight is norm.weight
    assert mine[0].training
    assert not cc.run_threads(1, lambda comm: SyncBatchNorm.convert(norm.eval(), comm))[0].training


@pytest.mark.torch
def test_gradients_of_gradients_are_refused():
    """Those of a penalty on gradients would lack what goes through the statistics."""
    torch = pytest.importorskip("torch")
    from collectives.train.torch_batch_norm import SyncBatchNorm

    def body(comm):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(3, 4), SyncBatchNorm(4, comm))
        x = torch.randn(8, 3, requires_grad=True)
        (grad,) = torch.autograd.grad(net(x).pow(3).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.square().sum().backward()

    cc.run_threads(1, body)
