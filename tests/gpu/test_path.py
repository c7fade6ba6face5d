"""The ways between ranks: memory of their GPUs, or pinned memory of the host where GPUs do not
reach each other. Real GPUs run what COLLECTIVES_GPU_PATH forces; links that refuse or lose
something are those of tests/emulated.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import launch
import numpy as np
import pytest
import reference
from cases import Case, check, registry, sweep
from gpus import GPUS, MARK, cupy
from on_device import EMULATED, OnDevice, run_on, some

import collectives as cc

pytestmark = MARK

ALL = list(range(GPUS))
emulated = pytest.mark.skipif(not EMULATED or GPUS < 2, reason="needs links that can be broken")
HERE = Path(__file__).parent


@pytest.fixture
def by_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLECTIVES_GPU_PATH", "host")


def path_of(comm: cc.Communicator) -> tuple[str, str]:
    assert comm._device is not None
    return comm._device.path, comm._device.fallback


@pytest.mark.usefixtures("by_host")
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_every_algorithm_through_the_host(n: int) -> None:
    """The kernels are the same, and so are results, whatever the dtype, place and count."""
    wanted = [
        case._replace(place="out", v=case.v and case.algorithm == "direct_two_shot")
        if case.collective == "all_to_all" or case.place == "new"
        else case
        for case in sweep(n, registry(n), (0, 1, 17, 1000, 70_001), how="blocking")
    ]
    wanted += [
        Case("all_reduce", algorithm, dtype, op, 777, place="in", seed=i)
        for i, (dtype, op) in enumerate(reference.PAIRS)
        for algorithm in ("direct_one_shot", "direct_two_shot", "ring")
    ]
    wanted += [
        Case(collective, algorithm, count=400_001, place="out", seed=3)
        for algorithm, collective in registry(n)
        if collective != "barrier"
    ]
    wanted = some(wanted)

    def body(comm: OnDevice) -> tuple[str, str]:
        for case in wanted:
            check(comm, case)
        return path_of(comm.comm)

    assert run_on(n, ALL, body, timeout=20) == [("host", "")] * n


@pytest.mark.usefixtures("by_host")
def test_no_lines_through_the_host() -> None:
    """Sizes that would go in lines of 128 bytes go another way."""

    def body(comm: OnDevice) -> bool:
        engine = comm.comm._device
        assert engine is not None and not engine.core.keeps_lines()
        for count in (200_000, 600_000):
            check(comm, Case("all_reduce", "direct_one_shot", count=count))
        return True

    assert run_on(2, ALL, body, timeout=20) == [True] * 2


@pytest.mark.usefixtures("by_host")
def test_symmetric_buffers_are_ordinary_arrays() -> None:
    """They are made, work at unlike places in them, and are dropped."""

    def body(comm: OnDevice) -> bool:
        c = comm.comm
        for _ in range(2):
            x = c.empty(3000, "float32", f"cuda:{comm.device}", kind="cupy")
            host = np.full(3000, c.rank + 1, np.float32)
            comm.copy(x.data.ptr, host.ctypes.data, host.nbytes, 1)
            c.barrier()
            with comm.stream:
                c.all_reduce(x[c.rank : 2000 + c.rank], algorithm="direct_two_shot")
            comm.finish()
            comm.copy(host.ctypes.data, x.data.ptr, host.nbytes, 2)
            assert (host[c.rank : 2000 + c.rank] == 6).all()
            assert (host[2000 + c.rank :] == c.rank + 1).all()
            del x
        return True

    assert run_on(3, ALL, body, timeout=20) == [True] * 3


@pytest.mark.usefixtures("by_host")
def test_graphs_and_mismatches_through_the_host() -> None:
    def body(comm: OnDevice) -> str:
        with comm.stream:
            x = cupy.ndarray((5000,), cupy.float32, cupy.cuda.MemoryPointer(comm.memory.mem, 0))
        host = np.ones(5000, np.float32)
        comm.comm.barrier()
        with comm.stream:
            comm.comm.all_reduce(x, op="avg")
        comm.finish()
        comm.stream.begin_capture()
        with comm.stream:
            for algorithm in ("direct_one_shot", "direct_two_shot", "ring"):
                comm.comm.all_reduce(x, algorithm=algorithm)
        graph = comm.stream.end_capture()
        for turn in range(6):
            host[:] = turn + comm.rank
            comm.copy(x.data.ptr, host.ctypes.data, host.nbytes, 1)
            comm.comm.barrier()
            graph.launch(comm.stream)
            comm.finish()
            comm.copy(host.ctypes.data, x.data.ptr, host.nbytes, 2)
            assert (host == (3 * turn + 3) * 9).all()
        try:
            comm.all_reduce(np.ones(100 + comm.rank, np.float32))
        except cc.MismatchError as error:
            return str(error)
        return ""

    words = run_on(3, ALL, body, timeout=20)
    assert all(words), words
    assert any("in another call" in w for w in words)


def run_worker(gpus: int, **env: str) -> str:
    worker = HERE / "ipc_worker.py"
    path = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "collectives", "run", "-n", "2", str(worker), str(gpus)],
        env={**os.environ, "PYTHONPATH": path, **env},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all right") == 2, done.stdout
    return done.stdout + done.stderr


def test_processes_through_the_host() -> None:
    """Arenas in memory that processes share; nothing of it is left with a name."""
    words = run_worker(min(GPUS, 2), COLLECTIVES_GPU_PATH="host")
    assert "path host" in words and "Warning" not in words, words


@emulated
def test_processes_without_peer_access() -> None:
    words = run_worker(2, EMULATED_NO_PEER="0-1")
    assert "path host" in words, words
    assert "RuntimeWarning: device arrays go through pinned memory of the host" in words, words
    assert "cannot map each other's memory: cudaErrorPeerAccessUnsupported" in words, words


def test_the_variable_is_equal_on_all_ranks() -> None:
    def body(comm: cc.Communicator) -> bool:
        comm._gpu_path = ("host", "auto")[comm.rank]
        with pytest.raises(cc.ConfigError, match=r"differs .* \(rank 0: host, rank 1: auto\)"):
            comm.all_reduce(cupy.empty(8, "float32"))
        return True

    assert cc.run_threads(2, body, timeout=20) == [True] * 2


@emulated
@pytest.mark.parametrize("path", ["peer", "host"])
def test_gpus_of_different_kinds(path: str) -> None:
    """One GPU has room for fewer blocks than the other: all ranks take what it has."""
    words = run_worker(2, EMULATED_PROCESSORS="8 3", COLLECTIVES_GPU_PATH=path)
    assert f"path {path}, 6 blocks" in words, words


@pytest.mark.faults
def test_a_death_through_the_host() -> None:
    gpus = min(GPUS, 3)
    n = 3 if gpus > 1 else 2
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    env = {"PYTHONPATH": path, "COLLECTIVES_GPU_PATH": "host"}
    got = launch.run(n, HERE / "dying_worker.py", gpus, "direct_two_shot", env=env, timeout=100)
    lines = re.findall(r"^rank (\d): (\w+) after (\d+\.\d) s: (.*)$", got.output, re.MULTILINE)
    assert sorted(line[0] for line in lines) == ["0", "1"][: n - 1], got
    assert {kind for _, kind, _, _ in lines} == {"PeerDiedError"}, got
    assert all(float(seconds) < 20 for _, _, seconds, _ in lines), got


# ---- links that refuse or lose something -------------------------------------------------------


def sums(comm: OnDevice) -> Any:
    for algorithm in ("direct_one_shot", "direct_two_shot", "ring"):
        check(comm, Case("all_reduce", algorithm, count=3000))
    return path_of(comm.comm)


@emulated
def test_no_peer_access(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks go the same way, and the pair is named: here, and in a warning."""
    monkeypatch.setenv("EMULATED_NO_PEER", "0-1")
    with pytest.warns(RuntimeWarning, match="pinned memory of the host") as warned:
        found = run_on(3, [0, 1, 0], sums, timeout=20)
    words = (
        r"rank 0 cannot map a peer's memory: rank 0 \(GPU 0\) and rank 1 \(GPU 1\) have no peer "
        r"access: .*; rank 1 cannot"
    )
    assert len(set(found)) == 1 and found[0][0] == "host", found
    assert re.search(words, found[0][1]), found
    assert len(warned) == 1 and re.search(words, str(warned[0].message)), warned


