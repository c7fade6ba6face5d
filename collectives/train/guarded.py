"""Parameters that are there for their own modules alone, under stage 3: any other use is noticed.

A guarded parameter has another class, whose `__torch_function__` sees every call of torch that it
is given to, whatever its shape is. That costs nothing for parameters that are not guarded. What
only asks for their dtype and the like goes through. What does not come by torch's Python functions
is not seen: functions of extensions in C++ that are called directly.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import CollectiveError
from ..gradients import listed

# What a parameter may be asked for that has no values: names of functions and methods of tensors.
_HARMLESS = frozenset(
    {
        *("__hash__", "__repr__", "__format__", "__len__", "_fix_weakref", "_is_view"),
        *("size", "dim", "ndimension", "numel", "nelement", "element_size", "get_device"),
        *("stride", "storage_offset", "is_contiguous", "is_floating_point", "is_complex"),
        *("is_signed", "is_pinned", "is_shared", "is_inference", "is_same_size", "result_type"),
        *("register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad"),
    }
)
# Attributes that are tensors made of its values. All others go through.
_VALUES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})

# used(parameter): it is about to be used elsewhere; raises if it is not there.
Used = Callable[[torch.Tensor], None]

_guards: Any = WeakTensorKeyDictionary()  # parameter -> weak reference to its `Used`


def guard(parameter: torch.Tensor, used: weakref.WeakMethod[Used]) -> None:
    """Any use of it is told to `used` from now on."""
    _guards[parameter] = used


def unguard(parameter: torch.Tensor) -> None:
    """Nobody hears of its use any more; if it is shut it stays so."""
    _guards.pop(parameter, None)


def shut(parameter: torch.Tensor) -> None:
    """It is guarded, if it was given to `guard`."""
    kind: Any = type(parameter)
    if "_open_kind" not in vars(kind):
        parameter.__class__ = _shut_kind(kind)


def open_up(parameter: torch.Tensor) -> bool:
    """It may be used. False if it might be before."""
    kind = vars(type(parameter)).get("_open_kind")
    if kind is None:
        return False
    parameter.__class__ = kind
    return True


def not_there(names: Sequence[str]) -> str:
    """What to tell of parameters that were used where they are not gathered."""
    return (
        f"sharding=3: {listed(list(names))} was used outside of the forward of a module that has "
        "it, where it is not gathered: call that module, make it a parameter of the module that "
        "uses it, or between steps use it within trainer.gathered()"
    )


def each_tensor(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in any nesting of dicts, tuples and lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from each_tensor(part)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from each_tensor(part)


@functools.cache
def _shut_kind(kind: type) -> type:
    """The class of shut parameters whose own is `kind`."""
    return type(kind)(
        f"Shut{kind.__name__}",
        (kind,),
        {
            "_open_kind": kind,
            "__torch_function__": classmethod(_function),
            "__deepcopy__": lambda self, memo: _copied(self),
            "__reduce_ex__": lambda self, protocol: _copied(self),
        },
    )


def _copied(parameter: torch.Tensor) -> Any:
    _tell([parameter])
    raise CollectiveError("sharding=3: copy or pickle a module within trainer.gathered()")


def _function(
    cls: type, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
) -> Any:
    named = kwargs or {}
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        harmless = getattr(getattr(func, "__self__", None), "__name__", "") not in _VALUES
    else:
        harmless = name in _HARMLESS
    if harmless:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **named)
    shut_ones = [t for t in each_tensor((args, named)) if "_open_kind" in vars(type(t))]
    _tell(shut_ones)
    for parameter in shut_ones:
        open_up(parameter)
    try:
        return func(*args, **named)
    finally:
        for parameter in shut_ones:
            shut(parameter)


def _tell(parameters: Sequence[torch.Tensor]) -> None:
    for parameter in parameters:
        guarded = _guards.get(parameter)
        used = None if guarded is None else guarded()
        if used is None:
            raise CollectiveError(
                "sharding=3: a parameter was used that its trainer, which is closed or gone, left "
                "empty; release() gives a module its parameters back, close() does not"
            )
        used(parameter)
