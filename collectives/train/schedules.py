"""Learning-rate schedules: factors by which the trainer multiplies an optimizer's lr.

A schedule is called with the number of the step, from 0, and has no state, so a resumed run goes on
where it stopped.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable


def scaled_lr(lr: float, batch: int, base_batch: int = 256) -> float:
    """The linear scaling rule of Goyal et al., "Accurate, Large Minibatch SGD" (2017),
    https://arxiv.org/abs/1706.02677, section 2.1: lr is what suits `base_batch`; a global batch
    that is k times as large takes k times the rate.
    """
    return lr * batch / base_batch


def factor_at(schedule: Callable[[int], float], step: int) -> float:
    """The factor of step `step` (from 0). Raises ValueError if it is no finite number."""
    factor = schedule(step)
    try:
        finite = math.isfinite(factor)
    except TypeError:
        finite = False
    if not finite:
        raise ValueError(
            f"schedule: the factor of step {step} is {factor!r}, and must be a finite number"
        )
    return float(factor)


class Schedule(ABC):
    """A factor for each step."""

    @abstractmethod
    def __call__(self, step: int) -> float:
        """The factor of step `step` (from 0)."""


@dataclasses.dataclass(frozen=True)
class Constant(Schedule):
    """Always 1."""

    def __call__(self, step: int) -> float:
        return 1.0


def _check_steps(schedule: Cosine | WarmUp) -> None:
    """A number of steps is easily a difference that got below 0."""
    if schedule.steps < 0:
        raise ValueError(f"{type(schedule).__name__}: steps={schedule.steps} must be >= 0")


@dataclasses.dataclass(frozen=True)
class Cosine(Schedule):
    """From 1 down to `floor` over `steps` steps along half a cosine: Loshchilov and Hutter, SGDR
    (ICLR 2017), https://arxiv.org/abs/1608.03983, equation 5 without restarts.
    """

    steps: int
    floor: float = 0.0

    def __post_init__(self) -> None:
        _check_steps(self)

    def __call__(self, step: int) -> float:
        share = min(1.0, step / max(1, self.steps))
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * share)) / 2


@dataclasses.dataclass(frozen=True)
class Steps(Schedule):
    """Times `factor` at each of the steps in `at`, which ascend."""

    at: tuple[int, ...]
    factor: float = 0.1

    def __post_init__(self) -> None:
        if list(self.at) != sorted(self.at):
            raise ValueError(f"Steps: at={self.at} must ascend")

    def __call__(self, step: int) -> float:
        return self.factor ** bisect.bisect_right(self.at, step)


@dataclasses.dataclass(frozen=True)
class WarmUp(Schedule):
    """Gradual warm-up, Goyal et al. (2017), section 2.2: from `start` (1/k, if the rate was scaled
    by k) by equal amounts up to 1 over `steps` steps; then `after`, which counts from the end of
    the warm-up.
    """

    steps: int
    after: Schedule = dataclasses.field(default_factory=Constant)
    start: float = 0.0

    def __post_init__(self) -> None:
        _check_steps(self)

    def __call__(self, step: int) -> float:
        if step >= self.steps:
            return self.after(step - self.steps)
        return self.start + (1 - self.start) * (step + 1) / self.steps
