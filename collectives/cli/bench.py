"""Time collectives over sizes, verified, in the table of nccl-tests.

Each result is verified before it is timed. A call's time is what the slowest rank takes; the table
shows the median and the time that 99 of 100 calls do not exceed. Loops run in C++, as those of
nccl-tests and OSU do; with --python they go through the methods that a program calls. Inputs are
rewritten between calls, as by a program that computes them. Peers are timed in turns with ours, on
the same arrays (with --symmetric: on ordinary ones), and a ratio is the peer's time / ours. A peer
whose result is wrong ends the run.

With --device cuda the arrays are on GPUs, and a time is the mean of a window of calls between two
events, on the slowest rank: of calls launched one by one on a stream (--mode stream), or in a CUDA
graph (--mode graph); median and p99 are then over windows. The peer is NCCL, without multicast.

bytes are those of the whole vector, of all blocks together. busbw is bytes / time times 2 (n-1)/n
for all_reduce, (n-1)/n where there are blocks, and 1 for broadcast and reduce.
The exit status is 1 if any element was wrong.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from .. import _core
from ..bench import backends, machine, peers, report
from ..bench.backends import Backend
from ..bench.cases import ROOTED, Case, places
from ..bench.measuring import Bench, check_case, elements_of, sizes
from ..bench.timing import Effort
from ..communicator import Communicator
from ..errors import ConfigError
from ..words import counted
from . import _common, _ranks
from ._progress import Progress

EXAMPLES = """\
examples:
  python -m collectives bench --ranks 2
  python -m collectives bench --ranks 4 -b 1K -e 16M -f 4 --collective all_gather,broadcast
  python -m collectives bench --ranks 2 -b 64K -e 64K -a ring -a direct_one_shot -d bfloat16
  mpirun -n 2 python -m collectives bench --peer mpi --peer gloo --json result.json
  mpirun -n 2 python -m collectives bench -b 4 -e 64 --python --peer mpi    against mpi4py
  python -m collectives bench --device cuda --ranks 2 --mode both --peer nccl
  python -m collectives bench --device cuda --threads 8 -e 1M               on any number of GPUs
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    sizes_ = parser.add_argument_group("sizes")
    sizes_.add_argument(
        "-b",
        "--minbytes",
        type=_common.size,
        default=4,
        help="smallest (4); sizes become whole elements, at least one, or one a rank in blocks",
    )
    sizes_.add_argument(
        "-e", "--maxbytes", type=_common.size, default=64 << 20, help="largest (64M)"
    )
    sizes_.add_argument(
        "-f", "--stepfactor", type=_common.factor, default=4, help="each size times so much (4)"
    )
    sizes_.add_argument(
        "-i", "--stepbytes", type=_common.step, help="each size plus so many bytes instead"
    )
    effort = parser.add_argument_group("effort")
    effort.add_argument(
        "-n",
        "--iters",
        type=_common.positive,
        help="calls; on GPUs at least so many (as many as fit in --seconds)",
    )
    effort.add_argument(
        "-w", "--warmup-iters", type=_common.natural, default=5, help="calls before (5)"
    )
    effort.add_argument(
        "-c",
        "--check",
        type=_common.natural,
        default=1,
        metavar="N",
        help="verify each N times before it is timed (1); 0: never",
    )
    effort.add_argument(
        "--seconds",
        type=_common.seconds,
        default=0.2,
        metavar="S",
        help="time for each size and library (0.2)",
    )
    _common.add_rest(effort)
    what = parser.add_argument_group("what")
    what.add_argument(
        "--collective",
        default="all_reduce",
        metavar="NAMES",
        help="one, several with commas between, or all (all_reduce)",
    )
    what.add_argument(
        "-a",
        "--algorithm",
        action="append",
        metavar="NAME",
        help="force one, or a composition; may be repeated (auto: chosen by size)",
    )
    what.add_argument("-o", "--op", type=_common.op, default="sum", help="sum, max, ... (sum)")
    what.add_argument(
        "-d",
        "--datatype",
        type=_common.dtype,
        default="float32",
        help="dtype of the elements (float32)",
    )
    what.add_argument("-r", "--root", type=_common.natural, default=0, help="(0)")
    what.add_argument(
        "--order", type=_common.one_of("order", ("any", "rank")), help="rank: sum in rank order"
    )
    what.add_argument("--symmetric", action="store_true", help="arrays from Communicator.empty")
    what.add_argument("--in-place", action="store_true", help="in place only")
    what.add_argument("--out-of-place", action="store_true", help="out of place only")
    what.add_argument("--python", action="store_true", help="loops in Python instead of C++")
    what.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="a module, or a file .py, that registers algorithms",
    )
    what.add_argument(
        "--peer",
        action="append",
        type=_common.one_of("peer", peers.NAMES),
        metavar="NAME",
        help="time mpi or gloo, or on GPUs nccl, too, in turns; may be repeated",
    )
    _common.add_device_arguments(parser)
    parser.add_argument("--json", metavar="FILE", help="write header and rows to FILE")
    _ranks.add_arguments(parser, _common.positive)


