"""The flight recorder of calls on GPU arrays, and what the doctor makes of it."""

from __future__ import annotations

import re
import threading
from typing import Any

import numpy as np
import pytest
from gpus import MARK, cupy
from on_device import OnDevice, run_on
from worlds import wait_until

import collectives as cc
from collectives import _core
from collectives.doctor.merging import diagnose, read

pytestmark = MARK

SMALL, LARGE = 100, 50_000


def ready(comm: OnDevice, counts: tuple[int, ...] = (SMALL, LARGE)) -> list[Any]:
    """Arrays on the GPU, after one call: whoever sets up the engine waits for all."""
    with comm.stream:
        arrays = [
            cupy.ndarray((n,), cupy.float32, cupy.cuda.MemoryPointer(comm.memory.mem, i << 20))
            for i, n in enumerate(counts)
        ]
        comm.comm.all_reduce(arrays[0], algorithm="direct_one_shot")
    comm.comm.synchronize()
    return arrays


def states(dump: dict[str, Any]) -> list[str]:
    return [call["state"] for call in dump["gpu_calls"]]


def test_what_a_record_says() -> None:
    def body(comm: OnDevice) -> dict[str, Any]:
        _, large = ready(comm)
        assert states(comm.comm.dump()) == ["done"]
        with comm.stream:
            comm.comm.all_reduce(large, "max", algorithm="ring", order="rank")
            comm.comm.broadcast(large, 1)
            comm.comm.barrier(stream=comm.stream.ptr)
        before: dict[str, Any] = comm.comm.dump()
        assert states(before)[0] == "done"
        comm.finish()
        found: dict[str, Any] = comm.comm.dump()
        return found

    for dump in run_on(2, [0], body, timeout=20):
        assert states(dump) == ["done"] * 4
        first, reduced, sent, barrier = dump["gpu_calls"]
        assert [c["sequence"] for c in dump["gpu_calls"]] == [1, 2, 3, 4]
        assert (first["collective"], first["bytes"]) == ("all_reduce", 4 * SMALL)
        assert first["algorithm"] == "direct_one_shot"
        assert (reduced["op"], reduced["order"], reduced["algorithm"]) == ("max", "rank", "ring")
        assert (reduced["count"], reduced["bytes"]) == (LARGE, 4 * LARGE)
        assert (sent["collective"], sent["root"]) == ("broadcast", 1)
        assert barrier["collective"] == "barrier" and "bytes" not in barrier
        begins = [c["begin"] for c in dump["gpu_calls"]]
        assert begins == sorted(begins) and all(b <= dump["time"] for b in begins)
        assert "gpu_waiting" not in dump and "error" not in dump
        (said,) = diagnose([{**dump, "size": 1}])
        assert "on their GPUs all ranks that are here have finished barrier #4" in said


def test_the_ring_keeps_the_last_calls() -> None:
    def body(comm: OnDevice) -> list[int]:
        small, _ = ready(comm)
        with comm.stream:
            for _ in range(150):
                comm.comm.all_reduce(small)
        comm.finish()
        return [c["sequence"] for c in comm.comm.dump()["gpu_calls"]]

    assert run_on(2, [0], body, timeout=30) == [list(range(24, 152))] * 2


@pytest.mark.parametrize("looks", [True, False])
def test_who_is_behind(looks: bool) -> None:
    """Two ranks have put a call on their GPUs that the third has not: while one waits for it, and
    when nobody looks.
    """
    dumped = threading.Event()
    ends: dict[int, cc.Communicator] = {}
    dumps: list[dict[str, Any]] = []

    def body(comm: OnDevice) -> None:
        small, large = ready(comm)
        ends[comm.rank] = comm.comm
        comm.comm.barrier()
        if comm.rank != 2:
            with comm.stream:
                comm.comm.all_reduce(large, "max", algorithm="ring")
                comm.comm.all_reduce(small, algorithm="direct_one_shot")
            if looks and comm.rank == 0:
                comm.comm.synchronize()
            else:
                dumped.wait(60)
        else:
            key = "gpu_waiting"
            wait_until(lambda: all(len(ends[r].dump()["gpu_calls"]) == 3 for r in (0, 1)))
            wait_until(lambda: not looks or key in ends[0].dump())
            dumps.extend(ends[r].dump() for r in range(3))
            dumped.set()
            with comm.stream:
                comm.comm.all_reduce(large, "max", algorithm="ring")
                comm.comm.all_reduce(small, algorithm="direct_one_shot")
        comm.finish()

    run_on(3, [0], body, timeout=60)
    (said,) = diagnose(dumps)
    start = (
        r"rank 2 has not put all_reduce #2 \(float32, \d+ bytes, max, ring\) on its GPU "
        r"\(rank 2 put all_reduce #1 there \d+\.\d s ago, which has ended\); "
    )
    end = r"rank 0 waits since \d+\.\d s" if looks else r"ranks 0-1 did \d+\.\d s ago"
    assert re.search(start + end, said), said
    assert [states(d) for d in dumps] == [["done", "entered", "entered"]] * 2 + [["done"]]


