"""Algorithms against each other on a topology, over numbers of nodes and sizes: who wins where."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..bench.report import bandwidth, bus_factor
from ..errors import ConfigError, UnsupportedError
from ..words import counted, size_words
from .simulator import Outcome, Simulator, candidates
from .topology import Topology

# An algorithm stays the winner while it is within so much of the fastest.
NEAR = 1.02
_MOST = 1e30  # of a number in a file of results
WINNER = f"fastest, or within {NEAR * 100 - 100:.0f} % of it"


class Skipped(NamedTuple):
    """An algorithm that was left out, and why."""

    nodes: int
    algorithm: str
    why: str


class Measured(NamedTuple):
    """Seconds by size of one algorithm or peer, as a benchmark's file has them."""

    label: str
    ranks: int
    nodes: int
    times: dict[int, float]


@dataclass
class Comparison:
    """Outcomes of one collective by nodes, size and algorithm."""

    topology: Topology
    collective: str
    nodes: list[int]
    sizes: list[int]
    outcomes: dict[int, dict[int, dict[str, Outcome]]] = field(default_factory=dict)
    skipped: list[Skipped] = field(default_factory=list)
    measured: list[Measured] = field(default_factory=list)
    root: int = 0

    def algorithms(self, nodes: int) -> list[str]:
        """Those that ran on so many nodes."""
        found = self.outcomes[nodes]
        return list(next(iter(found.values()))) if found else []

    def fastest(self, nodes: int, nbytes: int) -> Outcome:
        """The one with the least time."""
        return min(self.outcomes[nodes][nbytes].values(), key=lambda o: o.seconds)

    def stretches(self, nodes: int) -> list[tuple[str, int, int]]:
        """(algorithm, smallest, largest size) of each winner, by rising size."""
        found: list[tuple[str, int, int]] = []
        for nbytes, outcomes in self.outcomes[nodes].items():
            best = self.fastest(nodes, nbytes)
            if found and outcomes[found[-1][0]].seconds <= NEAR * best.seconds:
                found[-1] = (found[-1][0], found[-1][1], nbytes)
            else:
                found.append((best.algorithm, nbytes, nbytes))
        return found


def compare(
    topology: Topology,
    collective: str,
    nodes: Sequence[int],
    sizes: Sequence[int],
    *,
    only: Sequence[str] = (),
    root: int = 0,
    tick: Callable[[str], None] = lambda what: None,
) -> Comparison:
    """Simulates `collective` with all algorithms that can run, or with `only`.

    tick  called with a line before each algorithm

    Raises UnsupportedError where nothing can run.
    """
    result = Comparison(topology, collective, list(nodes), list(sizes), root=root)
    for count in nodes:
        sized = topology.with_nodes(count)
        result.outcomes[count] = {nbytes: {} for nbytes in sizes}
        for name in list(only) or candidates(collective, sized):
            tick(f"{count} nodes: {name}")
            try:
                simulator = Simulator(name, collective, sized, root=root)
            except UnsupportedError as error:
                result.skipped.append(Skipped(count, name, str(error)))
                continue
            for nbytes in sizes:
                result.outcomes[count][nbytes][name] = simulator.run(nbytes)
        if not result.algorithms(count):
            why = "; ".join(s.why for s in result.skipped if s.nodes == count)
            raise UnsupportedError(f"nothing can do {collective} with {count} nodes: {why}")
    return result


def read_measured(paths: Iterable[str | Path], collective: str) -> list[Measured]:
    """The times of `collective` in files that `bench --json` or `compare --json` wrote; a folder
    stands for those of its files *.json that are such. Calls of different kinds have curves of
    their own, in place and out of place the same one. Raises ConfigError for a named file that is
    none.
    """
    found: dict[tuple[str, int, int], dict[int, float]] = {}
    for file, named in _files(paths):
        try:
            rows = _rows(file)
        except ConfigError:
            if named:
                raise
            continue
        for row in rows:
            if row["collective"] != collective:
                continue
            key = (f"{row['algorithm']} ({_kind(row)})", row["ranks"], row["nodes"])
            _add(found, key, row["bytes"], row["time_us"])
            for peer in row["peers"] or ():
                # Peers work on ordinary arrays, and know no order.
                name = f"{peer['name']} {peer['version']} ({_kind({**row, **_OF_PEERS})})"
                if peer["time_us"] is not None:
                    _add(found, (name, *key[1:]), row["bytes"], peer["time_us"])
    return [Measured(*key, dict(sorted(times.items()))) for key, times in sorted(found.items())]


