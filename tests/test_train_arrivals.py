"""Gradients of a module that are handed over bucket by bucket, once their order is known."""

from __future__ import annotations

import collections

import models
import numpy as np
import pytest
from with_torch import torch

import collectives as cc
from collectives.bucket_layout import Bucket, Slot
from collectives.train import SGD, Trainer, module

pytestmark = pytest.mark.torch

WIDTH = 6


class Listener:
    """Notes what it is told: the names of single gradients, numbers of buckets."""

    def __init__(self):
        self.told = []

    def arrived(self, name, grad):
        self.told.append(name)

    def began(self, bucket):
        self.told.append(("began", bucket.index))

    def filled(self, bucket, grads):
        assert [tuple(g.shape) for g in grads] == [slot.shape for slot in bucket.slots]
        self.told.append(("filled", bucket.index))

    def heard(self):
        told, self.told = self.told, []
        return told


class Shard:
    def __init__(self, index, names):
        slots = [Slot(name, 0, WIDTH, (WIDTH,)) for name in names]
        self.bucket = Bucket(index, "float32", "cpu", slots)


def chain(parameters, names):
    """A sum whose gradients come in the order of `names`."""
    x = torch.ones(WIDTH)
    for name in reversed(names):
        x = torch.tanh(x * parameters[name])
    return x.sum()


@pytest.fixture
def four():
    from collectives.train.arrivals import Arrivals

    parameters = {name: torch.nn.Parameter(torch.ones(WIDTH)) for name in "abcd"}
    listener = Listener()
    arrivals = Arrivals(parameters, listener)
    shards = [Shard(0, "ab"), Shard(1, "dc")]

    def passed(names, shards=shards):
        arrivals.begin(shards)
        chain(parameters, names).backward()
        arrivals.end()
        assert all(p.grad is None for p in parameters.values())
        return listener.heard()

    return parameters, arrivals, listener, passed, shards


FIRST = ["a", "b", "c", "d"]
GROUPED = [("began", 0), ("filled", 0), ("began", 1), ("filled", 1)]


def test_buckets_are_handed_over_once_an_order_is_known(four):
    _, arrivals, _, passed, _ = four
    assert passed("abcd") == FIRST
    assert passed("abcd") == GROUPED
    assert passed("abcd") == GROUPED
    arrivals.close()
    assert passed_nothing(four)


def passed_nothing(four):
    parameters, _, listener, _, _ = four
    chain(parameters, "abcd").backward()
    for p in parameters.values():
        assert p.grad is not None
        p.grad = None
    return listener.heard() == []


def test_without_buckets_each_is_told(four):
    _, _, _, passed, shards = four
    assert passed("abcd", None) == FIRST
    assert passed("abcd", None) == FIRST
    assert passed("abcd", shards) == GROUPED
    assert passed("abcd", None) == FIRST


def test_other_buckets(four):
    _, _, _, passed, _ = four
    passed("abcd")
    passed("abcd")
    assert passed("abcd", [Shard(0, "abc"), Shard(1, "d")]) == [
        ("began", 0), ("filled", 0), ("filled", 1)
    ]  # fmt: skip


def test_a_pass_in_another_order(four):
    """The last one of bucket 0 comes first: what is there is told, and the rest one by one."""
    _, _, _, passed, _ = four
    passed("abcd")
    assert passed("bacd") == ["b", "a", "c", "d"]
    assert passed("bacd") == ["b", "a", "c", "d"]  # seen from end to end
    assert passed("bacd") == GROUPED


def test_a_gradient_that_does_not_come(four):
    _, _, _, passed, _ = four
    passed("abcd")
    assert passed("acd") == [("began", 0), ("began", 1), ("filled", 1), "a"]
    assert passed("acd") == ["a", "c", "d"]  # not all have come, so there is no order
    assert passed("abcd") == FIRST


def test_after_three_departures_each_is_told(four):
    _, _, _, passed, _ = four
    for _ in range(3):
        passed("abcd")
        assert passed("abcd") == GROUPED
        passed("acd")  # noticed at the end
    for _ in range(3):
        assert passed("abcd") == FIRST


