"""The measured table: which algorithm was the fastest, for which collective and size, on these
ranks; with the times, and the cost model's figures that were fitted to them.

`python -m collectives tune` writes it, and ranks that meet look for it. A file is for one kind of
hardware, and holds a part for each layout of ranks that was measured:

    {"format": 1,
     "hardware": {"cpu": ..., "cores": ..., "network": ..., "mpi": ...},
     "layouts": {"shm+mpi 0,0,1,1": {"date": ..., "version": ..., "choices": ..., "figures": ...,
                                     "rows": [[collective, algorithm, bytes, seconds], ...]},
                 "cuda 0,0": {"gpus": ["NVIDIA H200", "NVIDIA H200"], ...}}}

The layout "cuda" is of arrays on the GPUs of a node's ranks, and names them. The file is found by
the host, before anything is known of its GPUs; so a layout of other GPUs is refused when it is to
choose for the first time.

It is COLLECTIVES_TABLE where that is set, else named after the hardware in a folder `collectives`
of XDG_CACHE_HOME (~/.cache). Rank 0 reads it and tells the others, so all ranks choose alike,
whether they share a file system or not. A table of other hardware is refused.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..schedule import why_unsupported
from . import ANY_SIZE, Choice
from .model import Figures, Measurement, fit

FORMAT = 1
# What is chosen stays chosen while it is within so much of the fastest: the noise of a median.
_NEAR = 1.05
_ELSE = "go without it: unset COLLECTIVES_TABLE, or set it to off"
# No rank meets others with such a file, those of `tune` neither.
_ANOTHER = "name another file, and measure into it with python -m collectives tune"
_NAME_ANOTHER = "name a file with --output"
_ANEW = f"remove the file, or {_ANOTHER}"
# A table decides for sizes that were measured, and so many times beyond: `tune` measures sizes that
# are so far apart. Up to a cache line all sizes are one.
_BEYOND = 4
_LINE = 64
# Calls of all_to_all_v have no size that ranks could compare, and need one that sends directly.
_ANY_PAIR = 1 << 62


@dataclass(frozen=True)
class Table:
    """What was measured for one layout of ranks.

    choices  by collective, by rising size
    figures  of the cost model, by kind of call
    rows     what was measured
    origin   file and date, for people
    gpus     for arrays on GPUs: the name of each rank's
    """

    choices: Mapping[str, Sequence[Choice]]
    figures: Mapping[str, Figures]
    rows: Sequence[Measurement] = field(repr=False)
    origin: str = ""
    gpus: Sequence[str] = ()

    def sizes(self, collective: str) -> list[int]:
        """The sizes that were measured, rising."""
        return sorted({row.nbytes for row in self.rows if row.collective == collective})

    def reach(self, collective: str) -> tuple[int, int]:
        """The smallest and the largest size for which the choices are an answer. A table without
        times is one for every size.
        """
        sizes = self.sizes(collective)
        if not sizes:
            return 0, ANY_SIZE
        smallest = sizes[0] // _BEYOND if sizes[0] > _LINE else 0
        return smallest, min(max(_LINE, sizes[-1] * _BEYOND), ANY_SIZE)

    def times(self, collective: str, nbytes: int) -> dict[str, float]:
        """Measured seconds by algorithm: between two measured sizes on a straight line of
        logarithms, none outside of them.
        """
        by_name: dict[str, list[tuple[int, float]]] = {}
        for row in self.rows:
            if row.collective == collective:
                by_name.setdefault(row.algorithm, []).append((row.nbytes, row.seconds))
        found = {}
        for name, points in by_name.items():
            seconds = _between(sorted(points), nbytes)
            if seconds is not None:
                found[name] = seconds
        return found


def _between(points: Sequence[tuple[int, float]], nbytes: int) -> float | None:
    for (low, before), (high, after) in itertools.pairwise(points):
        if low <= nbytes <= high and low > 0:
            share = math.log(nbytes / low) / math.log(high / low)
            return math.exp(math.log(before) + share * math.log(after / before))
    return next((seconds for size, seconds in points if size == nbytes), None)


def layout_key(transports: str, nodes: Sequence[int]) -> str:
    """What carries data, and which node each rank is on, nodes numbered as they come."""
    number = {node: i for i, node in enumerate(dict.fromkeys(nodes))}
    return f"{transports} {','.join(str(number[n]) for n in nodes)}"


def choices_of(measured: Iterable[Measurement]) -> dict[str, list[Choice]]:
    """The fastest algorithm for every size, by collective: where two measured sizes have different
    ones, they change in the (geometric) middle, or where straight lines between the times cross.
    """
    times: dict[str, dict[int, dict[str, float]]] = {}
    for m in measured:
        times.setdefault(m.collective, {}).setdefault(m.nbytes, {})[m.algorithm] = m.seconds
    return {collective: _choices(by_size, collective) for collective, by_size in times.items()}


def _choices(by_size: dict[int, dict[str, float]], collective: str) -> list[Choice]:
    found: list[Choice] = []
    sizes = sorted(by_size)
    for i, size in enumerate(sizes):
        at = by_size[size]
        best = min(at, key=lambda name: at[name])
        if found:
            last = found[-1].algorithm
            if last in at and at[last] <= _NEAR * at[best]:
                best = last
            else:
                limit = _change(by_size, sizes[i - 1], size, last, best)
                found[-1] = Choice(limit, last)
        if found and found[-1].algorithm == best:
            found.pop()
        found.append(Choice(ANY_SIZE, best))
    if collective == "all_to_all":
        found[-1] = Choice(_ANY_PAIR - 1, found[-1].algorithm)
        found.append(Choice(ANY_SIZE, "direct_two_shot"))
    return found


def _change(
    by_size: dict[int, dict[str, float]], low: int, high: int, first: str, second: str
) -> int:
    """The largest size between `low` and `high` for which `first` stays chosen."""
    share = 0.5
    if first in by_size[high] and second in by_size[low]:
        before = math.log(by_size[low][second] / by_size[low][first])
        after = math.log(by_size[high][second] / by_size[high][first])
        if before > 0 > after:
            share = before / (before - after)
    start = max(1, low)
    return max(low, min(high - 1, int(start * (high / start) ** share)))


# ---- hardware ------------------------------------------------------------------------------------


def hardware_of(infos: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What times depend on besides the layout, from what all ranks say of their hosts."""

    def joined(name: str) -> str:
        return " | ".join(sorted({str(info[name]) for info in infos}))

    return {
        "cpu": joined("cpu"),
        "cores": joined("cores"),
        "network": joined("network"),
        "mpi": joined("mpi"),
    }


