"""The extension for torch, on a device that only writes down what is asked of it."""

from __future__ import annotations

import gc
import importlib.util
import subprocess
import sys
import sysconfig
import threading
import warnings
import weakref
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from with_torch import torch

import collectives
from collectives.torch import extension, short, streams, tracks
from collectives.torch.tracks import Plan

pytestmark = pytest.mark.torch

dist = torch.distributed
AllgatherOptions = dist.distributed_c10d.AllgatherOptions
ReduceScatterOptions = dist.distributed_c10d.ReduceScatterOptions
MAIN, SIDE, HANDLE = 0, 7, 700  # streams of torch; the handle of the side stream


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The module of pretended_gpu.cpp."""
    from torch.utils import cpp_extension

    built = extension.load(torch.__version__)
    assert built is not None, "no extension for this torch is built: make test TORCH=1 builds it"
    source = Path(__file__).with_name("pretended_gpu.cpp")
    module = tmp_path_factory.mktemp("module") / "pretended_gpu.so"
    include = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    libraries = cpp_extension.library_paths()
    subprocess.run(
        ["g++", "-std=c++20", "-O0", "-fPIC", "-shared", "-fvisibility=hidden", "-w",
         *(f"-I{path}" for path in include), source, "-o", module,
         *(f"-L{path}" for path in libraries), "-ltorch_python", "-ltorch_cpu", "-lc10"],
        check=True,
    )  # fmt: skip
    spec = importlib.util.spec_from_file_location("pretended_gpu", module)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


class Group:
    """A process group, as far as the extension looks at it."""

    _coalesced = None

    def __init__(self, gpu: Any) -> None:
        self._gpu = gpu
        self.planned: list[Any] = []
        self.slow_calls: list[Any] = []
        self.taken: list[Any] = []
        self.track = SimpleNamespace(_lock=threading.Lock(), calls=0)
        self.has_plan = True

    def plan(self, target: Any, source: Any, op: Any, beside: bool) -> Any:
        self.planned.append((target.numel(), source.numel(), target.dtype, op, beside))
        if not self.has_plan:
            return None
        stream = SimpleNamespace(stream_id=SIDE, device_index=0, device_type=self._gpu.device_type)
        arguments = ("options", HANDLE, 2, 3, 4, 5, None, None, *range(8, 15))
        return (stream if beside else None, self.core, arguments)

    def core(self, *arguments: Any) -> None:
        assert self.track._lock.locked()
        self.taken.append(arguments)
        self._gpu.say("call")

    def slow(self, *arguments: Any, **named: Any) -> str:
        self.slow_calls.append((arguments, named))
        return "slow"

    def method(self, kind: str) -> Any:
        native = extension.load(torch.__version__)
        return native.Method(kind, self, Group.plan, Group.slow, self.track, self.stream_handle)

    @staticmethod
    def stream_handle(device: int) -> int:
        return 10 + device


@pytest.fixture
def group(gpu: Any) -> Any:
    gpu.said()
    made = Group(gpu)
    yield made
    gpu.set_current(MAIN)
    assert gpu.with_gil() == 0  # where a stream has no room CUDA waits


def tensor(gpu: Any, count: int = 4, dtype: Any = torch.float32) -> Any:
    host = torch.zeros(count, dtype=dtype)
    there = gpu.there(host)
    there.on_host = host
    return there


def options(asynchronous: bool = True, op: Any = dist.ReduceOp.SUM) -> Any:
    made = dist.AllreduceOptions()
    made.asyncOp, made.reduceOp = asynchronous, op
    return made


def without_numbers(said: list[str]) -> list[str]:
    """Events by the order in which they come, from a."""
    names: dict[str, str] = {}
    lines = []
    for line in said:
        before, found, number = line.partition("event ")
        lines.append(before + names.setdefault(number, "abcdefgh"[len(names)]) if found else line)
    return lines


def test_a_call_beside_waits_for_the_current_stream_and_is_waited_for(gpu: Any, group: Any) -> None:
    x = tensor(gpu)
    work = group.method("all_reduce")([x], options())
    assert group.track.calls == 1
    assert group.taken == [
        ("options", HANDLE, 2, 3, 4, 5, x.on_host.data_ptr(), x.on_host.data_ptr(), *range(8, 15))
    ]
    gpu.set_current(3)
    assert work.wait(timedelta(seconds=1))
    assert without_numbers(gpu.said()) == [
        "stream 0: a", "stream 7 waits for a", "call", "stream 7: b", "stream 7 uses 4 elements",
        "stream 3 waits for b",
    ]  # fmt: skip
    assert isinstance(work, dist.Work)
    assert [t.data_ptr() for t in work.result()] == [x.data_ptr()]


def test_a_work_is_completed_when_the_gpu_has_ended_it(gpu: Any, group: Any) -> None:
    work = group.method("all_reduce")([tensor(gpu)], options())
    (ended,) = [line for line in gpu.said() if line.startswith("stream 7: ")]
    assert not work.is_completed() and not work.is_success()
    gpu.end(int(ended.split()[-1]))
    assert work.is_completed() and work.is_success()
    assert work.exception() is None
    with pytest.raises(RuntimeError, match="only a recv"):
        work._source_rank()


def test_a_future_is_of_a_list_and_its_streams_wait(gpu: Any, group: Any) -> None:
    x = tensor(gpu)
    work = group.method("all_reduce")([x], options())
    gpu.said()
    future = work.get_future()
    assert without_numbers(gpu.said()) == ["stream 7: a"]
    assert future.done() and gpu.said() == []
    assert [t.data_ptr() for t in future.wait()] == [x.data_ptr()]
    assert without_numbers(gpu.said()) == ["stream 0 waits for a"]
    seen: list[Any] = []
    future.then(lambda f: seen.extend((f.value()[0].data_ptr(), tracks.in_callback())))
    # Within `then`, without a key: so callbacks come in the program's order, and so do their calls.
    assert seen == [x.data_ptr(), False]
    assert "stream 99 waits for a" in without_numbers(gpu.said())


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_calls_with_an_output_and_an_input(gpu: Any, group: Any, kind: str) -> None:
    output, input = (tensor(gpu, 8), tensor(gpu, 4))
    opts = AllgatherOptions() if kind == "all_gather" else ReduceScatterOptions()
    opts.asyncOp = True
    group.method(kind)(output, input, opts)
    assert [call[6:8] for call in group.taken] == [
        (input.on_host.data_ptr(), output.on_host.data_ptr())
    ]
    reduces = dist.ReduceOp.SUM if kind == "reduce_scatter" else None
    assert group.planned == [(8, 4, torch.float32, reduces, True)]
    assert gpu.said()[-2:] == ["stream 7 uses 8 elements", "stream 7 uses 4 elements"]


def test_a_call_that_torch_waits_for_goes_on_the_current_stream(gpu: Any, group: Any) -> None:
    method = group.method("all_reduce")
    work = method([tensor(gpu)], options(asynchronous=False))
    assert work.wait() and work.is_completed()
    assert gpu.said() == ["call"]
    assert group.taken[0][1] == 10  # the handle of the current stream, asked for each time
    gpu.set_current(5)
    future = work.get_future()
    assert without_numbers(gpu.said()) == ["stream 0: a"]  # the stream of the call
    future.wait()
    assert [line.partition(" waits")[0] for line in gpu.said()] == ["stream 5"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_gather_out_of_another_place_goes_the_long_way(gpu: Any, group: Any, rank: int) -> None:
    group._rank = rank
    gather, output = group.method("all_gather"), tensor(gpu, 8)
    for begin in (0, 2, 4):
        given = gpu.there(output.on_host[begin : begin + 4])
        assert given.data_ptr() == output.data_ptr() + 4 * begin
        gather(output, given, AllgatherOptions())
    assert len(group.slow_calls) == 2 and len(group.taken) == 1


def test_a_plan_of_a_call_on_the_current_stream_is_of_that_stream(gpu: Any, group: Any) -> None:
    """It may be one beside another, or not."""
    method, x = group.method("all_reduce"), tensor(gpu)
    for stream, asynchronous, plans in ((3, False, 1), (4, False, 2), (3, False, 2),
                                        (3, True, 3), (4, True, 3)):  # fmt: skip
        gpu.set_current(stream)
        method([x], options(asynchronous))
        assert len(group.planned) == plans


def test_a_plan_is_asked_once_for_each_kind_of_call(gpu: Any, group: Any) -> None:
    method = group.method("all_reduce")
    kinds = [
        (4, torch.float32, dist.ReduceOp.SUM, True),
        (5, torch.float32, dist.ReduceOp.SUM, True),
        (4, torch.int32, dist.ReduceOp.SUM, True),
        (4, torch.float32, dist.ReduceOp.MAX, True),
        (4, torch.float32, dist.ReduceOp.SUM, False),
    ]
    for _ in range(2):
        for count, dtype, op, beside in kinds:
            method([tensor(gpu, count, dtype)], options(beside, op))
    assert group.planned == [(n, n, dtype, op, beside) for n, dtype, op, beside in kinds]
    assert group.track.calls == len(group.taken) == 2 * len(kinds)


def test_what_goes_the_long_way(gpu: Any, group: Any) -> None:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    method, gather = group.method("all_reduce"), group.method("all_gather")
    x, opts, gathers = tensor(gpu), options(), AllgatherOptions()
    premul, square = dist._make_nccl_premul_sum(2.0), torch.zeros(4, 4)
    under_way = AsyncCollectiveTensor(x)
    host = torch.zeros(8)
    host.untyped_storage().resize_(0)
    freed = gpu.there(host)
    asked: list[tuple[Any, Any, dict[str, Any]]] = [
        (method, ([x, x], opts), {}),  # several
        (method, ([x],), {}),  # no options
        (method, (x, opts), {}),  # no list
        (method, ([x], opts), {"timeout": 1}),
        (method, ([torch.zeros(4)], opts), {}),  # on the host
        (method, ([gpu.there(square.t())], opts), {}),  # strides
        (method, ([under_way], opts), {}),  # no memory of its own
        (method, ([freed], opts), {}),
        (method, ([x], options(op=premul)), {}),
        (method, ([3], opts), {}),
        (gather, (x, x), {}),
        (gather, (x, torch.zeros(4), gathers), {}),
        (gather, (x, tensor(gpu, 4, torch.int32), gathers), {}),
        (gather, (x, x, opts), {}),
    ]
    for function, arguments, named in asked:
        assert function(*arguments, **named) == "slow"
    for (_, arguments, named), (got, also) in zip(asked, group.slow_calls, strict=True):
        assert all(a is b for a, b in zip(got, arguments, strict=True)) and also == named
    assert not group.planned
    group._coalesced = []
    assert method([x], opts) == "slow" and not group.planned
    group._coalesced, group.has_plan = None, False
    assert method([x], opts) == method([x], opts) == "slow"
    assert len(group.planned) == 2  # none is no plan: it is asked again
    assert group.taken == [] and group.track.calls == 0


def test_what_a_call_raises_comes_out_and_leaves_the_lock(gpu: Any, group: Any) -> None:
    def fails(*_: Any) -> None:
        raise collectives.PeerDiedError("rank 1 died", rank=0)

    group.core = fails
    method = group.method("all_reduce")
    for _ in range(2):
        with pytest.raises(collectives.PeerDiedError, match="rank 1 died"):
            method([tensor(gpu)], options())
    assert not group.track._lock.locked()


def test_the_profiler_sees_a_call(gpu: Any, group: Any) -> None:
    method = group.method("all_reduce")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        method([tensor(gpu)], options())
    assert "collectives:all_reduce" in [event.name for event in profile.events()]


def test_nothing_is_kept(gpu: Any, group: Any) -> None:
    method = group.method("all_reduce")
    x = tensor(gpu)
    before = gpu.living_events()
    works = [method([x], options()) for _ in range(3)]
    futures = [work.get_future() for work in works]
    assert gpu.living_events() == before + 7  # one for all calls, two for each
    del works, futures
    assert gpu.living_events() == before + 1


def test_a_call_of_a_group_that_is_gone_raises(gpu: Any) -> None:
    group = Group(gpu)
    method, gone = group.method("all_reduce"), weakref.ref(group)
    del group
    gc.collect()
    assert gone() is None
    with pytest.raises(RuntimeError, match="the process group is gone"):
        method([tensor(gpu)], options())


def test_dynamo_does_not_look_into_plans(
    gpu: Any, group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a compiled program makes the first call of a size."""
    compiling = []

    def plan(*_: Any) -> Plan:
        compiling.append(torch.compiler.is_compiling())
        return Plan(group.core, ("options", HANDLE, 2, 3, 4, 5, None, None, *range(8, 15)))

    monkeypatch.setattr(short, "_plan", plan)
    planner = partial(short._plan_for_extension, "all_reduce")
    native = extension.load(torch.__version__)
    method = native.Method("all_reduce", group, planner, Group.slow, group.track, lambda _: 10)
    x, opts = tensor(gpu), options(asynchronous=False)

    @torch.compiler.disable(recursive=False)  # as torch.distributed is
    def call() -> None:
        method([x], opts)

    def step(y: Any) -> Any:
        call()
        return y * 2

    torch.compile(step, backend="eager")(torch.zeros(3))
    assert group.track.calls == 1 and compiling == [False]


