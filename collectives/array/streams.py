"""CUDA streams of any library."""

from __future__ import annotations

import operator
import sys
from typing import Any, NamedTuple

from ..errors import ArrayTypeError

# The legacy default stream of the current GPU; in the CUDA array interface, too, where 0 is none.
LEGACY_STREAM = 1


class Stream(NamedTuple):
    """A CUDA stream.

    handle   its cudaStream_t, as an integer
    ordinal  the GPU that it belongs to, None if it does not tell
    beside   it runs beside a stream that computes: calls there leave multiprocessors to that one
    """

    handle: int
    ordinal: int | None
    beside: bool = False


def stream_of(stream: Any, what: str) -> Stream:
    """Looks at a stream: one of cupy or torch, any object with `__cuda_stream__`, or a handle as an
    integer.

    what  the call, for the error

    Raises ArrayTypeError for anything else.
    """
    if type(stream) is Stream:
        return stream
    if not isinstance(stream, bool):
        try:
            number = operator.index(stream)
        except TypeError:
            pass
        else:
            if number < 0:
                raise ArrayTypeError(f"{what}: stream={number} is no handle of a CUDA stream")
            return Stream(number, None)
    device = getattr(stream, "device", None)  # torch
    ordinal = getattr(device, "index", getattr(stream, "device_id", None))  # or cupy
    if not isinstance(ordinal, int) or ordinal < 0:
        ordinal = None
    for name in ("ptr", "cuda_stream"):  # cupy, torch
        handle = getattr(stream, name, None)
        if isinstance(handle, int):
            return Stream(handle, ordinal)
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        pair = protocol() if callable(protocol) else protocol
        return Stream(int(pair[1]), ordinal)
    raise ArrayTypeError(
        f"{what}: stream= takes a CUDA stream of cupy or torch, any object with __cuda_stream__, "
        f"or a handle as an integer, not a {type(stream).__name__}"
    )


class _Handle:
    """A handle, as the protocol of CUDA streams tells it."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


def cupy_stream(handle: int, ordinal: int | None) -> Any:
    """A stream that cupy has not made, as one of cupy's.

    ordinal  the GPU that it belongs to, None if that is not known
    """
    cuda = sys.modules["cupy"].cuda
    if hasattr(cuda.Stream, "from_external"):  # from cupy 14 on, which warns of the other way
        return cuda.Stream.from_external(_Handle(handle))
    return cuda.ExternalStream(handle, -1 if ordinal is None else ordinal)
