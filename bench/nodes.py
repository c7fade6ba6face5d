"""Measures runs over virtual hosts of this machine, joined by links of 1 and 10 Gbit/s,
beside the MPI library in the same runs; and makes the tables of docs/nodes.md.

    python bench/nodes.py measure [--environment .venv] [--rate 1gbit] [--part auto|ring|wire|one]
    python bench/nodes.py table

Needs root and iproute2 (tests/virtual_hosts.py). Results: bench/results/nodes-MPI-RATE-PART.json.
Parts: "auto" is all_reduce as chosen by size, beside MPI's, 2 hosts of 2 ranks; "one" the same with
one rank a host; "ring" the hierarchical one beside the flat ring; "wire" counts bytes on the ports.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "nodes.md"
sys.path.insert(0, str(ROOT / "tests"))

from virtual_hosts import VirtualHosts  # noqa: E402

RATES = {"1gbit": 1e9 / 8, "10gbit": 10e9 / 8}  # bytes per second
HIERARCHICAL = "hierarchical(direct_two_shot, halving_doubling)"
# Ranks of each host, the command, and its sizes. Which ranks share a core differs from launch to
# launch, and with it the times: each is measured in several.
LAUNCHES = 3
SMALL = ["-b", "4", "-e", "1M", "-f", "4", "--seconds", "0.15"]
# Ranks poll at real-time priority, which the kernel takes away for 50 ms in each second if anything
# else wants to run: without a rest before them, all_reduce of 64 MiB at 1 Gbit/s takes 565 + 50 or
# + 100 ms, with it 565 (docs/nodes.md).
REST = ["--rest", "0.2"]
LARGE = ["-b", "4M", "-e", "64M", "-f", "4", "--seconds", "1", *REST]
PARTS: dict[str, tuple[list[int], list[str], list[list[str]]]] = {
    "auto": ([2, 2], ["bench", "--in-place"], [SMALL, LARGE]),
    "one": ([1, 1], ["bench", "--in-place"], [SMALL, LARGE]),
    "ring": (
        [2, 2],
        ["compare", "--only", HIERARCHICAL, "--only", "ring"],
        [["-b", "1M", "-e", "64M", "-f", "4", "--seconds", "0.7", *REST]],
    ),
}
WIRE = (
    (HIERARCHICAL, "all_reduce", 16 << 20, 4),
    ("ring", "all_reduce", 16 << 20, 4),
    ("hierarchical(direct_two_shot, ring)", "all_gather", 16 << 20, 4),
    ("hierarchical(direct_two_shot, direct_two_shot)", "all_to_all", 16 << 20, 4),
)


def launcher_of(environment: Path) -> str:
    words = [str(environment / "bin/mpirun"), "--version"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return "openmpi" if "Open MPI" in done.stdout else "mpich"


def start(hosts: VirtualHosts, ranks: list[int], environment: Path, words: list[str]) -> str:
    """Runs Python with these arguments on every rank; what they wrote."""
    launcher = launcher_of(environment)
    program = "mpirun" if launcher == "openmpi" else "mpiexec"
    python = str(environment / "bin/python")
    line = [str(environment / "bin" / program), "-n", str(sum(ranks)), python, *words]
    variables = os.environ | {
        "PATH": f"{environment / 'bin'}:{os.environ['PATH']}",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "COLLECTIVES_TABLE": "off",  # what everybody gets, not what was tuned here
    }
    command = hosts.place(ranks).command(line, launcher)
    done = subprocess.run(command, capture_output=True, text=True, env=variables, cwd="/tmp")
    if done.returncode != 0:
        raise SystemExit(done.stdout + done.stderr)
    return done.stdout


def measure(environment: Path, rates: list[str], parts: list[str]) -> None:
    mpi = launcher_of(environment)
    for rate in rates:
        with VirtualHosts(2, rate, check=False) as hosts:
            for part in parts:
                file = RESULTS / f"nodes-{mpi}-{rate}-{part}.json"
                if part == "wire":
                    file.write_text(json.dumps(wire(hosts, environment), indent=1) + "\n")
                    continue
                ranks, words, sizes = PARTS[part]
                found = []
                for more in sizes * LAUNCHES:
                    line = ["-m", "collectives", *words, *more, "--peer", "mpi"]
                    print(start(hosts, ranks, environment, [*line, "--json", str(file)]))
                    found.append(json.loads(file.read_text()))
                rows = medians([row for one in found for row in one["rows"]])
                content = {"header": found[0]["header"], "launches": LAUNCHES, "rows": rows}
                file.write_text(json.dumps(content, indent=1) + "\n")


def medians(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each size and algorithm: medians over launches, also of the ratio to the peer."""
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["bytes"], row["algorithm"]), []).append(row)
    found = []
    for group in groups.values():
        row = dict(group[0])
        for name in ("time_us", "p99_us", "algbw_gbs", "busbw_gbs"):
            row[name] = statistics.median(r[name] for r in group)
        row["wrong"] = sum(r["wrong"] for r in group)
        peers = [r["peers"][0] for r in group]
        row["peers"] = [
            peers[0]
            | {name: statistics.median(p[name] for p in peers) for name in ("time_us", "ratio")}
        ]
        found.append(row)
    return sorted(found, key=lambda r: r["bytes"])


