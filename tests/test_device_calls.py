"""Calls on device arrays as far as they go without a GPU: streams, bounds, arrays of torch and jax
on GPUs, and host and device arrays mixed over ranks. The engine and the libraries' GPU halves are
fakes; tests/gpu has the real ones.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from types import SimpleNamespace

import launch
import numpy as np
import pytest

import collectives as cc
from collectives import _core, array, calls, device, point_to_point, reductions
from collectives.array import Stream, View, stream_of
from collectives.array import device as device_arrays
from collectives.array.streams import cupy_stream
from collectives.errors import ArrayTypeError

# ---- streams -------------------------------------------------------------------------------------


class CudaStream:
    """What has nothing but the protocol of CUDA's Python packages."""

    def __cuda_stream__(self):
        return (0, 77)


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (0, (0, None)),
        (1234, (1234, None)),
        (np.uint64(5), (5, None)),
        (SimpleNamespace(ptr=42, device_id=1), (42, 1)),  # cupy.cuda.Stream
        (SimpleNamespace(ptr=0, device_id=-1), (0, None)),  # cupy.cuda.Stream.null
        (SimpleNamespace(cuda_stream=43, device=SimpleNamespace(index=3)), (43, 3)),  # torch
        (CudaStream(), (77, None)),
        (SimpleNamespace(__cuda_stream__=(0, 78)), (78, None)),
    ],
)
def test_streams_of_every_library(stream, expected):
    assert stream_of(stream, "all_reduce") == Stream(*expected)


def test_a_stream_that_was_looked_at_is_taken_as_it_is():
    stream = Stream(7, 0, beside=True)
    assert stream_of(stream, "all_reduce") is stream


def test_streams_for_cupy(monkeypatch):
    """Those of others, by the way that the release of cupy has: from 14 on the older one warns."""

    class Old:
        pass

    class New:
        @staticmethod
        def from_external(other):
            return stream_of(other, "cupy").handle

    for kind, made in ((Old, (9, 1)), (New, 9)):
        cuda = SimpleNamespace(Stream=kind, ExternalStream=lambda *given: given)
        monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
        assert cupy_stream(9, 1) == made


@pytest.mark.parametrize("stream", [True, -1, 1.5, "7", object(), threading.Lock()])
def test_what_is_no_stream(stream):
    with pytest.raises(ArrayTypeError, match=r"all_reduce: stream="):
        stream_of(stream, "all_reduce")