_OF_PEERS = {"symmetric": False, "order": None}


def _kind(row: Mapping[str, Any]) -> str:
    """What a row is of beside collective, algorithm and size. What is usual goes without saying."""
    words = [row["transport"], counted(row["ranks"], "rank"), row["device"]]
    for name, usual in (("mode", "host"), ("dtype", "float32"), ("op", "sum")):
        if row.get(name) not in (None, "none", usual):
            words.append(str(row[name]))
    if row.get("root"):
        words.append(f"root {row['root']}")
    if row.get("order") == "rank":
        words.append("in rank order")
    if row.get("symmetric"):
        words.append("symmetric")
    return ", ".join(words)


def _files(paths: Iterable[str | Path]) -> list[tuple[Path, bool]]:
    """The files, and whether each was named itself."""
    files: list[tuple[Path, bool]] = []
    for path in map(Path, paths):
        if path.is_dir():
            files += [(file, False) for file in sorted(path.glob("*.json"))]
        else:
            files.append((path, True))
    return files


def _add(
    found: dict[tuple[str, int, int], dict[int, float]],
    key: tuple[str, int, int],
    nbytes: int,
    time_us: float,
) -> None:
    """Keeps the least time of a size."""
    times = found.setdefault(key, {})
    times[nbytes] = min(times.get(nbytes, float("inf")), time_us * 1e-6)


def _rows(file: Path) -> list[dict[str, Any]]:
    needed = ("collective", "algorithm", "bytes", "ranks", "nodes", "transport", "time_us", "peers")
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: it cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: it cannot be read as JSON: {error}") from None
    rows = data.get("rows") if isinstance(data, dict) else None
    if not isinstance(rows, list) or not all(isinstance(r, dict) for r in rows):
        raise ConfigError(f"{file}: it is no file of `bench --json` or `compare --json`")
    for row in rows:
        missing = [name for name in (*needed, "device") if name not in row]
        if missing:
            raise ConfigError(f"{file}: a row lacks {missing[0]!r}, which `bench --json` writes")
        for name, least in (("bytes", 0), ("ranks", 1), ("nodes", 1), ("time_us", 0)):
            _check_number(file, f"{name} of a row", row[name], least)
        peers = row["peers"] or []
        if not isinstance(peers, list):
            raise ConfigError(f"{file}: peers of a row is no list: {peers!r}")
        for peer in peers:
            if not isinstance(peer, dict) or not {"name", "version", "time_us"} <= set(peer):
                raise ConfigError(f"{file}: {peer!r} is no peer with name, version and time_us")
            if peer["time_us"] is not None:
                _check_number(file, "time_us of a peer", peer["time_us"], 0)
    return rows


def _check_number(file: Path, what: str, value: object, least: int) -> None:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= _MOST:
        return
    raise ConfigError(f"{file}: {what} is no number from {least} on: {value!r}")


def busbw_gbs(collective: str, ranks: int, nbytes: int, seconds: float) -> float:
    """GB/s."""
    return bandwidth(nbytes, seconds) * bus_factor(collective, ranks)


def in_words(result: Comparison) -> list[str]:
    """Which algorithm wins where, a line for each number of nodes and winner."""
    lines = []
    for nodes in result.nodes:
        ranks = result.topology.with_nodes(nodes).nranks
        parts = []
        for name, low, high in result.stretches(nodes):
            first, last = size_words(low), size_words(high)
            span = f"at {first}" if low == high else f"{first} - {last}"
            parts.append(f"{name} ({span})")
        lines.append(f"{counted(nodes, 'node')}, {counted(ranks, 'rank')}: " + ", ".join(parts))
    return lines
