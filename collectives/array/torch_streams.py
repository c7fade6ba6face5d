"""torch's current stream."""

from __future__ import annotations

import torch

# What torch.cuda.current_stream() asks, which needs 2 us to make an object of it.
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def current_stream(ordinal: int) -> int:
    """The handle of torch's current stream of a GPU."""
    if _raw_stream is not None:
        return int(_raw_stream(ordinal))
    return int(torch.cuda.current_stream(ordinal).cuda_stream)
