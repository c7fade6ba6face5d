"""Torch's optimizers on this rank's shards, where sharding does not change what they compute."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch

from ..array import dtype_name, native
from ..errors import UnsupportedError
from .precision import wide_dtype
from .sharding import Piece, Shard, Store, host
from .torch_arrays import tensor_of

# They step every element by itself, so they may be given any part of a parameter.
ELEMENTWISE = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop")
_SCALARS = ("step", "mu_product")  # parts of their state that are one number for a parameter


@dataclasses.dataclass(frozen=True)
class TorchOptimizer:
    """A torch optimizer, and which parameters its groups hold, by name; what ranks compare."""

    kind: str
    groups: tuple[str, ...]  # settings of each
    names: tuple[tuple[str, ...], ...]  # parameters of each

    slots: ClassVar[tuple[str, ...]] = ()
    kept: ClassVar[tuple[str, ...]] = ()

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
            held = {k: v for k, v in group.items() if k != "params"}
            plain = {k: v.item() if isinstance(v, np.generic) else v for k, v in held.items()}
            settings.append(repr(plain))
        stepped = {name for part in names for name in part}
        lost = [name for name in named.values() if name not in stepped]
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
        self._pieces: list[tuple[Shard, Piece, Any]] = []  # with its tensor
        self._factor = 1.0  # of the learning rate, in the last step
        self.missed: dict[str, int] = {}  # torch counts the steps of each parameter itself

    def lr(self, factor: float) -> float:
        """Of the first group, in a step with this factor."""
        if factor == self._factor:  # what the user has set in the optimizer, if they have
            return float(self._optimizer.param_groups[0]["lr"])
        return self._rates[0] * factor

    def build(self) -> None:
        """The store was laid out anew."""
        self._pieces = []
        self._dtypes = {}
        found: dict[str, list[Any]] = {}
        for shard, piece in self._store.pieces():
            shape = self._store.owners[piece.name][3]
            flat = tensor_of(shard.master[piece.low : piece.high])
            tensor = (flat if self._store.stage else flat.view(shape)).requires_grad_()
            self._dtypes[piece.name] = shard.master.dtype
            self._pieces.append((shard, piece, tensor))
            found.setdefault(piece.name, []).append(tensor)
        self._optimizer.state.clear()
        for group, names in zip(self._optimizer.param_groups, self._about.names, strict=True):
            group["params"] = [t for name in names for t in found.get(name, [])]

    def step(self, updates: int, factor: float, coefficient: float, unused: frozenset[str]) -> None:
        """As `Stepper.step`."""
        if factor != self._factor:  # else the rate is what the user has set in the optimizer
            self._factor = factor
            for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
                _set_rate(group, rate * factor)
        for shard, piece, tensor in self._pieces:
            tensor.grad = None
            if piece.name not in unused:
                grad = shard.grad[piece.low : piece.high]
                dtype = self._dtypes[piece.name]
                here = host(grad) if self._store.offload else grad
                wide = here.astype(wide_dtype(dtype_name(dtype)))
                wide *= coefficient
                tensor.grad = tensor_of(wide.astype(dtype, copy=False)).view(tensor.shape)
        self._optimizer.step()
        works = [self._store.publish(shard) for shard in self._store.shards]
        for work in works:
            if work is not None:
                work.wait()

    # ---- for checkpoints -----------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """This rank's state: arrays by "torch.KEY/NAME@OFFSET", flat; and what JSON can hold: the
        rates of the groups and, by parameter, numbers and the keys of its arrays.

        Raises UnsupportedError for an optimizer that keeps something else.
        """
        arrays: dict[str, Any] = {}
        kept: dict[str, dict[str, Any]] = {}
        for _, piece, tensor in self._pieces:
            numbers, keys = {}, []
            for key, x in self._optimizer.state.get(tensor, {}).items():
                if x is None:
                    continue
                if key in _SCALARS:
                    numbers[key] = [float(x), str(x.dtype)[6:] if torch.is_tensor(x) else None]
                elif torch.is_tensor(x) and x.shape == tensor.shape:
                    flat = native(x.detach().reshape(-1).contiguous())
                    arrays[f"torch.{key}/{piece.name}@{piece.offset}"] = host(flat)
                    keys.append(key)
                else:
                    raise UnsupportedError(
                        f"checkpoints hold state of torch's optimizers that has the parameter's "
                        f"shape; {self._about.kind} keeps {key!r} of {piece.name!r} otherwise"
                    )
            if numbers or keys:
                kept[piece.name] = {"numbers": numbers, "arrays": keys}
        rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        return arrays, {"rates": rates, "factor": self._factor, "parameters": kept}

    def restore(self, about: Mapping[str, Any], arrays: Mapping[tuple[str, int, str], Any]) -> None:
        """Takes over a state. The store was built for it.

        about   the second part of `state`, of all ranks
        arrays  by name of the parameter, offset and key, for the pieces that this rank holds
        """
        self._factor = float(about["factor"])
        for group, rate in zip(self._optimizer.param_groups, about["rates"], strict=True):
            _set_rate(group, rate)
        self._optimizer.state.clear()
        for _, piece, tensor in self._pieces:
            kept = about["parameters"].get(piece.name)
            if kept is None:
                continue
            state = self._optimizer.state[tensor] = {}
            for key, (number, dtype) in kept["numbers"].items():
                state[key] = number if dtype is None else torch.tensor(number, dtype=_dtype(dtype))
            for key in kept["arrays"]:
                x = torch.empty_like(tensor, requires_grad=False)
                x.copy_(tensor_of(arrays[piece.name, piece.offset, key]).view(tensor.shape))
                state[key] = x


def _set_rate(group: dict[str, Any], rate: float) -> None:
    """A rate that is a tensor stays one: torch computes with it in its dtype."""
    old = group["lr"]
    group["lr"] = torch.full_like(old, rate) if torch.is_tensor(old) else rate


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found