@_common.in_words
def run(args: argparse.Namespace) -> int:
    _common.import_algorithms(args.imports)
    with _ranks.on_every_rank():
        names = _collectives(args.collective)
        _common.check_used(names, root=args.root, op=args.op, order=args.order)
        for name in args.algorithm or ():
            _common.algorithm(name)
        if args.in_place and args.out_of_place:
            raise ConfigError("--in-place and --out-of-place leave nothing; leave both out")
        sizes(args.minbytes, args.maxbytes, args.stepfactor, args.stepbytes)
        _common.check_device(args)
    _common.check_writable(args.json)
    return _ranks.with_ranks(
        args, "bench", lambda comm: _measure(comm, args), max_blocks=args.max_blocks
    )


def _collectives(text: str) -> list[str]:
    if text == "all":
        return list(_core.collectives)
    try:
        return list(dict.fromkeys(_common.collective(name.strip()) for name in text.split(",")))
    except argparse.ArgumentTypeError as error:
        raise ConfigError(str(error)) from None


def _measure(comm: Communicator, args: argparse.Namespace) -> int:
    cases = [
        Case(c, comm.size, args.datatype, args.op, args.root if c in ROOTED else 0)
        for c in _collectives(args.collective)
    ]
    algorithms = list(dict.fromkeys(args.algorithm or ["auto"]))
    with _ranks.on_every_rank():
        for case in cases:
            for algorithm in algorithms:
                check_case(comm, case, algorithm, args.order)
        backend = backends.connect(comm, args.device, python=args.python)
        connected = peers.connect(backend, args.peer or ())
    modes = backend.modes if args.device == "cpu" else backends.modes_of(args.mode)
    printing = comm.rank == 0
    command = _ranks.command_of(args, "bench")
    header = machine.header(comm, command, backend.facts(), backend.tuner)
    if printing:
        _print_header(backend, args, header)
    wanted = sizes(args.minbytes, args.maxbytes, args.stepfactor, args.stepbytes)
    largest = max(case.elements(wanted[-1]) * case.itemsize for case in cases)
    bench = Bench(
        backend,
        largest,
        Effort(args.seconds, args.iters, args.warmup_iters, args.rest),
        check=args.check,
        symmetric=args.symmetric,
        order=args.order,
        peers=connected,
    )
    rows: list[dict[str, Any]] = []
    total = sum(len(_places(args, c)) * len(elements_of(c, wanted)) for c in cases)
    progress = Progress(total * len(algorithms) * len(modes), shown=printing)
    for case in cases:
        for algorithm in algorithms:
            for mode in modes:
                way = Way(case, algorithm, mode, _places(args, case))
                _run_table(bench, way, wanted, rows, progress)
    for peer in connected:
        peer.close()
    wrong = sum(row["wrong"] or 0 for row in rows)
    if printing:
        _print_footer(rows, wrong, bench)
        if notes := backend.notes():
            header["notes"] = notes
        if args.json:
            report.write_json(args.json, header, rows)
    return 1 if wrong else 0


def _places(args: argparse.Namespace, case: Case) -> tuple[bool, ...]:
    possible = places(case.collective)
    if args.in_place:
        return tuple(p for p in possible if p) or possible
    if args.out_of_place:
        return tuple(p for p in possible if not p) or possible
    return possible


class Way(NamedTuple):
    """What the rows of a table share; `places` are its halves, out of place and in place."""

    case: Case
    algorithm: str
    mode: str
    places: tuple[bool, ...]


