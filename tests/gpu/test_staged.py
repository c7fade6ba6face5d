"""Arrays on GPUs whose ranks are on several nodes, made of one machine by COLLECTIVES_NODE, under
Open MPI.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import launch
import pytest
from gpus import MARK

pytestmark = [MARK, pytest.mark.mpi]

WORKER = Path(__file__).with_name("nodes_worker.py")


def ranks(what: str, nodes: str, staging: str = "1M", timeout: float = 110) -> launch.Result:
    path = os.pathsep.join([str(WORKER.parent), os.environ.get("PYTHONPATH", "")])
    return launch.run(
        nodes.count(",") + 1,
        WORKER,
        what,
        nodes,
        launcher="openmpi",
        env={
            "PYTHONPATH": path,
            "COLLECTIVES_STAGING": staging,
            # Seconds until mpirun kills the others when a rank has died.
            "PRTE_MCA_odls_base_sigkill_timeout": "40",
        },
        timeout=timeout,
    )


def all_right(result: launch.Result, n: int) -> int:
    """How many cases a rank has checked."""
    found = re.findall(r"^rank (\d): all right, (\S+) cases$", result.output, re.MULTILINE)
    assert sorted(rank for rank, _ in found) == [str(r) for r in range(n)], result
    return 0 if found[0][1] == "None" else int(found[0][1])


@pytest.mark.parametrize(
    ("nodes", "staging"),
    [("0,1", "1K"), ("0,0,1,1", "1M"), ("0,1,0,1", "4K"), ("0,0,0,1", "1K")],
    ids=str,
)
def test_every_collective(nodes: str, staging: str) -> None:
    """Every algorithm, dtype, placement; slices of 1 KiB are many, of 1 MiB one."""
    n = nodes.count(",") + 1
    assert all_right(ranks("cases", nodes, staging).expect(status=0), n) >= 52


@pytest.mark.parametrize("staging", ["4K", "1M"])
def test_streams_order_calls_and_the_host_waits_for_nothing(staging: str) -> None:
    all_right(ranks("order", "0,1,1", staging).expect(status=0), 3)


def test_errors_in_words_and_a_mismatch_writes_nothing() -> None:
    all_right(ranks("errors", "0,1", "4K").expect(status=0), 2)


@pytest.mark.faults
def test_survivors_of_a_death() -> None:
    """Ranks of its node see that it died, and tell those of other nodes, long before a deadline."""
    got = ranks("death", "0,1,1", "4K")
    lines = re.findall(r"^rank (\d): (\w+) after (\d+\.\d) s: (.*)$", got.output, re.MULTILINE)
    assert sorted(line[0] for line in lines) == ["0", "1"], got
    for _, kind, seconds, text in lines:
        assert kind == "PeerDiedError", got
        assert "rank 2 (process " in text, got
        assert float(seconds) < 30, got
    assert len(re.findall(r"again \w+Error$", got.output, re.MULTILINE)) == 2, got
