"""Steps that raise: nothing of them is left, and no rank waits for what will not come."""

from __future__ import annotations

import time
from types import SimpleNamespace

import models
import numpy as np
import pytest
from training import NODES, batches, make
from worlds import outcomes

import collectives as cc
from collectives.bucketing import Bucketer
from collectives.train import SGD, Trainer
from collectives.train.batches import samples
from collectives.train.losses import told

STAGES = [(0, None), (2, None), (3, None), (3, "node")]


class Fault(Exception):
    """What a model raises."""


def faulty(raises):
    """The model, which raises where raises(call, rank, name) is true: at each gradient, or before
    any with name None. `call` counts forward passes of the rank.
    """
    calls: dict[int, int] = {}

    def function(params, batch, emit):
        rank = int(batch[2][0])
        calls[rank] = calls.get(rank, -1) + 1

        def careful(name, grad):
            if raises(calls[rank], rank, name):
                raise Fault("of the model")
            emit(name, grad)

        careful.scale = emit.scale
        params["w1"].sum()  # under stage 3 something is gathered
        if raises(calls[rank], rank, None):
            raise Fault("of the model")
        return models.loss_and_grads(params, batch[:2], careful)

    return function


def batch_of(comm, step=0):
    x, y = list(batches(step + 1))[step]
    part = models.part_of((x, y), comm.rank, comm.size)
    return (*part, np.full(len(part[0]), comm.rank))


@pytest.mark.parametrize("mode", STAGES)
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    ("call", "where"), [(0, None), (0, "b1"), (1, None), (1, "scale"), (4, "w1"), (5, None)]
)
def test_the_next_step_is_as_if_it_had_never_been(n, mode, call, where):
    """The model raises in micro-batch 1 or 2, in the first step or later, on all ranks."""

    def body(comm, fails):
        function = faulty(lambda at, rank, name: fails and (at, name) == (call, where))
        trainer = make(comm, mode, function=function, accumulate=2)
        done = []
        while len(done) < 4:
            try:
                done.append(trainer.step(batch_of(comm, len(done))))
            except Fault:
                fails = False
        gathers = trainer._gatherer and trainer._gatherer._record
        return [(m.loss, m.grad_norm) for m in done], gathers, models.bits(trainer.parameters())

    wanted = cc.run_threads(n, body, False, nodes=NODES[n], timeout=20)
    assert cc.run_threads(n, body, True, nodes=NODES[n], timeout=20) == wanted


@pytest.mark.parametrize("mode", STAGES)
def test_parameters_can_be_asked_for_after_a_step_that_raised(mode):
    """Also by a rank that raised alone: it is told that the others wait in the step."""

    def body(comm, alone):
        function = faulty(lambda call, rank, name: call == 1 and rank >= alone and name is None)
        trainer = make(comm, mode, function=function, accumulate=2)
        before = models.bits(trainer.parameters())
        with pytest.raises((Fault, cc.CollectiveError)):
            trainer.step(batch_of(comm))
        try:
            with trainer.gathered() as whole:
                assert models.bits(whole) == before
            return models.bits(trainer.parameters()) == before
        except cc.CollectiveError as error:
            return str(error)

    assert cc.run_threads(3, body, 0, nodes=NODES[3], timeout=20) == [True] * 3
    assert "Fault: of the model" in cc.run_threads(3, body, 2, nodes=NODES[3], timeout=100)[2]


@pytest.mark.parametrize("mode", STAGES)
@pytest.mark.parametrize("where", [None, "b1", "w1"])
@pytest.mark.parametrize("call", [0, 1, 5])
def test_where_one_rank_alone_raises_all_hear_of_it(mode, where, call):
    """At once, also where it goes on: under stage 3 others wait for its part of the parameters."""

    def body(comm):
        function = faulty(lambda *at: at == (call, 1, where))
        trainer = make(comm, mode, function=function, accumulate=2)
        raised = []
        for step in range(5):
            try:
                trainer.step(batch_of(comm, step))
            except (Fault, cc.CollectiveError) as error:
                raised.append(error)
        return raised

    began = time.monotonic()
    found = cc.run_threads(3, body, nodes=NODES[3], timeout=100)
    assert time.monotonic() - began < 30
    assert [type(e) for e in found[1]].count(Fault) == 1
    for raised in found:
        assert "Fault: of the model" in str(raised[-1]), raised


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_gradient_that_one_rank_lacks_is_named_on_all(stage):
    """At once, also under stage 3, where buckets wait for memory and the others for gathers."""
    names = "abcdefg"

    def body(comm):
        def function(params, batch, emit):
            for name in names:
                params[name].sum()
            for name in reversed(names):
                if (name, comm.rank) != ("g", 0):
                    emit(name, np.ones(50))
            return 1.0

        trainer = Trainer(
            function, SGD(lr=0.1), comm, params={name: np.zeros(50) for name in names},
            sharding=stage, bucket_bytes=400, first_bucket_bytes=400,
        )  # fmt: skip
        with pytest.raises(cc.CollectiveError) as caught:
            trainer.step(np.ones((2, 1)))
        return str(caught.value)

    began = time.monotonic()
    for words in cc.run_threads(2, body, timeout=100):
        assert "rank 0 has no gradient of 'g': not ready at the end of the pass" in words
    assert time.monotonic() - began < 30


