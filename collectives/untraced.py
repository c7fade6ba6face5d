"""Dynamo (`torch.compile`) leaves calls into this package alone, which are no part of a program."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which Dynamo calls and does not look into, nor into what that calls."""
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        dynamo = sys.modules.get("torch._dynamo")
        if dynamo is None:  # and importing it takes seconds
            return function(*arguments, **named)
        if not disabled:
            disabled.append(dynamo.disable(function))
        return disabled[0](*arguments, **named)

    return call
