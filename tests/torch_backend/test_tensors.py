"""What is done with tensors around the core's calls."""

from __future__ import annotations

import random
from typing import Any

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


@pytest.mark.parametrize("behind_each_other", [True, False])
def test_tensors_are_reduced_together_where_they_are(behind_each_other: bool) -> None:
    """Those that are scattered are copied together, and back, once."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from collectives.torch.group import CollectivesGroup
    from collectives.torch.joining import Meeting

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
            name = func.overloadpacket.__name__
            if name in ("cat", "clone", "empty", "copy_"):
                copies.append(name)
            return func(*args, **kwargs)

    copies: list[str] = []
    rows = [*torch.arange(12.0).view(3, 4)]
    if not behind_each_other:
        rows = [row.clone() for row in rows]
    group = CollectivesGroup(Meeting(torch.distributed.HashStore(), 0, 1, 20.0, []), "group")
    options = torch.distributed.AllreduceCoalescedOptions()
    options.reduceOp = torch.distributed.ReduceOp.MAX
    with Copies():
        group.allreduce_coalesced(rows, options).wait()
    group.shutdown()
    assert copies == ([] if behind_each_other else ["cat", "copy_", "copy_", "copy_"])
    assert torch.equal(torch.stack(rows), torch.arange(12.0).view(3, 4))
