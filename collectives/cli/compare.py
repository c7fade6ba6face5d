"""Time all algorithms over sizes: which is the fastest where, and where they cross.

All of them take turns in one run, each result is verified before it is timed, and a call's time is
the median of what the slowest rank takes. The exit status is 1 if any element was wrong. With
--device cuda the arrays are on GPUs and the calls in CUDA graphs, or launched one by one (--mode
stream); see `bench --help`.

With --topology nothing runs here: the algorithms are simulated on the machines that it describes,
on each of the numbers of nodes that --nodes lists.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..bench import backends, gpus, machine, peers, report
from ..bench.backends import Backend
from ..bench.cases import ROOTED, Case, places
from ..bench.measuring import Bench, candidates, check_case, elements_of, sizes
from ..bench.timing import Effort, take_turns
from ..communicator import Communicator
from ..errors import ConfigError, UnsupportedError
from ..tuning import model
from ..words import counted, size_words
from . import _common, _ranks, _simulated
from ._progress import Progress

EXAMPLES = """\
examples:
  python -m collectives compare --ranks 2
  python -m collectives compare all_gather --ranks 4 -b 1K -e 4M --png all_gather.png
  mpirun -n 2 python -m collectives compare all_reduce --peer mpi --json compare.json
  python -m collectives compare --ranks 4 --nodes 2 --only ring --only hierarchical
  python -m collectives compare --ranks 4 --import my_algorithms.py
  python -m collectives compare --device cuda --ranks 2 --peer nccl --png gpus.png
  python -m collectives compare --topology dgx-h100 --nodes 1,2,16,128 --bytes 1K:1G --html x.html