def not_finite(step):
    return float("nan")


def nothing(step):
    return None


@pytest.mark.parametrize("mode", STAGES)
@pytest.mark.parametrize(
    "loss", [None, np.zeros(2), np.zeros(0), 1j, np.array(1j), "no", object], ids=repr
)
def test_a_loss_that_is_no_number_has_no_effect(mode, loss):
    """Of one rank: no other takes the step either, and all hear why."""

    def function(params, batch, emit):
        given = models.loss_and_grads(params, batch[:2], emit)
        return loss if batch[2][0] == 1 else given

    def body(comm):
        trainer = make(comm, mode, function=function)
        before = [shard.master.tobytes() for shard in trainer.store.shards]
        raised = []
        for _ in range(2):
            with pytest.raises((TypeError, ValueError, cc.CollectiveError)) as ended:
                trainer.step(batch_of(comm))
            raised.append(ended.value)
        assert [shard.master.tobytes() for shard in trainer.store.shards] == before
        assert trainer.updates == trainer.steps == 0
        return raised

    found = cc.run_threads(3, body, nodes=NODES[3], timeout=100)
    for raised in found:
        assert "the model returned a loss of" in str(raised[-1]), raised
    assert not isinstance(found[1][0], cc.CollectiveError)


@pytest.mark.parametrize(
    "loss", [1, 0.5, np.float32(0.5), np.array([[2]]), np.array(3.0, np.float16)], ids=repr
)
def test_losses_that_are_numbers(loss):
    def function(params, batch, emit):
        emit("w", np.ones(2))
        return loss

    def body(comm):
        trainer = Trainer(function, SGD(lr=1.0), comm, params={"w": np.zeros(2)})
        return trainer.step(np.ones(1)).loss

    assert cc.run_threads(2, body, timeout=20) == [float(np.asarray(loss).ravel()[0])] * 2


def test_losses_on_gpus_are_not_waited_for():
    """Their shape and dtype are looked at."""

    class There:
        shape, dtype, device = (), "float32", SimpleNamespace(type="cuda")

    class Many(There):
        shape = (2,)

    class Odd(There):
        dtype = "complex64"

    loss = There()
    assert told(loss) is loss
    with pytest.raises(ValueError, match=r"a loss of shape \(2,\)"):
        told(Many())
    with pytest.raises(TypeError, match="a loss of complex64"):
        told(Odd())


@pytest.mark.parametrize("mode", STAGES)
@pytest.mark.parametrize("wrong", [(3,), [None], {}, "counts"], ids=repr)
def test_a_bad_batch_on_one_rank(mode, wrong):
    """All hear of it, and no rank is paired with another's next step."""

    def count(batch):
        if batch == "counts":
            raise Fault("of counting")
        return samples(batch)

    def body(comm):
        trainer = make(comm, mode, function=faulty(lambda *_: False), count=count, accumulate=2)
        raised = []
        for step in range(3):
            bad = comm.rank == 0 and step == 1
            try:
                trainer.step([wrong, wrong] if bad and wrong == "counts" else wrong if bad
                             else batch_of(comm, step))  # fmt: skip
            except Exception as error:
                raised.append(error)
        return trainer.updates, raised

    found = cc.run_threads(3, body, nodes=NODES[3], timeout=100)
    (_, (first, *_)), *_ = found
    assert not isinstance(first, cc.CollectiveError)
    for updates, raised in found:
        assert updates == 1
        assert len(raised) == 2 and str(first) in str(raised[-1]), raised


@pytest.mark.parametrize("mode", STAGES)
@pytest.mark.parametrize("schedule", [not_finite, nothing])
def test_a_factor_that_is_no_finite_number(mode, schedule):
    def body(comm):
        trainer = make(comm, mode, function=faulty(lambda *_: False), schedule=schedule)
        before = models.bits(trainer.parameters())
        for _ in range(2):
            with pytest.raises(ValueError, match=r"the factor of step 0 is (nan|None), and must"):
                trainer.step(batch_of(comm))
        assert models.bits(trainer.parameters()) == before

    cc.run_threads(3, body, nodes=NODES[3], timeout=20)


