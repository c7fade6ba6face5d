"""Transient buckets of gradients on GPUs, of which ranks lack some."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from gpus import GPUS, MARK, cupy
from on_device import OnDevice, run_on

from collectives.bucketing import Bucket, Bucketer
from collectives.work import Work

pytestmark = MARK

NAMES = list("abcdefgh")  # more buckets than have memory at a time
COUNT = 1000


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("lacks", [[], ["h"], ["h", "d"], NAMES], ids="".join)
def test_gradients_that_one_rank_lacks(lacks: list[str], static: bool) -> None:
    """What ranks compute is behind calls of both, as it is behind gathers under ZeRO-3; a reduction
    that one of them waits for begins on the other behind all of that.
    """

    def body(comm: OnDevice) -> list[list[float]]:
        gathers = comm.comm.duplicate()
        with comm.stream:
            outputs: dict[int, Any] = {}

            def reduced(bucket: Bucket) -> Work:
                out = outputs[bucket.index] = cupy.empty(COUNT, cupy.float32)
                call = partial(comm.comm.all_reduce, bucket.buffer, out=out)
                return bucketer.side.launch(bucket.device, call)

            bucketer = Bucketer(
                comm.comm, {name: cupy.empty(COUNT, cupy.float32) for name in NAMES},
                bucket_bytes=1, first_bucket_bytes=1, transient=True, reduce=reduced,
                find_unused=not static, static_graph=static,
            )  # fmt: skip
            bucketer.waits = False
            x = cupy.empty(COUNT, cupy.float32)
            x.set(np.ones(COUNT, np.float32))
            found = []
            for step in range(3):
                for i, name in enumerate(reversed(NAMES)):
                    gathers.all_reduce(x, op="max")
                    grad = cupy.empty(COUNT, cupy.float32)
                    grad.set(np.full(COUNT, 100.0 * step + 10 * i + comm.rank, np.float32))
                    if comm.rank or name not in lacks:
                        bucketer.ready(name, grad)
                if lacks == NAMES and comm.rank == 0:
                    bucketer.finish()
                    assert bucketer.peak == 0
                else:
                    # Early only where all ranks are known to lack the same.
                    early = bucketer.buckets[0].work is not None
                    assert early == (static and not lacks and step > 0)
                    bucketer.finish()
                comm.stream.synchronize()
                found.append([float(outputs[i].get()[-1]) for i in range(len(NAMES))])
        comm.finish()
        return found

    got = run_on(2, list(range(GPUS)), body, timeout=8)
    lacking = [name in lacks for name in reversed(NAMES)]
    wanted = [
        [(1 if lack else 2) * (100.0 * step + 10 * i) + 1 for i, lack in enumerate(lacking)]
        for step in range(3)
    ]
    assert got == [wanted] * 2
