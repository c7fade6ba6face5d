"""Collectives on device arrays: every algorithm on every number of ranks that one GPU can hold as
threads, processes through CUDA IPC, graphs, and what goes wrong.
"""

from __future__ import annotations

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
import reference
from cases import Case, any_bytes, check, difference, random_values, registry, sweep
from gpus import GPUS, MARK, TWO_GPUS, cupy, free_memory
from on_device import EMULATED, OnDevice, back, filled, run_on, some

import collectives as cc

pytestmark = MARK

COUNTS = (0, 1, 3, 17, 64, 1000, 4099, 70001)
RANKS = (1, 2, 3, 4, 5, 8)
# What the ranks share: one GPU, and all there are.
PLACES = [[0]] if GPUS == 1 else [[0], list(range(GPUS))]


def device_cases(n: int) -> list[Case]:
    """Every algorithm and collective; without what device arrays do not do, see docs/gpu.md."""
    found = []
    for case in sweep(n, registry(n), COUNTS, how="blocking"):
        if case.collective == "all_to_all" and case.algorithm != "direct_two_shot":
            case = case._replace(place="out", v=False)
        if case.place == "new":
            case = case._replace(place="out")
        found.append(case)
    return some(found)


@pytest.mark.parametrize("devices", PLACES, ids=str)
@pytest.mark.parametrize("n", RANKS)
def test_every_algorithm(n: int, devices: list[int]) -> None:
    wanted = device_cases(n)

    def body(comm: OnDevice) -> int:
        for case in wanted:
            check(comm, case)
        return len(wanted)

    assert run_on(n, devices, body, timeout=20) == [len(wanted)] * n


@pytest.mark.parametrize("n", [2, 3, 8])
def test_all_dtypes_and_ops(n: int) -> None:
    """Packets and the interpreter, with every pair of dtype and op, in and out of place."""
    wanted = [
        Case("all_reduce", algorithm, dtype, op, count, place=place, seed=seed, order=order)
        for seed, (dtype, op) in enumerate(reference.PAIRS)
        for algorithm, order in (("direct_one_shot", None), ("ring", None), ("ring", "rank"))
        for count, place in ((777, "in"), (130, "out"))
    ]
    wanted = some(wanted)

    def body(comm: OnDevice) -> int:
        for case in wanted:
            check(comm, case)
        return 1

    assert run_on(n, PLACES[-1], body, timeout=20) == [1] * n


@pytest.mark.parametrize("algorithm", ["direct_one_shot", "direct_two_shot", "ring"])
@pytest.mark.parametrize("data", ["random", "any"])
def test_bits_are_those_of_the_host(algorithm: str, data: str) -> None:
    """In rank order the same bits come out on host and GPU: rounding, NaN payloads, zeros."""
    n, count = 5, 3001

    def body(comm: OnDevice) -> list[str]:
        wrong = []
        for seed, (dtype, op) in some(list(enumerate(reference.PAIRS))):
            make = random_values if data == "random" and dtype in reference.FLOATS else any_bytes
            x = make(comm.rank, count, dtype, seed)
            more: dict[str, Any] = {"op": op, "order": "rank"}
            if op == "premul_sum":
                more["factor"] = 0.5
            host = comm.comm.all_reduce(x.copy(), algorithm="direct_one_shot", **more)
            got = comm.all_reduce(x.copy(), algorithm=algorithm, **more)
            words = difference(got, host)
            if words:
                wrong.append(f"{dtype} {op}: {words}")
        return wrong

    with np.errstate(all="ignore"):
        for wrong in run_on(n, [0], body, timeout=20):
            assert not wrong, wrong


@pytest.mark.parametrize("n", [2, 3])
def test_large(n: int) -> None:
    """Many segments: FIFOs wrap, lanes take turns; odd addresses go element by element."""
    wanted = [
        Case(collective, algorithm, dtype, count=count, place="out", seed=seed)
        for algorithm, collective in registry(n)
        if collective != "barrier"
        for dtype, count, seed in (("float32", 400_001, 1), ("uint8", (5 << 20) + 3, 7))
    ]
    wanted = some(wanted)

    def body(comm: OnDevice) -> int:
        for case in wanted:
            check(comm, case)
        return 1

    assert run_on(n, PLACES[-1], body, timeout=30) == [1] * n


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("algorithm", ["direct_one_shot", "ring", "double_binary_tree"])
def test_graph_replays(n: int, algorithm: str) -> None:
    """A captured call gives fresh results at each replay, between calls that were not captured."""

    def body(comm: OnDevice) -> int:
        case = Case("all_reduce", algorithm, count=5000, place="in")
        check(comm, case)
        count, stream = 5000, comm.stream
        host = [np.empty(count, np.float32) for _ in range(2)]
        base = comm.memory.ptr
        with stream:
            x = cupy.ndarray((count,), cupy.float32, cupy.cuda.MemoryPointer(comm.memory.mem, 0))
        comm.comm.barrier()
        with stream:
            stream.begin_capture()
            for _ in range(3):
                comm.comm.all_reduce(x, algorithm=algorithm)
            graph = stream.end_capture()
        for turn in range(20):
            host[0][:] = np.arange(count) % 7 + comm.rank + turn
            comm.copy(base, host[0].ctypes.data, host[0].nbytes, 1)
            comm.comm.barrier()
            if turn % 4 == 3:
                with stream:
                    for _ in range(3):
                        comm.comm.all_reduce(x, algorithm=algorithm)
            else:
                graph.launch(stream)
            comm.finish()
            comm.copy(host[1].ctypes.data, base, host[1].nbytes, 2)
            total = sum(np.arange(count) % 7 + r + turn for r in range(n)) * n * n
            assert (host[1] == total).all()
        return 1

    assert run_on(n, PLACES[-1], body, timeout=20) == [1] * n


