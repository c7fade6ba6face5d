"""The links of a topology, one by one, and the ways between ranks. All in arrays, since there may
be a million pairs of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError, TopologyError
from .topology import Link, Topology

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_UP, _DOWN = 0, 1


class Routes(NamedTuple):
    """Ways of messages. Row i of `links` holds the links of way i, and -1 after the last.

    latency_s  of the way; message_s that a message takes its bottleneck beside its bytes
    """

    links: npt.NDArray[np.int32]
    latency_s: Floats
    message_s: Floats


class _Way(NamedTuple):
    """Links that lead from a GPU up to a kind of device."""

    target: str
    links: tuple[Link, ...]


@dataclass(frozen=True)
class _Kind:
    """The links of one kind: those up are numbered from `first` on, those down follow."""

    link: Link
    first: int
    count: int
    rank_link: Ints  # by rank: which of them is on its way up


class Network:
    """The links of a topology, with capacities, and ways between ranks."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.nranks = topology.nranks
        counts = np.array(topology.counts)
        self.node: Ints = np.repeat(np.arange(topology.nodes), counts)
        self.local: Ints = np.arange(self.nranks) - np.repeat(np.cumsum(counts) - counts, counts)
        self._instance = self._number_devices()
        self._kinds = self._number_links()
        total = sum(2 * kind.count for kind in self._kinds.values())
        self.capacity: Floats = np.zeros(total)
        for kind in self._kinds.values():
            self.capacity[kind.first : kind.first + 2 * kind.count] = np.tile(
                self._bandwidth(kind), 2
            )
        self.combine_s_byte: Floats = np.full(
            self.nranks, 1 / topology.combine if topology.combine else 0.0
        )
        self.late_s: Floats = np.zeros(self.nranks)
        self.slower: Floats = np.ones(self.nranks)
        self._apply_faults()
        self._ways = self._find_ways()

    # ---- devices and links ----------------------------------------------------------------------

    def _number_devices(self) -> dict[str, Ints]:
        """By kind of device: which one serves each rank."""
        found: dict[str, Ints] = {}
        for device in self.topology.devices:
            zero = np.zeros(self.nranks, dtype=np.int64)
            node, part = zero, zero
            if device.unit == "gpu":
                node, part = self.node, self.local // device.count
            elif device.unit == "node":
                node = self.node // device.count
            if device.rails:
                below = next(d for d in self.topology.devices if d.name == device.rails)
                part = self.local // below.count
            key = node * (self.nranks + 1) + part
            found[device.name] = np.unique(key, return_inverse=True)[1].astype(np.int64)
        return found

    def _number_links(self) -> dict[str, _Kind]:
        kinds: dict[str, _Kind] = {}
        first = 0
        for link in self.topology.links:
            below, above = self._instance[link.source], self._instance[link.target]
            count = int(below.max()) + 1
            owner = np.full(count, -1, dtype=np.int64)
            owner[below] = above
            if not np.array_equal(owner[below], above):
                raise ConfigError(
                    f"{self.topology.file}, line {link.line}: link {link.name} leads from one "
                    f"{link.source} to several {link.target}; a device has one above it by each "
                    f"link, so make {link.target} serve at least what a {link.source} serves"
                )
            kinds[link.name] = _Kind(link, first, count, below)
            first += 2 * count
        return kinds

    def _from_below(self, device: str, each: Callable[[_Kind], Floats]) -> Floats:
        """By device of a kind: the sum of what the links that come up to it carry."""
        total = np.zeros(int(self._instance[device].max()) + 1)
        for kind in self._kinds.values():
            if kind.link.target == device:
                pairs = np.unique(np.stack([kind.rank_link, self._instance[device]]), axis=1)
                np.add.at(total, pairs[1], each(kind)[pairs[0]])
        return total

    def _bandwidth(self, kind: _Kind) -> Floats:
        """By link of a kind, one way."""
        link = kind.link
        if not link.oversubscription:
            return np.full(kind.count, link.bandwidth)
        below = self._from_below(link.source, self._bandwidth)
        if not below.all():
            raise ConfigError(
                f"{self.topology.file}, line {link.line}: link {link.name} has oversubscription, "
                f"but no link comes up to a {link.source}; give its bandwidth"
            )
        return below * self._unfilled(link.source) / link.oversubscription

    def _unfilled(self, name: str) -> Floats:
        """By device of a kind: the nodes that one is for, over those that it has. The last switch
        of a row has as many links up as the others.
        """
        device = next(d for d in self.topology.devices if d.name == name)
        mine = self._instance[name]
        if device.unit != "node":
            return np.ones(int(mine.max()) + 1)
        pairs = np.unique(np.stack([mine, self.node]), axis=1)
        return device.count / np.bincount(pairs[0])

    def _apply_faults(self) -> None:
        for fault in self.topology.faults:
            rank = int(np.flatnonzero((self.node == fault.node) & (self.local == fault.gpu))[0])
            if not fault.link:
                self.slower[rank] *= fault.slower
                self.combine_s_byte[rank] *= fault.slower
                self.late_s[rank] += fault.late_s
                continue
            kind = self._kinds[fault.link]
            at = kind.first + int(kind.rank_link[rank])
            for link in (at, at + kind.count):
                self.capacity[link] = 0 if fault.broken else self.capacity[link] / fault.slower

    def label(self, link: int) -> str:
        """What a link is called: "ndr of nic 3, up"."""
        for kind in self._kinds.values():
            if kind.first <= link < kind.first + 2 * kind.count:
                which, way = (link - kind.first) % kind.count, (link - kind.first) // kind.count
                return f"{kind.link.name} of {kind.link.source} {which}, {('up', 'down')[way]}"
        raise ValueError(f"there is no link {link}")

    def links_by_kind(self) -> list[tuple[str, Ints]]:
        """Name and numbers of the links of each kind."""
        return [
            (name, np.arange(kind.first, kind.first + 2 * kind.count))
            for name, kind in self._kinds.items()
        ]

    def of_one_node(self, link: int) -> int | None:
        """The link of node 0 that is like this one; None for a link of several nodes."""
        for kind in self._kinds.values():
            if kind.first <= link < kind.first + 2 * kind.count:
                device = next(d for d in self.topology.devices if d.name == kind.link.source)
                nodes = device.count if device.unit == "node" else 1
                if device.unit == "all" or (nodes > 1 and self.topology.nodes > 1):
                    return None
                each = kind.count // self.topology.nodes
                which, way = (link - kind.first) % kind.count, (link - kind.first) // kind.count
                return kind.first + way * kind.count + which % each
        raise ValueError(f"there is no link {link}")

    def never_full(self) -> npt.NDArray[np.bool_]:
        """By link: True if all that can come to it from below, or leave it there, fits at once."""
        free = np.zeros(len(self.capacity), dtype=bool)
        for kind in self._kinds.values():
            if kind.link.source == "gpu":
                continue
            for first in (kind.first, kind.first + kind.count):
                arriving = self._from_below(kind.link.source, self._widest)
                mine = slice(first, first + kind.count)
                free[mine] = arriving <= self.capacity[mine] * (1 + 1e-9)
        return free

    def _widest(self, kind: _Kind) -> Floats:
        both = self.capacity[kind.first : kind.first + 2 * kind.count]
        return both.reshape(2, kind.count).max(axis=0)

    # ---- ways -----------------------------------------------------------------------------------

    def _find_ways(self) -> list[_Way]:
        """From a GPU up to each kind of device, the shortest first."""
        found = [_Way("gpu", ())]
        for way in found:
            for link in self.topology.links:
                if link.source == way.target:
                    found.append(_Way(link.target, (*way.links, link)))
        return sorted(found[1:], key=lambda way: len(way.links))

    def _climb(self, way: _Way, ranks: Ints, direction: int) -> Ints:
        """Links by hop and rank: up, in the order of climbing, or down, in that of descending."""
        rows = []
        for link in way.links:
            kind = self._kinds[link.name]
            rows.append(kind.first + direction * kind.count + kind.rank_link[ranks])
        if direction == _DOWN:
            rows.reverse()
        return np.array(rows, dtype=np.int64).reshape(len(rows), len(ranks))

    def routes(self, src: Ints, dst: Ints) -> Routes:
        """The way of each pair. Broken links are gone round, over another GPU of the sender's node
        where nothing else is left. Raises TopologyError where no way is left.
        """
        longest = 2 * max(len(way.links) for way in self._ways)
        links = np.full((len(src), 2 * longest), -1, dtype=np.int32)
        latency, message = np.zeros(len(src)), np.zeros(len(src))
        self._direct(src, dst, links, latency, message)
        missing = np.flatnonzero(links[:, 0] < 0)
        if len(missing):
            self._relay(src, dst, missing, links, latency, message)
        message *= self.slower[src]
        return Routes(links, latency, message)

    def _direct(
        self,
        src: Ints,
        dst: Ints,
        links: npt.NDArray[np.int32],
        latency: Floats,
        message: Floats,
    ) -> None:
        open_ = np.ones(len(src), dtype=bool)
        for way in self._ways:
            meets = self._instance[way.target]
            chosen = np.flatnonzero(open_ & (meets[src] == meets[dst]))
            if not len(chosen):
                continue
            hops = np.concatenate(
                [self._climb(way, src[chosen], _UP), self._climb(way, dst[chosen], _DOWN)]
            )
            works = (self.capacity[hops] > 0).all(axis=0)
            chosen, hops = chosen[works], hops[:, works]
            links[chosen, : len(hops)] = hops.T
            latency[chosen] = 2 * sum(link.latency_s for link in way.links)
            message[chosen] = sum(link.message_s for link in way.links)
            open_[chosen] = False

    def _relay(
        self,
        src: Ints,
        dst: Ints,
        missing: Ints,
        links: npt.NDArray[np.int32],
        latency: Floats,
        message: Floats,
    ) -> None:
        """Ways over another GPU of the sender's node, first the one in the receiver's place (as
        NCCL's PXN goes), then over one of the receiver's node.
        """
        first_of = np.searchsorted(self.node, np.arange(self.topology.nodes))
        counts = np.array(self.topology.counts)
        for side in (src, dst):
            for turn in range(int(counts.max())):
                if not len(missing):
                    return
                s, d = src[missing], dst[missing]
                home = self.node[side[missing]]
                between = first_of[home] + (self.local[d] + turn) % counts[home]
                fits = (between != s) & (between != d)
                if not fits.any():
                    continue
                at = missing[fits]
                a, b = self._alone(s[fits], between[fits]), self._alone(between[fits], d[fits])
                works = (a.links[:, 0] >= 0) & (b.links[:, 0] >= 0)
                for i in np.flatnonzero(works):
                    way = [*a.links[i][a.links[i] >= 0], *b.links[i][b.links[i] >= 0]]
                    links[at[i], : len(way)] = way
                latency[at[works]] = a.latency_s[works] + b.latency_s[works]
                message[at[works]] = a.message_s[works] + b.message_s[works]
                missing = missing[links[missing, 0] < 0]
        if len(missing):
            self._no_way(int(src[missing[0]]), int(dst[missing[0]]))

    def _alone(self, src: Ints, dst: Ints) -> Routes:
        longest = 2 * max(len(way.links) for way in self._ways)
        links = np.full((len(src), longest), -1, dtype=np.int32)
        latency, message = np.zeros(len(src)), np.zeros(len(src))
        self._direct(src, dst, links, latency, message)
        return Routes(links, latency, message)

    def _no_way(self, src: int, dst: int) -> None:
        places = " and ".join(
            f"rank {r} (GPU {self.local[r]} of node {self.node[r]})" for r in (src, dst)
        )
        broken = [f for f in self.topology.faults if f.broken]
        where = self.topology.file
        if broken:
            lines = ", ".join(str(f.line) for f in broken)
            raise TopologyError(
                f"{where}, line {lines}: with these links broken no way is left between {places}; "
                "add links, or take the ranks out"
            )
        tops = {link.target: link for link in self.topology.links}
        highest = tops[self._ways[-1].target]
        raise TopologyError(
            f"{where}, line {highest.line}: no link joins {places}; the last one, "
            f"{highest.name}, ends at {highest.target}: add the missing link, up to a device that "
            "serves all"
        )
