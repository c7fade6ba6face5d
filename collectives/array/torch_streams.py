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
        _set_stream(stream_id=before[0], device_index=before[1], device_type=before[2])
