"""Which algorithm serves a call on device arrays, and how; measured with each way forced."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

# direct_one_shot, by the bytes that a rank sends to each peer: up to _PACKETS in packets, which are
# the fastest for the smallest but send twice the bytes, then in lines. Up to _LINES all_reduce goes
# so. For all_reduce on two GPUs the limits were measured on H200, for three and four on 4 H100; for
# more ranks, the bytes that cross each link are kept alike. For the other collectives nothing was
# measured: they take over what all_reduce sends to each peer.
_PACKETS = {2: 256 << 10, 4: 64 << 10, 8: 32 << 10}
_LINES = {2: 4 << 20, 4: 512 << 10, 8: 128 << 10}
# reduce_scatter and all_gather, all blocks together, while a pair exchanges no more than _LINES:
# measured is only that direct_two_shot is slower than NCCL on two H200 up to 512 KiB and faster
# from 4 MiB up, not where direct_one_shot and direct_two_shot meet.
_BLOCKS_AT_ONCE = 1 << 20
# all_reduce on symmetric buffers reads the peers' contributions below this (it saves a step) and
# has them written above (links carry more writes than reads).
_PULL_BELOW = 16 << 20
# Blocks of direct_two_shot for three and more ranks up to _FEW_BLOCKS_BELOW: with more, the signals
# between all pairs take longer than the bytes.
_FEW_BLOCKS, _FEW_BLOCKS_BELOW = 16, 8 << 20
# Blocks of direct_two_shot beside a stream that computes: blocks that wait for a peer hold their
# multiprocessors, and a kernel of cuBLAS finds no room beside one.
_BLOCKS_BESIDE = 32
# One message to each peer from the root, until the root's link is full for longer than a ring of
# all ranks needs to fill.
_ROOT_SENDS_ALL = 256 << 10
# Where a pair of ranks exchanges one block, not the whole array.
_BLOCKED = ("reduce_scatter", "all_gather", "gather", "scatter")


@lru_cache(1024)
def device_algorithm(collective: str, nbytes: int, nranks: int) -> str:
    """The name of the algorithm; "" for a barrier, which needs none."""
    if collective == "barrier":
        return ""
    if collective == "all_reduce":
        return "direct_one_shot" if nbytes <= _of(_LINES, nranks) else "direct_two_shot"
    if collective in ("reduce_scatter", "all_gather"):
        small = nbytes <= min(_BLOCKS_AT_ONCE, nranks * _of(_LINES, nranks))
        return "direct_one_shot" if small else "direct_two_shot"
    if collective == "all_to_all":
        return "direct_two_shot"
    if collective in ("broadcast", "reduce") and nbytes > _ROOT_SENDS_ALL:
        return "ring"
    return "direct_one_shot"


class Launch(NamedTuple):
    """How a kernel made by hand does a call.

    blocks  thread blocks at most; 0: all that the communicator may take
    chunk   bytes of a message of direct_two_shot; 0: as much as a slot takes
    lines   direct_one_shot in lines of 128 bytes, not in packets of 16
    pull    direct_two_shot on symmetric buffers reads the peers' contributions
    """

    blocks: int = 0
    chunk: int = 0
    lines: bool = False
    pull: bool = False


_PLAIN = Launch()


@lru_cache(1024)
def device_launch(
    algorithm: str, collective: str, nbytes: int, nranks: int, beside: bool = False
) -> Launch:
    """How `algorithm` goes about a call of `nbytes` bytes, where it has kernels of its own.

    beside  another stream computes meanwhile
    """
    if algorithm == "direct_one_shot":
        each = nbytes / nranks if collective in _BLOCKED else nbytes
        return Launch(lines=each > _of(_PACKETS, nranks))
    if algorithm == "direct_two_shot":
        few = nranks > 2 and nbytes <= _FEW_BLOCKS_BELOW
        blocks = _FEW_BLOCKS if few else _BLOCKS_BESIDE if beside else 0
        return Launch(blocks=blocks, pull=nbytes < _PULL_BELOW)
    return _PLAIN


def _of(limits: dict[int, int], nranks: int) -> int:
    """The limit for so many ranks: that of the next number in the table, else the lowest."""
    return next((limit for n, limit in limits.items() if nranks <= n), min(limits.values()))