def refuse(
    path: Path | str, found: Mapping[str, Any], hardware: Mapping[str, str], remedy: str = _ANOTHER
) -> None:
    """Raises ConfigError, in words, where a table was measured on other hardware."""
    differing = [
        f"{name}: measured on {found.get(name, 'nothing')!r}, this is {here!r}"
        for name, here in hardware.items()
        if found.get(name) != here
    ]
    if differing:
        raise ConfigError(
            f"the table {path} was measured on other hardware ({'; '.join(differing)}); {remedy}, "
            f"or {_ELSE}"
        )


def refuse_gpus(table: Table, gpus: Sequence[str]) -> None:
    """Raises ConfigError, in words, where a table was measured on other GPUs than the ranks'."""
    refuse(
        table.origin,
        {"GPUs": gpus_in_words(table.gpus)},
        {"GPUs": gpus_in_words(gpus)},
        "measure here with python -m collectives tune --device cuda",
    )


def gpus_in_words(names: Sequence[str]) -> str:
    """The GPUs of ranks, by rank, those of one name together: "2 x NVIDIA H200"."""
    groups = ((name, len(list(same))) for name, same in itertools.groupby(names))
    return ", ".join(f"{count} x {name or 'unknown'}" for name, count in groups)


# ---- files ---------------------------------------------------------------------------------------


class _Unreachable(ConfigError):
    """A file that cannot be looked at, or has no place to be."""


def path_for(hardware: Mapping[str, str], wanted: str = "") -> Path:
    """The file with tables for this hardware; `wanted` is COLLECTIVES_TABLE. Raises ConfigError
    where none is wanted, and there is no home for one.
    """
    if wanted:
        return Path(wanted)
    import hashlib  # here: it loads OpenSSL

    digest = hashlib.sha256(json.dumps(hardware, sort_keys=True).encode()).hexdigest()[:16]
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        raise _Unreachable(
            f"the usual place of a table is below HOME, which is not known ({error}); "
            f"{_NAME_ANOTHER}"
        ) from error
    return Path(cache, "collectives", f"table-{digest}.json")


def find(
    hardware: Mapping[str, str], wanted: str = "", *, whatever: Sequence[str] = ()
) -> tuple[str, dict[str, Any]]:
    """The file with tables for this hardware, and its layouts, as `load` gives them. A usual place
    that cannot be looked at has none; a file that is `wanted` raises ConfigError there.

    whatever  parts of the hardware that are not compared
    """
    try:
        path = path_for(hardware, wanted)
        compared = {name: part for name, part in hardware.items() if name not in whatever}
        return str(path), load(path, compared)
    except _Unreachable:
        if wanted:
            raise
        return "", {}


def load(path: Path, hardware: Mapping[str, str]) -> dict[str, Any]:
    """The layouts in a file, {} where there is no file. Raises ConfigError for one that cannot be
    read, is no table, or is of other hardware.
    """
    _check_kind(path)
    try:
        content = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise _unreachable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the table {path} cannot be read: {error}; {_ANEW}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ConfigError(f"{path} is no table of this version (format {FORMAT}): {_ANEW}")
    measured_on, layouts = content.get("hardware", {}), content.get("layouts", {})
    if not isinstance(measured_on, dict):
        raise _damaged(path, "hardware is no object")
    if not isinstance(layouts, dict) or not all(isinstance(v, dict) for v in layouts.values()):
        raise _damaged(path, "layouts is no object of objects")
    refuse(path, measured_on, hardware)
    return layouts


