"""Registered arrays: memory that the communicator has not allocated, mapped into all ranks. Every
way in which direct_two_shot works on it, what cannot be mapped, and memory that is freed too early.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpus import GPUS, MARK, cupy
from on_device import OnDevice, run_on

import collectives as cc
from collectives import device as engines
from collectives.tuning.device import Launch

pytestmark = MARK

ALL = list(range(GPUS))
_MIB = 1 << 20
HOW = {"push": Launch(chunk=4096), "pull": Launch(pull=True), "few": Launch(pull=True, blocks=1)}


@pytest.fixture(autouse=True)
def peers_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small calls would go in lines, which need nothing mapped."""
    monkeypatch.setattr(engines, "device_launch", lambda *_: HOW["pull"])


def array_at(pointer: int, nbytes: int, offset: int, count: int, device: int) -> Any:
    """`count` float32 elements, `offset` bytes behind an address."""
    memory = cupy.cuda.UnownedMemory(pointer, nbytes, None, device)
    return cupy.ndarray((count,), cupy.float32, cupy.cuda.MemoryPointer(memory, offset))


def part(comm: OnDevice, offset: int, count: int) -> Any:
    """`count` float32 elements in the rank's memory, which is one allocation."""
    return array_at(comm.memory.ptr, 2 * (24 << 20), offset, count, comm.device)


def put(comm: OnDevice, array: Any, values: Any) -> None:
    host = np.ascontiguousarray(values, np.float32)
    comm.copy(array.data.ptr, host.ctypes.data, host.nbytes, 1)


def get(comm: OnDevice, array: Any) -> Any:
    host = np.empty(array.shape, np.float32)
    comm.copy(host.ctypes.data, array.data.ptr, host.nbytes, 2)
    return host


def mismatch(comm: OnDevice, array: Any) -> str:
    """What a call on an array that does not match the others' raises."""
    comm.comm.barrier()
    with pytest.raises(cc.MismatchError) as caught:
        with comm.stream:
            comm.comm.all_reduce(array, algorithm="direct_two_shot")
        comm.comm.synchronize()
    comm.stream.synchronize()
    return str(caught.value)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("how", HOW)
def test_results(monkeypatch: pytest.MonkeyPatch, how: str, n: int) -> None:
    """Input, output or both are registered, at another place of another size of allocation on each
    rank, also where ranks differ modulo 16; what lies around them stays."""
    monkeypatch.setattr(engines, "device_launch", lambda *_: HOW[how])
    count, two = 3 * 4 * 5 * 700, "direct_two_shot"

    def body(comm: OnDevice) -> bool:
        c, rank, guard = comm.comm, comm.rank, 64
        x = part(comm, 4096 * rank + 4 * rank + 4 * guard, count)
        out = part(comm, 8 * _MIB + 512 * (rank % 3) + 4 * guard, count)
        around = [part(comm, a.data.ptr - comm.memory.ptr - 4 * guard, guard) for a in (x, out)]
        around += [part(comm, a.data.ptr - comm.memory.ptr + a.nbytes, guard) for a in (x, out)]
        for one in around:
            put(comm, one, np.full(guard, -7))
        data = [np.arange(count) % 89 + r for r in range(n)]
        total = sum(data)
        block = count // n
        mine = slice(rank * block, (rank + 1) * block)
        for chosen in ((x,), (out,), (x, out)):
            held = [c.register(a) for a in chosen]
            assert all(r.zero_copy and not r.why for r in held), held
            for turn in range(2):
                put(comm, x, data[rank])
                c.barrier()
                with comm.stream:
                    c.all_reduce(x, out=out, algorithm=two)
                comm.finish()
                assert (get(comm, out) == total).all() and (get(comm, x) == data[rank]).all(), turn
            with comm.stream:
                c.all_reduce(x, algorithm=two)
            comm.finish()
            assert (get(comm, x) == total).all()
            put(comm, x, data[rank])
            c.barrier()
            with comm.stream:
                c.reduce_scatter(x, out=out[:block], algorithm=two)
            comm.finish()
            assert (get(comm, out[:block]) == total[mine]).all()
            put(comm, x[:block], data[rank][mine])
            c.barrier()
            with comm.stream:
                c.all_gather(x[:block], out=out, algorithm=two)
            comm.finish()
            wanted = np.concatenate([data[r][r * block : (r + 1) * block] for r in range(n)])
            assert (get(comm, out) == wanted).all()
            for registration in held:
                registration.close()
        assert all((get(comm, one) == -7).all() for one in around)
        return True

    assert run_on(n, ALL, body, timeout=20) == [True] * n


