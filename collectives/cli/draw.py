"""Draw the steps of an algorithm: who sends which chunk to whom, round by round.

Text for a terminal, SVG for a page, PNG where neither will do.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from ..drawing import FORMATS, draw
from ..drawing_png import draw_png
from ..errors import ConfigError, UnsupportedError
from ..schedule import algorithms, schedule
from ..simulate.traffic import can_follow
from ..tuning import known_algorithm
from . import _common

EXAMPLES = """\
examples:
  python -m collectives draw ring all_reduce -n 4
  python -m collectives draw binomial_tree broadcast -n 8 --root 3
  python -m collectives draw double_binary_tree all_reduce -n 8 --format svg -o tree.svg
  python -m collectives draw halving_doubling all_reduce -n 8 -o halving.png
  python -m collectives draw "hierarchical(direct_two_shot, ring)" all_reduce --node 0,0,1,1
  python -m collectives draw my_ring all_reduce -n 4 --import my_algorithms.py
"""


_FEW = 512  # ranks whose steps are never too many
_ENDINGS = {"": "text", "txt": "text", "svg": "svg", "png": "png"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("algorithm", help="name of an algorithm, or a composition")
    parser.add_argument("collective", type=_common.collective, help="all_reduce, broadcast, ...")
    parser.add_argument("-n", "--ranks", type=_common.positive, help="number of ranks (4)")
    parser.add_argument("-r", "--root", type=_common.natural, default=0, help="(0)")
    parser.add_argument(
        "--node", type=_common.nodes_list, metavar="LIST", help="node of each rank: 0,0,1,1"
    )
    parser.add_argument(
        "--format",
        type=_common.one_of("format", (*FORMATS, "png")),
        help="text (default), svg or png",
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="write to FILE; .svg means svg, .png png, .txt text"
    )
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="a module, or a file .py, that registers algorithms",
    )


@_common.in_words
def run(args: argparse.Namespace) -> int:
    _common.import_algorithms(args.imports)
    names = [a.name for a in algorithms()]
    if args.algorithm == "auto":
        raise ConfigError(f"auto chooses by size; name an algorithm to draw: {', '.join(names)}")
    known_algorithm(args.algorithm, names)
    ranks = args.ranks or (len(args.node) if args.node else 4)
    if args.node and len(args.node) != ranks:
        raise ConfigError(f"--node names the nodes of {len(args.node)} ranks, -n says {ranks}")
    _common.check_used([args.collective], root=args.root)
    if args.root >= ranks:
        raise ConfigError(f"root {args.root} is out of range: ranks are 0 to {ranks - 1}")
    counts = [ranks] if not args.node else list(Counter(args.node).values())
    if ranks > _FEW and not can_follow(args.algorithm, args.collective, counts):
        raise UnsupportedError(
            f"the steps of {args.algorithm} for {args.collective} over {ranks} ranks are too many "
            "to draw; take fewer ranks"
        )
    ending = Path(args.output).suffix[1:].lower() if args.output else ""
    if not args.format and ending not in _ENDINGS:
        raise ConfigError(
            f"{args.output}: nothing writes .{ending}; end it with .svg, .png or .txt, or say "
            "which with --format"
        )
    format = args.format or _ENDINGS[ending]
    _common.check_writable(args.output)
    built = schedule(args.algorithm, args.collective, ranks, root=args.root, node=args.node or ())
    if format == "png":
        if not args.output:
            raise ConfigError("a png goes into a file: add -o FILE.png")
        Path(args.output).write_bytes(draw_png(built))
        return 0
    drawn = draw(built, format)
    if args.output:
        Path(args.output).write_text(drawn if drawn.endswith("\n") else f"{drawn}\n", "utf-8")
    else:
        print(drawn)
    return 0
