"""What a trainer is asked for, checked before any rank waits for another."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..agreement import agree
from ..array import dtype_name
from ..bucket_layout import check_name
from ..errors import ArrayTypeError, did_you_mean
from .precision import compute_dtype

if TYPE_CHECKING:
    from ..communicator import Communicator
    from .model import Model

_REAL = ("float", "bfloat")  # how the names of dtypes of real floating-point numbers begin


def check_settings(
    *,
    sharding: int,
    shard_group: str | None,
    normalize: str,
    count: Any,
    accumulate: int,
    reduce_every: str,
    reduce_dtype: Any,
    clip_norm: float | None,
    offload: str | None,
    precision: str | None,
    loss_scale: Any,
) -> None:
    """Raises ValueError for a setting of `Trainer` that has no such value."""
    if sharding not in (0, 1, 2, 3):
        raise ValueError(f"sharding={sharding!r}; known: 0, 1, 2, 3")
    if shard_group not in (None, "node"):
        raise ValueError(f"shard_group={shard_group!r}; only 'node' is known")
    if shard_group is not None and sharding == 0:
        raise ValueError(
            f"shard_group={shard_group!r}: with sharding=0 nothing is sharded; choose 1, 2 or 3"
        )
    if normalize not in ("samples", "tokens"):
        raise ValueError(
            f"normalize={normalize!r}; {did_you_mean(normalize, ['samples', 'tokens'])}"
        )
    if normalize == "tokens" and count is None:
        raise ValueError("normalize='tokens' needs count=, which counts the tokens of a batch")
    if accumulate < 1:
        raise ValueError(f"accumulate={accumulate}; at least one micro-batch makes a step")
    if reduce_every not in ("step", "micro-batch"):
        raise ValueError(
            f"reduce_every={reduce_every!r}; " + did_you_mean(reduce_every, ["step", "micro-batch"])
        )
    if reduce_dtype is not None and not dtype_name(reduce_dtype).startswith(_REAL):
        raise ValueError(
            f"reduce_dtype={dtype_name(reduce_dtype)!r} cannot hold gradients; name one of real "
            "floats, such as 'float32'"
        )
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_norm={clip_norm} must be positive")
    if offload not in (None, "host"):
        raise ValueError(f"offload={offload!r}; only 'host' is known")
    if loss_scale is not None and compute_dtype(precision) != "float16":
        raise ValueError("loss_scale= is for precision='fp16', whose gradients are scaled")


def text_of(value: Any) -> str:
    """How a setting is compared between ranks and in checkpoints: what it is of, and what it holds,
    not where it lies in memory. Raises ValueError for a lambda, which says neither.
    """
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(text_of, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {text_of(x)}" for key, x in value.items()) + "}"
    if isinstance(value, functools.partial):
        return f"partial{text_of([value.func, *value.args, value.keywords])}"
    if isinstance(value, types.MethodType):
        return f"{text_of(value.__self__)}.{value.__name__}"
    if isinstance(value, (types.FunctionType, type)):
        if value.__name__ == "<lambda>" or getattr(value, "__closure__", None):
            raise ValueError(
                f"{value.__qualname__} is a lambda or a closure, and cannot be compared between "
                "ranks and with checkpoints: make it a function of its own, a functools.partial of "
                "one, or an object with a __call__"
            )
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, np.generic):
        return repr(value.item())  # 0.1, whether numpy calculated it or not
    kind = type(value)
    if dataclasses.is_dataclass(value):
        held = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif "__repr__" not in {name for base in kind.__mro__[:-1] for name in vars(base)}:
        held = getattr(value, "__dict__", {})
    else:
        return repr(value)
    return f"{kind.__qualname__}({', '.join(f'{k}={text_of(x)}' for k, x in held.items())})"


def is_real(x: Any) -> bool:
    """True for an array of real floating-point numbers."""
    return dtype_name(x.dtype).startswith(_REAL)


def check_parameters(parameters: Mapping[str, Any]) -> None:
    """Raises ArrayTypeError that names a trainable parameter of another kind than real floats."""
    for name, x in parameters.items():
        if not is_real(x):
            kind = dtype_name(x.dtype)
            raise ArrayTypeError(
                f"parameter {name!r} is {kind}; the trainer steps real floating-point parameters: "
                + (
                    "keep its real and imaginary parts as two parameters"
                    if kind.startswith("complex")
                    else "freeze it (frozen=, or requires_grad=False)"
                )
            )


def agree_on(
    comm: Communicator, model: Model, settings: Mapping[str, Any], number: Mapping[str, int]
) -> None:
    """Raises MismatchError on all ranks unless all have these parameters, settings and parameter
    groups. Collective.
    """
    for name in (*model.parameters, *model.frozen):
        check_name(name)
    shapes = {
        name: [kind, list(x.shape), dtype_name(x.dtype)]
        for kind, arrays in (("", model.parameters), ("frozen", model.frozen))
        for name, x in arrays.items()
    }
    agree(comm, "parameter", shapes)
    agree(comm, "setting", settings)
    agree(comm, "parameter group of", number)
