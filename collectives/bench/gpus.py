"""What there is to know about the GPUs of a machine: names, memory, links, driver, versions.

Asked are the core (is there a GPU at all), cupy where it is installed, and NVML where nvidia-ml-py
is. What none of them tells is left out, with the reason.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .. import _core
from ..words import counted
from . import pcie

_DRIVER = "/proc/driver/nvidia/version"


def driver_version(text: str | None = None) -> str:
    """The kernel driver's version from its own words; "" if there is none."""
    if text is None:
        try:
            text = Path(_DRIVER).read_text(encoding="utf-8")
        except OSError:
            return ""
    found = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\d+(?:\.\d+)+)", text)
    return found[1] if found else ""


def dotted(number: int, major: int, minor: int) -> str:
    """12040 as 12.4 (CUDA: 1000, 10), 22809 as 2.28.9 (NCCL: 10000, 100)."""
    rest = number % major
    parts = [number // major, rest // minor]
    if minor == 100:
        parts.append(rest % minor)
    return ".".join(map(str, parts))


def versions(cupy: Any) -> dict[str, str]:
    """Versions that a result on GPUs depends on."""
    runtime = cupy.cuda.runtime
    found = {"cuda driver": dotted(runtime.driverGetVersion(), 1000, 10)}
    found["cuda runtime of cupy"] = dotted(runtime.runtimeGetVersion(), 1000, 10)
    driver = driver_version()
    return ({"nvidia driver": driver} if driver else {}) | found


def bus_id(cupy: Any, ordinal: int) -> str:
    """Where a GPU is plugged in, which tells two GPUs apart."""
    return str(cupy.cuda.runtime.deviceGetPCIBusId(ordinal)).lower()


def rank_facts(cupy: Any, ordinal: int) -> dict[str, Any]:
    """The GPU of a rank, for the header of a run."""
    properties = cupy.cuda.runtime.getDeviceProperties(ordinal)
    name = properties["name"]
    return {
        "name": name.decode() if isinstance(name, bytes) else str(name),
        "bus": bus_id(cupy, ordinal),
        "memory_bytes": int(properties["totalGlobalMem"]),
        "processors": int(properties["multiProcessorCount"]),
        "capability": f"{properties['major']}.{properties['minor']}",
    }


def summary(ranks: Sequence[dict[str, Any]]) -> str:
    """GPUs of the ranks in a line: 2 x NVIDIA H100 (8 ranks)."""
    names: dict[str, set[str]] = {}
    for facts in ranks:
        names.setdefault(facts["name"], set()).add(facts["bus"])
    count = sum(len(buses) for buses in names.values())
    text = ", ".join(f"{len(buses)} x {name}" for name, buses in names.items())
    return text + (f", shared by {len(ranks)} ranks" if len(ranks) > count else "")


# ---- for `info` ----------------------------------------------------------------------------------


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def survey(load: Callable[[str], Any] | None = None) -> dict[str, Any]:
    """The GPUs that this process sees, and how they are linked:

    count    how many
    why      why there is none, "" otherwise
    driver   version of the kernel driver, "" if unknown
    devices  of each what `rank_facts` says, and `pcie.facts` under "pcie", as far as it is known
    links    [from, to, words] for each pair, as far as it is known
    unknown  what could not be found out, and what to install

    load  gives a module by name, None if there is none
    """
    load = load or _module
    count, why = _core.device_count()
    found: dict[str, Any] = {
        "count": count,
        "why": why,
        "driver": driver_version(),
        "devices": [],
        "links": [],
        "unknown": [],
    }
    if not count:
        return found
    cupy = load("cupy")
    if cupy is None:
        found["unknown"].append("names and peer access: pip install cupy-cuda12x (or 13x)")
        found["devices"] = [{} for _ in range(count)]
        return found
    for i in range(count):
        device = rank_facts(cupy, i)
        found["devices"].append(device | {"pcie": pcie.facts(device["bus"])})
    found["driver"] = found["driver"] or f"CUDA {versions(cupy)['cuda driver']}"
    nvml = load("pynvml")
    handles: list[Any] = []
    buses = [device["bus"] for device in found["devices"]]
    if nvml is None:
        found["unknown"].append("NVLink: pip install nvidia-ml-py")
    else:
        try:
            nvml.nvmlInit()
            found["driver"] = _text(nvml.nvmlSystemGetDriverVersion())
            handles = [nvml.nvmlDeviceGetHandleByPciBusId(bus) for bus in buses]
        except nvml.NVMLError as error:
            handles = []
            found["unknown"].append(f"NVLink: NVML says {error}")
    for a in range(count):
        for b in range(count):
            if a != b:
                words = link_words(
                    bool(cupy.cuda.runtime.deviceCanAccessPeer(a, b)),
                    nvlinks(nvml, handles[a], handles[b]) if handles else None,
                    pcie.way(buses[a], buses[b]),
                )
                found["links"].append([a, b, words])
    return found


def nvlinks(nvml: Any, a: Any, b: Any) -> int | None:
    """NVLinks on which `a` and `b` reach each other: those between them, or, if both hang on
    switches, those of `a` to them; None if NVML does not tell.
    """
    try:
        if nvml.nvmlDeviceGetP2PStatus(a, b, nvml.NVML_P2P_CAPS_INDEX_NVLINK):
            return 0
        other = _text(nvml.nvmlDeviceGetPciInfo(b).busId).lower()
        straight = active = 0
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            try:
                if not nvml.nvmlDeviceGetNvLinkState(a, link):
                    continue
                active += 1
                remote = _text(nvml.nvmlDeviceGetNvLinkRemotePciInfo(a, link).busId).lower()
                straight += remote == other
            except nvml.NVMLError:  # this GPU has fewer links
                break
        return straight or active
    except nvml.NVMLError:
        return None


def link_words(access: bool, links: int | None, way: str) -> str:
    """How two GPUs are linked, in words; `way`, by PCIe, counts where no NVLink is known."""
    words = ["peer access" if access else "no peer access"]
    if links is not None:
        words.append(counted(links, "NVLink") if links else "no NVLink")
    if way and not links:
        words.append(f"through {way}")
    return ", ".join(words)


def path_words(links: Sequence[Sequence[Any]]) -> str:
    """How ranks on these GPUs reach each other, in words; "" if nothing is known of any two."""
    pairs = {(min(a, b), max(a, b)) for a, b, words in links if words.startswith("no peer access")}
    apart = [f"{a}-{b}" for a, b in sorted(pairs)]
    if not apart:
        return "peer access between all" if links else ""
    return (
        f"no peer access ({', '.join(apart)}): communicators with ranks on such GPUs go through "
        "pinned memory of the host"
    )


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def link_lines(links: Sequence[Sequence[Any]]) -> list[str]:
    """Pairs with equal words together: `0-1, 0-2: peer access, 18 NVLinks`."""
    both = {(a, b): words for a, b, words in links}
    groups: dict[str, list[str]] = {}
    for (a, b), words in both.items():
        back = both.get((b, a))
        if back == words:
            if a < b:
                groups.setdefault(words, []).append(f"{a}-{b}")
        else:
            groups.setdefault(words, []).append(f"{a}→{b}")
    return [f"{', '.join(pairs)}: {words}" for words, pairs in groups.items()]
