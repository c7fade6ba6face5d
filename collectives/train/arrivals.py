"""When gradients of a torch module are there: hooks of its parameters.

At first every parameter has a hook. Each costs the host about 11 us on a GPU, which steps of many
small layers wait for. So once a pass has shown in which order gradients come, a bucket has two
hooks: at the parameter whose gradient comes first, for the clock, and at the one whose gradient
comes last, where all are handed over. A pass that takes another way is noticed at such a hook, or
at its end: then what is there is handed over, and every parameter has its hook again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..errors import CollectiveError

if TYPE_CHECKING:
    from ..bucket_layout import Bucket
    from .sharding import Shard

# Passes that went another way, after which parameters keep their hooks: setting hooks again, twice
# for each such pass, costs as much as they save in a few.
_DEPARTURES = 3


# Parameters that are shut (see `guarded`) answer as fast as others in this block.
_plainly = torch._C.DisableTorchFunctionSubclass


class Listener(Protocol):
    """Who is told of gradients, which are the listener's from then on."""

    def arrived(self, name: str, grad: torch.Tensor) -> None:
        """One gradient is there."""

    def began(self, bucket: Bucket) -> None:
        """The first gradient of a bucket is there; `filled` comes with all of them."""

    def filled(self, bucket: Bucket, grads: list[torch.Tensor]) -> None:
        """All gradients of a bucket are there, in the order of its slots."""


class _Group:
    """The parameters of a bucket. `done`: their gradients were handed over in this pass."""

    def __init__(self, bucket: Bucket, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self.bucket = bucket
        self.parameters = [parameters[slot.name] for slot in bucket.slots]
        self.done = False


class Arrivals:
    """Hooks on `parameters`, by name, that tell `listener` of their gradients."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], listener: Listener) -> None:
        self._parameters = parameters
        self._listener = listener
        self._hooks: list[Any] = []
        self._order: list[str] = []  # whose gradients came in this pass, each by a hook of its own
        self._usual: list[str] | None = None  # the order of a pass in which all came
        self._groups: list[_Group] = []
        self._shards: Sequence[Shard] | None = None  # whose buckets the groups are
        self._departures = 0
        self._passing = False  # else gradients are those of somebody else's backward
        self._hook_each()

    def begin(self, shards: Sequence[Shard] | None) -> None:
        """A pass begins.

        shards  where parameters lie for good; None if each gradient is to be told by itself
        """
        with _plainly():
            for name, parameter in self._parameters.items():
                if parameter.grad is not None:
                    raise CollectiveError(
                        f"parameter {name!r} has a gradient before the pass: a trainer's module "
                        "has none but those of its steps (call zero_grad() after a backward of "
                        "your own)"
                    )
                if not parameter.requires_grad:  # frozen by now: no hook can be set there
                    shards = None
        if self._usual is None or self._departures >= _DEPARTURES:
            shards = None
        if shards is not self._shards:
            if shards is None:
                self._hook_each()
            else:
                self._hook_buckets(shards)
        self._order.clear()
        for group in self._groups:
            group.done = False
        self._passing = True

    def end(self) -> None:
        """Backward is over."""
        if not self._groups:
            if len(self._order) == len(self._parameters) == len(set(self._order)):
                self._usual = list(self._order)
            self._take_all()  # of parameters that were frozen when hooks were set
        elif self._there():
            self._depart()
        self._passing = False

    def discard(self) -> None:
        """The pass is given up, with what it has left."""
        self._passing = False
        with _plainly():
            for parameter in self._parameters.values():
                parameter.grad = None

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    # ---- hooks -----------------------------------------------------------------------------------

    def _hook(self, parameter: torch.nn.Parameter, tell: Callable[[Arrivals], None]) -> None:
        # Parameters outlive the trainer, and what they hold is beyond Python's collector of cycles.
        own = weakref.ref(self)

        def hook(_: torch.Tensor) -> None:
            arrivals = own()
            if arrivals is not None and arrivals._passing:
                tell(arrivals)

        self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def _hook_each(self) -> None:
        self.close()
        self._groups, self._shards = [], None
        for name, parameter in self._parameters.items():
            if parameter.requires_grad:
                self._hook(parameter, partial(Arrivals._one, name=name))

    def _hook_buckets(self, shards: Sequence[Shard]) -> None:
        assert self._usual is not None
        self.close()
        place = {name: i for i, name in enumerate(self._usual)}
        self._groups = [_Group(shard.bucket, self._parameters) for shard in shards]
        self._shards = shards
        for number, group in enumerate(self._groups):
            names = sorted((slot.name for slot in group.bucket.slots), key=place.__getitem__)
            first, last = self._parameters[names[0]], self._parameters[names[-1]]
            if first is not last:
                self._hook(first, partial(Arrivals._first, number=number))
            self._hook(last, partial(Arrivals._last, number=number))

    def _one(self, name: str) -> None:
        self._order.append(name)
        self._take(name)

    def _take(self, name: str) -> None:
        parameter = self._parameters[name]
        with _plainly():
            grad, parameter.grad = parameter.grad, None
        assert grad is not None
        self._listener.arrived(name, grad)

    def _first(self, number: int) -> None:
        self._listener.began(self._groups[number].bucket)

    def _last(self, number: int) -> None:
        group = self._groups[number]
        with _plainly():
            grads = [parameter.grad for parameter in group.parameters]
        if group.done or any(grad is None for grad in grads):
            self._depart()
            return
        group.done = True
        with _plainly():
            for parameter in group.parameters:
                parameter.grad = None
        self._listener.filled(group.bucket, grads)

    def _depart(self) -> None:
        """This pass goes another way."""
        self._departures += 1
        self._usual = None
        self._hook_each()
        self._take_all()

    def _take_all(self) -> None:
        """Tells what is there by now, each by itself."""
        for name in self._there():
            self._take(name)

    def _there(self) -> list[str]:
        """Whose gradients nobody has taken."""
        with _plainly():
            return [name for name, p in self._parameters.items() if p.grad is not None]
