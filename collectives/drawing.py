"""Step diagrams of schedules: text for terminals, SVG for pages.

Text has a column for each rank and lines for each round; an arrow goes from the rank that sends to
the rank that receives, and carries the numbers of its chunks: 3+ is combined with what the receiver
holds, 3 is stored. Rounds with more arrows than can be followed are listed instead.

SVG has a lane for each rank and a column for each round; arrows are coloured by chunk, solid where
they combine, dashed where they store.
"""

from __future__ import annotations

import collections
import colorsys
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from .errors import did_you_mean
from .words import counted

if TYPE_CHECKING:
    from .schedule import Schedule, Transfer

FORMATS = ("text", "svg")

_DRAWN_RANKS = 8  # columns of a text diagram; more are listed
_DRAWN_LINES = 12  # of arrows in a round; more are listed
_LISTED = 8  # messages of a listed round
_SHOWN_ROUNDS = 40
_LISTED_ROUNDS = 12
SVG_RANKS = 32
SVG_ROUNDS = 64
_SVG_LABELS = 24  # arrows in a round whose labels have room


class Message(NamedTuple):
    """Chunks that go from one rank to another in a round: combined there, or stored."""

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


def title(schedule: Schedule) -> str:
    """What a diagram is of, in a line."""
    n, rounds, chunks = schedule.nranks, len(schedule.rounds), schedule.nchunks
    words = f"{schedule.algorithm}: {schedule.collective} over {counted(n, 'rank')}"
    if schedule.collective in ("broadcast", "reduce", "gather", "scatter"):
        words += f", root {schedule.root}"
    return f"{words}, {counted(rounds, 'round')}, {counted(chunks, 'chunk')}"


# ---- text ----------------------------------------------------------------------------------------


def _text(schedule: Schedule) -> str:
    rounds = [messages(transfers) for transfers in schedule.rounds]
    lines = [title(schedule), ""]
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
        lines.append(f"… and {counted(len(rounds) - len(shown), 'round')} more")
    lines += ["", _legend(schedule)]
    return "\n".join(lines)


def _legend(schedule: Schedule) -> str:
    if schedule.collective == "barrier":
        return "An arrow tells its receiver who has come."
    chunk = _example(schedule)
    words = f"{chunk}: chunk {chunk} is stored by the receiver"
    if any(t.reduce for transfers in schedule.rounds for t in transfers):
        words = f"{chunk}+: chunk {chunk} is combined with what the receiver holds; {words}"
    return words


def _example(schedule: Schedule) -> int:
    """A chunk that there is, for a legend."""
    return max(0, min(2, schedule.nchunks - 1))


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
    head = f"{f'round {number}':9}{counted(len(found), 'message')}"
    rest = len(found) - len(words)
    lines = [f"{head}:", f"{'':9}  {'   '.join(words[:4])}"]
    if words[4:]:
        lines.append(f"{'':9}  {'   '.join(words[4:])}")
    if rest > 0:
        lines.append(f"{'':9}  … and {rest} more")
    return lines


# ---- SVG -----------------------------------------------------------------------------------------

_LANE = 46  # pixels between two lanes
_COLUMN = 120  # of a round, of one with more than two arrows from a rank _WIDE
_WIDE = 220
_LEFT = 78  # for the names of ranks
_NODE_LEFT = 28  # for the names of nodes, where there are several
_TOP = 76  # for the title and the numbers of rounds
_GAP = 12  # between a round's border and its arrows
_APART = 3.5  # between the lines of one message
_LINES = 2  # of a message, one a chunk; more chunks share one thick line
_SWATCHES = 12  # in the legend

# Told apart with any kind of colour vision, and on white (after Okabe and Ito).
PALETTE = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#b8579b",
    "#b98300",
    "#3a9bd9",
    "#6a4c93",
    "#7a5c3e",
)

_STYLE = """\
text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
       fill: #24292f; font-size: 13px }
.title { font-size: 15px; font-weight: 600 }
.quiet { fill: #6e7781; font-size: 12px }
.chunk, .halo { font-size: 11px; font-weight: 600; text-anchor: middle }
.halo { fill: none; stroke: #fff; stroke-width: 4px; stroke-linejoin: round }
.lane { stroke: #d0d7de; stroke-width: 1.5 }
.border { stroke: #eaeef2; stroke-width: 1 }
.node { fill: #f6f8fa }
.arrow { fill: none; stroke-linecap: round }
"""


