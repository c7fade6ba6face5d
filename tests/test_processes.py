"""Ranks that are processes: shared memory, Open MPI and MPICH, and shared memory with MPI between
nodes; every registered algorithm, parts of communicators, and mpi4py's own results beside ours.

Each launch runs a large batch of checks (workers/battery.py), since starting takes long.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import launch
import pytest

MPIS = [pytest.param(name, marks=pytest.mark.mpi) for name in ("openmpi", "mpich")]


def battery(n: int, *arguments: object, transport: str, least: int, **how: object) -> None:
    """Runs the battery; at least `least` cases must have been checked, over `transport`."""
    result = launch.run(n, "battery.py", *arguments, timeout=110, **how).expect(status=0)
    line = re.search(r"^checked (\d+) cases over (\S+)$", result.output, re.MULTILINE)
    assert line, result
    assert line[2] == transport, result
    assert int(line[1]) >= least, result


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_shared_memory(n):
    large = "8193,33000,262145" if n < 4 else "8193,33000"
    battery(n, "--large", large, transport="shm", least=400)


def test_shared_memory_from_the_queue():
    battery(3, "--how", "async", "--counts", "1,300,9000", transport="shm", least=150)


def test_ranks_whose_arrays_have_the_same_addresses(port):
    """As those of processes that were forked, or start without randomised addresses."""
    command = [sys.executable, launch.WORKERS / "forked.py", "3", str(port)]
    env = {k: v for k, v in os.environ.items() if not k.startswith("COLLECTIVES_")}
    got = subprocess.run(command, capture_output=True, text=True, timeout=100, env=env)
    assert got.returncode == 0, got.stdout + got.stderr
    assert got.stdout.count(": right over shm\n") == 3, got.stdout


def test_nodes_of_processes():
    """More than one node by COLLECTIVES_NODE, with shared memory between all."""
    counts = ("--counts", "1,300,9000")
    battery(5, *counts, options=("--nodes", "2"), transport="shm", least=150)


@pytest.mark.parametrize("launcher", MPIS)
def test_under_mpirun(launcher):
    """The ranks of one host share memory, whoever started them."""
    arguments = ("--counts", "1,300,9000", "--parts", "--mpi4py")
    battery(4, *arguments, launcher=launcher, transport="shm", least=400)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("launcher", MPIS)
def test_all_data_through_mpi(launcher, n):
    arguments = ("--counts", "0,1,17,289,4099", "--large", "150000", "--parts", "--mpi4py")
    env = {"COLLECTIVES_TRANSPORT": "mpi"}
    battery(n, *arguments, launcher=launcher, env=env, transport="mpi", least=400)


@pytest.mark.parametrize("nodes", ["0,0,1", "0,1,0,1"])
@pytest.mark.parametrize("launcher", MPIS)
def test_shared_memory_within_nodes_and_mpi_between(launcher, nodes):
    arguments = ("--nodes", nodes, "--counts", "0,1,17,289,4099", "--large", "150000", "--parts")
    n = len(nodes.split(","))
    battery(n, *arguments, launcher=launcher, transport="shm+mpi", least=300)


@pytest.mark.parametrize("launcher", MPIS)
def test_small_calls_of_four_nodes_in_several_messages(launcher):
    """Two vectors of 4,090 elements go together, those of 8 bytes each in two messages, the first
    of which ends within a vector.
    """
    arguments = ("--nodes", "0,1,2,3", "--counts", "17,4090,4099", "--compositions")
    battery(4, *arguments, launcher=launcher, transport="mpi", least=1000)


@pytest.mark.parametrize("launcher", MPIS)
def test_the_queue_over_mpi(launcher):
    arguments = ("--nodes", "0,0,1", "--how", "async", "--counts", "1,300,9000")
    battery(3, *arguments, launcher=launcher, transport="shm+mpi", least=150)


@pytest.mark.mpi
@pytest.mark.parametrize("nodes", ["0,1", "0,0,1", "0,1,0,2"])
def test_small_calls_between_nodes_give_the_bits_of_their_schedules(nodes):
    n = len(nodes.split(","))
    result = launch.run(n, "fused.py", nodes, launcher="openmpi", timeout=100).expect(status=0)
    found = re.search(r"^compared (\d+)$", result.output, re.MULTILINE)
    assert found and int(found[1]) >= 6 * 15 * n, result