def test_callbacks_of_the_futures_of_calls_in_python_have_no_keys(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run in the program's order on all ranks, so their calls are some of the program's."""
    monkeypatch.setattr(streams, "with_stream", lambda stream, do: do())
    x = tensor(gpu)
    seen: list[Any] = []
    future = streams.StreamWork([x], x.device, stream=object()).get_future()
    child = future.then(lambda f: seen.append((tracks.in_callback(), f.value()[0] is x)) or 3)
    assert seen == [(False, True)] and child.wait() == 3


@pytest.mark.parametrize(
    ("version", "wanted", "found", "why_not"),
    [
        ("2.10.0+cpu", "AUTO", "", "older than 2.11"),
        ("2.10.0+cpu", "ON", "", "older than 2.11"),
        ("2.11.0a0+git1", "AUTO", "2_11", ""),
        ("2.14.1", "AUTO", "2_14", ""),
        ("2.15.0", "AUTO", "", "newer than 2.14"),
        ("3.0.1", "ON", "3_0", ""),
    ],
)
def test_a_build_takes_a_torch_that_this_backend_knows(
    tmp_path: Path, version: str, wanted: str, found: str, why_not: str
) -> None:
    package = tmp_path / "torch"
    (package / "include").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "version.py").write_text(f"__version__ = '{version}'\n")
    finder = Path(__file__).resolve().parents[2] / "csrc" / "torch" / "find_torch.py"
    said = subprocess.run(
        [sys.executable, finder, wanted], env={"PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert said.stdout == (f"{found};{package}" if found else "")
    assert said.returncode == (not found)
    assert why_not in said.stderr and bool(said.stderr) == (not found)


def test_an_extension_for_another_python_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("_torch_2_98.cpython-39-x86_64-linux-gnu.so", "_torch_2_99.so", "_torch_2_9.so"):
        (tmp_path / name).touch()
    monkeypatch.setattr(collectives, "__path__", [str(tmp_path)])
    assert extension.built_for() == ["2.9", "2.99"]
    with pytest.warns(RuntimeWarning, match=r"2\.99, and that cannot be loaded: .*_torch_2_99\.so"):
        assert extension.load.__wrapped__("2.99.1") is None


def test_an_extension_for_another_torch_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "built_for", lambda: ["2.11", "2.12"])
    with pytest.warns(RuntimeWarning, match=r"built for torch 2\.11, 2\.12, and this is 2\.99\.1"):
        assert extension.load.__wrapped__("2.99.1+cpu") is None
    monkeypatch.setattr(extension, "built_for", list)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert extension.load.__wrapped__("2.99.1+cpu") is None
