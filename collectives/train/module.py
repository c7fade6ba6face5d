"""Models that are torch modules: hooks hand over gradients, and under stage 3 fetch parameters.

Under stage 3 a parameter's bucket is gathered before the forward of the module that has it, and
again when the gradient of that module's output is there. In between the memory is given back: the
storage shrinks to nothing, so whatever autograd has saved, also views of parameters, is empty until
the next gather fills the same storage. Modules that are not torch's own may return anything: what
autograd saves in their forward calls for its bucket by itself (see `saved`).

A parameter must be used in the forward of a module that has it (it may have several). Where it is
used elsewhere (see `guarded`), its bucket stays to the end of the pass if it is there, and is named
if it is not.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..array import namespace, native
from ..array.dtypes import torch_dtype
from ..device import queues
from ..errors import CollectiveError
from ..torch_gradients import CupyFollows
from ..untraced import untraced
from .arrivals import Arrivals
from .batches import each_array
from .courier import Courier
from .gathering import KEPT
from .guarded import each_tensor, guard, not_there, open_up, shut, unguard
from .holding import check_free, hold, let_go, used_while_empty
from .model import Model, Sink
from .saved import Saving
from .sharding import Shard
from .torch_arrays import tensor_of

if TYPE_CHECKING:
    from ..bucket_layout import Bucket
    from ..lent_memory import Lent
    from .gathering import Gatherer
    from .sharding import Store


_QUEUES = 8  # of a GPU, for the streams of a step under stage 3


class _Flat(NamedTuple):
    """The memory of a bucket under stage 3.

    views  each parameter with its part, and with what it has in between: the same shape, for
           autograd and whoever asks, without memory. It is NaN for what does not see that the
           parameter is shut.
    array  on the host None: an array of numpy that is kept would keep the memory
    """

    whole: torch.Tensor
    views: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    array: _Array | None


class ModuleModel(Model):
    """A torch module and its loss: loss(module, batch) -> tensor, the mean over the batch."""

    twice = (
        "a parameter gets a gradient twice in one backward where reentrant checkpointing has its "
        "layer more than once: call checkpoint(..., use_reentrant=False) there"
    )

    def __init__(self, module: torch.nn.Module, loss: Callable[..., Any]) -> None:
        check_free(module)
        self._module = module
        self._loss = loss
        named = dict(module.named_parameters())  # a tied parameter comes once
        self._tensors = {n: p for n, p in named.items() if p.requires_grad}
        self.parameters = {n: _copy(p) for n, p in self._tensors.items()}
        self._frozen = {n: p for n, p in named.items() if not p.requires_grad}
        self.frozen = {n: _copy(p) for n, p in self._frozen.items()}
        # Its running statistics are float32, and torch wants parameters like them beside any input.
        self.wide = frozenset(
            f"{path}.{own}" if path else own
            for path, part in module.named_modules()
            if isinstance(part, torch.nn.modules.batchnorm._BatchNorm)
            for own, _ in part.named_parameters(recurse=False)
        )
        self._names = {id(p): n for n, p in self._tensors.items()}
        self._sink: Sink | None = None
        self._done: set[str] = set()  # whose gradient has arrived in this pass
        self._dtype: torch.dtype | None = None
        self._flat: dict[int, _Flat] = {}  # bucket -> its memory under stage 3
        self._places: dict[int, int] = {}  # where that begins, if it has memory -> bucket
        self._owns: list[_Own] = []
        self._entered: list[_Entered] = []  # forwards under way
        self._saving = Saving(self._bucket_of, self._fetch)
        self._gatherer: Gatherer | None = None
        self._store: Store | None = None
        self._arrivals = Arrivals(self._tensors, self)
        self._hooks: list[Any] = []  # on modules
        devices = {p.device for p in self._tensors.values() if p.is_cuda}
        self._ordinal = devices.pop().index if devices else None
        self._courier = Courier(self._ordinal)
        # Gathers and reductions are calls of two communicators. Where their streams may share a
        # queue of the GPU, one's wait holds the other up, so that all ranks need the same order.
        self._in_order = self._ordinal is not None and queues() < _QUEUES
        self.on_gpu = all(p.is_cuda for p in self._tensors.values())

    @property
    def buffers(self) -> dict[str, Any]:
        """Those that the module has now, since forward may replace them. They are its own memory or
        copies: what is written is set here.
        """
        return {
            name: native(_dense(buffer.detach()), f"buffer {name!r}")
            for name, buffer in self._module.named_buffers()
            if buffer.numel()
        }

    @buffers.setter
    def buffers(self, values: Mapping[str, Any]) -> None:
        for name, buffer in self._module.named_buffers():
            if name not in values:
                continue
            target = buffer.detach()
            whole = target.contiguous()
            array = native(whole)
            array[...] = namespace(array).asarray(values[name])
            if not target.is_contiguous():
                for axis, stride in enumerate(target.stride()):
                    if stride == 0:  # expanded: all along the axis are one
                        target, whole = target.narrow(axis, 0, 1), whole.narrow(axis, 0, 1)
                target.copy_(whole)

    @property
    def passing(self) -> frozenset[str]:
        """The names of buffers that are not persistent, which checkpoints do not hold."""
        return frozenset(
            f"{path}.{own}" if path else own
            for path, part in self._module.named_modules()
            for own in getattr(part, "_non_persistent_buffers_set", ())
        )

    @property
    def named(self) -> dict[int, str]:
        """The names of the trainable parameters, by id."""
        return self._names

    # ---- where parameters live -----------------------------------------------------------------

    def bind(self, store: Store, gatherer: Gatherer | None, dtype: str | None) -> None:
        first = self._store is None
        self._store, self._gatherer = store, gatherer
        self._dtype = torch_dtype(torch, dtype) if dtype is not None else None
        if gatherer is None:
            for name, parameter in self._tensors.items():
                shard = store.owners[name][0]
                parameter.data = tensor_of(store.view(name, shard.full))
        else:
            for parameter in self._tensors.values():
                guard(parameter, weakref.WeakMethod(self._used_elsewhere))
            for shard in store.shards:
                self._flat[shard.bucket.index] = self._flat_of(shard)
                self.give(shard)
        if first:
            self._begin()
            mine = weakref.ref(self)
            hold(self._tensors.values(), mine, empty=gatherer is not None)
        for own in self._owns:
            own.find(self._bucket)

    def _flat_of(self, shard: Shard) -> _Flat:
        kind = torch_dtype(torch, shard.dtype)
        flat = torch.empty(shard.bucket.count, dtype=kind, device=shard.bucket.device)
        nan = flat.new_full((), float("nan"))
        views = [
            (
                self._tensors[slot.name],
                # It sees the storage, whatever memory that has.
                flat[slot.start : slot.start + slot.length].view(slot.shape),
                nan.expand(slot.shape),
            )
            for slot in shard.bucket.slots
        ]
        return _Flat(flat, views, _Array(flat) if flat.is_cuda else None)

    def _begin(self) -> None:
        for name, parameter in self._frozen.items():
            value = tensor_of(self.frozen[name])
            if self._dtype is not None and value.is_floating_point() and name not in self.wide:
                value = value.to(self._dtype)
            parameter.data = value
            self.frozen[name] = native(parameter.detach())
        if self._gatherer is not None:
            self._watch()

    def take(self, shard: Shard) -> Any:
        flat, views, array = self._flat[shard.bucket.index]
        flat.untyped_storage().resize_(flat.numel() * flat.element_size())
        if flat.numel():  # what has no memory is nowhere
            self._places[flat.data_ptr()] = shard.bucket.index
        with torch._C.DisableTorchFunctionSubclass():  # they may be shut
            for parameter, view, _ in views:
                parameter.data = view
        return native(flat) if array is None else array.now()[0]

    def give(self, shard: Shard) -> None:
        flat, views, _ = self._flat[shard.bucket.index]
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, _, blank in views:
                shut(parameter)
                parameter.data = blank
        self._places.pop(flat.data_ptr(), None)
        storage = flat.untyped_storage()
        if not storage.resizable():  # somebody has it as an array of numpy, and keeps it
            self._flat[shard.bucket.index] = self._flat_of(shard)
            storage = self._flat[shard.bucket.index].whole.untyped_storage()
        storage.resize_(0)

    def lend(self, count: int, dtype: str, device: str) -> Lent | None:
        return _Lent(count, dtype, device) if self.on_gpu else None

    def stream(self) -> AbstractContextManager[None]:
        return nullcontext() if self._ordinal is None else CupyFollows(self._ordinal)

    def close(self) -> None:
        self._courier.close()
        self._arrivals.close()
        for hook in self._hooks:
            hook.remove()
        for parameter in self._tensors.values():
            unguard(parameter)
        let_go(self._tensors.values(), whole=False)
        self._tensors = {}  # another trainer's from now on, perhaps

    def release(self) -> None:
        for parameter in self._tensors.values():
            open_up(parameter)
            parameter.data = parameter.detach().clone()
        let_go(self._tensors.values(), whole=True)

    def whole(self) -> Any:
        for parameter in self._tensors.values():
            open_up(parameter)
        return self._module

    # ---- forward and backward ------------------------------------------------------------------

    def run(self, batch: Any, weight: float, scale: float, sink: Sink) -> Any:
        self._sink = sink
        self._done.clear()
        if self._dtype is not None:
            batch = _cast(batch, self._dtype)
        assert self._store is not None
        self._arrivals.begin(None if sink.together is None else self._store.shards)
        try:
            loss = self._forward_and_backward(batch, weight * scale)
            self._arrivals.end()
            self._courier.wait()
        except BaseException:
            self._courier.end()
            self._arrivals.discard()
            while self._entered:  # what interrupts a forward may leave it without its hooks
                self._leave()
            raise
        return loss

    def _forward_and_backward(self, batch: Any, factor: float) -> Any:
        try:
            loss = self._loss(self._module, batch)
            if not isinstance(loss, torch.Tensor):
                raise TypeError(
                    f"loss= returned a {type(loss).__name__}; return the mean over the batch as a "
                    "tensor of one element, where backward begins"
                )
            # What is smaller than float32 would round the weights.
            wide = loss if loss.dtype == torch.float64 else loss.float()
            (wide * factor).backward()
        except RuntimeError as error:
            self._explain(error)
            raise
        return wide.detach()

    def _explain(self, error: RuntimeError) -> None:
        """Raises CollectiveError if the module used a parameter that was not gathered."""
        if self._gatherer is None or isinstance(error, CollectiveError):
            return
        empty = {id(p): n for n, p in self._tensors.items() if self._is_empty(n)}
        names = used_while_empty(error.__traceback__, empty)
        if names:
            raise CollectiveError(f"{not_there(names)} ({error})") from error

    def _is_empty(self, name: str) -> bool:
        assert self._store is not None
        shard, _, length, _ = self._store.owners[name]
        return shard.full is None and length > 0

    # ---- gradients, told by `Arrivals` -----------------------------------------------------------

    def arrived(self, name: str, grad: torch.Tensor) -> None:
        assert self._sink is not None
        self._courier.wait()
        self._sink.ready(name, _dense(grad))
        if self._gatherer is not None:
            self._let_go(self._bucket(name), {name})

    def began(self, bucket: Bucket) -> None:
        assert self._sink is not None and self._sink.together is not None
        self._hand_over(partial(self._sink.together.began, bucket))

    def filled(self, bucket: Bucket, grads: list[torch.Tensor]) -> None:
        assert self._sink is not None
        self._hand_over(partial(_ready_together, self._sink, bucket, grads))
        if self._gatherer is not None:
            self._let_go(bucket.index, {slot.name for slot in bucket.slots})

    def _hand_over(self, errand: Callable[[], None]) -> None:
        if self._gatherer is not None and self._in_order:
            errand()
        else:
            self._courier.give(errand)

    def _let_go(self, bucket: int, names: set[str]) -> None:
        """Nothing waits for gradients of these parameters of a bucket any more."""
        assert self._gatherer is not None
        self._done |= names
        self._gatherer.pins[bucket] -= names

    # ---- parameters on demand --------------------------------------------------------------------

    def _bucket(self, name: str) -> int:
        assert self._store is not None
        return self._store.owners[name][0].bucket.index

    def _watch(self) -> None:
        """Hooks on all modules that have parameters of their own."""
        for module in self._module.modules():
            parts = [module]
            if isinstance(module, torch.nn.MultiheadAttention):
                parts.append(module.out_proj)  # it uses this one's parameters, and never calls it
            lists = (torch.nn.ParameterList, torch.nn.ParameterDict)  # cannot be called
            parts += [part for part in module.children() if isinstance(part, lists)]
            names = [
                self._names[id(p)]
                for part in parts
                for p in part.parameters(recurse=False)
                if p.requires_grad
            ]
            if names:
                stock = type(module).__module__.startswith("torch.nn.modules.")
                own = _Own(names, [self._tensors[name] for name in names], stock)
                self._owns.append(own)
                before = untraced(partial(self._before_forward, own))
                after = untraced(partial(self._after_forward, own))
                # Before other hooks, which may use parameters.
                self._hooks.append(module.register_forward_pre_hook(before, prepend=True))
                self._hooks.append(module.register_forward_hook(after, always_call=True))

    def _before_forward(self, own: _Own, module: torch.nn.Module, inputs: Any) -> None:
        gatherer = self._gatherer
        assert gatherer is not None
        for index in own.buckets:
            gatherer.pins[index].add(id(module))
            gatherer.need(index)
        opened = [p for p in own.parameters if open_up(p)]
        # Torch's modules return tensors, which `_after_forward` finds, and keep none.
        saving = not own.stock and self._saving.begin()
        self._entered.append(_Entered(id(module), opened, saving))

    def _after_forward(self, own: _Own, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        gatherer = self._gatherer
        assert gatherer is not None
        for index in own.buckets:
            gatherer.pins[index].discard(id(module))
        if self._entered and self._entered[-1].module == id(module):  # else it did not get there
            self._leave()
        for tensor in each_tensor(output):
            place = None if own.stock else self._bucket_of(tensor)
            if place is not None:  # a parameter, or a view of one, for others to use
                gatherer.keep(place)
            # What comes next may write in place into a view: then autograd goes past the view's
            # node and straight to that of its base.
            base = tensor._base if tensor._is_view() else None
            for node in {tensor.grad_fn, None if base is None else base.grad_fn} - {None}:
                node.register_prehook(partial(self._before_backward, own))

    def _leave(self) -> None:
        entered = self._entered.pop()
        for parameter in entered.opened:
            shut(parameter)
        if entered.saving:
            self._saving.end()

    def _before_backward(self, own: _Own, grads: Any) -> None:
        gatherer = self._gatherer
        assert gatherer is not None
        for name, index in own.places:
            if name not in self._done:
                gatherer.pins[index].add(name)  # until its gradient has arrived
                gatherer.need(index)

    def _bucket_of(self, tensor: torch.Tensor) -> int | None:
        """The bucket in whose memory a tensor lies, None if it is none."""
        try:
            return self._places.get(tensor.untyped_storage().data_ptr())
        except RuntimeError:  # it has no storage: one that is sparse
            return None

    def _fetch(self, index: int, saved: torch.Tensor) -> None:
        """Backward asks for what was saved of a bucket."""
        gatherer = self._gatherer
        assert gatherer is not None and self._store is not None
        if gatherer.in_block:
            return
        slots = self._store.shards[index].bucket.slots
        place = bisect.bisect_right(slots, saved.storage_offset(), key=lambda slot: slot.start)
        name = slots[max(0, place - 1)].name
        # Until its gradient has arrived; what was not used for that has no such end.
        gatherer.pins[index].add(KEPT if name in self._done else name)
        if not gatherer.there(index):
            gatherer.need(index)

    def _used_elsewhere(self, parameter: torch.Tensor) -> None:
        name = self._names[id(parameter)]
        if self._gatherer is None or not self._gatherer.keep(self._bucket(name)):
            raise CollectiveError(not_there([name]))


class _Array:
    """A tensor whose memory comes and goes, as a native array: torch's allocator tends to give the
    same memory again.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._place: int | None = None
        self._array: Any = None

    def now(self) -> tuple[Any, bool]:
        """While it has memory; and whether that is other than the last time."""
        moved = self._tensor.data_ptr() != self._place
        if moved:
            self._place = self._tensor.data_ptr()
            self._array = native(self._tensor)
        return self._array, moved


