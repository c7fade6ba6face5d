"""A comparison as one HTML file with interactive plots, which loads nothing. Needs plotly."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

from ..bench.plot import COLOURS
from ..words import counted, size_words
from .comparing import WINNER, Comparison, Measured, busbw_gbs
from .quantities import seconds_text

_STYLE = """\
body { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
       margin: 2em auto; max-width: 1180px; padding: 0 1em; color: #24292f; line-height: 1.45 }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin-top: 2em }
p.quiet { color: #57606a } code { background: #f6f8fa; padding: 0 .25em }
table { border-collapse: collapse; font-size: .82em; font-variant-numeric: tabular-nums }
td, th { padding: .25em .5em; text-align: right; border-bottom: 1px solid #eaeef2 }
td:first-child, th:first-child { text-align: left; white-space: nowrap }
td.best { color: #fff; font-weight: 600 }
.scroll { overflow-x: auto }
"""


def write_page(result: Comparison, path: str) -> None:
    """Writes the page. Raises ImportError without plotly, OSError if it cannot be written."""
    Path(path).write_text(page(result), encoding="utf-8")


def page(result: Comparison) -> str:
    """The page, as text: who wins where, a plot for each number of nodes, all times, and measured
    runs where there are any.
    """
    names = list(dict.fromkeys(n for nodes in result.nodes for n in result.algorithms(nodes)))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    title = f"{result.collective} on {result.topology.name}"
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        '<p class="quiet">Simulated: the same schedules, event by event, on the links of the '
        f"topology <code>{html.escape(Path(result.topology.file).name)}</code>. The first plot "
        f"says which algorithm is the {WINNER}, where; a click on a name hides its curve, a double "
        "click shows it alone.</p>",
        f"<h2>{WINNER[0].upper()}{WINNER[1:]}</h2>",
        _html(_winners(result, names, colours), "winners", first=True),
    ]
    for nodes in result.nodes:
        ranks = result.topology.with_nodes(nodes).nranks
        where = "within the node" if nodes == 1 else "within and between nodes"
        words = f"{counted(nodes, 'node')}, {counted(ranks, 'rank')}: {where}"
        parts.append(f"<h2>{html.escape(words)}</h2>")
        parts.append(_html(_curves(result, nodes, colours), f"nodes-{nodes}"))
        parts.append(_table(result, nodes, colours))
    if result.measured:
        parts.append("<h2>Measured</h2>")
        parts.append(
            '<p class="quiet">Runs on real machines, from the files of <code>bench --json</code> '
            "and <code>compare --json</code>: other hardware, as each label says.</p>"
        )
        parts.append(_html(_measured(result), "measured"))
    left_out = "".join(
        f"<li>{html.escape(f'{s.nodes} nodes: {s.why}')}</li>" for s in result.skipped
    )
    if left_out:
        parts.append(f"<h2>Left out</h2><ul>{left_out}</ul>")
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}'
        f'</title><link rel="icon" href="data:,"><style>{_STYLE}</style></head>\n<body>\n'
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _html(figure: Any, name: str, *, first: bool = False) -> str:
    return str(
        figure.to_html(
            full_html=False,
            include_plotlyjs=first,
            div_id=name,
            config={"displaylogo": False, "responsive": True},
        )
    )


def _layout(figure: Any, height: int) -> Any:
    figure.update_layout(
        template="plotly_white",
        height=height,
        margin={"l": 60, "r": 20, "t": 60, "b": 40},
        legend={"orientation": "h", "y": -0.18, "yanchor": "top"},
        font={"family": "system-ui, sans-serif"},
    )
    return figure


def _winners(result: Comparison, names: list[str], colours: dict[str, str]) -> Any:
    """Sizes by nodes, in the colour of the winner."""
    import plotly.graph_objects as go

    winners = [
        n for n in names if any(n == s[0] for c in result.nodes for s in result.stretches(c))
    ]
    figure = go.Figure()
    sizes = [size_words(s) for s in result.sizes]
    rows = [counted(n, "node") for n in result.nodes]
    for name in winners:
        values: list[list[int | None]] = []
        words: list[list[str]] = []
        for nodes in result.nodes:
            values.append([])
            words.append([])
            for nbytes in result.sizes:
                # As the stretches say, so that ties do not flicker.
                won = any(name == s[0] and s[1] <= nbytes <= s[2] for s in result.stretches(nodes))
                outcome = result.outcomes[nodes][nbytes].get(name)
                values[-1].append(1 if won and outcome else None)
                words[-1].append(
                    f"{name}<br>{seconds_text(outcome.seconds)}, {outcome.busbw_gbs:.3g} GB/s<br>"
                    f"{outcome.bottleneck}"
                    if won and outcome
                    else ""
                )
        figure.add_trace(
            go.Heatmap(
                x=sizes,
                y=rows,
                z=values,
                text=words,
                hovertemplate="%{y}, %{x}: %{text}<extra></extra>",
                colorscale=[[0, colours[name]], [1, colours[name]]],
                showscale=False,
                name=name,
                xgap=2,
                ygap=2,
            )
        )
        figure.add_trace(
            go.Scatter(
                x=[None],
                y=[None],
                mode="markers",
                marker={"size": 12, "symbol": "square", "color": colours[name]},
                name=name,
            )
        )
    _layout(figure, 190 + 42 * len(rows))
    figure.update_yaxes(type="category", autorange="reversed")
    figure.update_layout(legend={"orientation": "h", "y": -0.3})
    return figure


def _curves(result: Comparison, nodes: int, colours: dict[str, str]) -> Any:
    from plotly.subplots import make_subplots

    figure = make_subplots(cols=2, subplot_titles=("time of a call, us", "bus bandwidth, GB/s"))
    outcomes = result.outcomes[nodes]
    for name in result.algorithms(nodes):
        xs = list(outcomes)
        words = [f"{size_words(x)}, {outcomes[x][name].bottleneck}" for x in xs]
        _line(
            figure,
            name,
            xs,
            [outcomes[x][name].seconds * 1e6 for x in xs],
            [outcomes[x][name].busbw_gbs for x in xs],
            {"color": colours[name], "text": words},
        )
    ranks = result.topology.with_nodes(nodes).nranks
    same = [m for m in result.measured if m.ranks == ranks and m.nodes == nodes]
    for m in same:
        _measured_line(figure, result, m, "#24292f", f"measured: {m.label}")
    return _axes(_layout(figure, 470))


def _measured(result: Comparison) -> Any:
    from plotly.subplots import make_subplots

    figure = make_subplots(cols=2, subplot_titles=("time of a call, us", "bus bandwidth, GB/s"))
    for i, m in enumerate(result.measured):
        _measured_line(figure, result, m, COLOURS[i % len(COLOURS)], m.label)
    return _axes(_layout(figure, 470 + 12 * len(result.measured)))


def _measured_line(
    figure: Any, result: Comparison, measured: Measured, colour: str, label: str
) -> None:
    xs = [x for x in measured.times if x > 0]
    _line(
        figure,
        label,
        xs,
        [measured.times[x] * 1e6 for x in xs],
        [busbw_gbs(result.collective, measured.ranks, x, measured.times[x]) for x in xs],
        {"color": colour, "text": [size_words(x) for x in xs], "dash": "dash"},
    )


def _line(
    figure: Any,
    name: str,
    xs: list[int],
    times: list[float],
    rates: list[float],
    style: dict[str, Any],
) -> None:
    import plotly.graph_objects as go

    for column, ys in ((1, times), (2, rates)):
        figure.add_trace(
            go.Scatter(
                x=xs,
                y=[float(f"{y:.6g}") for y in ys],
                name=name,
                legendgroup=name,
                showlegend=column == 1,
                mode="lines+markers",
                line={"color": style["color"], "dash": style.get("dash", "solid")},
                text=style["text"],
                hovertemplate="%{y:.4g}, %{text}",
            ),
            row=1,
            col=column,
        )


def _axes(figure: Any) -> Any:
    figure.update_xaxes(type="log", title="bytes", exponentformat="SI", dtick=1)
    figure.update_yaxes(type="log", exponentformat="none")
    return figure


def _table(result: Comparison, nodes: int, colours: dict[str, str]) -> str:
    """Times of all, the fastest in its colour."""
    outcomes = result.outcomes[nodes]
    head = "".join(f"<th>{size_words(nbytes)}</th>" for nbytes in outcomes)
    rows = []
    for name in result.algorithms(nodes):
        cells = []
        for nbytes, found in outcomes.items():
            best = result.fastest(nodes, nbytes).algorithm == name
            style = f' class="best" style="background:{colours[name]}"' if best else ""
            cells.append(f"<td{style}>{seconds_text(found[name].seconds)}</td>")
        rows.append(f"<tr><td>{html.escape(name)}</td>{''.join(cells)}</tr>")
    return (
        f'<div class="scroll"><table><thead><tr><th>time</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )
