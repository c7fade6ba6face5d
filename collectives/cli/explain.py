"""Say which algorithm runs for a call, why, and what each is expected to take.

Needs no ranks: --ranks and --nodes describe them. With --measure they are started on this host (or
are those of mpirun), and the measured time of every algorithm stands beside the predicted one; the
exit status is 1 if any of them gave a wrong element.

Predictions are alpha x steps + beta x bytes + gamma x bytes combined, with the figures of one
machine: see collectives/tuning/model.py, and `compare --fit` for the figures of this one.

What `tune` has measured on so many ranks of this host, over threads or shared memory, stands beside
and chooses. With --device cuda it is about arrays on GPUs: also by which kernel, and what `tune
--device cuda` has measured on so many GPUs.
"""

from __future__ import annotations

import argparse

from .. import hardware
from ..bench import backends, machine
from ..bench.cases import Case, places
from ..bench.measuring import Bench, check_case
from ..bench.timing import Effort, take_turns
from ..communicator import Communicator
from ..config import Settings
from ..errors import ConfigError
from ..tuning import Tuner, tables
from ..tuning.device import MOST_RANKS, DeviceTuner
from ..tuning.explain import explain
from ..tuning.work import GPU
from ..words import counted
from . import _common, _ranks

EXAMPLES = """\
examples:
  python -m collectives explain all_reduce --bytes 64M --ranks 8 --nodes 2
  python -m collectives explain all_reduce --bytes 64M --datatype bfloat16 --ranks 4 --measure
  python -m collectives explain all_gather --bytes 64K --ranks 4 --nodes 4 --transport mpi
  python -m collectives explain all_reduce --bytes 1M --ranks 2 --measure
  mpirun -n 2 python -m collectives explain all_reduce --bytes 1M --measure
  python -m collectives explain all_reduce --bytes 1M --ranks 8 --device cuda
"""

_MOST_RANKS = 1 << 20
TRANSPORTS = ("threads", "shm", "mpi", "shm+mpi")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("collective", type=_common.collective, help="all_reduce, broadcast, ...")
    parser.add_argument(
        "--bytes",
        type=_common.size,
        metavar="SIZE",
        help="of the whole vector, all blocks together (1M)",
    )
    parser.add_argument(
        "-d",
        "--datatype",
        type=_common.dtype,
        metavar="DTYPE",
        help="of the elements; --measure takes float32 without it. Choices go by bytes",
    )
    parser.add_argument(
        "--node", type=_common.nodes_list, metavar="LIST", help="node of each rank: 0,0,0,1"
    )
    parser.add_argument(
        "--transport",
        type=_common.one_of("transport", TRANSPORTS),
        help="threads, shm, mpi or shm+mpi; by itself what would be used for these nodes. mpi "
        "without --nodes or --node: each rank on a node of its own; --nodes 1: all on one, as with "
        "COLLECTIVES_TRANSPORT=mpi on one machine",
    )
    _common.add_device(parser)
    parser.add_argument("--measure", action="store_true", help="run every algorithm, on real ranks")
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="a module, or a file .py, that registers algorithms",
    )
    _ranks.add_arguments(parser, _common.positive)


@_common.in_words
def run(args: argparse.Namespace) -> int:
    _common.import_algorithms(args.imports)
    if args.collective == "barrier" and (args.bytes is not None or args.datatype):
        raise ConfigError("a barrier has no elements: leave --bytes and --datatype out")
    if args.datatype and _bytes(args) % Case(args.collective, 1, args.datatype).itemsize:
        raise ConfigError(
            f"--bytes {_bytes(args)} are no whole number of {args.datatype}, of "
            f"{Case(args.collective, 1, args.datatype).itemsize} bytes each"
        )
    if args.measure:
        if args.transport or args.node:
            raise ConfigError("--measure asks the ranks themselves; leave --transport, --node out")
        return _ranks.with_ranks(args, "explain", lambda comm: _measure(comm, args))
    nodes = _nodes(args)
    if args.device != "cpu":
        print(_on_gpus(args, nodes))
        return 0
    several = len(set(nodes)) > 1
    transport = args.transport or ("threads" if args.threads else None)
    if transport in ("threads", "shm") and several:
        raise ConfigError(f"--transport {transport} joins ranks of one node, not of several")
    if transport == "shm+mpi" and not several:
        raise ConfigError("--transport shm+mpi is for several nodes; give --nodes or --node")
    one_region = transport in ("threads", "shm") or (transport is None and not several)
    # Over MPI alone each rank is a node of its own, unless they are said to be on one.
    apart = transport == "mpi" and not args.node and not args.nodes
    tuned = list(range(len(nodes))) if apart else nodes
    settings = Settings()
    found = _table(settings, transport or "shm", tuned) if one_region else None
    tuner = Tuner(tuned, one_region, settings.algorithm, found)
    _say_no_table(settings)
    print(
        explain(
            args.collective,
            _bytes(args),
            tuned,
            one_region=one_region,
            tuner=tuner,
            transport=transport,
            dtype=args.datatype,
        )
    )
    return 0


