"""How devices hang on PCI Express, as Linux tells in sysfs: what it does not tell is left out."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path
from typing import Any

DEVICES = Path("/sys/bus/pci/devices")


def facts(bus: str) -> dict[str, Any]:
    """Of the device at `bus`, such as 0000:18:00.0, as far as they are known:

    speed  the most that it can do on a lane, as "32.0 GT/s"; links that idle run slower
    lanes  that it uses
    numa   the NUMA node that it is at
    """
    found: dict[str, Any] = {}
    if speed := _read(bus, "max_link_speed").replace(" PCIe", ""):
        found["speed"] = speed
    for key, name, least in (("lanes", "current_link_width", 1), ("numa", "numa_node", 0)):
        text = _read(bus, name)
        if text.isdecimal() and int(text) >= least:
            found[key] = int(text)
    return found


def way(a: str, b: str) -> str:
    """What is between two devices, in words; "" if that is not known."""
    paths = []
    for bus in (a, b):
        parts = (DEVICES / bus).resolve().parts if (DEVICES / bus).exists() else ()
        roots = [i for i, part in enumerate(parts) if part.startswith("pci")]
        if not roots:
            return ""
        paths.append(parts[roots[0] :])
    shared = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(*paths, strict=False))))
    if shared > 1:  # of the bridges below the host's
        return "a PCIe switch"
    if shared == 1:
        return "a PCIe host bridge"
    nodes = [facts(bus).get("numa") for bus in (a, b)]
    if None in nodes:
        return "PCIe host bridges"
    if nodes[0] == nodes[1]:
        return f"PCIe host bridges of NUMA node {nodes[0]}"
    return f"PCIe and NUMA nodes {nodes[0]} and {nodes[1]}"


def _read(bus: str, name: str) -> str:
    try:
        return (DEVICES / bus / name).read_text(encoding="utf-8").strip()
    except OSError:
        return ""
