"""Which algorithm serves a call on device arrays, and how; measured with each way forced."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

# direct_one_shot, by the bytes that a rank sends to each peer: up to _PACKETS in packets, which are
# the fastest for the smallest but send twice the bytes, then in lines, up to _LINES. Measured on
# two and on four H200; for more ranks, the bytes that cross each link are kept alike.
_PACKETS = {2: 128 << 10, 4: 64 << 10, 8: 32 << 10}
_LINES = {2: 4 << 20, 4: 1 << 20, 8: 128 << 10}
# all_reduce with three and more ranks: in one step up to _ONE_STEP (each rank sends all it has to
# everybody), then in two steps, in lines up to _TWO_STEPS_IN_LINES.
_ONE_STEP = {2: 4 << 20, 4: 384 << 10, 8: 128 << 10}
_TWO_STEPS_IN_LINES = {2: 0, 16: 8 << 20}
# Threads of its blocks: one block for the smallest, as long as it has room, saves the blocks'
# meeting at the end; else small blocks, on more multiprocessors.
_ONE_BLOCK, _IN_ONE_BLOCK = 512, 4 << 10
_THREADS = 256
# all_reduce on symmetric buffers reads the peers' contributions below this (it saves a step) and
# has them written above (links carry more writes than reads).
_PULL_BELOW = 8 << 20
# With so few blocks or less it reads them by bulk copies: these keep more bytes in flight than the
# threads of a block do. (On two H200 at 64 MiB: 8 blocks 245 us, where threads take 347.)
_BULK_BLOCKS = 32
# Blocks of direct_two_shot for three and more ranks up to _FEW_BLOCKS_BELOW: with more, the signals
# between all pairs take longer than the bytes. (On four H200, 4 MiB of symmetric buffers.)
_FEW_BLOCKS, _FEW_BLOCKS_BELOW = 32, 8 << 20
# Blocks of direct_two_shot beside a stream that computes: blocks that wait for a peer hold their
# multiprocessors, and a kernel of cuBLAS finds no room beside one.
_BLOCKS_BESIDE = 32
# One message to each peer from the root, until the root's link is full for longer than a second
# step takes; with two ranks that sends no less.
_ROOT_SENDS_ALL = {2: 4 << 20, 16: 256 << 10}
# Where a pair of ranks exchanges one block, not the whole array.
_BLOCKED = ("reduce_scatter", "all_gather", "gather", "scatter", "all_to_all")


@lru_cache(1024)
def device_algorithm(collective: str, nbytes: int, nranks: int) -> str:
    """The name of the algorithm; "" for a barrier, which needs none."""
    if collective == "barrier":
        return ""
    if collective == "all_reduce":
        return "direct_one_shot" if nbytes <= _of(_ONE_STEP, nranks) else "direct_two_shot"
    if collective in ("reduce_scatter", "all_gather"):
        small = nbytes <= nranks * _of(_LINES, nranks)
        return "direct_one_shot" if small else "direct_two_shot"
    if collective == "all_to_all":
        return "direct_two_shot"
    if collective in ("broadcast", "reduce") and nbytes > _of(_ROOT_SENDS_ALL, nranks):
        return "direct_two_shot"
    return "direct_one_shot"


class Launch(NamedTuple):
    """How a kernel made by hand does a call.

    blocks   thread blocks at most; 0: all that the communicator may take
    threads  of a block of direct_one_shot; 0: 512
    chunk    bytes of a message of direct_two_shot; 0: as much as a slot takes
    small    all_to_all by the kernel of direct_one_shot, if all blocks are equal
    lines    in lines of 128 bytes: direct_one_shot, else in packets of 16, and direct_two_shot's
             all_reduce
    pull     direct_two_shot on symmetric buffers reads the peers' contributions
    bulk     and does so by bulk copies through shared memory, where the GPU makes them
    """

    blocks: int = 0
    threads: int = 0
    chunk: int = 0
    small: bool = False
    lines: bool = False
    pull: bool = False
    bulk: bool = False


_PLAIN = Launch()


@lru_cache(1024)
def device_launch(
    algorithm: str,
    collective: str,
    nbytes: int,
    nranks: int,
    beside: bool = False,
    most: int = 128,
) -> Launch:
    """How `algorithm` goes about a call of `nbytes` bytes, where it has kernels of its own.

    beside  another stream computes meanwhile
    most    thread blocks that the communicator may take
    """
    each = nbytes // nranks if collective in _BLOCKED else nbytes
    if algorithm == "direct_one_shot":
        return _one_shot(each, nranks)
    if algorithm != "direct_two_shot":
        return _PLAIN
    if collective == "all_to_all":
        return _one_shot(each, nranks) if each <= _of(_LINES, nranks) else _PLAIN
    if collective == "all_reduce" and nbytes <= _of(_TWO_STEPS_IN_LINES, nranks) and not beside:
        return Launch(threads=_THREADS, lines=True)
    few = nranks > 2 and nbytes <= _FEW_BLOCKS_BELOW
    blocks = _FEW_BLOCKS if few else _BLOCKS_BESIDE if beside else 0
    bulk = min(blocks or most, most) <= _BULK_BLOCKS
    return Launch(blocks=blocks, pull=bulk or nbytes < _PULL_BELOW, bulk=bulk)


def _one_shot(each: int, nranks: int) -> Launch:
    lines = each > _of(_PACKETS, nranks)
    threads = _ONE_BLOCK if each <= _IN_ONE_BLOCK else _THREADS
    return Launch(threads=threads, lines=lines, small=True)


def _of(limits: dict[int, int], nranks: int) -> int:
    """The limit for so many ranks: that of the next number in the table, else the lowest."""
    return next((limit for n, limit in limits.items() if nranks <= n), min(limits.values()))
