"""What a call on CUDA tensors does to streams, on stand-ins for them: no GPU is needed."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from with_torch import torch

from collectives import _core
from collectives.array import Stream
from collectives.torch import base, streams, tensors, tracks
from collectives.torch.group import CollectivesGroup
from collectives.torch.tracks import Step

pytestmark = pytest.mark.torch


MAIN = 1  # the handle of the stream that is current at first
DEVICE = torch.device("cuda", 1)


class Log:
    """The order of what happens, and the stream on which it does."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.current = MAIN
        self.priority = 0  # of the current stream

    def name(self, handle: int) -> str:
        return {MAIN: "main", 2: "another"}.get(handle, f"side of {handle - 100}")

    def say(self, what: str) -> None:
        self.said.append(f"{self.name(self.current)}: {what}")


class Mark:
    """A place in a stream."""

    def __init__(self, log: Log, name: str) -> None:
        self._log, self._name = log, name
        self.ended = False

    def hold(self, stream: int) -> None:
        self._log.said.append(f"{self._log.name(stream)} waits for the end on {self._name}")

    def done(self) -> bool:
        return self.ended


class SideStream:
    """The core's, of a GPU, on a stream that is torch's: it outlives the group."""

    def __init__(self, log: Log, ordinal: int, stream: int) -> None:
        assert stream == 100 + ordinal
        self._log = log
        self.handle = stream

    def begin(self, current: int) -> Mark:
        self._log.said.append(f"{self._log.name(self.handle)} waits for {self._log.name(current)}")
        return Mark(self._log, self._log.name(current))

    def end(self) -> Mark:
        name = self._log.name(self.handle)
        self._log.said.append(f"{name}: end")
        return Mark(self._log, name)


def slowdown(log: Log, ordinal: int, computing: int, waiting: int) -> float:
    """The core's: no stream disturbs the one that is current when its side is made."""
    assert (ordinal, computing) == (waiting - 100, log.current)
    return 1.0


class OnGpu:
    """A tensor, as far as its stream goes."""

    def __init__(self) -> None:
        self.recorded: list[str] = []

    def record_stream(self, stream: Any) -> None:
        self.recorded.append(stream.name)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    log = Log()

    def of_torch(device: torch.device) -> Any:
        handle = 100 + device.index
        return SimpleNamespace(cuda_stream=handle, name=log.name(handle))

    def with_stream(stream: Any, do: Callable[[], None]) -> None:
        before, log.current = log.current, stream.cuda_stream
        do()
        log.current = before

    def current_stream(device: Any) -> Any:
        return SimpleNamespace(
            cuda_stream=log.current, name=log.name(log.current), priority=log.priority
        )

    monkeypatch.setattr(_core, "SideStream", partial(SideStream, log))
    monkeypatch.setattr(_core, "slowdown", partial(slowdown, log))
    monkeypatch.setattr(torch.cuda, "Stream", of_torch)
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(streams, "current_stream", lambda ordinal: log.current)
    monkeypatch.setattr(streams, "with_stream", with_stream)
    monkeypatch.setattr(
        streams, "_tensors", lambda held: [t for part in held for t in part if t is not None]
    )
    return log


def group(log: Log) -> Any:
    """A process group whose track only notes what it is given."""

    def call(step: Step, stream: Stream) -> None:
        assert stream.beside == (stream.handle != MAIN or log.priority < 0)
        log.said.append(f"{log.name(stream.handle)}: {step.collective}")

    track = SimpleNamespace(call=call)
    made = SimpleNamespace(_main=track, _sides=streams.SideStreams(), _note=lambda work: work)
    made._short = SimpleNamespace(use_extension=lambda group: None)
    made.make = lambda call, *arguments: base.BaseGroup._make_on_gpu(made, call, DEVICE, *arguments)
    return made


def a_call(log: Log, used: list[Any]) -> Any:
    call = tensors.Call(None)
    call.device = DEVICE
    call.steps.append(Step("all_reduce", 0, 0, 0, device=DEVICE))
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


def test_a_stream_of_high_priority_runs_beside_another(log: Log) -> None:
    """As those of FSDP do, which puts calls there that it waits for."""
    assert not streams.stream_of_caller(DEVICE).beside
    log.priority = -1
    assert streams.stream_of_caller(DEVICE) == Stream(MAIN, 1, beside=True)
    group(log).make(a_call(log, []), [], SimpleNamespace(asyncOp=False))
    assert log.said == ["main: all_reduce", "main: copy out of scratch"]


