"""Models that are functions: loss_and_grads(params, batch, emit) over dicts of arrays."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..array import device_name, empty, native, numpy_dtype
from ..errors import ArrayError, CollectiveError, did_you_mean
from .model import Model, Ready, Sink
from .settings import is_real
from .sharding import Shard

if TYPE_CHECKING:
    from .gathering import Gatherer
    from .sharding import Store


class Emit:
    """What a function calls with each gradient: emit(name, gradient).

    scale  what to multiply the gradient of the loss by before backward: 1 but in fp16
    """

    def __init__(self, model: FunctionModel, weight: float, scale: float, ready: Ready) -> None:
        self.scale = scale
        self._model = model
        self._weight = weight
        self._ready = ready
        self._sums: dict[str, Any] = {}  # of tied parameters, until all gradients are there
        self._came: set[str] = set()  # names of tied parameters

    def __call__(self, name: str, grad: Any) -> None:
        model = self._model
        owner = model.owner(name)
        if owner in model.frozen:
            return
        if grad is None:
            raise ValueError(
                f"emit({name!r}, None) is no gradient; do not emit it, with find_unused=True, if "
                "there is none"
            )
        if len(model.tied[owner]) > 1:
            self._add(owner, name, native(grad, f"gradient of {name!r}"))
            if not self._came.issuperset(model.tied[owner]):
                return
            grad = self._sums.pop(owner)
        self._ready(owner, grad, self._weight)

    def end(self) -> None:
        """The function has returned: tied parameters have the gradients that came by now."""
        while self._sums:
            owner, grad = self._sums.popitem()
            self._ready(owner, grad, self._weight)

    def _add(self, owner: str, name: str, grad: Any) -> None:
        """Takes one of the gradients of a tied parameter, whose memory the function may use again.

        Raises ValueError if it came before, ArrayError if it does not have the others' shape.
        """
        if name in self._came:
            raise ValueError(f"the gradient of {name!r} was emitted twice in one pass")
        self._came.add(name)
        held = self._sums.get(owner)
        if held is None:
            self._sums[owner] = grad.copy()
            return
        if held.shape != grad.shape:
            raise ArrayError(
                f"the gradient of {name!r} has shape {tuple(grad.shape)}, that of what it is tied "
                f"with {tuple(held.shape)}"
            )
        held = held.astype(np.promote_types(held.dtype, grad.dtype), copy=False)
        held += grad
        self._sums[owner] = held


class Parameters(Mapping[str, Any]):
    """The parameters that a function gets: arrays by name, gathered when they are asked for."""

    def __init__(self, model: FunctionModel) -> None:
        self._model = model

    def __getitem__(self, name: str) -> Any:
        return self._model.array(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._model.names)

    def __len__(self) -> int:
        return len(self._model.names)


class FunctionModel(Model):
    """A function and its parameters.

    function  loss_and_grads(params, batch, emit) -> loss, the mean over the batch. It calls
              emit(name, gradient of the loss) once for each name; in the order of backward is best.
              It may instead return (loss, dict of gradients).
    params    arrays by name: numpy, cupy or jax. The same array under two names is one parameter,
              tied: its gradient is the sum of those emitted under both, or the one that is.
    frozen    names of parameters that have no gradient
    """

    twice = "emit each gradient once in a call of the function, as the sum of all its parts"

    def __init__(
        self,
        function: Callable[..., Any],
        params: Mapping[str, Any],
        frozen: Sequence[str] = (),
    ) -> None:
        frozen = [frozen] if isinstance(frozen, str) else frozen
        unknown = [name for name in frozen if name not in params]
        if unknown:
            raise ValueError(
                f"frozen: no parameter {unknown[0]!r}; {did_you_mean(unknown[0], params)}"
            )
        self._function = function
        self.names = list(params)
        self._owner: dict[str, str] = {}
        self.tied: dict[str, list[str]] = {}
        seen: dict[int, str] = {}
        self.parameters, self.frozen, self.buffers = {}, {}, {}
        jax = sys.modules.get("jax")
        self._jax = jax if jax and any(isinstance(x, jax.Array) for x in params.values()) else None
        for name, x in params.items():
            owner = seen.setdefault(id(x), name)
            self._owner[name] = owner
            self.tied.setdefault(owner, []).append(name)
            if owner == name:
                kind = self.frozen if name in frozen else self.parameters
                kind[name] = native(x, f"parameter {name!r}").copy()
            elif (name in frozen) != (owner in self.frozen):
                raise ValueError(f"{owner!r} and {name!r} are tied, and only one of them is frozen")
        self.on_gpu = all(device_name(x) != "cpu" for x in self.parameters.values())
        self._store: Store | None = None
        self._gatherer: Gatherer | None = None

    def owner(self, name: str) -> str:
        """The name under which a parameter is kept."""
        found = self._owner.get(name)
        if found is None:
            raise CollectiveError(f"no parameter {name!r}; {did_you_mean(name, self._owner)}")
        return found

    def array(self, name: str) -> Any:
        """A parameter as the function sees it."""
        if name not in self._owner:
            raise KeyError(name)
        owner = self._owner[name]
        if owner in self.frozen:
            x = self.frozen[owner]
        else:
            assert self._store is not None
            shard = self._store.owners[owner][0]
            full = shard.full
            if self._gatherer is not None:
                full = self._gatherer.need(shard.bucket.index)
            x = self._store.view(owner, full)
        if self._jax is None:
            return x
        # jax arrays never change, and the trainer writes its parameters: jax gets a copy.
        if device_name(x) == "cpu":
            return self._jax.numpy.array(x, copy=True)
        # (from_dlpack(x, copy=True) is for arrays on hosts: jax 0.11 refuses it for those on GPUs.)
        # Nothing orders what jax does on its streams before what the trainer writes there next.
        seen = self._jax.numpy.from_dlpack(x)
        return self._jax.numpy.array(seen, copy=True).block_until_ready()

    def bind(self, store: Store, gatherer: Gatherer | None, dtype: str | None) -> None:
        self._store, self._gatherer = store, gatherer
        if dtype is not None:
            kind = numpy_dtype(dtype)
            self.frozen = {
                n: x.astype(kind, copy=False) if is_real(x) else x for n, x in self.frozen.items()
            }

    def run(self, batch: Any, weight: float, scale: float, sink: Sink) -> Any:
        emit = Emit(self, weight, scale, sink.ready)
        # A dict wherever it costs nothing: jax functions take it as it is.
        params: Mapping[str, Any] = Parameters(self)
        if self._gatherer is None:
            params = dict(params)
        loss = self._function(params, batch, emit)
        if isinstance(loss, tuple):
            loss, grads = loss
            for name, grad in grads.items():
                emit(name, grad)
        emit.end()
        return loss

    def take(self, shard: Shard) -> Any:
        # Fresh memory: the function may hold arrays of the last gather still.
        return empty((shard.bucket.count,), shard.dtype, shard.bucket.device)

    def give(self, shard: Shard) -> None:
        return

    def whole(self) -> Any:
        return Parameters(self)