def _bytes(args: argparse.Namespace) -> int:
    """Bytes of the call. The argument stays as it was given, for ranks that are started."""
    return 1 << 20 if args.bytes is None else int(args.bytes)


def _on_gpus(args: argparse.Namespace, nodes: list[int]) -> str:
    """What would run for arrays on the GPUs of one node, of which none need be here."""
    if args.transport:
        raise ConfigError("--transport is of host arrays; leave it or --device out")
    if len(set(nodes)) > 1:
        raise ConfigError(
            "arrays on GPUs of several nodes go by way of the hosts, by what is chosen for host "
            "arrays; leave --device out"
        )
    if len(nodes) > MOST_RANKS:
        raise ConfigError(f"the kernels are for up to {MOST_RANKS} ranks of a node")
    settings = Settings()
    _say_no_table(settings)
    tuner = DeviceTuner(len(nodes), settings.algorithm, _table(settings, GPU, nodes))
    return explain(
        args.collective,
        _bytes(args),
        nodes,
        one_region=True,
        tuner=tuner,
        transport=GPU,
        dtype=args.datatype,
    )


def _table(settings: Settings, carrier: str, nodes: list[int]) -> tables.Table | None:
    """What was measured on so many ranks of this host, started without MPI; None if nothing was.

    carrier  "threads" or "shm", or "cuda" for their GPUs
    """
    if settings.table == "off":
        return None
    here = tables.hardware_of([{**hardware.summary(), "mpi": ""}])
    path, layouts = tables.find(here, settings.table)
    layout = layouts.get(tables.layout_key(carrier, nodes))
    return tables.parse(layout, path) if layout is not None else None


def _say_no_table(settings: Settings) -> None:
    if words := tables.why_none(settings.table):
        print(f"# note: {words}")


def _nodes(args: argparse.Namespace) -> list[int]:
    if args.ranks and args.threads:
        raise ConfigError("--ranks and --threads both say how many ranks there are; give one")
    wanted = args.ranks or args.threads
    if args.node:
        if (wanted or len(args.node)) != len(args.node):
            raise ConfigError(f"--node names {len(args.node)} ranks, --ranks says {wanted}")
        if args.nodes:
            raise ConfigError("--node and --nodes both place the ranks; give one of them")
        return list(args.node)
    ranks, nodes = wanted or 2, args.nodes or 1
    if ranks > _MOST_RANKS:
        raise ConfigError(f"{ranks} ranks are more than the {_MOST_RANKS} that can be described")
    if nodes > ranks:
        raise ConfigError(f"{ranks} ranks cannot be divided into {nodes} nodes")
    return [r * nodes // ranks for r in range(ranks)]


def _measure(comm: Communicator, args: argparse.Namespace) -> int:
    case = Case(args.collective, comm.size, args.datatype or "float32")
    elements = case.elements(_bytes(args))
    in_place = places(args.collective)[-1]
    with _ranks.on_every_rank():
        backend = backends.connect(comm, args.device)
    bench = Bench(backend, max(1, elements) * case.itemsize, Effort(seconds=0.1))
    names = backend.tuner.candidates(args.collective)
    with _ranks.on_every_rank():
        check_case(comm, case, "auto", None)
    left_out = bench.refused(case, names, elements, in_place)
    names = [name for name in names if name not in left_out]
    wrong = {name: bench.verify(bench.bound(case, name, elements, in_place)) for name in names}
    failed = {name: counted(bad, "wrong element") for name, bad in wrong.items() if bad}
    left_out |= failed
    names = [name for name in names if name not in failed]
    runners = [bench.runner(bench.bound(case, name, elements, in_place)) for name in names]
    samples = take_turns(bench.clock, runners, bench.effort)
    measured = {
        name: sample.median
        for name, sample in zip(names, samples, strict=True)
        if sample is not None
    }
    cores = machine.cores(comm)
    if comm.rank == 0:
        print(
            explain(
                args.collective,
                elements * case.itemsize,
                comm.nodes,
                one_region="mpi" not in comm.transports,
                tuner=backend.tuner,
                transport=backend.links if comm.size > 1 else None,
                cores=cores,
                dtype=case.dtype,
                measured=measured,
                without=left_out,
            )
        )
    return 1 if failed else 0
