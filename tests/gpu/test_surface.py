"""What users touch, on real GPUs: streams, bounds, arrays of torch and jax, both sides mixed, and
the benchmark from its command line. tests/test_device_calls.py and tests/test_bench_cuda.py hold
the same against fakes.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpus import GPUS, MARK, TWO_GPUS, cupy
from on_device import OnDevice, run_on

import collectives as cc
from collectives import _core, cli

pytestmark = MARK


def array(comm: OnDevice, count: int, value: float) -> Any:
    """float32 elements at the begin of the rank's memory."""
    host = np.full(count, value, np.float32)
    comm.copy(comm.memory.ptr, host.ctypes.data, host.nbytes, 1)
    memory = cupy.cuda.MemoryPointer(comm.memory.mem, 0)
    with comm.stream:
        return cupy.ndarray((count,), cupy.float32, memory)


def values(comm: OnDevice, count: int) -> Any:
    host = np.empty(count, np.float32)
    comm.copy(host.ctypes.data, comm.memory.ptr, host.nbytes, 2)
    return host


@pytest.mark.parametrize("count", [5, 20_000])
def test_stream_of_the_call(count: int) -> None:
    """An object or a handle; the call runs there, whatever the current stream is."""

    def body(comm: OnDevice) -> bool:
        x = array(comm, count, comm.rank + 1)
        comm.comm.barrier()
        comm.comm.all_reduce(x, stream=comm.stream)
        comm.comm.all_reduce(x, op="avg", stream=comm.stream.ptr)
        comm.comm.barrier(stream=comm.stream)
        comm.finish()
        return bool((values(comm, count) == comm.size * (comm.size + 1) / 2).all())

    assert run_on(3, [0], body, timeout=20) == [True] * 3


@pytest.mark.parametrize("bound", [1, 3])
def test_max_blocks(bound: int) -> None:
    """They bound the memory too: what each block exchanges through."""

    def body(comm: OnDevice) -> tuple[int, bool, int]:
        count = 40_000
        x = array(comm, count, comm.rank + 1)
        comm.comm.barrier()
        for algorithm in ("ring", "direct_one_shot", "direct_two_shot"):
            comm.comm.all_reduce(x, op="avg", algorithm=algorithm, stream=comm.stream)
        comm.finish()
        engine = comm.comm._device
        assert engine is not None
        right = bool((values(comm, count) == (comm.size + 1) / 2).all())
        return engine.blocks, right, engine.core.arena_bytes

    found = run_on(2, [0], body, timeout=20, max_blocks=bound)
    assert all(blocks <= bound and right for blocks, right, _ in found), found
    ((_, _, most), _) = run_on(2, [0], body, timeout=20, max_blocks=bound + 1)
    # Two slots of 4 x 64 KiB for collective calls, four of 8 x 32 KiB for sends, less flags.
    assert 0.7 < (most - found[0][2]) / (768 << 10) < 1.1


@pytest.mark.parametrize("algorithm", ["direct_one_shot", "direct_two_shot", "ring"])
def test_two_communicators_on_two_streams_at_once(algorithm: str) -> None:
    """In opposite orders on the ranks, so that kernels of one wait while those of the other come.
    Both find room here: neither takes more than four thread blocks.
    """
    count = 50_000

    def body(comm: OnDevice) -> bool:
        x = array(comm, count, comm.rank + 1)
        memory = cupy.cuda.MemoryPointer(comm.memory.mem, 8 << 20)
        y = cupy.ndarray((count,), cupy.float32, memory)
        comm.copy(memory.ptr, x.data.ptr, x.nbytes, 3)
        other = cupy.cuda.Stream(non_blocking=True)
        twin = comm.comm.duplicate()
        comm.comm.barrier()
        pairs = [(comm.comm, x, comm.stream), (twin, y, other)]
        for one, which, stream in pairs:  # which sets them up
            one.all_reduce(which, "max", stream=stream)
            one.synchronize()
        for _ in range(10):
            for one, which, stream in pairs[:: 1 if comm.rank == 0 else -1]:
                one.all_reduce(which, "avg", algorithm=algorithm, stream=stream)
        comm.comm.synchronize()
        twin.synchronize()
        twin.close()
        right = bool((values(comm, count) == comm.size).all())
        comm.copy(x.data.ptr, memory.ptr, x.nbytes, 3)
        return right and bool((values(comm, count) == comm.size).all())

    assert run_on(2, list(range(GPUS)), body, timeout=20, max_blocks=4) == [True] * 2