def test_a_host_call_behind_a_gpu_call_is_not_to_blame() -> None:
    """Ranks wait in a barrier on their hosts; the third lacks the call on its GPU before that."""
    dumped = threading.Event()
    ends: dict[int, cc.Communicator] = {}
    dumps: list[dict[str, Any]] = []

    def body(comm: OnDevice) -> None:
        small, _ = ready(comm)
        ends[comm.rank] = comm.comm
        comm.comm.barrier()
        if comm.rank == 2:
            wait_until(lambda: all("waiting" in ends[r].dump() for r in (0, 1)))
            dumps.extend(ends[r].dump() for r in range(3))
            dumped.set()
        with comm.stream:
            comm.comm.all_reduce(small)
        comm.comm.barrier()
        comm.finish()

    run_on(3, [0], body, timeout=60)
    (said,) = diagnose(dumps)
    assert "rank 2 has not put all_reduce #2" in said, said


def test_errors_are_kept_and_dumped(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that never comes: the deadline names it, is in the dump, and the doctor tells it."""
    monkeypatch.setenv("COLLECTIVES_DUMP", str(tmp_path))
    gone = threading.Event()

    def body(comm: OnDevice) -> dict[str, Any]:
        small, large = ready(comm)
        comm.comm.barrier()
        with comm.stream:
            comm.comm.all_reduce(large)
            if comm.rank == 0:
                comm.comm.all_reduce(small, algorithm="direct_one_shot")
        if comm.rank == 0:
            with pytest.raises(cc.DeadlineError, match=r"in call 3 of rank 0 .* graph") as raised:
                comm.comm.synchronize()
            assert raised.value.peer == 1
            gone.set()
        gone.wait(60)
        found: dict[str, Any] = comm.comm.dump()
        return found

    try:
        first, second = run_on(2, [0], body, timeout=6)
    finally:
        _core.set_dump_directory("")
    assert states(first) == ["done", "done", "failed"]
    assert (first["error"]["kind"], first["error"]["peer"]) == ("deadline", 1)
    assert "gpu_calls" in second and len(second["gpu_calls"]) == 2
    (said,) = diagnose([first, second])
    assert "rank 1 has not put all_reduce #3" in said and "rank 0 gave up in it" in said, said
    (file,) = tmp_path.glob("*.json")
    assert any(d.get("error", {}).get("kind") == "deadline" for d in read([file]))


def test_a_mismatch_on_the_gpu_is_told() -> None:
    def body(comm: OnDevice) -> dict[str, Any]:
        small, large = ready(comm)
        comm.comm.barrier()
        with comm.stream:
            comm.comm.all_reduce(small if comm.rank else large, algorithm="direct_one_shot")
        with pytest.raises(cc.MismatchError):
            comm.comm.synchronize()
        comm.comm.barrier()  # on the host, it works on
        found: dict[str, Any] = comm.comm.dump()
        return found

    dumps = run_on(2, [0], body, timeout=20)
    assert [d["state"] for d in dumps] == ["open"] * 2
    (said,) = diagnose(dumps)
    for count, rank in ((LARGE, 0), (SMALL, 1)):
        assert f"all_reduce #2 (float32, {4 * count} bytes, direct_one_shot) on rank {rank}" in said
    (alone,) = diagnose(dumps[:1])
    assert "no dump of rank 1" in alone, alone


def test_a_captured_call() -> None:
    """It is in the record, whatever becomes of its graph; calls around it are told apart."""

    def body(comm: OnDevice) -> list[str]:
        small, _ = ready(comm)
        with comm.stream:
            comm.stream.begin_capture()
            comm.comm.all_reduce(small)
            graph = comm.stream.end_capture()
            comm.comm.barrier()
            graph.launch(comm.stream)
            comm.comm.all_reduce(small)
        comm.finish()
        return states(comm.comm.dump())

    assert run_on(2, [0], body, timeout=20) == [["done", "captured", "done"]] * 2


def test_one_rank_captures_and_the_other_calls_at_once() -> None:
    """Legal: the call is done when the graph is launched. Until then the doctor says who waits."""
    dumped = threading.Event()
    ends: dict[int, cc.Communicator] = {}
    said: list[str] = []

    def body(comm: OnDevice) -> float:
        small, _ = ready(comm)
        ends[comm.rank] = comm.comm
        host = np.full(SMALL, comm.rank + 1, np.float32)
        comm.copy(comm.memory.ptr, host.ctypes.data, host.nbytes, 1)
        comm.comm.barrier()
        with comm.stream:
            if comm.rank == 0:
                comm.stream.begin_capture()
                comm.comm.all_reduce(small)
                graph = comm.stream.end_capture()
                wait_until(lambda: "gpu_waiting" in ends[1].dump())
                said.extend(diagnose([ends[0].dump(), ends[1].dump()]))
                dumped.set()
                graph.launch(comm.stream)
            else:
                comm.comm.all_reduce(small)
                comm.comm.synchronize()
        comm.finish()
        comm.copy(host.ctypes.data, comm.memory.ptr, host.nbytes, 2)
        return float(host[-1])

    assert run_on(2, [0], body, timeout=60) == [3.0, 3.0]
    assert re.search(
        r"rank 1 waits for all_reduce #2 \(.*\) on its GPU since \d+\.\d s; rank 0 has captured "
        r"all_reduce #2",
        said[0],
    ), said


def test_a_capture_that_is_never_launched_is_a_deadline_that_says_so() -> None:
    gave_up = threading.Event()

    def body(comm: OnDevice) -> str:
        small, _ = ready(comm)
        comm.comm.barrier()
        with comm.stream:
            if comm.rank == 0:
                comm.stream.begin_capture()
                comm.comm.all_reduce(small)
                comm.stream.end_capture()
                gave_up.wait(60)
                return ""
            comm.comm.all_reduce(small)
        try:
            comm.comm.synchronize()
        except cc.DeadlineError as error:
            return str(error)
        finally:
            gave_up.set()
        return "nothing raised"

    _, words = run_on(2, [0], body, timeout=6)
    assert "from rank 0" in words and "captured the call into a graph" in words, words


def test_a_capture_does_not_hide_a_call_that_still_runs() -> None:
    """`synchronize` waits for the calls before the capture; and during one it disturbs nothing."""
    looked = threading.Event()

    def body(comm: OnDevice) -> bool:
        small, _ = ready(comm)
        comm.comm.barrier()
        idle = True
        if comm.rank == 1:
            looked.wait(60)
        with comm.stream:
            comm.comm.all_reduce(small)  # on rank 0 it waits for rank 1
        other = cupy.cuda.Stream(non_blocking=True)
        with other:
            other.begin_capture()
            comm.comm.all_reduce(small)
            if comm.rank == 0:
                with pytest.raises(cc.DeadlineError):
                    comm.comm.synchronize(0.01)
            other.end_capture()
        if comm.rank == 0:
            with pytest.raises(cc.DeadlineError):
                comm.comm.synchronize(0.01)
            idle = states(comm.comm.dump())[1] == "done"
            looked.set()
        comm.finish()
        return idle

    assert run_on(2, [0], body, timeout=60)[0] is False


def test_a_call_behind_a_capture_follows_the_calls_before_it() -> None:
    """On another stream than those: kernels of one rank never run at the same time."""

    def body(comm: OnDevice) -> float:
        small, large = ready(comm)
        host = np.ones(LARGE, np.float32)
        comm.copy(large.data.ptr, host.ctypes.data, host.nbytes, 1)
        comm.comm.barrier()
        streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
        for _ in range(20):
            with comm.stream:
                comm.comm.all_reduce(large, "avg", algorithm="ring")
            with streams[0]:
                streams[0].begin_capture()
                comm.comm.all_reduce(small)
                streams[0].end_capture()
            with streams[1]:
                comm.comm.all_reduce(large, "avg", algorithm="ring")
            streams[1].synchronize()
        comm.finish()
        comm.copy(host.ctypes.data, large.data.ptr, host.nbytes, 2)
        return float(host.sum())

    assert run_on(2, [0], body, timeout=60) == [float(LARGE)] * 2
