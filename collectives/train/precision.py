"""Mixed precision: which dtypes parameters and optimizer state have, and the scale of the loss."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

from ..array import device_name, dtype_name
from ..array.dtypes import ITEM_SIZES
from ..bucket_layout import Spec
from ..errors import did_you_mean

PRECISIONS = {
    None: None,
    "float32": None,
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
}


def compute_dtype(precision: str | None) -> str | None:
    """The dtype that parameters have in forward and backward; None: their own."""
    if precision not in PRECISIONS:
        names = [p for p in PRECISIONS if p]
        raise ValueError(f"precision={precision!r}; {did_you_mean(str(precision), names)}")
    return PRECISIONS[precision]


def wide_dtype(dtype: str) -> str:
    """In which an optimizer computes with what it keeps in `dtype`."""
    return "float32" if ITEM_SIZES[dtype] < 4 else dtype


def used_dtypes(
    values: Mapping[str, Any], computed: str | None, wide: Collection[str]
) -> dict[str, str]:
    """Dtypes that parameters (arrays by name) have in forward and backward: the one that is
    `computed` in, but for those in `wide`; None: their own.
    """
    return {
        name: dtype_name(x.dtype) if computed is None or name in wide else computed
        for name, x in values.items()
    }


def kept_dtypes(
    values: Mapping[str, Any], used: Mapping[str, str], master_weights: bool
) -> dict[str, str]:
    """Of what the optimizer steps, and of its state, for parameters (arrays by name as they came
    in) that are `used` in these dtypes.
    """
    return {
        name: wide_dtype(dtype_name(x.dtype)) if master_weights else used[name]
        for name, x in values.items()
    }


def check_kept(kept: Collection[str], slots: Collection[str]) -> None:
    """Raises ValueError if parameters, with state of these names, cannot be kept in one of these
    dtypes.
    """
    tiny = sorted(dtype for dtype in kept if dtype.startswith("float8"))
    if tiny:
        raise ValueError(
            f"master_weights=False keeps parameters in {tiny[0]}, where a step of less than 1/16 "
            "of a parameter leaves it as it was: train them with master weights"
        )
    # (1 - 0.999) g^2 rounds to zero below 2^-25, half of the least float16.
    if "float16" in kept and "second" in slots:
        raise ValueError(
            "master_weights=False keeps second moments in float16, where gradients below 0.005 "
            "leave none: train in bf16, with SGD or LARS, or with master weights"
        )


def specs_of(
    values: Mapping[str, Any], used: Mapping[str, str], kept: Mapping[str, str], reduced: Any
) -> dict[str, Spec]:
    """Parameters as buckets see them: arrays by name, the dtypes they are `used` and `kept` in, and
    the one in which gradients are `reduced`, that of each if None.
    """
    return {
        name: Spec(
            tuple(x.shape),
            used[name],
            device_name(x),
            dtype_name(reduced) if reduced else used[name],
            f"used as {used[name]}, kept as {kept[name]}",
        )
        for name, x in values.items()
    }


@dataclasses.dataclass
class LossScale:
    """Dynamic loss scaling, Micikevicius et al., "Mixed Precision Training" (ICLR 2018),
    https://arxiv.org/abs/1710.03740, section 3.2: the loss is scaled so that small gradients are
    not lost in float16. A step whose gradients overflow is left out and halves the scale; after
    `interval` good steps it doubles.

    The scale is a power of two, so scaling changes no bits but of what over- or underflows.
    """

    scale: float = 65536.0
    interval: int = 2000
    good: int = 0  # good steps since the last change
    least: float = 1.0

    def __post_init__(self) -> None:
        for name in ("scale", "least"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(
                    f"LossScale: {name}={getattr(self, name)} must be a finite number above 0"
                )

    def update(self, overflow: bool) -> None:
        """Called once for each step: halves the scale, down to `least`, if gradients overflowed;
        doubles it after `interval` steps in a row in which none did.
        """
        if overflow:
            self.scale = max(self.least, self.scale / 2)
            self.good = 0
            return
        self.good += 1
        if self.good == self.interval:
            self.scale, self.good = self.scale * 2, 0
