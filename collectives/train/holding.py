"""Which trainer has a module's parameters, and which of them it has emptied."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import CollectiveError


class _Hold(NamedTuple):
    """model: what trains the parameter, None if it is closed or gone; empty: under stage 3."""

    model: Callable[[], Any]
    empty: bool


_holds: Any = WeakTensorKeyDictionary()  # by parameter


def hold(parameters: Iterable[torch.Tensor], model: Callable[[], Any], *, empty: bool) -> None:
    """They are those of `model` from now on; `empty`: they have memory only while it lends some."""
    for parameter in parameters:
        _holds[parameter] = _Hold(model, empty)


def let_go(parameters: Iterable[torch.Tensor], *, whole: bool) -> None:
    """They are nobody's; if they are not `whole` none may train those that are empty."""
    for parameter in parameters:
        found = _holds.pop(parameter, None)
        if found is not None and found.empty and not whole:
            _holds[parameter] = _Hold(lambda: None, True)


def check_free(module: torch.nn.Module) -> None:
    """Raises CollectiveError if another trainer has a parameter of the module, or has left it
    empty.
    """
    named = dict(module.named_parameters())
    if any(p in _holds and _holds[p].model() is not None for p in named.values()):
        gc.collect()  # a trainer that nobody has any more is a cycle
    for name, parameter in named.items():
        found = _holds.get(parameter)
        if found is None:
            continue
        if found.model() is not None:
            raise CollectiveError(
                f"parameter {name!r} belongs to another trainer: call its release() or close() "
                "first"
            )
        if found.empty:
            raise CollectiveError(
                f"parameter {name!r} is empty: a trainer with sharding=3 left each rank with its "
                "shard alone; release() gives a module its parameters back, close() does not"
            )


def used_while_empty(trace: TracebackType | None, empty: Mapping[int, str]) -> list[str]:
    """The names of the empty parameters that were used where an exception was raised, as far as the
    code there shows it: a variable, or an attribute of a variable that is a module.

    empty  names of parameters by id
    """
    frames = []
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    for frame in reversed(frames):
        found = [empty[id(x)] for x in frame.f_locals.values() if id(x) in empty]
        attributes = set(frame.f_code.co_names)
        for owner in frame.f_locals.values():
            if isinstance(owner, torch.nn.Module):
                found += [
                    empty[id(p)]
                    for path, p in owner.named_parameters(remove_duplicate=False)
                    if id(p) in empty
                    and {part for part in path.split(".") if not part.isdigit()} <= attributes
                ]
        if found:
            return list(dict.fromkeys(found))
    return []
