"""Break ranks on purpose, at random, and check what the others do about it.

Each round starts some ranks on this host and does something to one of them at some moment: kills,
stops or ends it, lets it raise, close, abort, or make another call than the others. Then it checks
that every survivor raised the right error, in time and with the right rank in it; that the
survivors shrank their communicator and got right results from it; and that nothing remained. What
is drawn depends on the seed and the number of the round alone.

The exit status is 1 if anything was not as promised.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from pathlib import Path

from ..errors import ConfigError
from . import _common, _ranks
from ._progress import Progress

EXAMPLES = """\
examples:
  python -m collectives chaos --rounds 100 --seed 1
  python -m collectives chaos --seed 1 --only 17     one round again, with all that was reported
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=_common.positive, default=50, help="how many (default 50)")
    parser.add_argument("--seed", type=_common.natural, default=0, help="what is drawn (default 0)")
    parser.add_argument(
        "--ranks", type=_at_least_two, default=4, help="at most so many ranks a round (default 4)"
    )
    parser.add_argument(
        "--within",
        type=_common.seconds,
        default=1.0,
        metavar="S",
        help="seconds in which survivors must have raised (default 1)",
    )
    parser.add_argument(
        "--jobs",
        type=_common.positive,
        default=1,
        help="rounds at a time; most of a round is waiting (default 1)",
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
    if _ranks.launched():
        raise ConfigError("chaos starts its ranks itself; start it without a launcher")
    if threading.active_count() > 1:
        raise ConfigError("chaos forks, and this process has threads; start it as a command")
    from ..chaos import playing, table

    # A forked child has no threads of its BLAS, and needs none.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    numbers = range(args.rounds) if args.only is None else [args.only]
    game = playing.Game(args.seed, args.ranks, args.within)
    rounds: list[playing.Played] = []
    began = time.monotonic()
    progress = Progress(len(numbers))
    for one in playing.play(game, numbers, min(args.jobs, len(numbers))):
        rounds.append(one)
        if one.verdict.violations or args.only is not None:
            progress.clear()
            print(table.round_as_text(one), flush=True)
        progress.step()
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
    print(f"{len(rounds)} rounds of seed {args.seed} in {seconds:.0f} s; {bad} not as promised")
    if args.json:
        document = table.as_json_document(rounds, args.seed, seconds)
        Path(args.json).write_text(json.dumps(document, indent=1) + "\n")
    return 1 if bad else 0
