"""Dynamo (`torch.compile`) does not look into process groups.

Where a compiled program calls a process group from C++, as DDP does, Dynamo sees the methods of one
in Python as frames of the program, and would trace them; NCCL's and Gloo's are C++.
"""

from __future__ import annotations

from types import FunctionType
from typing import TypeVar

from ..untraced import untraced

_Class = TypeVar("_Class", bound=type)


def untraced_methods(cls: _Class) -> _Class:
    """A decorator: Dynamo leaves the public methods of a class of this package alone, those of its
    bases here included, under all their names, and what they call.
    """
    methods: dict[str, FunctionType] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith(__package__):
            found = {n: m for n, m in vars(base).items() if isinstance(m, FunctionType)}
            methods |= {n: m for n, m in found.items() if not m.__name__.startswith("_")}
    replaced = {method: untraced(method) for method in methods.values()}
    for name, method in methods.items():
        setattr(cls, name, replaced[method])
    return cls