def _run_table(
    bench: Bench,
    way: Way,
    wanted: Sequence[int],
    rows: list[dict[str, Any]],
    progress: Progress,
) -> None:
    printing, case = bench.comm.rank == 0, way.case
    table = _table([p.name for p in bench.peers], way.places)
    if printing:
        progress.clear()
        launched = {"stream": ", launched one by one", "graph": ", in a CUDA graph"}
        how = launched.get(way.mode, "")
        head = f"#\n# {case.collective}, algorithm {way.algorithm}{how}\n{table.header()}"
        print(head, flush=True)  # the first row may take long
    for elements in elements_of(case, wanted):
        measured = []
        for in_place in way.places:
            measured.append(bench.measure(case, way.algorithm, elements, in_place, way.mode))
            progress.step(f"{case.collective} {measured[-1]['bytes']} B")
        rows += measured
        if printing:
            progress.clear()
            print(table.row(list(_cells(measured, bench, case))), flush=True)


def _table(peer_names: Sequence[str], ways: Sequence[bool]) -> report.Table:
    columns = [
        report.Column("bytes", "(B)", 11),
        report.Column("count", "(elements)", 11),
        report.Column("type", "", 11),
        report.Column("op", "", 10),
        report.Column("root", "", 4),
        report.Column("algorithm", "", 20),
    ]
    groups = [("", len(columns))]
    for in_place in ways:
        group = [
            report.Column("time", "(us)", 8),
            report.Column("p99", "(us)", 8),
            report.Column("algbw", "(GB/s)", 7),
            report.Column("busbw", "(GB/s)", 7),
            report.Column("#wrong", "", 6),
        ]
        for name in peer_names:
            group += [report.Column(name, "(us)", 8), report.Column(f"{name}/ours", "", 9)]
        columns += group
        groups.append(("in place" if in_place else "out of place", len(group)))
    return report.Table(columns, groups)


def _cells(measured: list[dict[str, Any]], bench: Bench, case: Case) -> Iterator[str]:
    first = measured[0]
    name = first["algorithm"]
    yield str(first["bytes"])
    yield str(first["count"])
    yield case.dtype
    yield first["op"]
    yield str(case.root) if case.collective in ROOTED else "-1"
    yield name if len(name) <= 20 else name[:19] + "…"
    for row in measured:
        yield report.microseconds(row["time_us"])
        yield report.microseconds(row["p99_us"])
        yield report.number(row["algbw_gbs"])
        yield report.number(row["busbw_gbs"])
        yield "N/A" if row["wrong"] is None else str(row["wrong"])
        found = {p["name"]: p for p in row["peers"]}
        for peer in bench.peers:
            entry = found.get(peer.name)
            yield report.microseconds(entry["time_us"] if entry else None)
            yield report.number(entry["ratio"] if entry else None)


def _print_header(backend: Backend, args: argparse.Namespace, header: dict[str, Any]) -> None:
    comm = backend.comm
    nodes = len(set(comm.nodes))
    ranks = f"{counted(comm.size, 'rank')} on {counted(nodes, 'node')}"
    print(f"# {ranks}, transport {backend.transport}")
    for line in report.describe(header):
        print(f"# {line}")
    for line in machine.warnings(comm, header["machine"]["cores"]):
        print(f"# note: {line}")
    memory = "symmetric" if args.symmetric else "ordinary"
    inputs = ", inputs rewritten between calls" if backend.device == "cpu" else ""
    print(f"# {backend.loops}, {memory} arrays{inputs}")
    if comm.size == 1:
        print("# one rank moves nothing: start more with --ranks N, or with mpirun")


def _print_footer(rows: list[dict[str, Any]], wrong: int, bench: Bench) -> None:
    bandwidths = [row["busbw_gbs"] for row in rows if row["bytes"]]  # a barrier has none
    print("#")
    if bench.check:
        print(f"# wrong elements: {wrong} {'FAILED' if wrong else 'OK'}")
    else:
        print("# nothing was verified (-c 0)")
    for name, words in bench.backend.notes().items():
        print(f"# {name}: {words}")
    if bandwidths:
        print(f"# average bus bandwidth: {sum(bandwidths) / len(bandwidths):.3f} GB/s")
    if bench.comm.size > 1 and bench.last.sum():
        what = "calls" if bench.backend.device == "cpu" else "windows"
        slowest, share = int(bench.last.argmax()), bench.last.max() / bench.last.sum()
        print(f"# slowest rank: {slowest}, the last to end in {share:.0%} of all {what}")