def wire(hosts: VirtualHosts, environment: Path) -> list[dict[str, Any]]:
    """Bytes on each host's port, and those of the schedule."""
    rows = []
    worker = str(ROOT / "tests" / "workers" / "wire.py")
    for algorithm, collective, nbytes, calls in WIRE:
        words = [worker, algorithm, collective, str(nbytes), str(calls)]
        out = start(hosts, [2, 2], environment, words)
        for node, sent, scheduled in re.findall(r"node (\d): sent (\d+) scheduled (\d+)", out):
            rows.append(
                {
                    "algorithm": algorithm,
                    "collective": collective,
                    "bytes": nbytes,
                    "calls": calls,
                    "node": int(node),
                    "sent": int(sent),
                    "scheduled": int(scheduled),
                }
            )
            print(rows[-1])
    return rows


# ---- tables --------------------------------------------------------------------------------------


def size(nbytes: int) -> str:
    for unit, name in ((20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << unit:
            return f"{nbytes >> unit} {name}"
    return f"{nbytes} B"


def time(us: float) -> str:
    return f"{us:.1f}" if us < 100 else f"{us:,.0f}"


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "--:|" * len(head)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def beside_mpi(mpi: str, part: str) -> list[str]:
    """Times at all rates, beside those of MPI in the same run."""
    columns: dict[int, list[str]] = {}
    head = ["size"]
    for rate in RATES:
        file = RESULTS / f"nodes-{mpi}-{rate}-{part}.json"
        if not file.exists():
            continue
        rows = json.loads(file.read_text())["rows"]
        (version,) = {p["version"].partition(",")[0] for r in rows for p in r["peers"]}
        name = "Open MPI" if mpi == "openmpi" else "MPICH"
        number = re.search(r"\d+(\.\d+)+", version)
        name += f" {number[0]}" if number else ""
        words = rate.replace("gbit", " Gbit/s")
        head += [f"{words}, ours (µs)", f"{name} (µs)", "÷ ours"]
        for row in rows:
            if row["wrong"]:
                raise ValueError(f"{file.name}: {row['bytes']} bytes: {row['wrong']} wrong")
            peer = row["peers"][0]
            columns.setdefault(row["bytes"], [size(row["bytes"])])
            columns[row["bytes"]] += [
                time(row["time_us"]),
                time(peer["time_us"]),
                f"{peer['ratio']:.2f}",
            ]
    return table(head, [columns[k] for k in sorted(columns)])


def beside_ring(mpi: str) -> list[str]:
    rows = []
    for rate, speed in RATES.items():
        file = RESULTS / f"nodes-{mpi}-{rate}-ring.json"
        if not file.exists():
            continue
        by_size: dict[int, dict[str, float]] = {}
        for row in json.loads(file.read_text())["rows"]:
            by_size.setdefault(row["bytes"], {})[row["algorithm"]] = row["time_us"]
        for nbytes, times in by_size.items():
            limit = nbytes * 2 * (2 - 1) / 2 / speed * 1e6  # S · 2(N-1)/N / rate
            ours = times[HIERARCHICAL]
            rows.append(
                [
                    rate.replace("gbit", " Gbit/s"),
                    size(nbytes),
                    time(ours),
                    time(limit),
                    f"{limit / ours:.0%}",
                    time(times["ring"]),
                    f"{times['ring'] / ours:.2f}",
                ]
            )
    head = ["link", "size", "hierarchical (µs)", "wire limit (µs)", "of the limit"]
    return table([*head, "ring (µs)", "÷ hierarchical"], rows)


def on_the_wire(mpi: str) -> list[str]:
    file = RESULTS / f"nodes-{mpi}-1gbit-wire.json"
    if not file.exists():
        return []
    rows = [
        [
            row["collective"],
            row["algorithm"],
            str(row["node"]),
            f"{row['scheduled'] / row['calls']:,.0f}",
            f"{row['sent'] / row['calls']:,.0f}",
            f"{row['sent'] / row['scheduled']:.3f}",
        ]
        for row in json.loads(file.read_text())
    ]
    head = ["collective", "algorithm", "host", "scheduled (B a call)", "counted (B a call)"]
    return table([*head, "counted ÷ scheduled"], rows)


def fill() -> None:
    """Puts the tables between their markers in docs/nodes.md."""
    text = PAGE.read_text()
    for name, lines in (
        ("auto", beside_mpi("openmpi", "auto")),
        ("one", beside_mpi("openmpi", "one")),
        ("ring", beside_ring("openmpi")),
        ("wire", on_the_wire("openmpi")),
    ):
        begin, end = f"<!-- bench/nodes.py: {name} -->", "<!-- end -->"
        before, found, rest = text.partition(begin)
        if not found:
            raise ValueError(f"the marker {begin} is missing")
        text = f"{before}{begin}\n" + "\n".join(lines) + f"\n{end}{rest.partition(end)[2]}"
    PAGE.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["measure", "table"])
    parser.add_argument("--environment", type=Path, default=ROOT / ".venv")
    parser.add_argument("--rate", action="append", choices=list(RATES))
    parser.add_argument("--part", action="append", choices=[*PARTS, "wire"])
    args = parser.parse_args()
    if args.what == "table":
        return fill()
    RESULTS.mkdir(exist_ok=True)
    measure(args.environment.resolve(), args.rate or list(RATES), args.part or [*PARTS, "wire"])


if __name__ == "__main__":
    main()
