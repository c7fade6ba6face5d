"""More than 2**31 elements in one call: no count is kept in 32 bits."""

from __future__ import annotations

import launch
import numpy as np
import pytest

import collectives as cc

COUNT = (1 << 31) + 70_001
ENDS = (1 << 31) % 251, (COUNT - 1) % 251
NEEDED = 5 << 30  # bytes: one array of two ranks


def available() -> int:
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":") for line in file)
    return int(fields["MemAvailable"].split()[0]) << 10


@pytest.fixture(autouse=True)
def enough_memory():
    if available() < NEEDED + (2 << 30):
        pytest.skip(f"{available() >> 30} GiB of memory are free, {(NEEDED >> 30) + 2} are needed")


def check_pattern(x, what):
    """x[i] is i % 251 where 32 bits would go wrong, at the ends, here and there."""
    count = x.size
    for begin in (0, (1 << 31) - 500, count - 1000, count // 2, count // 3, (1 << 30) + 17):
        at = np.arange(begin, begin + 1000)[: count - begin] % 251
        assert (x[begin : begin + 1000] == at).all(), f"{what}: near {begin}"


def fill(x):
    """i % 251 at i."""
    block = np.tile(np.arange(251, dtype=np.uint8), 1 << 14)
    for begin in range(0, x.size, block.size):
        part = x[begin : begin + block.size]
        part[:] = block[: part.size]


def every_call(comm):
    rank = comm.rank
    x = np.zeros(COUNT, np.uint8)
    if rank == 0:
        fill(x)
        comm.send(x, 1)
    else:
        comm.recv(x, 0)
        check_pattern(x, "recv")
        x[COUNT // 3 :] = 0
    comm.all_reduce(x, "bor")
    check_pattern(x, "all_reduce")
    if rank == 0:
        x[: COUNT // 2] = 0
    comm.all_reduce(x, "max", algorithm="ring")
    check_pattern(x, "all_reduce by a ring")
    half = COUNT // 2 + 1
    own = x[:half] if rank == 0 else x[half:]
    other = x[half:] if rank == 0 else x[:half]
    comm.reduce_scatter(x, "max", out=own)
    other[:] = 0
    comm.all_gather(own, out=x)
    check_pattern(x, "reduce_scatter and all_gather")
    return int(x[1 << 31]), int(x[-1])


@pytest.mark.slow
def test_calls_on_more_than_31_bits_of_elements():
    """One array for each of two ranks, since taking the memory costs most of the time: a message,
    all_reduce by two algorithms, reduce_scatter and all_gather, all in place.
    """

    got = cc.run_threads(2, every_call, timeout=100)
    assert got == [ENDS] * 2


@pytest.mark.slow
def test_the_same_in_processes():
    launch.run(2, "large.py", timeout=110).expect(status=0)
