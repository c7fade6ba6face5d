"""Writes the figures of bench/results/*.json into README.md and pages of docs/.

    python bench/table.py              rewrites them
    python bench/table.py --check      status 1 if they are not up to date; nothing is written

Each file `host-*.json` or `gpu-*.json` is one run of `python -m collectives bench --json FILE`.
Between markers such as

    <!-- bench/table.py: summary -->    up to    <!-- end -->

go the tables. README.md gets one table for each number of ranks: float32 sum all_reduce in place on
one host, algorithms chosen by size, loops in C++. docs/gpu.md gets the same of GPUs: out of place,
in CUDA graphs, and what bench/transfers_gpu.py measured; docs/gpu-nodes.md what bench/nodes_gpu.py
did. docs/benchmarks.md gets a section for each run. A ratio is a peer's time divided by ours of the
same run, so runs are never compared with each other; where several runs have a row of the summary,
our time there is their median. A run with a wrong element is refused. The tables of docs/torch.md
and docs/training.md are made by torch_tables.py.
"""

import argparse
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch_tables

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
PAGES = [
    (ROOT / "README.md", "summary"),
    (ROOT / "docs" / "benchmarks.md", "all"),
    (ROOT / "docs" / "benchmarks.md", "gpu all"),
    (ROOT / "docs" / "gpu.md", "gpu summary"),
    (ROOT / "docs" / "gpu-nodes.md", "gpu between nodes"),
    (ROOT / "docs" / "gpu.md", "gpu transfers"),
    (ROOT / "docs" / "gpu.md", "gpu beside"),
    (ROOT / "docs" / "gpu.md", "gpu waiting"),
    (ROOT / "docs" / "torch.md", "torch suite"),
    (ROOT / "docs" / "torch.md", "torch steps"),
    (ROOT / "docs" / "training.md", "training"),
]
HOW = "make bench BENCH_ARGS='--peer mpi --json bench/results/NAME.json'"


SCRIPTS = "bench/host.sh and bench/gpu.sh"


class Kind(NamedTuple):
    """Which rows a summary is made of, and how.

    rows    transport, device, mode, in place
    digits  of a ratio
    none    what stands there without results
    """

    rows: tuple[str, str, str, bool]
    digits: int
    none: str


HOST = Kind(
    ("shm", "cpu", "host", True), 1, f"No results yet: `{HOW}`, then `python bench/table.py`."
)
GPU = Kind(
    ("cuda_ipc", "cuda", "graph", False),
    2,
    "No results yet: `bench/gpu.sh`, then `python bench/table.py`.",
)
TRANSFERS_NONE = (
    "No results yet: `python -m collectives run -n 2 bench/transfers_gpu.py --json "
    "bench/results/transfers-gpu-2.json`, then `python bench/table.py`."
)
NODES_GPU_NONE = (
    "No results yet: `mpirun -n 2 python bench/nodes_gpu.py --json "
    "bench/results/nodes-gpu-2.json`, then `python bench/table.py`."
)


class Run(NamedTuple):
    """One file of results."""

    name: str
    header: dict[str, Any]
    rows: list[dict[str, Any]]

    @property
    def plain(self) -> bool:
        """True for loops in C++ and algorithms that were chosen, not forced, nor by a table that
        was measured.
        """
        command = self.header["command"]
        forced = re.search(r" (-a|--(python|algorithms?|order|max-blocks))\b", command)
        return " bench" in command and not forced and not self.header.get("choices")


def load(folder: Path, kind: str = "host") -> list[Run]:
    """The runs of a folder, those on "host" or on "gpu". Raises ValueError for wrong results, those
    that were not checked, and files of another kind.
    """
    runs = []
    for path in sorted(folder.glob(f"{kind}-*.json")):
        content = json.loads(path.read_text())
        if "header" not in content:
            raise ValueError(f"{path.name} is not from `collectives bench --json`; see {SCRIPTS}")
        for row in content["rows"]:
            if row["wrong"] or (row["wrong"] is None and row["collective"] != "barrier"):
                what = f"{row['collective']} of {row['bytes']} bytes"
                raise ValueError(f"{path.name}: {what} is not verified or wrong: {row['wrong']}")
        runs.append(Run(path.stem, content["header"], content["rows"]))
    return runs


