"""Simulate a collective, or data-parallel training, on machines that a topology describes.

The first argument says what: a collective, or "training". Nothing runs here but the simulation;
docs/simulate.md says what it takes into account.
"""

from __future__ import annotations

import argparse

from .. import _core, simulate
from ..errors import ConfigError, UnsupportedError
from ..simulate import training
from ..simulate.quantities import amount, seconds_text
from ..words import counted
from . import _common, _simulated
from ._progress import Progress

EXAMPLES = """\
examples:
  python -m collectives simulate all_reduce --topology dgx-h100 --nodes 4 --bytes 64M
  python -m collectives simulate broadcast --topology my.yaml --bytes 1K:1G --algorithm ring
  python -m collectives simulate training --topology dgx-h100 --params 7e9 --ranks 8..4096
  python -m collectives simulate training --params 7e9 --ranks 1024 --sharding zero-3 --jitter 0.05
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    for name in _core.collectives:
        _add_collective(what.add_parser(name, help=f"simulate {name}", allow_abbrev=False))
    _add_training(
        what.add_parser(
            "training",
            help="step time, exposed communication and efficiency of data-parallel training",
            description=training.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
    )


def _add_collective(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _simulated.topology_argument(parser, needed=True)
    add("--nodes", type=_simulated.numbers, metavar="LIST", help="numbers of nodes: 1,2 or 1..64")
    add("--bytes", type=_simulated.sizes, help="64M, 1K,1M or 1K:1G (64M)")
    add("-a", "--algorithm", action="append", metavar="NAME", help="only these; may be repeated")
    add("-r", "--root", type=_common.natural, default=0, help="(0)")
    add(
        "--symmetric",
        action="store_true",
        help="let one node stand for all, even where that is approximate",
    )
    add("--links", action="store_true", help="how busy the links of each kind are")
    add(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="a module, or a file .py, that registers algorithms",
    )


def _quantity(text: str) -> float:
    try:
        return amount(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not between 0 and 1")
    return value


def _add_training(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    default = training.Job(params=7e9)
    parser.set_defaults(topology="dgx-h100")
    _simulated.topology_argument(parser, needed=False)
    add("--params", type=_common.count, default=7e9, help="parameters: 7e9 or 7B (7e9)")
    add("--ranks", type=_simulated.numbers, default=[8], help="GPUs: 8,64 or doubled, 8..4096 (8)")
    add(
        "--sharding",
        type=_common.one_of("sharding", training.SHARDINGS),
        action="append",
        help=f"{', '.join(training.SHARDINGS)}; may be repeated (all)",
    )
    add(
        "--tokens",
        type=_common.count,
        default=default.tokens,
        help=f"of a micro-batch of a GPU ({default.tokens:.0f})",
    )
    add(
        "--accumulate",
        type=_common.positive,
        default=default.accumulate,
        help=f"micro-batches of a step ({default.accumulate})",
    )
    add(
        "--reduce-every",
        type=_common.one_of("reduce-every", training.REDUCE_EVERY),
        default=default.reduce_every,
        help="step (default): gradients are added up, and reduced in the last micro-batch; or "
        "micro-batch",
    )
    add(
        "--layers",
        type=_common.positive,
        help=f"layers of equal size ({default.layers})",
    )
    add(
        "--bucket",
        type=_quantity,
        help="bytes of a bucket of gradients (25 MiB)",
    )
    add(
        "--mfu",
        type=_share,
        default=default.mfu,
        help=f"share of the GPU's peak that computing alone reaches ({default.mfu})",
    )
    add(
        "--bytes-per-element",
        type=_common.positive,
        default=default.element_bytes,
        help=f"of gradients and parameters on the wire ({default.element_bytes})",
    )
    add(
        "--jitter",
        type=_share,
        default=default.jitter,
        help=f"standard deviation of a rank's computing time, as a share ({default.jitter:g})",
    )
    add("--no-overlap", action="store_true", help="communicate after computing")
    add("-a", "--algorithm", metavar="NAME", help="for all collectives (the fastest for each)")


@_common.in_words
def run(args: argparse.Namespace) -> int:
    if args.what == "training":
        return _training(args)
    if args.what == "barrier" and args.bytes:
        raise ConfigError("a barrier has no sizes: leave --bytes out")
    _common.check_used([args.what], root=args.root)
    _common.import_algorithms(args.imports)
    for name in args.algorithm or ():
        _simulated.algorithm(name)
    topology = simulate.load(args.topology)
    sizes = [0] if args.what == "barrier" else args.bytes or [64 << 20]
    counts = args.nodes or [topology.nodes]
    _simulated.check_places(topology, counts, args.root)
    for nodes in counts:
        sized = topology.with_nodes(nodes)
        outcomes, left_out = [], []
        names = args.algorithm or simulate.candidates(args.what, sized)
        progress = Progress(len(names))
        for name in names:
            progress.step(f"{nodes} nodes: {name}")
            try:
                simulator = simulate.Simulator(
                    name,
                    args.what,
                    sized,
                    root=args.root,
                    symmetric=True if args.symmetric else None,
                )
            except UnsupportedError as error:
                if args.algorithm:
                    raise
                left_out.append(str(error))
                continue
            outcomes += [simulator.run(nbytes) for nbytes in sizes]
        progress.clear()
        if not outcomes:
            raise UnsupportedError(
                f"nothing can do {args.what} on {nodes} nodes: {'; '.join(left_out)}"
            )
        outcomes.sort(key=lambda o: (o.nbytes, o.seconds))
        print(
            f"# {args.what} on {nodes} x {topology.name}, {counted(sized.nranks, 'rank')}, "
            "simulated" + _simulated.without_faults(topology, sized)
        )
        for line in _simulated.outcomes_table(outcomes):
            print(line)
        for line in left_out:
            print(f"# left out: {line}")
        if args.links:
            print("# links: the busiest of each kind, and what it carries")
            for o in outcomes:
                for busy in o.links:
                    share = busy.seconds / o.seconds if o.seconds else 0.0
                    print(
                        f"#   {o.algorithm} {o.nbytes}: {busy.label}: {busy.nbytes:.4g} B, "
                        f"{seconds_text(busy.seconds)}, {share:.0%} of the time"
                    )
    return 0


def _training(args: argparse.Namespace) -> int:
    topology = simulate.load(args.topology)
    default = training.Job(params=args.params)
    job = training.Job(
        params=args.params,
        tokens=args.tokens,
        accumulate=args.accumulate,
        reduce_every=args.reduce_every,
        layers=default.layers if args.layers is None else args.layers,
        bucket_bytes=default.bucket_bytes if args.bucket is None else args.bucket,
        mfu=args.mfu,
        element_bytes=args.bytes_per_element,
        jitter=args.jitter,
        overlap=not args.no_overlap,
        algorithm=args.algorithm or "",
    )
    if args.algorithm:
        _simulated.algorithm(args.algorithm)
    shardings = args.sharding or training.SHARDINGS
    layered = [sharding in training.BY_LAYER for sharding in shardings]
    if args.layers is not None and not any(layered):
        raise ConfigError("--layers goes with zero-3 and hybrid, which gather layer by layer")
    if args.bucket is not None and all(layered):
        raise ConfigError("--bucket goes with ddp, zero-1 and zero-2, which reduce in buckets")
    without: dict[int, str] = {}
    for sharding in shardings:
        for ranks in args.ranks:
            sized = training.check(job, topology, ranks, sharding)
            without[ranks] = _simulated.without_faults(topology, sized)
    print(
        f"# {args.params:.3g} parameters on {topology.name}; {job.tokens:.0f} tokens a GPU and "
        f"micro-batch, {job.accumulate} a step, buckets of {job.bucket_bytes / 2**20:.4g} MiB"
    )
    for ranks, words in without.items():
        if words:
            print(f"# {counted(ranks, 'rank')}{words}")
    table = training.table()
    print(table.header())
    left_out: dict[str, None] = {}
    for sharding in shardings:
        for ranks in args.ranks:
            step = training.step(job, topology, ranks, sharding)
            print(table.row(training.cells(step)), flush=True)
            left_out |= dict.fromkeys(step.left_out)
    for line in left_out:
        print(f"# left out: {line}")
    return 0
