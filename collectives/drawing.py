"""Step diagrams of schedules: text for terminals, SVG for pages.

Text has a column for each rank and lines for each round; an arrow goes from the rank that sends to
the rank that receives, and carries the numbers of its chunks: 3+ is combined with what the receiver
holds, 3 is stored. Rounds with more arrows than can be followed are listed instead.

SVG has a lane for each rank and a column for each round; arrows are coloured by chunk, solid where
they combine, dashed where they store.
"""

from __future__ import annotations

import colorsys
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from .errors import did_you_mean

if TYPE_CHECKING:
    from .schedule import Schedule, Transfer

FORMATS = ("text", "svg")

_DRAWN_RANKS = 8  # columns of a text diagram; more are listed
_DRAWN_LINES = 12  # of arrows in a round; more are listed
_LISTED = 8  # messages of a listed round
_SHOWN_ROUNDS = 40
_LISTED_ROUNDS = 12
_SVG_RANKS = 32
_SVG_ROUNDS = 64
_SVG_LABELS = 64  # arrows in a round that still have room for a label


class Message(NamedTuple):
    """Chunks that go from one rank to another in a round: those it combines, and those it stores."""

    src: int
    dst: int
    combined: tuple[int, ...]
    stored: tuple[int, ...]

    @property
    def label(self) -> str:
        """0-3+ for combined chunks, 4 for stored ones."""
        parts = []
        if self.combined:
            parts.append(ranges(self.combined) + "+")
        if self.stored:
            parts.append(ranges(self.stored))
        return " ".join(parts)


def ranges(numbers: Iterable[int]) -> str:
    """0-3,5 for 0, 1, 2, 3, 5."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    words = [f"{a}" if a == b else f"{a}-{b}" for a, b in runs]
    return ",".join(words if len(words) <= 4 else [*words[:3], "…"])


def messages(transfers: Sequence[Transfer]) -> list[Message]:
    """The messages of a round, in order of sender and distance."""
    found: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
    for t in transfers:
        combined, stored = found.setdefault((t.src, t.dst), ([], []))
        (combined if t.reduce else stored).append(t.chunk)
    return [
        Message(src, dst, tuple(combined), tuple(stored))
        for (src, dst), (combined, stored) in sorted(found.items())
    ]


def draw(schedule: Schedule, format: str = "text") -> str:
    """A step diagram of `schedule`: "text" or "svg". Raises ValueError for another format."""
    if format not in FORMATS:
        raise ValueError(f"unknown format {format!r}; {did_you_mean(format, FORMATS)}")
    return _text(schedule) if format == "text" else _svg(schedule)


def _title(schedule: Schedule) -> str:
    n, rounds, chunks = schedule.nranks, len(schedule.rounds), schedule.nchunks
    words = f"{schedule.algorithm}: {schedule.collective} over {_count(n, 'rank')}"
    if schedule.collective in ("broadcast", "reduce", "gather", "scatter"):
        words += f", root {schedule.root}"
    return f"{words}, {_count(rounds, 'round')}, {_count(chunks, 'chunk')}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


# ---- text ----------------------------------------------------------------------------------------


def _text(schedule: Schedule) -> str:
    rounds = [messages(transfers) for transfers in schedule.rounds]
    lines = [_title(schedule), ""]
    if not rounds:
        return "\n".join([*lines, "Nothing is sent."])
    drawn = schedule.nranks <= _DRAWN_RANKS
    shown = rounds[: _SHOWN_ROUNDS if drawn else _LISTED_ROUNDS]
    width = 0
    if drawn:
        labels = [m.label for r in shown for m in r if len(_pack(r)) <= _DRAWN_LINES]
        width = max(10, 5 + max(map(len, labels), default=0))
        columns = "".join(f"{f'rank {r}':<{width + 1}}" for r in range(schedule.nranks))
        lines.append(f"{'':9}{columns}".rstrip())
    for number, found in enumerate(shown):
        packed = _pack(found) if drawn else []
        if drawn and len(packed) <= _DRAWN_LINES:
            lines += _arrows(number, packed, schedule.nranks, width)
        else:
            lines += _list(number, found)
    if len(rounds) > len(shown):
        lines.append(f"… and {_count(len(rounds) - len(shown), 'round')} more")
    lines += ["", _legend(schedule)]
    return "\n".join(lines)


def _legend(schedule: Schedule) -> str:
    if schedule.collective == "barrier":
        return "An arrow tells its receiver who has come."
    words = "2: chunk 2 is stored by the receiver"
    if any(t.reduce for transfers in schedule.rounds for t in transfers):
        words = "2+: chunk 2 is combined with what the receiver holds; " + words
    return words


def _pack(found: Sequence[Message]) -> list[list[Message]]:
    """Lines of arrows that do not touch each other, short ones first."""
    lines: list[list[Message]] = []
    for m in sorted(found, key=lambda m: (abs(m.src - m.dst), min(m.src, m.dst))):
        low, high = min(m.src, m.dst), max(m.src, m.dst)
        for line in lines:
            if all(max(o.src, o.dst) < low or high < min(o.src, o.dst) for o in line):
                line.append(m)
                break
        else:
            lines.append([m])
    return lines


def _arrows(number: int, packed: Sequence[Sequence[Message]], n: int, width: int) -> list[str]:
    lines = []
    for i, line in enumerate(packed):
        cells = [" "] * ((width + 1) * (n - 1) + 1)
        for r in range(n):
            cells[r * (width + 1)] = "│"
        for m in line:
            a, b = m.src * (width + 1), m.dst * (width + 1)
            low, high = min(a, b), max(a, b)
            for at in range(low + 1, high):
                cells[at] = "┼" if cells[at] == "│" else "─"
            if a < b:
                cells[low], cells[high - 1], cells[high] = "├", "▶", "│"
            else:
                cells[high], cells[low + 1], cells[low] = "┤", "◀", "│"
            # Near the sender, clear of the lanes.
            start = a + 2 if a < b else a - 2 - len(m.label)
            room = width - 4
            start += (room - len(m.label)) // 2 if a < b else -((room - len(m.label)) // 2)
            for k, letter in enumerate(f" {m.label} "):
                cells[start + k - (1 if a < b else 0)] = letter
        name = f"round {number}" if i == 0 else ""
        lines.append(f"{name:9}{''.join(cells)}".rstrip())
    return lines


def _list(number: int, found: Sequence[Message]) -> list[str]:
    words = [f"{m.src}→{m.dst}: {m.label}" for m in found[:_LISTED]]
    head = f"{f'round {number}':9}{_count(len(found), 'message')}"
    rest = len(found) - len(words)
    lines = [f"{head}:", f"{'':9}  {'   '.join(words[:4])}"]
    if words[4:]:
        lines.append(f"{'':9}  {'   '.join(words[4:])}")
    if rest > 0:
        lines.append(f"{'':9}  … and {rest} more")
    return lines


# ---- SVG -----------------------------------------------------------------------------------------


def _svg(schedule: Schedule) -> str:
    raise NotImplementedError


__all__ = ["FORMATS", "Message", "draw", "messages", "ranges"]
_ = (colorsys, escape)
