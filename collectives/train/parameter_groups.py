"""Which optimizer steps which parameter."""

from __future__ import annotations

import dataclasses
import fnmatch
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import did_you_mean
from .model import Model
from .optimizers import Optimizer


class ParameterGroups(NamedTuple):
    """What steps the parameters of a model.

    optimizers  of one kind, with the settings of each group; the first steps what is in no group
    number      which of them steps which parameter
    torch       the optimizer of torch that steps in their place; None with our own
    """

    optimizers: list[Any]
    number: dict[str, int]
    torch: Any


def parameter_groups(
    model: Model, optimizer: Any, groups: Sequence[Mapping[str, Any]]
) -> ParameterGroups:
    """Takes an optimizer apart into one for each group.

    groups  {"params": [names or patterns], **settings of the optimizer}; a name stands for itself,
            whatever is in it

    Raises TypeError for what is no optimizer, ValueError for groups that name no parameter, one
    that is in another group, or a setting that the optimizer does not have.
    """
    optimizers: list[Any] = [optimizer]
    number = dict.fromkeys(model.parameters, 0)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(optimizer, torch.optim.Optimizer):
        from .module import ModuleModel
        from .torch_optimizer import TorchOptimizer

        if groups or not isinstance(model, ModuleModel):
            raise TypeError("a torch optimizer has groups of its own, and steps a module")
        return ParameterGroups([TorchOptimizer.of(optimizer, model.named)], number, optimizer)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}; pass one of collectives.train: SGD, "
            "Adam, AdamW, LARS, LAMB, or for a module one of torch's"
        )
    if isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups):
        raise ValueError(
            "groups is a list of dicts, such as [{'params': ['*bias'], 'weight_decay': 0.0}]"
        )
    for group in groups:
        settings = dict(group)
        patterns = settings.pop("params", None)
        if patterns is None:
            raise ValueError(
                f"groups: {dict(group)} does not say whose it is; name parameters under 'params'"
            )
        patterns = [patterns] if isinstance(patterns, str) else list(patterns)
        if not patterns:
            raise ValueError(f"groups: {dict(group)} names no parameter")
        other = [type(pattern).__name__ for pattern in patterns if not isinstance(pattern, str)]
        if other:
            raise ValueError(
                f"groups: 'params' holds a {other[0]}; it takes names of parameters and patterns"
            )
        try:
            optimizers.append(dataclasses.replace(optimizer, **settings))
        except TypeError as error:
            raise ValueError(f"groups: {error}") from None
        mine = len(optimizers) - 1
        for pattern in patterns:
            names = [pattern] if pattern in number else fnmatch.filter(number, pattern)
            if not names:
                hint = did_you_mean(pattern, number)
                raise ValueError(f"groups: no parameter is like {pattern!r}; {hint}")
            twice = [n for n in names if number[n] not in (0, mine)]
            if twice:
                raise ValueError(f"groups: {twice[0]!r} is in two groups")
            number |= dict.fromkeys(names, mine)
    return ParameterGroups(optimizers, number, None)
