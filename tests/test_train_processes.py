"""Training between processes: over shared memory and over MPI, and when one of them dies."""

from __future__ import annotations

import re

import launch
import pytest


@pytest.mark.parametrize("ranks", [2, 3])
def test_stages_are_equal_between_processes(ranks):
    result = launch.run(ranks, "train.py").expect(status=0)
    assert result.output.count("equal over shm") == ranks


@pytest.mark.mpi
@pytest.mark.parametrize("launcher", ["openmpi", "mpich"])
def test_stages_are_equal_over_mpi(launcher):
    result = launch.run(
        2, "train.py", launcher=launcher, env={"COLLECTIVES_TRANSPORT": "mpi"}
    ).expect(status=0)
    assert result.output.count("equal over mpi") == 2


@pytest.mark.faults
@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_that_dies_in_a_step(stage):
    """The others raise in words, long before any deadline."""
    result = launch.run(3, "train.py", "--die", stage, timeout=60)
    for rank in (0, 2):
        assert re.search(rf"^rank {rank} ended: .*rank 1", result.output, re.MULTILINE), result
