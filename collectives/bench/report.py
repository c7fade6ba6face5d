"""Bandwidths, tables and JSON.

algbw is bytes / time. busbw is algbw times a factor that makes figures of different collectives and
numbers of ranks n comparable with what a link carries (the factors of nccl-tests):

    all_reduce                                              2 (n - 1) / n
    reduce_scatter, all_gather, gather, scatter, all_to_all   (n - 1) / n
    broadcast, reduce                                       1

bytes are those of the whole vector: of all blocks together where there are blocks. count is what a
call is given, as in nccl-tests: elements of the vector, or of one rank's block.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import gpus

# The fields of a row of JSON, in this order. root and order are null where a call has none.
FIELDS = (
    "collective",
    "algorithm",
    "bytes",
    "count",
    "dtype",
    "op",
    "root",
    "order",
    "ranks",
    "nodes",
    "transport",
    "device",
    "mode",
    "symmetric",
    "in_place",
    "time_us",
    "p99_us",
    "algbw_gbs",
    "busbw_gbs",
    "wrong",
    "predicted_us",
    "peers",
)


def bus_factor(collective: str, nranks: int) -> float:
    """busbw / algbw; see above."""
    if collective == "barrier":
        return 0.0
    if collective in ("broadcast", "reduce"):
        return 1.0
    return (2.0 if collective == "all_reduce" else 1.0) * (nranks - 1) / nranks


def bandwidth(nbytes: int, seconds: float) -> float:
    """GB/s, of 10^9 bytes."""
    return nbytes / seconds * 1e-9 if seconds > 0 else 0.0


def microseconds(value: float | None) -> str:
    """Four digits or so, in units of 1 µs: 0.412, 12.31, 8123."""
    if value is None:
        return "-"
    if value <= 0:
        return "0"
    digits = max(0, 3 - max(0, math.floor(math.log10(value)) + 1))
    return f"{value:.{min(3, digits + (value < 1000))}f}"


def beside(measured: float, predicted: float) -> list[str]:
    """Cells of two times in seconds: the measured, the predicted, and how far that is off."""
    cells = [microseconds(seconds * 1e6) for seconds in (measured, predicted)]
    return [*cells, f"{predicted / measured - 1:+.0%}"]


def number(value: float | None, digits: int = 2) -> str:
    """With `digits` behind the point; "-" for None."""
    return "-" if value is None else f"{value:.{digits}f}"


@dataclass(frozen=True)
class Column:
    """A column of a table: title, unit below it, width in letters; `left`: left-aligned."""

    title: str
    unit: str = ""
    width: int = 8
    left: bool = False


class Table:
    """Rows under titles, right-aligned but for columns that are `left`, written one by one.
    `groups` are titles above columns: (title, number of columns); lines that are no rows begin
    with #.
    """

    def __init__(self, columns: Sequence[Column], groups: Sequence[tuple[str, int]] = ()) -> None:
        self._columns = list(columns)
        self._groups = list(groups)

    def header(self) -> str:
        """Titles; below them units and above them groups, if there are any."""
        lines = [self._line([c.title for c in self._columns])]
        if any(c.unit for c in self._columns):
            lines.append(self._line([c.unit for c in self._columns]))
        if self._groups:
            parts, at = [], 0
            for title, columns in self._groups:
                width = sum(c.width + 1 for c in self._columns[at : at + columns])
                parts.append(
                    f" {title} ".center(width - 1, "-").rjust(width) if title else " " * width
                )
                at += columns
            lines.insert(0, "".join(parts))
        return "\n".join("#" + line[1:].rstrip() for line in lines)

    def row(self, cells: Sequence[str]) -> str:
        """One line."""
        return self._line(cells).rstrip()

    def _line(self, cells: Sequence[str]) -> str:
        return "".join(
            f" {cell:{'<' if c.left else '>'}{c.width}}"
            for cell, c in zip(cells, self._columns, strict=True)
        )


def describe(header: dict[str, Any]) -> list[str]:
    """The header of a run, as lines of text."""
    machine, versions = header["machine"], header["versions"]
    exchange = machine["exchange_ns"]
    pages = machine["huge_pages"]
    lines = [
        f"device: {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory_bytes'] / 2**30:.1f} GiB; pages of {machine['page_bytes'] >> 10} KiB, "
        f"huge pages: {pages['ordinary']}, in shared memory: {pages['shared']}",
        "cache line exchange between two ranks: "
        + (f"{exchange:.0f} ns" if exchange else "none, no two ranks share memory"),
        "versions: " + ", ".join(f"{k} {v}" for k, v in versions.items()),
        f"commit: {header['commit']}; date: {header['date']}",
    ]
    if "gpus" in machine:
        lines.insert(0, f"GPUs: {gpus.summary(machine['gpus'])}")
    # Which node rank 0 is on says nothing where --nodes divides the ranks, with this variable.
    divided = os.environ.get("COLLECTIVES_RENDEZVOUS") == "launcher"
    decided = {
        k: v
        for k, v in header.get("choices", {}).items()
        if not (divided and k == "COLLECTIVES_NODE")
    }
    if decided:
        lines.append("choices decided by: " + ", ".join(f"{k}={v}" for k, v in decided.items()))
    if "settings" in header:
        words = ", ".join(f"{k}={v}" for k, v in header["settings"].items())
        lines.append(f"settings of peers: {words}")
    return lines


def write_json(path: str, header: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """{"header": ..., "rows": [...]} into a file; "-" is standard output's job, not ours.

    Raises OSError if it cannot be written.
    """
    for row in rows:
        if tuple(row) != FIELDS:
            raise ValueError(f"a row has the fields {tuple(row)}, not {FIELDS}")
    text = json.dumps({"header": header, "rows": rows}, indent=1)
    Path(path).write_text(text + "\n", encoding="utf-8")
