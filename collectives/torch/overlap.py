"""FSDP2 on CPUs: the gradients of a layer are reduced while the backward pass goes on.

torch waits for each reduce_scatter of FSDP2 at once where tensors are on CPUs: there are no streams
that could put off what it does with the result. With float32 or bfloat16 gradients that is nothing
until the optimiser's step but to note where they lie. So `foreach_reduce`, the function of FSDP2
that reduces the gradients of one group of parameters, gets a reduce_scatter that only begins.

    who runs it     the thread of a communicator that a process group has for this alone, so an
                    all_gather that prefetches parameters overtakes it
    who waits       the next reduce_scatter of the group, so that one input is kept at a time; and
                    the end of the backward pass (a callback of autograd's engine)
    who cannot      where `foreach_reduce` itself reads the result, it waits at once: gradients that
                    are added to, converted, divided (float16), reduced again (HSDP), copied to
                    another device, or given to hooks
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .work import PendingWork

_MODULE = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
# What this file takes from the call of `foreach_reduce`; another torch may name them otherwise.
_NEEDED = {
    "fsdp_params",
    "unsharded_grads",
    "reduce_scatter_group",
    "reduce_scatter_comm",
    "orig_dtype",
    "reduce_dtype",
    "device",
    "all_reduce_group",
    "all_reduce_hook",
}
# Dtypes that FSDP2 has the collective average; others it divides before and after.
_AVERAGED = (torch.float32, torch.bfloat16)

installed = False


def install() -> None:
    """Puts the overlap into FSDP2 if the program has imported that; else does nothing.

    Nor does it where FSDP2 is made otherwise than this file knows: then torch waits at once.
    """
    global installed
    param_group: Any = sys.modules.get(_MODULE)
    if param_group is None:
        return
    installed = True
    reduce = getattr(param_group, "foreach_reduce", None)
    plain = getattr(param_group, "DefaultReduceScatter", None)
    if reduce is None or plain is None:
        return
    signature = inspect.signature(reduce)
    if signature.parameters.keys() >= _NEEDED:
        param_group.foreach_reduce = _overlapping(reduce, signature, plain)


def _overlapping(
    reduce: Callable[..., Any], signature: inspect.Signature, plain: type
) -> Callable[..., Any]:
    @functools.wraps(reduce)
    def foreach_reduce(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        call = bound.arguments
        group = call["reduce_scatter_group"]
        if (
            type(call["reduce_scatter_comm"]) is not plain
            or not hasattr(group, "begin_reduce_scatter")
            or call["device"].type != "cpu"
            or group.size() == 1
        ):
            return reduce(*args, **kwargs)
        call["reduce_scatter_comm"] = _ReduceScatter(
            call["reduce_scatter_comm"], put_off=not _reads_the_result(call) and _in_backward()
        )
        group.end_reduce_scatters()
        return reduce(*bound.args, **bound.kwargs)

    return foreach_reduce


def _reads_the_result(call: dict[str, Any]) -> bool:
    """True if `foreach_reduce`, called like this, uses what the reduce_scatter has written."""
    gradient = call["unsharded_grads"][0].dtype
    reduced = call["reduce_dtype"] or gradient
    return bool(
        reduced not in _AVERAGED
        or call["orig_dtype"] not in (None, reduced)
        or call.get("force_sum_reduction_for_comms")
        or call["all_reduce_group"] is not None
        or call["all_reduce_hook"] is not None
        or any(_is_used(p) for p in call["fsdp_params"])
    )


def _is_used(parameter: Any) -> bool:
    sharded = parameter.sharded_param
    return bool(
        sharded.grad is not None
        or parameter.offload_to_cpu
        or getattr(sharded, "_post_accumulate_grad_hooks", None)
    )


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class _ReduceScatter:
    """FSDP2's reduce_scatter; with `put_off` the end of the backward pass waits for it."""

    def __init__(self, plain: Any, put_off: bool) -> None:
        self._plain = plain
        self._put_off = put_off

    def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        memory: torch.Tensor = self._plain.allocate(*args, **kwargs)
        return memory

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> PendingWork:
        work: PendingWork = group.begin_reduce_scatter(output_tensor, input_tensor, op)
        if not self._put_off:
            work.wait()
        else:
            torch.autograd.Variable._execution_engine.queue_callback(group.end_reduce_scatters)
        return work
