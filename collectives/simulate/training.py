"""What a step of data-parallel training takes: computing, communication beside it, and what of that
is left exposed.

Computing: 6 · params · tokens operations for a micro-batch (2 forward, 4 backward), at `mfu` of the
GPU's peak, in `layers` equal layers. With `jitter` a step waits for the slowest of n ranks, whose
time exceeds the mean by jitter times the expected largest of n normal deviations, after Blom about
the quantile (n - 3/8) / (n + 1/4): 1.4 for 8 ranks, 3.2 for 1,024.

Communication goes on beside computing, one collective after the other, each as long as the
simulation of the fastest algorithm says:

    ddp      all_reduce of each bucket of gradients when it is full
    zero-1   reduce_scatter of each bucket; all_gather of the parameters after the step
    zero-2   the same
    zero-3   parameters are gathered layer by layer, forward and again backward, one layer ahead, in
             every micro-batch; reduce_scatter of each layer's gradients
    hybrid   zero-3 within a node, and all_reduce of the shards between nodes, on links of its own

Micro-batches are added up where they are computed and reduced in the last one, as the trainer does
unless it is told reduce_every="micro-batch": then all of them are, under every sharding.

Sources: S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
VLDB 13 (2020), doi:10.14778/3415478.3415530 (buckets, overlap); S. Rajbhandari et al., "ZeRO:
Memory Optimizations Toward Training Trillion Parameter Models", SC 2020,
doi:10.1109/SC41405.2020.00024 (stages 1-3, and that stage 3 sends 1.5 times as much); J. Kaplan et
al., arXiv:2001.08361 (6 · params · tokens); G. Blom, "Statistical Estimates and Transformed
Beta-Variables", 1958 (the largest of n); Y. Zhao et al., "PyTorch FSDP", VLDB 16 (2023),
doi:10.14778/3611540.3611569 (hybrid).
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..bench.report import Column, Table, number
from ..errors import ConfigError, UnsupportedError, did_you_mean
from .quantities import seconds_text
from .simulator import Simulator, candidates
from .topology import Fault, Link, Topology, with_ranks

_LARGE = 128
# What takes as few steps as halving_doubling, where that is too large to be followed.
_INSTEAD = {
    "all_reduce": ("hierarchical(direct_two_shot, double_binary_tree)",),
    "all_gather": ("hierarchical(direct_two_shot, bruck)",),
}
_DIRECT = ("hierarchical(direct_two_shot, direct_two_shot)",)  # few steps for any number of nodes
_RESIDUE = 1e-9  # of a step: what sums of its times are off by is no time
_MOST_CALLS = 1_000_000  # of a step: seconds, and 100 MB
SHARDINGS = ("ddp", "zero-1", "zero-2", "zero-3", "hybrid")
BY_LAYER = ("zero-3", "hybrid")  # others reduce in buckets
REDUCE_EVERY = ("step", "micro-batch")


@dataclass(frozen=True)
class Job:
    """What is trained.

    params         number of parameters
    tokens         of a micro-batch of one GPU
    accumulate     micro-batches of a step
    reduce_every   "step": gradients are reduced in the last micro-batch; "micro-batch": in each
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
    reduce_every: str = "step"
    layers: int = 32
    bucket_bytes: float = 25 * 2.0**20
    mfu: float = 0.5
    element_bytes: int = 2
    jitter: float = 0.0
    overlap: bool = True
    algorithm: str = ""

    def reduces(self, micro: int) -> bool:
        """True if the gradients of that micro-batch, or of all by then, are reduced."""
        return self.reduce_every == "micro-batch" or micro == self.accumulate - 1


