"""More than 2**31 elements, and more than 2**32 bytes, in one call on GPUs: no count, offset or
number of a block is kept in 32 bits.

An element is (i % 251 + rank) modulo 256 at i. All is computed and compared on the GPU, where it
takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from gpus import GPUS, MARK, cupy, free_memory
from on_device import EMULATED

import collectives as cc

pytestmark = MARK

COUNT = (1 << 31) + 70_001
DEVICES = list(range(GPUS))
REDUCING = ("direct_two_shot", "ring", "halving_doubling", "double_binary_tree")
Array = Any


@pytest.fixture(autouse=True)
def enough_memory() -> None:
    if EMULATED:
        pytest.skip("takes an hour where kernels are emulated; tests/test_large.py has the host's")
    needed = 80 << 30
    if free_memory() < needed:
        pytest.skip(f"{free_memory() >> 30} GiB of the GPU are free, {needed >> 30} are needed")


class Rank:
    """A rank with arrays that are made once, and a stream."""

    def __init__(self, comm: cc.Communicator, dtype: str, symmetric: bool) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.device = DEVICES[comm.rank % GPUS]
        cupy.cuda.Device(self.device).use()
        self.stream = cupy.cuda.Stream(non_blocking=True)
        with self.stream:
            self.x, self.out = (
                comm.empty(COUNT, dtype, f"cuda:{self.device}", kind="cupy")
                if symmetric
                else cupy.empty(COUNT, dtype)
                for _ in range(2)
            )
            self.index = cupy.arange(1 << 24, dtype="int64")
            self.wrong = cupy.zeros(1, "int64")
        self.stream.synchronize()

    def each_part(self, array: Array, begin: int) -> Any:
        """(Part of the array, its indices where the whole begins with `begin`.)"""
        for at in range(0, array.size, self.index.size):
            part = array[at : at + self.index.size]
            yield part, self.index[: part.size] + (begin + at)

    def fill(self, array: Array, begin: int = 0, rank: int | None = None) -> None:
        shift = self.rank if rank is None else rank
        for part, index in self.each_part(array, begin):
            part[:] = ((index % 251 + shift) & 255).astype(array.dtype)

    def compare(self, array: Array, begin: int, ranks: list[int]) -> None:
        """Is it the sum of what those ranks had?"""
        modulus = 256 if array.dtype.itemsize == 1 else 1 << 30
        for part, index in self.each_part(array, begin):
            wanted = sum(((index % 251 + r) & 255) for r in ranks) % modulus
            self.wrong += (part != wanted.astype(array.dtype)).sum()

    def check(self, what: str, call: Callable[[], Any], compared: Callable[[], None]) -> None:
        """Fills x with this rank's, and out with what is never right; calls; compares."""
        with self.stream:
            self.fill(self.x)
            self.out.fill(253)
            self.wrong.fill(0)
        self.stream.synchronize()
        self.comm.barrier()
        with self.stream:
            call()
        self.stream.synchronize()
        self.comm.synchronize()
        self.comm.barrier()
        with self.stream:
            compared()
        self.stream.synchronize()
        wrong = int(self.wrong.get()[0])
        assert wrong == 0, f"{what}: {wrong} wrong elements on rank {self.rank}"
        self.comm.barrier()


def block(q: int, n: int) -> tuple[int, int]:
    """Of COUNT elements: where the block of rank q begins and ends."""
    each, more = divmod(COUNT, n)
    begin = q * each + min(q, more)
    return begin, begin + each + (q < more)


def every_call(r: Rank) -> None:
    comm, n, everyone = r.comm, r.size, list(range(r.size))
    begin, end = block(r.rank, n)
    counts = [block(q, n)[1] - block(q, n)[0] for q in everyone]
    for algorithm in REDUCING:
        how = {"algorithm": algorithm}
        r.check(
            f"all_reduce by {algorithm}",
            lambda how=how: comm.all_reduce(r.x, out=r.out, **how),
            lambda: r.compare(r.out, 0, everyone),
        )
    for algorithm in ("direct_two_shot", "ring"):
        how = {"algorithm": algorithm}
        r.check(
            f"reduce_scatter by {algorithm}",
            lambda how=how: comm.reduce_scatter_v(r.x, counts, out=r.out[: end - begin], **how),
            lambda: r.compare(r.out[: end - begin], begin, everyone),
        )
        r.check(
            f"all_gather by {algorithm}",
            lambda how=how: comm.all_gather_v(r.x[begin:end], counts, out=r.out, **how),
            lambda: [r.compare(r.out[slice(*block(q, n))], block(q, n)[0], [q]) for q in everyone],
        )
        r.check(
            f"broadcast by {algorithm}",
            lambda how=how: comm.broadcast(r.x, 1, **how),
            lambda: r.compare(r.x, 0, [1]),
        )
        r.check(
            f"reduce by {algorithm}",
            lambda how=how: comm.reduce(r.x, 1, out=r.out if r.rank == 1 else None, **how),
            lambda: r.compare(r.out, 0, everyone) if r.rank == 1 else None,
        )
    own = slice(begin, end)
    r.check(
        "gather",
        lambda: comm.gather_v(r.x[own], 1, counts, out=r.out if r.rank == 1 else None),
        lambda: (
            [r.compare(r.out[slice(*block(q, n))], block(q, n)[0], [q]) for q in everyone]
            if r.rank == 1
            else None
        ),
    )
    r.check(
        "scatter",
        lambda: comm.scatter_v(r.x if r.rank == 1 else None, counts, 1, out=r.out[own]),
        lambda: r.compare(r.out[own], begin, [1]),
    )
    even = COUNT // n * n
    r.check(
        "all_to_all",
        lambda: comm.all_to_all(r.x[:even], out=r.out[:even]),
        lambda: [
            r.compare(r.out[q * (even // n) : (q + 1) * (even // n)], r.rank * (even // n), [q])
            for q in everyone
        ],
    )
    right, left = (r.rank + 1) % n, (r.rank - 1) % n
    r.check(
        "sendrecv",
        lambda: comm.sendrecv(r.x, right, r.out, left),
        lambda: r.compare(r.out, 0, [left]),
    )


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("memory", ["any", "symmetric"])
def test_more_than_31_bits_of_elements(memory: str, n: int) -> None:
    def body(comm: cc.Communicator) -> None:
        every_call(Rank(comm, "uint8", memory == "symmetric"))

    cc.run_threads(n, body, devices=DEVICES, timeout=60)


@pytest.mark.parametrize("memory", ["any", "symmetric"])
def test_more_than_32_bits_of_bytes(memory: str) -> None:
    """Elements of four bytes: 8 GiB an array."""

    def body(comm: cc.Communicator) -> None:
        r = Rank(comm, "int32", memory == "symmetric")
        for algorithm in REDUCING:
            how = {"algorithm": algorithm}
            r.check(
                f"all_reduce by {algorithm}",
                lambda how=how: comm.all_reduce(r.x, out=r.out, **how),
                lambda: r.compare(r.out, 0, [0, 1]),
            )

    cc.run_threads(2, body, devices=DEVICES, timeout=60)
