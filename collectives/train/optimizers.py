"""Optimizers on flat shards: element by element, so that it does not matter who holds which part.

Every operation is one of + - * / and square root, rounded as IEEE 754 says, in the same order for
every element. So a shard gets the bits that the whole would. LARS and LAMB also need norms of whole
parameters, which come from `norms`.

An optimizer here is its settings only. The trainer holds the state, in arrays that it hands in.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from .. import _core
from ..array import namespace
from ..errors import UnsupportedError

State = Mapping[str, Any]

# Methods, and others that do the same in another way.
_SAME = (
    ("update", "fused"),
    ("update", "on_gpu"),
    ("apply", "on_gpu"),
    ("direction", "direction_on_gpu"),
)


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Settings, and one step on flat arrays of numpy or cupy.

    lr            learning rate; the trainer multiplies it by its schedule
    weight_decay  how strongly parameters are drawn to zero
    """

    lr: float
    weight_decay: float = 0.0

    slots: ClassVar[tuple[str, ...]] = ()  # names of the state arrays, which begin as zeros
    layerwise: ClassVar[bool] = False  # needs the norms of whole parameters

    def __init_subclass__(cls, **more: Any) -> None:
        """Who has a method of its own does not inherit what does the same as another's."""
        super().__init_subclass__(**more)

        def place(name: str) -> int:
            return next(i for i, base in enumerate(cls.__mro__) if name in vars(base))

        for name, other in _SAME:
            if place(other) > place(name):
                setattr(cls, other, getattr(Optimizer, other))

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            number = getattr(self, field.name)
            if isinstance(number, bool):
                continue
            try:
                good = math.isfinite(number) and number >= 0
            except TypeError:  # of YAML 1e-3 comes as text
                good = False
            if not good:
                raise ValueError(
                    f"{type(self).__name__}: {field.name}={number!r} must be a finite number, >= 0"
                )

    @property
    def kept(self) -> tuple[str, ...]:
        """Those of `slots` that it needs with these settings."""
        return self.slots

    def update(self, w: Any, g: Any, state: State, lr: float, step: int, work: Any) -> None:
        """One step of optimizers that are not layerwise. w and state are written; g and work, an
        array like it, are used up.

        step  counts from 1
        """
        raise NotImplementedError

    def fused(self, w: Any, g: Any, coefficient: float, state: State, lr: float, step: int) -> bool:
        """The same as `update` for g times `coefficient`, with g only read, in one pass through
        memory, where there is such a thing; False where there is none and nothing was done.
        """
        return False

    def on_gpu(self, lr: float, step: int) -> tuple[str, dict[str, float]]:
        """The operation of `fused.OPERATIONS` that does the same as `update`, or for layerwise ones
        as `apply`, and its numbers. Raises UnsupportedError where there is none.
        """
        raise UnsupportedError(
            f"{type(self).__name__} has no kernel for arrays on GPUs: give it on_gpu()"
        )

    def direction(self, w: Any, g: Any, state: State, step: int, work: Any) -> None:
        """Layerwise: puts into g the array whose norm counts."""
        raise NotImplementedError

    def direction_on_gpu(self, step: int) -> tuple[str, dict[str, float]]:
        """Layerwise: as `on_gpu`, for `direction`."""
        raise UnsupportedError(
            f"{type(self).__name__} has no kernel for arrays on GPUs: give it direction_on_gpu()"
        )

    def trust(self, weight_norm: float, norm: float) -> float:
        """Layerwise: the ratio by which the step of this parameter is scaled."""
        raise NotImplementedError

    def apply(self, w: Any, g: Any, state: State, lr: float) -> None:
        """Layerwise: the step along `direction`; lr holds the trust ratio."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent, with momentum (v = momentum v + g; w -= lr v) and Nesterov's
    variant (w -= lr (g + momentum v)), as in Sutskever et al. (ICML 2013) but for the place of lr.
    """

    momentum: float = 0.0
    nesterov: bool = False

    slots: ClassVar[tuple[str, ...]] = ("velocity",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and not self.momentum:
            raise ValueError("SGD: nesterov needs momentum")

    @property
    def kept(self) -> tuple[str, ...]:
        return self.slots if self.momentum else ()

    def update(self, w: Any, g: Any, state: State, lr: float, step: int, work: Any) -> None:
        if self.weight_decay:
            namespace(w).multiply(w, self.weight_decay, out=work)
            g += work
        if self.momentum:
            v = state["velocity"]
            v *= self.momentum
            v += g
            if self.nesterov:
                namespace(v).multiply(v, self.momentum, out=work)
                g += work
            else:
                g[...] = v
        g *= lr
        w -= g

    def on_gpu(self, lr: float, step: int) -> tuple[str, dict[str, float]]:
        numbers = {"l2": self.weight_decay, "lr": lr}
        if not self.momentum:
            return "sgd", numbers
        return "nesterov" if self.nesterov else "momentum", numbers | {"momentum": self.momentum}


@dataclasses.dataclass(frozen=True)
class _Moments(Optimizer):
    """What Adam, AdamW and LAMB share: two moments with bias correction."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    slots: ClassVar[tuple[str, ...]] = ("first", "second")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta1 >= 1 or self.beta2 >= 1:
            raise ValueError(f"{type(self).__name__}: beta1 and beta2 must be below 1")

    def _moments(self, g: Any, state: State, step: int, factor: float, work: Any) -> None:
        """Takes g into the moments, and puts factor m̂ / (√v̂ + eps) into g.

        Both bias corrections are one number, as section 2 of the paper on Adam has it, with an eps
        that makes up for it.
        """
        xp = namespace(g)
        m, v = state["first"], state["second"]
        xp.multiply(g, 1 - self.beta1, out=work)
        m *= self.beta1
        m += work
        g *= g
        g *= 1 - self.beta2
        v *= self.beta2
        v += g
        eps, corrected = self._corrections(step, factor)
        xp.sqrt(v, out=work)
        work += eps
        xp.divide(m, work, out=g)
        g *= corrected

    def _corrections(self, step: int, factor: float) -> tuple[float, float]:
        """eps, and the factor, with the bias corrections of both moments."""
        second = math.sqrt(1 - self.beta2**step)
        return self.eps * second, factor * second / (1 - self.beta1**step)

    def _numbers(self, step: int, factor: float, l2: float) -> dict[str, float]:
        """Of a kernel on GPUs."""
        eps, corrected = self._corrections(step, factor)
        return {
            "l2": l2,
            "beta1": self.beta1,
            "rest1": 1 - self.beta1,
            "beta2": self.beta2,
            "rest2": 1 - self.beta2,
            "eps": eps,
            "factor": corrected,
        }

    def _one_pass(
        self,
        w: Any,
        g: Any,
        coefficient: float,
        state: State,
        lr: float,
        step: int,
        *,
        l2: float = 0.0,
        decay: float = 1.0,
    ) -> bool:
        m, v = state["first"], state["second"]
        arrays = (w, g, m, v)
        if not all(isinstance(x, np.ndarray) and x.flags.c_contiguous for x in arrays):
            return False
        if w.dtype not in (np.float32, np.float64) or g.dtype != w.dtype:
            return False
        eps, factor = self._corrections(step, lr)
        numbers = (coefficient, l2, decay, self.beta1, self.beta2, eps, factor)
        at_w, at_g, at_m, at_v = (x.ctypes.data for x in arrays)
        _core.adam(w.dtype == np.float64, at_w, at_g, at_m, at_v, w.size, numbers)
        return True


@dataclasses.dataclass(frozen=True)
class Adam(_Moments):
    """Adam, Kingma and Ba (ICLR 2015), https://arxiv.org/abs/1412.6980, algorithm 1. weight_decay
    adds to the gradient.
    """

    def update(self, w: Any, g: Any, state: State, lr: float, step: int, work: Any) -> None:
        if self.weight_decay:
            namespace(w).multiply(w, self.weight_decay, out=work)
            g += work
        self._moments(g, state, step, lr, work)
        w -= g

    def fused(self, w: Any, g: Any, coefficient: float, state: State, lr: float, step: int) -> bool:
        return self._one_pass(w, g, coefficient, state, lr, step, l2=self.weight_decay)

    def on_gpu(self, lr: float, step: int) -> tuple[str, dict[str, float]]:
        return "adam", self._numbers(step, lr, self.weight_decay) | {"decay": 1.0}


@dataclasses.dataclass(frozen=True)
class AdamW(_Moments):
    """Adam with decoupled weight decay, Loshchilov and Hutter (ICLR 2019),
    https://arxiv.org/abs/1711.05101, algorithm 2: w shrinks by lr times weight_decay.
    """

    weight_decay: float = 0.01

    def update(self, w: Any, g: Any, state: State, lr: float, step: int, work: Any) -> None:
        self._moments(g, state, step, lr, work)
        if self.weight_decay:
            w *= 1 - lr * self.weight_decay
        w -= g

    def fused(self, w: Any, g: Any, coefficient: float, state: State, lr: float, step: int) -> bool:
        decay = 1 - lr * self.weight_decay
        return self._one_pass(w, g, coefficient, state, lr, step, decay=decay)

    def on_gpu(self, lr: float, step: int) -> tuple[str, dict[str, float]]:
        return "adam", self._numbers(step, lr, 0.0) | {"decay": 1 - lr * self.weight_decay}


@dataclasses.dataclass(frozen=True)
class LARS(Optimizer):
    """Layer-wise adaptive rates for SGD, You, Gitman and Ginsburg (2017),
    https://arxiv.org/abs/1708.03888, algorithm 1: each parameter's rate is scaled by
    trust ‖w‖ / (‖g‖ + weight_decay ‖w‖).
    """

    momentum: float = 0.9
    coefficient: float = 0.001  # η of the paper

    slots: ClassVar[tuple[str, ...]] = ("velocity",)
    layerwise: ClassVar[bool] = True

    def direction(self, w: Any, g: Any, state: State, step: int, work: Any) -> None:
        return

    def direction_on_gpu(self, step: int) -> tuple[str, dict[str, float]]:
        return "gradient", {}

    def trust(self, weight_norm: float, norm: float) -> float:
        if weight_norm == 0 or norm == 0:
            return 1.0
        return self.coefficient * weight_norm / (norm + self.weight_decay * weight_norm)

    def apply(self, w: Any, g: Any, state: State, lr: float) -> None:
        if self.weight_decay:
            g += w * self.weight_decay
        g *= lr
        v = state["velocity"]
        v *= self.momentum
        v += g
        w -= v

    def on_gpu(self, lr: float, step: int) -> tuple[str, dict[str, float]]:
        return "lars", {"l2": self.weight_decay, "lr": lr, "momentum": self.momentum}


@dataclasses.dataclass(frozen=True)
class LAMB(_Moments):
    """Layer-wise adaptive moments, You et al. (ICLR 2020), https://arxiv.org/abs/1904.00962,
    algorithm 2: each parameter's Adam step (with decoupled weight decay) is scaled by ‖w‖ / ‖step‖.
    """

    weight_decay: float = 0.01
    eps: float = 1e-6

    layerwise: ClassVar[bool] = True

    def direction(self, w: Any, g: Any, state: State, step: int, work: Any) -> None:
        self._moments(g, state, step, 1.0, work)
        if self.weight_decay:
            namespace(w).multiply(w, self.weight_decay, out=work)
            g += work

    def trust(self, weight_norm: float, norm: float) -> float:
        return weight_norm / norm if weight_norm and norm else 1.0

    def apply(self, w: Any, g: Any, state: State, lr: float) -> None:
        g *= lr
        w -= g

    def on_gpu(self, lr: float, step: int) -> tuple[str, dict[str, float]]:
        return "step", {"lr": lr}

    def direction_on_gpu(self, step: int) -> tuple[str, dict[str, float]]:
        return "lamb", self._numbers(step, 1.0, self.weight_decay)