def chunk_colour(chunk: int, nchunks: int) -> str:
    """The colour of a chunk, as #rrggbb."""
    if nchunks <= len(PALETTE):
        return PALETTE[chunk]
    # Neighbours a golden angle apart, so that they differ; two shades, so that hues may repeat.
    hue = (chunk * 0.381966 + 0.57) % 1.0
    red, green, blue = colorsys.hls_to_rgb(hue, 0.36 + 0.12 * (chunk % 2), 0.62)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def _svg(schedule: Schedule) -> str:
    n = min(schedule.nranks, SVG_RANKS)
    rounds = [messages(transfers) for transfers in schedule.rounds]
    shown = rounds[:SVG_ROUNDS]
    nodes = list(schedule._core.node) or [0] * schedule.nranks
    # Lanes of one node lie side by side.
    order = sorted(range(schedule.nranks), key=lambda r: (nodes.index(nodes[r]), r))[:n]
    lane = {rank: _TOP + 24 + i * _LANE for i, rank in enumerate(order)}
    bottom = _TOP + 24 + (n - 1) * _LANE + 24
    left = _LEFT + (_NODE_LEFT if len(set(nodes)) > 1 else 0)
    column = _WIDE if fan(shown) > 2 else _COLUMN
    right = left + max(1, len(shown)) * column
    legend = _svg_legend(schedule, bottom + 26)
    words = title(schedule)
    width = max(right + 24, 24 + 9 * len(words), 560)
    height = bottom + 26 + 22 * len(legend) - 4
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label="{escape(words)}">',
        f"<title>{escape(words)}</title>",
        f"<style>{_STYLE}</style>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#fff"/>',
        f'<text class="title" x="20" y="30">{escape(words)}</text>',
    ]
    parts += _svg_lanes(order, nodes, lane, (left, right))
    for i in range(len(shown)):
        x = left + i * column
        middle = x + column / 2
        parts.append(
            f'<text class="quiet" x="{middle:g}" y="{_TOP - 8}" text-anchor="middle">'
            f"round {i}</text>"
        )
        parts.append(f'<line class="border" x1="{x}" y1="{_TOP}" x2="{x}" y2="{bottom}"/>')
    parts.append(f'<line class="border" x1="{right}" y1="{_TOP}" x2="{right}" y2="{bottom}"/>')
    for i, found in enumerate(shown):
        visible = [m for m in found if m.src in lane and m.dst in lane]
        x = left + i * column
        parts += _svg_round(i, (x, x + column), visible, lane, schedule.nchunks)
    parts += [line for row in legend for line in row]
    return "\n".join([*parts, "</svg>"]) + "\n"


def fan(rounds: Sequence[Sequence[Message]]) -> int:
    """The most messages that a rank sends in a round."""
    counts = (collections.Counter(m.src for m in found).values() for found in rounds)
    return max((max(count, default=0) for count in counts), default=0)


def _svg_lanes(
    order: Sequence[int], nodes: Sequence[int], lane: dict[int, int], span: tuple[int, int]
) -> list[str]:
    parts = []
    left, right = span
    several = len(set(nodes)) > 1
    for node in dict.fromkeys(nodes[r] for r in order):
        ys = [lane[r] for r in order if nodes[r] == node]
        if several:
            parts.append(
                f'<rect class="node" x="12" y="{min(ys) - 20}" width="{right - 4}" '
                f'height="{max(ys) - min(ys) + 40}" rx="6"/>'
            )
            middle = (min(ys) + max(ys)) / 2
            parts.append(
                f'<text class="quiet" text-anchor="middle" '
                f'transform="translate(30 {middle:g}) rotate(-90)">node {node}</text>'
            )
    for rank in order:
        y = lane[rank]
        parts.append(f'<line class="lane" x1="{left}" y1="{y}" x2="{right}" y2="{y}"/>')
        parts.append(f'<text x="{left - 10}" y="{y + 4}" text-anchor="end">rank {rank}</text>')
    return parts


# How far along their arrows labels sit, the usual place first: those of arrows that go up further
# than of those that go down, since they cross.
_ALONG = {True: (0.27, 0.4, 0.53, 0.14, 0.66, 0.79), False: (0.4, 0.27, 0.53, 0.14, 0.66, 0.79)}


def label_places(
    arrows: Sequence[tuple[float, float, float, float]], widths: Sequence[float], height: float
) -> list[tuple[float, float]]:
    """Where the label of each arrow sits, so that as few as can be hide others. `arrows` are x1,
    y1, x2, y2, y downwards; `widths` of their labels.
    """
    places: list[tuple[float, float]] = []
    for (x1, y1, x2, y2), width in zip(arrows, widths, strict=True):
        choices = [(x1 + (x2 - x1) * a, y1 + (y2 - y1) * a) for a in _ALONG[y2 > y1]]

        def hidden(place: tuple[float, float], width: float = width) -> int:
            return sum(
                abs(x - place[0]) < (w + width) / 2 and abs(y - place[1]) < height
                for (x, y), w in zip(places, widths, strict=False)
            )

        places.append(min(choices, key=hidden))
    return places


