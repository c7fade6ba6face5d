"""Threads of one rank that call at once, beside streams that are captured; and forked children."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import launch
import numpy as np
import pytest
from gpus import MARK, cupy
from on_device import OnDevice, run_on

from collectives import _core

pytestmark = MARK

HERE = Path(__file__).parent
THREADS, CALLS, COUNT = 4, 40, 16


def path_with_workers() -> str:
    return os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])


def array(comm: OnDevice, at: int, count: int = COUNT) -> Any:
    return cupy.ndarray((count,), np.float32, cupy.cuda.MemoryPointer(comm.memory.mem, at))


def test_threads_that_call_between_nodes() -> None:
    """Each call's stream goes on when its own result is there, not that of another thread's."""

    def body(comm: OnDevice) -> None:
        streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(THREADS)]
        x = array(comm, 0)
        outs, found = (
            [
                [array(comm, at + 256 * (t * CALLS + i)) for i in range(CALLS)]
                for t in range(THREADS)
            ]
            for at in (1 << 20, 2 << 20)
        )
        ones, zeros = np.ones(COUNT, np.float32), np.zeros(COUNT, np.float32)
        comm.copy(x.data.ptr, ones.ctypes.data, ones.nbytes, 1)
        comm.comm.all_reduce(x, out=outs[0][0], stream=comm.stream)
        comm.finish()
        for _ in range(12):
            for out in itertools.chain(*outs):
                comm.copy(out.data.ptr, zeros.ctypes.data, zeros.nbytes, 1)
            comm.meet()
            together = threading.Barrier(THREADS)

            def call(t: int, together: threading.Barrier = together) -> None:
                cupy.cuda.Device(comm.device).use()
                together.wait()
                for out, copy in zip(outs[t], found[t], strict=True):
                    comm.comm.all_reduce(x, out=out, stream=streams[t])
                    cupy.cuda.runtime.memcpyAsync(  # on the GPU: waits for nothing else there
                        copy.data.ptr, out.data.ptr, zeros.nbytes, 3, streams[t].ptr
                    )
                streams[t].synchronize()

            threads = [threading.Thread(target=call, args=(t,)) for t in range(THREADS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            comm.finish()
            for copy in itertools.chain(*found):
                comm.copy(zeros.ctypes.data, copy.data.ptr, zeros.nbytes, 2)
                assert (zeros == comm.size).all(), zeros
            zeros[:] = 0

    run_on(2, [0], body, nodes=[0, 1], timeout=20)


def test_buffers_made_while_another_thread_calls() -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / "threads_worker.py")],
        env={**os.environ, "PYTHONPATH": path_with_workers(), "MALLOC_PERTURB_": "165"},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout == "300 buffers, True\n", done


def test_looking_at_a_mark_ends_no_capture() -> None:
    """In the mode that torch captures in, no thread may ask for events, but by leave."""

    def body(comm: OnDevice) -> None:
        side = _core.SideStream(comm.device)
        mark, later = side.end(), side.end()
        comm.stream.begin_capture(0)
        comm.comm.all_reduce(array(comm, 0), stream=comm.stream)
        until = time.monotonic() + 10
        while not later.done() and time.monotonic() < until:
            time.sleep(1e-3)
        later.wait()
        assert mark.done() and later.seconds_since(mark) >= 0
        comm.stream.end_capture()

    run_on(1, [0], body, timeout=20)


def test_a_call_between_nodes_beside_a_capture() -> None:
    """A thread of the host carries it while the caller captures another stream."""

    def body(comm: OnDevice) -> None:
        other = cupy.cuda.Stream(non_blocking=True)
        x = array(comm, 0, 50_000)
        ones = np.ones(x.size, np.float32)
        comm.copy(x.data.ptr, ones.ctypes.data, ones.nbytes, 1)
        comm.comm.all_reduce(x, stream=comm.stream)
        comm.finish()
        if comm.rank == 0:
            other.begin_capture(0)
        comm.meet()
        for _ in range(3):
            comm.comm.all_reduce(x, stream=comm.stream)
        comm.comm.synchronize()
        comm.meet()
        if comm.rank == 0:
            other.end_capture()
        comm.meet()
        comm.copy(ones.ctypes.data, x.data.ptr, ones.nbytes, 2)
        assert (ones == comm.size**4).all()

    run_on(2, [0], body, nodes=[0, 1], timeout=20)


@pytest.mark.faults
def test_a_forked_child() -> None:
    """Its calls raise, also those that go the short way, and what it closes stays the parent's: who
    is told, as before, when another rank dies.
    """
    got = launch.run(
        2, HERE / "forked_worker.py", env={"PYTHONPATH": path_with_workers()}, timeout=100
    )
    calls = re.findall(r"^child: \w+ raised (.*)$", got.output, re.MULTILINE)
    assert calls == ["ClosedError, True"] * 6 and "child: closed" in got.output, got
    told = re.search(r"^parent: PeerDiedError after (\d+\.\d) s$", got.output, re.MULTILINE)
    assert told is not None and float(told[1]) < 20, got  # a deadline would be 60
