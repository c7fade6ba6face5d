"""ZeRO-3 where ranks lack gradients, so that they use other parameters, or in another order: what
they end with is what stage 2 ends with.
"""

from __future__ import annotations

import numpy as np
import pytest
from worlds import outcomes

import collectives as cc
from collectives.train import SGD, Trainer

NAMES = list("abcdefghi")


def trained(comm, stage, function, batches, **more):
    """Losses and parameters after a step with each batch."""
    trainer = Trainer(
        function, SGD(lr=0.5), comm, params={name: np.zeros(50) for name in NAMES},
        sharding=stage, bucket_bytes=400, first_bucket_bytes=400, **more,
    )  # fmt: skip
    losses = [trainer.step(batch).loss for batch in batches]
    return losses, {name: x.tobytes() for name, x in trainer.parameters().items()}


def same_in_all_stages(n, function, batches_of, **more):
    found = [
        cc.run_threads(
            n,
            lambda comm, stage=stage: trained(comm, stage, function, batches_of(comm), **more),
            timeout=10,
        )
        for stage in (0, 2, 3)
    ]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("early", [True, False])
def test_a_gradient_that_some_ranks_lack(early):
    """More buckets are behind it than have memory at a time, and all ranks gather meanwhile."""

    def body(comm, stage):
        def emits(params, batch, emit):
            if early:
                dict(params)
            for name in reversed(NAMES):
                grad = params[name] + batch.mean()
                if name != NAMES[-1] or comm.rank == 1:
                    emit(name, grad)
            return 1.0

        trainer = Trainer(
            emits, SGD(lr=0.5), comm, params={name: np.zeros(50) for name in NAMES},
            sharding=stage, find_unused=True, bucket_bytes=400, first_bucket_bytes=400,
        )  # fmt: skip
        for _ in range(3):
            trainer.step(np.full(2, 1.0 + comm.rank))
        return {name: x.tobytes() for name, x in trainer.parameters().items()}

    found = [cc.run_threads(3, body, stage, timeout=10) for stage in (0, 2, 3)]
    assert found[0] == found[1] == found[2]


def at_random(params, batch, emit):
    """Reads some parameters in some order, and has gradients of some, in the order of all."""
    random = np.random.default_rng(int(batch[0]))
    read = random.permutation(NAMES)[: random.integers(1, len(NAMES))]
    values = {name: params[name] for name in read}
    for name in reversed(NAMES):
        if name in values and random.random() < 0.7:
            emit(name, values[name] + batch.mean())
    return 1.0


@pytest.mark.parametrize("absent", [False, True])
@pytest.mark.parametrize("n", [2, 3, 5])
def test_whatever_ranks_use(n, absent):
    """Other parameters on every rank in every step, in other orders; and a rank without data."""

    def batches(comm):
        seeds = [1000.0 * step + comm.rank for step in range(8)]
        away = [absent and (step + comm.rank) % n == 0 for step in range(8)]
        return [
            None if gone else np.array([seed, 1.0])
            for seed, gone in zip(seeds, away, strict=True)
        ]  # fmt: skip

    same_in_all_stages(n, at_random, batches, find_unused=True)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_another_order_on_some_ranks(accumulate):
    def two_first(params, batch, emit):
        values = {name: params[name] for name in (NAMES if batch[0] else ["b", "a", *NAMES[2:]])}
        for name in reversed(NAMES):
            emit(name, values[name] + batch.mean())
        return 1.0

    def batches(comm):
        return [np.full(2 * accumulate, float(comm.rank))] * 3

    same_in_all_stages(2, two_first, batches, find_unused=True, accumulate=accumulate)