class _Lent:
    """Memory of torch's allocator, which has it for other tensors in between."""

    def __init__(self, count: int, dtype: str, device: str) -> None:
        self._flat = torch.empty(count, dtype=torch_dtype(torch, dtype), device=device)
        self._nbytes = self._flat.nbytes
        self._array = _Array(self._flat)
        self.give()

    def take(self) -> tuple[Any, bool]:
        self._flat.untyped_storage().resize_(self._nbytes)
        return self._array.now()

    def give(self) -> None:
        self._flat.untyped_storage().resize_(0)


class _Own:
    """The trainable parameters of a module itself, and the buckets that they are in.

    stock  the module is one of torch's own
    """

    def __init__(self, names: list[str], parameters: list[torch.Tensor], stock: bool) -> None:
        self._names = names
        self.parameters = parameters
        self.stock = stock
        self.places: list[tuple[str, int]] = []
        self.buckets: list[int] = []

    def find(self, bucket_of: Callable[[str], int]) -> None:
        """The parameters lie in other buckets now."""
        self.places = [(name, bucket_of(name)) for name in self._names]
        self.buckets = list(dict.fromkeys(index for _, index in self.places))


class _Entered(NamedTuple):
    """The forward of a module, by id, with the parameters that it opened, and whether it set hooks
    for what autograd saves.
    """

    module: int
    opened: list[torch.Tensor]
    saving: bool


def _dense(x: torch.Tensor) -> torch.Tensor:
    if x.layout is not torch.strided:  # who takes it refuses it by name
        return x
    return x if x.is_contiguous() else x.contiguous()


def _ready_together(sink: Sink, bucket: Bucket, grads: list[torch.Tensor]) -> None:
    assert sink.together is not None
    sink.together.ready_together(bucket, [_dense(grad) for grad in grads])


def _copy(x: torch.Tensor) -> Any:
    return native(x.detach().contiguous().clone())


def _cast(batch: Any, dtype: torch.dtype) -> Any:
    """The batch with its floating-point tensors in `dtype`."""

    def cast(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    return each_array(batch, cast)
