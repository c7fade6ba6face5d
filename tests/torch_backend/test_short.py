"""How calls on CUDA tensors get their short way, on stand-ins for a group and the extension."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from with_torch import torch

import collectives
from collectives.array import Stream
from collectives.device import DeviceEngine
from collectives.torch import extension, short, tracks
from collectives.torch.group import CollectivesGroup
from collectives.torch.tracks import MainTrack, Plan, Step

pytestmark = pytest.mark.torch

ReduceOp = torch.distributed.ReduceOp
BESIDE = Stream(700, 0, beside=True)


class Track:
    """Notes the steps that it shall plan."""

    plans = True

    def __init__(self) -> None:
        self.planned: list[tuple[Step, Stream]] = []

    def plan(self, step: Step, stream: Stream) -> Plan:
        self.planned.append((step, stream))
        return Plan(print, (step.collective,))


class Group:
    """A group of two, for tensors on the host as if they were on a GPU."""

    _size, _rank = 2, 0
    _coalesced = None
    _all_reduce_call = CollectivesGroup._all_reduce_call
    _all_gather_call = CollectivesGroup._all_gather_call
    _reduce_scatter_call = CollectivesGroup._reduce_scatter_call
    _add, _divide = CollectivesGroup._add, CollectivesGroup._divide

    def __init__(self) -> None:
        self._main = Track()
        self._sides = SimpleNamespace(
            of=lambda device: SimpleNamespace(stream="side", for_calls=BESIDE)
        )

    def allreduce(self) -> str:
        return "slow"

    def all_gather_single(self) -> str:
        return "slow"

    def reduce_scatter_single(self) -> str:
        return "slow"


def planned(
    kind: str, target: Any, source: Any, op: Any = None, beside: bool = True
) -> tuple[Any, Step, Stream]:
    group = Group()
    plan: Any = short._plan_for_extension(kind, group, target, source, op, beside)
    if plan is None:
        assert group._main.planned == []
        return None, Step("", 0, 0, 0), BESIDE
    ((step, stream),) = group._main.planned
    return plan, step, stream


def test_plans_are_of_the_calls_that_the_long_way_makes() -> None:
    x, whole = torch.zeros(6), torch.zeros(12)
    plan, step, stream = planned("all_reduce", x, x, ReduceOp.MAX)
    assert plan == ("side", print, ("all_reduce",)) and stream is BESIDE
    assert step == Step(
        "all_reduce", collectives.calls.DTYPES["float32"], x.data_ptr(), x.data_ptr(), 6,
        op=collectives.calls.OPS["max"], nbytes=24,
    )  # fmt: skip
    _, step, _ = planned("all_gather", whole, x)
    assert (step.out_blocks, step.in_blocks, step.nbytes) == (6, None, 48)
    assert (step.source, step.target) == (x.data_ptr(), whole.data_ptr())
    _, step, _ = planned("reduce_scatter", x, whole, ReduceOp.SUM)
    assert (step.out_blocks, step.in_blocks, step.nbytes) == (None, 6, 48)
    assert (step.source, step.target) == (whole.data_ptr(), x.data_ptr())


@pytest.mark.parametrize("priority", [0, -1])
def test_a_call_that_torch_waits_for_is_planned_for_the_current_stream(
    monkeypatch: pytest.MonkeyPatch, priority: int
) -> None:
    current = SimpleNamespace(cuda_stream=5, priority=priority)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    x = torch.zeros(6)
    plan, _, stream = planned("all_reduce", x, x, ReduceOp.SUM, beside=False)
    assert plan == (None, print, ("all_reduce",))
    assert stream.handle == 5 and stream.beside == (priority < 0)


def test_what_torch_must_do_something_for_has_no_plan() -> None:
    whole = torch.zeros(6, dtype=torch.int32)
    assert planned("all_reduce", whole, whole, ReduceOp.AVG)[0] is None  # a division of integers
    strided = torch.zeros(4, 4).t()
    assert planned("all_reduce", strided, strided, ReduceOp.SUM)[0] is None


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_wrong_sizes_raise_when_planned(kind: str) -> None:
    with pytest.raises(collectives.ArrayError):
        planned(kind, torch.zeros(7), torch.zeros(7), ReduceOp.SUM)


def test_the_extension_takes_the_place_of_methods_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def method(kind: str, group: Any, plan: Any, slow: Any, track: Any, stream: Any) -> Any:
        made.append(kind)
        assert slow(group) == "slow" and track is group._main and callable(stream)
        return lambda: kind

    loaded = SimpleNamespace(Method=method)
    monkeypatch.setattr(extension, "load", lambda version: loaded)
    group, ways = Group(), short.ShortWays()
    for _ in range(2):
        ways.use_extension(group)
    assert made == ["all_reduce", "all_gather", "reduce_scatter"]
    assert group.allreduce() == "all_reduce"
    assert group.all_gather_single() == group.__dict__["_allgather_base"]() == "all_gather"
    assert group.reduce_scatter_single() == "reduce_scatter"
    ways.leave_extension(group)
    assert group.allreduce() == "slow" and "_allgather_base" not in group.__dict__


def test_where_calls_have_no_plans_the_extension_is_not_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between nodes: each call would ask for a plan in vain."""
    loaded: list[str] = []
    monkeypatch.setattr(extension, "load", loaded.append)
    group, ways = Group(), short.ShortWays()
    group._main.plans = False
    ways.use_extension(group)
    assert ways.all_reduce(group, torch.zeros(6), None) is None
    assert loaded == [] and group._main.planned == [] and group.allreduce() == "slow"
    group._main.plans = True  # once the engine is there
    ways.use_extension(group)
    assert loaded == [torch.__version__]