def test_graphs() -> None:
    """A captured call works in registered arrays at each replay."""

    def body(comm: OnDevice) -> bool:
        x = part(comm, 1024 * comm.rank, 6000)
        with comm.comm.register(x):
            comm.comm.barrier()
            with comm.stream:
                comm.comm.all_reduce(x, op="avg", algorithm="direct_two_shot")
            comm.finish()
            comm.stream.begin_capture()
            with comm.stream:
                comm.comm.all_reduce(x, algorithm="direct_two_shot")
            graph = comm.stream.end_capture()
            for turn in range(5):
                put(comm, x, np.full(6000, comm.rank + turn))
                comm.comm.barrier()
                graph.launch(comm.stream)
                comm.finish()
                assert (get(comm, x) == 3 + 3 * turn).all()
        return True

    assert run_on(3, ALL, body, timeout=20) == [True] * 3


@pytest.mark.parametrize("what", ["another array", "another place"])
def test_all_ranks_pass_the_same(what: str) -> None:
    def body(comm: OnDevice) -> str:
        x, y = part(comm, 0, 1000), part(comm, _MIB, 1000)
        put(comm, x, np.zeros(1000))
        put(comm, y, np.zeros(1000))
        comm.comm.register(x)
        if what == "another array":
            words = mismatch(comm, y if comm.rank == 1 else x)
        else:
            words = mismatch(comm, x[comm.rank : 500 + comm.rank])
        assert not get(comm, x).any() and not get(comm, y).any()
        return words

    words = run_on(3, ALL, body, timeout=20)
    # Whoever sees it first says which call it is, and the others that he does.
    assert any("in another call" in w for w in words), words
    assert any("on symmetric" in w for w in words), words
    apart = "another algorithm, or its arrays at another place of symmetric or registered memory"
    assert any(apart in w for w in words), words


def test_closed_ones_are_ordinary_arrays() -> None:
    """After `close`, after `with`, and after an error in it; with the communicator they end too."""

    def body(comm: OnDevice) -> Any:
        x = part(comm, 0, 2000)
        first = comm.comm.register(x)
        assert first.nbytes == 8000 and first.array is x and "zero-copy" in repr(first)
        first.close()
        first.close()
        assert not first.zero_copy and first.why == "it is closed" and first.array is None
        with comm.comm.register(x) as second:
            assert second.zero_copy
        with pytest.raises(KeyError), comm.comm.register(x):
            raise KeyError
        put(comm, x, np.full(2000, comm.rank))
        comm.comm.barrier()
        with comm.stream:  # at another place on each rank
            comm.comm.all_reduce(x[comm.rank : 1000 + comm.rank], algorithm="direct_two_shot")
        comm.finish()
        assert (get(comm, x[comm.rank : 1000 + comm.rank]) == 3).all()
        last = comm.comm.register(x)
        comm.comm.close()
        assert not last.zero_copy and last.why == "the communicator is closed"
        last.close()
        with pytest.raises(cc.ClosedError):
            comm.comm.register(x)
        return True

    assert run_on(3, ALL, body, timeout=20) == [True] * 3


def test_what_cannot_be_mapped() -> None:
    """One rank's memory is of a pool: all say so, and calls go through FIFOs."""

    def body(comm: OnDevice) -> str:
        if comm.rank == 1:
            with comm.stream:
                pool = cupy.cuda.malloc_async(8000)
            comm.stream.synchronize()
            x = array_at(pool.ptr, 8000, 0, 2000, comm.device)
        else:
            x = part(comm, 256, 2000)
        registration = comm.comm.register(x)
        assert not registration.zero_copy
        put(comm, x, np.full(2000, comm.rank + 1))
        comm.comm.barrier()
        with comm.stream:
            comm.comm.all_reduce(x[comm.rank : 1000 + comm.rank], algorithm="direct_two_shot")
        comm.finish()
        assert (get(comm, x[comm.rank : 1000 + comm.rank]) == 6).all()
        why = registration.why
        registration.close()
        assert comm.comm.register(x[:0]).why.count("it is empty") == 3
        return why

    assert run_on(3, ALL, body, timeout=20) == ["rank 1: it is of a pool of cudaMallocAsync"] * 3


