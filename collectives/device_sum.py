"""all_reduce(x) of cupy arrays with defaults: what training calls most, by the shortest way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import _core
from .array import Stream
from .array.device import Cupy
from .array.dtypes import NUMPY_DTYPES
from .array.recognising import KINDS
from .device import DeviceEngine
from .errors import AbortedError, MismatchError, PeerDiedError
from .schedule import is_written

_ALL_REDUCE = _core.collectives.index("all_reduce")
ORDERS = {None: 0, "any": 0, "rank": 1}  # of sums, as the core numbers them
_SUM = _core.ops.index("sum")


def make_device_sum(
    engine: DeviceEngine, choose: Callable[[str, int], str]
) -> Callable[[Any, Any, Any, Any], bool]:
    """A function (x, out, order, stream) that sums x over the ranks, into itself or into `out`, if
    these are cupy arrays on the engine's GPU that need no further look, and `stream` is None or was
    looked at; False (nothing done) for anything else, which the general path then judges.

    choose  the algorithm for a collective and its bytes
    """
    ordinal = engine.device
    plans: dict[tuple[np.dtype[Any], int, bool], tuple[object, int] | None] = {}

    def plan(dtype: np.dtype[Any], size: int, beside: bool) -> tuple[object, int] | None:
        name = NUMPY_DTYPES.get(dtype)
        if name is None or _core.why_op_unsupported("sum", name):
            return None
        nbytes = size * dtype.itemsize
        algorithm = choose("all_reduce", nbytes)
        if is_written(algorithm):
            return None
        return engine.options(algorithm, "all_reduce", nbytes, beside), _core.dtypes.index(name)

    def device_sum(x: Any, out: Any, order: Any, stream: Any) -> bool:
        kind = KINDS.get(type(x))
        if type(kind) is not Cupy or order not in ORDERS:
            return False
        beside = False
        if stream is None:
            stream = kind.stream()
        elif type(stream) is Stream and stream.ordinal == ordinal:
            stream, beside = stream.handle, stream.beside
        else:
            return False
        data, size, dtype = x.data, x.size, x.dtype
        if data.device_id != ordinal or not x.flags.c_contiguous:
            return False
        source = target = data.ptr
        if out is not None:
            if (
                type(out) is not type(x)
                or out.size != size
                or out.dtype != dtype
                or out.data.device_id != ordinal
                or not out.flags.c_contiguous
            ):
                return False
            target = out.data.ptr
            if source != target and abs(source - target) < size * dtype.itemsize:
                return False
        try:
            known = plans[dtype, size, beside]
        except KeyError:
            known = plans[dtype, size, beside] = plan(dtype, size, beside)
        if known is None:
            return False
        how, number = known
        try:
            engine.call(
                how, stream, _ALL_REDUCE, number, _SUM, 0, source, target, size,
                None, None, 0, ORDERS[order], 1.0, 0.0,
            )  # fmt: skip
        except (MismatchError, AbortedError, PeerDiedError) as error:
            engine.pass_on(error)
            raise
        return True

    return device_sum