def test_new_arrays_and_streams() -> None:
    """cupy in, cupy out; calls on changing streams of one rank follow each other."""

    def body(comm: OnDevice) -> int:
        n, rank = comm.size, comm.rank
        with comm.stream:
            x = cupy.ndarray((6, 4), cupy.float32, cupy.cuda.MemoryPointer(comm.memory.mem, 0))
            out = comm.comm.all_gather(x)
            assert type(out) is cupy.ndarray and out.shape == (6 * n, 4)
        other = cupy.cuda.Stream(non_blocking=True)
        host = np.full(24, rank + 1, np.float32)
        comm.copy(x.data.ptr, host.ctypes.data, host.nbytes, 1)
        comm.comm.barrier()
        for i in range(40):
            with (comm.stream, other)[i % 2]:
                comm.comm.all_reduce(x, op="avg")
        with comm.stream:
            work = comm.comm.all_reduce(x, op="max", async_op=True)
        assert work.wait(10) is x and work.done()
        comm.finish()
        comm.copy(host.ctypes.data, x.data.ptr, host.nbytes, 2)
        assert (host == (n + 1) / 2).all()
        return rank

    assert run_on(3, [0], body, timeout=20) == [0, 1, 2]


@pytest.mark.parametrize("count", [100, 100_000])
def test_other_counts_raise_everywhere(count: int) -> None:
    """Both the packets and the interpreter find a mismatch, and nothing of the call is written."""

    def body(comm: OnDevice) -> str:
        mine = np.ones(count + (comm.rank == 1), np.float32)
        try:
            comm.all_reduce(mine)
        except cc.MismatchError as error:
            return str(error)
        return ""

    start = time.monotonic()
    words = run_on(3, [0], body, timeout=20)
    assert any("in another call" in w for w in words)
    # Both sides on every rank: what it called itself, and what another did.
    for rank, text in enumerate(words):
        assert f"count={count}" in text and f"count={count + 1}" in text, (rank, words)
    assert time.monotonic() - start < 15
    assert run_on(2, [0], lambda comm: comm.rank, timeout=20) == [0, 1]


def test_a_mismatch_stays_one_for_who_comes_later() -> None:
    """Two ranks differ, call again and so pass on what they know; the third reads no "aborted"."""
    gave_up = threading.Barrier(3)

    def body(comm: OnDevice) -> list[str]:
        comm.meets = False
        words = []
        for late in (False, True):
            for _ in range(2 if (comm.rank == 2) == late else 0):
                try:
                    comm.all_reduce(np.ones(10 + comm.rank, np.float32))
                except cc.MismatchError as error:
                    words.append(str(error))
            gave_up.wait(20)
        return words

    assert [len(words) for words in run_on(3, [0], body, timeout=20)] == [2, 2, 2]


def test_a_missing_rank_is_a_deadline() -> None:
    def body(comm: OnDevice) -> str:
        x = np.ones(10, np.float32)
        try:
            if comm.rank == 0:
                comm.meets = False
                comm.all_reduce(x)
            else:
                comm.meets = False
                time.sleep(7)
        except cc.DeadlineError as error:
            return str(error)
        return ""

    words = run_on(2, [0], body, timeout=5)
    assert "packets from rank 1" in words[0], words


def test_errors_in_words() -> None:
    def body(comm: OnDevice) -> int:
        x = cupy.ndarray((8,), cupy.float32, cupy.cuda.MemoryPointer(comm.memory.mem, 0))
        with comm.stream:
            with pytest.raises(cc.ArrayError, match="both must be on the same device"):
                comm.comm.all_reduce(x, out=np.ones(8, np.float32))
            with pytest.raises(cc.UnsupportedError, match="band"):
                comm.comm.all_reduce(x, op="band")
            with pytest.raises(cc.ArrayError, match="another array"):
                comm.comm.all_to_all(x, out=x, algorithm="bruck")
            with pytest.raises(cc.ArrayError, match="strides"):
                comm.comm.all_reduce(x[::2])
        if comm.size > 1:
            with pytest.raises(cc.CollectiveError, match="a stream each"):
                comm.comm.all_reduce(x)
        comm.comm.barrier()
        return 1

    assert run_on(2, [0], body, timeout=20) == [1, 1]


