"""torch's current stream. Where torch's own functions for it make objects, which costs a hook of
the backward pass 20 us, what they call is called here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_get_stream = getattr(torch._C, "_cuda_getCurrentStream", None)
_set_stream = getattr(torch._C, "_cuda_setStream", None)
_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def current_stream(ordinal: int) -> int:
    """The handle of torch's current stream of a GPU."""
    if _raw_stream is not None:
        return int(_raw_stream(ordinal))
    return int(torch.cuda.current_stream(ordinal).cuda_stream)


raw_stream: Callable[[int], int] = current_stream if _raw_stream is None else _raw_stream


def stream_to_follow(ordinal: int) -> Any:
    """torch's current stream of a GPU, for `follow_stream` in another thread."""
    if _get_stream is None or _set_stream is None:
        return torch.cuda.current_stream(ordinal)
    return _get_stream(ordinal)


def follow_stream(stream: Any) -> None:
    """Makes a stream torch's current one, and its GPU the current one, in this thread."""
    if _get_stream is None or _set_stream is None:
        torch.cuda.set_stream(stream)
    else:
        _set_stream(stream_id=stream[0], device_index=stream[1], device_type=stream[2])


def with_stream(stream: Any, do: Callable[[], None]) -> None:
    """Runs `do` with `stream`, an object of torch, as torch's current stream."""
    if _get_stream is None or _set_stream is None or _device() != stream.device_index:
        with torch.cuda.stream(stream):
            do()
        return
    before = _get_stream(stream.device_index)
    _set_stream(
        stream_id=stream.stream_id,
        device_index=stream.device_index,
        device_type=stream.device_type,
    )
    try:
        do()
    finally:
        follow_stream(before)
