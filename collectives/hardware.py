"""What this host is made of, as Linux tells it in /proc and /sys: processor, sockets and memory,
network interfaces. Nothing here fails where a file is missing; it is then not told.
"""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path
from typing import Any, NamedTuple

_SYS = Path("/sys")
_INFINIBAND = 32  # ARPHRD_INFINIBAND, the type of an IP interface on InfiniBand
_ETHERNET = 1


def cpu_model() -> str:
    """Name of the processor, as the kernel tells it."""
    for line in _text(Path("/proc/cpuinfo")).splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model"):
            return value.strip()
    return platform.machine()


class NumaNode(NamedTuple):
    """Memory and the CPUs that are near it; `socket` is the package that they are in, -1 where not
    told.
    """

    number: int
    socket: int
    cpus: list[int]


def numa_nodes(sys: Path = _SYS) -> list[NumaNode]:
    """The host's NUMA nodes; one with all CPUs where the kernel knows none."""
    found = []
    for folder in sorted((sys / "devices/system/node").glob("node[0-9]*")):
        cpus = cpu_list(_text(folder / "cpulist"))
        if cpus:
            found.append(NumaNode(int(folder.name[4:]), _socket(sys, cpus[0]), cpus))
    if found:
        return sorted(found)
    cpus = list(range(os.cpu_count() or 1))
    return [NumaNode(0, _socket(sys, 0), cpus)]


def _socket(sys: Path, cpu: int) -> int:
    text = _text(sys / f"devices/system/cpu/cpu{cpu}/topology/physical_package_id")
    return int(text) if text.lstrip("-").isdecimal() else -1


def cpu_list(text: str) -> list[int]:
    """The numbers of a list such as "0-3,8"."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdecimal():
            found += range(int(first), int(last or first) + 1)
    return found


class Interface(NamedTuple):
    """A way out of the host.

    name    of the interface, or of the adapter's port: "eth0", "mlx5_0/1"
    kind    "InfiniBand", "RoCE" (InfiniBand's verbs over Ethernet), "IP over InfiniBand",
            "Ethernet", or "virtual Ethernet" where no device is behind it
    gbits   rate in Gbit/s, None where it is not told
    up      True if it is connected
    numa    NUMA node of its device, -1 where it has none
    driver  of its device, "" where it has none
    """

    name: str
    kind: str
    gbits: float | None
    up: bool
    numa: int
    driver: str

    def describe(self) -> str:
        """In words, in one line."""
        rate = f"{self.gbits:g} Gbit/s" if self.gbits else "rate not told"
        where = f", NUMA node {self.numa}" if self.numa >= 0 else ""
        driver = f", {self.driver}" if self.driver else ""
        return f"{self.name}: {self.kind}, {rate}{'' if self.up else ', down'}{where}{driver}"


def interfaces(sys: Path = _SYS) -> list[Interface]:
    """Ports of InfiniBand adapters first, then network interfaces, less loopback and switches of
    the host's own.
    """
    return [*_adapters(sys / "class/infiniband"), *_networks(sys / "class/net")]


def _adapters(folder: Path) -> list[Interface]:
    found = []
    for adapter in _entries(folder):
        for port in _entries(adapter / "ports"):
            layer = _text(port / "link_layer")
            rate = _text(port / "rate").partition(" ")[0]  # "400 Gb/sec (4X NDR)"
            found.append(
                Interface(
                    f"{adapter.name}/{port.name}",
                    "RoCE" if layer == "Ethernet" else "InfiniBand",
                    _number(rate),
                    "ACTIVE" in _text(port / "state"),
                    _numa(adapter),
                    _driver(adapter),
                )
            )
    return found


def _networks(folder: Path) -> list[Interface]:
    found = []
    for entry in _entries(folder):
        kind = _number(_text(entry / "type"))
        if kind not in (_ETHERNET, _INFINIBAND) or (entry / "bridge").exists():
            continue
        real = (entry / "device").exists()
        speed = _number(_text(entry / "speed"))  # Mbit/s; -1 while nothing is plugged in
        words = "Ethernet" if real else "virtual Ethernet"
        found.append(
            Interface(
                entry.name,
                "IP over InfiniBand" if kind == _INFINIBAND else words,
                speed / 1000 if speed and speed > 0 else None,
                _text(entry / "operstate") != "down",
                _numa(entry),
                _driver(entry),
            )
        )
    return found


def network_name(found: list[Interface]) -> str:
    """The fastest connected way out, as tables are keyed by it: "InfiniBand 400", "none"."""
    up = [i for i in found if i.up]
    if not up:
        return "none"
    best = max(up, key=lambda i: (i.gbits or 0.0, i.kind == "InfiniBand"))
    return f"{best.kind} {best.gbits:g}" if best.gbits else best.kind


def _numa(entry: Path) -> int:
    text = _text(entry / "device/numa_node")
    return int(text) if text.lstrip("-").isdecimal() else -1


def _driver(entry: Path) -> str:
    try:
        return os.path.basename(os.readlink(entry / "device/driver"))
    except OSError:
        return ""


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


@functools.cache
def summary() -> dict[str, str]:
    """What measured times depend on, of this host; read once, since every communicator asks."""
    return {
        "cpu": cpu_model(),
        "cores": str(os.cpu_count()),
        "network": network_name(interfaces()),
    }


def facts() -> dict[str, Any]:
    """Processor, sockets and interfaces of this host, as JSON has them."""
    return {
        "numa": [node._asdict() for node in numa_nodes()],
        "interfaces": [interface._asdict() for interface in interfaces()],
    }
