"""Mixed precision: which dtype parameters have when they are used, and the scale of the loss."""

from __future__ import annotations

import dataclasses

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

    def update(self, overflow: bool) -> None:
        if overflow:
            self.scale = max(self.least, self.scale / 2)
            self.good = 0
            return
        self.good += 1
        if self.good == self.interval:
            self.scale, self.good = self.scale * 2, 0
