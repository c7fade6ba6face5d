"""The machines that ranks are on, as `info` prints and draws them: sockets, NUMA nodes, network
interfaces, and which rank is where.
"""

from __future__ import annotations

import json
import os
from typing import Any, NamedTuple

from .. import hardware
from ..communicator import Communicator
from ..drawing import ranges


class Place(NamedTuple):
    """Where a rank is: host name, CPUs that it may run on, and, from the first rank of each node,
    what the host is made of.
    """

    host: str
    cpus: list[int]
    facts: dict[str, Any]


def places(comm: Communicator) -> list[Place]:
    """Of all ranks. Collective."""
    facts = hardware.facts() if comm.local_rank == 0 else {}
    mine = Place(os.uname().nodename, sorted(os.sched_getaffinity(0)), facts)
    return [Place(*json.loads(b)) for b in comm._bootstrap.all_gather(json.dumps(mine).encode())]


def machines(comm: Communicator, found: list[Place]) -> list[dict[str, Any]]:
    """A dictionary for each node: its host, NUMA nodes with the ranks bound to them, ranks that are
    bound to none, and interfaces.
    """
    result = []
    for node in dict.fromkeys(comm.nodes):
        ranks = [r for r in range(comm.size) if comm.nodes[r] == node]
        first = found[ranks[0]]
        numa = [{**n, "ranks": []} for n in first.facts["numa"]]
        free: list[int] = []
        for rank in ranks:
            near = [n for n in numa if set(n["cpus"]) & set(found[rank].cpus)]
            (near[0]["ranks"] if len(near) == 1 else free).append(rank)
        result.append(
            {
                "node": node,
                "host": first.host,
                "numa": numa,
                "unbound_ranks": free,
                "interfaces": first.facts["interfaces"],
            }
        )
    return result


def draw(found: list[dict[str, Any]]) -> list[str]:
    """A tree of nodes, sockets and interfaces."""
    lines = ["network"]
    for i, machine in enumerate(found):
        last = i == len(found) - 1
        lines.append(f"{'└' if last else '├'}─ node {machine['node']} ({machine['host']})")
        lines += [f"{' ' if last else '│'}  {line}" for line in _inside(machine)]
    return lines


def _inside(machine: dict[str, Any]) -> list[str]:
    items: list[tuple[str, list[str]]] = []
    interfaces = [hardware.Interface(**i) for i in machine["interfaces"]]
    numbers = {n["number"] for n in machine["numa"]}
    for n in machine["numa"]:
        socket = f"socket {n['socket']}, " if n["socket"] >= 0 else ""
        title = f"{socket}NUMA node {n['number']}, CPUs {ranges(n['cpus'])}"
        if n["ranks"]:
            title += f": {_ranks(n['ranks'])}"
        items.append((title, [i.describe() for i in interfaces if i.numa == n["number"]]))
    if machine["unbound_ranks"]:
        items.append((f"{_ranks(machine['unbound_ranks'])}, bound to no NUMA node", []))
    items += [(i.describe(), []) for i in interfaces if i.numa not in numbers]
    if not interfaces:
        items.append(("no network interface", []))
    lines = []
    for k, (title, below) in enumerate(items):
        last = k == len(items) - 1
        lines.append(f"{'└' if last else '├'}─ {title}")
        for j, line in enumerate(below):
            mark = "└" if j == len(below) - 1 else "├"
            lines.append(f"{' ' if last else '│'}  {mark}─ {line}")
    return lines


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranges(ranks)}"
