"""What a collective sends over a network: its messages with their ways. Two makers: from a
schedule, and from its symmetry (`symmetry.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import UnsupportedError
from ..schedule import schedule
from .network import Floats, Network, Routes

# Messages of a schedule that is followed rank by rank, at most: some seconds, and 0.5 GB.
_MOST_MESSAGES = 6_000_000
# Transfers, of which a message may carry many: 2 s and 1.4 GB while the schedule is built.
_MOST_TRANSFERS = 36_000_000


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


def parts_of(algorithm: str) -> tuple[str, str] | None:
    """What a composition has within nodes and between them; None for anything else."""
    if algorithm == "hierarchical":
        return "direct_two_shot", "ring"
    if algorithm.startswith("hierarchical(") and algorithm.count("(") == 1:
        intra, _, inter = algorithm[len("hierarchical(") : -1].partition(",")
        return intra.strip(), inter.strip()
    return None


class Size(NamedTuple):
    """How large a schedule is: messages, and the transfers that they carry."""

    messages: float
    transfers: float


# How the size of a schedule may rise with the number of ranks.
_GROWTHS: tuple[Callable[[float], float], ...] = (
    lambda n: n,
    lambda n: n * math.log2(n),
    lambda n: n**2,
    lambda n: n**2 * math.log2(n),
)


def _grown(small: float, large: float, at: int, to: int) -> float:
    """The size for `to`, from those for at / 2 and at, by the way of growing that fits best."""
    if not small or to < 2:
        return large
    growth = min(_GROWTHS, key=lambda g: abs(math.log(large / small * g(at / 2) / g(at))))
    return large * growth(to) / growth(at)


def _counted(algorithm: str, collective: str, nodes: int, each: int) -> Size:
    composed = algorithm.startswith("hierarchical")
    node = [rank // each for rank in range(nodes * each)] if composed else ()
    core = schedule(algorithm, collective, nodes * each, node=node)._core
    return Size(core.messages().shape[1], sum(len(r) for r in core.rounds))


def size_of(algorithm: str, collective: str, counts: Sequence[int]) -> Size:
    """About how large the schedule is for nodes of so many ranks: counted for small worlds of up to
    32 nodes and 8 ranks on each, from which it grows on.
    """
    nodes, each = len(counts), max(counts)
    if not algorithm.startswith("hierarchical"):
        nodes, each = sum(counts), 1
    few = min(each, 8)
    try:
        small, large = (_counted(algorithm, collective, n, few) for n in (16, 32))
        half = _counted(algorithm, collective, 32, 4) if each > 8 else large
    except UnsupportedError:  # not for such numbers of ranks: as if each sent to each
        return Size(*[float(sum(counts)) ** 2] * 2)
    found = []
    for less, more, narrow in zip(small, large, half, strict=True):
        wider = _grown(narrow, more, 8, each) / more if each > 8 and more else 1.0
        found.append(wider * _grown(less, more, 32, nodes))
    parts = parts_of(algorithm)
    if each > 8 and parts is not None:  # the messages within wide nodes rise faster than the others
        within = size_of(parts[0], collective, [each]).messages
        between = size_of(parts[1], collective, [1] * nodes).messages
        found[0] = max(found[0], nodes * within + each * between)
    return Size(*found)


def can_follow(algorithm: str, collective: str, counts: Sequence[int]) -> bool:
    """True if the schedule for nodes of so many ranks is small enough to be followed rank by
    rank.
    """
    size = size_of(algorithm, collective, counts)
    return size.messages <= _MOST_MESSAGES and size.transfers <= _MOST_TRANSFERS


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