class Step(NamedTuple):
    """A step of training; times in seconds.

    compute_s        of one GPU alone
    waiting_s        for the slowest rank
    communication_s  of all collectives, if nothing else went on
    exposed_s        of them that computing does not hide
    efficiency       time of one GPU alone, over that of a step
    algorithms       of each kind of collective, that of its largest calls
    left_out         algorithms that could not be simulated, with the reason
    """

    sharding: str
    ranks: int
    compute_s: float
    waiting_s: float
    communication_s: float
    exposed_s: float
    algorithms: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Of the step."""
        return self.compute_s + self.waiting_s + self.exposed_s

    @property
    def efficiency(self) -> float:
        """Throughput of a GPU, over that of one GPU alone."""
        return self.compute_s / self.seconds


class _Call(NamedTuple):
    """The fastest way of a collective, and what it takes."""

    seconds: float
    algorithm: str


class _Network:
    """Calls on a topology."""

    def __init__(self, topology: Topology, algorithm: str) -> None:
        self._topology = topology
        self._algorithm = algorithm
        self._simulators: dict[tuple[str, str], list[list[Simulator]]] = {}
        self._known: dict[tuple[str, int, str], _Call] = {}
        self.left_out: dict[tuple[str, str], list[str]] = {}

    def call(self, collective: str, nbytes: float, group: str) -> _Call:
        """Of all ranks, of those of each node, or of those in one place of each node."""
        size = max(1, round(nbytes))
        key = (collective, size, group)
        if key not in self._known:
            self._known[key] = max(
                (
                    min(_Call(s.run(size).seconds, s.algorithm) for s in choice)
                    for choice in self.simulators(collective, group)
                ),
                default=_Call(0.0, ""),
            )
        return self._known[key]

    def simulators(self, collective: str, group: str) -> list[list[Simulator]]:
        """Of each different group of ranks, of which the slowest counts. Raises UnsupportedError
        where nothing can do the collective.
        """
        key = (collective, group)
        if key not in self._simulators:
            found = [self._make(collective, group, t) for t in _groups(self._topology, group)]
            self._simulators[key] = [choice for choice in found if choice]
        return self._simulators[key]

    def _make(self, collective: str, group: str, topology: Topology) -> list[Simulator]:
        if topology.nranks < 2:
            return []
        names = [self._algorithm] if self._algorithm else _worthwhile(collective, topology)
        made = []
        why = ""
        instead = () if self._algorithm else _INSTEAD.get(collective, ())
        for name in names:
            try:
                made.append(_simulator(name, collective, topology))
            except UnsupportedError as error:
                why = str(error)
                self.left_out.setdefault((collective, group), []).append(f"{collective}: {why}")
                names += [n for n in instead if n not in names]
        if not made:
            raise UnsupportedError(
                f"nothing can do {collective} for {topology.nranks} ranks: {why}"
            )
        return made


class _Calls:
    """The calls of a step, and which algorithms they took."""

    def __init__(self, network: _Network) -> None:
        self._network = network
        self._slowest: dict[tuple[str, str], _Call] = {}

    def seconds(self, collective: str, nbytes: float, group: str = "all") -> float:
        """Of a call of all ranks, of those of each node, or of those in one place of each node."""
        found = self._network.call(collective, nbytes, group)
        key = (collective, group)
        self._slowest[key] = max(found, self._slowest.get(key, found))
        return found.seconds

    def algorithms(self) -> tuple[str, ...]:
        """By kind of call."""
        return tuple(f"{k[0]}: {call.algorithm}" for k, call in self._slowest.items() if call[1])

    def left_out(self) -> tuple[str, ...]:
        """What could not be simulated, and why."""
        return tuple(line for k in self._slowest for line in self._network.left_out.get(k, ()))


def _groups(topology: Topology, group: str) -> list[Topology]:
    """The groups of ranks that call a collective, of those that are alike only one."""
    if group == "node":
        faulty = sorted({f.node for f in topology.faults})
        alone = replace(topology, nodes=1, gpus=topology.gpus[:1])
        found = [
            replace(alone, faults=tuple(replace(f, node=0) for f in topology.faults if f.node == n))
            for n in faulty
        ]
        return found + [replace(alone, faults=())] * (len(faulty) < topology.nodes)
    if group == "rail":
        return _rails(topology)
    return [topology]


def _worthwhile(collective: str, topology: Topology) -> list[str]:
    """The algorithms that may win with buckets, without those that send more than is needed."""
    several = topology.nodes > 1 and topology.nranks > topology.nodes
    names = [
        name
        for name in candidates(collective, topology)
        if name.startswith("hierarchical" if several else ("direct_two_shot", "halving", "ring"))
        and (not several or "ring" in name or "halving" in name or name in _DIRECT)
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


def _rails(topology: Topology) -> list[Topology]:
    """The ranks in one place of each node, with the faults on their ways. They have NICs of their
    own, or share one: then each has its part of it. What a broken link carried is on another one of
    the node, if there is one, beside that one's own.
    """
    sharing = {link.name: _sharing(topology, link) for link in topology.links} | {"": 1}
    links = tuple(replace(k, bandwidth=k.bandwidth / sharing[k.name]) for k in topology.links)
    found: dict[tuple[Fault, ...], None] = {}
    for place in range(topology.gpus[0]):
        here: dict[Fault, None] = {}
        for f in topology.faults:
            each = sharing[f.link]
            if f.gpu // each == place // each:
                alike = [o for o in topology.faults if (o.link, o.node) == (f.link, f.node)]
                broken = len({o.gpu // each for o in alike if o.broken})
                around = f.broken and broken * each < topology.gpus[0]
                here[Fault(f.link, f.node, 0, 1.0 + broken) if around else replace(f, gpu=0)] = None
        found[tuple(here)] = None
    return [replace(topology, gpus=(1,), links=links, faults=faults) for faults in found]


def _sharing(topology: Topology, link: Link) -> int:
    """GPUs of a node that share one such link."""
    each = topology.gpus[0]
    device = next(d for d in topology.devices if d.name == link.source)
    if device.rails:
        device = next(d for d in topology.devices if d.name == device.rails)
    return min(each, device.count) if device.unit == "gpu" else each


def step(job: Job, topology: Topology, ranks: int, sharding: str) -> Step:
    """A step of `job` on so many GPUs of `topology`.

    sharding  "ddp", "zero-1", "zero-2", "zero-3" or "hybrid"

    Raises ConfigError for an unknown sharding, or where the ranks do not fill nodes, or for hybrid
    are not as many on each, or the topology does not say how fast its GPUs are; UnsupportedError
    where the algorithm cannot do what the sharding needs.
    """
    sized = check(job, topology, ranks, sharding)
    micro = 6 * job.params * job.tokens / (topology.flops * job.mfu)
    compute = micro * job.accumulate
    waiting = compute * (job.jitter * _largest(ranks) + _stragglers(sized.faults) - 1)
    calls = _Calls(_network(sized, job.algorithm))
    timeline = _Timeline(job.overlap)
    _FILL[sharding](timeline, job, calls, micro, sized)
    exposed = timeline.end() - compute
    if exposed < _RESIDUE * compute:
        exposed = 0.0
    return Step(
        sharding,
        ranks,
        compute,
        waiting,
        timeline.communication,
        exposed,
        calls.algorithms(),
        calls.left_out(),
    )


def check(job: Job, topology: Topology, ranks: int, sharding: str) -> Topology:
    """The topology with so many ranks. Raises what `step` does, before anything is simulated."""
    if sharding not in SHARDINGS:
        raise ConfigError(f"unknown sharding {sharding!r}; {did_you_mean(sharding, SHARDINGS)}")
    if not topology.flops:
        raise ConfigError(
            f"{topology.file}, line 1: {topology.name} does not say how fast its GPUs are; add a "
            "line such as `flops: 989 TFLOP/s`"
        )
    if job.reduce_every not in REDUCE_EVERY:
        raise ConfigError(f"reduce_every={job.reduce_every!r}; known: 'step', 'micro-batch'")
    if not 0 < job.mfu <= 1:
        raise ConfigError(f"mfu is {job.mfu}, and must be more than 0 and at most 1")
    each, fewer = float(job.layers), "layers: take fewer layers"
    if sharding not in BY_LAYER:
        each = job.params * job.element_bytes / job.bucket_bytes
        fewer = "buckets: take larger buckets"
    if each * job.accumulate > _MOST_CALLS:
        raise ConfigError(
            f"a step of {each * job.accumulate:.3g} {fewer} or fewer micro-batches, since at most "
            f"{_MOST_CALLS:.0e} are followed"
        )
    sized = with_ranks(topology, ranks)
    if sharding == "hybrid" and len(set(sized.counts)) > 1:
        raise ConfigError(
            f"hybrid shards alike on all nodes, and {topology.name} has nodes of "
            f"{', '.join(map(str, sized.counts))} GPUs; leave hybrid out, or give one number of "
            "gpus for all nodes"
        )
    if job.algorithm:
        network = _network(sized, job.algorithm)
        for collective, group in _collectives(sharding, sized):
            network.simulators(collective, group)
    return sized


def _collectives(sharding: str, sized: Topology) -> list[tuple[str, str]]:
    """What a step calls, and which ranks together."""
    if sharding == "ddp":
        return [("all_reduce", "all")]
    group = "node" if sharding == "hybrid" else "all"
    rails = [("all_reduce", "rail")] * (sharding == "hybrid" and sized.nodes > 1)
    return [("reduce_scatter", group), ("all_gather", group), *rails]


def _largest(n: int) -> float:
    """The expected largest of n normal deviations (Blom 1958)."""
    return statistics.NormalDist().inv_cdf((n - 0.375) / (n + 0.25))


def _stragglers(faults: Sequence[Fault]) -> float:
    return max((f.slower for f in faults if not f.link), default=1.0)


_NEAR, _BETWEEN = 0, 1  # streams of collectives


class _Timeline:
    """Streams: computing, and collectives one after the other; those of rails beside those of
    nodes, since they use other links.
    """

    def __init__(self, overlap: bool) -> None:
        self.overlap = overlap
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
        if self.overlap:
            return self.communicate(seconds, after, stream)
        self.communication += seconds
        self._late.append(seconds)
        return after

    def end(self) -> float:
        """When all is done, also what waited for the end of computing."""
        done = max(self._computed, *self._communicated) + sum(self._late)
        self._late.clear()
        self._communicated[_NEAR] = done
        return done


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


def _micro_batches(t: _Timeline, job: Job, micro: float, reduce: Callable[[float], float]) -> None:
    for i in range(job.accumulate):
        _backward(t, job, micro, reduce if job.reduces(i) else None)


def _ddp(t: _Timeline, job: Job, network: _Calls, micro: float, _: Topology) -> None:
    _micro_batches(t, job, micro, lambda s: network.seconds("all_reduce", s))


def _zero(t: _Timeline, job: Job, network: _Calls, micro: float, _: Topology) -> None:
    _micro_batches(t, job, micro, lambda s: network.seconds("reduce_scatter", s))
    end = t.end()
    for size in _buckets(job, job.params * job.element_bytes):
        end = t.communicate(network.seconds("all_gather", size), end)


def _sharded(group: str) -> Callable[[_Timeline, Job, _Calls, float, Topology], None]:
    def fill(t: _Timeline, job: Job, network: _Calls, micro: float, sized: Topology) -> None:
        layer = job.params * job.element_bytes / job.layers
        gather = network.seconds("all_gather", layer, group)
        scatter = network.seconds("reduce_scatter", layer, group)
        between = 0.0
        if group == "node" and sized.nodes > 1:
            between = network.seconds("all_reduce", layer / sized.gpus[0], "rail")
        forward, backward = micro / 3 / job.layers, micro * 2 / 3 / job.layers
        parts = ([forward] * job.layers + [backward] * job.layers) * job.accumulate
        here = t.communicate(gather)  # when the next layer's parameters are
        ended = 0.0
        for i, seconds in enumerate(parts):
            # The next layer is gathered while this one is computed, before what this one reduces.
            ahead = i + 1 < len(parts)
            following = t.communicate(gather, ended) if ahead and t.overlap else 0.0
            ended = t.compute(seconds, here)
            if ahead and not t.overlap:
                following = t.communicate(gather, ended)
            here = following
            half = i // job.layers  # forward of a micro-batch, or backward
            if half % 2 and job.reduces(half // 2):
                scattered = t.hidden(scatter, ended)
                if between:
                    t.hidden(between, scattered, _BETWEEN)

    return fill


_FILL = {
    "ddp": _ddp,
    "zero-1": _zero,
    "zero-2": _zero,
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
            Column("algorithms", "", 34, left=True),
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
        "; ".join(dict.fromkeys(a.partition(": ")[2] for a in step.algorithms)) or "-",
    ]


__all__ = ["SHARDINGS", "Job", "Step", "cells", "check", "step", "table"]
