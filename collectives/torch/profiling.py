"""Ranges in torch's profiler for calls that are made in Python, named as torch names those of its
own backends: collectives:broadcast. A range is as long as the caller is in the call.
"""

from __future__ import annotations

import contextlib

import torch

_UNSEEN = contextlib.nullcontext()

profiled = torch.autograd._profiler_enabled  # whether ranges are recorded on this thread


def shown(title: str) -> contextlib.AbstractContextManager[object]:
    """`with shown("broadcast"):` is a range of the profiler, if that is on."""
    if not profiled():
        return _UNSEEN
    return torch.profiler.record_function(f"collectives:{title}")
