"""Writes docs/algorithms.md and docs/pictures/ from the schedules and the heads of their files.

    python docs/generate_algorithms.py            rewrites them
    python docs/generate_algorithms.py --check    status 1 if they are not up to date

What an algorithm does, its limits and its paper are the comment at the head of its file in
csrc/algorithms/. Diagrams and costs come from the schedules themselves, so they cannot be wrong
unless the code is.
"""

import re
import sys
import textwrap
from pathlib import Path

import collectives as cc
from collectives.config import COLLECTIVES, format_size
from collectives.schedule import AlgorithmInfo
from collectives.tuning import ANY_SIZE, Tuner

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
RANKS = (2, 4, 5, 8, 16, 64)  # of the cost tables

HEAD = """\
<!-- Written by docs/generate_algorithms.py: change that, or csrc/algorithms/, and run it again. -->

# Algorithms

An algorithm is a [schedule](concepts.md#schedule): who sends which part of the data to whom, in
which order. This page is made from the schedules that the package runs. The diagrams are those of
`python -m collectives draw`, the costs are what `Schedule.cost()` counts, and the words are those
at the head of each algorithm's file in `csrc/algorithms/`.

In the formulas, n is the number of ranks and S the size of the vector in bytes. For collectives
with blocks, S is the size of all blocks together. A *step* is one message on the longest chain of
messages that wait for each other: it costs one latency. What the busiest rank *sends* costs
bandwidth. Small calls want few steps, large ones few bytes, and no algorithm has the least of both:
the busiest rank of an all_reduce sends at least 2(n-1)/n·S, and where a rank talks to one peer at a
time it takes at least log2 n steps.
"""

CHOICE = """\
## What runs unless you say otherwise

`algorithm="auto"`, the default, looks the call up in these tables. Sizes are those of the whole
vector, or of all blocks together. A size belongs to the first entry that is not smaller than it.
Where `python -m collectives tune` has measured ranks that are placed alike, on the same hardware,
its [table](nodes.md#tuning) comes first.
[Benchmarks](benchmarks.md) tells how to see the difference on your machine. `algorithm=` in the
call, or `COLLECTIVES_ALGORITHM` in the environment, overrides the choice. A barrier is not in the
table: the check that all ranks have entered the same call is one already.
"""

WORLDS = {
    "2 ranks that share memory": ([0, 0], True),
    "4 ranks that share memory": ([0] * 4, True),
    "4 ranks of a node, over MPI": ([0] * 4, False),
    "4 nodes of 1 rank": ([0, 1, 2, 3], False),
    "2 nodes of 4 ranks": ([0] * 4 + [1] * 4, False),
}


def opening_comment(name: str) -> list[list[str]]:
    """Paragraphs of the comment that opens an algorithm's file, without the slashes."""
    paragraphs: list[list[str]] = [[]]
    for line in (ROOT / "csrc" / "algorithms" / f"{name}.cpp").read_text().splitlines():
        if not line.startswith("//"):
            break
        text = line[2:].removeprefix(" ").rstrip()
        if text:
            paragraphs[-1].append(text)
        elif paragraphs[-1]:
            paragraphs.append([])
    return [p for p in paragraphs if p]


def linked(text: str) -> str:
    """`text` with links for its DOIs and arXiv numbers."""
    text = re.sub(r"doi:(10\.\S+?)(?=[,;.)]*(\s|$))", r"[doi:\1](https://doi.org/\1)", text)
    return re.sub(r"arXiv:(\d+\.\d+)", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)


def prose(name: str) -> str:
    """The opening comment as Markdown: indented paragraphs are pictures, labels become a list."""
    out: list[str] = []
    picture: list[str] = []

    def end_picture() -> None:
        if picture:
            out.append("```text\n" + textwrap.dedent("\n".join(picture)) + "\n```")
            picture.clear()

    for paragraph in opening_comment(name):
        if paragraph[0].startswith("  "):
            picture += ["", *paragraph] if picture else paragraph
            continue
        end_picture()
        if re.match(r"(Cost|Limits|Source)\b", paragraph[0]):
            items: list[str] = []
            for line in paragraph:
                label = re.match(r"(Cost[^:]*|Limits|Source):\s*", line)
                if label:
                    items.append(f"- **{label[1]}**: {line[label.end() :]}")
                else:
                    items.append("  " + line.strip())
            out.append(linked("\n".join(items)))
        else:
            out.append("\n".join(paragraph))
    end_picture()
    return "\n\n".join(out)