def test_a_gradient_that_comes_twice(four):
    """Before its bucket is handed over torch adds it up; after that the listener hears of it."""
    parameters, arrivals, listener, passed, shards = four
    passed("abcd")
    arrivals.begin(shards)
    chain(parameters, "a").backward()
    chain(parameters, "abcd").backward()
    chain(parameters, "c").backward()
    arrivals.end()
    assert listener.heard() == [("began", 0), ("began", 0), *GROUPED[1:], ("began", 1), "c"]
    assert all(p.grad is None for p in parameters.values())


def test_a_pass_that_is_given_up_leaves_nothing(four):
    parameters, arrivals, listener, passed, shards = four
    passed("abcd")
    arrivals.begin(shards)
    chain(parameters, "ac").backward()
    arrivals.discard()
    listener.heard()
    assert passed("abcd") == GROUPED


class Layers(torch.nn.Module):
    """Layers in an order that the batch tells, and one that is used twice."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(5))

    def forward(self, x, order):
        x = torch.tanh(self.layers[0](x))
        for i in order:
            x = torch.tanh(self.layers[i](x))
        return self.layers[0](x)


def layers(state):
    net = Layers()
    net.load_state_dict(state)
    return net


def loss(net, batch):
    return net(batch[0], batch[1][0].tolist()).square().mean()


def as_if(on_gpu, net):
    """A model that does what it does on GPUs: on the host each gradient is looked at, if it is
    finite, as it comes.
    """
    from collectives.train.module import ModuleModel

    model = ModuleModel(net, loss)
    model.on_gpu = on_gpu
    return model


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("orders", ["one", "many", "unused"])
def test_bits_do_not_depend_on_how_gradients_are_told(stage, orders):
    torch.manual_seed(0)
    state = Layers().state_dict()

    def order(step):
        if orders == "one":
            return [1, 2, 3, 4]
        drawn = np.random.default_rng(step).permutation([1, 2, 3, 4]).tolist()
        if orders == "many":
            return drawn
        return [1, 2, 3, 4] if step % 3 == 0 else [drawn[0], *drawn[:3]]  # one is left out

    def body(comm):
        results, grouped = [], []
        for together in (False, True):
            net = layers(state)
            trainer = Trainer(
                as_if(together, net), SGD(lr=0.1, momentum=0.9), comm, sharding=stage, accumulate=2,
                find_unused=orders == "unused", bucket_bytes=600, first_bucket_bytes=300,
                clip_norm=0.5,
            )  # fmt: skip
            count = 0
            inner = trainer.bucketer.ready_together

            def counted(bucket, grads, inner=inner):
                nonlocal count
                count += 1
                inner(bucket, grads)

            trainer.bucketer.ready_together = counted
            for step in range(8):
                random = np.random.default_rng([step, comm.rank])
                rows = torch.from_numpy(random.standard_normal((4, 8)).astype(np.float32))
                # All ranks go one way in a step: stage 3 wants that.
                trainer.step((rows, torch.tensor([order(step)] * 4)))
            results.append(models.bits(trainer.parameters()))
            grouped.append(count)
            trainer.close()
        return results, grouped

    for (one, other), (never, often) in cc.run_threads(2, body, timeout=60):
        assert one == other
        assert never == 0
        assert often > 0


@pytest.mark.parametrize(
    ("stage", "every"),
    [(0, "micro-batch"), (1, "micro-batch"), (2, "step"), (2, "micro-batch"), (3, "step")],
)
@pytest.mark.parametrize("how", [SGD, torch.optim.SGD])
def test_gradients_and_buckets_have_memory_while_a_step_lasts(stage, how, every, monkeypatch):
    """It lies elsewhere in every step here; bits are those of memory that stays."""
    torch.manual_seed(0)
    state = Layers().state_dict()
    give, given = module._Lent.give, collections.defaultdict(list)

    def give_for_good(piece):
        # What it had is never free again, so what it is lent next is elsewhere.
        if piece._flat.untyped_storage().nbytes():
            old = torch.empty(0, dtype=piece._flat.dtype).set_(piece._flat)
            piece._flat.set_(torch.empty_like(old))
            given[piece].append(old.fill_(torch.nan))
        give(piece)

    monkeypatch.setattr(module._Lent, "give", give_for_good)

    def body(comm):
        results = []
        for lent in (False, True):
            net = layers(state)
            optimizer = SGD(lr=0.1) if how is SGD else torch.optim.SGD(net.parameters(), lr=0.1)
            trainer = Trainer(
                as_if(lent, net), optimizer, comm, sharding=stage, accumulate=2,
                reduce_every=every, bucket_bytes=600, first_bucket_bytes=300,
            )  # fmt: skip
            pools = trainer.bucketer._pool._pieces.values()
            pieces = [p._lent for p, _ in trainer._gradients._shards] + [p._lent for p in pools]
            pieces = [piece for piece in pieces if piece is not None]
            assert len(pieces) == (1 + (stage > 1)) * lent
            assert trainer.nbytes()["gradients"] >= 0  # before the first step
            for step in range(4):
                random = np.random.default_rng([step, comm.rank])
                rows = torch.from_numpy(random.standard_normal((4, 8)).astype(np.float32))
                # Not the order of the layers: under stages 0 and 1 buckets are filled anew.
                trainer.step((rows, torch.tensor([[3, 1, 4, 2]] * 4)))
                pieces = [p._lent for p, _ in trainer._gradients._shards if lent]
                pieces += [p._lent for p in pools if lent]
                for piece in pieces:
                    assert piece._flat.untyped_storage().nbytes() == 0
            for piece in pieces:
                assert len(given[piece]) >= 5  # one is of before the first step
                assert all(old.isnan().all() for old in given[piece])  # nobody writes there
            if lent:
                whole = sum(p.numel() for p in net.parameters()) * 4
                assert trainer.nbytes()["gradients"] == (whole if stage < 2 else 0)
            results.append(models.bits(trainer.parameters()))
            trainer.close()
        return results

    for one, other in cc.run_threads(2, body, timeout=60):
        assert one == other


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("how", [SGD, torch.optim.SGD])
def test_a_rank_that_has_no_part_of_a_small_model(stage, how):
    """Cuts lie between chunks of 512 elements, so one rank of two has all."""

    def body(comm):
        net = torch.nn.Linear(8, 4, bias=False)
        with torch.no_grad():
            net.weight.fill_(1.0)
        optimizer = SGD(lr=0.1) if how is SGD else torch.optim.SGD(net.parameters(), lr=0.1)
        model = as_if(True, net)
        model._loss = lambda net, batch: net(batch).sum()
        trainer = Trainer(model, optimizer, comm, sharding=stage)
        for _ in range(2):
            trainer.step(torch.ones(2, 8))
        return trainer.parameters()["weight"]

    for found in cc.run_threads(2, body, timeout=60):
        assert np.allclose(found, 1.0 - 2 * 0.1 * 2)  # two steps, two rows


def test_memory_that_cannot_be_had_is_not_written_to():
    """The step raises on all ranks; the next one has memory, and not that of the one before."""

    def body(comm):
        trainer = Trainer(as_if(True, Layers()), SGD(lr=0.1), comm, sharding=2, bucket_bytes=600)
        (pieces, _), *_ = trainer._gradients._shards
        lent, take, batch = (
            pieces._lent,
            pieces._lent.take,
            (torch.ones(2, 8), torch.tensor([[1, 2, 3, 4]] * 2)),
        )
        trainer.step(batch)

        def fail():
            raise torch.cuda.OutOfMemoryError("no memory")

        lent.take = fail
        with pytest.raises(torch.cuda.OutOfMemoryError):
            trainer.step(batch)
        assert not pieces._there
        lent.take = take
        trainer.step(batch)
        return True

    assert cc.run_threads(2, body, timeout=60) == [True] * 2


def test_a_layer_that_is_frozen_and_thawed():
    """Bits are those of a hook for each gradient from the beginning."""
    torch.manual_seed(0)
    state = Layers().state_dict()

    def body(comm):
        results = []
        for together in (False, True):
            net = layers(state)
            trainer = Trainer(
                as_if(together, net), SGD(lr=0.1), comm, find_unused=True, bucket_bytes=600
            )
            for step in range(9):
                for parameter in net.layers[2].parameters():
                    parameter.requires_grad_(step not in (3, 4, 5))
                rows = torch.full((4, 8), 0.1 * (step + comm.rank))
                trainer.step((rows, torch.tensor([[1, 2, 3, 4]] * 4)))
            results.append(models.bits(trainer.parameters()))
        return results

    for one, other in cc.run_threads(2, body, timeout=60):
        assert one == other
    assert one["layers.2.bias"] != state["layers.2.bias"].numpy().tobytes()


@pytest.mark.parametrize("together", [False, True])
def test_a_backward_outside_of_a_step_is_refused(together):
    def body(comm):
        net = Layers()
        trainer = Trainer(as_if(together, net), SGD(lr=0.1), comm, bucket_bytes=600)
        batch = (torch.ones(2, 8), torch.tensor([[1, 2, 3, 4]] * 2))
        for _ in range(3):
            trainer.step(batch)
        net.layers[1].weight.grad = torch.ones(8, 8)
        with pytest.raises(cc.CollectiveError, match=r"'layers\.1\.weight' has a gradient before"):
            trainer.step(batch)
        net.zero_grad()
        return trainer.step(batch).loss

    assert all(np.isfinite(cc.run_threads(2, body, timeout=60)))


@pytest.mark.parametrize("together", [False, True])
def test_a_backward_of_one_s_own_leaves_gradients_where_torch_does(together):
    """Before the first step and between steps, also on one rank only."""

    def body(comm, own):
        torch.set_num_threads(1)
        net = layers(state)
        trainer = Trainer(as_if(together, net), SGD(lr=0.1), comm, bucket_bytes=600)
        batch = (torch.ones(2, 8), torch.tensor([[1, 2, 3, 4]] * 2))
        losses = []
        for _ in range(5):
            if own and comm.rank == 0:
                loss(net, batch).backward()
                assert net.layers[1].weight.grad.any()
                net.zero_grad()
            losses.append(trainer.step(batch).loss)
        return losses

    state = Layers().state_dict()
    found = [cc.run_threads(2, body, own, timeout=60) for own in (False, True)]
    assert found[0] == found[1]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_ranks_without_data_in_any_step_under_every_stage(ranks, on_gpu, accumulate):
    """More buckets than the pool has places, so ranks wait for each other's reductions between the
    gathers of stage 3.
    """
    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(8)])
    state = net.state_dict()

    def body(comm):
        from collectives.train.module import ModuleModel

        results = []
        for stage in (0, 2, 3):
            net = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(8)])
            net.load_state_dict(state)
            model = ModuleModel(net, lambda net, batch: net(batch).square().mean())
            model.on_gpu = on_gpu
            trainer = Trainer(
                model, SGD(lr=0.1), comm, sharding=stage, bucket_bytes=600,
                first_bucket_bytes=300, accumulate=accumulate,
            )  # fmt: skip
            for step in range(5):
                random = np.random.default_rng([step, comm.rank])
                rows = torch.from_numpy(random.standard_normal((4, 8)).astype(np.float32))
                # In the first step too, and one rank with data for the first micro-batch alone.
                absent = step != 1 and comm.rank == (step + 1) % ranks
                half = rows[:1] if step == 3 and comm.rank == 0 else rows
                trainer.step(None if absent else half)
            results.append(models.bits(trainer.parameters()))
        return results

    for results in cc.run_threads(ranks, body, timeout=60):
        assert all(found == results[0] for found in results)
