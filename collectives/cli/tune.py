"""Measure every algorithm on these ranks, fit the cost model, and write the table of the fastest.

Each algorithm is verified before it is timed; one with a wrong element ends the command with status
1, and nothing is written. The table is what `algorithm="auto"` asks from then on, on this hardware
and for ranks that are placed alike. It is agreed by all ranks, and rank 0 writes it: to
COLLECTIVES_TABLE or --output, else to a file named after the hardware in ~/.cache/collectives.

Predicted times stand beside the measured ones. An algorithm that is ten times slower than the
fastest is left out at larger sizes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..bench import machine, report
from ..bench.backends import Host
from ..bench.cases import Case, places
from ..bench.measuring import Bench, elements_of, sizes
from ..bench.timing import Effort, take_turns
from ..communicator import Communicator
from ..config import Settings
from ..errors import CollectiveError, ConfigError
from ..tuning import model, tables
from ..tuning.model import Measurement
from . import _common, _ranks
from ._progress import Progress
from .bench import _collectives

EXAMPLES = """\
examples:
  python -m collectives tune --ranks 4
  mpirun -n 4 python -m collectives tune
  mpirun -n 8 python -m collectives tune --collective all_reduce -b 1K -e 64M --output table.json
"""

COLLECTIVES = "all_reduce,reduce_scatter,all_gather,broadcast,reduce,all_to_all"
_HOPELESS = 10.0  # times slower than the fastest: not timed at larger sizes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--collective", default=COLLECTIVES, metavar="NAMES", help="some, or all (the usual six)")
    add("-b", "--minbytes", type=_common.size, default=64, help="smallest size (64)")
    add("-e", "--maxbytes", type=_common.size, default=16 << 20, help="largest size (16M)")
    add("-f", "--stepfactor", type=_common.factor, default=4, help="each size times so much (4)")
    add("--seconds", type=_common.seconds, default=0.05, help="for a size and algorithm (0.05)")
    add("--rows", action="store_true", help="print all algorithms, not only the fastest")
    add("--dry-run", action="store_true", help="write nothing")
    add("-o", "--output", metavar="FILE", help="instead of COLLECTIVES_TABLE or the usual place")
    _ranks.add_arguments(parser, _common.positive)


@_common.in_words
def run(args: argparse.Namespace) -> int:
    with _ranks.on_every_rank():
        names = _collectives(args.collective)
        if "barrier" in names and args.collective != "all":
            raise ConfigError("a barrier has no sizes, and needs no algorithm; leave it out")
        sizes(args.minbytes, args.maxbytes, args.stepfactor, None)
    return _ranks.with_ranks(args, "tune", lambda comm: _tune(comm, args))


def _tune(comm: Communicator, args: argparse.Namespace) -> int:
    if comm.size == 1:
        raise ConfigError("one rank moves nothing: start more with --ranks N, or with mpirun")
    path = tables.path_for(comm._hardware, args.output or Settings().table)
    if not args.dry_run:
        _check_file(comm, path)
    cores = machine.cores(comm)
    if comm.rank == 0:
        print(f"# {comm.size} ranks on {len(set(comm.nodes))} node(s), {comm.transports}")
        for note in machine.warnings(comm, cores):
            print(f"# note: {note}")
    names = [n for n in _collectives(args.collective) if n != "barrier"]
    measured, wrong = measure(comm, names, args)
    if wrong:
        if comm.rank == 0:
            for line in wrong:
                print(line)
            print("nothing is written")
        return 1
    layout = _agreed(comm, measured)
    table = tables.parse(layout, path)
    if comm.rank == 0:
        _print(comm, measured, table, args)
        if not args.dry_run:
            key = tables.layout_key(comm.transports, comm.nodes)
            tables.save(path, comm._hardware, key, layout)
            print(f"written to {path}")
    return 0


def _check_file(comm: Communicator, path: Path) -> None:
    """Raises ConfigError on all ranks, before anything is measured, if rank 0 could not put a table
    of this hardware there.
    """
    words = ""
    if comm.rank == 0:
        try:
            tables.load(path, comm._hardware)
            tables.try_writing(path)
        except ConfigError as error:
            words = str(error)
    words = comm._bootstrap.broadcast(words.encode()).decode()
    with _ranks.on_every_rank():
        if words:
            raise ConfigError(words)


def measure(
    comm: Communicator, collectives: Sequence[str], args: argparse.Namespace
) -> tuple[list[Measurement], list[str]]:
    """The time of each algorithm at each size; and words about each that gave wrong elements.
    Collective, with the same result on all ranks.
    """
    wanted = sizes(args.minbytes, args.maxbytes, args.stepfactor, None)
    cases = [Case(name, comm.size) for name in collectives]
    largest = max(case.elements(wanted[-1]) * case.itemsize for case in cases)
    bench = Bench(Host(comm), largest, Effort(args.seconds))
    counts = {case.collective: elements_of(case, wanted) for case in cases}
    progress = Progress(sum(map(len, counts.values())), shown=comm.rank == 0)
    found: list[Measurement] = []
    wrong: list[str] = []
    for case in cases:
        names = comm._tuner.candidates(case.collective)
        in_place = places(case.collective)[-1]
        for elements in counts[case.collective]:
            bounds = [bench.bound(case, name, elements, in_place) for name in names]
            for name, bound in zip(names, bounds, strict=True):
                bad = bench.verify(bound)
                if bad:
                    wrong.append(
                        f"{name}, {case.collective} of {bound.nbytes} B: {bad} wrong elements"
                    )
            if wrong:
                return found, wrong
            samples = take_turns(bench.clock, [bench.runner(b) for b in bounds], bench.effort)
            times = {
                name: sample.median
                for name, sample in zip(names, samples, strict=True)
                if sample is not None
            }
            nbytes = elements * case.itemsize
            found += [Measurement(n, case.collective, nbytes, s) for n, s in times.items()]
            limit = _HOPELESS * min(times.values())
            names = [name for name in names if times.get(name, 0.0) <= limit]
            progress.step(f"{case.collective} {nbytes} B")
    progress.clear()
    return found, wrong


def _agreed(comm: Communicator, measured: Sequence[Measurement]) -> dict[str, Any]:
    """The layout that rank 0 makes of the times, which all ranks have alike. Collective.

    Raises CollectiveError where they have not.
    """
    digest = hashlib.sha256(json.dumps(measured).encode()).hexdigest()
    layout: dict[str, Any] = {}
    if comm.rank == 0:
        figures = model.fit(measured, comm.nodes, comm.transports)
        layout = tables.entry(
            tables.choices_of(measured),
            figures,
            measured,
            date=machine.now(),
            version=machine.versions()["collectives"],
        )
    answers = [
        json.loads(b) for b in comm._bootstrap.all_gather(json.dumps([digest, layout]).encode())
    ]
    others = [r for r, (theirs, _) in enumerate(answers) if theirs != answers[0][0]]
    if others:
        raise CollectiveError(
            f"ranks {others} measured other times than rank 0; nothing is written", rank=comm.rank
        )
    return dict(answers[0][1])


def _print(
    comm: Communicator,
    measured: Sequence[Measurement],
    table: tables.Table,
    args: argparse.Namespace,
) -> None:
    shown = report.Table(
        [
            report.Column("collective", "", 14),
            report.Column("bytes", "", 11),
            report.Column("measured", "(us)", 10),
            report.Column("predicted", "(us)", 10),
            report.Column("off", "", 6),
        ]
    )
    print(shown.header() + "  algorithm")
    best: dict[tuple[str, int], float] = {}
    for m in measured:
        key = (m.collective, m.nbytes)
        best[key] = min(best.get(key, m.seconds), m.seconds)
    for m in measured:
        fastest = m.seconds == best[m.collective, m.nbytes]
        if not fastest and not args.rows:
            continue
        predicted = model.predict(
            m.algorithm,
            m.collective,
            m.nbytes,
            comm.nodes,
            comm.transports,
            figures=table.figures,
        )
        assert predicted is not None
        cells = [
            m.collective,
            str(m.nbytes),
            report.microseconds(m.seconds * 1e6),
            report.microseconds(predicted * 1e6),
            f"{predicted / m.seconds - 1:+.0%}",
        ]
        print(f"{shown.row(cells)}  {m.algorithm}{' *' if fastest and args.rows else ''}")
    for kind, figures in table.figures.items():
        print(f"# {kind}: {model.in_words(figures)}")
    off = model.errors(measured, comm.nodes, comm.transports, table.figures)
    print(
        f"# predictions are off by {np.median(off):.0%} in the median of {len(off)} times, "
        f"nine of ten by less than {np.percentile(off, 90):.0%}"
    )