def test_host_and_device_arrays_raise_on_every_rank_long_before_the_deadline() -> None:
    def body(comm: OnDevice) -> str:
        x = array(comm, 1000, 1.0)
        comm.comm.barrier()
        comm.comm.all_reduce(x, stream=comm.stream)
        comm.finish()
        with pytest.raises(cc.MismatchError) as caught:
            if comm.rank == 1:
                comm.comm.all_reduce(x, stream=comm.stream)
                comm.comm.synchronize()
            else:
                comm.comm.all_reduce(np.ones(1000, np.float32))
        return str(caught.value)

    start = time.monotonic()
    words = run_on(3, [0], body, timeout=90)
    assert all("rank 1 with arrays on its GPU; pass all on the same side" in w for w in words), (
        words
    )
    assert time.monotonic() - start < 60


@TWO_GPUS
def test_an_array_on_another_gpu() -> None:
    def body(comm: cc.Communicator) -> None:
        with cupy.cuda.Device(1):
            x = cupy.empty(8, "float32")
        with pytest.raises(cc.ArrayError, match=r"is on cuda:1, .* works on cuda:0"):
            comm.all_reduce(x)
        with cupy.cuda.Device(1):
            other = cupy.cuda.Stream(non_blocking=True)
        with cupy.cuda.Device(0):
            mine = cupy.empty(8, "float32")
        words = "is a stream of cuda:1" if hasattr(other, "device_id") else "is one of GPU 1"
        with pytest.raises(cc.CollectiveError, match=words):
            comm.all_reduce(mine, stream=other)

    cc.run_threads(1, body, devices=[0], timeout=20)


class Bare:
    """What the CUDA array interface says, and nothing else: not the GPU."""

    def __init__(self, x: Any, **other: Any) -> None:
        self.__cuda_array_interface__ = {**x.__cuda_array_interface__, **other}


def test_an_array_that_does_not_say_where_it_is() -> None:
    """The driver knows; an empty one is where the rank is."""

    def body(comm: cc.Communicator) -> None:
        place = comm.rank % GPUS
        with cupy.cuda.Device(place):
            stream = cupy.cuda.Stream(non_blocking=True)
        x, out = (comm.empty(8, "float32", f"cuda:{place}", kind="cupy") for _ in "xo")
        x.set(np.full(8, 3, np.float32))
        comm.barrier()
        empty = Bare(x, shape=(0,), data=(0, False))
        comm.all_reduce(Bare(x), out=Bare(out), stream=stream)
        with cupy.cuda.Device(place):
            comm.all_gather_v(empty, [0, 0], out=empty, stream=stream)
        comm.synchronize()
        assert (out.get() == 6).all()
        nowhere = Bare(x, data=(np.empty(8, np.float32).ctypes.data, False))
        with pytest.raises(cc.ArrayTypeError, match="no GPU has memory at 0x"):
            comm.all_reduce(nowhere, stream=stream)
        comm.barrier()

    cc.run_threads(2, body, devices=list(range(GPUS)), timeout=20, max_blocks=4)


@pytest.mark.torch
def test_torch_tensors_on_torchs_current_stream() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch is built without CUDA")

    def body(comm: cc.Communicator) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            x = torch.full((1000,), 3.0, device="cuda", dtype=torch.bfloat16)
            out = comm.all_reduce(x, op="premul_sum", factor=2.0, out=torch.empty_like(x))
            again = comm.all_gather(out)
        comm.all_reduce(out, stream=stream)
        comm.synchronize()
        stream.synchronize()
        assert out.is_cuda and bool((out == 6).all()) and bool((again == 6).all())

    cc.run_threads(1, body, devices=[0], timeout=20)


@pytest.mark.jax
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_jax_arrays_are_left_alone(dtype: str) -> None:
    jax = pytest.importorskip("jax")
    if jax.default_backend() not in ("gpu", "cuda"):
        pytest.skip("jax has no GPU")

    def body(comm: cc.Communicator) -> None:
        stream = cupy.cuda.Stream(non_blocking=True)
        x = jax.numpy.full((3, 5), 3, dtype)
        got = comm.all_reduce(x, op="premul_sum", factor=2.0, stream=stream)
        assert isinstance(got, jax.Array) and got.devices() == x.devices()
        assert got.dtype == x.dtype and got.shape == x.shape
        assert bool((got == 6).all()) and bool((x == 3).all())
        work = comm.all_gather(x, async_op=True, stream=stream)
        assert bool((work.wait(20) == 3).all())

    cc.run_threads(1, body, devices=[0], timeout=20)


@pytest.mark.parametrize("mode", ["stream", "graph"])
def test_bench_from_the_command_line(mode: str, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    command = [
        "bench",
        "--device",
        "cuda",
        "--threads",
        "2",
        "--mode",
        mode,
        "-b",
        "4",
        "-e",
        "64K",
    ]
    command += ["-f", "128", "-n", "20", "--collective", "all", "--json", str(file)]
    assert cli.main(command) == 0
    rows = json.loads(file.read_text())["rows"]
    assert {row["collective"] for row in rows} == set(_core.collectives)
    for row in rows:
        assert row["wrong"] in (0, None) and row["time_us"] > 0 and row["mode"] == mode