@pytest.mark.parametrize(
    "more", [{}, {"static_graph": True}, {"static_graph": True, "find_unused": True}], ids=str
)
def test_ranks_differ_where_they_may_not(more):
    def body(comm):
        def other_order(params, batch, emit):
            values = {name: params[name] for name in sorted(NAMES, reverse=comm.rank == 1)}
            for name in reversed(NAMES):
                emit(name, values[name])
            return 1.0

        trained(comm, 3, other_order, [np.ones(2)], **more)

    for error in outcomes(2, body):
        assert isinstance(error, cc.MismatchError), error
        assert "in different orders" in str(error)
        advice = "; find_unused=True lets them"
        advice += " where static_graph=True is left out" if more else ""
        assert str(error).endswith(advice)


def test_calls_of_the_function_between_parameters_that_all_use_alike():
    """After a pass in which they did not: nobody waits in a gather that another is not to make."""

    def body(comm, stage):
        own, step = comm.duplicate(), [0]

        def reads(params, batch, emit):
            first = step[0] == 0
            names = NAMES[::-1] if first and comm.rank else NAMES
            values = {}
            for name in names:
                values[name] = params[name]
                if not first:
                    own.all_reduce(np.ones(1))
            for name in reversed(NAMES):
                emit(name, values[name] + batch.mean())
            step[0] += 1
            return 1.0

        return trained(comm, stage, reads, [np.ones(2)] * 4, find_unused=True)

    found = [cc.run_threads(2, body, stage, timeout=10) for stage in (2, 3)]
    assert found[0] == found[1]


@pytest.mark.parametrize("find_unused", [True, False])
def test_a_call_of_all_ranks_behind_parameters_that_some_use(find_unused):
    """Waits, as that of SyncBatchNorm behind experts; where it may be that, all are told."""

    def body(comm):
        own = comm.duplicate()

        def function(params, batch, emit):
            if comm.rank == 0 or not find_unused:
                params["a"]
            if comm.rank == 0 or find_unused:
                own.all_reduce(np.ones(1))
            return 1.0

        trained(comm, 3, function, [np.ones(2)], find_unused=find_unused)

    for error in outcomes(2, body, timeout=2):
        assert isinstance(error, cc.CollectiveError), error
        assert ("behind parameters that only some ranks use" in str(error)) == find_unused, error


def mixture(torch):
    """A module of experts, each of which some batches go to, and two heads."""

    class Experts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(4))
            self.one, self.two = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x, used):
            for i in used:
                x = torch.tanh(self.experts[i](x))
            return self.one(x), self.two(x)

    return Experts


HEADS = {"one": (1, 0), "two": (0, 1), "both": (1, 1)}


def of_heads(net, batch):
    x, used, head = batch
    one, two = net(x, used)
    parts = [h.square().mean() for h, wanted in zip((one, two), HEADS[head], strict=True) if wanted]
    return sum(parts)


@pytest.mark.torch
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_experts_and_heads(precision):
    """Ranks go different ways through a module, and back."""
    torch = pytest.importorskip("torch")
    ways = [
        [((0, 1), "both"), ((2, 3), "one"), ((1,), "two")],
        [((3, 2), "one"), ((2, 3), "two"), ((), "both")],
        [((0, 1, 2, 3), "two"), ((0,), "both"), ((3, 2, 1, 0), "one")],
    ]
    torch.manual_seed(1)
    state = mixture(torch)().state_dict()

    def body(comm, stage):
        net = mixture(torch)()
        net.load_state_dict(state)
        trainer = Trainer(
            net, SGD(lr=0.1), comm, loss=of_heads, sharding=stage, find_unused=True,
            bucket_bytes=1, first_bucket_bytes=1, precision=precision, count=lambda _: 1,
        )  # fmt: skip
        x = torch.linspace(-1.0, 1.0, 12).reshape(3, 4)
        losses = []
        for step in range(9):
            used, head = ways[(step + comm.rank) % 3][step // 3]
            losses.append(trainer.step((x * (comm.rank + 1), used, head)).loss)
        return losses, {name: x.tobytes() for name, x in trainer.parameters().items()}

    found = [cc.run_threads(3, body, stage, timeout=20) for stage in (0, 2, 3)]
    assert found[0] == found[1] == found[2]