def device_calls(comm, x, out, stream):
    """Every collective with stream=, as (name, call)."""
    n = comm.size
    block, one = x[: len(x) // n], [len(x) // n] * n
    return {
        "all_reduce": lambda: comm.all_reduce(x, stream=stream),
        "all_reduce out": lambda: comm.all_reduce(x, out=out, stream=stream),
        "reduce": lambda: comm.reduce(x, stream=stream),
        "reduce_scatter": lambda: comm.reduce_scatter(x, out=out[: len(block)], stream=stream),
        "reduce_scatter_v": lambda: comm.reduce_scatter_v(
            x, one, out=out[: len(block)], stream=stream
        ),
        "broadcast": lambda: comm.broadcast(x, stream=stream),
        "all_gather": lambda: comm.all_gather(block, out=out, stream=stream),
        "all_gather_v": lambda: comm.all_gather_v(block, one, out=out, stream=stream),
        "gather": lambda: comm.gather(block, out=out, stream=stream),
        "gather_v": lambda: comm.gather_v(block, 0, one, out=out, stream=stream),
        "scatter": lambda: comm.scatter(x, out=out[: len(block)], stream=stream),
        "scatter_v": lambda: comm.scatter_v(x, one, out=out[: len(block)], stream=stream),
        "all_to_all": lambda: comm.all_to_all(x, out=out, stream=stream),
        "all_to_all_v": lambda: comm.all_to_all_v(x, one, one, out=out, stream=stream),
    }


def test_a_stream_for_host_arrays_is_an_error_in_words():
    def body(comm):
        for name, call in device_calls(comm, np.ones(8), np.ones(8), 0).items():
            with pytest.raises(cc.ArrayError, match="these are on the host; leave it out"):
                call()
            assert name
        with pytest.raises(cc.ArrayError, match="on the host"), comm.group():
            comm.all_reduce(np.ones(8), stream=5)
        with pytest.raises(cc.UnsupportedError, match="before any call on device arrays"):
            comm.barrier(stream=5)
        return comm.all_reduce(np.ones(1))[0]

    assert cc.run_threads(2, body) == [2.0, 2.0]


class Array:
    """A device array of a library that has nothing but the CUDA array interface."""

    def __init__(self, count=8, start=4096, ordinal=0, stream=11, readonly=False):
        self.count, self.start, self.dtype = count, start, np.dtype("float32")
        self.device = SimpleNamespace(id=ordinal)
        self.stream, self.readonly = stream, readonly

    def __len__(self):
        return self.count

    def __getitem__(self, part):
        begin, end, _ = part.indices(self.count)
        return Array(end - begin, self.start + 4 * begin, self.device.id, self.stream)

    @property
    def __cuda_array_interface__(self):
        return {
            "version": 3,
            "shape": (self.count,),
            "typestr": "<f4",
            "data": (self.start, self.readonly),
            "stream": self.stream,
        }


class Engine:
    """Notes what the GPU engine would be told."""

    def __init__(self, bootstrap, host, nodes, device, max_blocks=0, path="auto", by_host=False):
        self.host, self.device, self.max_blocks = host, device, max_blocks
        self.place = f"cuda:{device}"
        self.core = SimpleNamespace(
            close=lambda: None,
            abort=lambda reason, kind="aborted": None,
            known_calls=lambda *of: (lambda *call: None, lambda *how: None, lambda: 0),
        )
        self.calls, self.waits, self.moved = [], 0, []

    def transfer(self, transfers, stream):
        self.moved.append((transfers, stream))

    def run(self, arguments, algorithm, stream, *more):
        self.calls.append((_core.collectives[arguments[0]], algorithm, stream))

    def mark(self, stream):
        return stream

    def wait(self, timeout, mark=None):
        self.waits += 1
        return True

    def close(self):
        pass


@pytest.fixture
def engine(monkeypatch):
    """Device arrays are accepted, and their calls go to `Engine`."""
    monkeypatch.setattr(calls, "DeviceEngine", Engine)
    look = device_arrays.cuda_view

    def see(x, writable, what, gpu, where):
        return look(x, writable, what, True, where)

    monkeypatch.setattr(device_arrays, "cuda_view", see)


def alone(body, **more):
    """body(comm) on a world of one rank, whose GPU is 0."""
    return cc.run_threads(1, body, devices=[0], **more)[0]


def test_every_collective_takes_a_stream(engine):
    def body(comm):
        x, out = Array(), Array(start=8192)
        mine = SimpleNamespace(ptr=99, device_id=0)
        by_itself = device_calls(comm, x, out, None)
        by_itself.pop("all_to_all_v")  # not there yet on GPUs
        for name, call in by_itself.items():
            call()
            assert comm._device.calls[-1][::2] == (name.split()[0].removesuffix("_v"), 11)
        for name, call in device_calls(comm, x, out, mine).items():
            if name in by_itself:
                call()
                assert comm._device.calls[-1][::2] == (name.split()[0].removesuffix("_v"), 99)
        comm.barrier(stream=mine)
        assert comm._device.calls[-1] == ("barrier", "", 99)
        with comm.group():
            comm.all_reduce(x, stream=7)
        assert comm._device.calls[-1] == ("all_reduce", "direct_one_shot", 7)
        work = comm.all_reduce(x, stream=8, async_op=True)
        assert comm._device.calls[-1][2] == 8 and isinstance(work, cc.Work)
        assert comm._device.waits == 0, "nothing waits on the host"
        return True

    assert alone(body)


def test_a_group_keeps_the_arrays_of_its_calls(engine):
    def body(comm):
        x, out = Array(), Array(start=8192)
        alive = weakref.ref(x), weakref.ref(out)
        with comm.group():
            comm.all_reduce(x, out=out)
            del x, out
            gc.collect()
            assert all(array() is not None for array in alive)
        return len(comm._device.calls)

    assert alone(body) == 1


def test_what_cannot_be_is_told_before_anything_runs(engine):
    def body(comm):
        x = Array()
        wrong = [
            (lambda: comm.all_reduce(x, stream=SimpleNamespace(ptr=9, device_id=1)), "of cuda:1"),
            (lambda: comm.barrier(stream=SimpleNamespace(ptr=9, device_id=1)), "of cuda:1"),
            (lambda: comm.all_reduce(x, stream="9"), "stream= takes a CUDA stream"),
            (lambda: comm.all_reduce(Array(ordinal=1)), "is on cuda:1, .* works on cuda:0"),
            (lambda: comm.all_reduce(x, out=np.ones(8, np.float32)), "both must be on the same"),
            (lambda: comm.all_reduce(Array(readonly=True)), "read-only"),
            (lambda: comm.all_reduce(x, out=Array(readonly=True, start=1 << 16)), "read-only"),
            (lambda: comm.all_reduce(x, out=Array(start=4100)), "overlap in part"),
            (lambda: comm.all_reduce(x, op="band"), "band"),
            (lambda: comm.all_gather(x), "pass out="),
        ]
        for call, words in wrong:
            with pytest.raises(cc.CollectiveError, match=words):
                call()
        assert comm._device.calls == []
        return True

    assert alone(body)


# ---- max_blocks ----------------------------------------------------------------------------------


def test_max_blocks_is_inherited_and_reaches_the_engine(engine):
    def body(comm):
        twin, narrow, free = (
            comm.duplicate(),
            comm.split(0, max_blocks=2),
            comm.duplicate(max_blocks=0),
        )
        found = [c.max_blocks for c in (comm, twin, narrow, free)]
        narrow.all_reduce(Array())  # sets its engine up
        found.append(narrow._device.max_blocks)
        for c in (twin, narrow, free):
            c.close()
        return found, comm._device.max_blocks

    assert alone(body, max_blocks=8) == ([8, 8, 2, 0, 2], 8)


@pytest.mark.parametrize(("bound", "error"), [(-1, ValueError), (1.5, TypeError), ("8", TypeError)])
def test_max_blocks_of_the_wrong_kind(bound, error):
    with pytest.raises(error, match="max_blocks must be"):
        cc.init("solo", max_blocks=bound)
    with cc.init("solo") as comm, pytest.raises(error, match="max_blocks must be"):
        comm.duplicate(max_blocks=bound)


def test_the_smallest_bound_counts_for_all(monkeypatch):
    """The launch of every rank has as many blocks: what ranks ask for is agreed."""
    given = []

    def core(**more):
        given.append(more["max_blocks"])
        raise cc.UnsupportedError("far enough")

    monkeypatch.setattr(device._core, "device_count", lambda: (1, ""))
    monkeypatch.setattr(device._core, "DeviceCommunicator", core)

    def body(comm):
        bound = (0, 8, 32)[comm.rank]
        with pytest.raises(cc.UnsupportedError, match="far enough"):
            device.DeviceEngine(comm._bootstrap, comm._core, comm.nodes, 0, bound)

    cc.run_threads(3, body)
    assert given == [8, 8, 8]


# ---- torch and jax on GPUs -----------------------------------------------------------------------


@pytest.mark.torch
@pytest.mark.parametrize("raw", [True, False], ids=["raw", "object"])
def test_a_torch_tensor_goes_on_torchs_current_stream_of_its_gpu(raw, monkeypatch):
    torch = pytest.importorskip("torch")
    from collectives.array import torch_streams
    from collectives.array.torch_tensors import Torch

    asked = []

    def current_stream(ordinal):
        asked.append(ordinal)
        return SimpleNamespace(cuda_stream=1000 + ordinal)

    class Tensor:
        dtype, layout, shape = torch.float32, torch.strided, (2, 3)
        is_cpu, is_cuda, requires_grad, is_leaf = False, True, False, True
        device = torch.device("cuda", 1)

        def __getattr__(self, name):
            answers = {"is_contiguous": True, "is_inference": True, "is_conj": False}
            answers |= {"is_neg": False, "data_ptr": 4096, "numel": 6, "get_device": 1}
            return lambda: answers[name]

    def raw_stream(ordinal):
        return current_stream(ordinal).cuda_stream

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(torch_streams, "_raw_stream", raw_stream if raw else None)
    v = Torch(torch).view(Tensor(), True, "x", True)
    assert (v.device, v.stream, v.pointer, v.count) == ("cuda:1", 1001, 4096, 6)
    assert asked == [1]
    with pytest.raises(cc.UnsupportedError, match=r"on cuda:1, .* no GPU engine"):
        Torch(torch).view(Tensor(), True, "x", False)


class Gpu:
    """A device of jax."""

    def __init__(self, platform, ordinal):
        self.platform, self.id, self.local_hardware_id = platform, 5, ordinal


class JaxOnGpu:
    """A jax array, but its device says that it is a GPU."""

    def __init__(self, x, platform="gpu", ordinal=0):
        self._x = x
        self._device = Gpu(platform, ordinal)
        self.waited = 0

    def devices(self):
        return {self._device}

    def block_until_ready(self):
        self.waited += 1
        return self._x.block_until_ready()

    def __getattr__(self, name):
        return getattr(self._x, name)


@pytest.fixture
def on_gpu(engine):
    jax = pytest.importorskip("jax")
    from collectives.array.jax_arrays import Jax
    from collectives.array.recognising import KINDS

    KINDS[JaxOnGpu] = Jax(jax)
    yield jax
    del KINDS[JaxOnGpu]


@pytest.mark.jax
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8"])
def test_a_jax_array_on_a_gpu_is_read_and_a_new_one_comes_back(on_gpu, monkeypatch, dtype):
    jnp = on_gpu.numpy
    for module in (calls, reductions):
        monkeypatch.setattr(module, "view", lambda x, **more: array.view(x, gpu=True, **more))
    x = JaxOnGpu(jnp.arange(6).astype(dtype).reshape(2, 3))
    seen = {}

    def body(comm):
        run = comm._device.run

        def noted(arguments, algorithm, stream, *more):
            seen.update(input=arguments[4], output=arguments[5], stream=stream)
            run(arguments, algorithm, stream, *more)

        comm._device.run = noted
        got = comm.all_reduce(x)
        waits = comm._device.waits
        work = comm.all_reduce(x, async_op=True, stream=21)
        return got, waits, comm._device.waits, work, seen["stream"]

    got, waits, still, work, stream = alone(body)
    assert isinstance(got, on_gpu.Array) and got.dtype == x.dtype and got.shape == (2, 3)
    assert seen["input"] == x.unsafe_buffer_pointer() != seen["output"]
    assert x.waited >= 1, "the value is there before the call"
    assert waits == 1, "and the result before it is handed out"
    assert (still, stream) == (1, 21) and isinstance(work, cc.Work)


@pytest.mark.jax
def test_jax_arrays_on_a_gpu_are_sent_and_received(on_gpu, monkeypatch):
    """What says what comes is not written; the new array is handed out when it is there."""
    jnp = on_gpu.numpy
    monkeypatch.setattr(point_to_point, "view", lambda x, **more: array.view(x, gpu=True, **more))
    x = JaxOnGpu(jnp.arange(6, dtype="float32").reshape(2, 3))

    def body(comm):
        comm.send(x, 0, 3)
        got = comm.recv(x, 0, 3)
        waits = comm._device.waits
        both = comm.sendrecv(x, 0, x, 0, stream=21)
        return got, both, waits, comm._device.moved

    got, both, waits, moved = alone(body)
    for new in (got, both):
        assert isinstance(new, on_gpu.Array) and new.dtype == x.dtype and new.shape == (2, 3)
    assert waits == 2, "for the send, since nobody knows when x is dropped, and for the result"
    float32, mine = list(_core.dtypes).index("float32"), x.unsafe_buffer_pointer()
    assert moved[0] == ([(True, 0, 3, float32, mine, 6)], 0)
    (received,), _ = moved[1]
    assert received[:4] == (False, 0, 3, float32) and received[4] != mine
    (back, sent), stream = moved[2]
    assert (back[0], sent[0], sent[4], stream) == (False, True, mine, 21)


@pytest.mark.jax
def test_jax_arrays_on_other_devices(on_gpu):
    jnp = on_gpu.numpy
    v = array.view(JaxOnGpu(jnp.ones(3), ordinal=2), writable=False, gpu=True)
    assert (v.device, v.stream, v.kind, v.readonly) == ("cuda:2", None, "jax", True)
    with pytest.raises(cc.UnsupportedError, match="on tpu:5, which is no CUDA GPU"):
        array.view(JaxOnGpu(jnp.ones(3), "tpu"), writable=False, gpu=True)
    with pytest.raises(cc.UnsupportedError, match=r"on cuda:0, .* no GPU engine"):
        array.view(JaxOnGpu(jnp.ones(3)), writable=False)
    with pytest.raises(cc.ArrayError, match="jax arrays are immutable"):
        array.view(JaxOnGpu(jnp.ones(3)), writable=True, gpu=True)


# ---- host and device arrays over ranks -----------------------------------------------------------


def until_told(comm):
    """What the host of a rank does that waits for its GPU."""
    told = threading.Event()
    while not told.wait(0.001):
        comm._core.look()


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("count", [1, 100_000])
@pytest.mark.parametrize("before", [0, 3])
def test_host_and_device_arrays_raise_on_every_rank(n, count, before):
    """One rank has put a call on its GPU, the others call with host arrays: long before the
    deadline all of them say so.
    """

    def body(comm):
        for _ in range(before):
            comm.all_reduce(np.ones(count))
            comm._core.enter_device_call()
        with pytest.raises(cc.MismatchError) as caught:
            if comm.rank == 1:
                comm._core.enter_device_call()
                until_told(comm)
            else:
                comm.all_reduce(np.ones(count))
        with pytest.raises(cc.AbortedError):
            comm.all_reduce(np.ones(1))
        with pytest.raises(cc.AbortedError):
            comm._core.enter_device_call()
        return str(caught.value)

    for words in cc.run_threads(n, body, timeout=100):
        assert "with arrays on the host (all_reduce" in words
        assert "rank 1 with arrays on its GPU; pass all on the same side" in words


def test_the_rank_on_the_gpu_may_come_later():
    arrived = threading.Barrier(2)

    def body(comm):
        with pytest.raises(cc.MismatchError, match="pass all on the same side"):
            if comm.rank == 0:
                arrived.wait(30)
                comm.broadcast(np.ones(7))
            else:
                arrived.wait(30)
                comm._core.enter_device_call()
                until_told(comm)

    cc.run_threads(2, body, timeout=100)


def test_mixed_over_processes():
    launch.run(3, "mixed_devices.py").expect(status=0)


def test_ranks_that_are_apart_in_time_are_not_taken_for_mixed():
    """Host calls, queued host calls and device calls in one order on all ranks: however far one is
    behind in time, nothing raises. Rank 0's host waits are slow enough for many looks around.
    """
    steps = np.random.default_rng(7).integers(0, 3, 60)

    def body(comm):
        pending = []
        for i, step in enumerate(steps):
            if comm.rank == 1 and i % 20 == 10:
                threading.Event().wait(0.1)  # far longer than ranks look around
            if step == 0:
                assert comm.all_reduce(np.ones(3))[0] == comm.size
            elif step == 1:
                pending.append(comm.all_reduce(np.ones(3), async_op=True))
            else:
                comm._core.enter_device_call()
        for work in pending:
            assert work.wait(60)[0] == comm.size
        return len(pending)

    assert len(set(cc.run_threads(3, body, timeout=100))) == 1


def test_queued_host_calls_come_before_the_device_call_behind_them():
    """Rank 1 queues two host calls and then puts a call on its GPU, before the first has begun to
    move; rank 0 waits long in the second.
    """
    on_gpu = threading.Event()

    def body(comm):
        x = np.ones(3)
        if comm.rank == 1:
            pending = [comm.all_reduce(x.copy(), async_op=True) for _ in range(2)]
            comm._core.enter_device_call()
            on_gpu.set()
            return [work.wait(60)[0] for work in pending]
        if comm.rank == 2:
            assert on_gpu.wait(60)
        first = comm.all_reduce(x.copy())[0]
        if comm.rank == 2:
            threading.Event().wait(0.2)  # rank 0 looks around every 20 ms
        second = comm.all_reduce(x.copy())[0]
        comm._core.enter_device_call()
        return [first, second]

    assert cc.run_threads(3, body, timeout=100) == [[3.0, 3.0]] * 3


def test_a_message_that_waits_is_not_taken_for_mixed():
    """send and recv have no place in the order of the others' calls."""

    def body(comm):
        x = np.zeros(4)
        if comm.rank == 0:
            comm.recv(x, 1)
            comm._core.enter_device_call()
        else:
            comm._core.enter_device_call()
            threading.Event().wait(0.2)
            comm.send(x + 5, 0)
        return x.sum() if comm.rank == 0 else 20.0

    assert cc.run_threads(2, body, timeout=100) == [20.0, 20.0]


def test_views_of_devices_say_where_they_are():
    assert repr(View(4096, 2, "int8", (2,), False, "cuda", None, "cuda:1", 7)).endswith(
        "cuda:1, writable)"
    )
