"""Measure every algorithm on these ranks, fit the cost model, and write the table of the fastest.

Each algorithm is verified before it is timed; one with a wrong element ends the command with status
1, and nothing is written. The table is what `algorithm="auto"` asks from then on, on this hardware
and for ranks that are placed alike. It is agreed by all ranks, and rank 0 writes it: to
COLLECTIVES_TABLE or --output, else to a file named after the hardware in ~/.cache/collectives.

Predicted times stand beside the measured ones. An algorithm that is ten times slower than the
fastest is left out at larger sizes.

With --device cuda the arrays are ordinary ones on GPUs and the calls in CUDA graphs. The table
names the GPUs, and is asked for arrays on such GPUs alone. Symmetric buffers go by the same
choices.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..bench import backends, machine, report
from ..bench.backends import Backend
from ..bench.cases import Case, places
from ..bench.measuring import Bench, elements_of, sizes
from ..bench.timing import Effort, take_turns
from ..communicator import Communicator
from ..config import Settings
from ..errors import CollectiveError, ConfigError
from ..tuning import model, tables
from ..tuning.model import Measurement
from ..words import counted
from . import _common, _ranks
from ._progress import Progress
from .bench import _collectives

EXAMPLES = """\
examples:
  python -m collectives tune --ranks 4
  mpirun -n 4 python -m collectives tune
  mpirun -n 8 python -m collectives tune --collective all_reduce -b 1K -e 64M --output table.json
  python -m collectives tune --device cuda --ranks 2
