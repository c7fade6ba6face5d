"""Times and bus bandwidths over sizes, as a picture. Needs matplotlib."""

from __future__ import annotations

from typing import Any, Protocol

from ..drawing import PALETTE
from .cases import Case
from .report import bandwidth, bus_factor

# More than there are algorithms in a comparison: with as many markers, no two curves are alike.
COLOURS = (*PALETTE, "#57606a", "#c1121f", "#1b4965", "#6bbf59", "#f0a6ca", "#a3a847")
MARKERS = "osD^vP*Xh<>pd8"
_PEER_COLOURS = ("#24292f", "#8c959f")


class Curves(Protocol):
    """Seconds by size and name."""

    case: Case
    algorithms: list[str]
    times: dict[int, dict[str, float]]
    peer_times: dict[int, dict[str, float]]


def plot(results: Curves, path: str, subtitle: str = "") -> None:
    """Draws `results` into the file `path`: times on the left, both axes logarithmic, and bus
    bandwidths on the right; peers dashed. Raises ImportError without matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    case = results.case
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5.2), layout="constrained")
    factor = bus_factor(case.collective, case.size)
    for name, xs, seconds, style in _curves(results):
        left.plot(xs, [s * 1e6 for s in seconds], label=name, **style)
        busbw = [bandwidth(x, s) * factor for x, s in zip(xs, seconds, strict=True)]
        right.plot(xs, busbw, label=name, **style)
    left.set_yscale("log")
    left.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    left.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    left.yaxis.set_minor_formatter(NullFormatter())
    left.set_ylabel("time of a call, µs")
    right.set_ylabel("bus bandwidth, GB/s")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        if len(results.times) > 1:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_locator(LogLocator(base=2, numticks=10))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: short_size(x)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("bytes")
        axes.grid(True, color="#eaeef2", linewidth=0.8)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            axes.spines[side].set_color("#8c959f")
        axes.tick_params(color="#8c959f", which="both")
    handles, labels = left.get_legend_handles_labels()
    rows = -(-len(labels) // 4)
    figure.legend(
        handles, labels, loc="outside lower center", ncols=-(-len(labels) // rows), frameon=False
    )
    figure.suptitle(f"{case.collective}, {case.dtype}", x=0.012, ha="left", fontweight="bold")
    left.set_title(subtitle, loc="left", fontsize=9, color="#57606a")
    figure.savefig(path, format="png", dpi=150)
    pyplot.close(figure)


def _curves(results: Curves) -> list[tuple[str, list[int], list[float], dict[str, Any]]]:
    curves = []
    for i, name in enumerate(results.algorithms):
        xs = [x for x, times in results.times.items() if name in times and x > 0]
        style: dict[str, Any] = {
            "color": COLOURS[i % len(COLOURS)],
            "marker": MARKERS[i % len(MARKERS)],
            "markersize": 4.5,
            "linewidth": 1.6,
        }
        curves.append((name, xs, [results.times[x][name] for x in xs], style))
    for i, name in enumerate(dict.fromkeys(n for t in results.peer_times.values() for n in t)):
        xs = [x for x, times in results.peer_times.items() if name in times and x > 0]
        style = {
            "color": _PEER_COLOURS[i % len(_PEER_COLOURS)],
            "linestyle": "--",
            "linewidth": 1.8,
        }
        curves.append((name, xs, [results.peer_times[x][name] for x in xs], style))
    return curves


def short_size(nbytes: float) -> str:
    """64K, 1M: for an axis."""
    for unit in ("", "K", "M", "G"):
        if nbytes < 1024 or unit == "G":
            break
        nbytes /= 1024
    return f"{nbytes:g}{unit}"
