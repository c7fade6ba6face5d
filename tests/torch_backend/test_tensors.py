"""What is done with tensors around the core's calls."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

SIGNED = ("int8", "int16", "int32", "int64")
UNSIGNED = ("uint8", "uint16", "uint32", "uint64")


@pytest.mark.parametrize("by", [1, 2, 3, 7, 200, 256, 40_000])
@pytest.mark.parametrize("name", [*SIGNED, *UNSIGNED])
def test_integers_are_divided_exactly(name: str, by: int) -> None:
    """By more than the dtype can hold, too."""
    from collectives.torch.tensors import divide_integers

    dtype = getattr(torch, name)
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    draw = random.Random(by)
    middle = (least + most) // 2
    values = [least, least + 1, 0, 1, middle, middle + 1, most - 1, most]
    values += [draw.randint(least, most) for _ in range(1000)]
    x = torch.tensor(values, dtype=dtype)
    divide_integers(x, by)
    assert x.tolist() == [abs(v) // by * (-1 if v < 0 else 1) for v in values]
    empty, scalar = torch.empty(0, dtype=dtype), torch.tensor(most, dtype=dtype)
    divide_integers(empty, by)
    divide_integers(scalar, by)
    assert empty.numel() == 0 and scalar.item() == most // by
