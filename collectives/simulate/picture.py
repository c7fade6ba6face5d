"""A comparison as a picture: one panel for each number of nodes. Needs matplotlib."""

from __future__ import annotations

from typing import Any

from ..bench.plot import COLOURS, MARKERS, image_format, legend, plain, short_size
from ..words import counted
from .comparing import WINNER, Comparison


def picture(result: Comparison, path: str) -> None:
    """Draws bus bandwidths over sizes into `path` (SVG by that ending, else PNG); below each panel
    a band in the colour of the winner. Raises ImportError without matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    names = list(dict.fromkeys(n for nodes in result.nodes for n in result.algorithms(nodes)))
    columns = min(2, len(result.nodes))
    rows = -(-len(result.nodes) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(6 * columns, 3.6 * rows + 0.9), layout="constrained", squeeze=False
    )
    for panel in axes.flat[len(result.nodes) :]:
        panel.set_visible(False)
    shown: dict[str, Any] = {}
    for panel, nodes in zip(axes.flat, result.nodes, strict=False):
        outcomes = result.outcomes[nodes]
        for i, name in enumerate(names):
            xs = [x for x in outcomes if name in outcomes[x]]
            if xs:
                (curve,) = panel.plot(
                    xs,
                    [max(outcomes[x][name].busbw_gbs, 1e-6) for x in xs],
                    color=COLOURS[i % len(COLOURS)],
                    marker=MARKERS[i % len(MARKERS)],
                    markersize=4,
                    linewidth=1.6,
                )
                shown.setdefault(name, curve)
        bottom = min(max(o.busbw_gbs, 1e-6) for by in outcomes.values() for o in by.values())
        for name, low, high in result.stretches(nodes):
            colour = COLOURS[names.index(name) % len(COLOURS)]
            panel.plot(
                [low / 1.6, high * 1.6],
                [bottom / 3] * 2,
                color=colour,
                linewidth=7,
                solid_capstyle="butt",
            )
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.xaxis.set_major_locator(LogLocator(base=2, numticks=10))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: short_size(x)))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        ranks = result.topology.with_nodes(nodes).nranks
        panel.set_title(
            f"{counted(nodes, 'node')}, {counted(ranks, 'rank')}", loc="left", fontsize=10
        )
        panel.set_xlabel("bytes")
        panel.set_ylabel("bus bandwidth, GB/s")
        panel.grid(True, color="#eaeef2", linewidth=0.8)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    legend(figure, [(curve, name) for name, curve in shown.items()], ncols=2, fontsize=8)
    figure.suptitle(
        plain(f"{result.collective} on {result.topology.name}, simulated; band: {WINNER}"),
        x=0.012,
        ha="left",
        fontweight="bold",
        fontsize=11,
    )
    figure.savefig(path, format=image_format(path), dpi=130)
    pyplot.close(figure)
