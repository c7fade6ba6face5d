"""Show what there is: ranks, nodes, transports, processor, GPUs, MPI, versions, limits.

Under a launcher it tells of all ranks. Nothing is imported to find a version, and an MPI that does
not work is reported, not a crash.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from .. import _core
from ..agreement import exchange
from ..bench import gpus, machine
from ..communicator import Communicator
from ..config import VARIABLES, Settings
from ..tuning import MPI_DEPTH, MPI_SLOT, region_sizes, tables
from . import _common, _ranks
from . import _machines as machines

EXAMPLES = """\
examples:
  python -m collectives info
  python -m collectives info --ranks 4
  mpirun -n 2 python -m collectives info --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as JSON")
    _ranks.add_arguments(parser, _common.positive)


@_common.in_words
def run(args: argparse.Namespace) -> int:
    return _ranks.with_ranks(args, "info", lambda comm: _show(comm, args))


def _show(comm: Communicator, args: argparse.Namespace) -> int:
    facts = collect(comm)
    if comm.rank == 0:
        print(json.dumps(facts, indent=1) if args.json else as_text(facts))
    return 0


def collect(comm: Communicator) -> dict[str, Any]:
    """All facts, as JSON has them. Collective; complete on rank 0."""
    places = machines.places(comm)
    exchanged = machine.exchange_ns(comm)
    settings = Settings()
    shown = {
        v.name: "(set)" if "SECRET" in v.name else os.environ[v.name]
        for v in VARIABLES
        if getattr(settings, v.field) != v.default
    }
    return {
        "ranks": comm.size,
        "nodes": len(set(comm.nodes)),
        "node_of_rank": comm.nodes,
        "host_of_rank": [place.host for place in places],
        "met_through": comm._bootstrap.kind,
        "transports": comm.transports,
        "fallback": comm.fallback,
        "cpu": {
            "model": machine.cpu_model(),
            "cores": machine.cores(comm),
            "simd": _core.simd_level(),
            "memory_bytes": machine.memory_bytes(),
            "page_bytes": machine.page_bytes(),
            "huge_pages": machine.huge_pages(),
            "exchange_ns": exchanged,
        },
        "machines": machines.machines(comm, places),
        "memory": _memory(comm),
        **_gpus_of_nodes(comm),
        "mpi": machine.mpi(comm) if comm.rank == 0 else {},
        "versions": machine.versions(),
        "commit": machine.commit() if comm.rank == 0 else "",
        "symmetric_memory": _symmetric(comm),
        "limits": {
            "timeout_s": comm._bootstrap.timeout,
            "message_in_flag_lines_bytes": comm._tuning.lines_max,
            "tag_max": (1 << 32) - 1,
            "elements_max": (1 << 63) - 1,
            "dtypes": list(_core.dtypes),
            "ops": list(_core.ops),
        },
        "environment": shown,
        "no_table": tables.why_none(settings.table),
    }


def _gpus_of_nodes(comm: Communicator) -> dict[str, Any]:
    """GPUs of rank 0's node, and those of nodes that have others. Collective."""
    mine = gpus.survey() if comm.local_rank == 0 else None
    here, *others = [found for found in exchange(comm, mine) if found is not None]
    elsewhere: list[dict[str, Any]] = []
    nodes = list(dict.fromkeys(comm.nodes))  # by their first ranks, as `others` are
    for node, found in zip(nodes[1:], others, strict=True):
        alike = next((e for e in elsewhere if e["gpus"] == found), None)
        if alike is not None:
            alike["nodes"].append(node)
        elif found != here:
            elsewhere.append({"nodes": [node], "gpus": found})
    return {"gpus": here, "gpus_elsewhere": elsewhere}


def _memory(comm: Communicator) -> dict[str, int]:
    """Bytes that are set aside for messages, whatever their size."""
    memory = {"segment_bytes": 0, "mpi_bytes_per_peer": 0}
    if comm.local_size > 1 and comm.transports != "mpi":
        sizes = region_sizes(comm.local_size)._asdict()
        memory["segment_bytes"] = _core.make_region(False, comm.local_size, **sizes).bytes
        memory |= {f"{name}_bytes" if "slot" in name else name: v for name, v in sizes.items()}
    if "mpi" in comm.transports:
        memory["mpi_bytes_per_peer"] = 2 * MPI_SLOT * MPI_DEPTH
    if len(set(comm.nodes)) > 1:
        memory["staging_slice_bytes"] = comm._settings.staging
    return memory


def _symmetric(comm: Communicator) -> dict[str, Any]:
    """What Communicator.empty gives: shown by making a page of it."""
    one = comm.empty((4096,), "uint8")
    works = bool(one.nbytes == 4096)
    kinds = {"threads": "memory of the process", "self": "memory of the process"}
    kind = kinds.get(comm.transports, "memfd, mapped by all ranks of a node")
    return {"available": works, "kind": kind, "devices": ["cpu"]}