"""

# An algorithm stays the fastest while it is within so much of whichever is: the noise of a median.
_NEAR = 1.1
_LONG = 20  # letters of a name that still heads a column


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "collective",
        nargs="?",
        type=_common.collective,
        default="all_reduce",
        help="all_reduce (default), broadcast, ...",
    )
    add = parser.add_argument
    add("-b", "--minbytes", type=_common.size, default=4, help="smallest size (4)")
    add("-e", "--maxbytes", type=_common.size, default=16 << 20, help="largest size (16M)")
    add("-f", "--stepfactor", type=_common.factor, default=4, help="each size times so much (4)")
    add("-n", "--iters", type=_common.positive, help="calls (as many as fit in --seconds)")
    add("-w", "--warmup-iters", type=_common.natural, default=5, help="calls before (5)")
    add("-c", "--check", type=_common.natural, default=1, help="verify each so often (1)")
    add("--seconds", type=_common.seconds, default=0.1, help="for each size and algorithm (0.1)")
    _common.add_rest(parser)
    add("-o", "--op", type=_common.op, default="sum", help="(sum)")
    add(
        "-d",
        "--datatype",
        type=_common.dtype,
        default="float32",
        help="dtype of the elements (float32)",
    )
    add("-r", "--root", type=_common.natural, default=0, help="(0)")
    add("--out-of-place", action="store_true", help="instead of in place")
    add("--symmetric", action="store_true", help="arrays from Communicator.empty")
    add("--python", action="store_true", help="loops in Python instead of C++")
    add("--only", action="append", metavar="NAME", help="these algorithms; may be repeated")
    add(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="a module, or a file .py, that registers algorithms",
    )
    add(
        "--peer",
        action="append",
        type=_common.one_of("peer", peers.NAMES),
        metavar="NAME",
        help="time mpi or gloo, or on GPUs nccl, too, in turns; may be repeated",
    )
    _common.add_device_arguments(parser)
    add("--json", metavar="FILE", help="write header and rows to FILE")
    add("--png", metavar="FILE", help="draw times and bandwidths, .svg as SVG (needs matplotlib)")
    add("--fit", action="store_true", help="print the figures of the cost model for these ranks")
    add("--html", metavar="FILE", help="with --topology: write a page of plots (needs plotly)")
    add("--bytes", type=_simulated.sizes, metavar="SIZES", help="with --topology: 1K:1G, or 1K,1M")
    add(
        "--measured",
        action="append",
        metavar="PATH",
        help="with --html: files of bench --json to show beside, or a folder (bench/results)",
    )
    _simulated.topology_argument(parser, needed=False)
    _ranks.add_arguments(parser, _common.positive)
    # A list for --topology, one number else.
    nodes = next(action for action in parser._actions if action.dest == "nodes")
    nodes.type = _simulated.numbers
    nodes.help = f"{nodes.help}; with --topology: numbers of nodes, 1,2,16"


@dataclass
class Results:
    """Seconds by size, of algorithms and of peers; and the rows for JSON. An algorithm with wrong
    elements has no time at that size.
    """

    case: Case
    algorithms: list[str]
    times: dict[int, dict[str, float]] = field(default_factory=dict)
    peer_times: dict[int, dict[str, float]] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def fastest(self, nbytes: int) -> str:
        """The algorithm with the least time, "" where none has one."""
        times = self.times[nbytes]
        return min(times, key=lambda name: times[name], default="")


# What `compare --topology` goes by.
_OF_TOPOLOGY = (
    *("topology", "collective", "nodes", "bytes", "minbytes", "maxbytes", "only", "root"),
    *("imports", "json", "png", "html", "measured"),
)


def _refuse_unused(args: argparse.Namespace) -> None:
    """Raises ConfigError for an option that has no meaning with --topology."""
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    for action in parser._actions:
        given = getattr(args, action.dest) != action.default
        if given and action.dest not in _OF_TOPOLOGY:
            raise ConfigError(
                f"{action.option_strings[-1]} goes without --topology: nothing runs here"
            )
        if given and args.bytes and action.dest in ("minbytes", "maxbytes"):
            raise ConfigError(f"{action.option_strings[-1]} and --bytes both give sizes; give one")


@_common.in_words
def run(args: argparse.Namespace) -> int:
    _common.import_algorithms(args.imports)
    if args.topology:
        _refuse_unused(args)
        return _simulated.compare(args)
    with _ranks.on_every_rank():
        for option in ("html", "bytes", "measured"):
            if getattr(args, option):
                raise ConfigError(f"--{option} goes with --topology: nothing is simulated here")
        if args.nodes and len(args.nodes) > 1:
            raise ConfigError("--nodes lists several numbers, which only --topology can do")
        args.nodes = args.nodes[0] if args.nodes else None
        for name in args.only or ():
            _common.algorithm(name)
        _common.check_used([args.collective], root=args.root, op=args.op)
        sizes(args.minbytes, args.maxbytes, args.stepfactor, None)
        _common.check_picture(args.png)
        if args.png and args.collective == "barrier":
            raise ConfigError("--png draws times over sizes; a barrier has none")
        _common.check_device(args)
        if args.mode == "both":
            raise ConfigError("--mode both is of bench; compare shows one: stream or graph")
        if args.fit and args.device != "cpu":
            raise ConfigError("--fit is for the host's cost model; leave it out on GPUs")
    _common.check_writable(args.json, args.png)
    return _ranks.with_ranks(
        args, "compare", lambda comm: _compare(comm, args), max_blocks=args.max_blocks
    )


def _compare(comm: Communicator, args: argparse.Namespace) -> int:
    root = args.root if args.collective in ROOTED else 0
    case = Case(args.collective, comm.size, args.datatype, args.op, root)
    with _ranks.on_every_rank():
        check_case(comm, case, "auto", None)
        for name in args.only or ():
            check_case(comm, case, name, None)
        algorithms = args.only or candidates(comm, args.collective, root)
        if not algorithms:
            raise UnsupportedError(f"no algorithm can do {args.collective} with {comm.size} ranks")
        backend = backends.connect(comm, args.device, python=args.python)
        connected = peers.connect(backend, args.peer or (), "compare")
    command = _ranks.command_of(args, "compare")
    header = machine.header(comm, command, backend.facts(), backend.tuner)
    elements = elements_of(case, sizes(args.minbytes, args.maxbytes, args.stepfactor, None))
    bench = Bench(
        backend,
        elements[-1] * case.itemsize,
        Effort(args.seconds, args.iters, args.warmup_iters, args.rest),
        check=args.check,
        symmetric=args.symmetric,
        peers=connected,
    )
    results = _measure(bench, case, list(dict.fromkeys(algorithms)), elements, args, header)
    for peer in connected:
        peer.close()
    wrong = sum(row["wrong"] or 0 for row in results.rows)
    if comm.rank == 0:
        print("#")
        if wrong:
            print(f"# wrong elements: {wrong} FAILED")
        if not args.check:
            print("# nothing was verified (-c 0)")
        for line in [*in_words(results), *_about_auto(bench, results)]:
            print(line)
        if args.fit:
            print(_fit(comm, results))
        if args.json:
            report.write_json(args.json, header, results.rows)
        if args.png:
            from ..bench.plot import plot

            plot(results, args.png, _subtitle(backend, header))
            print(f"{args.png} drawn")
    return 1 if wrong else 0


def _measure(
    bench: Bench,
    case: Case,
    algorithms: list[str],
    elements: Sequence[int],
    args: argparse.Namespace,
    header: dict[str, Any],
) -> Results:
    comm, printing = bench.comm, bench.comm.rank == 0
    mode = args.mode or bench.backend.modes[-1]
    ways = places(case.collective)
    in_place = ways[0] if args.out_of_place else ways[-1]
    skipped = {} if args.only else bench.refused(case, algorithms, elements[-1], in_place)
    algorithms = [name for name in algorithms if name not in skipped]
    if not algorithms:
        raise UnsupportedError("; ".join(skipped.values()))
    results = Results(case, algorithms)
    table, key = _table(algorithms, [p.name for p in bench.peers])
    if printing:
        nodes = len(set(comm.nodes))
        print(
            f"# {case.collective} of {case.dtype}, {counted(comm.size, 'rank')} on "
            f"{counted(nodes, 'node')}, transport {bench.backend.transport}"
        )
        notes = machine.warnings(comm, header["machine"]["cores"])
        notes += [f"without {name}: {why}" for name, why in skipped.items()]
        for line in [*report.describe(header), *(f"note: {n}" for n in notes), *key]:
            print(f"# {line}")
        print(f"# times in us, * the fastest\n{table.header()}")
    progress = Progress(len(elements) * len(algorithms), shown=printing)
    for count in elements:
        nbytes = count * case.itemsize
        bounds = [bench.bound(case, name, count, in_place) for name in algorithms]
        wrong = []
        for name, bound in zip(algorithms, bounds, strict=True):
            wrong.append(bench.verify(bound))
            progress.step(f"{name} {nbytes} B")
        runners = [bench.runner(bound, mode) for bound in bounds]
        samples = take_turns(
            bench.clock, [*runners, *bench.peer_runners(case, count, in_place, mode)], bench.effort
        )
        mine, theirs = samples[: len(algorithms)], samples[len(algorithms) :]
        results.times[nbytes] = {}
        for name, bound, sample, bad in zip(algorithms, bounds, mine, wrong, strict=True):
            assert sample is not None
            if not bad:
                results.times[nbytes][name] = sample.median
            results.rows.append(bench.row(case, name, bound, sample, bad, theirs, mode))
        results.peer_times[nbytes] = {
            peer.name: sample.median
            for peer, sample in zip(bench.peers, theirs, strict=True)
            if sample is not None
        }
        if printing:
            progress.clear()
            peer_names = [p.name for p in bench.peers]
            print(table.row(_cells(results, nbytes, wrong, peer_names)), flush=True)
    return results


def _table(algorithms: Sequence[str], peer_names: Sequence[str]) -> tuple[report.Table, list[str]]:
    """The table, and lines that say which long name is which letter."""
    columns = [report.Column("bytes", "", 11)]
    key: list[str] = []
    for name in algorithms:
        title = name
        if len(name) > _LONG:
            title = f"[{chr(ord('A') + len(key))}]"
            key.append(f"{title} {name}")
        columns.append(report.Column(title, "", max(9, len(title) + 1)))
    columns += [report.Column(name, "", 9) for name in peer_names]
    return report.Table(columns), key


def _cells(
    results: Results, nbytes: int, wrong: Sequence[int | None], peer_names: Sequence[str]
) -> list[str]:
    times, best = results.times[nbytes], results.fastest(nbytes)
    cells = [str(nbytes)]
    for name, bad in zip(results.algorithms, wrong, strict=True):
        text = "WRONG" if bad else report.microseconds(times[name] * 1e6)
        cells.append(text + ("*" if name == best and len(wrong) > 1 else " "))
    found = results.peer_times[nbytes]
    for name in peer_names:
        cells.append(report.microseconds(found[name] * 1e6 if name in found else None))
    return cells


def in_words(results: Results) -> list[str]:
    """Which algorithm is the fastest where, and where one passes another."""
    stretches: list[tuple[str, int, int]] = []
    for nbytes, times in results.times.items():
        best = results.fastest(nbytes)
        if not best:
            continue
        if stretches and times.get(stretches[-1][0], math.inf) <= _NEAR * times[best]:
            name, low, _ = stretches[-1]
            stretches[-1] = (name, low, nbytes)
        else:
            stretches.append((best, nbytes, nbytes))
    if len(results.algorithms) < 2 or not stretches:
        return []
    if len(stretches) == 1:
        return [f"{stretches[0][0]} is the fastest at every size (within {_NEAR - 1:.0%})."]
    lines = []
    for i, (name, low, high) in enumerate(stretches):
        first, last = size_words(low), size_words(high)
        span = f"at {first}" if low == high else f"from {first} to {last}"
        line = f"{name} is the fastest {span}"
        if i + 1 < len(stretches):
            after, start, _ = stretches[i + 1]
            near = crossing(results, name, after, high, start)
            where = (
                f"near {size_words(near)}" if near else f"between {last} and {size_words(start)}"
            )
            line += f"; {after} passes it {where}"
        lines.append(line + ".")
    return lines


def crossing(results: Results, first: str, second: str, low: int, high: int) -> int | None:
    """The size between `low` and `high` where `second` becomes faster than `first`: straight lines
    between the measured points in logarithms. None if they do not cross there.
    """
    a, b = results.times[low], results.times[high]
    if second not in a or first not in b:
        return None
    before, after = math.log(a[second] / a[first]), math.log(b[second] / b[first])
    if before <= 0 or after >= 0 or low < 1:
        return None
    share = before / (before - after)
    exact = math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
    step = 2 ** max(0, math.floor(math.log2(exact)) - 2)  # two digits, or so, in powers of two
    return max(low, min(high, round(exact / step) * step))


def _about_auto(bench: Bench, results: Results) -> list[str]:
    """How far the tuner's choices are from the fastest."""
    if results.case.collective == "barrier" or len(results.algorithms) < 2:
        return []
    found: list[tuple[float, int, str]] = []  # times slower than the fastest, bytes, name
    for nbytes, times in results.times.items():
        name = bench.backend.choose(results.case.collective, nbytes)
        name = "auto" if "auto" in times else name
        if name in times:
            found.append((times[name] / times[results.fastest(nbytes)], nbytes, name))
    if not found:
        return ["What is chosen by itself was not measured."]
    missing = len(results.times) - len(found)
    rest = f"; at {counted(missing, 'size')} it was not measured" if missing else ""
    worst, where, chosen = max(found, key=lambda one: one[0])
    if worst <= _NEAR:
        span = f"at {counted(len(found), 'size')}" if missing else "everywhere"
        return [f"What is chosen by itself is the fastest {span} (within {_NEAR - 1:.0%}){rest}."]
    return [
        f"What is chosen by itself is at most {worst:.2f}x slower than the fastest ({chosen} at "
        f"{size_words(where)}){rest}."
    ]


def _fit(comm: Communicator, results: Results) -> str:
    collective = results.case.collective
    measured = [
        model.Measurement(name, collective, nbytes, seconds)
        for nbytes, times in results.times.items()
        for name, seconds in times.items()
    ]
    lines = [f"cost model fitted to these times ({comm.transports}):"]
    figures = model.fit(measured, comm.nodes, comm.transports)
    lines += [f"  {kind}: {model.in_words(found)}" for kind, found in figures.items()]
    off = model.errors(measured, comm.nodes, comm.transports, figures)
    if len(off):
        lines.append(f"predictions are off by {np.median(off):.0%} (median of {len(off)})")
    return "\n".join(lines)


def _subtitle(backend: Backend, header: dict[str, Any]) -> str:
    comm, found = backend.comm, header["machine"]
    if "gpus" in found:
        return f"{counted(comm.size, 'rank')}, {backend.transport}; {gpus.summary(found['gpus'])}"
    exchange = f", cache line {found['exchange_ns']:.0f} ns" if found["exchange_ns"] else ""
    return (
        f"{counted(comm.size, 'rank')}, {counted(len(set(comm.nodes)), 'node')}, "
        f"{comm.transports}; {found['cpu']}, "
        f"{found['cores']} cores{exchange}"
    )