def label(peer: dict[str, Any]) -> str:
    """A peer's name as people know it, with its version."""
    version = peer["version"]
    number = re.search(r"\d+(\.\d+)+", version)
    for family in ("Open MPI", "Intel", "MPICH"):
        if family.lower() in version.lower():
            name = "Intel MPI" if family == "Intel" else family
            return f"{name} {number[0]}" if number else name
    return f"Gloo of {version.partition('+')[0]}" if peer["name"] == "gloo" else version


def size(nbytes: int) -> str:
    for unit, name in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << unit and nbytes % (1 << unit) == 0:
            return f"{nbytes >> unit} {name}"
    return f"{nbytes} B"


def time(us: float | None) -> str:
    """Three digits, in µs, without an exponent."""
    if us is None:
        return ""
    return f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 100 else f"{us:,.0f}"


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "--:|" * len(head)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def machine(header: dict[str, Any]) -> str:
    """What a run depended on, in a line."""
    of, versions = header["machine"], header["versions"]
    made = f"commit {header['commit']}, {header['date'][:10]}"
    if "gpus" in of:
        buses = {gpu.get("bus", i) for i, gpu in enumerate(of["gpus"])}
        names = " and ".join(dict.fromkeys(gpu["name"] for gpu in of["gpus"]))
        named = ("nvidia driver", "cuda driver", "cuda runtime of cupy", "nccl")
        of_gpu = [f"{name} {versions[name]}" for name in named if name in versions]
        settings = [f"{name}={value}" for name, value in header.get("settings", {}).items()]
        return f"{len(buses)} x {names}; {', '.join(of_gpu + settings)}; {made}"
    exchange, pages = of["exchange_ns"], of["huge_pages"]
    near = f", cache line exchange {exchange:.0f} ns" if exchange else ""
    return (
        f"{of['cpu']}, {of['cores']} cores{near}; huge pages: {pages['ordinary']}, in shared "
        f"memory: {pages['shared']}; Python {versions['python']}, numpy {versions['numpy']}; {made}"
    )


def summary(runs: list[Run], wanted: Kind = HOST) -> list[str]:
    """The tables of README.md, or of docs/gpu.md."""
    chosen: dict[int, dict[int, list[tuple[bool, dict[str, Any]]]]] = {}  # ranks -> bytes -> rows
    used: dict[str, Run] = {}
    for run in runs:
        for row in run.rows:
            call = (row["collective"], row["dtype"], row["op"], row["nodes"])
            kind = (row["transport"], row["device"], row["mode"], row["in_place"])
            if call == ("all_reduce", "float32", "sum", 1) and kind == wanted.rows and run.plain:
                at = chosen.setdefault(row["ranks"], {}).setdefault(row["bytes"], [])
                at.append((row["symmetric"], row))
                used[run.name] = run
    lines = []
    for ranks, by_size in sorted(chosen.items()):
        everything = [pair for pairs in by_size.values() for pair in pairs]
        columns: list[tuple[bool, str]] = []
        for symmetric in (False, True):
            labels = {label(p) for s, row in everything if s == symmetric for p in row["peers"]}
            if any(s == symmetric for s, _ in everything):
                columns += [(symmetric, "")] + [(symmetric, name) for name in sorted(labels)]
        head = [f"{ranks} ranks"]
        for symmetric, name in columns:
            memory = "symmetric" if symmetric else "any array"
            head.append(f"{name} ÷ ours, {memory}" if name else f"ours, {memory} (µs)")
        body = []
        for nbytes, pairs in sorted(by_size.items()):
            cells = [size(nbytes)]
            for symmetric, name in columns:
                rows = [row for s, row in pairs if s == symmetric]
                if not name:
                    values = [row["time_us"] for row in rows]
                    cells.append(time(statistics.median(values)) if values else "")
                    continue
                ratios = [p["ratio"] for row in rows for p in row["peers"] if label(p) == name]
                cells.append(f"{statistics.median(ratios):.{wanted.digits}f}" if ratios else "")
            body.append(cells)
        lines += [*table(head, body), ""]
    if not lines:
        return [wanted.none]
    lines += [f"- {name}: {machine(run.header)}" for name, run in sorted(used.items())]
    return lines