def as_text(facts: dict[str, Any]) -> str:
    """The facts, for people."""
    cpu, memory, mpi = facts["cpu"], facts["memory"], facts["mpi"]
    places: dict[str, list[int]] = {}
    for rank, (node, host) in enumerate(
        zip(facts["node_of_rank"], facts["host_of_rank"], strict=True)
    ):
        places.setdefault(f"node {node} ({host})", []).append(rank)
    ranks = "; ".join(
        f"{where}: {_name_ranks(members)}" if facts["ranks"] > 1 else where
        for where, members in places.items()
    )
    lines = [
        ("ranks", f"{facts['ranks']}, on {ranks}"),
        ("met through", facts["met_through"]),
        ("transports", facts["transports"] + (f" ({facts['fallback']})" * bool(facts["fallback"]))),
        ("cpu", f"{cpu['model']}, {cpu['cores']} cores, reductions in {cpu['simd']}"),
        (
            "memory",
            f"{cpu['memory_bytes'] / 2**30:.1f} GiB, pages of {cpu['page_bytes'] >> 10} KiB, huge "
            f"pages: {cpu['huge_pages']['ordinary']}, shared: {cpu['huge_pages']['shared']}",
        ),
        ("cache line", _exchange(cpu["exchange_ns"])),
        ("scratch", _scratch(memory)),
        ("symmetric", facts["symmetric_memory"]["kind"]),
        *_gpus(facts["gpus"]),
        *_others(facts["gpus_elsewhere"]),
        ("MPI", _mpi(mpi)),
        ("versions", ", ".join(f"{k} {v}" for k, v in facts["versions"].items())),
        ("commit", facts["commit"]),
        (
            "limits",
            f"waits end after {facts['limits']['timeout_s']:g} s; messages of up to "
            f"{facts['limits']['message_in_flag_lines_bytes']} B ride in the flags' cache lines; "
            "any count of elements",
        ),
        ("dtypes", " ".join(facts["limits"]["dtypes"])),
        ("ops", " ".join(facts["limits"]["ops"])),
    ]
    if facts["environment"]:
        words = ", ".join(f"{k}={v}" for k, v in facts["environment"].items())
        lines.append(("environment", words))
    if facts["no_table"]:
        lines.append(("table", facts["no_table"]))
    text = [f"{name:12} {value}" for name, value in lines]
    return "\n".join([*text, "", *machines.draw(facts["machines"])])


def _name_ranks(members: list[int]) -> str:
    from ..drawing import ranges

    return f"rank {members[0]}" if len(members) == 1 else f"ranks {ranges(members)}"


def _exchange(value: float | None) -> str:
    return f"{value:.0f} ns for two ranks to exchange one" if value else "no two ranks to exchange"


def _scratch(memory: dict[str, int]) -> str:
    parts = []
    if memory["segment_bytes"]:
        parts.append(
            f"{memory['segment_bytes'] / 2**20:.1f} MiB reserved in a node's segment, pages taken "
            "when first used"
        )
    if memory["mpi_bytes_per_peer"]:
        parts.append(f"{memory['mpi_bytes_per_peer'] / 2**20:.1f} MiB for each peer over MPI")
    if "staging_slice_bytes" in memory:
        slice_bytes = memory["staging_slice_bytes"] / 2**20
        parts.append(
            f"4 x {slice_bytes:g} MiB pinned from the first call on arrays on GPUs, which go in "
            f"slices of {slice_bytes:g} MiB"
        )
    return "; ".join(parts) or "none"


def _gpus(found: dict[str, Any]) -> list[tuple[str, str]]:
    """GPUs, their driver and links, as lines with names."""
    if not found["count"]:
        return [("GPUs", f"none: {found['why']}")]
    lines = []
    for i, device in enumerate(found["devices"]):
        words = f"cuda:{i}"
        if device:
            words += (
                f" {device['name']} at {device['bus']}, {device['memory_bytes'] / 2**30:.0f} GiB, "
                f"{device['processors']} multiprocessors, compute capability {device['capability']}"
                f"{_pcie(device['pcie'])}"
            )
        lines.append(("GPUs" if i == 0 else "", words))
    lines += [
        ("GPU links" if i == 0 else "", text)
        for i, text in enumerate(gpus.link_lines(found["links"]))
    ]
    if words := gpus.path_words(found["links"]):
        lines.append(("GPU path", words))
    if found["driver"]:
        lines.append(("GPU driver", found["driver"]))
    if found["unknown"]:
        lines.append(("GPU unknown", "; ".join(found["unknown"])))
    return lines


def _pcie(found: dict[str, Any]) -> str:
    words = ""
    if "speed" in found:
        words += f", PCIe {found['speed']}" + (f" x{found['lanes']}" if "lanes" in found else "")
    return words + (f", NUMA node {found['numa']}" if "numa" in found else "")


def _others(elsewhere: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """GPUs of nodes that have others than rank 0's, each line with its nodes."""
    from ..drawing import ranges

    lines = []
    for part in elsewhere:
        nodes = part["nodes"]
        where = f"node {nodes[0]}" if len(nodes) == 1 else f"nodes {ranges(nodes)}"
        lines += [(name, f"{where}: {text}") for name, text in _gpus(part["gpus"])]
    return lines


def _mpi(mpi: dict[str, str]) -> str:
    if "missing" in mpi:
        return f"none: {mpi['missing']}"
    threads = mpi.get("threads", "not initialised")
    cuda = f", CUDA-aware: {mpi['cuda']}" if "cuda" in mpi else ""
    return f"{machine.mpi_name(mpi['version'])} ({mpi['path']}), threads: {threads}{cuda}"