"""

COLLECTIVES = "all_reduce,reduce_scatter,all_gather,broadcast,reduce,all_to_all"
_HOPELESS = 10.0  # times slower than the fastest: not timed at larger sizes


class Defaults(NamedTuple):
    """What is measured unless the arguments say otherwise: sizes, and seconds for each.

    judged_from  bytes from which on an algorithm may prove hopeless
    """

    minbytes: int
    maxbytes: int
    stepfactor: int
    seconds: float
    judged_from: int


# On GPUs steps cost much, and bytes little: a ring of four takes ten times as long as packets, and
# is the best for large broadcasts.
DEFAULTS = {
    "cpu": Defaults(64, 16 << 20, 4, 0.05, 0),
    "cuda": Defaults(256, 64 << 20, 8, 0.03, 1 << 20),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--collective", default=COLLECTIVES, metavar="NAMES", help="some, or all (the usual six)")
    add("-b", "--minbytes", type=_common.size, help="smallest size (64; on GPUs 256)")
    add("-e", "--maxbytes", type=_common.size, help="largest size (16M; on GPUs 64M)")
    add("-f", "--stepfactor", type=_common.factor, help="each size times so much (4; on GPUs 8)")
    add("--seconds", type=_common.seconds, help="for a size and algorithm (0.05; on GPUs 0.03)")
    add("--rows", action="store_true", help="print all algorithms, not only the fastest")
    add("--dry-run", action="store_true", help="write nothing")
    add("-o", "--output", metavar="FILE", help="instead of COLLECTIVES_TABLE or the usual place")
    _common.add_device(parser)
    _ranks.add_arguments(parser, _common.positive)


@_common.in_words
def run(args: argparse.Namespace) -> int:
    with _ranks.on_every_rank():
        names = _collectives(args.collective)
        if "barrier" in names and args.collective != "all":
            raise ConfigError("a barrier has no sizes, and needs no algorithm; leave it out")
        _sizes(args)
        _check_nodes(args.device, args.nodes or 1)
        if Settings().table == "off" and not args.output and not args.dry_run:
            raise ConfigError(
                "COLLECTIVES_TABLE is off, so no table would be asked: unset it, name a file with "
                "--output, or measure with --dry-run"
            )
    return _ranks.with_ranks(args, "tune", lambda comm: _tune(comm, args))


def _check_nodes(device: str, nodes: int) -> None:
    """Raises ConfigError for GPUs of several nodes, which no table is of."""
    if device != "cpu" and nodes > 1:
        raise ConfigError(
            "arrays on GPUs of several nodes go by way of the hosts, by the table of host arrays; "
            "leave --device out"
        )


def _sizes(args: argparse.Namespace) -> list[int]:
    """The sizes to measure, rising. Raises ValueError where there are none."""
    usual = DEFAULTS[args.device]
    return sizes(
        usual.minbytes if args.minbytes is None else args.minbytes,
        usual.maxbytes if args.maxbytes is None else args.maxbytes,
        args.stepfactor or usual.stepfactor,
        None,
    )


def _tune(comm: Communicator, args: argparse.Namespace) -> int:
    with _ranks.on_every_rank():
        if comm.size == 1:
            raise ConfigError("one rank moves nothing: start more with --ranks N, or with mpirun")
        _check_nodes(args.device, len(set(comm.nodes)))
    path = "" if args.dry_run else _checked_file(comm, args.output or "")
    with _ranks.on_every_rank():
        backend = backends.connect(comm, args.device)
    cores = machine.cores(comm)
    gpus = backend.gpus()
    useless = backend.why_no_table()
    if comm.rank == 0:
        nodes = counted(len(set(comm.nodes)), "node")
        print(f"# {counted(comm.size, 'rank')} on {nodes}, {backend.links}")
        if gpus:
            print(f"# {tables.gpus_in_words(gpus)}; ordinary arrays, {backend.loops}")
        for note in machine.warnings(comm, cores):
            print(f"# note: {note}")
        if useless:
            print(f"# note: there will be no table: {useless}")
    names = [n for n in dict.fromkeys(_collectives(args.collective)) if n != "barrier"]
    measured, wrong = measure(backend, names, args)
    if wrong:
        if comm.rank == 0:
            for line in wrong:
                print(line)
            print("nothing is written")
        return 1
    layout = _agreed(backend, measured, gpus)
    table = tables.parse(layout, path)
    if comm.rank == 0:
        _print(backend, measured, table, args)
        if useless:
            print(f"nothing is written: {useless}")
        elif not args.dry_run:
            key = tables.layout_key(backend.links, comm.nodes)
            tables.save(Path(path), comm._hardware, key, layout)
            print(f"written to {path}")
    return 0


def _checked_file(comm: Communicator, output: str) -> str:
    """Where the table goes. Raises ConfigError on all ranks, before anything is measured, if rank 0
    could not put one of this hardware there. Collective.
    """
    words = named = ""
    if comm.rank == 0:
        wanted = Settings().table
        try:
            path = tables.path_for(comm._hardware, output or ("" if wanted == "off" else wanted))
            tables.try_writing(path)
            for layout in tables.load(path, comm._hardware).values():
                tables.parse(layout, path)
            named = str(path)
        except ConfigError as error:
            words = str(error)
    answer = comm._bootstrap.broadcast(json.dumps([words, named]).encode())
    words, named = json.loads(answer)
    with _ranks.on_every_rank():
        if words:
            raise ConfigError(words)
    return named


def measure(
    backend: Backend, collectives: Sequence[str], args: argparse.Namespace
) -> tuple[list[Measurement], list[str]]:
    """The time of each algorithm at each size; and words about each that gave wrong elements.
    Collective, with the same result on all ranks.
    """
    comm, usual = backend.comm, DEFAULTS[args.device]
    wanted = _sizes(args)
    cases = [Case(name, comm.size) for name in collectives]
    largest = max(case.elements(wanted[-1]) * case.itemsize for case in cases)
    bench = Bench(backend, largest, Effort(args.seconds or usual.seconds))
    counts = {case.collective: elements_of(case, wanted) for case in cases}
    progress = Progress(sum(map(len, counts.values())), shown=comm.rank == 0)
    found: list[Measurement] = []
    wrong: list[str] = []
    for case in cases:
        in_place = places(case.collective)[-1]
        names = backend.tuner.candidates(case.collective)
        refused = bench.refused(case, names, counts[case.collective][-1], in_place)
        names = [name for name in names if name not in refused]
        if comm.rank == 0:
            for name, why in refused.items():
                print(f"# note: {case.collective} without {name}: {why}")
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
            if nbytes >= usual.judged_from:
                limit = _HOPELESS * min(times.values())
                names = [name for name in names if times.get(name, 0.0) <= limit]
            progress.step(f"{case.collective} {nbytes} B")
    progress.clear()
    return found, wrong


def _agreed(
    backend: Backend, measured: Sequence[Measurement], gpus: Sequence[str]
) -> dict[str, Any]:
    """The layout that rank 0 makes of the times, which all ranks have alike. Collective.

    Raises CollectiveError where they have not.
    """
    digest = hashlib.sha256(json.dumps(measured).encode()).hexdigest()
    comm = backend.comm
    layout: dict[str, Any] = {}
    if comm.rank == 0:
        figures = model.fit(measured, comm.nodes, backend.links)
        layout = tables.entry(
            tables.choices_of(measured),
            figures,
            measured,
            date=machine.now(),
            version=machine.versions()["collectives"],
            gpus=gpus,
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
    backend: Backend,
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
            backend.comm.nodes,
            backend.links,
            figures=table.figures,
        )
        assert predicted is not None
        cells = [m.collective, str(m.nbytes), *report.beside(m.seconds, predicted)]
        print(f"{shown.row(cells)}  {m.algorithm}{' *' if fastest and args.rows else ''}")
    for kind, figures in table.figures.items():
        print(f"# {kind}: {model.in_words(figures)}")
    off = model.errors(measured, backend.comm.nodes, backend.links, table.figures)
    print(
        f"# predictions are off by {np.median(off):.0%} in the median of {len(off)} times, "
        f"nine of ten by less than {np.percentile(off, 90):.0%}"
    )
