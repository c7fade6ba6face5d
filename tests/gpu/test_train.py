"""Training on real GPUs: optimizers in one pass have the bits of the host, and what is exact in
the trainer's norms stays exact. Buckets are ranges that Nsight Systems shows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpus import MARK, cupy, need_compiler
from optimizers import OPTIMIZERS

from collectives.array.dtypes import numpy_dtype
from collectives.train import LAMB, fused
from collectives.train.norms import Spans, sums_of_squares, whole

pytestmark = MARK
need_compiler()


CUTS = [(0, 70_001), (70_001, 70_001), (70_001, 100_003)]


def on_device(x: Any) -> Any:
    """bfloat16 travels as its bits, which every cupy can take."""
    if x.dtype.name == "bfloat16":
        return cupy.asarray(x.view(np.uint16)).view(x.dtype)
    return cupy.asarray(x)


def on_host(x: Any) -> Any:
    if x.dtype.name == "bfloat16":
        return x.view(np.uint16).get().view(x.dtype)
    return x.get()


@pytest.mark.parametrize("masters", [True, False])
@pytest.mark.parametrize("low", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_one_pass_has_the_bits_of_the_host(optimizer: Any, low: str, masters: bool) -> None:
    """Without masters parameters and state have 16 bits too, and are rounded once."""
    random = np.random.default_rng(3)
    kept = numpy_dtype("float32" if masters else low)
    w, *state = (random.normal(size=100_003).astype(kept) for _ in range(3))
    states = dict(zip(optimizer.slots, map(np.abs, state), strict=False))
    g = random.normal(size=w.size).astype(numpy_dtype(low))
    coefficient, lr, step = 0.37, 0.05, 3
    x = g.astype(np.float32) * np.float32(coefficient)
    work, used = np.empty_like(x), on_device(np.empty(w.size, g.dtype)) if masters else None
    w_there, g_there = on_device(w), on_device(g)
    there = {k: on_device(v) for k, v in states.items()}
    w, states = w.astype(np.float32), {k: v.astype(np.float32) for k, v in states.items()}
    if isinstance(optimizer, LAMB):
        name, numbers = optimizer.direction_on_gpu(step)
        there["direction"] = cupy.empty(w.size, np.float32)
        optimizer.direction(w, x, states, step, work)
        states["direction"] = x
    else:
        name, numbers = optimizer.on_gpu(lr, step)
        if optimizer.layerwise:
            optimizer.apply(w, x, states, lr)
        else:
            optimizer.update(w, x, states, lr, step, work)
        if name == "sgd":
            states = there = {}
    arrays = {"g": g_there, "w": w_there, **there}
    if used is not None:
        arrays["used"] = used
    # Together with what begins elsewhere than at 16 bytes, and with nothing.
    whole = [{k: x[low:high] for k, x in arrays.items()} for low, high in CUTS]
    parts = fused.Parts(name, tuple(numbers), whole)
    parts.run([(coefficient, *numbers.values())] * len(whole))
    assert on_host(w_there).tobytes() == w.astype(kept).tobytes()
    assert used is None or on_host(used).tobytes() == w.astype(g.dtype).tobytes()
    for key, value in there.items():
        assert on_host(value).tobytes() == states[key].astype(value.dtype).tobytes(), key


def test_norms_of_parts_are_those_of_the_whole() -> None:
    x = cupy.asarray(np.random.default_rng(5).normal(size=512 * 700 + 33).astype(np.float32))
    together = sums_of_squares([whole(x, 0)], 1, None)
    first, second = whole(x[: 512 * 300], 0), whole(x[512 * 300 :], 0)
    assert sums_of_squares([first, second], 1, None) == together
    at = np.array([0, 512 * 300, x.size], np.int64)
    cut = Spans(x, at[:-1], at[1:], np.zeros(2, np.int64))
    assert sums_of_squares([cut], 1, None) == together
    np.testing.assert_allclose(together, [(x.get().astype(np.float64) ** 2).sum()], rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_norms_of_groups_are_those_of_the_host(dtype: str) -> None:
    """Groups of several arrays that begin anywhere, of all lengths about a chunk, an empty one and
    more groups than blocks; values that are no numbers end up in their group alone.
    """
    random = np.random.default_rng(9)
    lengths = [0, 1, 31, 511, 512, 513, 5000, 512 * 2000 + 7, *random.integers(1, 3000, 900)]
    values = random.normal(size=sum(lengths)).astype(numpy_dtype(dtype))
    there, at, parts, mine = on_device(values), 0, [], []
    for i, length in enumerate(lengths):
        group = i // 2
        parts.append(whole(there[at : at + length], group))
        mine.append(whole(values[at : at + length].astype(np.float64), group))
        at += length
    count = len(lengths) // 2 + 1
    found = sums_of_squares(parts, count, None)
    np.testing.assert_allclose(found, sums_of_squares(mine, count, None), rtol=1e-12)
    assert (sums_of_squares(parts, count, None) == found).all()
    values[sum(lengths[:7]) + 512 * 1000] = np.inf
    there.set(values) if dtype != "bfloat16" else there.view(np.uint16).set(values.view(np.uint16))
    again = sums_of_squares(parts, count, None)
    assert np.isnan(again[7 // 2])
    assert (np.delete(again, 7 // 2) == np.delete(found, 7 // 2)).all()
