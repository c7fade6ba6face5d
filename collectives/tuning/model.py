"""What a call is expected to take: alpha for each step, beta for each byte sent, gamma for each
byte combined, and something for each further slice and for entering the call.

    time = entry + steps · alpha + further slices · slice + sent · beta + combined · gamma

Steps are messages on the longest chain, bytes those of the rank that sends or combines most; all
come from `Schedule.cost`. A message longer than a slice goes as several: all but the first cost
`slice` each, on the rank that sends most messages, and no step, since they follow each other.

Steps and bytes between nodes count with the figures of the network, the rest with those of shared
memory. The ranks of a node share its link, so what counts there are the bytes that leave the node,
not those of a rank. Where ranks share cores, what they copy and combine takes longer in proportion,
and a step costs a turn of the scheduler.

Which figures: "direct" for the direct algorithms of ranks that share memory, "assembled" for small
calls that travel with the agreement of ranks that do not, "steps" for all else, which the general
engine runs. `python -m collectives tune` fits them to the machine at hand; those below are of one
machine, so that a prediction made with them says which algorithms are near each other and where
they cross, not what another machine will show.

Source: R. Hockney, "The communication challenge for MPP", Parallel Computing 20 (1994),
doi:10.1016/S0167-8191(06)80021-9; gamma as in R. Thakur, R. Rabenseifner, W. Gropp, "Optimization
of Collective Communication Operations in MPICH", IJHPCA 19 (2005), doi:10.1177/1094342005051521;
the cost of further messages is LogP's overhead: D. Culler et al., "LogP: towards a realistic model
of parallel computation", PPoPP 1993, doi:10.1145/155332.155333.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ..schedule import is_written, schedule
from . import ASSEMBLED, ASSEMBLED_BY_NODE, BY_NODE, segment_bytes


@dataclass(frozen=True)
class LinkModel:
    """What a link costs.

    alpha_s           seconds for a step: from the sender's call to the receiver's return
    beta_s_per_byte   seconds for a byte that a rank sends (between nodes: that a node sends)
    gamma_s_per_byte  seconds for a byte that a rank combines with its own
    """

    alpha_s: float
    beta_s_per_byte: float
    gamma_s_per_byte: float = 0.0


@dataclass(frozen=True)
class Figures:
    """What calls of one kind cost: `near` within a node, `far` between nodes.

    entry_s  seconds for a call, whatever it does
    slice_s  seconds for each slice of a message after its first
    """

    near: LinkModel
    far: LinkModel
    entry_s: float = 0.0
    slice_s: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """As a table's file has it."""
        return asdict(self)

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> Figures:
        """What `as_json` gave. Raises KeyError or TypeError for anything else."""
        return Figures(
            LinkModel(**found["near"]),
            LinkModel(**found["far"]),
            float(found["entry_s"]),
            float(found["slice_s"]),
        )


# Fitted to all_reduce of float32, 4 B to 4 MiB, with two ranks, each bound to a core of a two-core
# virtual machine (Xeon, AVX-512, a cache line exchanged in 132 ns), over Open MPI 5.0.11 where that
# carries the data. Half of those times are predicted within a factor of 1.2, nine of ten within
# 1.6, the worst (threads, 256 B, disturbed by other programs) within 3.6.
LINKS: dict[str, dict[str, LinkModel]] = {
    "threads": {
        "direct": LinkModel(1.49e-7, 1.26e-10, 4.87e-12),
        "steps": LinkModel(4.75e-7, 1.08e-10, 1.97e-11),
    },
    "shm": {
        "direct": LinkModel(2.10e-7, 1.16e-10, 3.82e-11),
        "steps": LinkModel(4.83e-7, 1.21e-10, 1.79e-11),
    },
    "mpi": {
        "assembled": LinkModel(1.39e-6, 2.41e-10, 7.92e-11),
        "steps": LinkModel(1.29e-6, 2.62e-10, 5.02e-11),
    },
}
# A step between ranks that share a core takes so much longer: the scheduler runs the other one
# first. Four ranks on the same two cores: 3.6 us for a step of "direct", 3.5 us for one of "steps".
SWITCH_S = 3e-6

