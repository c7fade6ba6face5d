"""The short way of calls on CUDA tensors that are like ones before.

How such a call is made (a *plan*) is found once, the long way, for each kind, device, dtype, op and
size. `extension` has methods that know plans and run in C++; they take the place of a group's own
once its engine for GPUs is there. Without them all_reduce, the call of DDP's buckets, has its short
way in Python.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..array.torch_streams import current_stream, raw_stream
from ..untraced import untraced
from . import extension
from .profiling import profiled
from .streams import Side, StreamWork, stream_of_caller
from .tensors import Call, Op, Tensor, op_for
from .tracks import Plan

if TYPE_CHECKING:
    from .group import CollectivesGroup

_CALLS: dict[str, Callable[[CollectivesGroup, Tensor, Tensor, Any], Call]] = {
    "all_reduce": lambda group, target, _, opts: group._all_reduce_call([target], opts),
    "all_gather": lambda group, target, source, _: group._all_gather_call([target], [source]),
    "reduce_scatter": lambda group, target, source, opts: group._reduce_scatter_call(
        [target], [source], opts
    ),
}

_MOST = 4096  # plans that are kept: sizes may be others in each step

# Both generations of torch's names.
_METHODS = {
    "all_reduce": ("allreduce",),
    "all_gather": ("all_gather_single", "_allgather_base"),
    "reduce_scatter": ("reduce_scatter_single", "_reduce_scatter_base"),
}


def _plan(
    kind: str,
    group: CollectivesGroup,
    target: Tensor,
    source: Tensor,
    reduce_op: Any,
    side: Side | None,
) -> Plan | None:
    """How a call on these tensors, or others like them, is made on the side stream, or on the
    current one; None where it must go the long way.
    """
    opts = SimpleNamespace(reduceOp=reduce_op)
    call = _CALLS[kind](group, target, source, opts)
    if call.after:  # a copy, or a division, which torch makes
        return None
    (step,) = call.steps
    stream = stream_of_caller(target.device) if side is None else side.for_calls
    return group._main.plan(step, stream)


@untraced  # C++ calls it
def _plan_for_extension(
    kind: str,
    group: CollectivesGroup,
    target: Tensor,
    source: Tensor,
    reduce_op: Any,
    beside: bool,
) -> tuple[Any, Any, tuple[Any, ...]] | None:
    side = group._sides.of(target.device) if beside else None
    plan = _plan(kind, group, target, source, reduce_op, side)
    return None if plan is None else (None if side is None else side.stream, *plan)


class ShortWays:
    """Those of a group, which is passed to each method."""

    def __init__(self) -> None:
        self._plans: dict[tuple[int, torch.dtype, Op, int], Plan] = {}
        self._asked = False

    def use_extension(self, group: CollectivesGroup) -> None:
        """Puts methods of the extension, if there is one for this torch, before those of the group,
        whose engine for GPUs is there.
        """
        if self._asked or not group._main.plans:
            return
        self._asked = True
        made_in_cpp = extension.load(torch.__version__)
        if made_in_cpp is None:
            return
        for kind, names in _METHODS.items():
            slow, plan = getattr(type(group), names[0]), partial(_plan_for_extension, kind)
            method = made_in_cpp.Method(kind, group, plan, slow, group._main, raw_stream)
            group.__dict__.update(dict.fromkeys(names, method))

    def leave_extension(self, group: CollectivesGroup) -> None:
        """A group that is closed has its own methods, which say so."""
        for names in _METHODS.values():
            for name in names:
                group.__dict__.pop(name, None)

    def all_reduce(self, group: CollectivesGroup, tensor: Tensor, opts: Any) -> dist.Work | None:
        """An asynchronous one of a tensor on a GPU, in Python. None (nothing done) where it must
        go the long way.
        """
        if (
            not group._main.plans
            or not tensor.is_contiguous()
            or tensor.is_sparse
            or tensor.is_conj()
            or tensor.is_neg()
            or group._coalesced is not None
            or profiled()
        ):
            return None
        device = tensor.device
        op = op_for(opts.reduceOp, tensor.dtype)
        side = group._sides.of(device)
        key = (device.index, tensor.dtype, op, tensor.numel())
        plan = self._plans.get(key)
        if plan is None:
            plan = _plan("all_reduce", group, tensor, tensor, opts.reduceOp, side)
            if plan is None:
                return None
            if len(self._plans) >= _MOST:
                self._plans.clear()
            self._plans[key] = plan
        side.core.begin(current_stream(device.index))
        pointer = tensor.data_ptr()
        group._main.put(plan, pointer, pointer)
        ended = side.core.end()
        tensor.record_stream(side.stream)
        return StreamWork([tensor], device, side.stream, ended)