def test_nothing_is_mapped_through_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLECTIVES_GPU_PATH", "host")
    for words in run_on(2, ALL, lambda comm: comm.comm.register(part(comm, 0, 9)).why, timeout=20):
        assert words.count("the ranks reach each other through memory of the host") == 2


def test_errors_in_words() -> None:
    def body(comm: OnDevice) -> bool:
        with pytest.raises(cc.ArrayError, match=r"sizes \(rank 0: 400 bytes, rank 1: 404"):
            comm.comm.register(part(comm, 0, 100 + comm.rank))
        with pytest.raises(cc.ArrayError, match="this one is on the host"):
            comm.comm.register(np.ones(3))
        with pytest.raises(cc.ArrayError, match="strides"):
            comm.comm.register(part(comm, 0, 100)[::2])
        return True

    assert run_on(2, ALL, body, timeout=20) == [True] * 2


def reuse(size: int, device: int, pointer: int) -> int:
    """Frees memory and allocates as much at the same address."""
    with cupy.cuda.Device(device):
        cupy.cuda.runtime.free(pointer)
        again: int = cupy.cuda.runtime.malloc(size)
    return again


def test_memory_that_was_freed() -> None:
    """A call on it raises on all ranks, long before the deadline, and writes nothing."""

    def body(comm: OnDevice) -> str:
        with cupy.cuda.Device(comm.device):
            pointer = cupy.cuda.runtime.malloc(4 * _MIB)
        x = array_at(pointer, 4 * _MIB, 0, 5000, comm.device)
        put(comm, x, np.ones(5000))
        comm.comm.register(x)
        comm.comm.barrier()
        if comm.rank == 1:
            cupy.cuda.runtime.free(pointer)
        words = mismatch(comm, x)
        assert comm.rank == 1 or (get(comm, x) == 1).all()
        return words

    start = time.monotonic()
    words = run_on(3, ALL, body, timeout=60)
    assert "of rank 1 was freed, and a call is on its memory" in words[1], words
    assert time.monotonic() - start < 40


@pytest.mark.parametrize("where", ["one", "all"])
def test_memory_that_was_freed_and_allocated_again(where: str) -> None:
    """At an address that was registered lies another allocation now. On one rank that is a
    mismatch, and on all an array as any other."""

    def body(comm: OnDevice) -> str:
        with cupy.cuda.Device(comm.device):
            pointer = cupy.cuda.runtime.malloc(4 * _MIB)
        x = array_at(pointer, 4 * _MIB, 0, 5000, comm.device)
        put(comm, x, np.ones(5000))
        comm.comm.register(x)
        comm.comm.barrier()
        for rank in range(comm.size):  # in turn, so that nobody else gets the address
            moved = False
            if rank == comm.rank and (where == "all" or rank == 1):
                moved = reuse(4 * _MIB, comm.device, pointer) != pointer
            if comm.comm.all_reduce(np.array([moved]))[0]:
                return "moved"
        put(comm, x, np.full(5000, comm.rank))
        if where == "one":
            words = mismatch(comm, x)
            assert (get(comm, x) == comm.rank).all()
            return words
        comm.comm.barrier()
        with comm.stream:
            comm.comm.all_reduce(x, algorithm="direct_two_shot")
        comm.finish()
        assert (get(comm, x) == 3).all()
        return "right"

    words = run_on(3, ALL, body, timeout=20)
    if "moved" in words:
        pytest.skip("the allocator gave another address")
    assert words == ["right"] * 3 if where == "all" else all(words), words


def test_processes() -> None:
    """Through CUDA IPC: two arrays of an allocation open it once, and all is closed in the end."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "collectives", "run", "-n", "2",
         str(here / "registering_worker.py"), str(min(GPUS, 2))],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all right") == 2, done.stdout
