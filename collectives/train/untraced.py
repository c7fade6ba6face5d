"""Dynamo (`torch.compile`) leaves hooks alone: they gather, which is no part of a program."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def untraced(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook, which Dynamo calls and does not look into, nor into what that calls."""
    disabled: list[Callable[..., Any]] = []

    def call(*arguments: Any) -> Any:
        dynamo = sys.modules.get("torch._dynamo")
        if dynamo is None:  # and importing it takes seconds
            return hook(*arguments)
        if not disabled:
            disabled.append(dynamo.disable(hook))
        return disabled[0](*arguments)

    return call