def test_an_asynchronous_call_goes_on_a_side_stream(log: Log) -> None:
    """It comes after what was on the current stream; copies out of scratch go with it."""
    x, scratch = OnGpu(), OnGpu()
    work = group(log).make(a_call(log, [scratch]), [x], SimpleNamespace(asyncOp=True))
    assert log.said == [
        "side of 1 waits for main",
        "side of 1: all_reduce",
        "side of 1: copy out of scratch",
        "side of 1: end",
    ]
    assert x.recorded == scratch.recorded == ["side of 1"]
    assert not work.is_completed()
    work._ended.ended = True
    assert work.is_completed()


def test_a_call_in_a_callback_of_a_future_has_no_key(log: Log) -> None:
    """So it does not count there, whichever way it goes."""
    made = group(log)
    made._make_on_gpu = partial(base.BaseGroup._make_on_gpu, made)
    with tracks.Callback(5):
        base.BaseGroup._make(made, a_call(log, []), [], SimpleNamespace(asyncOp=True))
        assert tracks.next_key(1) == tracks.mix(tracks.mix(5, 1), 1)


def test_wait_makes_the_stream_wait_that_is_current_then(log: Log) -> None:
    work = group(log).make(a_call(log, []), [], SimpleNamespace(asyncOp=True))
    log.current = 2
    work.wait()
    assert log.said[-1] == "another waits for the end on side of 1"


def test_a_group_has_one_side_stream_for_each_gpu(log: Log) -> None:
    sides = streams.SideStreams()
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    assert sides.of(first) is sides.of(first)
    assert sides.of(first) is not sides.of(second)


def test_a_future_is_completed_on_the_stream_of_its_call(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch records its events where a future is completed."""

    class Future:
        def __init__(self, *, devices: list[Any]) -> None:
            log.say(f"future on {devices}")

        def set_result(self, value: Any) -> None:
            log.say(f"complete with {value}")

    monkeypatch.setattr(torch.futures, "Future", Future)
    x = OnGpu()
    work = group(log).make(a_call(log, []), [x], None)
    before = len(log.said)
    assert work.get_future() is work.get_future()
    assert log.said[before:] == [
        f"main: future on {[DEVICE]}",
        f"side of 1: complete with {[x]}",
    ]


def test_a_barrier_comes_behind_what_is_on_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def current_stream(ordinal: int) -> Any:
        return SimpleNamespace(synchronize=lambda: said.append(f"GPU {ordinal}"))

    def behind(opts: Any = None) -> list[str]:
        said.clear()
        CollectivesGroup.barrier(made, opts)
        return said

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    main = SimpleNamespace(comm=SimpleNamespace(_device=None))
    made = SimpleNamespace(_main=main, _make=lambda *_: said.append("barrier"), device_id=None)
    assert behind() == ["barrier"]  # no GPU was used
    main.comm._device = SimpleNamespace(device=1)
    assert behind() == ["GPU 1", "barrier"]
    in_use: set[int] = set()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 4)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", in_use.__contains__, raising=False)
    opts = torch.distributed.BarrierOptions()
    opts.device_ids, opts.timeout = [1, 2], timedelta(0)
    assert behind(opts) == ["GPU 1", "GPU 2", "barrier"]
    made.device_id = torch.device("cuda", 0)
    assert behind(opts) == ["GPU 1", "GPU 2", "barrier"]
    opts.device_ids, opts.device = [], torch.device("cuda", 3)
    assert behind() == ["GPU 0", "GPU 1", "barrier"]
    assert behind(opts) == ["GPU 0", "GPU 1", "GPU 3", "barrier"]
    opts.device = torch.device("cuda")
    in_use.add(4)
    assert behind(opts) == ["GPU 0", "GPU 1", "GPU 4", "barrier"]


def test_a_group_knows_the_gpu_that_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """And so does a later one. torch must not take it for a group that can be split."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    dist, gpu = torch.distributed, torch.device("cuda", 0)
    dist.init_process_group(
        "collectives", store=dist.HashStore(), rank=0, world_size=1, device_id=gpu
    )
    try:
        assert dist.group.WORLD.device_id == gpu and dist.group.WORLD.bound_device_id is None
        assert dist.new_group([0]).device_id == gpu
    finally:
        dist.destroy_process_group()


def test_tensors_that_are_recorded() -> None:
    """All in nested lists that are on a GPU, and nothing else."""
    host = torch.ones(1)
    found = list(streams._tensors([[host, [host]], (), None, [torch.ones(0)]]))
    assert found == []