def nodes(name: str, n: int) -> list[int]:
    """Two nodes for the algorithm that is made for them, else one."""
    return [2 * r // n for r in range(n)] if name == "hierarchical" else []


def collectives_of(name: str) -> list[str]:
    return [c for c in COLLECTIVES if name in {a.name for a in cc.algorithms(c)}]


def amount(vectors: float) -> str:
    return f"{vectors:.2f}".rstrip("0").rstrip(".")


def costs(name: str) -> str:
    """Steps, data sent and messages over the number of ranks."""
    lines = [
        "| | " + " | ".join(f"{n} ranks" for n in RANKS) + " |",
        "|---|" + "--:|" * len(RANKS),
    ]
    for collective in collectives_of(name):
        cells = []
        for n in RANKS:
            cost = cc.schedule(name, collective, n, node=nodes(name, n)).cost()
            sent = "" if collective == "barrier" else f", {amount(cost['sent_max'])} S"
            cells.append(f"{cost['steps']:.0f}{sent}")
        lines.append(f"| {collective} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def shown(name: str) -> cc.Schedule:
    """The schedule that the page draws."""
    n = 6 if name in ("bruck", "pat", "binomial_tree") else 4
    return cc.schedule(name, collectives_of(name)[0], n, node=nodes(name, n))


def section(info: AlgorithmInfo) -> str:
    name, drawn = info.name, shown(info.name)
    where = " on two nodes" if name == "hierarchical" else ""
    title = f"{drawn.collective} over {drawn.nranks} ranks{where}"
    return "\n\n".join(
        [
            f"## {name}",
            f"Use it for {info.when}.",
            f"![{name}: {title}](pictures/{name}.svg)",
            prose(name),
            f"Steps, and the most that a rank sends{where}:",
            costs(name),
        ]
    )


def overview() -> str:
    lines = [
        "| algorithm | collectives | steps, 8 ranks | sent per rank, 8 ranks | use it for |",
        "|---|---|--:|--:|---|",
    ]
    for info in cc.algorithms():
        does = collectives_of(info.name)
        cost = cc.schedule(info.name, does[0], 8, node=nodes(info.name, 8)).cost()
        lines.append(
            f"| [{info.name}](#{info.name}) | {', '.join(does)} | {cost['steps']:.0f} "
            f"| {amount(cost['sent_max'])} S | {info.when} |"
        )
    return "\n".join(
        [
            *lines,
            "",
            "The numbers are those of the first collective in the row; hierarchical: two nodes.",
        ]
    )


def choices() -> str:
    lines = ["| collective | " + " | ".join(WORLDS) + " |", "|---|" + "---|" * len(WORLDS)]
    for collective in COLLECTIVES:
        if collective == "barrier":
            continue
        cells = []
        for node, shared in WORLDS.values():
            parts = []
            for limit, algorithm in Tuner(node, shared).table(collective):
                upto = "" if limit == ANY_SIZE else f"up to {format_size(limit)}: "
                rest = "above: " if parts and not upto else ""
                parts.append(f"{upto}{rest}{algorithm}")
            cells.append("; ".join(parts))
        lines.append(f"| {collective} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def page() -> str:
    parts = [HEAD.rstrip(), overview(), CHOICE.rstrip(), choices()]
    parts += [section(info) for info in cc.algorithms()]
    return "\n\n".join(parts) + "\n"


def files() -> dict[Path, str]:
    """All that this script writes."""
    pictures = {f"pictures/{a.name}.svg": shown(a.name).draw("svg") for a in cc.algorithms()}
    made = {"algorithms.md": page(), **pictures}
    return {DOCS / name: text.rstrip("\n") + "\n" for name, text in made.items()}


def outdated() -> list[str]:
    """Names of files that are missing or differ from what would be written."""
    wanted = files()
    return [p.name for p, text in wanted.items() if not p.exists() or p.read_text() != text]


def main(arguments: list[str]) -> int:
    if arguments == ["--check"]:
        if names := outdated():
            print(f"{', '.join(names)}: not up to date; run python docs/generate_algorithms.py")
        return 1 if names else 0
    for path, text in files().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