def everything(runs: list[Run], wanted: Kind = HOST) -> list[str]:
    """The sections of docs/benchmarks.md for `runs`."""
    lines: list[str] = []
    for run in runs:
        lines += [f"### {run.name}", "", f"`{run.header['command']}`", "", machine(run.header), ""]
        if "choices" in run.header:
            lines += [", ".join(f"`{k}={v}`" for k, v in run.header["choices"].items()), ""]
        if "note" in run.header:
            lines += [run.header["note"], ""]
        groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for row in run.rows:
            keys = ("collective", "ranks", "nodes", "transport", "dtype", "op", "symmetric")
            groups.setdefault((*(row[k] for k in keys), row["mode"], row["in_place"]), []).append(
                row
            )
        for group, rows in groups.items():
            collective, ranks, nodes, transport, dtype, op, symmetric, mode, in_place = group
            what = [collective, f"{ranks} ranks", transport]
            what += [f"{nodes} nodes"] * (nodes > 1) + [dtype] + [op] * (op != "none")
            what += ["symmetric"] * symmetric + ["in place" if in_place else "out of place"]
            what += {"graph": ["in a CUDA graph"], "stream": ["one by one"]}.get(mode, [])
            names = list(dict.fromkeys(label(p) for row in rows for p in row["peers"]))
            head = [
                "size",
                "algorithm",
                "median (µs)",
                "p99 (µs)",
                "busbw (GB/s)",
                "predicted (µs)",
            ]
            for name in names:
                head += [f"{name} (µs)", "÷ ours"]
            body = []
            for row in rows:
                cells = [size(row["bytes"]), row["algorithm"], time(row["time_us"])]
                cells += [time(row["p99_us"]), f"{row['busbw_gbs']:.2f}", time(row["predicted_us"])]
                found = {label(p): p for p in row["peers"]}
                for name in names:
                    peer = found.get(name)
                    cells += [time(peer["time_us"]), f"{peer['ratio']:.2f}"] if peer else ["", ""]
                body.append(cells)
            lines += [f"**{', '.join(what)}**", "", *table(head, body), ""]
    return lines[:-1] if lines else [wanted.none]


# Times of bench/nodes_gpu.py that are told, in words.
NODES_GPU = {
    "gpu": "GPU arrays",
    "waited": "each waited for",
    "host": "ours, host arrays",
    "mpi": "MPI, host arrays",
    "wire": "bare messages",
}
NODES_GPU_STRAIGHT = {
    "gpu": "GPU arrays, staged",
    "straight": "straight",
    "mpi": "MPI, host arrays",
    "mpi gpu": "MPI, GPU arrays",
    "wire": "bare messages",
    "wire gpu": "bare messages of GPUs",
}


