"""Simulating a collective on a topology: the same schedules, event by event.

What is simulated is in csrc/simulate.hpp, what is left out in docs/simulate.md.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .. import _core
from ..bench.report import bandwidth, bus_factor
from ..config import checked_bytes
from ..errors import UnsupportedError
from ..schedule import algorithms, why_unsupported
from .network import Floats, Network
from .symmetry import from_symmetry, why_not
from .topology import Topology
from .traffic import Traffic, can_follow, from_schedule

# Messages, over all segments, that are followed one by one; segments beyond are extrapolated. A
# million takes about a second.
MOST_MESSAGES = 1_500_000
# A symmetric form that is exact replaces the whole schedule from so many ranks on.
SYMMETRIC_FROM = 128
# The direct algorithms have n² messages: a quarter of a million for 512 ranks, a few seconds. From
# there on their symmetric form serves even where it is approximate.
DIRECT_TO = 512

SIMULATED = "simulated"
SYMMETRIC = "by symmetry"
APPROXIMATE = "by symmetry, approximate"


class Busy(NamedTuple):
    """A kind of link: the busiest of them, the bytes it carries and the seconds they need."""

    link: str
    label: str
    nbytes: float
    seconds: float


class Outcome(NamedTuple):
    """A simulated call.

    seconds       from the first rank's call to the last rank's return
    steps         messages on the longest chain of one segment
    segments      how many each chunk is cut into
    extrapolated  True if only the first segments were simulated
    method        "simulated", "by symmetry", or "by symmetry, approximate"
    links         the busiest link of each kind, the one that needs most first
    finish_s      when each simulated rank ended
    """

    algorithm: str
    collective: str
    nbytes: int
    ranks: int
    nodes: int
    seconds: float
    steps: int
    segments: int
    extrapolated: bool
    method: str
    links: tuple[Busy, ...]
    finish_s: tuple[float, ...]

    @property
    def algbw_gbs(self) -> float:
        """GB/s: bytes over seconds."""
        return bandwidth(self.nbytes, self.seconds)

    @property
    def busbw_gbs(self) -> float:
        """GB/s: algbw times the factor of the collective."""
        return self.algbw_gbs * bus_factor(self.collective, self.ranks)

    @property
    def bottleneck(self) -> str:
        """The link that is busy for longest, and which part of the time."""
        if not self.links or self.seconds <= 0:
            return "-"
        busiest = self.links[0]
        return f"{busiest.label} ({min(1.0, busiest.seconds / self.seconds):.0%})"


class Simulator:
    """Simulates one algorithm on one topology, at any size. Use again what is made once.

    Raises UnsupportedError where the algorithm cannot run on the topology, TopologyError where
    links are missing.
    """

    def __init__(
        self,
        algorithm: str,
        collective: str,
        topology: Topology,
        *,
        root: int = 0,
        symmetric: bool | None = None,
    ) -> None:
        self.algorithm = algorithm
        self.collective = collective
        self.topology = topology
        self._network = _network(topology)
        self.traffic, self.method = self._make(root, symmetric)
        self._links, self._routes, self._bottleneck = self._prepare()

    def _make(self, root: int, symmetric: bool | None) -> tuple[Traffic, str]:
        network, n = self._network, self._network.nranks
        several = self.topology.nodes > 1
        node = network.node.tolist() if several and n <= 4096 else ()
        if n <= 4096 or "(" not in self.algorithm:
            why = why_unsupported(self.algorithm, self.collective, n, root=root, node=node)
            if why:
                raise UnsupportedError(why)
        followed = can_follow(self.algorithm, self.collective, self.topology.counts)
        if symmetric is not False and (symmetric or n >= SYMMETRIC_FROM):
            traffic = from_symmetry(self.algorithm, self.collective, network)
            many = self.algorithm.startswith("direct_") and n >= DIRECT_TO
            if traffic is not None and (traffic.exact or symmetric or many or not followed):
                return traffic, SYMMETRIC if traffic.exact else APPROXIMATE
        if symmetric or not followed:
            why = why_not(self.algorithm, network) or (
                "it is symmetric only for some numbers of ranks, and where links between nodes "
                "are never full"
            )
            words = f"{self.algorithm} over {n} ranks has no symmetric form here: {why}"
            if not followed:
                words = f"too large to follow rank by rank, and {words}"
            raise UnsupportedError(words)
        return from_schedule(self.algorithm, self.collective, network, root), SIMULATED

    def _prepare(
        self,
    ) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray, np.ndarray], Floats]:
        """Links of each route that may be full, in the form that the core takes."""
        routes = self.traffic.routes
        capacity = self._network.capacity
        real = routes.links >= 0
        widths = np.where(real, capacity[np.maximum(routes.links, 0)], np.inf)
        narrowest = widths.min(axis=1) if len(widths) else np.zeros(0)
        kept = real & ~self._network.never_full()[np.maximum(routes.links, 0)]
        bare = np.flatnonzero(~kept.any(axis=1))
        kept[bare, widths[bare].argmin(axis=1)] = True
        begin = np.concatenate([[0], np.cumsum(kept.sum(axis=1))]).astype(np.int32)
        return (
            routes.links,
            (begin, routes.links[kept].astype(np.int32), routes.latency_s),
            narrowest,
        )

    def run(self, nbytes: int, *, slice_bytes: float | None = None) -> Outcome:
        """A call of `nbytes`: the whole vector, or all blocks of one rank together.

        slice_bytes  what a segment of the largest message has at most; that of the topology's
                     engine unless given
        """
        traffic, engine = self.traffic, self.topology.engine
        n = self._network.nranks
        messages = traffic.table.shape[1]
        if messages == 0:
            return self._outcome(nbytes, 0.0, 0, 1, False, [0.0] * traffic.ranks)
        largest = float((traffic.sent / traffic.weight).max()) * nbytes
        segments = max(1, math.ceil(largest / (slice_bytes or engine.slice_bytes) - 1e-9))
        period = 2 * engine.lanes
        most = max(period, MOST_MESSAGES // messages // period * period)
        extrapolated = segments > most
        few = most if extrapolated else segments
        seconds, finish, steps = self._simulate(nbytes, segments, few)
        if extrapolated:
            # A pipeline ends in a steady state, in which every further segment costs the same.
            before, earlier, _ = self._simulate(nbytes, segments, few // 2)
            more = (segments - few) / (few - few // 2)
            seconds += (seconds - before) * more
            finish = [f + (f - e) * more for f, e in zip(finish, earlier, strict=True)]
        assert n >= 1
        return self._outcome(nbytes, seconds, steps, segments, extrapolated, finish)

    def _simulate(self, nbytes: int, segments: int, run: int) -> tuple[float, list[float], int]:
        """The first `run` of `segments` segments."""
        traffic, network = self.traffic, self._network
        route = traffic.table[4]
        header = (traffic.routes.message_s * self._bottleneck)[route] * traffic.weight
        scale = nbytes / segments
        slower = network.slower if len(network.slower) == traffic.ranks else np.ones(traffic.ranks)
        assert len(slower) == traffic.ranks
        seconds, finish, steps, _ = _core.simulate(
            messages=traffic.table,
            amounts=np.stack(
                [traffic.sent * scale + header, traffic.combined * scale, traffic.weight]
            ),
            routes=self._routes,
            capacity=network.capacity,
            combine_s_byte=network.combine_s_byte[: traffic.ranks],
            late_s=network.late_s[: traffic.ranks],
            segments=run,
            lanes=self.topology.engine.lanes,
            slots=self.topology.engine.slots,
        )
        return seconds, list(finish), steps

    def _outcome(
        self,
        nbytes: int,
        seconds: float,
        steps: int,
        segments: int,
        extrapolated: bool,
        finish: Sequence[float],
    ) -> Outcome:
        return Outcome(
            self.algorithm,
            self.collective,
            nbytes,
            self._network.nranks,
            self.topology.nodes,
            seconds,
            steps,
            segments,
            extrapolated,
            self.method,
            self._busy(nbytes),
            tuple(finish),
        )

    @functools.cached_property
    def _carried(self) -> Floats:
        """By link: what it carries, in units of the vector."""
        carried = np.zeros(len(self._network.capacity))
        by_route = np.bincount(
            self.traffic.table[4], weights=self.traffic.sent, minlength=len(self._links)
        )
        for hop in range(self._links.shape[1]):
            real = self._links[:, hop] >= 0
            np.add.at(carried, self._links[real, hop], by_route[real])
        return carried

    def _busy(self, nbytes: int) -> tuple[Busy, ...]:
        network = self._network
        found: list[Busy] = []
        for name, links in network.links_by_kind():
            carried = self._carried[links] * nbytes
            usable = network.capacity[links] > 0
            need = np.where(usable, carried / np.where(usable, network.capacity[links], 1), 0)
            at = int(need.argmax())
            if carried[at] > 0:
                label = network.label(int(links[at]))
                if self.traffic.times > 1:
                    label = label.replace(" of ", " of every ", 1).partition(",")[0]
                found.append(Busy(name, label, float(carried[at]), float(need[at])))
        return tuple(sorted(found, key=lambda busy: -busy.seconds))


@functools.lru_cache(maxsize=32)
def _network(topology: Topology) -> Network:
    return Network(topology)


def simulate(
    algorithm: str,
    collective: str,
    nbytes: int,
    topology: Topology,
    *,
    root: int = 0,
    symmetric: bool | None = None,
) -> Outcome:
    """Simulates a call on all GPUs of `topology`.

    algorithm  a registered one, or a composition such as "hierarchical(direct_two_shot, ring)"
    nbytes     of the whole vector, or of all blocks of one rank together
    symmetric  True: one node stands for all; False: rank by rank; None: as is exact, or possible

    Raises UnsupportedError where the algorithm cannot run there, TopologyError where links are
    missing, ValueError for unknown names and sizes below 0.
    """
    size = checked_bytes(nbytes, "nbytes")
    return Simulator(algorithm, collective, topology, root=root, symmetric=symmetric).run(size)


def candidates(collective: str, topology: Topology) -> list[str]:
    """The algorithms that are worth a comparison there: all that can run, and on several nodes of
    several GPUs the compositions with each algorithm between nodes.
    """
    n, nodes = topology.nranks, topology.nodes
    node = topology.nodes_of_ranks if nodes > 1 else []
    names = [a.name for a in algorithms() if a.name != "hierarchical"]
    if nodes > 1 and n > nodes:
        names += [f"hierarchical(direct_two_shot, {name})" for name in names]
    return [name for name in names if not why_unsupported(name, collective, n, node=node)]