_DIRECT = ("direct_one_shot", "direct_two_shot")
# Rounds are looked at one by one, in Python, for up to so many ranks.
_COUNTED_RANKS = 128


class Share(NamedTuple):
    """What of a schedule goes over one kind of link: steps, and what the rank (or node) that sends
    or combines most sends and combines, in units of the whole vector.
    """

    steps: float
    sent: float
    reduced: float


class Work(NamedTuple):
    """What a call has to do. Bytes are those of the busiest rank, between nodes of the busiest
    node.
    """

    near_steps: float
    far_steps: float
    slices: float
    near_sent: float
    near_reduced: float
    far_sent: float

    def row(self) -> tuple[float, ...]:
        """Factors of entry, slice, and alpha, beta, gamma near, alpha, beta far."""
        near = (self.near_steps, self.near_sent, self.near_reduced)
        return (1.0, self.slices, *near, self.far_steps, self.far_sent)


def predict(
    algorithm: str,
    collective: str,
    nbytes: int,
    nodes: Sequence[int],
    transport: str,
    *,
    root: int = 0,
    cores: int | None = None,
    figures: Mapping[str, Figures] | None = None,
) -> float | None:
    """Seconds that a call is expected to take; None where there is no schedule to judge.

    nbytes     of the whole vector (of all blocks together)
    nodes      node of each rank
    transport  "threads", "shm", "mpi" or "shm+mpi", as `Communicator.transports`
    cores      that the ranks of a node share; None: each has one of its own
    figures    by kind, fitted to these very ranks: then `cores` says nothing more
    """
    if len(nodes) < 2 or algorithm == "auto":
        return None
    kind, work = work_of(algorithm, collective, nbytes, nodes, transport, root)
    if figures is not None:
        found = figures.get(kind) or figures.get("steps")
        return None if found is None else _time(found, work)
    found = _default_figures(kind, transport)
    local = max(list(nodes).count(node) for node in set(nodes))
    crowd = max(1.0, local / cores) if cores else 1.0
    if crowd > 1:
        found = replace(
            found,
            near=LinkModel(
                found.near.alpha_s + SWITCH_S,
                found.near.beta_s_per_byte * crowd,
                found.near.gamma_s_per_byte * crowd,
            ),
        )
    return _time(found, work)


def _time(figures: Figures, work: Work) -> float:
    near, far = figures.near, figures.far
    factors = (
        figures.entry_s,
        figures.slice_s,
        near.alpha_s,
        near.beta_s_per_byte,
        near.gamma_s_per_byte,
        far.alpha_s,
        far.beta_s_per_byte,
    )
    return sum(a * b for a, b in zip(factors, work.row(), strict=True))


def _default_figures(kind: str, transport: str) -> Figures:
    inside = LINKS["shm" if transport in ("shm+mpi", "self") else transport]
    far = LINKS["mpi"]["steps" if kind == "direct" else kind]
    return Figures(inside.get(kind) or inside["steps"], far)


def work_of(
    algorithm: str,
    collective: str,
    nbytes: int,
    nodes: Sequence[int],
    transport: str,
    root: int = 0,
) -> tuple[str, Work]:
    """The kind of a call, which says whose figures count, and what it has to do."""
    assembled = _assembled(algorithm, collective, nbytes, nodes, transport)
    if assembled is not None:
        return "assembled", assembled
    near, far = shares(algorithm, collective, tuple(nodes), root)
    if transport != "shm+mpi":
        near, far = Share(near.steps + far.steps, *near[1:]), Share(0, 0, 0)
    direct = algorithm in _DIRECT and transport in ("threads", "shm")
    slices = 0.0
    if not direct:
        chunks, messages = _sizes(algorithm, collective, tuple(nodes), root)
        longest = nbytes / chunks
        each = segment_bytes(messages=transport in ("mpi", "shm+mpi"), nodes=nodes)
        slices = messages * max(0, math.ceil(longest / each) - 1)
    work = Work(
        near.steps,
        far.steps,
        slices,
        near.sent * nbytes,
        near.reduced * nbytes,
        far.sent * nbytes,
    )
    return ("direct" if direct else "steps"), work


