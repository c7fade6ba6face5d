"""What a step of data-parallel training takes: computing, communication beside it, and what of that
is left exposed.

Computing: 6 · params · tokens operations for a micro-batch (2 forward, 4 backward), at `mfu` of the
GPU's peak, in `layers` equal layers. With `jitter` a step waits for the slowest of n ranks, whose
time exceeds the mean by jitter · sqrt(2 ln n), the expected largest of n normal deviations.

Communication goes on beside computing, one collective after the other, each as long as the
simulation of the fastest algorithm says:

    ddp      all_reduce of each bucket of gradients when it is full
    zero-1   reduce_scatter of each bucket in the last micro-batch; all_gather of the parameters
             after the step
    zero-2   the same, but each micro-batch reduces, since only a shard of the gradients is kept
    zero-3   parameters are gathered layer by layer, forward and again backward, one layer ahead;
             reduce_scatter of each layer's gradients
    hybrid   zero-3 within a node, and all_reduce of the shards between nodes, on links of its own

Sources: S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
VLDB 13 (2020), doi:10.14778/3415478.3415530 (buckets, overlap); S. Rajbhandari et al., "ZeRO:
Memory Optimizations Toward Training Trillion Parameter Models", SC 2020,
doi:10.1109/SC41405.2020.00024 (stages 1-3, and that stage 3 sends 1.5 times as much); J. Kaplan et
al., arXiv:2001.08361 (6 · params · tokens); Y. Zhao et al., "PyTorch FSDP", VLDB 16 (2023),
doi:10.14778/3611540.3611569 (hybrid).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..bench.report import Column, Table, number
from ..errors import ConfigError, UnsupportedError, did_you_mean
from .quantities import seconds_text
from .simulator import Simulator, candidates
from .topology import Fault, Topology, with_ranks

_LARGE = 128
SHARDINGS = ("ddp", "zero-1", "zero-2", "zero-3", "hybrid")


@dataclass(frozen=True)
class Job:
    """What is trained.

    params         number of parameters
    tokens         of a micro-batch of one GPU
    accumulate     micro-batches of a step
    layers         layers of equal size
    bucket_bytes   of a bucket of gradients
    mfu            share of a GPU's peak that computing alone reaches, 0 < mfu <= 1
    element_bytes  of a gradient or parameter on the wire
    jitter         standard deviation of a rank's computing time, as a share of it
    overlap        False: communication begins when computing ends
    algorithm      for all collectives; "": the fastest for each
    """

    params: float
    tokens: float = 4096
    accumulate: int = 1
    layers: int = 32
    bucket_bytes: float = 25 * 2.0**20
    mfu: float = 0.5
    element_bytes: int = 2
    jitter: float = 0.0
    overlap: bool = True
    algorithm: str = ""


class Step(NamedTuple):
    """A step of training; times in seconds.

    compute_s        of one GPU alone
    waiting_s        for the slowest rank
    communication_s  of all collectives, if nothing else went on
    exposed_s        of them that computing does not hide
    efficiency       time of one GPU alone, over that of a step
    """

    sharding: str
    ranks: int
    compute_s: float
    waiting_s: float
    communication_s: float
    exposed_s: float

    @property
    def seconds(self) -> float:
        """Of the step."""
        return self.compute_s + self.waiting_s + self.exposed_s

    @property
    def efficiency(self) -> float:
        """Throughput of a GPU, over that of one GPU alone."""
        return self.compute_s / self.seconds


class _Network:
    """Seconds of collectives on a topology."""

    def __init__(self, topology: Topology, algorithm: str) -> None:
        self._topology = topology
        self._algorithm = algorithm
        self._simulators: dict[tuple[str, str], list[Simulator]] = {}
        self._known: dict[tuple[str, int, str], float] = {}

    def seconds(self, collective: str, nbytes: float, group: str = "all") -> float:
        """Of a call of all ranks, of those of each node, or of those in one place of each node."""
        size = max(1, round(nbytes))
        key = (collective, size, group)
        if key not in self._known:
            self._known[key] = min(
                (s.run(size).seconds for s in self._fast(collective, group)), default=0.0
            )
        return self._known[key]

    def _fast(self, collective: str, group: str) -> list[Simulator]:
        key = (collective, group)
        if key not in self._simulators:
            self._simulators[key] = self._make(collective, group)
        return self._simulators[key]

    def _make(self, collective: str, group: str) -> list[Simulator]:
        topology = self._topology
        if group == "node":
            topology = topology.with_nodes(1)
        if group == "rail":
            # The ranks in one place of each node have NICs of their own, or share one: then each
            # has its part of it.
            topology = replace(_one_gpu_a_node(topology), faults=())
        if topology.nranks < 2:
            return []
        names = [self._algorithm] if self._algorithm else _worthwhile(collective, topology)
        made = []
        why = ""
        for name in names:
            try:
                made.append(_simulator(name, collective, topology))
            except UnsupportedError as error:
                why = str(error)
        if not made:
            raise UnsupportedError(
                f"nothing can do {collective} for {topology.nranks} ranks: {why}"
            )
        return made


def _worthwhile(collective: str, topology: Topology) -> list[str]:
    """The algorithms that may win with buckets, without those that send more than is needed."""
    several = topology.nodes > 1 and topology.nranks > topology.nodes
    names = [
        name
        for name in candidates(collective, topology)
        if name.startswith("hierarchical" if several else ("direct_two_shot", "halving", "ring"))
        and ("ring" in name or "halving" in name or not several)
    ]
    return names or candidates(collective, topology)


def _simulator(name: str, collective: str, topology: Topology) -> Simulator:
    """By symmetry in large worlds even where that is approximate: a step has hundreds of calls."""
    if topology.nranks >= _LARGE:
        try:
            return Simulator(name, collective, topology, symmetric=True)
        except UnsupportedError:
            pass
    return Simulator(name, collective, topology)


@functools.lru_cache(maxsize=16)
def _network(topology: Topology, algorithm: str) -> _Network:
    return _Network(topology, algorithm)


def _one_gpu_a_node(topology: Topology) -> Topology:
    """One GPU of each node, whose share of what they have in common it has."""
    each = topology.gpus[0]
    links = []
    for link in topology.links:
        device = next(d for d in topology.devices if d.name == link.source)
        if device.rails:
            device = next(d for d in topology.devices if d.name == device.rails)
        sharing = min(each, device.count) if device.unit == "gpu" else each
        links.append(replace(link, bandwidth=link.bandwidth / sharing))
    return replace(topology, gpus=(1,), links=tuple(links))


def step(job: Job, topology: Topology, ranks: int, sharding: str) -> Step:
    """A step of `job` on so many GPUs of `topology`.

    sharding  "ddp", "zero-1", "zero-2", "zero-3" or "hybrid"

    Raises ConfigError for an unknown sharding, or where the ranks do not fill nodes or the topology
    does not say how fast its GPUs are.
    """
    if sharding not in SHARDINGS:
        raise ConfigError(f"unknown sharding {sharding!r}; {did_you_mean(sharding, SHARDINGS)}")
    if not topology.flops:
        raise ConfigError(
            f"{topology.file}, line 1: {topology.name} does not say how fast its GPUs are; add a "
            "line such as `flops: 989 TFLOP/s`"
        )
    if not 0 < job.mfu <= 1:
        raise ConfigError(f"mfu is {job.mfu}, and must be more than 0 and at most 1")
    sized = with_ranks(topology, ranks)
    micro = 6 * job.params * job.tokens / (topology.flops * job.mfu)
    compute = micro * job.accumulate
    waiting = compute * job.jitter * math.sqrt(2 * math.log(ranks)) if ranks > 1 else 0.0
    slow = _stragglers(sized.faults)
    waiting += compute * (slow - 1)
    network = _network(sized, job.algorithm)
    timeline = _Timeline(job.overlap)
    _FILL[sharding](timeline, job, network, micro, sized)
    exposed = timeline.end() - compute
    return Step(sharding, ranks, compute, waiting, timeline.communication, max(0.0, exposed))


def _stragglers(faults: Sequence[Fault]) -> float:
    return max((f.slower for f in faults if not f.link), default=1.0)


_NEAR, _BETWEEN = 0, 1  # streams of collectives


class _Timeline:
    """Streams: computing, and collectives one after the other; those of rails beside those of
    nodes, since they use other links.
    """

    def __init__(self, overlap: bool) -> None:
        self._overlap = overlap
        self._computed = 0.0  # until when
        self._communicated = [0.0, 0.0]
        self.communication = 0.0
        self._late: list[float] = []  # collectives that wait for the end of computing

    def compute(self, seconds: float, after: float = 0.0) -> float:
        """Computes next, not before `after`; returns when it ends."""
        self._computed = max(self._computed, after) + seconds
        return self._computed

    def communicate(self, seconds: float, after: float = 0.0, stream: int = _NEAR) -> float:
        """A collective, not before `after`; returns when it ends."""
        self.communication += seconds
        self._communicated[stream] = max(self._communicated[stream], after) + seconds
        return self._communicated[stream]

    def hidden(self, seconds: float, after: float, stream: int = _NEAR) -> float:
        """A collective that nothing waits for before the step ends."""
        if self._overlap:
            return self.communicate(seconds, after, stream)
        self.communication += seconds
        self._late.append(seconds)
        return after

    def end(self) -> float:
        """When all is done."""
        return max(self._computed, *self._communicated) + sum(self._late)


def _buckets(job: Job, total: float) -> list[float]:
    """Sizes of the buckets, in bytes."""
    whole = int(total // job.bucket_bytes)
    rest = total - whole * job.bucket_bytes
    return [job.bucket_bytes] * whole + ([rest] if rest >= 1 else [])


def _backward(
    timeline: _Timeline, job: Job, micro: float, reduce: Callable[[float], float] | None
) -> None:
    """Forward and backward of a micro-batch; buckets fill evenly while backward goes on."""
    timeline.compute(micro / 3)
    total = job.params * job.element_bytes
    for size in _buckets(job, total):
        ready = timeline.compute(micro * 2 / 3 * size / total)
        if reduce is not None:
            timeline.hidden(reduce(size), ready)


def _ddp(t: _Timeline, job: Job, network: _Network, micro: float, _: Topology) -> None:
    for i in range(job.accumulate):
        last = i == job.accumulate - 1
        _backward(t, job, micro, (lambda s: network.seconds("all_reduce", s)) if last else None)


def _zero(every: bool) -> Callable[[_Timeline, Job, _Network, float, Topology], None]:
    def fill(t: _Timeline, job: Job, network: _Network, micro: float, _: Topology) -> None:
        for i in range(job.accumulate):
            reduces = every or i == job.accumulate - 1
            _backward(
                t, job, micro, (lambda s: network.seconds("reduce_scatter", s)) if reduces else None
            )
        end = t.end()
        for size in _buckets(job, job.params * job.element_bytes):
            end = t.communicate(network.seconds("all_gather", size), end)

    return fill


def _sharded(group: str) -> Callable[[_Timeline, Job, _Network, float, Topology], None]:
    def fill(t: _Timeline, job: Job, network: _Network, micro: float, sized: Topology) -> None:
        layer = job.params * job.element_bytes / job.layers
        gather = network.seconds("all_gather", layer, group)
        scatter = network.seconds("reduce_scatter", layer, group)
        between = 0.0
        if group == "node" and sized.nodes > 1:
            between = network.seconds("all_reduce", layer / sized.gpus[0], "rail")
        before = ended = 0.0  # when the layer before the last, and the last, were computed
        for i in range(job.accumulate):
            for part in (micro / 3, micro * 2 / 3):
                backward = part > micro / 2
                for _ in range(job.layers):
                    # One layer ahead: the next one is gathered while this one is computed.
                    here = t.communicate(gather, before if t._overlap else ended)
                    before, ended = ended, t.compute(part / job.layers, here)
                    if backward:
                        scattered = t.hidden(scatter, ended)
                        if between and i == job.accumulate - 1:
                            t.hidden(between, scattered, _BETWEEN)

    return fill


_FILL = {
    "ddp": _ddp,
    "zero-1": _zero(False),
    "zero-2": _zero(True),
    "zero-3": _sharded("all"),
    "hybrid": _sharded("node"),
}


def table() -> Table:
    """For rows of `cells`."""
    return Table(
        [
            Column("sharding", "", 8),
            Column("ranks", "", 7),
            Column("step", "", 9),
            Column("computing", "", 9),
            Column("waiting", "", 9),
            Column("comm.", "", 9),
            Column("exposed", "", 9),
            Column("efficiency", "%", 10),
        ]
    )


def cells(step: Step) -> list[str]:
    """A row of `table`."""
    times = (step.seconds, step.compute_s, step.waiting_s, step.communication_s, step.exposed_s)
    return [
        step.sharding,
        str(step.ranks),
        *("0" if t <= 0 else seconds_text(t) for t in times),
        number(step.efficiency * 100, 1),
    ]


__all__ = ["SHARDINGS", "Job", "Step", "cells", "step", "table"]
