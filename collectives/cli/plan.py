"""Plan a training run: memory of a rank by ZeRO stage, bytes on the wire, time of a step.

Every figure comes with its formula. GB are 10^9 bytes. Activations are not counted. P stands for
parameters, N for ranks.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..bench.plot import image_format
from ..drawing import PALETTE
from ..simulate import quantities
from ..train.plan import BYTES, STATES, Job, Stage, bytes_per_parameter, plan, state_words
from ..words import counted
from . import _common

EXAMPLES = """\
examples:
  python -m collectives plan --params 7e9 --ranks 8
  python -m collectives plan --params 7e9 --ranks 64 --node 8 --hybrid
  python -m collectives plan --params 7e9 --ranks 8 --no-master-weights
  python -m collectives plan --params 370e6 --ranks 2 --tokens 1024 --micro 4 \\
      --flops 300e12 --bandwidth 350e9 --png plan.png
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    number = _common.positive
    parser.add_argument("--params", type=_common.count, required=True, help="parameters: 7e9 or 7B")
    parser.add_argument("-n", "--ranks", type=number, required=True, help="ranks that train")
    parser.add_argument("--node", type=number, help="ranks of a node, for --hybrid")
    parser.add_argument("--hybrid", action="store_true", help="share within nodes alone")
    parser.add_argument(
        "--precision",
        type=_common.one_of("precision", BYTES),
        default="bf16",
        help=f"of parameters and gradients: {', '.join(BYTES)} (bf16)",
    )
    parser.add_argument(
        "--reduce",
        type=_common.one_of("precision", BYTES),
        help="dtype in which gradients are held and reduced (--precision)",
    )
    parser.add_argument(
        "--optimizer",
        type=_common.one_of("optimizer", STATES),
        default="adam",
        help=f"{', '.join(STATES)} (adam)",
    )
    parser.add_argument(
        "--no-master-weights",
        dest="masters",
        action="store_false",
        help="optimizer state has the dtype of the parameters, and there are no masters",
    )
    parser.add_argument("--micro", type=number, default=1, help="samples in a micro-batch (1)")
    parser.add_argument("--accumulate", type=number, default=1, help="micro-batches a step (1)")
    parser.add_argument("--tokens", type=number, default=1, help="tokens in a sample (1)")
    parser.add_argument(
        "--flops",
        type=_common.quantity(quantities.flops, "300e12 or '300 TFLOP/s'"),
        help="operations per second that a rank reaches: 300e12 or '300 TFLOP/s'",
    )
    parser.add_argument(
        "--bandwidth",
        type=_common.quantity(quantities.bandwidth, "100e9 or '400 Gb/s'"),
        default=100e9,
        help="bytes per second, or with a unit: '400 Gb/s' (100e9)",
    )
    parser.add_argument(
        "--latency",
        type=_common.quantity(quantities.duration, "1e-5 or '10 us'"),
        default=10e-6,
        help="seconds of a message, or with a unit: '10 us' (1e-5)",
    )
    parser.add_argument(
        "--overlap", type=_share, default=1.0, help="share that backward can hide (1)"
    )
    parser.add_argument(
        "--checkpointing", action="store_true", help="activations are computed again"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    parser.add_argument("--png", metavar="FILE", help="draw memory and time to FILE")


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share between 0 and 1")
    return value


# What only the time of a step goes by.
_OF_TIME = ("bandwidth", "latency", "overlap", "checkpointing")


def _refuse_unused(args: argparse.Namespace) -> None:
    """Raises ValueError for an option that would change no figure."""
    if args.hybrid and args.node is None:
        raise ValueError("--hybrid needs --node, the ranks of a node")
    if args.node is not None and not args.hybrid:
        raise ValueError("--node goes with --hybrid: otherwise all ranks share alike")
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    for name in _OF_TIME if args.flops is None else ():
        if getattr(args, name) != parser.get_default(name):
            raise ValueError(f"--{name} goes with --flops: no times are predicted without")


@_common.in_words
def run(args: argparse.Namespace) -> int:
    _refuse_unused(args)
    job = Job(
        params=args.params,
        ranks=args.ranks,
        node=args.node,
        hybrid=args.hybrid,
        precision=args.precision,
        reduced=args.reduce,
        optimizer=args.optimizer,
        masters=args.masters,
        micro=args.micro,
        accumulate=args.accumulate,
        tokens=args.tokens,
        flops=args.flops,
        bandwidth=args.bandwidth,
        latency=args.latency,
        overlap=args.overlap,
        checkpoint=args.checkpointing,
    )
    _common.check_picture(args.png)
    _common.check_writable(args.json, args.png)
    stages = plan(job)
    print("\n".join(_table(job, stages)))
    if args.json:
        figures = [stage._asdict() for stage in stages]
        Path(args.json).write_text(json.dumps({"job": vars(job), "stages": figures}), "utf-8")
    if args.png:
        _draw(job, stages, args.png)
    return 0


def _table(job: Job, stages: list[Stage]) -> list[str]:
    used, grad, state = bytes_per_parameter(job)
    each = used + grad + state
    lines = [
        f"{job.params:.4g} parameters, {counted(job.ranks, 'rank')}, {job.precision}, "
        f"{job.optimizer}: {used} (parameter) + {grad} (gradient) + {state} (optimizer state: "
        f"{state_words(job)}) = {each} bytes a parameter, "
        f"{each * job.params / 1e9:.4g} GB unsharded",
        f"global batch {job.batch} samples = {job.micro} (micro) x {job.ranks} (ranks) x "
        f"{job.accumulate} (accumulation), {job.batch * job.tokens} tokens",
        "",
        f"{'stage':<8}{'memory GB':>10}{'sent GB':>10}{'step ms':>10}{'efficiency':>12}",
    ]
    for s in stages:
        timed = s.seconds is not None and s.efficiency is not None
        time = f"{1e3 * s.seconds:.4g}" if s.seconds is not None else "-"
        efficiency = f"{s.efficiency:.1%}" if timed and s.efficiency is not None else "-"
        lines.append(
            f"ZeRO-{s.stage:<3}{s.memory / 1e9:>10.4g}{s.wire / 1e9:>10.4g}{time:>10}"
            f"{efficiency:>12}"
        )
    for title, i in (("memory of a rank", 0), ("sent by a rank in a step", 1), ("step", 2)):
        if i < 2 or job.flops is not None:
            lines += ["", title]
            lines += [f"  ZeRO-{s.stage}  {s.formulas[i]}" for s in stages]
    return lines


def _draw(job: Job, stages: list[Stage], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["axes.prop_cycle"] = pyplot.cycler(color=PALETTE)

    timed = job.flops is not None
    figure, axes = pyplot.subplots(1, 2 + timed, figsize=(4.2 * (2 + timed), 3.6), squeeze=False)
    names = [f"ZeRO-{s.stage}" for s in stages]
    below = [0.0] * len(stages)
    for i, label in enumerate(("parameters", "gradients", "optimizer state")):
        part = [s.parts[i] / 1e9 for s in stages]
        axes[0][0].bar(names, part, bottom=below, label=label)
        below = [a + b for a, b in zip(below, part, strict=True)]
    axes[0][0].set_title("memory of a rank, GB")
    axes[0][0].legend(fontsize=8)
    axes[0][1].bar(names, [s.wire / 1e9 for s in stages])
    axes[0][1].set_title("sent by a rank in a step, GB")
    if timed:
        seconds = [(s.seconds or 0.0, s.exposed or 0.0) for s in stages]
        axes[0][2].bar(names, [1e3 * (t - e) for t, e in seconds], label="compute")
        axes[0][2].bar(
            names,
            [1e3 * e for _, e in seconds],
            bottom=[1e3 * (t - e) for t, e in seconds],
            label="exposed communication",
        )
        axes[0][2].set_title("predicted step, ms")
        axes[0][2].legend(fontsize=8, loc="lower right")
    figure.suptitle(f"{job.params / 1e9:.3g} billion parameters on {counted(job.ranks, 'rank')}")
    figure.tight_layout()
    figure.savefig(path, format=image_format(path), dpi=110)
    pyplot.close(figure)
