"""Batch normalisation whose statistics are those of the global batch.

Every rank gives the count, the mean and the sum of squared deviations of its own part, and all are
merged in rank order by the formula of Chan, Golub and LeVeque (1983), "Algorithms for Computing the
Sample Variance", https://doi.org/10.1080/00031305.1983.10483115. So parts may differ in size, and
the variance is not lost in a difference of large numbers. One all_gather forward, one all_reduce
back.

As a function over arrays here; as a torch module in `torch_batch_norm`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..array import namespace, native

if TYPE_CHECKING:
    from ..communicator import Communicator


class Statistics(NamedTuple):
    """Of the global batch, one number for each channel.

    mean, var  float64 on the host; var divides by elements
    elements   elements of a channel on all ranks
    """

    mean: Any
    var: Any
    elements: int


def global_statistics(comm: Communicator, x: Any, axis: int = 1) -> Statistics:
    """Mean and variance over all ranks and over all axes of `x` but `axis`. Collective.

    x  array of any library; ranks may differ in the lengths of the other axes (0 too)

    Raises ValueError if no rank has an element.
    """
    a = native(x, "batch_norm: x")
    xp = namespace(a)
    axes = tuple(i for i in range(a.ndim) if i != axis % a.ndim)
    channels = a.shape[axis]
    mine = np.zeros((1, 2 * channels + 1))
    count = a.size // channels if channels else 0
    if count:
        wide = a.astype(np.float64)
        mean = wide.mean(axis=axes, keepdims=True)
        deviation = xp.square(wide - mean).sum(axis=axes)
        mine[0, :channels] = _host(mean.reshape(-1))
        mine[0, channels:-1] = _host(deviation)
        mine[0, -1] = count
    total, mean, deviation = 0.0, np.zeros(channels), np.zeros(channels)
    for row in comm.all_gather(mine):
        more = row[-1]
        if more:
            delta = row[:channels] - mean
            both = total + more
            mean = mean + delta * (more / both)
            deviation = deviation + row[channels:-1] + delta * delta * (total * more / both)
            total = both
    if not total:
        raise ValueError("batch_norm: no rank has an element to normalise")
    return Statistics(mean, deviation / total, int(total))


def sync_batch_norm(
    comm: Communicator,
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    eps: float = 1e-5,
    axis: int = 1,
) -> tuple[Any, Statistics, Callable[[Any], tuple[Any, Any, Any]]]:
    """(x - mean) / sqrt(var + eps) * weight + bias, with mean and var of the global batch.
    Collective.

    x             array of numpy or cupy, its channels along `axis`
    weight, bias  one number for each channel; 1 and 0 if None

    Returns the result in the dtype of x, the statistics, and a function for backward, collective
    too: given the gradient of the result it returns those of x, weight and bias, each in its dtype
    (that of x for None); the latter two are this rank's part, to be summed like any other gradient.
    """
    a = native(x, "batch_norm: x")
    xp = namespace(a)
    found = global_statistics(comm, a, axis)
    shape = [1] * a.ndim
    shape[axis] = a.shape[axis]
    axes = tuple(i for i in range(a.ndim) if i != axis % a.ndim)

    def wide(values: Any) -> Any:
        return xp.asarray(values, np.float64).reshape(shape)

    kinds = [a.dtype if part is None else native(part).dtype for part in (weight, bias)]
    scale = wide(1 / np.sqrt(found.var + eps))
    normal = (a.astype(np.float64) - wide(found.mean)) * scale
    gain = wide(native(weight)) if weight is not None else wide(np.ones(a.shape[axis]))
    y = normal * gain
    if bias is not None:
        y = y + wide(native(bias))

    def backward(grad: Any) -> tuple[Any, Any, Any]:
        g = native(grad, "batch_norm: gradient").astype(np.float64)
        sums = np.stack([_host(g.sum(axis=axes)), _host((g * normal).sum(axis=axes))])
        own = sums.copy()
        comm.all_reduce(sums, order="rank")
        back = g - wide(sums[0] / found.elements) - normal * wide(sums[1] / found.elements)
        dw, db = (xp.asarray(own[i]).astype(kind) for i, kind in ((1, kinds[0]), (0, kinds[1])))
        return (back * gain * scale).astype(a.dtype), dw, db

    return y.astype(a.dtype), found, backward


def _host(x: Any) -> Any:
    return x.get() if hasattr(x, "get") else x
