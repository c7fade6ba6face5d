"""What a call has to do, by its schedule and by what runs it: what the cost model multiplies.

Steps are messages on the longest chain, bytes those of the rank that sends or combines most; all
come from `Schedule.cost`. Of gather, where the root receives what all others send, the bytes of the
rank that receives most count, where they are more. The kind of a call says whose figures count.

On hosts: "direct" for the direct algorithms of ranks that share memory, "assembled" for small calls
that travel with the agreement of ranks that do not, "steps" for all else, which the general engine
runs. A message longer than a slice goes as several, of which all but the first count as slices.
What calls of one kind have in common on given ranks, as the agreement of "steps" has, is in the
entry that was fitted to these; where nothing was, `agreement` says its steps.

On GPUs of one node: a kind for each way of `device.device_way`, with the bytes that its kernel
really sends, flags included. All that a rank sends leaves by one port, and what it receives comes
by the same port's other direction, so the larger of the two counts, of the busiest rank.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from ..schedule import Schedule, is_written, schedule
from . import ASSEMBLED, ASSEMBLED_BY_NODE, ASSEMBLED_BY_TWO, BY_NODE, WHOLE, segment_bytes
from .device import SENT_FACTOR, device_way

# What carries data between ranks whose arrays are on GPUs of one node: ordinary arrays, or
# symmetric buffers.
GPU = "cuda"
GPU_SYMMETRIC = "cuda symmetric"

_DIRECT = ("direct_one_shot", "direct_two_shot")
# Rounds are looked at one by one, in Python, for up to so many ranks. Beyond, all steps are taken
# to cross nodes, and what a rank sends to be sent within its node too.
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


def work_of(
    algorithm: str,
    collective: str,
    nbytes: int,
    nodes: Sequence[int],
    transport: str,
    root: int = 0,
) -> tuple[str, Work]:
    """The kind of a call, which says whose figures count, and what it has to do."""
    if transport in (GPU, GPU_SYMMETRIC):
        return _gpu_work(algorithm, collective, nbytes, nodes, transport == GPU_SYMMETRIC, root)
    assembled = _assembled(algorithm, collective, nbytes, nodes, transport)
    if assembled is not None:
        return "assembled", assembled
    if transport == "shm+mpi":
        near, far = shares(algorithm, collective, tuple(nodes), root)
    else:
        near, far = _whole(algorithm, collective, tuple(nodes), root), Share(0, 0, 0)
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


def _gpu_work(
    algorithm: str,
    collective: str,
    nbytes: int,
    nodes: Sequence[int],
    symmetric: bool,
    root: int,
) -> tuple[str, Work]:
    """`work_of` for arrays on GPUs, whose ranks are all on one node."""
    alone = (0,) * len(nodes)
    way = device_way(algorithm, collective, nbytes, len(nodes), symmetric)
    near, _ = shares(algorithm, collective, alone, root)
    of = _received if is_written(algorithm) else _cached_received
    crossing = max(near.sent, of(algorithm, collective, len(nodes), root))
    sent = crossing * nbytes * SENT_FACTOR[way]
    return way, Work(near.steps, 0, 0, sent, near.reduced * nbytes, 0)


def _received(algorithm: str, collective: str, nranks: int, root: int) -> float:
    """What the rank that receives most receives, in units of the whole vector."""
    built = schedule(algorithm, collective, nranks, root=root)
    chunks = nranks if collective == "all_to_all" else max(1, built.nchunks)
    received = [0] * nranks
    for transfer in (t for transfers in built.rounds for t in transfers):
        received[transfer.dst] += 1
    return max(received) / chunks


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
    one_way = nbytes if collective in WHOLE else nbytes / 2  # of two ranks
    if algorithm in _DIRECT and n == count == len(set(nodes)) == 2:
        if 2 * one_way > ASSEMBLED_BY_TWO:
            return None
        brought = 2 * one_way
    elif algorithm in _DIRECT and total <= ASSEMBLED:
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
    near, far = agreement(nodes, transport)
    combined = float(brought) if collective in ("all_reduce", "reduce", "reduce_scatter") else 0.0
    crossing = brought * (count - 1) / count
    if transport == "mpi":
        return Work(near, 0, 0, crossing, combined, 0)
    return Work(near, far, 0, brought * (local - 1), combined, crossing)


def agreement(nodes: Sequence[int], transport: str) -> tuple[float, float]:
    """Steps, within nodes and between them, until ranks that do not all share memory know that all
    mean the same call (csrc/assembly.hpp): "assembled" calls are made of these, and "steps" begin
    behind them.
    """
    if transport not in ("mpi", "shm+mpi"):
        return 0.0, 0.0
    n = len(nodes)
    if transport == "mpi":
        return float(math.ceil(math.log2(n))), 0.0
    within = 2.0 if n > len(set(nodes)) else 0.0
    return within, float(math.ceil(math.log2(len(set(nodes)))))


def shares(
    algorithm: str, collective: str, nodes: tuple[int, ...], root: int = 0
) -> tuple[Share, Share]:
    """What goes over links within a node, and between nodes."""
    if is_written(algorithm):  # may be registered anew under the same name
        return _shares(algorithm, collective, nodes, root)
    return _cached_shares(algorithm, collective, nodes, root)


def _whole(algorithm: str, collective: str, nodes: tuple[int, ...], root: int) -> Share:
    """What goes over links that are all of one kind."""
    built = schedule(algorithm, collective, len(nodes), root=root, node=_named(nodes))
    cost, sent = built.cost(), 0.0
    if collective == "gather":
        sent, _ = _arriving(built, [0] * len(nodes))
    return Share(cost["steps"], max(sent, cost["sent_max"]), cost["reduced_max"])


def _arriving(built: Schedule, nodes: Sequence[int]) -> tuple[float, float]:
    """What the rank that receives most receives from its node, and the node that receives most from
    others, in units of the whole vector.
    """
    within, entering = [0] * len(nodes), dict.fromkeys(nodes, 0)
    for t in (t for transfers in built.rounds for t in transfers):
        near = nodes[t.src] == nodes[t.dst]
        within[t.dst] += near
        entering[nodes[t.dst]] += not near
    chunks = max(1, built.nchunks)
    return max(within) / chunks, max(entering.values()) / chunks


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
    if not _named(nodes):
        return _whole(algorithm, collective, nodes, root), Share(0, 0, 0)
    built = schedule(algorithm, collective, len(nodes), root=root, node=nodes)
    cost = built.cost()
    crossing, sent = cost["steps"], cost["sent_max"]
    if len(nodes) <= _COUNTED_RANKS:
        rounds = built.rounds
        far = sum(any(nodes[t.src] != nodes[t.dst] for t in r) for r in rounds)
        crossing = min(crossing, far)
        within = [0] * len(nodes)
        for t in (t for transfers in rounds for t in transfers):
            within[t.src] += nodes[t.src] == nodes[t.dst]
        chunks = len(nodes) if collective == "all_to_all" else built.nchunks
        sent = max(within) / max(1, chunks)
    leaving = cost["internode_sent_max"]
    if collective == "gather":
        received, entering = _arriving(built, nodes)
        sent, leaving = max(sent, received), max(leaving, entering)
    return Share(cost["steps"] - crossing, sent, cost["reduced_max"]), Share(crossing, leaving, 0)


_cached_shares = functools.lru_cache(maxsize=512)(_shares)
_cached_received = functools.lru_cache(maxsize=512)(_received)
_cached_sizes = functools.lru_cache(maxsize=512)(_chunks_and_messages)
