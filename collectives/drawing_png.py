"""Step diagrams as PNG: what `drawing.py` draws as SVG, for places that show no SVG. Needs
matplotlib.
"""

from __future__ import annotations

import io

import numpy as np

from .drawing import SVG_RANKS, SVG_ROUNDS, chunk_colour, fan, label_places, messages, title
from .errors import ConfigError
from .schedule import Schedule

_LABELS = 40  # messages of a round, above which they have no labels
_LANE = 0.42  # inches between two lanes
_COLUMN = 1.4  # of a round, of one with more than two arrows from a rank _WIDE
_WIDE = 2.6
_WIDEST = 34.0  # of all rounds: some viewers show no picture of more than 8,192 pixels

_Point = tuple[float, float]
_Arrow = tuple[_Point, _Point, str]


def _head(start: _Point, end: _Point, inches: _Point) -> list[_Point]:
    """The triangle at the end of an arrow; `inches` of a round, and between two lanes."""
    along = np.subtract(end, start) * inches
    along = 0.09 * along / np.hypot(*along)
    across = np.array([-along[1], along[0]]) * 0.4
    back = np.asarray(end) - along / inches
    corners = (back + across / inches, end, back - across / inches)
    return [(float(x), float(y)) for x, y in corners]


def draw_png(schedule: Schedule) -> bytes:
    """A step diagram of `schedule`, as the bytes of a PNG file: a lane for each rank, a column for
    each round, an arrow for each message in the colour of its first chunk, solid where the receiver
    combines, dashed where it stores. Ranks beyond what the SVG shows, and rounds beyond 34 inches,
    are left out, and said so below.

    Raises ConfigError without matplotlib.
    """
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("png needs matplotlib: pip install matplotlib") from None

    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.collections import LineCollection, PolyCollection
    from matplotlib.figure import Figure

    rounds = [messages(transfers) for transfers in schedule.rounds]
    shown = rounds[:SVG_ROUNDS]
    inches = (_WIDE if fan(shown) > 2 else _COLUMN, _LANE)
    shown = shown[: int(_WIDEST / inches[0])]
    nodes = list(schedule._core.node) or [0] * schedule.nranks
    order = sorted(range(schedule.nranks), key=lambda r: (nodes.index(nodes[r]), r))[:SVG_RANKS]
    lane = {rank: -i for i, rank in enumerate(order)}
    figure = Figure(figsize=(inches[0] * (max(1, len(shown)) + 1), inches[1] * (len(order) + 1.6)))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(-0.9, max(1, len(shown)) + 0.1)
    axes.set_ylim(-len(order) - 0.1, 1.5)
    head = title(schedule).replace("$", r"\$")  # which would begin a formula
    axes.text(-0.85, 1.2, head, fontsize=10, fontweight="bold", va="center")
    for rank, y in lane.items():
        where = f"rank {rank}" + (f" (node {nodes[rank]})" if len(set(nodes)) > 1 else "")
        axes.text(-0.12, y, where, ha="right", va="center", fontsize=8)
        axes.plot([0, max(1, len(shown))], [y, y], color="#d0d7de", linewidth=1, zorder=1)
    combining: list[_Arrow] = []
    storing: list[_Arrow] = []
    for number, found in enumerate(shown):
        axes.text(number + 0.5, 0.6, f"round {number}", ha="center", fontsize=8, color="#6e7781")
        visible = [m for m in found if m.src in lane and m.dst in lane]
        for m in visible:
            chunk = (m.combined + m.stored)[0]
            colour = chunk_colour(chunk, schedule.nchunks)
            start, end = (number + 0.1, lane[m.src]), (number + 0.9, lane[m.dst])
            (combining if m.combined else storing).append((start, end, colour))
        if len(visible) <= _LABELS:
            ends = [(0.0, -lane[m.src], 0.8 * inches[0] / _LANE, -lane[m.dst]) for m in visible]
            widths = [(0.04 + 0.07 * len(m.label)) / _LANE for m in visible]
            places = label_places(ends, widths, 0.14 / _LANE)
            for m, (along, down) in zip(visible, places, strict=True):
                axes.text(
                    number + 0.1 + along * _LANE / inches[0],
                    -down,
                    m.label,
                    fontsize=7,
                    color=chunk_colour((m.combined + m.stored)[0], schedule.nchunks),
                    ha="center",
                    va="center",
                    zorder=5,
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
                )
    for arrows, style in ((combining, "solid"), (storing, "dashed")):
        colours = [colour for *_, colour in arrows]
        axes.add_collection(
            LineCollection(
                [a[:2] for a in arrows], colors=colours, linestyles=style, linewidths=1.3
            )
        )
        heads = [_head(start, end, inches) for start, end, _ in arrows]
        axes.add_collection(PolyCollection(heads, facecolors=colours))
    notes = ["solid: combined with what the receiver holds; dashed: stored"]
    if len(nodes) > len(order):
        notes.append(f"{len(nodes) - len(order)} more ranks are not shown")
    if len(rounds) > len(shown):
        notes.append(f"{len(rounds) - len(shown)} more rounds are not shown")
    axes.text(-0.85, -len(order) + 0.15, "; ".join(notes), fontsize=7, color="#6e7781", va="center")
    out = io.BytesIO()
    with matplotlib.rc_context({"font.family": "DejaVu Sans"}):
        figure.savefig(out, format="png", dpi=150, facecolor="white")
    return out.getvalue()


__all__ = ["draw_png"]
