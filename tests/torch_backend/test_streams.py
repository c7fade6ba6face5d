"""What a call on CUDA tensors does to streams, on stand-ins for them: no GPU is needed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from collectives.torch import base, streams, tensors  # noqa: E402
from collectives.torch.tracks import Step  # noqa: E402

pytestmark = pytest.mark.torch


class Log:
    """The order of what happens, and the stream on which it does."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.current = Stream(self, "main")

    def say(self, what: str) -> None:
        self.said.append(f"{self.current.name}: {what}")


class Stream:
    def __init__(self, log: Log, name: str) -> None:
        self.log, self.name = log, name

    def wait_stream(self, other: Stream) -> None:
        self.log.said.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Event) -> None:
        self.log.said.append(f"{self.name} waits for the event of {event.stream}")


class Event:
    stream = ""
    ended = False

    def record(self, stream: Stream) -> None:
        self.stream = stream.name
        stream.log.say("event")

    def query(self) -> bool:
        return self.ended


class OnGpu:
    """A tensor, as far as its stream goes."""

    def __init__(self) -> None:
        self.recorded: list[str] = []

    def record_stream(self, stream: Stream) -> None:
        self.recorded.append(stream.name)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    log = Log()

    @contextlib.contextmanager
    def stream(s: Stream) -> Iterator[None]:
        before, log.current = log.current, s
        yield
        log.current = before

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(log, f"side of {device}"))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: log.current)
    monkeypatch.setattr(
        streams, "_tensors", lambda held: [t for part in held for t in part if t is not None]
    )
    return log


def group(log: Log) -> Any:
    """A process group whose track only notes what it is given."""
    track = SimpleNamespace(call=lambda step: log.say(step.collective))
    made = SimpleNamespace(_main=track, _sides=streams.SideStreams(), _note=lambda work: work)
    made.make = lambda *arguments: base.BaseGroup._make_on_gpu(made, *arguments)
    return made


def a_call(log: Log, used: list[Any]) -> Any:
    call = tensors.Call(None)
    call.device = "cuda:1"
    call.steps.append(Step("all_reduce", 0, 0, 0, device="cuda:1"))
    call.after.append(lambda: log.say("copy out of scratch"))
    call.keep.extend(used)
    return call


def test_a_call_that_torch_waits_for_goes_on_the_current_stream(log: Log) -> None:
    x = OnGpu()
    work = group(log).make(a_call(log, [x]), [x], SimpleNamespace(asyncOp=False))
    assert log.said == ["main: all_reduce", "main: copy out of scratch"]
    work.wait()
    assert len(log.said) == 2
    assert work.is_completed() and x.recorded == []


def test_an_asynchronous_call_goes_on_a_side_stream(log: Log) -> None:
    """It comes after what was on the current stream; copies out of scratch go with it."""
    x, scratch = OnGpu(), OnGpu()
    work = group(log).make(a_call(log, [scratch]), [x], SimpleNamespace(asyncOp=True))
    assert log.said == [
        "side of cuda:1 waits for main",
        "side of cuda:1: all_reduce",
        "side of cuda:1: copy out of scratch",
        "side of cuda:1: event",
    ]
    assert x.recorded == scratch.recorded == ["side of cuda:1"]
    assert not work.is_completed()
    work._ended.ended = True
    assert work.is_completed()


def test_wait_makes_the_stream_wait_that_is_current_then(log: Log) -> None:
    work = group(log).make(a_call(log, []), [], SimpleNamespace(asyncOp=True))
    log.current = Stream(log, "another")
    work.wait()
    assert log.said[-1] == "another waits for the event of side of cuda:1"


def test_a_group_has_one_side_stream_for_each_gpu(log: Log) -> None:
    sides = streams.SideStreams()
    assert sides.of("cuda:0") is sides.of("cuda:0")
    assert sides.of("cuda:0") is not sides.of("cuda:1")


def test_a_future_is_completed_on_the_stream_of_its_call(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch records its events where a future is completed."""

    class Future:
        def __init__(self, key: int, devices: list[Any]) -> None:
            log.say(f"future on {devices}")

        def set_result(self, value: Any) -> None:
            log.say(f"complete with {value}")

    monkeypatch.setattr(streams, "Future", Future)
    x = OnGpu()
    work = group(log).make(a_call(log, []), [x], None)
    before = len(log.said)
    assert work.get_future() is work.get_future()
    assert log.said[before:] == [
        "main: future on ['cuda:1']",
        f"side of cuda:1: complete with {[x]}",
    ]


def test_tensors_that_are_recorded() -> None:
    """All in nested lists that are on a GPU, and nothing else."""
    host = torch.ones(1)
    found = list(streams._tensors([[host, [host]], (), None, [torch.ones(0)]]))
    assert found == []
