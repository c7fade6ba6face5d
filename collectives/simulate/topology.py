"""Topologies: what joins the GPUs of a node, and the nodes.

A topology names *devices* (how many GPUs share one) and *links*, each from a device to the one
above it. The way from a GPU to another goes up from both to the first device that they share. A GPU
may have several links up, such as one to an NVSwitch and one to a NIC; the shortest way is taken,
and of equals the one whose links stand first in the file. docs/simulate.md describes the file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..errors import ConfigError, did_you_mean
from ..schedule import LARGEST
from . import document, quantities
from .document import Section

MOST_RANKS = 1 << 22  # what is known of each rank and link takes a few GB then
_MOST_AT_ONCE = 4096  # lanes, and slots of a connection

PRESETS = Path(__file__).with_name("presets")


@dataclass(frozen=True)
class Device:
    """A kind of device. One serves `count` GPUs of a node ("gpu"), `count` nodes ("node"), or all.

    rails  one for each NIC of a node, instead of one for all of them
    line   of the file
    """

    name: str
    unit: str = "gpu"
    count: int = 1
    rails: str = ""
    line: int = 0


@dataclass(frozen=True)
class Link:
    """A kind of link, from each device of a kind to the one above it; full duplex.

    bandwidth         bytes a second in each direction, of all `count` parallel ones together, after
                      `efficiency`; 0: as much as what comes from below, over `oversubscription`
    latency_s         of each crossing
    message_s         that a message occupies the link beside its bytes, on the way up
    """

    name: str
    source: str
    target: str
    bandwidth: float
    latency_s: float = 0.0
    message_s: float = 0.0
    oversubscription: float = 0.0
    line: int = 0


@dataclass(frozen=True)
class Fault:
    """A link, or with link="" the GPU itself, that is slower or broken, or enters late.

    The link is the one of that kind on the way up from GPU `gpu` of node `node`.
    """

    link: str
    node: int
    gpu: int
    slower: float = 1.0
    broken: bool = False
    late_s: float = 0.0
    line: int = 0


@dataclass(frozen=True)
class Engine:
    """How calls are run: the most bytes of a message, lanes, and slots of a connection."""

    slice_bytes: float = 4 << 20
    lanes: int = 4
    slots: int = 4


@dataclass(frozen=True)
class Topology:
    """What the simulator runs on. `read` makes one from a file, `load` also from a preset's name.

    nodes           number of nodes
    gpus            GPUs of each node: one number, or as many as there are nodes
    combine         bytes a second that a GPU combines; 0: it costs nothing
    flops           operations a second of a GPU in training, at its peak; 0: not known
    """

    name: str
    nodes: int
    gpus: tuple[int, ...]
    devices: tuple[Device, ...]
    links: tuple[Link, ...]
    combine: float = 0.0
    flops: float = 0.0
    engine: Engine = field(default_factory=Engine)
    faults: tuple[Fault, ...] = ()
    file: str = ""

    @property
    def counts(self) -> tuple[int, ...]:
        """GPUs of each node."""
        return self.gpus * self.nodes if len(self.gpus) == 1 else self.gpus

    @property
    def nranks(self) -> int:
        """Number of GPUs, which are the ranks."""
        return sum(self.counts)

    @property
    def nodes_of_ranks(self) -> list[int]:
        """Node of each rank."""
        return [node for node, count in enumerate(self.counts) for _ in range(count)]

    def with_nodes(self, nodes: int) -> Topology:
        """The same with another number of nodes, without faults on nodes that it has not. Raises
        ConfigError where that cannot be.
        """
        if nodes < 1:
            raise ConfigError(f"{self.name} with {nodes} nodes: there must be at least one")
        if len(self.gpus) > 1 and nodes != self.nodes:
            raise ConfigError(
                f"{self.name} lists the GPUs of each of its {self.nodes} nodes, so it cannot have "
                f"{nodes}; give one number of gpus for all of them"
            )
        _check_size(self.name, self.gpus, nodes)
        counts = self.gpus * nodes if len(self.gpus) == 1 else self.gpus
        here = tuple(f for f in self.faults if f.node < nodes and f.gpu < counts[f.node])
        return replace(self, nodes=nodes, faults=here)


def with_ranks(topology: Topology, ranks: int) -> Topology:
    """`topology` with so many ranks: whole nodes, or a part of one node."""
    each = topology.gpus[0]
    if len(topology.gpus) > 1:
        if ranks != topology.nranks:
            raise ConfigError(f"{topology.name} has {topology.nranks} ranks, not {ranks}")
        return topology
    if ranks < each:
        return replace(topology, nodes=1, gpus=(ranks,)).with_nodes(1)
    if ranks % each:
        raise ConfigError(
            f"{ranks} ranks do not fill nodes of {each} GPUs; take a multiple of {each}"
        )
    return topology.with_nodes(ranks // each)


def presets() -> list[str]:
    """Names of the topologies that come with the package."""
    return sorted(file.stem for file in PRESETS.glob("*.yaml"))


def load(name: str, nodes: int | None = None) -> Topology:
    """A preset ("dgx-h100"), or a topology file (a path that ends in .yaml or .yml).

    Raises ConfigError naming file and line, and saying what to do.
    """
    path = PRESETS / f"{name}.yaml"
    if not path.exists():
        path = Path(name)
        if path.suffix not in (".yaml", ".yml"):
            raise ConfigError(
                f"unknown topology {name!r} (a file of your own ends in .yaml); "
                + did_you_mean(name, presets())
            )
    topology = read(path)
    return topology if nodes is None else topology.with_nodes(nodes)


def read(path: str | Path) -> Topology:
    """The topology of a file. Raises ConfigError naming file and line, and saying what to do."""
    top = document.read(path, "the topology")
    name = top.take("name", document.text, Path(path).stem)
    gpus = top.take("gpus", _gpu_counts)
    many = len(gpus) if len(gpus) > 1 else 1
    nodes = top.take("nodes", document.whole(1), many)
    if len(gpus) > 1 and nodes != len(gpus):
        raise top.error(f"gpus lists {len(gpus)} nodes, nodes says {nodes}", key="gpus")
    combine = top.take("combine", quantities.bandwidth, 0.0)
    flops = top.take("flops", quantities.flops, 0.0)
    engine = _engine(top.section("engine"))
    devices = _devices(top)
    links = _links(top, devices)
    faults = _faults(top, links)
    top.done()
    _check_size(str(path), gpus, nodes)
    topology = Topology(
        name, nodes, gpus, devices, links, combine, flops, engine, faults, str(path)
    )
    _check_loops(topology)
    _check_faults(topology)
    return topology


def _gpu_counts(value: object) -> tuple[int, ...]:
    one = document.whole(1)
    if isinstance(value, list):
        if not value:
            raise ValueError("the list is empty; give the GPUs of each node, such as [3, 2, 1]")
        return tuple(one(v) for v in value)
    return (one(value),)


def _engine(section: Section | None) -> Engine:
    if section is None:
        return Engine()
    default = Engine()
    engine = Engine(
        section.take("slice", quantities.amount, default.slice_bytes),
        section.take("lanes", document.whole(1, _MOST_AT_ONCE), default.lanes),
        section.take("slots", document.whole(1, _MOST_AT_ONCE), default.slots),
    )
    section.done()
    return engine


_PER = re.compile(r"(?:(\d+) )?(gpu|node)s?|(all)")


def _per(value: object) -> tuple[str, int]:
    match = _PER.fullmatch(value) if isinstance(value, str) else None
    if match is None or (match[1] and int(match[1]) < 1):
        raise ValueError(f"{value!r} is not like gpu, 2 gpus, node, 32 nodes or all")
    if match[1] and int(match[1]) > LARGEST:
        raise ValueError(f"{value!r} is more than {LARGEST}")
    return ("all", 1) if match[3] else (match[2], int(match[1] or 1))


def _devices(top: Section) -> tuple[Device, ...]:
    section = top.section("devices")
    if section is None:
        raise top.error("the topology has no devices", "list what links join, below `devices:`")
    found = [Device("gpu")]
    for key in section:
        entry = section.section(key)
        assert entry is not None
        if key == "gpu":
            raise section.error("gpu is there already", "leave it out of devices", key=key)
        unit, count = entry.take("per", _per)
        rails = entry.take("rails", document.text, "")
        entry.done()
        below = next((d for d in found if d.name == rails), None)
        if rails and (below is None or below.unit != "gpu"):
            raise entry.error(
                f"rails: {rails!r} is no device above that a node has one or more of",
                "name the kind of device whose number is that of the rail, such as nic",
                key="rails",
            )
        found.append(Device(key, unit, count, rails, section.line_of(key)))
    section.done()
    return tuple(found)


def _links(top: Section, devices: Sequence[Device]) -> tuple[Link, ...]:
    found: list[Link] = []
    names = [d.name for d in devices]
    for entry in top.sections("links"):
        name = entry.take("name", document.text)
        if name in [link.name for link in found]:
            raise entry.error(f"there are two links named {name!r}", key="name")
        source = entry.take("from", document.one_of(names))
        target = entry.take("to", document.one_of(names))
        if target == "gpu":
            raise entry.error(
                f"link {name} goes up to a GPU, which closes a loop",
                "links go up from a GPU: exchange from and to",
                key="to",
            )
        bandwidth = entry.take("bandwidth", quantities.bandwidth, 0.0)
        efficiency = entry.take("efficiency", document.number(0.01, 1), 1.0)
        count = entry.take("count", document.whole(1), 1)
        over = entry.take("oversubscription", document.number(0.01, 1000), 0.0)
        latency = entry.take("latency", quantities.duration)
        message = entry.take("message", quantities.duration, 0.0)
        entry.done()
        if bool(bandwidth) == bool(over):
            raise entry.error(
                f"link {name} has {'both' if over else 'neither'} bandwidth and oversubscription"
                if over
                else f"link {name} has no bandwidth",
                "give one of bandwidth and oversubscription",
            )
        if over and source == "gpu":
            raise entry.error(
                f"link {name} has oversubscription, but nothing comes from below a GPU",
                "give its bandwidth",
                key="oversubscription",
            )
        found.append(
            Link(
                name,
                source,
                target,
                bandwidth * efficiency * count,
                latency,
                message,
                over,
                entry.line,
            )
        )
    if not found:
        raise top.error("the topology has no links", "list them below `links:`")
    return tuple(found)


def _faults(top: Section, links: Sequence[Link]) -> tuple[Fault, ...]:
    found = []
    names = [link.name for link in links]
    for entry in top.sections("faults"):
        link = entry.take("link", document.one_of(names), "")
        fault = Fault(
            link,
            entry.take("node", document.whole(0)),
            entry.take("gpu", document.whole(0)),
            entry.take("slower", document.number(1, 1e6), 1.0),
            entry.take("broken", document.flag, False),
            entry.take("late", quantities.duration, 0.0),
            entry.line,
        )
        entry.done()
        if fault.broken and not link:
            raise entry.error("a GPU cannot be broken", "a rank that is gone is not in the call")
        if fault.late_s and link:
            raise entry.error("only a GPU enters late", "leave out `link`", key="late")
        if not fault.broken and fault.slower == 1.0 and not fault.late_s:
            raise entry.error(
                "this fault changes nothing", "say `slower: 2`, `broken: true` or `late`"
            )
        found.append(fault)
    return tuple(found)


def _check_loops(topology: Topology) -> None:
    """Raises ConfigError if links lead back to a device that they come from, or end nowhere."""
    ups: dict[str, list[Link]] = {}
    for link in topology.links:
        ups.setdefault(link.source, []).append(link)

    def climb(device: str, way: tuple[Link, ...]) -> None:
        for link in ups.get(device, ()):
            seen = [way[0].source if way else device, *(step.target for step in way)]
            if link.target in seen:
                path = " -> ".join([*seen[seen.index(link.target) :], link.target])
                raise ConfigError(
                    f"{topology.file}, line {link.line}: link {link.name} closes the loop {path}; "
                    "links go up only, so take one of them out"
                )
            climb(link.target, (*way, link))

    for device in topology.devices:
        climb(device.name, ())
    reached = {"gpu"}
    for _ in topology.devices:
        reached |= {link.target for link in topology.links if link.source in reached}
    for device in topology.devices:
        if device.name not in reached:
            raise ConfigError(
                f"{topology.file}, line {device.line}: no link leads from a gpu up to "
                f"{device.name}; add the missing link, or take the device out"
            )


def _check_size(name: str, gpus: tuple[int, ...], nodes: int) -> None:
    ranks = gpus[0] * nodes if len(gpus) == 1 else sum(gpus)
    if ranks > MOST_RANKS:
        raise ConfigError(
            f"{name} with {nodes} nodes: {ranks} ranks are more than the {MOST_RANKS} that can be "
            "simulated; take fewer nodes"
        )


def _device_of(topology: Topology, fault: Fault) -> tuple[str, int, int]:
    """What the fault is on: its link, and which device of a kind that goes up from."""
    source = next((link.source for link in topology.links if link.name == fault.link), "gpu")
    device = next(d for d in topology.devices if d.name == source)
    node, place = fault.node, 0
    if device.unit == "gpu":
        place = fault.gpu // device.count
    else:
        node = node // device.count if device.unit == "node" else 0
    if device.rails:
        place = fault.gpu // next(d.count for d in topology.devices if d.name == device.rails)
    return fault.link, node, place


def _check_faults(topology: Topology) -> None:
    counts = topology.counts
    seen: dict[tuple[str, int, int], list[Fault]] = {}
    for fault in topology.faults:
        if fault.node >= topology.nodes:
            raise ConfigError(
                f"{topology.file}, line {fault.line}: the fault is on node {fault.node}, but the "
                f"nodes are 0 to {topology.nodes - 1}"
            )
        if fault.gpu >= counts[fault.node]:
            raise ConfigError(
                f"{topology.file}, line {fault.line}: the fault is at GPU {fault.gpu} of node "
                f"{fault.node}, whose GPUs are 0 to {counts[fault.node] - 1}"
            )
        here = seen.setdefault(_device_of(topology, fault), [])
        for other in here:
            if fault.link or (fault.slower > 1 < other.slower) or (fault.late_s and other.late_s):
                what = f"that {fault.link} link" if fault.link else "that GPU"
                raise ConfigError(
                    f"{topology.file}, line {fault.line}: line {other.line} is on {what} already; "
                    "say it once"
                )
        here.append(fault)
