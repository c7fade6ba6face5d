"""Break ranks on purpose, at random, and check what the others do about it.

Each round starts some ranks on this host and does something to one of them at some moment: kills,
stops or ends it, lets it raise, close, abort, or make another call than the others. Then it checks
that every survivor raised the right error, in time and with the right rank in it; that the
survivors shrank their communicator and got right results from it; and that nothing remained. What
is drawn depends on the seed and the number of the round alone.

With --device cuda every rank has a GPU, and its calls are on arrays there: on a stream, in a CUDA
graph, on symmetric buffers. Then every survivor must still be able to use its GPU, and the memory
of the GPUs must come back. Nothing else should use them meanwhile.

The exit status is 1 if anything was not as promised.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError
from . import _common, _ranks
from ._progress import Progress

if TYPE_CHECKING:
    from ..chaos.gauge import Gauge

_ROUNDS = {"cpu": 50, "cuda": 20}  # starting CUDA takes each of the latter a second or more
_RANKS = 4
# Seconds until survivors must have raised. A process that uses GPUs ends when the driver has
# cleared up after it, and not before that anybody can tell that it has.
_WITHIN = {"cpu": 1.0, "cuda": 3.0}

EXAMPLES = """\
examples:
  python -m collectives chaos --rounds 100 --seed 1
  python -m collectives chaos --device cuda --rounds 1000 --seconds 300
  python -m collectives chaos --seed 1 --only 17     one round again, with all that was reported
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        type=_common.one_of("device", _ROUNDS),
        default="cpu",
        metavar="NAME",
        help="cpu, or cuda: arrays on GPUs, rank by rank on those there are (default cpu)",
    )
    parser.add_argument(
        "--rounds", type=_common.positive, help="how many (default 50; 20 with --device cuda)"
    )
    parser.add_argument("--seed", type=_common.natural, default=0, help="what is drawn (default 0)")
    parser.add_argument(
        "--ranks",
        type=_at_least_two,
        help="at most so many ranks a round (default 4; with --device cuda as many as there are "
        "GPUs, but 2 on one)",
    )
    parser.add_argument(
        "--seconds",
        type=_common.seconds,
        metavar="S",
        help="begin no round after so many seconds, however many are left",
    )
    parser.add_argument(
        "--within",
        type=_common.seconds,
        metavar="S",
        help="seconds in which survivors must have raised (default 1; 3 with --device cuda)",
    )
    parser.add_argument(
        "--jobs",
        type=_common.positive,
        default=1,
        help="rounds at a time; most of a round is waiting (default 1; not with --device cuda)",
    )
    parser.add_argument("--only", type=_common.natural, metavar="ROUND", help="this round alone")
    parser.add_argument("--json", metavar="FILE", help="write all figures to a file")


def _at_least_two(text: str) -> int:
    number = _common.positive(text)
    if number < 2:
        raise argparse.ArgumentTypeError("a rank alone has nobody that could notice")
    return number


@_common.in_words
def run(args: argparse.Namespace) -> int:
    more = args.rounds is not None or args.seconds is not None or args.jobs > 1
    if args.only is not None and more:
        raise ConfigError("--only plays one round; leave --rounds, --seconds and --jobs out")
    if _ranks.launched():
        raise ConfigError("chaos starts its ranks itself; start it without a launcher")
    if threading.active_count() > 1:
        raise ConfigError("chaos forks, and this process has threads; start it as a command")
    if args.device == "cuda" and args.jobs > 1:
        raise ConfigError("--jobs: rounds on GPUs go one by one, so that each has its GPUs alone")
    _common.check_writable(args.json)
    from ..chaos.gauge import Gauge

    # A forked child has no threads of its BLAS, and needs none.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if args.device == "cpu":
        return _play(args, None)
    with contextlib.closing(Gauge()) as gauge:
        return _play(args, gauge)


def _play(args: argparse.Namespace, gauge: Gauge | None) -> int:
    from ..chaos import playing, table

    where = f" on {gauge.count} GPU{'s' * (gauge.count > 1)}" if gauge else ""
    ranks = args.ranks or (max(2, gauge.count) if gauge else _RANKS)
    numbers = range(args.rounds or _ROUNDS[args.device]) if args.only is None else [args.only]
    game = playing.Game(args.seed, ranks, args.within or _WITHIN[args.device], gauge)
    rounds: list[playing.Played] = []
    began = time.monotonic()
    progress = Progress(len(numbers))
    for one in playing.play(game, numbers, min(args.jobs, len(numbers))):
        rounds.append(one)
        if one.verdict.violations or args.only is not None:
            progress.clear()
            print(table.round_as_text(one), flush=True)
        progress.step()
        if args.seconds is not None and time.monotonic() - began > args.seconds:
            break
    progress.clear()
    seconds = time.monotonic() - began
    print(table.as_text(rounds))
    again = sum(one.again for one in rounds)
    if again:
        print(
            f"{again} times a round was played again, because something was not as promised in it "
            f"and the machine had given a process no processor for {playing.STARVED:g} s or more"
        )
    bad = sum(bool(one.verdict.violations) for one in rounds)
    print(
        f"{len(rounds)} rounds of seed {args.seed}{where} in {seconds:.0f} s; {bad} not as promised"
    )
    if args.json:
        document = table.as_json_document(rounds, args.seed, seconds)
        Path(args.json).write_text(json.dumps(document, indent=1) + "\n")
    return 1 if bad else 0
