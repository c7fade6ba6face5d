"""What the trainer knows of a model; `functional` and `module` are the two kinds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from .sharding import Shard

if TYPE_CHECKING:
    from ..bucket_layout import Bucket
    from ..lent_memory import Lent
    from .gathering import Gatherer
    from .sharding import Store

Ready = Callable[..., None]  # ready(name, gradient, scale)


class Together(Protocol):
    """Who takes all gradients of a bucket at once; see `Bucketer`."""

    def began(self, bucket: Bucket) -> None:
        """The first of them is there."""

    def ready_together(self, bucket: Bucket, grads: Sequence[Any]) -> None:
        """All are, in the order of the bucket's slots."""


class Sink(NamedTuple):
    """Where gradients go: each by itself to `ready`; or to `together`, if there is one, those of a
    bucket as soon as all are there.
    """

    ready: Ready
    together: Together | None


class Model(ABC):
    """Parameters by name, and how to get their gradients.

    parameters  trainable ones, whole, as arrays of numpy or cupy; a tied parameter is in here once
    frozen      parameters that have no gradient
    buffers     other arrays that ranks must begin with alike
    wide        names of parameters that keep their dtype under every precision
    on_gpu      all trainable parameters are on a GPU
    twice       what to do where a parameter got a gradient twice in one backward
    """

    parameters: dict[str, Any]
    frozen: dict[str, Any]
    buffers: dict[str, Any]
    wide: frozenset[str] = frozenset()
    on_gpu: bool
    twice: str = "hand over one gradient of each parameter"

    @abstractmethod
    def bind(self, store: Store, gatherer: Gatherer | None, dtype: str | None) -> None:
        """The parameters live in `store` from now on; with a gatherer they come on demand. Frozen
        ones of floats become `dtype`, unless it is None or they are `wide`.
        """

    @abstractmethod
    def run(self, batch: Any, weight: float, scale: float, sink: Sink) -> Any:
        """Forward and backward. Hands the sink the gradient of every parameter, times weight and
        scale, as soon as it is there. Returns the loss, the mean over the batch: a number, or an
        array of one, on a GPU perhaps, which is not waited for.
        """

    @abstractmethod
    def take(self, shard: Shard) -> Any:
        """Memory for the gathered parameters of a bucket."""

    @abstractmethod
    def give(self, shard: Shard) -> None:
        """The gathered parameters of a bucket are needed no more."""

    def lend(self, count: int, dtype: str, device: str) -> Lent | None:
        """Memory for `count` elements; None if the model has none that it needs at times only."""
        return None

    def stream(self) -> AbstractContextManager[None]:
        """In this block what cupy does is ordered with what the model does on a GPU."""
        return nullcontext()

    def close(self) -> None:
        """The trainer is through with the model."""
        return

    def release(self) -> None:
        """As `close`, and all parameters, which are gathered, are the model's own from now on."""
        return

    @abstractmethod
    def whole(self) -> Any:
        """What a user evaluates: the module, or parameters by name."""


def model_of(
    model: Any, params: Mapping[str, Any] | None, loss: Callable[..., Any] | None, frozen: Any
) -> Model:
    """The model of what a user passes to the trainer; raises TypeError for what is none."""
    if isinstance(model, Model):
        return model
    if any(base.__module__.startswith("torch.") for base in type(model).__mro__):
        from .module import ModuleModel

        if loss is None or params is not None or frozen:
            raise TypeError(
                "a torch module needs loss=, loss(module, batch), and its parameters are its own: "
                "no params= or frozen= (set requires_grad)"
            )
        return ModuleModel(model, loss)
    from .functional import FunctionModel

    if not callable(model) or params is None:
        raise TypeError("model is a torch.nn.Module with loss=, or a function with params=")
    if loss is not None:
        raise TypeError("a function returns its loss itself: no loss=, which is for torch modules")
    return FunctionModel(model, params, frozen)
