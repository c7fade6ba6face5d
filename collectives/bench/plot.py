"""Times and bus bandwidths over sizes, as a picture. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
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


def plain(text: str) -> str:
    """Text that matplotlib shows as it is: $ begins no formula."""
    return text.replace("$", r"\$")


def legend(figure: Any, curves: Sequence[tuple[Any, str]], **style: Any) -> None:
    """A legend below a figure, of curves and their names, whatever these are."""
    handles, stand_ins = [handle for handle, _ in curves], ["x"] * len(curves)
    shown = figure.legend(handles, stand_ins, loc="outside lower center", frameon=False, **style)
    # Labels that begin with _ would be left out.
    for text, (_, name) in zip(shown.get_texts(), curves, strict=True):
        text.set_text(plain(name))


def image_format(path: str) -> str:
    """SVG where the file ends in .svg, else PNG."""
    return "svg" if str(path).lower().endswith(".svg") else "png"


def plot(results: Curves, path: str, subtitle: str = "") -> None:
    """Draws `results` into the file `path` (SVG by that ending, else PNG): times on the left, both
    axes logarithmic, and bus bandwidths on the right; peers dashed. Raises ImportError without
    matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    case = results.case
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5.2), layout="constrained")
    factor = bus_factor(case.collective, case.size)
    shown = []
    for name, xs, seconds, style in _curves(results):
        (curve,) = left.plot(xs, [s * 1e6 for s in seconds], **style)
        shown.append((curve, name))
        busbw = [bandwidth(x, s) * factor for x, s in zip(xs, seconds, strict=True)]
        right.plot(xs, busbw, **style)
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
    rows = -(-len(shown) // 4)
    legend(figure, shown, ncols=-(-len(shown) // rows))
    figure.suptitle(f"{case.collective}, {case.dtype}", x=0.012, ha="left", fontweight="bold")
    left.set_title(plain(subtitle), loc="left", fontsize=9, color="#57606a")
    figure.savefig(path, format=image_format(path), dpi=150)
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