def test_a_stream_whose_first_call_is_captured() -> None:
    """As torch.cuda.graph does it; and then one that is not."""

    def body(comm: OnDevice) -> int:
        x = filled(comm, 8, 1)
        comm.comm.barrier()
        with cupy.cuda.Device(comm.device):
            stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            comm.comm.all_reduce(x)
            graph = stream.end_capture()
            comm.comm.barrier()
            graph.launch(stream)
            comm.comm.all_reduce(x)
        stream.synchronize()
        comm.comm.synchronize()
        assert (back(comm, x) == 4).all()
        return 1

    assert run_on(2, PLACES[-1], body, timeout=20) == [1, 1]


@TWO_GPUS
def test_a_stream_of_another_gpu() -> None:
    """It is refused in words, the others hear of it, and nothing is written."""

    def body(comm: OnDevice) -> int:
        x = filled(comm, 8, 7)
        comm.comm.barrier()
        with cupy.cuda.Device(0):
            stream = cupy.cuda.Stream(non_blocking=True)
        words = "its stream is one of GPU 0" if comm.rank == 1 else "rank 1"
        with pytest.raises(cc.CollectiveError, match=words):
            # By its handle, which does not say whose it is: cupy's streams do.
            comm.comm.all_reduce(x, stream=stream.ptr)
            comm.comm.synchronize()
        stream.synchronize()
        assert (back(comm, x) == 7).all()
        return 1

    assert run_on(2, [0, 1], body, timeout=20) == [1, 1]


@pytest.mark.skipif(
    not EMULATED, reason="the driver here is what it is; tests/emulated, in CI, pretends an old one"
)
def test_a_driver_that_does_not_tell_the_gpu_of_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMULATED_OLD_DRIVER", "1")

    def body(comm: OnDevice) -> bool:
        x = filled(comm, 8, 1)
        comm.comm.all_reduce(x, stream=cupy.cuda.Stream(non_blocking=True))
        comm.comm.synchronize()
        return bool((back(comm, x) == 2).all())

    assert run_on(2, [0], body, timeout=20) == [True] * 2


@pytest.mark.parametrize("gpus", range(1, min(GPUS, 2) + 1))
def test_processes(gpus: int) -> None:
    """Two processes through CUDA IPC: on one GPU by turns, on two at once."""
    worker = Path(__file__).with_name("ipc_worker.py")
    path = os.pathsep.join([str(worker.parent), str(worker.parents[1])])
    done = subprocess.run(
        [sys.executable, "-m", "collectives", "run", "-n", "2", str(worker), str(gpus)],
        env={**os.environ, "PYTHONPATH": path + os.pathsep + os.environ.get("PYTHONPATH", "")},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all right") == 2, done.stdout


def run_dying(how: str, **env: str) -> tuple[int, launch.Result]:
    """What ranks wrote of which the last was killed, and how many there were."""
    worker = Path(__file__).with_name("dying_worker.py")
    gpus = min(GPUS, 3)
    n = 3 if gpus > 1 else 2  # on one GPU, processes take turns
    path = os.pathsep.join([str(worker.parent), os.environ.get("PYTHONPATH", "")])
    return n, launch.run(n, worker, gpus, how, env={"PYTHONPATH": path, **env}, timeout=100)


@pytest.mark.faults
@pytest.mark.parametrize("algorithm", ["direct_one_shot", "direct_two_shot", "ring", "copies"])
def test_survivors_of_a_death(algorithm: str) -> None:
    """A kernel that waits for a process that was killed leaves; every survivor says who it was.
    Nothing of them stays in the memory of a GPU.
    """
    free = free_memory()
    n, got = run_dying(algorithm)
    assert free_memory() > free - (64 << 20), got
    lines = re.findall(r"^rank (\d): (\w+) after (\d+\.\d) s: (.*)$", got.output, re.MULTILINE)
    assert sorted(line[0] for line in lines) == ["0", "1"][: n - 1], got
    for _, kind, seconds, text in lines:
        assert kind == "PeerDiedError", got
        assert float(seconds) < 20, got  # a deadline would be 60
        assert f"the process of rank {n - 1} " in text, got
    assert len(re.findall(r"again PeerDiedError", got.output)) == n - 1, got


@pytest.mark.faults
@pytest.mark.parametrize("queues", ["1", "2", "3", "8"])
def test_a_death_where_streams_share_queues(queues: str) -> None:
    """What lets a stream go on that waits for a dead rank's copies is not behind it in its queue;
    and with too few queues calls go by kernels.
    """
    n, got = run_dying("copies", CUDA_DEVICE_MAX_CONNECTIONS=queues, EMULATED_CONNECTIONS=queues)
    found = re.findall(r"^rank \d: PeerDiedError after (\d+\.\d) s", got.output, re.MULTILINE)
    assert len(found) == n - 1 and max(map(float, found)) < 20, got


@pytest.mark.faults
def test_a_death_while_others_close() -> None:
    """Closing waits for this rank's kernels; those that wait for the dead one leave."""
    n, got = run_dying("close")
    seconds = re.findall(r"^rank \d: closed after (\d+\.\d) s$", got.output, re.MULTILINE)
    assert len(seconds) == n - 1 and all(float(s) < 20 for s in seconds), got
