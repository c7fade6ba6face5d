"""Arrays on GPUs whose ranks are on several nodes, made of one machine by COLLECTIVES_NODE, under
Open MPI.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import launch
import pytest
from gpus import GPUS, MARK
from on_device import EMULATED

pytestmark = [MARK, pytest.mark.mpi]

WORKER = Path(__file__).with_name("nodes_worker.py")
BENCHMARK = Path(__file__).parents[2] / "bench" / "nodes_gpu.py"
COLLECTIVES = ("all_reduce", "all_gather", "broadcast", "reduce_scatter", "all_to_all")


def ranks(
    what: str,
    nodes: str,
    staging: str = "1M",
    timeout: float = 110,
    straight: str = "off",
    **more: str,
) -> launch.Result:
    """`straight`: COLLECTIVES_GPU_MPI. To the emulated runtime, whose GPUs' memory is the host's,
    every MPI is CUDA-aware. `more`: variables of the environment.
    """
    n = nodes.count(",") + 1
    if not EMULATED and n > GPUS:
        # Processes that share a GPU take turns there, of milliseconds, and each wait of a slice for
        # another rank takes such turns: few cases then, in few slices.
        more["EMULATED_THIN"] = "8"
        staging = staging if staging.endswith("M") else "1M"
    folders = [str(WORKER.parent), str(WORKER.parents[1])]
    path = os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])
    return launch.run(
        n,
        WORKER,
        what,
        nodes,
        launcher="openmpi",
        env={
            "PYTHONPATH": path,
            "COLLECTIVES_STAGING": staging,
            "COLLECTIVES_GPU_MPI": straight,
            # Seconds until mpirun kills the others when a rank has died; of Open MPI 5 and 4.
            "PRTE_MCA_odls_base_sigkill_timeout": "40",
            "OMPI_MCA_odls_base_sigkill_timeout": "40",
            **more,
        },
        timeout=timeout,
    )


def all_right(result: launch.Result, n: int) -> int:
    """How many cases a rank has checked."""
    told = r"^rank (\d): all right, (\S+) cases, \d+ straight$"
    found = re.findall(told, result.output, re.MULTILINE)
    assert sorted(rank for rank, _ in found) == [str(r) for r in range(n)], result
    return 0 if found[0][1] == "None" else int(found[0][1])


def went_straight(result: launch.Result) -> int:
    """Calls of rank 0 whose arrays MPI was given as they are."""
    found = re.search(r"^rank 0: .* (\d+) straight$", result.output, re.MULTILINE)
    assert found is not None, result
    return int(found[1])


ASKS = "from mpi4py import MPI; from collectives import _core; print(_core.loaded_mpi()['cuda'])"


@functools.cache
def cuda_aware() -> str:
    """What the MPI library says of itself: "yes", "no" or "does not tell"."""
    asked = subprocess.run([sys.executable, "-c", ASKS], capture_output=True, text=True, timeout=60)
    return asked.stdout.strip()


def done_by_itself(result: launch.Result, n: int) -> int:
    """How many cases were checked where nothing forces MPI to be given the arrays."""
    done = all_right(result, n)
    if not EMULATED and not done:
        pytest.skip(
            "this MPI copies by way of memory that is not pinned, so calls are staged unless they "
            "are forced, which other tests here do; the emulated runtime runs this one"
        )
    return done


@pytest.fixture
def takes_pointers() -> None:
    """Skips where MPI cannot be given pointers to memory of GPUs."""
    if not EMULATED and cuda_aware() != "yes":
        pytest.skip(
            "an MPI that is not CUDA-aware would take the pointer for one of the host (is this "
            f"one? It says: {cuda_aware()}); the emulated runtime runs this with any MPI"
        )


@pytest.mark.parametrize(
    ("nodes", "staging"),
    [("0,1", "1K"), ("0,0,1,1", "1M"), ("0,1,0,1", "4K"), ("0,0,0,1", "1K")],
    ids=str,
)
def test_every_collective(nodes: str, staging: str) -> None:
    """Every algorithm, dtype, placement; slices of 1 KiB are many, of 1 MiB one."""
    n = nodes.count(",") + 1
    assert all_right(ranks("cases", nodes, staging).expect(status=0), n) >= 52


@pytest.mark.parametrize("nodes", ["0,1,0,1", "0,0,0,1,1,2"])
def test_calls_along_rails(nodes: str) -> None:
    """By processes, through CUDA IPC, in several windows; uneven nodes have none."""
    n = nodes.count(",") + 1
    assert all_right(ranks("rails", nodes, "16K").expect(status=0), n) >= 12


def test_slices_of_less_than_a_slot() -> None:
    all_right(ranks("large", "0,1", "8M").expect(status=0), 2)


@pytest.mark.usefixtures("takes_pointers")
@pytest.mark.parametrize(
    ("what", "nodes", "staging"),
    [
        ("cases", "0,1", "64K"),  # messages of less than 13 KiB
        ("cases", "0,0,0,1", "8M"),  # of 1 MiB at most; within a node by MPI, too
        ("rails", "0,1,0,1", "1M"),
        ("large", "0,1", "8M"),
        ("order", "0,1,1", "1M"),
    ],
)
def test_mpi_takes_the_arrays_as_they_are(what: str, nodes: str, staging: str) -> None:
    """All that is staged elsewhere, straight; of cases all but barriers and premul_sum. A kernel
    that CUDA loads at its first use would wait for those that wait for it.
    """
    lazy = {"CUDA_MODULE_LOADING": "LAZY"}
    result = ranks(what, nodes, staging, straight="on", **lazy).expect(status=0)
    done = all_right(result, nodes.count(",") + 1)
    assert went_straight(result) >= max(10, done * 3 // 4), result


@pytest.mark.usefixtures("takes_pointers")
def test_mpi_that_says_that_it_is_cuda_aware_takes_large_arrays() -> None:
    result = ranks("sizes", "0,1,2", "8M", straight="auto").expect(status=0)
    assert done_by_itself(result, 3) == 22


@pytest.mark.usefixtures("takes_pointers")
def test_one_rail_on_which_mpi_takes_no_pointers() -> None:
    """All ranks stage then, and none waits for those of that rail."""
    result = ranks("one rail", "0,0,1,1", "1M", straight="auto").expect(status=0)
    assert done_by_itself(result, 4) >= 12


@pytest.mark.parametrize("staging", ["4K", "1M"])
def test_streams_order_calls_and_the_host_waits_for_nothing(staging: str) -> None:
    all_right(ranks("order", "0,1,1", staging).expect(status=0), 3)


def test_errors_in_words_and_a_mismatch_writes_nothing() -> None:
    all_right(ranks("errors", "0,1", "4K").expect(status=0), 2)


@pytest.mark.skipif(
    not EMULATED, reason="only emulated streams can be made to stand behind each other"
)
def test_mpi_is_not_given_the_arrays_where_streams_share_queues() -> None:
    """What MPI copies on a stream of its own could stand behind a kernel that waits for it."""
    got = ranks("large", "0,1", straight="on", EMULATED_CONNECTIONS="8").expect(status=1)
    assert "UnsupportedError" in got.output, got
    assert "CUDA_DEVICE_MAX_CONNECTIONS=32 before anything uses CUDA" in got.output, got


@pytest.mark.usefixtures("takes_pointers")
def test_a_mismatch_writes_nothing_where_mpi_takes_the_arrays() -> None:
    all_right(ranks("errors", "0,1", "1M", straight="on").expect(status=0), 2)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("what", "nodes", "straight"),
    [("death", "0,1,1", "off"), ("death within", "0,0,1,1", "off"), ("death", "0,1,1", "on")],
)
def test_survivors_of_a_death(
    what: str, nodes: str, straight: str, request: pytest.FixtureRequest
) -> None:
    """Ranks of its node see that it died, and tell those of other nodes, long before a deadline:
    before a call, or while its rail waits for it.
    """
    if straight == "on":
        request.getfixturevalue("takes_pointers")
    got = ranks(what, nodes, "1M" if straight == "on" else "4K", straight=straight)
    last = nodes.count(",")
    lines = re.findall(r"^rank (\d): (\w+) after (\d+\.\d) s: (.*)$", got.output, re.MULTILINE)
    assert sorted(line[0] for line in lines) == [str(r) for r in range(last)], got
    for _, kind, seconds, text in lines:
        assert kind == "PeerDiedError", got
        assert f"rank {last} (process " in text, got
        assert float(seconds) < 30, got
    assert len(re.findall(r"again \w+Error$", got.output, re.MULTILINE)) == last, got


def test_the_benchmark_compares_rails_with_flat_algorithms(tmp_path: Path) -> None:
    """bench/nodes_gpu.py on two nodes of two ranks, a composition among the algorithms."""
    told = tmp_path / "told.json"
    names = "ring,hierarchical(ring, ring)"
    words = ["--nodes", 2, "--algorithms", names, "--bytes", "4K,128K", "--seconds", "0.01"]
    words += ["--collectives", "all_reduce,all_to_all", "--json", told]
    got = launch.run(4, BENCHMARK, *words, launcher="openmpi", timeout=110).expect(status=0)
    found = json.loads(told.read_text())
    assert not found["left_out"], got
    for row in found["rows"]:
        assert row["wrong"] == 0 and row["rails"] == (row["bytes"] == 128 << 10), row
        extra = [f"gpu {a}" for a in ("ring", "hierarchical(ring, ring)")]
        extra = extra if row["collective"] == "all_reduce" else []
        assert list(row["times"]) == ["gpu", *extra, "waited", "host", "mpi", "wire"], row
    assert [row["bytes"] for row in found["rows"]] == [4 << 10, 128 << 10] * 2


def test_the_benchmark_verifies_and_tells(tmp_path: Path) -> None:
    """bench/nodes_gpu.py: every collective, and slices of two sizes."""
    told = tmp_path / "told.json"
    words = ["--bytes", "4K,3M", "--staging", "1M", "--seconds", "0.01", "--json", told]
    got = launch.run(2, BENCHMARK, *words, launcher="openmpi", timeout=110).expect(status=0)
    found = json.loads(told.read_text())
    assert found["header"]["versions"]["mpi"].startswith("Open MPI"), found["header"]
    assert len(found["header"]["machine"]["gpus"]) == 2 and not found["left_out"]
    for row in found["rows"]:
        assert list(row["times"]) == ["gpu", "gpu 1M", "waited", "host", "mpi", "wire"], row
        assert row["wrong"] == 0 and row["algorithm"], row
        assert all(of["us"] > 0 for of in row["times"].values()), row
        assert f"{row['collective']} " in got.output
    rows = [(row["collective"], row["bytes"]) for row in found["rows"]]
    assert rows == [(c, b) for c in COLLECTIVES for b in (4 << 10, 3 << 20)]
