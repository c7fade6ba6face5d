"""Which gradients lie together in a bucket, and where: the layout, before anything is reduced.

`make_buckets` fills buckets of a given size in a given order; `bucketing` gives them memory and
reduces them, and shards of the trainer are laid out as they are.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .array import device_name, dtype_name, native
from .array.dtypes import ITEM_SIZES
from .bucket_trace import BucketTimes
from .errors import ArrayTypeError

if TYPE_CHECKING:
    from .communicator import Communicator
    from .torch_gradients import Waiting
    from .work import Work

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20

_FLOATS = ("float", "bfloat", "complex")  # how the names of dtypes begin that gradients may have


class Spec(NamedTuple):
    """A parameter, as buckets see it."""

    shape: tuple[int, ...]
    dtype: str  # of its gradient
    device: str
    carried: str  # dtype in the bucket, in which gradients are added and reduced
    kind: str = ""  # parameters of one bucket are of one kind


class Slot(NamedTuple):
    """Where a parameter's gradient lies in its bucket."""

    name: str
    start: int  # in elements
    length: int
    shape: tuple[int, ...]


class Bucket:
    """Gradients that are reduced together."""

    def __init__(self, index: int, dtype: str, device: str, slots: Sequence[Slot]) -> None:
        self.index = index
        self.dtype = dtype
        self.device = device
        self.slots = tuple(slots)
        self.count = sum(slot.length for slot in slots)
        self.nbytes = self.count * ITEM_SIZES[dtype]
        self.buffer: Any = None  # 1-d; None while a transient bucket has none
        self.waiting: Waiting | None = None  # gradients of torch that go in together
        self.begin()

    def begin(self) -> None:
        """A pass begins: nothing is there, and nothing launched."""
        self.missing = len(self.slots)
        # Of gradients that this rank lacks, which are made zero when the bucket is launched: it may
        # lack more than have memory at a time.
        self.zeros: list[Slot] = []
        self.work: Work | None = None
        self.times = BucketTimes()

    def part(self, slot: Slot) -> Any:
        """The place of a gradient, in the parameter's shape."""
        return self.buffer[slot.start : slot.start + slot.length].reshape(slot.shape)


def make_buckets(
    specs: Mapping[str, Spec], order: Sequence[str], first_bytes: int, bucket_bytes: int
) -> list[Bucket]:
    """Fills buckets in `order`: one stream of them for each dtype, device and kind, numbered by
    the place of their last parameter. A parameter that is larger than a bucket has one of its own.
    """
    filling: dict[tuple[str, str, str], list[str]] = {}
    closed: list[tuple[int, tuple[str, str, str], list[str]]] = []
    started: set[tuple[str, str, str]] = set()
    for place, name in enumerate(order):
        spec = specs[name]
        key = (spec.carried, spec.device, spec.kind)
        names = filling.setdefault(key, [])
        size = ITEM_SIZES[spec.carried]
        held = sum(math.prod(specs[n].shape) for n in names) * size
        limit = bucket_bytes if key in started else min(first_bytes, bucket_bytes)
        if names and held + math.prod(spec.shape) * size > limit:
            closed.append((place - 1, key, names))
            started.add(key)
            names = filling[key] = []
        names.append(name)
    places = {name: place for place, name in enumerate(order)}
    closed += [(places[names[-1]], key, names) for key, names in filling.items()]
    buckets = []
    for index, (_, (dtype, device, _), names) in enumerate(sorted(closed, key=lambda c: c[0])):
        slots, at = [], 0
        for name in names:
            count = math.prod(specs[name].shape)
            slots.append(Slot(name, at, count, specs[name].shape))
            at += count
        buckets.append(Bucket(index, dtype, device, slots))
    return buckets


def order_of_rank_0(
    comm: Communicator, names: Sequence[str], seen: Collection[str], layout: Sequence[str]
) -> list[str]:
    """The names in the order in which their gradients became ready on rank 0 (`seen`); those that
    did not are behind, as in `layout`. Collective.
    """
    number = {name: i for i, name in enumerate(names)}
    late = [n for n in layout if n not in seen]
    order = np.array([number[n] for n in (*seen, *late)], np.int64)
    comm.broadcast(order)
    return [names[i] for i in order]


def check_name(name: Any) -> None:
    """Raises TypeError or ValueError for what is no name of a parameter: those of checkpoints are
    text in UTF-8.
    """
    if not isinstance(name, str):
        raise TypeError(f"the name of a parameter must be a string, not {name!r}")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"the name {name!r} of a parameter is no text in UTF-8") from None


def spec_of(name: str, x: Any, dtype: Any) -> Spec:
    """Of a parameter (an array, or a Spec already) whose gradient is carried in `dtype`, its own if
    None. Raises ArrayTypeError if it is no float, or its gradient would be no such number there.
    """
    check_name(name)
    if isinstance(x, Spec):
        return x
    array = native(x, f"parameter {name!r}")
    own = dtype_name(array.dtype)
    if not own.startswith(_FLOATS):
        raise ArrayTypeError(f"parameter {name!r} is {own}; gradients need a float dtype")
    carried = own if dtype is None else dtype_name(dtype)
    if not carried.startswith("complex" if own.startswith("complex") else _FLOATS):
        raise ArrayTypeError(
            f"parameter {name!r} is {own}, and dtype={carried} cannot hold its gradient; "
            + ("reduce it in a complex dtype" if carried.startswith(_FLOATS) else "name a float")
        )
    return Spec(tuple(array.shape), own, device_name(array), carried)
