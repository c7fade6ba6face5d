"""ZeRO-3 gathers what is used, wherever a module leaves it, and says so where it does not."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import weakref

import numpy as np
import pytest
from worlds import outcomes

import collectives as cc
from collectives.train import SGD, Trainer

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

EACH = {"bucket_bytes": 1, "first_bucket_bytes": 1}  # every parameter has its own bucket


@dataclasses.dataclass
class Boxed:
    value: torch.Tensor


class Opaque:
    """What nobody can look into."""

    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class Scale(torch.nn.Module):
    """Multiplies, which does not mind shapes, by parameters of one element and of many."""

    def __init__(self, pack, width=4):
        super().__init__()
        self.one = torch.nn.Parameter(torch.tensor([1.25]))
        self.many = torch.nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.mix = torch.nn.Parameter(torch.eye(width) + 0.1)
        self.pack = pack

    def forward(self, x):
        return self.pack(torch.tanh(x * self.one * self.many) @ self.mix)


class Aside(Scale):
    """Also leaves something in an attribute, for the loss."""

    def forward(self, x):
        self.extra = (x * self.one).square().mean()
        return super().forward(x)


class Chain(torch.nn.Module):
    def __init__(self, kind=Scale, pack=lambda x: x, checkpointing=None, blocks=5):
        super().__init__()
        self.blocks = torch.nn.ModuleList(kind(pack) for _ in range(blocks))
        self.checkpointing = checkpointing

    def forward(self, x):
        for block in self.blocks:
            if self.checkpointing is None:
                x = block(x)
            else:
                x = torch.utils.checkpoint.checkpoint(
                    lambda x, block=block: getattr(block(x), "value", x),
                    x, use_reentrant=self.checkpointing == "reentrant",
                )  # fmt: skip
            x = getattr(x, "value", x)
        return x


def loss(net, batch):
    value = net(batch).square().mean()
    return value + sum(getattr(block, "extra", 0.0) for block in getattr(net, "blocks", []))


def steps_of(comm, net, stage, steps=3, loss=loss, **more):
    """Losses, norms and parameters after some steps."""
    trainer = Trainer(net, SGD(lr=0.1), comm, loss=loss, sharding=stage, **EACH, **more)
    x = torch.linspace(-1.0, 1.0, 12).reshape(3, 4).requires_grad_()
    told = [trainer.step(x * (comm.rank + 1)) for _ in range(steps)]
    return [(m.loss, m.grad_norm) for m in told], {
        name: x.tobytes() for name, x in trainer.parameters().items()
    }


def same_as_stage_2(make, **more):
    nets = [make() for _ in range(2)]  # here, since threads share torch's generator
    for net in nets[1:]:
        net.load_state_dict(nets[0].state_dict())
    found = [
        cc.run_threads(
            2,
            lambda comm, stage=stage, own=own: steps_of(comm, own[comm.rank], stage, **more),
            timeout=20,
        )
        for stage, own in ((2, copy.deepcopy(nets)), (3, nets))
    ]
    assert found[0] == found[1]
    assert found[0][0][0][0][1] > 0
    return found


# ---- whatever a module returns -------------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", [None, "reentrant", "not reentrant"])
@pytest.mark.parametrize("pack", [Boxed, Opaque])
def test_a_module_that_returns_any_object(pack, checkpointing):
    same_as_stage_2(lambda: Chain(pack=pack, checkpointing=checkpointing))


def test_a_module_that_leaves_tensors_aside():
    same_as_stage_2(lambda: Chain(Aside))


def test_a_module_that_detaches_its_parameters():
    """They are needed in backward when their gradient, or all that there is of it, has come."""

    class Detached(Scale):
        def forward(self, x):
            return Opaque(super().forward(x * self.many.detach()) * self.mix.detach().diag())

    same_as_stage_2(lambda: Chain(Detached, pack=lambda x: x))


def test_lists_and_dicts_of_parameters_are_their_module_s():
    class Lists(Scale):
        def __init__(self, pack):
            super().__init__(pack)
            self.rows = torch.nn.ParameterList([torch.full((4,), 1.5), torch.full((1,), 0.5)])
            self.named = torch.nn.ParameterDict({"shift": torch.full((4,), 0.1)})

        def forward(self, x):
            x = super().forward(x)
            return x * self.rows[0] * self.rows[1] + self.named["shift"]

    same_as_stage_2(lambda: Chain(Lists))


def test_other_hooks_of_saved_tensors_get_the_rest():
    """Parameters stay where they are; what else autograd saves goes to the hooks that are set."""
    packed = {True: [], False: []}

    def hooked(net, batch):
        shut = type(net.blocks[0].one) is not torch.nn.Parameter

        def keep(tensor):
            packed[shut].append(tuple(tensor.shape))
            return tensor.detach().clone()

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            return loss(net, batch)

    same_as_stage_2(lambda: Chain(pack=Opaque), loss=hooked)
    whole, shut = packed[False], packed[True]
    assert shut.count((3, 4)) == whole.count((3, 4)) > 5 * 6  # activations
    assert (4, 4) in whole and (4, 4) not in shut


def test_what_is_written_in_place_after_it_was_saved_is_noticed():
    class Spoils(Scale):
        def forward(self, x):
            y = x * self.many
            z = y * y
            y.add_(1.0)
            return z

    def body(comm):
        steps_of(comm, Chain(Spoils), 3)

    for error in outcomes(1, body):
        assert "modified by an inplace operation" in str(error)


def test_graphs_without_backward_go_without_the_collector_of_cycles():
    """A node may save its own output."""

    class Watched(Scale):
        def forward(self, x):
            y = torch.tanh(x * self.many)
            self.seen = weakref.ref(y)
            return y @ self.mix

    def body(comm):
        net = Chain(Watched)
        trainer = Trainer(net, SGD(lr=0.1), comm, loss=loss, sharding=3, **EACH)
        gc.disable()
        try:
            with trainer.gathered():
                net(torch.ones(3, 4))
                return [block.seen() for block in net.blocks]
        finally:
            gc.enable()

    assert cc.run_threads(1, body, timeout=20) == [[None] * 5]


def test_hooks_are_as_before_where_a_forward_raises():
    class Fault(Exception):
        pass

    class Interrupt(BaseException):
        pass

    raised = [None]

    class Raises(Scale):
        def forward(self, x):
            if raised[0] is not None:
                raise raised[0]
            return super().forward(x)

    def body(comm):
        net = Chain(Raises)
        trainer = Trainer(net, SGD(lr=0.1), comm, loss=loss, sharding=3, **EACH)
        for error in (Fault, Interrupt):
            raised[0] = error()
            with pytest.raises(error):
                trainer.step(torch.ones(3, 4))
            raised[0] = None
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
            assert type(net.blocks[0].one) is not torch.nn.Parameter  # it is shut
        trainer.step(torch.ones(3, 4))

    cc.run_threads(1, body, timeout=20)


def test_derivatives_by_torch_func():
    """It takes no hooks for saved tensors: modules in it set none."""

    def derived(net, batch):
        return torch.func.grad(lambda x: loss(net, x))(batch).square().mean() + loss(net, batch)

    same_as_stage_2(Chain, loss=derived)


@pytest.mark.filterwarnings("ignore::UserWarning")  # Dynamo's, which looks at everything
@pytest.mark.parametrize("whole", [True, False])
def test_modules_that_are_compiled(whole):
    """Dynamo does not look into what gathers."""

    def body(comm, stage):
        net = Chain(Aside, blocks=2)
        if whole:
            net = torch.compile(net, backend="aot_eager")
        else:
            net.blocks = torch.nn.ModuleList(
                torch.compile(block, backend="aot_eager") for block in net.blocks
            )
        return steps_of(comm, net, stage, loss=lambda net, x: net(x).square().mean())

    found = [cc.run_threads(1, body, stage, timeout=100) for stage in (2, 3)]
    assert found[0] == found[1]


# ---- outside of the forward of its module --------------------------------------------------------


class Ends(torch.nn.Module):
    """The first parameter has long gone when the last module is through."""

    def __init__(self, blocks=5):
        super().__init__()
        self.first = Scale(lambda x: x)
        self.rest = Chain(blocks=blocks)

    def forward(self, x):
        return self.rest(self.first(x))


USES = {
    "in arithmetic": lambda p, y: y * p,
    "by itself": lambda p, y: y.sum() + p.square().sum(),
    "in another dtype": lambda p, y: y.sum() + p.double().sum(),
    "in place": lambda p, y: p.detach().mul_(2.0) + y,
    "as data": lambda p, y: y * p.data,
    "on the host": lambda p, y: y.sum() + sum(p.tolist()),
    "in a list": lambda p, y: torch.cat([y.flatten(), p]),
}


@pytest.mark.parametrize("use", USES)
def test_use_outside_of_its_module_is_named_whatever_the_shape(use):
    def body(comm):
        def uses(net, batch):
            return USES[use](net.first.one, net(batch)).square().mean()

        steps_of(comm, Ends(), 3, loss=uses)

    for error in outcomes(2, body):
        assert isinstance(error, cc.CollectiveError)
        assert "'first.one' was used outside of the forward" in str(error)


def test_use_in_backward_is_named():
    class Late(torch.autograd.Function):
        @staticmethod
        def forward(context, x, net):
            context.net = net
            return x * 2.0

        @staticmethod
        def backward(context, grad):
            return grad * context.net.first.one, None

    def body(comm):
        steps_of(comm, Ends(), 3, loss=lambda net, x: Late.apply(net(x), net).square().mean())

    for error in outcomes(1, body):
        assert isinstance(error, cc.CollectiveError) and "'first.one'" in str(error)


def test_use_outside_while_it_is_there_is_right():
    """It stays to the end of the pass then: backward has it although others came in between."""

    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.rows, self.rest = torch.nn.Linear(4, 4, bias=False), Chain()

        def forward(self, x):
            x = self.rows(x)
            x = torch.nn.functional.linear(x, self.rows.weight) * self.rows.weight[:1]
            return self.rest(x)

    torch.manual_seed(0)
    same_as_stage_2(Tied)


def test_a_view_that_a_module_returns_stays():
    class Row(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 24).reshape(6, 4))

        def forward(self, count):
            return self.table[:count]

    class Places(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.row, self.rest = Row(), Chain()

        def forward(self, x):
            row = self.row(len(x))
            return self.rest(x * row) * row

    same_as_stage_2(Places)


def test_between_steps_parameters_have_shapes_and_no_values():
    def body(comm):
        net = Ends()
        trainer = Trainer(net, SGD(lr=0.1), comm, loss=loss, sharding=3, **EACH)
        trainer.step(torch.ones(3, 4))
        p = net.first.mix
        assert tuple(p.shape) == (4, 4) and p.numel() == 16 and p.grad is None and p.requires_grad
        assert isinstance(p, torch.nn.Parameter) and "Parameter" in repr(p) and p in {p}
        for use in (net.state_dict, lambda: copy.deepcopy(net), lambda: p + 1):
            with pytest.raises(cc.CollectiveError, match=r"within trainer\.gathered"):
                use()
        with trainer.gathered() as whole:
            assert type(p) is torch.nn.Parameter
            state = {name: x.numpy() for name, x in whole.state_dict().items()}
            whole(torch.ones(3, 4))
            assert type(p) is torch.nn.Parameter
        for name, x in trainer.parameters().items():
            assert np.array_equal(state[name], x)  # what the user took stays
        with pytest.raises(cc.CollectiveError, match=r"within trainer\.gathered"):
            net.state_dict()
        trainer.step(torch.ones(3, 4))
        trainer.close()
        with pytest.raises(cc.CollectiveError, match=r"release\(\) gives"):
            net.state_dict()

    cc.run_threads(2, body, timeout=20)


# ---- parameters that are used in some steps ------------------------------------------------------

USED = [["a", "c"], ["b", "c"], ["a", "b"], ["a"], ["a"], ["c", "b", "a"]]


def some_of(comm, stage, absent, accumulate=1):
    now = [None]

    def emits(params, batch, emit):
        for name in reversed(now[0]):
            emit(name, params[name] + batch[0].mean())
        return 1.0

    trainer = Trainer(
        emits, SGD(lr=0.5), comm, params={name: np.zeros(4) for name in "abc"}, sharding=stage,
        find_unused=True, bucket_bytes=8, first_bucket_bytes=8, accumulate=accumulate,
    )  # fmt: skip
    for step, now[0] in enumerate(USED):
        parts = [(np.full(2, 1.0 + i),) for i in range(accumulate)]
        if comm.rank and step in absent:
            parts = [*parts[1:], None]
        trainer.step(parts)
    return {name: x.tobytes() for name, x in trainer.parameters().items()}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("absent", [(), (0,), (1,), (2, 3), (4, 5)])
def test_a_rank_without_data_where_parameters_are_not_always_used(absent, accumulate):
    found = [
        cc.run_threads(3, some_of, stage, absent, accumulate, timeout=10) for stage in (0, 2, 3)
    ]
    assert found[0] == found[1] == found[2]


# ---- calls that would change what somebody looks at ----------------------------------------------


def plus_one(params, batch, emit):
    emit("w", params["w"] + 1)
    return 1.0


def function_trainer(comm, stage):
    return Trainer(plus_one, SGD(lr=0.5), comm, params={"w": np.zeros(4)}, sharding=stage)


def test_steps_and_loads_while_all_is_gathered(tmp_path):
    """`save` may be called there, and one block may be in another."""
    pytest.importorskip("safetensors")

    def body(comm):
        trainer = function_trainer(comm, 3)
        trainer.step(np.ones(2))
        with trainer.gathered() as whole:
            trainer.save(tmp_path / "run")
            for call in (lambda: trainer.step(np.ones(2)), lambda: trainer.load(tmp_path / "run")):
                with pytest.raises(cc.CollectiveError, match=r"inside of gathered\(\)"):
                    call()
            with pytest.raises(cc.CollectiveError, match=r"release\(\) inside of gathered\(\)"):
                trainer.release()
            with trainer.gathered() as again:
                assert again["w"].tolist() == [-0.5] * 4
            assert whole["w"].tolist() == [-0.5] * 4
        trainer.load(tmp_path / "run")
        trainer.step(np.ones(2))
        return trainer.parameters()["w"].tolist()

    assert cc.run_threads(2, body, timeout=20) == [[-0.75] * 4] * 2


def test_a_checkpoint_with_other_buckets(tmp_path):
    """Loaded after steps in which buckets were fetched ahead: there are fewer of them now."""
    pytest.importorskip("safetensors")
    given = {f"w{i}": np.full(size, 1.0) for i, size in enumerate([10, 300, 10, 300, 10, 300])}

    def function(params, batch, emit):
        for name in ("w5", "w0", "w2", "w4", "w1", "w3"):
            emit(name, params[name])
        return 1.0

    def body(comm):
        def trained(stage, steps):
            trainer = Trainer(
                function, SGD(lr=0.1), comm, params=given, sharding=stage,
                bucket_bytes=2400, first_bucket_bytes=2400,
            )  # fmt: skip
            for _ in range(steps):
                trainer.step(np.ones(1))
            return trainer

        trained(0, 2).save(tmp_path)
        trainer = trained(3, 2)
        before = len(trainer.store.shards)
        trainer.load(tmp_path)
        assert len(trainer.store.shards) < before
        for _ in range(2):
            trainer.step(np.ones(1))
        wanted = trained(0, 4).parameters()
        return all((x == wanted[n]).all() for n, x in trainer.parameters().items())

    assert cc.run_threads(2, body, timeout=20) == [True] * 2


@pytest.mark.parametrize("stage", range(3))
def test_steps_while_all_is_there_under_other_stages(stage):
    def body(comm):
        trainer = function_trainer(comm, stage)
        with trainer.gathered() as whole:
            trainer.step(np.ones(2))
            return whole["w"].tolist()

    assert cc.run_threads(2, body, timeout=20) == [[-0.5] * 4] * 2


@pytest.mark.parametrize("end", ["release", "close"])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_trainer_that_is_closed_takes_no_steps(stage, end, tmp_path):
    pytest.importorskip("safetensors")

    def body(comm):
        trainer = Trainer(Chain(), SGD(lr=0.1), comm, loss=loss, sharding=stage)
        trainer.step(torch.ones(3, 4))
        trainer.save(tmp_path / "run")
        getattr(trainer, end)()
        steps = functools.partial(trainer.step, torch.ones(3, 4))
        for call in (steps, functools.partial(trainer.load, tmp_path / "run")):
            with pytest.raises(cc.CollectiveError, match=r"after its close\(\) or release\(\)"):
                call()

    cc.run_threads(2, body, timeout=20)


@pytest.mark.parametrize(("bound", "wanted"), [(0, 32), (8, 8), (100, 32)])
def test_gathers_take_no_more_of_a_gpu_than_helps(bound, wanted):
    """Nor the memory that goes with it: they are all beside a stream that computes."""
    from collectives.train.gathering import ranks_of_gathers

    def body(comm):
        gathers = ranks_of_gathers(comm, {"cpu"})
        assert gathers.size == comm.size
        return gathers.max_blocks

    assert cc.run_threads(2, body, timeout=60, max_blocks=bound) == [wanted] * 2
