"""Torch's optimizers on this rank's shards, where sharding does not change what they compute."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from ..errors import UnsupportedError
from .sharding import Store, host
from .torch_arrays import tensor_of

# They step every element by itself, so they may be given any part of a parameter.
ELEMENTWISE = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop")


@dataclasses.dataclass(frozen=True)
class TorchOptimizer:
    """A torch optimizer, and which parameters its groups hold, by name; what ranks compare."""

    kind: str
    groups: tuple[str, ...]  # settings of each
    names: tuple[tuple[str, ...], ...]  # parameters of each

    slots: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def of(cls, optimizer: Any, named: Mapping[int, str]) -> TorchOptimizer:
        """What `optimizer` is; `named` has the names of the module's parameters by id."""
        settings, names = [], []
        for group in optimizer.param_groups:
            foreign = [p for p in group["params"] if p.requires_grad and id(p) not in named]
            if foreign:
                raise ValueError(
                    f"the optimizer holds a parameter of shape {tuple(foreign[0].shape)} that is "
                    "not the module's"
                )
            names.append(tuple(named[id(p)] for p in group["params"] if p.requires_grad))
            settings.append(repr({k: v for k, v in group.items() if k != "params"}))
        held = {name for part in names for name in part}
        lost = [name for name in named.values() if name not in held]
        if lost:
            raise ValueError(f"the optimizer does not hold parameter {lost[0]!r}")
        return cls(type(optimizer).__name__, tuple(settings), tuple(names))


class TorchStepper:
    """Steps this rank's pieces of parameters, which take the place of the module's in it.

    Pieces of whole parameters (stage 0) have the shape of the parameter, others are flat. How
    torch rounds may depend on where an element lies, so stages may differ in last bits.
    """

    def __init__(self, store: Store, optimizer: Any, about: TorchOptimizer) -> None:
        if store.stage and about.kind not in ELEMENTWISE:
            raise UnsupportedError(
                f"torch's {about.kind} looks at whole parameters, and sharding={store.stage} gives "
                f"it parts of them; with sharding it can be {', '.join(ELEMENTWISE)}"
            )
        self._store = store
        self._optimizer = optimizer
        self._about = about
        self._rates = [float(group["lr"]) for group in optimizer.param_groups]
        self._dtypes: dict[str, Any] = {}
        self._pieces: list[tuple[str, Any, Any]] = []  # name, tensor, its gradient in the store

    @property
    def lr(self) -> float:
        """Of the first group."""
        return float(self._optimizer.param_groups[0]["lr"])

    def build(self) -> None:
        """The store was laid out anew."""
        self._pieces = []
        self._dtypes = {}
        found: dict[str, list[Any]] = {}
        for shard, piece in self._store.pieces():
            shape = self._store.owners[piece.name][3]
            flat = tensor_of(shard.master[piece.low : piece.high])
            tensor = (flat if self._store.stage else flat.view(shape)).requires_grad_()
            grad = shard.grad[piece.low : piece.high]
            self._dtypes[piece.name] = shard.master.dtype
            self._pieces.append((piece.name, tensor, grad))
            found.setdefault(piece.name, []).append(tensor)
        self._optimizer.state.clear()
        for group, names in zip(self._optimizer.param_groups, self._about.names, strict=True):
            group["params"] = [t for name in names for t in found.get(name, [])]

    def step(self, updates: int, factor: float, coefficient: float, unused: frozenset[str]) -> None:
        """As `Stepper.step`."""
        if factor != 1.0 or updates == 0:
            for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * factor
        for name, tensor, grad in self._pieces:
            tensor.grad = None
            if name not in unused:
                wide = (host(grad) if self._store.offload else grad).astype(self._dtypes[name])
                wide *= coefficient
                tensor.grad = tensor_of(wide).view(tensor.shape)
        self._optimizer.step()
        works = [self._store.publish(shard) for shard in self._store.shards]
        for work in works:
            if work is not None:
                work.wait()
