"""What a schedule is expected to take: alpha for each step, beta for each byte sent, gamma for each
byte combined.

    time = steps · alpha + bytes sent · beta + bytes combined · gamma

Steps are messages on the longest chain, bytes those of the rank that sends or combines most; all
come from `Schedule.cost`. Steps and bytes between nodes count with the figures of the network, the
rest with those of shared memory. Where ranks share cores, what they copy and combine takes longer
in proportion, and a step costs a turn of the scheduler.

The figures are one machine's, so a prediction says which algorithms are near each other and where
they cross, not what another machine will show: `explain --measure` puts the measured time beside
it, and `compare --fit` prints the figures of the machine at hand.

Source: R. Hockney, "The communication challenge for MPP", Parallel Computing 20 (1994),
doi:10.1016/S0167-8191(06)80021-9; gamma as in R. Thakur, R. Rabenseifner, W. Gropp, "Optimization
of Collective Communication Operations in MPICH", IJHPCA 19 (2005), doi:10.1177/1094342005051521.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..schedule import is_written, schedule


@dataclass(frozen=True)
class LinkModel:
    """What a link costs.

    alpha_s           seconds for a step: from the sender's call to the receiver's return
    beta_s_per_byte   seconds for a byte that a rank sends
    gamma_s_per_byte  seconds for a byte that a rank combines with its own
    """

    alpha_s: float
    beta_s_per_byte: float
    gamma_s_per_byte: float


# Fitted by `compare --fit` to all_reduce of float32, 4 B to 4 MiB, with two ranks, each bound to a
# core of a two-core virtual machine (Xeon, AVX-512, a cache line exchanged in 132 ns), over Open
# MPI 5.0.11 where that carries the data. Half of those times are predicted within a factor of 1.2,
# nine of ten within 1.6, the worst (threads, 256 B, disturbed by other programs) within 3.6.
# "direct" is for the direct algorithms, which ranks that share memory run without messages;
# "steps" for all others.
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
        "direct": LinkModel(1.39e-6, 2.41e-10, 7.92e-11),
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


def predict(
    algorithm: str,
    collective: str,
    nbytes: int,
    nodes: Sequence[int],
    transport: str,
    *,
    root: int = 0,
    cores: int | None = None,
) -> float | None:
    """Seconds that a call is expected to take; None where there is no schedule to judge.

    nbytes     of the whole vector (of all blocks together)
    nodes      node of each rank
    transport  "threads", "shm", "mpi" or "shm+mpi", as `Communicator.transports`
    cores      that the ranks of a node share; None: each has one of its own
    """
    if len(nodes) < 2 or algorithm == "auto":
        return None
    near, far = shares(algorithm, collective, tuple(nodes), root)
    inside, outside = _links(algorithm, transport)
    if transport != "shm+mpi":
        near, far = Share(near.steps + far.steps, *near[1:]), Share(0, 0, 0)
    local = max(list(nodes).count(node) for node in set(nodes))
    crowd = max(1.0, local / cores) if cores else 1.0
    switch = SWITCH_S if crowd > 1 else 0.0
    return (
        near.steps * (inside.alpha_s + switch)
        + near.sent * nbytes * inside.beta_s_per_byte * crowd
        + near.reduced * nbytes * inside.gamma_s_per_byte * crowd
        + far.steps * outside.alpha_s
        + far.sent * nbytes * outside.beta_s_per_byte
    )


def _links(algorithm: str, transport: str) -> tuple[LinkModel, LinkModel]:
    """Figures within a node and between nodes."""
    kind = "direct" if algorithm in _DIRECT else "steps"
    inside = LINKS["shm" if transport in ("shm+mpi", "self") else transport]
    return inside[kind], LINKS["mpi"]["steps"]


def shares(
    algorithm: str, collective: str, nodes: tuple[int, ...], root: int = 0
) -> tuple[Share, Share]:
    """What goes over links within a node, and between nodes."""
    if is_written(algorithm):  # may be registered anew under the same name
        return _shares(algorithm, collective, nodes, root)
    return _cached_shares(algorithm, collective, nodes, root)


def _shares(
    algorithm: str, collective: str, nodes: tuple[int, ...], root: int
) -> tuple[Share, Share]:
    several = len(set(nodes)) > 1
    node = nodes if several else ()
    built = schedule(algorithm, collective, len(nodes), root=root, node=node)
    cost = built.cost()
    if not several:
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


class Measurement(NamedTuple):
    """A measured call, to fit to."""

    algorithm: str
    collective: str
    nbytes: int
    seconds: float


def fit(measured: Iterable[Measurement], nodes: Sequence[int]) -> dict[str, LinkModel]:
    """Figures for "direct" and "steps" that predict `measured` with the least relative error, for
    ranks that are all joined by the same kind of link. Kinds without measurements are left out.
    """
    found = {}
    items = [m for m in measured if m.seconds > 0]
    for kind in ("direct", "steps"):
        mine = [m for m in items if (m.algorithm in _DIRECT) == (kind == "direct")]
        if not mine:
            continue
        lines = []
        for m in mine:
            near, far = shares(m.algorithm, m.collective, tuple(nodes))
            steps, sent = near.steps + far.steps, near.sent * m.nbytes
            lines.append(np.array([steps, sent, near.reduced * m.nbytes]) / m.seconds)
        found[kind] = LinkModel(*(float(v) for v in _least_squares(np.array(lines))))
    return found


def _least_squares(lines: np.ndarray) -> np.ndarray:
    """x >= 0 for which lines · x is nearest to ones."""
    ones = np.ones(len(lines))
    scale = np.maximum(np.abs(lines).max(axis=0), 1e-300)
    best, best_error = np.zeros(3), float("inf")
    # Three unknowns: every choice of those that are zero is tried.
    for mask in range(1, 8):
        chosen = [i for i in range(3) if mask >> i & 1]
        x = np.zeros(3)
        x[chosen] = np.linalg.lstsq((lines / scale)[:, chosen], ones, rcond=None)[0]
        error = float(np.sum(((lines / scale) @ x - 1) ** 2))
        if (x >= 0).all() and error < best_error:
            best, best_error = x, error
    return best / scale
