"""Quantities with units, as topology files and options spell them: "450 GB/s", "1.5 us"."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..errors import nearest

# Bytes a second: decimal prefixes, as data sheets count; b are bits, B bytes.
_PREFIX = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
BANDWIDTHS = {
    **{f"{p}b/s": f / 8 for p, f in _PREFIX.items()},
    **{f"{p}B/s": f for p, f in _PREFIX.items()},
    **{f"{p}bit/s": f / 8 for p, f in _PREFIX.items()},
}
TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
SIZES = {
    "B": 1.0,
    **{f"{p}iB": 1024.0**i for i, p in enumerate("KMGT", 1)},
    **{f"{p}B": 1000.0**i for i, p in enumerate("KMGT", 1)},
}
RATES = {f"{p}FLOP/s": f for p, f in {**_PREFIX, "P": 1e15}.items()}

_QUANTITY = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(.*?)\s*")


def _parse(text: object, units: Mapping[str, float], what: str, examples: str) -> float:
    match = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        if isinstance(text, (int, float)) and not isinstance(text, bool):
            raise ValueError(f"{text!r} has no unit: write {what} such as {examples}")
        raise ValueError(f"{text!r} is not {what} such as {examples}")
    number, unit = float(match[1]), match[2]
    if not unit:
        raise ValueError(f"{text!r} has no unit: write {what} such as {examples}")
    if unit not in units:
        near = _near(unit, units)
        hint = f"did you mean {near!r}?" if near else "known: " + ", ".join(units)
        raise ValueError(f"{text!r} has the unknown unit {unit!r}; {hint}")
    return number * units[unit]


def _near(unit: str, units: Mapping[str, float]) -> str | None:
    """The unit that was meant: bytes for bytes, bits for bits."""
    usual = unit.replace("ps", "/s").replace("iB", "B").replace("ib", "b")
    if usual in units:
        return usual
    near = nearest(usual, units)
    alike = [u for u in units if near and u.lower() == near.lower()]
    return next((u for u in alike if ("B" in u) == ("B" in unit)), near)


def bandwidth(text: object) -> float:
    """Bytes a second, more than 0, from "450 GB/s" or "400 Gb/s". Raises ValueError."""
    value = _parse(text, BANDWIDTHS, "a bandwidth", '"450 GB/s" or "400 Gb/s"')
    if not 0 < value < 1e18:
        raise ValueError(
            f"{text!r} moves nothing: a bandwidth is more than 0; leave the link out, or list it "
            "as broken under faults"
            if value <= 0
            else f"{text!r} is more than any link carries"
        )
    return value


def duration(text: object) -> float:
    """Seconds, at least 0, from "1.5 us". Raises ValueError."""
    value = _parse(text, TIMES, "a time", '"1.5 us" or "300 ns"')
    if not 0 <= value < 1e9:
        raise ValueError(
            f"{text!r} is negative; a time is at least 0 s"
            if value < 0
            else f"{text!r} is longer than any call takes"
        )
    return value


def amount(text: object) -> float:
    """Bytes, more than 0, from "512 KiB" or "64 KB" (1000). Raises ValueError."""
    value = _parse(text, SIZES, "a size", '"512 KiB" or "1 MB"')
    if not 1 <= value < 1e18:
        raise ValueError(f"{text!r} is {'less than a byte' if value < 1 else 'more than can be'}")
    return value


def flops(text: object) -> float:
    """Operations a second, more than 0, from "989 TFLOP/s". Raises ValueError."""
    value = _parse(text, RATES, "a rate", '"989 TFLOP/s"')
    if not 0 < value < 1e24:
        raise ValueError(
            f"{text!r} computes nothing: a rate is more than 0"
            if value <= 0
            else f"{text!r} is more than any GPU computes"
        )
    return value


def seconds_text(value: float) -> str:
    """Three digits with a unit: "12.3 us"."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= 0.99949 * factor:  # what three digits round to 1000 has the larger unit
            return f"{value / factor:.3g} {unit}" if value < 999.5 * factor else f"{value:.0f} s"
    return f"{value * 1e9:.3g} ns"
