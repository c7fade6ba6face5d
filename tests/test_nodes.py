"""Ranks on several hosts: virtual ones, made here, joined by a network of 1 Gbit/s or more.

What runs on one host with COLLECTIVES_NODE is in test_processes.py; here nothing is shared but the
network. `make test-nodes` runs the whole matrix of hosts, ranks and MPIs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import launch
import pytest
from virtual_hosts import VirtualHosts

pytestmark = [pytest.mark.mpi]

MATRIX = os.environ.get("TESTS_NODES") == "all"
MPIS = ("openmpi", "mpich")


def battery(placement, *arguments, launcher, least, timeout=110):
    """Runs the battery on these hosts: the nodes must be the hosts, and cases checked."""
    n = sum(placement.ranks)
    nodes = ",".join(map(str, placement.nodes))
    result = launch.run(
        n,
        "battery.py",
        "--expect-nodes",
        nodes,
        *arguments,
        launcher=launcher,
        hosts=placement,
        timeout=timeout,
    ).expect(status=0)
    line = re.search(r"^checked (\d+) cases over (\S+)$", result.output, re.MULTILINE)
    assert line, result
    assert line[2] == ("mpi" if max(placement.ranks) == 1 else "shm+mpi"), result
    assert int(line[1]) >= least, result


@pytest.mark.parametrize("launcher", MPIS)
def test_every_algorithm_between_hosts(launcher):
    """What is registered, what is chosen by itself, and parts of the communicator."""
    with VirtualHosts(2, "10gbit") as hosts:
        arguments = ("--counts", "0,1,289,4099", "--large", "150000", "--parts")
        battery(hosts.place([2, 1]), *arguments, launcher=launcher, least=250)


@pytest.mark.parametrize("launcher", MPIS)
def test_uneven_hosts_with_ranks_dealt_in_turn(launcher):
    with VirtualHosts(3, "10gbit") as hosts:
        placement = hosts.place([1, 1, 1] if launcher == "mpich" else [2, 1, 1], round_robin=True)
        battery(placement, "--counts", "1,4099", launcher=launcher, least=80)


@pytest.mark.parametrize(
    ("algorithm", "collective", "nbytes"),
    [
        ("hierarchical(direct_two_shot, halving_doubling)", "all_reduce", 4 << 20),
        ("hierarchical(direct_two_shot, direct_one_shot)", "all_reduce", 32 << 10),
        ("ring", "all_reduce", 4 << 20),
        ("hierarchical(direct_two_shot, ring)", "all_gather", 4 << 20),
        ("hierarchical(direct_two_shot, direct_two_shot)", "all_to_all", 4 << 20),
    ],
    ids=str,
)
def test_bytes_on_the_wire_are_those_of_the_schedule(algorithm, collective, nbytes):
    calls = (16 << 20) // nbytes
    with VirtualHosts(2) as hosts:
        result = launch.run(
            4,
            "wire.py",
            algorithm,
            collective,
            nbytes,
            calls,
            launcher="openmpi",
            hosts=hosts.place([2, 2]),
        ).expect(status=0)
    found = re.findall(r"^node (\d): sent (\d+) scheduled (\d+)$", result.output, re.MULTILINE)
    assert [node for node, _, _ in sorted(found)] == ["0", "1"], result
    for _, sent, scheduled in found:
        # Headers of Ethernet, IP, TCP and MPI, acknowledgements of what comes the other way, and
        # the agreement of each call.
        overhead = 2000 * calls
        assert 1.0 <= int(sent) / int(scheduled) <= 1.12 + overhead / int(scheduled), result


@pytest.mark.faults
@pytest.mark.parametrize("launcher", MPIS)
def test_a_cut_link_raises_on_all_ranks(launcher, tmp_path):
    deadline = 4.0
    start, environment = launch.command(launcher, 4)
    with VirtualHosts(2, "1gbit") as hosts:
        command = hosts.place([2, 2]).command(start, launcher)
        script = str(launch.WORKERS / "cut.py")
        job = subprocess.Popen(
            [*command, script, str(tmp_path), "all_reduce", str(deadline)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        try:
            wait_for(lambda: len(list(tmp_path.glob("ready.*"))) == 4, 60, "calls do not begin")
            hosts.cut(1)
            wait_for(
                lambda: len(list(tmp_path.glob("rank.*"))) == 4,
                deadline + 30,
                "not all ranks raised",
            )
        finally:
            launch.kill_session(job.pid)
            job.wait()
    errors = [path.read_text().split(maxsplit=2) for path in sorted(tmp_path.glob("rank.*"))]
    for name, seconds, text in errors:
        assert name in ("DeadlineError", "AbortedError"), errors
        # Each waits at most so long for anything, and the call that was cut took no longer than
        # one wait before it stopped.
        assert float(seconds) < 2 * deadline + 10, errors
        assert "gave up after" in text, errors
    assert any(name == "DeadlineError" for name, _, _ in errors), errors


def wait_for(condition, seconds, words):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, words
        time.sleep(0.02)


def test_hosts_leave_nothing_behind():
    hosts = VirtualHosts(2, "1gbit")
    namespaces = set(hosts._namespaces)
    stray = subprocess.Popen(
        [*hosts.enter(1), sys.executable, "-c", "import time; time.sleep(600)"],
        start_new_session=True,
    )
    wait_for(
        lambda: os.readlink(f"/proc/{stray.pid}/ns/net") in namespaces, 20, "it does not enter"
    )
    folder = hosts.folder
    hosts.close()
    assert stray.wait(20) < 0
    assert not folder.exists()
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                assert os.readlink(f"/proc/{entry}/ns/net") not in namespaces
            except OSError:
                continue  # it ended meanwhile


if MATRIX:
    LAYOUTS = [(2, 2), (1, 1), (3, 2, 1), (1, 1, 1), (2, 2, 2), (3, 3), (1, 2, 3, 1), (2, 2, 1, 1)]

    @pytest.mark.slow
    @pytest.mark.timeout(900)
    @pytest.mark.parametrize("round_robin", [False, True], ids=["blocks", "round robin"])
    @pytest.mark.parametrize("ranks", LAYOUTS, ids=lambda r: "+".join(map(str, r)))
    @pytest.mark.parametrize("launcher", MPIS)
    def test_matrix(launcher, ranks, round_robin):
        if round_robin and launcher == "mpich" and len(set(ranks)) > 1:
            pytest.skip("mpiexec of MPICH deals ranks in turn to hosts of equally many only")
        with VirtualHosts(len(ranks), "10gbit") as hosts:
            battery(
                hosts.place(ranks, round_robin=round_robin),
                *("--counts", "1,4099", "--large", "150000", "--compositions", "--parts"),
                launcher=launcher,
                least=200,
                timeout=800,
            )
