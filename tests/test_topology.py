"""What is found out about hosts: who shares memory, sockets, interfaces; and `info` on it."""

from __future__ import annotations

import json
from pathlib import Path

import launch
import pytest

from collectives import cli, hardware
from collectives.bootstrap import host_key
from collectives.cli import _machines
from collectives.reach import sharing_of

# ---- who shares memory ---------------------------------------------------------------------------


def test_all_share_what_all_can_open():
    sharing = sharing_of(["a", "b", "a", "b"], [{}, {}, {}, {}])
    assert sharing == ([0, 1, 0, 1], "")


def test_a_rank_that_cannot_be_opened_is_a_node_of_its_own():
    reports = [{"1": "no such process"}, {}, {"1": "no such process"}]
    group, words = sharing_of(["a"] * 3, reports)
    assert group == [0, 1, 0]
    assert "rank 0 cannot share memory with rank 1: no such process" in words


def test_containers_of_one_host_are_nodes():
    """Two and two reach each other, in any direction but not across."""
    no = "Permission denied"
    reports = [{"1": no, "3": no}, {"0": no, "2": no}, {"1": no, "3": no}, {}]
    assert sharing_of(["a"] * 4, reports).group == [0, 1, 0, 1]


def test_the_host_name_does_not_count(monkeypatch):
    import os

    before = host_key()

    class Named:
        nodename = "another"

    monkeypatch.setattr(os, "uname", Named)
    assert host_key() == before


@pytest.mark.mpi
@pytest.mark.parametrize("launcher", ["openmpi", "mpich"])
def test_ranks_that_memory_does_not_join_are_joined_by_mpi(launcher):
    result = launch.run(3, "apart.py", launcher=launcher, timeout=60).expect(status=0)
    assert result.output.count("nodes [0, 1, 0] over shm+mpi") == 3, result
    assert "rank 1 cannot share memory with rank 0: it is not mine" in result.output


# ---- hardware ------------------------------------------------------------------------------------


def files(root: Path, found: dict[str, str]) -> Path:
    for name, text in found.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


SERVER = {
    "devices/system/node/node0/cpulist": "0-1,4-5",
    "devices/system/node/node1/cpulist": "2-3,6-7",
    "devices/system/cpu/cpu0/topology/physical_package_id": "0",
    "devices/system/cpu/cpu2/topology/physical_package_id": "1",
    "class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand",
    "class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)",
    "class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
    "class/infiniband/mlx5_0/device/numa_node": "1",
    "class/infiniband/mlx5_1/ports/1/link_layer": "Ethernet",
    "class/infiniband/mlx5_1/ports/1/rate": "100 Gb/sec (4X EDR)",
    "class/infiniband/mlx5_1/ports/1/state": "1: DOWN",
    "class/net/lo/type": "772",
    "class/net/docker0/type": "1",
    "class/net/docker0/bridge/bridge_id": "8000",
    "class/net/eno1/type": "1",
    "class/net/eno1/speed": "25000",
    "class/net/eno1/operstate": "up",
    "class/net/eno1/device/numa_node": "0",
    "class/net/eno2/type": "1",
    "class/net/eno2/speed": "-1",
    "class/net/eno2/operstate": "down",
    "class/net/eno2/device/numa_node": "0",
    "class/net/ib0/type": "32",
    "class/net/ib0/operstate": "up",
    "class/net/veth1/type": "1",
    "class/net/veth1/speed": "10000",
    "class/net/veth1/operstate": "up",
}


def test_infiniband_and_ethernet_are_told_apart(tmp_path):
    found = hardware.interfaces(files(tmp_path, SERVER))
    assert [(i.name, i.kind, i.gbits, i.up, i.numa) for i in found] == [
        ("mlx5_0/1", "InfiniBand", 400.0, True, 1),
        ("mlx5_1/1", "RoCE", 100.0, False, -1),
        ("eno1", "Ethernet", 25.0, True, 0),
        ("eno2", "Ethernet", None, False, 0),
        ("ib0", "IP over InfiniBand", None, True, -1),
        ("veth1", "virtual Ethernet", 10.0, True, -1),
    ]
    assert hardware.network_name(found) == "InfiniBand 400"
    assert hardware.network_name(found[2:]) == "Ethernet 25"
    assert hardware.network_name(found[3:4]) == "none"
    assert found[0].describe() == "mlx5_0/1: InfiniBand, 400 Gbit/s, NUMA node 1"
    assert found[3].describe() == "eno2: Ethernet, rate not told, down, NUMA node 0"


def test_sockets(tmp_path):
    assert hardware.numa_nodes(files(tmp_path, SERVER)) == [
        (0, 0, [0, 1, 4, 5]),
        (1, 1, [2, 3, 6, 7]),
    ]


def test_a_host_that_tells_nothing(tmp_path):
    assert hardware.interfaces(tmp_path) == []
    (only,) = hardware.numa_nodes(tmp_path)
    assert only.socket == -1 and only.cpus
    assert hardware.network_name([]) == "none"


def test_the_drawing(tmp_path):
    root = files(tmp_path, SERVER)
    numa = [{**n._asdict(), "ranks": []} for n in hardware.numa_nodes(root)]
    numa[0]["ranks"], numa[1]["ranks"] = [0, 1], [2]
    machine = {
        "node": 0,
        "host": "a",
        "numa": numa,
        "unbound_ranks": [],
        "interfaces": [i._asdict() for i in hardware.interfaces(root)[:3]],
    }
    eno1 = next(i for i in machine["interfaces"] if i["name"] == "eno1")
    machine["interfaces"].append({**eno1, "name": "eno2"})
    bare = {"node": 1, "host": "b", "numa": numa[:1], "unbound_ranks": [3], "interfaces": []}
    bare["numa"] = [{**numa[0], "ranks": []}]
    assert _machines.draw([machine, bare]) == [
        "network",
        "├─ node 0 (a)",
        "│  ├─ socket 0, NUMA node 0, CPUs 0-1,4-5: ranks 0-1",
        "│  │  ├─ eno1: Ethernet, 25 Gbit/s, NUMA node 0",
        "│  │  └─ eno2: Ethernet, 25 Gbit/s, NUMA node 0",
        "│  ├─ socket 1, NUMA node 1, CPUs 2-3,6-7: rank 2",
        "│  │  └─ mlx5_0/1: InfiniBand, 400 Gbit/s, NUMA node 1",
        "│  └─ mlx5_1/1: RoCE, 100 Gbit/s, down",
        "└─ node 1 (b)",
        "   ├─ socket 0, NUMA node 0, CPUs 0-1,4-5",
        "   ├─ rank 3, bound to no NUMA node",
        "   └─ no network interface",
    ]


def test_info_draws_the_machines(capsys):
    assert cli.main(["info", "--threads", "3", "--nodes", "2"]) == 0
    out = capsys.readouterr().out
    assert "\nnetwork\n├─ node 0 (" in out
    assert "└─ node 1 (" in out
    assert cli.main(["info", "--threads", "2", "--json"]) == 0
    (machine,) = json.loads(capsys.readouterr().out)["machines"]
    placed = [r for n in machine["numa"] for r in n["ranks"]] + machine["unbound_ranks"]
    assert sorted(placed) == [0, 1]
