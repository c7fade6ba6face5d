"""What a collective sends over a network: its messages with their ways. Two makers: from a
schedule, and from its symmetry (`symmetry.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..schedule import schedule
from .network import Floats, Network, Routes

# Transfers of a schedule that is followed rank by rank, at most: some seconds, and 0.5 GB.
_MOST_TRANSFERS = 6_000_000


class Traffic(NamedTuple):
    """Messages, for the simulator. All figures of messages are arrays over them.

    table      rows: round, src, dst, channel, route
    sent       bytes, in units of the vector; of all `weight` messages that it stands for
    combined   bytes that the receiver combines, likewise
    weight     how many equal messages it stands for
    routes     of the rows that `table` names
    ranks      that take part in the simulation
    times      how often each simulated rank stands for one of the world
    exact      False where ways of different latency were taken for equal
    """

    table: npt.NDArray[np.int32]
    sent: Floats
    combined: Floats
    weight: Floats
    routes: Routes
    ranks: int
    times: int = 1
    exact: bool = True


def transfers_of(algorithm: str, collective: str, nranks: int) -> float:
    """About how many transfers the schedule has, from its size for eight ranks."""
    small = schedule(algorithm.partition("(")[0], collective, 8) if "(" not in algorithm else None
    if small is None:
        return float(nranks) ** 2
    count = sum(len(r) for r in small._core.rounds)
    if algorithm in ("double_binary_tree", "binomial_tree") or count <= 3 * 8:
        return count / 8 * nranks * np.log2(max(2, nranks)) / 3
    if collective == "all_to_all" and algorithm == "bruck":
        return nranks**2 * np.log2(max(2, nranks)) / 2
    return count / 56 * nranks**2


def can_follow(algorithm: str, collective: str, nranks: int) -> bool:
    """True if the schedule is small enough to be followed rank by rank."""
    return transfers_of(algorithm, collective, nranks) <= _MOST_TRANSFERS


def from_schedule(algorithm: str, collective: str, network: Network, root: int = 0) -> Traffic:
    """The messages of the schedule, rank by rank. Raises what `collectives.schedule` does."""
    n = network.nranks
    several = network.topology.nodes > 1
    built = schedule(
        algorithm, collective, n, root=root, node=network.node.tolist() if several else ()
    )
    table = built._core.messages()
    chunk = 1.0 / n if collective == "all_to_all" else 1.0 / built.nchunks
    if collective == "barrier":
        chunk = 0.0
    src, dst = table[1].astype(np.int64), table[2].astype(np.int64)
    pairs, route = np.unique(src * n + dst, return_inverse=True)
    routes = network.routes(pairs // n, pairs % n)
    return Traffic(
        np.concatenate([table[:4], route.astype(np.int32)[None]]),
        table[4] * chunk,
        table[5] * chunk,
        np.ones(table.shape[1]),
        routes,
        n,
    )