def _assembled(
    algorithm: str, collective: str, nbytes: int, nodes: Sequence[int], transport: str
) -> Work | None:
    """The work of a small call that travels with the agreement; None if this is none."""
    if transport not in ("mpi", "shm+mpi"):
        return None
    n = len(nodes)
    groups = list(nodes) if transport == "shm+mpi" else list(range(n))
    count = len(set(groups))
    local = max(groups.count(g) for g in groups)
    everybody = collective in ("all_reduce", "reduce", "reduce_scatter", "all_to_all")
    total = nbytes * (n if everybody else 1)
    if algorithm in _DIRECT and total <= ASSEMBLED:
        brought = total
    elif (
        algorithm == BY_NODE
        and collective == "all_reduce"
        and nbytes * count <= ASSEMBLED_BY_NODE
        and len(set(nodes)) == count
    ):
        brought = nbytes * count
    else:
        return None
    rounds = math.ceil(math.log2(count)) if count > 1 else 0
    within = 2.0 if local > 1 else 0.0
    combined = float(brought) if collective in ("all_reduce", "reduce", "reduce_scatter") else 0.0
    crossing = brought * (count - 1) / count
    if transport == "mpi":
        return Work(rounds, 0, 0, crossing, combined, 0)
    return Work(within, rounds, 0, brought * (local - 1), combined, crossing)


def shares(
    algorithm: str, collective: str, nodes: tuple[int, ...], root: int = 0
) -> tuple[Share, Share]:
    """What goes over links within a node, and between nodes."""
    if is_written(algorithm):  # may be registered anew under the same name
        return _shares(algorithm, collective, nodes, root)
    return _cached_shares(algorithm, collective, nodes, root)


def _sizes(algorithm: str, collective: str, nodes: tuple[int, ...], root: int) -> tuple[int, float]:
    """Chunks of a schedule, and messages of the rank that sends most."""
    of = _chunks_and_messages if is_written(algorithm) else _cached_sizes
    return of(algorithm, collective, nodes, root)


def _chunks_and_messages(
    algorithm: str, collective: str, nodes: tuple[int, ...], root: int
) -> tuple[int, float]:
    built = schedule(algorithm, collective, len(nodes), root=root, node=_named(nodes))
    chunks = len(nodes) if collective == "all_to_all" else built.nchunks
    return max(1, chunks), float(built.cost()["messages_max"])


def _named(nodes: tuple[int, ...]) -> tuple[int, ...]:
    return nodes if len(set(nodes)) > 1 else ()


def _shares(
    algorithm: str, collective: str, nodes: tuple[int, ...], root: int
) -> tuple[Share, Share]:
    built = schedule(algorithm, collective, len(nodes), root=root, node=_named(nodes))
    cost = built.cost()
    if not _named(nodes):
        return Share(cost["steps"], cost["sent_max"], cost["reduced_max"]), Share(0, 0, 0)
    crossing = cost["steps"]
    if len(nodes) <= _COUNTED_RANKS:
        rounds = sum(any(nodes[t.src] != nodes[t.dst] for t in r) for r in built.rounds)
        crossing = min(crossing, rounds)
    return (
        Share(cost["steps"] - crossing, cost["sent_max"], cost["reduced_max"]),
        Share(crossing, cost["internode_sent_max"], 0),
    )


_cached_shares = functools.lru_cache(maxsize=512)(_shares)
_cached_sizes = functools.lru_cache(maxsize=512)(_chunks_and_messages)


