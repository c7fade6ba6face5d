"""Groups of several backends, one for each kind of device: "cpu:gloo,cuda:collectives".

Up to 2.13 torch takes a backend that is written in Python only as a whole process group, which then
gets the calls on all devices. A torch that can take it as one backend of several has a class
`Backend` that Python can construct; there this backend takes part in a group of torch's own.

As a whole group it is the better one: torch wraps the works of a backend, and its own futures know
nothing of keys (see tracks.py), nor its works of the rank that a message came from. So it is one
backend of several only where there are several.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from .group import CollectivesGroup

# What torch calls on a backend of a group; the group of this runtime has the same calls.
CALLS = (
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "barrier",
    "broadcast",
    "gather",
    "gather_single",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "scatter",
    "send",
    "set_timeout",
    "abort",
    "shutdown",
    "supports_tensor_alloc",
    "_get_sequence_number_for_group",
    "_set_sequence_number_for_group",
)


def _passed_on(name: str) -> Callable[..., Any]:
    def call(self: CollectivesBackend, *arguments: Any) -> Any:
        return getattr(self.group, name)(*arguments)

    call.__name__ = name
    return call


class CollectivesBackend(Backend):
    """This runtime as one backend of a group of torch's; all calls go to `group`."""

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def __init__(self, group: CollectivesGroup) -> None:
        super().__init__(group.rank(), group.size())
        self.group = group

    def getBackendName(self) -> str:
        return self.group.getBackendName()

    def allreduce_sparse(self, tensors: Any, opts: Any) -> Any:
        return self.group.allreduce(tensors, opts)

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:
        limit = opts.timeout if opts.timeout > timedelta(0) else None
        self.group.monitored_barrier(limit, wait_all_ranks)


for _name in CALLS:
    setattr(CollectivesBackend, _name, _passed_on(_name))


def can_take_part() -> bool:
    """True if this torch takes a backend that is written in Python as one of several."""

    class Probe(Backend):
        def __init__(self) -> None:
            super().__init__(0, 1)

    try:
        Probe()
    except TypeError:  # this torch's class has no constructor
        return False
    return True


def told_of_new_group() -> tuple[dict[str, str], torch.device | None]:
    """The backend of each kind of device in the group that torch is making, and its `device_id`;
    nothing where that cannot be seen. torch does not tell it to a backend, so it is taken from the
    function that makes the group.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        config: Any = frame.f_locals.get("backend_config")
        if config is not None and hasattr(config, "get_device_backend_map"):
            devices = {str(k): str(v) for k, v in config.get_device_backend_map().items()}
            return devices, frame.f_locals.get("device_id")
        frame = frame.f_back
    return {}, None


def in_place(group: CollectivesGroup) -> CollectivesGroup | CollectivesBackend:
    """What torch gets for a new group of this runtime: the group itself, or one backend of several.

    Where there should be several and this torch cannot have them, the group is all this runtime's,
    and a UserWarning says so.
    """
    devices, device_id = told_of_new_group()
    # torch notes it in a group of its own, which this one replaces, and later groups inherit it.
    group.device_id = device_id or getattr(dist.group.WORLD, "device_id", None)
    if len(set(devices.values())) < 2:
        return group
    if can_take_part():
        return CollectivesBackend(group)
    asked = ",".join(f"{device}:{backend}" for device, backend in devices.items())
    warnings.warn(
        f"the backend {asked!r}: torch {torch.__version__} takes a backend written in Python only "
        "as a whole process group, so collectives serves all devices here. For another backend "
        'make a second group, such as dist.new_group(backend="gloo"), or use torch 2.14',
        stacklevel=2,
    )
    return group
