"""Large worlds by symmetry: one node stands for all.

Where all nodes are alike and an algorithm does the same on each of them, a rank of another node is
at every moment where the rank in the same place of this node is. So the messages of one node's
ranks are enough: what a rank sends to another node arrives, at the same moment, from another node.
A node of 8 GPUs then takes as long to simulate as 8 ranks, whatever the number of nodes.

That is exact where links above the nodes are never full and all ways between nodes take as long.
It is approximate in two cases. Ways of several latencies are all taken for the longest. And where
the direct algorithms combine what comes from several nodes, the messages of all other nodes are
combined as one that comes last (within 5 % in the tests). Either way ranks are taken to be at the
same point at all moments; where segments and lanes overlap they drift apart, and contend less well:
bruck on 64 nodes takes 12 % longer than this says, and halving_doubling may take 9 % longer.

Ring, bruck, direct_one_shot and direct_two_shot go on by a shift of all ranks, for any number of
them. halving_doubling exchanges with the rank that differs in one binary digit, so it is symmetric
for powers of two only. hierarchical is where its parts are; it leaves each rank on its rail.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..schedule import schedule
from .network import Floats, Network, Routes
from .traffic import Traffic, parts_of


class _Rows(NamedTuple):
    """Messages of one node's ranks; `far` where the receiver is on another node. `peer` tells
    receivers in the same place of different nodes apart.
    """

    round: npt.NDArray[np.int64]
    src: npt.NDArray[np.int64]
    dst: npt.NDArray[np.int64]
    far: npt.NDArray[np.bool_]
    sent: Floats
    combined: Floats
    weight: Floats
    peer: npt.NDArray[np.int64]


def _rows(*columns: npt.ArrayLike, peer: npt.ArrayLike = 0) -> _Rows:
    round_, src, dst, far, sent, combined, weight, who = np.broadcast_arrays(*columns, peer)
    return _Rows(
        round_.ravel().astype(np.int64),
        src.ravel().astype(np.int64),
        dst.ravel().astype(np.int64),
        far.ravel().astype(bool),
        sent.ravel().astype(float),
        combined.ravel().astype(float),
        weight.ravel().astype(float),
        who.ravel().astype(np.int64),
    )


def _join(parts: list[_Rows]) -> _Rows:
    """One after the other: the rounds of each begin where those before end."""
    moved, begin = [], 0
    for part in parts:
        moved.append(part._replace(round=part.round + begin))
        begin += int(part.round.max()) + 1 if len(part.round) else 0
    return _Rows(*(np.concatenate(column) for column in zip(*moved, strict=True)))


def _shift(
    local: npt.NDArray[np.int64], by: object, nodes: int, each: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Where the rank `by` places on is on its node, and whether that is another node."""
    place = local + np.asarray(by)
    return place % each, (place // each) % nodes != 0


def _ring(collective: str, nodes: int, each: int) -> _Rows | None:
    n = nodes * each
    local = np.arange(each)
    dst, far = _shift(local, 1, nodes, each)
    phases = {"all_reduce": (1, 0), "reduce_scatter": (1,), "all_gather": (0,)}.get(collective)
    if phases is None:
        return None
    rounds = np.arange(n - 1)[:, None]
    return _join([_rows(rounds, local, dst, far, 1 / n, reduce / n, 1) for reduce in phases])


def _bruck(collective: str, nodes: int, each: int) -> _Rows | None:
    if collective not in ("all_gather", "all_to_all"):
        return None
    n = nodes * each
    local = np.arange(each)
    parts, distance = [], 1
    while distance < n:
        dst, far = _shift(local, distance, nodes, each)
        blocks = min(distance, n - distance)
        if collective == "all_to_all":
            full, rest = divmod(n, 2 * distance)
            blocks = full * distance + max(0, rest - distance)
        parts.append(_rows(0, local, dst, far, blocks / n, 0, 1, peer=distance))
        distance *= 2
    return _join(parts)


def _direct(sent: float, combined: float, nodes: int, each: int) -> _Rows:
    """One round in which everybody sends to everybody else."""
    src, dst = (axis.ravel() for axis in np.meshgrid(*2 * [np.arange(each)], indexing="ij"))
    near = src != dst
    parts = [_rows(0, src[near], dst[near], False, sent, combined, 1)]
    if nodes > 1:
        m = nodes - 1
        parts.append(_rows(0, src, dst, True, m * sent, m * combined, m))
    return _Rows(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _direct_one_shot(collective: str, nodes: int, each: int) -> _Rows | None:
    n = nodes * each
    if collective == "all_reduce":
        return _direct(1, 1, nodes, each)
    if collective in ("all_gather", "all_to_all"):
        return _direct(1 / n, 0, nodes, each)
    if collective == "reduce_scatter":
        return _direct(1 / n, 1 / n, nodes, each)
    return None


def _direct_two_shot(collective: str, nodes: int, each: int) -> _Rows | None:
    if collective != "all_reduce":
        return _direct_one_shot(collective, nodes, each)
    n = nodes * each
    return _join([_direct(1 / n, 1 / n, nodes, each), _direct(1 / n, 0, nodes, each)])


def _halving_doubling(collective: str, nodes: int, each: int) -> _Rows | None:
    n = nodes * each
    if n & (n - 1) or n < 2:
        return None
    local = np.arange(each)
    halving: list[_Rows] = []
    doubling: list[_Rows] = []
    distance = n // 2
    while distance:
        far = distance >= each
        dst = local if far else local ^ distance
        halving.append(_rows(0, local, dst, far, distance / n, distance / n, 1, peer=distance))
        doubling.insert(0, _rows(0, local, dst, far, distance / n, 0, 1, peer=distance))
        distance //= 2
    parts = {"all_reduce": halving + doubling, "reduce_scatter": halving, "all_gather": doubling}
    return _join(parts[collective]) if collective in parts else None


_FORMS = {
    "ring": _ring,
    "bruck": _bruck,
    "direct_one_shot": _direct_one_shot,
    "direct_two_shot": _direct_two_shot,
    "halving_doubling": _halving_doubling,
}


def _within(algorithm: str, collective: str, each: int) -> _Rows:
    """The schedule's own messages, within a node."""
    if each < 2:
        empty = np.zeros(0)
        return _rows(empty, empty, empty, empty, empty, empty, empty)
    built = schedule(algorithm, collective, each)
    table = built._core.messages()
    return _rows(
        table[0], table[1], table[2], False, table[4] / built.nchunks, table[5] / built.nchunks, 1
    )


def _hierarchical(intra: str, inter: str, collective: str, nodes: int, each: int) -> _Rows | None:
    form = _FORMS.get(inter)
    if form is None or collective not in ("all_reduce", "reduce_scatter", "all_gather"):
        return None
    rail = form(collective, nodes, 1)
    if rail is None:
        return None
    local = np.arange(each)
    columns = [column[:, None] for column in rail]
    sent, combined = (c / each for c in columns[4:6])
    between = _rows(columns[0], local, local, True, sent, combined, columns[6], peer=columns[7])
    parts = [between]
    if collective != "all_gather":
        parts.insert(0, _within(intra, "reduce_scatter", each))
    if collective != "reduce_scatter":
        parts.append(_within(intra, "all_gather", each))
    return _join(parts)


def why_not(algorithm: str, network: Network) -> str:
    """Why the world is not symmetric; "" if it may be."""
    topology = network.topology
    if topology.faults:
        return "links or GPUs have faults"
    if len(set(topology.counts)) > 1:
        return "the nodes are not alike"
    if parts_of(algorithm) is None and algorithm not in _FORMS:
        return f"{algorithm} does not do the same on all nodes"
    return ""


def from_symmetry(algorithm: str, collective: str, network: Network) -> Traffic | None:
    """The messages of one node, which stand for those of all; None where that does not hold."""
    if why_not(algorithm, network):
        return None
    topology = network.topology
    nodes, each = topology.nodes, topology.counts[0]
    parts = parts_of(algorithm)
    if parts is not None and nodes > 1:
        rows = _hierarchical(*parts, collective, nodes, each)
    elif parts is not None or network.nranks < 2:
        return None
    else:
        rows = _FORMS[algorithm](collective, nodes, each)
    if rows is None:
        return None
    found = _routes(rows, network)
    if found is None:
        return None
    routes, route, exact = found
    zero = np.zeros(len(route), dtype=np.int64)
    table = np.stack([rows.round, rows.src, rows.dst, zero, route]).astype(np.int32)
    return Traffic(table, rows.sent, rows.combined, rows.weight, routes, each, nodes, exact)


def _combines_several(rows: _Rows, each: int) -> bool:
    """True if a rank combines several messages of one round, some of them from other nodes."""
    combined = rows.combined > 0
    receiver = rows.round[combined] * each + rows.dst[combined]
    _, at, count = np.unique(receiver, return_inverse=True, return_counts=True)
    several = (count[at.ravel()] > 1) | (rows.weight[combined] > 1)
    return bool((several & rows.far[combined]).any())


def _routes(rows: _Rows, network: Network) -> tuple[Routes, npt.NDArray[np.int64], bool] | None:
    """Ways on the links of node 0 alone; None where a link of several nodes may be full."""
    nodes, each = network.topology.nodes, network.topology.counts[0]
    key = ((rows.peer * rows.far * 2 + rows.far) * each + rows.src) * each + rows.dst
    keys, route = np.unique(key, return_inverse=True)
    far, src, dst = keys // each**2 % 2 == 1, keys // each % each, keys % each
    links = np.full((len(keys), 0), -1, dtype=np.int32)
    latency, message = np.zeros(len(keys)), np.zeros(len(keys))
    exact = not _combines_several(rows, each)
    others = np.unique(np.minimum(nodes - 1, 2 ** np.arange(int(np.log2(nodes)) + 2)))
    others = np.unique(np.concatenate([others, np.arange(1, min(nodes, 64))]))
    for turn, other in enumerate([int(o) for o in others if o > 0] or [0]):
        there = np.where(far, dst + other * each, dst)
        found = network.routes(src, there)
        exact = exact and (turn == 0 or bool(np.allclose(found.latency_s, latency)))
        slower = found.latency_s >= latency
        latency = np.maximum(latency, found.latency_s)
        message = np.maximum(message, found.message_s)
        if slower.all() or not links.shape[1]:
            links = found.links
    free = network.never_full()
    folded = np.full_like(links, -1)
    for i, row in enumerate(links):
        kept: list[int] = []
        for link in row[row >= 0]:
            home = network.of_one_node(int(link))
            if home is not None:
                kept.append(home)
            elif not free[link]:
                return None
        folded[i, : len(kept)] = kept
    return Routes(folded, latency, message), route.ravel(), exact
