"""The sampler, which says which rank sees which sample, and schedules of the learning rate."""

from __future__ import annotations

import json

import numpy as np
import pytest
from worlds import outcomes

import collectives as cc
from collectives.train import SGD, Constant, Cosine, Sampler, Steps, Trainer, WarmUp, scaled_lr


class Rank:
    """A communicator whose other ranks agree."""

    def __init__(self, rank, size):
        self.rank, self.size, self._bootstrap = rank, size, self

    def _check_open(self):
        pass

    def all_gather(self, mine):
        return [mine] * self.size


def samplers(samples, ranks, **more):
    return [Sampler(samples, Rank(r, ranks), **more) for r in range(ranks)]


@pytest.mark.parametrize("last", ["uneven", "pad", "drop"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("samples", [30, 31, 59, 61])
def test_every_sample_once_in_an_epoch(samples, ranks, last):
    found = samplers(samples, ranks, micro=2, accumulate=3, last=last)
    orders = []
    for _ in range(2):
        steps = list(zip(*found, strict=True))
        assert len(steps) == len(found[0])
        seen = [int(i) for step in steps for part in step if part is not None for i in part]
        batch = 6 * ranks
        if last == "uneven":
            assert sorted(seen) == list(range(samples))
        elif last == "drop":
            assert len(seen) == len(set(seen)) == samples // batch * batch
        else:
            assert set(seen) == set(range(samples))
            assert len(seen) == -(-samples // batch) * batch
            assert all(len(part) == 6 for step in steps for part in step)
        orders.append(seen)
    assert orders[0] != orders[1]
    assert [s.epoch for s in found] == [2] * ranks


def test_steps_hold_the_same_samples_for_any_number_of_ranks():
    steps = []
    for ranks, micro in ((1, 12), (2, 6), (3, 4), (4, 3)):
        parts = zip(*samplers(50, ranks, micro=micro, seed=4), strict=True)
        steps.append([[int(i) for p in step if p is not None for i in p] for step in parts])
    assert all(s == steps[0] for s in steps)


def test_the_sampler_goes_on_in_mid_epoch():
    sampler = Sampler(50, Rank(1, 3), micro=2)
    whole = [None if i is None else i.tolist() for _ in range(2) for i in sampler]
    sampler = Sampler(50, Rank(1, 3), micro=2)
    first = [next(iter(sampler)).tolist() for _ in range(5)]
    other = Sampler(50, Rank(1, 3), micro=2)
    other.load(json.loads(json.dumps(sampler.state())))
    rest = [None if i is None else i.tolist() for _ in range(2) for i in other]
    assert first + rest == whole


def test_the_sampler_goes_back_while_it_is_gone_through():
    """As after a loss that ran away, to a checkpoint of the epoch before."""
    whole = [i.tolist() for i in Sampler(12, Rank(0, 1), micro=3)]
    sampler = Sampler(12, Rank(0, 1), micro=3)
    steps = iter(sampler)
    next(steps)
    state = sampler.state()
    list(steps)
    steps = iter(sampler)
    next(steps)
    sampler.load(state)
    assert [i.tolist() for i in steps] == whole[1:]
    assert (sampler.epoch, sampler.position) == (1, 0)


def test_the_sampler_moves_to_another_number_of_ranks():
    found = samplers(48, 2, micro=4)
    taken = [int(i) for s in found for _ in range(3) for i in next(iter(s))]
    moved = samplers(48, 3, micro=2)
    for sampler in moved:
        sampler.load(found[0].state())
    rest = [int(i) for step in zip(*moved, strict=True) for p in step for i in p]
    assert sorted(taken + rest) == list(range(48))
    ended, other = Sampler(10, Rank(0, 1), micro=4), Sampler(10, Rank(0, 1), micro=7)
    while ended.position < len(ended):  # 12 places for 10 samples
        next(iter(ended))
    other.load(ended.state())
    assert list(other) == []
    assert (other.epoch, other.position) == (1, 0)
    with pytest.raises(ValueError, match="no whole steps of 25"):
        Sampler(48, Rank(0, 5), micro=5).load(found[0].state())
    with pytest.raises(ValueError, match="state is of"):
        Sampler(49, Rank(0, 2), micro=4).load(found[0].state())


@pytest.mark.parametrize("micro", [10, 15, 20])
def test_an_epoch_that_left_the_last_samples_out_is_over(micro):
    """For another global batch too, which would divide what was taken, or not."""
    ended = Sampler(100, Rank(0, 2), micro=20, last="drop", seed=1)
    steps = iter(ended)
    for _ in range(len(ended)):
        next(steps)
    other = Sampler(100, Rank(0, 2), micro=micro, last="drop", seed=1)
    state = json.loads(json.dumps(ended.state()))
    other.check(state)
    other.load(state)
    assert other.state()["over"] and list(other) == []
    assert (other.epoch, other.position) == (1, 0) and not other.state()["over"]
    assert len(list(other)) == len(other)


def test_states_that_do_not_tell_whether_the_epoch_is_over():
    """As older versions wrote them."""
    for taken, left in ((40, 2), (80, 1), (100, 0), (120, 0)):
        state = {"samples": 100, "seed": 0, "shuffle": True, "epoch": 3, "taken": taken}
        sampler = Sampler(100, Rank(0, 2), micro=20)
        sampler.load(state)
        assert len(list(sampler)) == left and sampler.epoch == 4
    with pytest.raises(ValueError, match="no whole steps of 30"):
        Sampler(100, Rank(0, 2), micro=15).load(state | {"taken": 40})


def test_a_sampler_that_leaves_all_out():
    with pytest.raises(ValueError, match="leaves all of them out"):
        Sampler(5, Rank(0, 3), micro=2, last="drop")
    with pytest.raises(ValueError, match="did you mean 'drop'"):
        Sampler(5, Rank(0, 3), micro=2, last="dorp")


def test_a_sampler_is_given_numbers():
    """Not the data, as those of torch are, nor a quotient."""
    for samples, micro, words in (
        ([1, 2, 3], 1, "samples is a list, and must be a whole number"),
        (np.zeros((4, 2)), 1, "samples is a ndarray"),
        (100, 64 / 4, "micro is a float"),
    ):
        with pytest.raises(TypeError, match=words):
            Sampler(samples, Rank(0, 3), micro=micro)


# ---- schedules ----------------------------------------------------------------------------------


def test_schedules():
    assert scaled_lr(0.1, 8192) == pytest.approx(3.2)  # Goyal et al., section 2.1
    assert [Constant()(s) for s in (0, 9)] == [1, 1]
    cosine = Cosine(10, floor=0.1)
    assert [round(cosine(s), 6) for s in (0, 5, 10, 99)] == [1, 0.55, 0.1, 0.1]
    steps = Steps((3, 5), 0.1)
    assert [round(steps(s), 6) for s in (2, 3, 4, 5)] == [1, 0.1, 0.1, 0.01]
    warm = WarmUp(4, Steps((1,)), start=1 / 8)  # from 1/k by equal amounts
    assert [warm(s) for s in range(4)] == [0.34375, 0.5625, 0.78125, 1]
    assert [round(warm(s), 6) for s in (4, 5)] == [1, 0.1]
    with pytest.raises(ValueError, match="ascend"):
        Steps((5, 3))
    for kind in (Cosine, WarmUp):
        assert kind(0)(1) in (0, 1)
        with pytest.raises(ValueError, match=f"{kind.__name__}: steps=-500 must be >= 0"):
            kind(500 - 1000)


def test_the_schedule_sets_the_rate_of_each_step():
    def body(comm):
        trainer = Trainer(
            lambda params, batch, emit: emit("w", np.ones(1)) or 0.0,
            SGD(lr=2.0), comm, params={"w": np.zeros(1)}, schedule=Steps((1, 2), 0.5),
        )  # fmt: skip
        rates = [trainer.step(np.zeros((1, 1))).lr for _ in range(3)]
        return rates, trainer.parameters()["w"][0]

    assert cc.run_threads(2, body) == [([2, 1, 0.5], -3.5)] * 2


@pytest.mark.parametrize("more", [{"seed": 2}, {"samples": 61}, {"micro": 4}, {"last": "pad"}])
def test_samplers_that_differ_between_ranks(more):
    def body(comm):
        settings = {"samples": 60, "micro": 3} | (more if comm.rank else {})
        Sampler(settings.pop("samples"), comm, **settings)

    ended = outcomes(2, body)
    assert all(isinstance(e, cc.MismatchError) and "sampler's" in str(e) for e in ended), ended
