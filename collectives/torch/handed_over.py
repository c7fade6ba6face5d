"""Works that are handed to torch's C++.

A work of this backend is an object of Python with a part in C++. C++ that is given one keeps its
own part alone, and when Python's is gone, a wait for what is left never ends. torch does this in
one place: under DDP's `join(divide_by_initial_world_size=False)` the reducer gets the work of an
all_reduce before each forward pass, and waits for it in backward. So the whole work is kept as long
as the reducer has not got the next one.
"""

from __future__ import annotations

import functools
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

_METHOD = "_set_forward_pass_work_handle"
_kept: WeakKeyDictionary[Any, dist.Work] = WeakKeyDictionary()

installed = False


def install() -> None:
    """Makes reducers keep works; once is enough."""
    global installed
    if installed:
        return
    installed = True
    take = getattr(dist.Reducer, _METHOD, None)
    if take is None:  # another torch, which has no such place
        return

    @functools.wraps(take)
    def keep(reducer: Any, work: dist.Work, *arguments: Any) -> None:
        take(reducer, work, *arguments)
        _kept[reducer] = work

    setattr(dist.Reducer, _METHOD, keep)