# ---- fitting ------------------------------------------------------------------------------------


class Measurement(NamedTuple):
    """A measured call, to fit to."""

    algorithm: str
    collective: str
    nbytes: int
    seconds: float


def fit(
    measured: Iterable[Measurement], nodes: Sequence[int], transport: str
) -> dict[str, Figures]:
    """Figures by kind that predict `measured`, of these ranks, with the least relative error. Kinds
    without measurements are left out.
    """
    rows: dict[str, list[tuple[float, ...]]] = {}
    for m in measured:
        if m.seconds <= 0:
            continue
        kind, work = work_of(m.algorithm, m.collective, m.nbytes, nodes, transport)
        rows.setdefault(kind, []).append(tuple(v / m.seconds for v in work.row()))
    found = {}
    for kind, lines in rows.items():
        x = [float(v) for v in _least_absolute(np.array(lines))]
        found[kind] = Figures(LinkModel(*x[2:5]), LinkModel(*x[5:7]), entry_s=x[0], slice_s=x[1])
    return found


def in_words(figures: Figures) -> str:
    """The figures of a kind, in a line."""

    def link(name: str, found: LinkModel) -> str:
        words = f"{name} {found.alpha_s * 1e6:.3g} us a step, "
        words += f"{found.beta_s_per_byte * 1e9:.3g} ns/B sent"
        if found.gamma_s_per_byte:
            words += f", {found.gamma_s_per_byte * 1e9:.3g} ns/B combined"
        return words

    parts = [f"entry {figures.entry_s * 1e6:.3g} us", link("near", figures.near)]
    if figures.far.alpha_s or figures.far.beta_s_per_byte:
        parts.append(link("far", figures.far))
    if figures.slice_s:
        parts.append(f"{figures.slice_s * 1e6:.3g} us a further slice")
    return "; ".join(parts)


def errors(
    measured: Iterable[Measurement],
    nodes: Sequence[int],
    transport: str,
    figures: Mapping[str, Figures],
) -> np.ndarray[Any, Any]:
    """How far predictions are off, as parts of the measured times."""
    found = []
    for m in measured:
        predicted = predict(m.algorithm, m.collective, m.nbytes, nodes, transport, figures=figures)
        if predicted is not None and m.seconds > 0:
            found.append(abs(predicted / m.seconds - 1))
    return np.array(found)


_REPEATS = 6  # of a fit with new weights
_SMALL_ERROR = 0.02  # below it all errors weigh alike


def _least_absolute(lines: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """x >= 0 for which lines · x is near ones: the sum of absolute errors is what counts, so that
    single times that were disturbed count little. Least squares, repeated with new weights.
    """
    weights = np.ones(len(lines))
    x = np.zeros(lines.shape[1])
    for _ in range(_REPEATS):
        x = _least_squares(lines * weights[:, None], weights)
        weights = 1 / np.sqrt(np.maximum(np.abs(lines @ x - 1), _SMALL_ERROR))
    return x


def _least_squares(
    lines: np.ndarray[Any, Any], target: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """x >= 0 for which lines · x is nearest to the target."""
    columns = [i for i in range(lines.shape[1]) if np.abs(lines[:, i]).max() > 0]
    scale = np.maximum(np.abs(lines).max(axis=0), 1e-300)
    best, best_error = np.zeros(lines.shape[1]), float("inf")
    # Few unknowns: every choice of those that are zero is tried.
    for count in range(1, len(columns) + 1):
        for chosen in itertools.combinations(columns, count):
            part = (lines / scale)[:, chosen]
            found = np.linalg.lstsq(part, target, rcond=None)[0]
            if (found < 0).any():
                continue
            error = float(np.sum((part @ found - target) ** 2))
            if error < best_error * (1 - 1e-9):
                best_error = error
                best = np.zeros(lines.shape[1])
                best[list(chosen)] = found
    return best / scale
