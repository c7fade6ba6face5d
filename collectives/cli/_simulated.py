"""What `simulate` and `compare --topology` share: arguments, tables, files."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import simulate
from ..bench import report
from ..bench.cases import ROOTED
from ..config import parse_size
from ..errors import ConfigError
from ..schedule import algorithms
from ..simulate import comparing
from ..simulate.comparing import Comparison
from ..simulate.quantities import seconds_text
from ..simulate.topology import Topology
from ..words import counted
from . import _common
from ._progress import Progress

_FOUND = Path("bench/results")  # where measured runs lie in a checkout


def topology_argument(parser: argparse.ArgumentParser, *, needed: bool) -> None:
    """--topology."""
    parser.add_argument(
        "--topology",
        required=needed,
        metavar="NAME",
        help=f"{', '.join(simulate.presets())}, or a file .yaml",
    )


def algorithm(name: str) -> None:
    """Raises ConfigError unless it is one, or a composition, that can be simulated."""
    _common.algorithm(name)
    if name == "auto":
        names = ", ".join(a.name for a in algorithms())
        raise ConfigError(f"auto chooses by size; name an algorithm: {names}")


def without_faults(topology: Topology, sized: Topology) -> str:
    """Which faults of the file are at places that so few nodes or GPUs do not have; "" if none."""
    gone = [str(f.line) for f in topology.faults if f not in sized.faults]
    return f", without the faults of line {', '.join(gone)}" if gone else ""


def check_places(topology: Topology, nodes: Sequence[int], root: int) -> None:
    """Raises ConfigError, before anything is simulated, for numbers of nodes that cannot be, or
    that have no rank `root`.
    """
    for count in nodes:
        ranks = topology.with_nodes(count).nranks
        if root >= ranks:
            raise ConfigError(f"root {root} is out of range: ranks are 0 to {ranks - 1}")


def numbers(text: str) -> list[int]:
    """Whole numbers: "1,2,16", or doubled from the first to the last: "8..4096"."""
    found: list[int] = []
    for part in text.split(","):
        low, dots, high = part.partition("..")
        first = _common.positive(low.strip())
        if not dots:
            found.append(first)
            continue
        last = _common.positive(high.strip())
        if last < first:
            raise argparse.ArgumentTypeError(f"{part!r} goes down; write the smaller number first")
        while first < last:
            found.append(first)
            first *= 2
        found.append(last)
    return list(dict.fromkeys(found))


def sizes(text: str) -> list[int]:
    """Bytes: "64M", "1K,1M", or four times as much from the first to the last: "1K:1G"."""
    found: list[int] = []
    try:
        for part in text.split(","):
            low, colon, high = part.partition(":")
            first = parse_size(low)
            last = parse_size(high) if colon else first
            if first < 1 or last < first:
                raise argparse.ArgumentTypeError(f"{part!r} is no rising range of at least 1 byte")
            while first < last:
                found.append(first)
                first *= 4
            found.append(last)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return sorted(set(found))


def compare(args: argparse.Namespace) -> int:
    """`compare --topology`."""
    topology = simulate.load(args.topology)
    for name in args.only or ():
        algorithm(name)
    if args.collective == "barrier":
        raise ConfigError("compare --topology goes over sizes; a barrier has none")
    _common.check_used([args.collective], root=args.root)
    if args.measured and not args.html:
        raise ConfigError("--measured goes with --html: the page shows measured runs beside")
    _common.check_picture(args.png)
    if args.html and importlib.util.find_spec("plotly") is None:
        raise ConfigError("--html needs plotly: pip install plotly")
    _common.check_writable(args.json, args.png, args.html)
    low, high = max(1, args.minbytes), args.maxbytes
    if high < low:
        raise ConfigError(f"the largest size, {high}, is below the smallest, {low}")
    span = args.bytes or sizes(f"{low}:{high}")
    nodes = args.nodes or [topology.nodes]
    check_places(topology, nodes, args.root)
    found = args.measured or ([_FOUND] if args.html and _FOUND.is_dir() else [])
    measured = comparing.read_measured(found, args.collective)
    total = sum(
        len(args.only or simulate.candidates(args.collective, topology.with_nodes(n)))
        for n in nodes
    )
    progress = Progress(total)
    result = comparing.compare(
        topology,
        args.collective,
        nodes,
        span,
        only=args.only or (),
        root=args.root,
        tick=progress.step,
    )
    progress.clear()
    result.measured = measured
    for line in tables(result):
        print(line)
    if args.json:
        write_json(args.json, result)
        print(f"{args.json} written")
    if args.png:
        from ..simulate.picture import picture

        picture(result, args.png)
        print(f"{args.png} drawn")
    if args.html:
        from ..simulate.page import write_page

        write_page(result, args.html)
        shown = f", beside {len(measured)} measured curves" if measured else ""
        print(f"{args.html} written{shown}")
    return 0


def tables(result: Comparison) -> list[str]:
    """Times of all, by nodes; then who wins where."""
    lines = []
    for nodes in result.nodes:
        sized = result.topology.with_nodes(nodes)
        names = result.algorithms(nodes)
        lines.append(
            f"# {result.collective} on {nodes} x {result.topology.name}, "
            f"{counted(sized.nranks, 'rank')}{without_faults(result.topology, sized)}; "
            "us, * the fastest"
        )
        key = [f"[{chr(ord('A') + i)}] {name}" for i, name in enumerate(names)]
        lines += [f"# {line}" for line in key]
        columns = [report.Column("bytes", "", 11)]
        columns += [report.Column(k[:3], "", 11) for k in key]
        columns += [report.Column("busbw", "GB/s", 8), report.Column("bottleneck", "", 30)]
        table = report.Table(columns)
        lines.append(table.header())
        for nbytes, outcomes in result.outcomes[nodes].items():
            best = result.fastest(nodes, nbytes)
            cells = [str(nbytes)]
            for name in names:
                mark = "*" if name == best.algorithm else " "
                cells.append(report.microseconds(outcomes[name].seconds * 1e6) + mark)
            lines.append(table.row([*cells, report.number(best.busbw_gbs), best.bottleneck]))
        approximate = [
            n
            for n in names
            if "approximate" in next(iter(result.outcomes[nodes].values()))[n].method
        ]
        if approximate:
            lines.append(f"# by symmetry, approximate: {', '.join(approximate)}")
        lines.append("")
    lines += [f"# left out on {s.nodes} nodes: {s.why}" for s in result.skipped]
    return [*lines, comparing.WINNER, *(f"  {line}" for line in comparing.in_words(result))]


def write_json(path: str, result: Comparison) -> None:
    """All outcomes as rows. Raises OSError if the file cannot be written."""
    rows: list[dict[str, Any]] = []
    for by_size in result.outcomes.values():
        for outcomes in by_size.values():
            for o in outcomes.values():
                rows.append(
                    {
                        "collective": o.collective,
                        "algorithm": o.algorithm,
                        "bytes": o.nbytes,
                        "root": result.root if o.collective in ROOTED else None,
                        "ranks": o.ranks,
                        "nodes": o.nodes,
                        "simulated_us": o.seconds * 1e6,
                        "algbw_gbs": o.algbw_gbs,
                        "busbw_gbs": o.busbw_gbs,
                        "steps": o.steps,
                        "segments": o.segments,
                        "method": o.method,
                        "extrapolated": o.extrapolated,
                        "bottleneck": o.bottleneck,
                    }
                )
    header = {"topology": result.topology.name, "file": Path(result.topology.file).name}
    Path(path).write_text(json.dumps({"header": header, "rows": rows}, indent=1) + "\n", "utf-8")


def outcomes_table(outcomes: Sequence[simulate.Outcome]) -> list[str]:
    """A row for each outcome."""
    width = max(len("algorithm"), *(len(o.algorithm) for o in outcomes))
    table = report.Table(
        [
            report.Column("algorithm", "", width),
            report.Column("bytes", "", 12),
            report.Column("time", "", 9),
            report.Column("algbw", "GB/s", 8),
            report.Column("busbw", "GB/s", 8),
            report.Column("steps", "", 7),
            report.Column("bottleneck", "", 30),
            report.Column("how", "", 24),
        ]
    )
    lines = [table.header()]
    for o in outcomes:
        how = o.method + (", extrapolated" if o.extrapolated else "")
        cells = [o.algorithm, str(o.nbytes), seconds_text(o.seconds)]
        cells += [report.number(o.algbw_gbs), report.number(o.busbw_gbs), str(o.steps)]
        lines.append(table.row([*cells, o.bottleneck, how]))
    return lines