def between_nodes(folder: Path) -> list[str]:
    """The tables of arrays on GPUs between nodes, by bench/nodes_gpu.py. Raises ValueError for
    wrong results.
    """
    lines: list[str] = []
    made: list[str] = []
    for path in sorted(folder.glob("nodes-gpu-*.json")):
        content = json.loads(path.read_text())
        by_collective: dict[str, list[dict[str, Any]]] = {}
        for row in content["rows"]:
            if row["wrong"]:
                raise ValueError(f"{path.name}: {row['collective']} of {row['bytes']} B is wrong")
            by_collective.setdefault(row["collective"], []).append(row)
        header = content["header"]
        for collective, rows in by_collective.items():
            columns = NODES_GPU_STRAIGHT if "straight" in rows[0]["times"] else NODES_GPU
            head = [f"{collective}, {len(header['machine']['gpus'])} nodes"]
            head += [f"{words} (µs)" for words in columns.values()]
            ours = "straight" if "straight" in columns else "gpu"
            head.append(f"MPI, host ÷ {columns[ours]}")
            body = []
            for row in rows:
                us = {name: of["us"] for name, of in row["times"].items()}
                cells = [time(us[name]) for name in columns]
                body.append([size(row["bytes"]), *cells, f"{us['mpi'] / us[ours]:.2f}"])
            lines += [*table(head, body), ""]
        made.append(f"- {path.stem}: {header['versions']['mpi']}; {machine(header)}")
    return lines + made or [NODES_GPU_NONE]


def transfers(folder: Path) -> list[str]:
    """The table of sends and receives between two GPUs, by bench/transfers_gpu.py."""
    lines: list[str] = []
    made: list[str] = []
    for path in sorted(folder.glob("transfers-gpu-*.json")):
        content = json.loads(path.read_text())
        ours: dict[int, dict[str, float]] = {}
        nccl: dict[int, dict[str, float]] = {}
        for row in content["rows"]:
            whose = ours if row["name"] == "collectives" else nccl
            whose.setdefault(row["bytes"], {})[row["what"]] = row["us"]
        ways = list(next(iter(ours.values())))
        head = ["2 ranks"]
        for way in ways:
            head += [f"{way} (µs)", "NCCL ÷ ours"]
        body = []
        for nbytes, us in ours.items():
            cells = [size(nbytes)]
            for way in ways:
                theirs = nccl.get(nbytes, {}).get(way)
                cells += [time(us[way]), f"{theirs / us[way]:.2f}" if theirs else ""]
            body.append(cells)
        lines += [*table(head, body), ""]
        header = content["header"]
        gpu = header["gpu"]
        made.append(
            f"- {path.stem}: 2 x {gpu['name']}; nvidia driver {gpu['nvidia driver']}, cuda driver "
            f"{gpu['cuda driver']}; commit {header['commit']}, {header['date'][:10]}"
        )
    return lines + made or [TRANSFERS_NONE]


def filled(text: str, kind: str, lines: list[str]) -> str:
    """`text` with `lines` between the markers of `kind`."""
    begin, end = f"<!-- bench/table.py: {kind} -->", "<!-- end -->"
    before, found, rest = text.partition(begin)
    if not found or end not in rest:
        raise ValueError(f"the markers {begin} and {end} are missing")
    after = rest.partition(end)[2]
    return before + begin + "\n" + "\n".join(lines) + "\n" + end + after


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--check", action="store_true", help="only say what is not up to date")
    args = parser.parse_args(arguments)
    hosts, gpus = load(RESULTS), load(RESULTS, "gpu")
    blocks = {
        "summary": summary(hosts),
        "all": everything(hosts),
        "gpu summary": summary(gpus, GPU),
        "gpu all": everything(gpus, GPU),
        "gpu between nodes": between_nodes(RESULTS),
        "gpu transfers": transfers(RESULTS),
        "gpu beside": torch_tables.beside(RESULTS),
        "gpu waiting": torch_tables.waiting(RESULTS),
        "torch suite": torch_tables.suite(RESULTS),
        "torch steps": torch_tables.steps(RESULTS),
        "training": torch_tables.training(RESULTS),
    }
    status = 0
    for path, kind in PAGES:
        old = path.read_text()
        new = filled(old, kind, blocks[kind])
        if args.check:
            if new != old:
                print(f"{path.name} is not up to date: run python bench/table.py")
                status = 1
        elif new != old:
            path.write_text(new)
            print(f"{path.name}: {kind} written")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