@emulated
def test_ranks_of_one_gpu_need_no_peer_access(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMULATED_NO_PEER", "0-1")
    assert run_on(3, [0], sums, timeout=20) == [("peer", "")] * 3


@emulated
@pytest.mark.parametrize("way", ["0-1", "1-0"])
def test_a_link_that_loses_writes(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """The driver says yes and the self-test no; the reader of what is lost is named."""
    monkeypatch.setenv("EMULATED_LOSES", way)
    with pytest.warns(RuntimeWarning, match="failed the self-test"):
        found = run_on(2, [0, 1], sums, timeout=20)
    writer, reader = way.split("-")
    words = f"rank {reader} does not see what rank {writer} wrote to its GPU memory"
    assert [path for path, _ in found] == ["host"] * 2 and all(words in w for _, w in found), found
    assert f"rank {writer} does not" not in found[0][1], found


def refused() -> list[str]:
    """What two ranks, each on its GPU, are told; their end on the host goes on."""

    def body(comm: cc.Communicator) -> str:
        cupy.cuda.Device(comm.rank).use()
        x = cupy.empty(8, "float32")
        with pytest.raises(cc.UnsupportedError) as caught:
            comm.all_reduce(x)
        assert comm.all_reduce(np.ones(1))[0] == 2
        return str(caught.value)

    return cc.run_threads(2, body, timeout=20)


@emulated
def test_a_link_that_loses_writes_to_the_host_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMULATED_LOSES", "0-1 1-host")
    for words in refused():
        assert "rank 1 does not see what rank 0 wrote to its GPU memory" in words, words
        assert "then, through pinned memory of the host: rank 0 failed the self-test" in words
        assert "does not see what rank 1 wrote to its pinned memory on the host" in words, words


@emulated
def test_a_forced_way_is_not_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMULATED_NO_PEER", "0-1")
    monkeypatch.setenv("COLLECTIVES_GPU_PATH", "peer")
    for words in refused():
        assert "have no peer access" in words and "COLLECTIVES_GPU_PATH=peer forbids" in words
