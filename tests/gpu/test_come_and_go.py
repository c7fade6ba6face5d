"""Communicators on GPUs that come and go leave no memory, there or on the host, and no descriptor,
mapping or thread.
"""

from __future__ import annotations

import gc

import numpy as np
import pytest
import soak
from gpus import MARK, free_memory
from on_device import OnDevice, run_on
from test_leaks import SLACK

import collectives as cc

pytestmark = MARK

WARM, MORE = 6, 32


@pytest.mark.parametrize("ends", ["closed", "failed"])
def test_worlds_that_end(ends: str) -> None:
    """However they end: a mismatch breaks the GPU half of one."""

    def body(comm: OnDevice) -> None:
        comm.all_reduce(np.ones(5000, np.float32))
        part = comm.comm.duplicate()
        array = part.empty(1000, "float32", "cuda:0", kind="cupy")
        with comm.stream:
            part.all_reduce(array)
        part.synchronize()
        if ends == "failed":
            with comm.stream:
                comm.comm.all_reduce(array[: 100 + comm.rank], algorithm="direct_one_shot")
            with pytest.raises(cc.MismatchError):
                comm.comm.synchronize()
        del array
        part.close()

    held, free = [], []
    for count in (WARM, MORE):
        for _ in range(count):
            run_on(2, [0], body, timeout=20)
        gc.collect()
        held.append(soak.held())
        free.append(free_memory())
    # Memory that was dropped while a kernel might use it is freed with what is made next: what is
    # held differs by a few. What every world left would be one or more for each.
    before, after = held
    for what in ("descriptors", "mappings", "threads"):
        assert getattr(after, what) < getattr(before, what) + MORE // 2, held
    assert after.rss < before.rss + SLACK, held
    assert free[1] >= free[0] - (8 << 20), free