def _check_kind(path: Path) -> None:
    """Raises ConfigError for a device or a pipe, which may have no end."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return  # reading or writing it says why
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise ConfigError(f"the table {path} is no file; {_ANOTHER}, or {_ELSE}")


def why_none(settings_table: str) -> str:
    """That COLLECTIVES_TABLE names no file; "" where it names one, or none is wanted. Raises
    ConfigError where that cannot be found out.
    """
    if settings_table in ("", "off"):
        return ""
    try:
        os.stat(settings_table)
    except (FileNotFoundError, NotADirectoryError):
        return f"COLLECTIVES_TABLE names {settings_table}, and there is no such file: none is used"
    except OSError as error:
        raise _unreachable(settings_table, error) from error
    return ""


def _unreachable(path: Path | str, error: OSError) -> ConfigError:
    words = f"the table {path} cannot be read: {error.strerror}"
    return _Unreachable(f"{words}; {_ANOTHER}, or {_ELSE}")


def _damaged(path: Path | str, why: str) -> ConfigError:
    return ConfigError(f"the table {path} is damaged ({why}): {_ANEW}")


def parse(layout: Mapping[str, Any], path: Path | str) -> Table:
    """A layout of a file. Raises ConfigError where it is not as `entry` makes it."""
    try:
        table = Table(
            {
                collective: [Choice(int(limit), str(name)) for limit, name in choices]
                for collective, choices in layout["choices"].items()
            },
            {kind: Figures.from_json(found) for kind, found in layout["figures"].items()},
            [Measurement(str(a), str(c), int(b), float(s)) for c, a, b, s in layout["rows"]],
            f"{path}, {layout['date'][:10]}",
            [str(name) for name in layout.get("gpus", ())],
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    for collective, choices in table.choices.items():
        limits = [choice.limit for choice in choices]
        if not limits or limits[-1] < ANY_SIZE or sorted(set(limits)) != limits:
            raise _damaged(path, f"the choices for {collective} do not rise to every size")
    seen = set()
    for row in table.rows:
        if not 0 <= row.nbytes <= ANY_SIZE or not 0 < row.seconds < math.inf:
            raise _damaged(
                path, f"{row.collective} of {row.nbytes} bytes is said to take {row.seconds} s"
            )
        if row[:3] in seen:
            raise _damaged(path, f"{row.algorithm} has two times for {row.nbytes} bytes")
        seen.add(row[:3])
    return table


def entry(
    choices: Mapping[str, Sequence[Choice]],
    figures: Mapping[str, Figures],
    rows: Iterable[Measurement],
    *,
    date: str,
    version: str,
    gpus: Sequence[str] = (),
) -> dict[str, Any]:
    """A layout, as a file has it."""
    return {
        **({"gpus": list(gpus)} if gpus else {}),
        "date": date,
        "version": version,
        "choices": {name: [list(choice) for choice in found] for name, found in choices.items()},
        "figures": {kind: found.as_json() for kind, found in figures.items()},
        "rows": [[m.collective, m.algorithm, m.nbytes, m.seconds] for m in rows],
    }


def merge(old: Mapping[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    """`new`, with what `old` has of collectives that were not measured this time. Of other GPUs
    nothing is kept.
    """
    if old is None or old.get("gpus", []) != new.get("gpus", []):
        return new
    kept = [row for row in old["rows"] if row[0] not in new["choices"]]
    return {
        **new,
        "choices": {**old["choices"], **new["choices"]},
        "rows": [*kept, *new["rows"]],
    }


def _fitted(rows: Iterable[Measurement], key: str) -> dict[str, Any]:
    """Figures for all rows of a layout: those of one collective do not say what others cost. What a
    program registered that is not here is left out.
    """
    transports, _, places = key.rpartition(" ")
    nodes = [int(node) for node in places.split(",")]
    known = [
        m for m in rows if not why_unsupported(m.algorithm, m.collective, len(nodes), node=nodes)
    ]
    return {kind: found.as_json() for kind, found in fit(known, nodes, transports).items()}


def _behind_links(path: Path) -> Path:
    return Path(os.path.realpath(path))


def try_writing(path: Path) -> None:
    """Raises ConfigError if `save` could not write the file."""
    _check_kind(path)
    named, path = path, _behind_links(path)
    written = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        written.touch()
        written.unlink()
    except OSError as error:
        raise ConfigError(
            f"the table {named} cannot be written: {error.strerror}; {_NAME_ANOTHER}"
        ) from None


def save(path: Path, hardware: Mapping[str, str], key: str, layout: dict[str, Any]) -> None:
    """Puts a layout into the file, beside others of the same hardware. The file is replaced at
    once, so that no reader finds half of it; where the path is a link, the one that it leads to.
    """
    path = _behind_links(path)
    layouts = load(path, hardware)
    if key in layouts:
        parse(layouts[key], path)
    merged = layouts[key] = merge(layouts.get(key), layout)
    if merged["rows"] != layout["rows"]:
        merged["figures"] = _fitted(parse(merged, path).rows, key)
    content = {"format": FORMAT, "hardware": dict(hardware), "layouts": layouts}
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f".{path.name}.{os.getpid()}")
    written.write_text(json.dumps(content, indent=1) + "\n")
    written.replace(path)