def test_without_an_extension_methods_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "load", lambda version: None)
    group = Group()
    short.ShortWays().use_extension(group)
    assert group.allreduce() == "slow"


class OnGpu(torch.Tensor):
    def record_stream(self, stream: Any) -> None:
        assert stream == "side"


def test_plans_are_kept_and_only_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Python; the extension has a bound of its own."""
    monkeypatch.setattr(short, "_MOST", 3)
    monkeypatch.setattr(short, "current_stream", lambda ordinal: 1)
    monkeypatch.setattr(short, "StreamWork", lambda *arguments: arguments)
    group, ways = Group(), short.ShortWays()
    core = SimpleNamespace(begin=lambda current: None, end=lambda: "end")
    side = SimpleNamespace(stream="side", for_calls=BESIDE, core=core)
    group._sides = SimpleNamespace(of=lambda device: side)
    group._main.put = lambda plan, source, target: None
    sizes = [1, 2, 1, 3, 2, 4, 4, 1]
    for count in sizes:
        x = torch.zeros(count).as_subclass(OnGpu)
        opts = SimpleNamespace(reduceOp=ReduceOp.SUM)
        assert ways.all_reduce(group, x, opts) == ([x], x.device, "side", "end")
        assert len(ways._plans) <= 3
    assert [step.elements for step, _ in group._main.planned] == [1, 2, 3, 4, 1]


def track(algorithm: str) -> Any:
    """A track whose GPU engine only notes calls."""
    engine = DeviceEngine.__new__(DeviceEngine)
    engine.device = 0
    engine.options = lambda *arguments: arguments
    taken: list[Any] = []
    engine.call = lambda *arguments: taken.append(arguments)
    comm = SimpleNamespace(
        _table=lambda collective: [],
        _device=engine,
        _checked_algorithm=lambda collective, nbytes: algorithm,
    )
    made: Any = MainTrack(comm)
    made.taken = taken
    return made


def test_a_track_plans_and_makes_calls() -> None:
    made = track("ring")
    step = Step("all_reduce", 3, 10, 11, 6, op=2, factor=0.5, nbytes=24, device="cuda:0")
    plan = made.plan(step, BESIDE)
    known, number = ("ring", "all_reduce", 24, True), collectives.calls.COLLECTIVES["all_reduce"]
    after = (6, None, None, 0, 0, 0.5, 0.0)
    assert plan.arguments == (known, 700, number, 3, 2, 0, 10, 11, *after)
    made.put(plan, 100, 200)
    assert made.taken == [(known, 700, number, 3, 2, 0, 100, 200, *after)]
    assert made.next_number() == 1  # of calls in host memory alone


def test_what_a_track_does_not_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step("all_reduce", 3, 10, 11, 6, nbytes=24, device="cuda:0")
    assert track("ring").plan(step, BESIDE._replace(ordinal=1)) is None  # another GPU than ours
    no_engine = track("ring")
    assert no_engine.plans
    no_engine.comm._device = None
    assert not no_engine.plans and no_engine.plan(step, BESIDE) is None
    monkeypatch.setattr(tracks, "is_written", lambda algorithm: algorithm == "of_a_user")
    assert track("of_a_user").plan(step, BESIDE) is None
