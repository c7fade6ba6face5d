"""What the array libraries that a program has loaded tell of its GPUs."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple


class GpuFacts(NamedTuple):
    """A GPU's name, and where it is plugged in; "" where it is not told."""

    name: str
    bus: str


def gpu_facts(ordinal: int) -> GpuFacts:
    """Of GPU `ordinal` of this process; the first library that is loaded and knows counts."""
    for library, ask in (("cupy", _cupy), ("torch", _torch), ("jax", _jax)):
        module = sys.modules.get(library)
        found = ask(module, ordinal) if module is not None else None
        if found is not None:
            return found
    return GpuFacts("", "")


def _cupy(cupy: Any, ordinal: int) -> GpuFacts | None:
    runtime = cupy.cuda.runtime
    name = runtime.getDeviceProperties(ordinal)["name"]
    return GpuFacts(
        name.decode() if isinstance(name, bytes) else str(name),
        str(runtime.deviceGetPCIBusId(ordinal)).lower(),
    )


def _torch(torch: Any, ordinal: int) -> GpuFacts | None:
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(ordinal)
    parts = [getattr(found, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    numbers = [part for part in parts if part is not None]  # older releases tell none
    known = len(numbers) == len(parts)
    return GpuFacts(str(found.name), "{:04x}:{:02x}:{:02x}.0".format(*numbers) if known else "")


def _jax(jax: Any, ordinal: int) -> GpuFacts | None:
    if jax.default_backend() not in ("gpu", "cuda"):
        return None
    found = next((d for d in jax.local_devices() if d.local_hardware_id == ordinal), None)
    return GpuFacts(str(found.device_kind), "") if found is not None else None