@pytest.mark.parametrize("mode", STAGES)
def test_where_parameters_are_written_all_hear_of_it(mode):
    """Others may have stepped: a rank that went on would train another model."""

    def body(comm):
        class Careless(SGD):
            def update(self, w, g, state, lr, step, work):
                if comm.rank == 1 and step == 3:
                    raise Fault("of the optimizer")
                super().update(w, g, state, lr, step, work)

        trainer = make(comm, mode, optimizer=Careless(lr=0.1))
        raised = []
        for step in range(6):
            try:
                trainer.step(models.part_of(list(batches(step + 1))[step], comm.rank, comm.size))
            except (Fault, cc.CollectiveError) as error:
                raised.append(error)
        return trainer.updates, raised

    found = cc.run_threads(3, body, nodes=NODES[3], timeout=20)
    assert found[1][0] == 2 and isinstance(found[1][1][0], Fault)
    for updates, raised in found:
        assert updates <= 3
        assert "step 3 raised Fault: of the optimizer where" in str(raised[-1]), raised


@pytest.mark.parametrize("transient", [False, True])
def test_buckets_forget_what_a_pass_that_raises_has_left(transient):
    def body(comm):
        sums = {}

        def reduce(bucket):
            out = sums[bucket.slots[0].name] = np.empty(bucket.count)
            return comm.all_reduce(bucket.buffer, out=out, async_op=True)

        given = {name: np.zeros(3) for name in "ab"}
        bucketer = Bucketer(
            comm, given, bucket_bytes=1, first_bucket_bytes=1, transient=transient, reduce=reduce
        )
        with pytest.raises(Fault), bucketer.no_sync():
            bucketer.ready("a", np.full(3, 50.0))
            raise Fault
        for name in "ba":
            bucketer.ready(name, np.ones(3))
        bucketer.finish()
        return [float(sums[name][0]) for name in "ab"]

    assert cc.run_threads(2, body, timeout=20) == [[2.0, 2.0]] * 2


def test_a_pass_that_is_discarded_after_buckets_were_launched():
    def body(comm):
        given = {name: np.zeros(3) for name in "ab"}
        bucketer = Bucketer(comm, given, bucket_bytes=1, first_bucket_bytes=1)
        bucketer.ready("b", np.ones(3))
        if comm.rank == 1:
            assert bucketer.discard(Fault("of backward"))
            return None
        bucketer.ready("a", np.ones(3))
        return bucketer.finish()

    ended = outcomes(2, body, timeout=100)
    assert isinstance(ended[0], cc.AbortedError)
    assert "rank 1 gave up a pass: Fault: of backward" in str(ended[0])


def test_micro_batches_without_samples_are_no_data():
    """A mean over nothing is NaN: the model is not asked for it."""

    def function(params, batch, emit):
        assert batch[0].any()
        return models.loss_and_grads(params, batch, emit)

    def body(comm, mode):
        x, y = models.data(12)
        trainer = make(
            comm, mode, function=function, accumulate=2, normalize="tokens",
            count=lambda batch: int((batch[0] != 0).any(axis=1).sum()),
        )  # fmt: skip
        whole, padding = (x, y), (np.zeros_like(x), y)
        step = trainer.step([padding, whole] if comm.rank else [whole, padding])
        trainer.step([padding, padding] if comm.rank else [whole, whole])
        return step.loss, step.grad_norm, models.bits(trainer.parameters())

    found = [cc.run_threads(2, body, mode, nodes=[0, 1], timeout=20)[0] for mode in STAGES]
    assert np.isfinite(found[0][:2]).all()
    assert all(f == found[0] for f in found)


@pytest.mark.parametrize("kind", [Fault, cc.CollectiveError])
@pytest.mark.parametrize("mode", STAGES)
def test_a_rank_that_ends_in_a_step_ends_the_others(mode, kind):
    """At once, also where they wait in communicators that the trainer has made for itself."""

    def function(params, batch, emit):
        params["w1"].sum()
        if batch[2][0] == 1:
            raise kind("of the model")
        return models.loss_and_grads(params, batch[:2], emit)

    def body(comm):
        try:
            make(comm, mode, function=function).step(batch_of(comm))
        except (Fault, cc.CollectiveError) as error:
            raised[comm.rank] = str(error)
            raise

    raised: dict[int, str] = {}
    began = time.monotonic()
    with pytest.raises(kind, match="of the model"):
        cc.run_threads(3, body, nodes=NODES[3], timeout=100)
    assert time.monotonic() - began < 30
    if kind is Fault or mode[0] == 3:
        assert all("of the model" in words for words in raised.values()), raised


def test_communicators_of_communicators_end_with_their_rank():
    def body(comm):
        closed = comm.duplicate()
        closed.close()
        dropped = comm.duplicate()
        del dropped
        part = comm.split(comm.rank % 2)
        twin = part.duplicate()
        if comm.rank == 2:
            raise Fault("of rank 2")
        try:
            (twin if comm.rank == 0 else comm).barrier()
        except cc.CollectiveError as error:
            raised.append(str(error))

    raised: list[str] = []
    began = time.monotonic()
    with pytest.raises(Fault):
        cc.run_threads(3, body, timeout=100)
    assert time.monotonic() - began < 30
    assert len(raised) == 2 and all("rank 2 raised Fault: of rank 2" in e for e in raised), raised
