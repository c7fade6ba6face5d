"""Sends and receives on device arrays in one group, where one needs what another gives."""

from __future__ import annotations

import pytest
from gpus import GPUS, MARK
from messages import Box, message, same
from on_device import OnDevice, run_on

pytestmark = MARK


@pytest.mark.parametrize("count", [7, 400_001])
def test_what_was_received_is_sent_on(count: int) -> None:
    """In the kernel behind the one that receives it; and the array may then be written again."""

    def body(comm: OnDevice) -> bool:
        box, n, rank = Box(comm), comm.size, comm.rank
        to, source = (rank + 1) % n, (rank - 1) % n
        first, others = message(0, 1, count), [message(q, q, count) for q in range(n)]
        x, y = box.put(first), box.empty(first)
        z = box.put(others[rank])
        comm.comm.barrier()
        with comm.comm.group():
            if rank == 0:
                comm.comm.send(x, to)
                comm.comm.recv(y, source)
            else:
                comm.comm.recv(y, source)
                comm.comm.send(y, to)
            comm.comm.send(z, source)
            comm.comm.recv(y, to)
        comm.finish()
        assert same(box.get(x), first)
        assert same(box.get(y), others[to])
        box.check_guards()
        return True

    assert run_on(3, list(range(GPUS)), body, timeout=20) == [True] * 3