def _svg_round(
    number: int,
    span: tuple[int, int],
    found: Sequence[Message],
    lane: dict[int, int],
    nchunks: int,
) -> list[str]:
    labelled = len(found) <= _SVG_LABELS
    ends = [(span[0] + _GAP, lane[m.src], span[1] - _GAP, lane[m.dst]) for m in found]
    places = label_places(ends, [4 + 7.0 * len(m.label) for m in found], 13) if labelled else []
    lines: list[str] = []
    labels: list[str] = []
    for m in found:
        x1, x2 = span[0] + _GAP, span[1] - _GAP
        y1, y2 = lane[m.src], lane[m.dst]
        length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
        ex, ey = (x2 - x1) / length, (y2 - y1) / length
        chunks = [(c, True) for c in m.combined] + [(c, False) for c in m.stored]
        thick = len(chunks) > _LINES
        drawn = [chunks[0]] if thick else chunks
        lines.append(
            f"<g><title>round {number}: rank {m.src} to rank {m.dst}, chunks {escape(m.label)}"
            "</title>"
        )
        for k, (chunk, combined) in enumerate(drawn):
            shift = (k - (len(drawn) - 1) / 2) * _APART
            sx, sy = -ey * shift, ex * shift
            colour = chunk_colour(chunk, nchunks)
            dash = "" if combined else ' stroke-dasharray="5 4"'
            tip = 9 if thick else 8
            lines.append(
                f'<path class="arrow" stroke="{colour}" stroke-width="{3 if thick else 1.8}"{dash} '
                f'd="M{x1 + sx:.1f} {y1 + sy:.1f} '
                f'L{x2 + sx - ex * tip:.1f} {y2 + sy - ey * tip:.1f}"/>'
            )
            lines.append(_head(x2 + sx, y2 + sy, (ex, ey), colour, combined))
        start = chunk_colour(drawn[0][0], nchunks)
        lines.append(f'<circle cx="{x1}" cy="{y1}" r="2.5" fill="{start}"/>')
        lines.append("</g>")
        if labelled:
            x, y = places[len(labels) // 2]
            # Twice, the outline under the letters: paint-order is unknown to older renderers.
            place = f'x="{x:.1f}" y="{y + 4:.1f}"'
            text = f"{escape(m.label)}</text>"
            labels.append(f'<text class="halo" {place} aria-hidden="true">{text}')
            labels.append(f'<text class="chunk" {place} style="fill:{start}">{text}')
    return lines + labels


def _head(x: float, y: float, along: tuple[float, float], colour: str, filled: bool) -> str:
    """An arrow head: filled where the chunk is combined, open where it is stored."""
    ex, ey = along
    a = f"{x - ex * 9 - ey * 4:.1f},{y - ey * 9 + ex * 4:.1f}"
    b = f"{x - ex * 9 + ey * 4:.1f},{y - ey * 9 - ex * 4:.1f}"
    fill = colour if filled else "#fff"
    return (
        f'<polygon points="{a} {x:.1f},{y:.1f} {b}" fill="{fill}" stroke="{colour}" '
        'stroke-width="1.4" stroke-linejoin="round"/>'
    )


def _svg_legend(schedule: Schedule, y: float) -> list[list[str]]:
    """Rows of the legend, from `y` on."""
    rows: list[list[str]] = []
    reduces = any(t.reduce for transfers in schedule.rounds for t in transfers)
    stores = any(not t.reduce for transfers in schedule.rounds for t in transfers)
    kinds = []
    if schedule.collective == "barrier":
        kinds.append((True, "tells who has come"))
    elif reduces:
        kinds.append((True, f"combined with what the receiver holds ({_example(schedule)}+)"))
    if stores:
        kinds.append((False, f"stored by the receiver ({_example(schedule)})"))
    row, x = [], 20.0
    for filled, words in kinds:
        dash = "" if filled else ' stroke-dasharray="5 4"'
        row.append(
            f'<path class="arrow" stroke="#57606a" stroke-width="1.8"{dash} '
            f'd="M{x} {y - 4} L{x + 26} {y - 4}"/>'
        )
        row.append(_head(x + 36, y - 4, (1.0, 0.0), "#57606a", filled))
        row.append(f'<text class="quiet" x="{x + 44}" y="{y}">{words}</text>')
        x += 58 + 6.6 * len(words)
    if row:
        rows.append(row)
    count = schedule.nchunks
    if count > 1:
        row, x = [f'<text class="quiet" x="20" y="{y + 22}">chunk</text>'], 66.0
        for chunk in range(min(count, _SWATCHES)):
            row.append(
                f'<rect x="{x}" y="{y + 13}" width="10" height="10" rx="2" '
                f'fill="{chunk_colour(chunk, count)}"/>'
            )
            row.append(f'<text class="quiet" x="{x + 14}" y="{y + 22}">{chunk}</text>')
            x += 36
        if count > _SWATCHES:
            row.append(f'<text class="quiet" x="{x}" y="{y + 22}">… {count - 1}</text>')
        rows.append(row)
    hidden = []
    if schedule.nranks > SVG_RANKS:
        hidden.append(f"{schedule.nranks - SVG_RANKS} more ranks")
    if len(schedule.rounds) > SVG_ROUNDS:
        hidden.append(f"{len(schedule.rounds) - SVG_ROUNDS} more rounds")
    if hidden:
        at = y + 22 * len(rows)
        words = " and ".join(hidden)
        rows.append([f'<text class="quiet" x="20" y="{at}">{words} are not shown</text>'])
    return rows


__all__ = ["FORMATS", "Message", "draw", "messages", "ranges"]
