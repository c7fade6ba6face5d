"""Which algorithm serves a call on device arrays, and how; measured with each way forced.

`DeviceTuner` answers for the ranks of one node: a forced rule first, then what `python -m
collectives tune --device cuda` measured on these GPUs, then the limits below.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from ..config import Rule
from ..errors import ConfigError
from . import ANY_SIZE, Choice, Tuner

if TYPE_CHECKING:
    from .tables import Table

# direct_one_shot, by the bytes that a rank sends to each peer: up to _PACKETS in packets, which are
# the fastest for the smallest but send twice the bytes, then in lines, up to _LINES. Measured on
# two and on four H200; for more ranks, the bytes that cross each link are kept alike.
_PACKETS = {2: 128 << 10, 4: 64 << 10, 8: 32 << 10}
_LINES = {2: 4 << 20, 4: 1 << 20, 8: 128 << 10}
# all_reduce with three and more ranks: in one step up to _ONE_STEP (each rank sends all it has to
# everybody), then in two steps, in lines up to _TWO_STEPS_IN_LINES.
_ONE_STEP = {2: 4 << 20, 4: 384 << 10, 8: 128 << 10}
_TWO_STEPS_IN_LINES = {2: 0, 16: 8 << 20}
# Threads of its blocks: one block for the smallest, as long as it has room, saves counting
# the blocks; else small blocks, on more multiprocessors.
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
# multiprocessors, and a kernel of cuBLAS finds no room beside one. On symmetric buffers half as
# many fill the links. (What DDP's step of 100 ms takes longer on two H200: through FIFOs 4.8 ms
# with 16 blocks, 4.0 to 4.5 with 24 to 64, 5.1 with 128; on registered buckets 3.9, 3.5, 4.8 and
# 5.0 ms with 8, 16, 24 and 32.)
BLOCKS_BESIDE = 32
_STRAIGHT_BESIDE = 16
# From so many bytes of a share on, such calls go by copy engines instead, which hold none.
_COPIES_FROM = 1 << 20
# One message to each peer from the root, until the root's link is full for longer than a second
# step takes; with two ranks that sends no less.
_ROOT_SENDS_ALL = {2: 4 << 20, 16: 256 << 10}
_ROOTED = ("broadcast", "reduce")
# Where a pair of ranks exchanges one block, not the whole array.
_BLOCKED = ("reduce_scatter", "all_gather", "gather", "scatter", "all_to_all")


# What the buffers of packets and of lines hold for each pair of ranks, in bytes of data
# (csrc/cuda_memory.cpp): direct_one_shot is interpreted above. An all_reduce in two steps takes the
# room of lines for the share of a rank twice.
_PACKET_ROOM = {2: 512 << 10, 16: 256 << 10}
_LINE_ROOM = {4: 4 << 20, 8: 2 << 20, 16: 1 << 20}
_LINE_DATA = 120  # bytes of data in a line of 128
MOST_RANKS = 16  # of a node, for the kernels


@lru_cache(64)
def device_choices(collective: str, nranks: int) -> tuple[Choice, ...]:
    """The choices for a collective, by rising size; "" for a barrier, which needs no algorithm."""
    if collective == "barrier":
        return (Choice(ANY_SIZE, ""),)
    lines = _of(_LINES, nranks)
    if collective == "all_reduce":
        limit = _of(_ONE_STEP, nranks)
        return (Choice(limit, "direct_one_shot"), Choice(ANY_SIZE, "direct_two_shot"))
    if collective in ("reduce_scatter", "all_gather"):
        return (Choice(nranks * lines, "direct_one_shot"), Choice(ANY_SIZE, "direct_two_shot"))
    if collective == "all_to_all":
        return (Choice(ANY_SIZE, "direct_two_shot"),)
    if collective in ("broadcast", "reduce"):
        limit = _of(_ROOT_SENDS_ALL, nranks)
        return (Choice(limit, "direct_one_shot"), Choice(ANY_SIZE, "direct_two_shot"))
    return (Choice(ANY_SIZE, "direct_one_shot"),)


@lru_cache(1024)
def device_algorithm(collective: str, nbytes: int, nranks: int) -> str:
    """The one of `device_choices` for a call of `nbytes`."""
    return next(c.algorithm for c in device_choices(collective, nranks) if nbytes <= c.limit)


class Launch(NamedTuple):
    """How a kernel made by hand does a call.

    blocks           thread blocks at most; 0: all that the communicator may take
    straight_blocks  the same of direct_two_shot on symmetric buffers, where it needs no FIFOs; 0:
                     as `blocks` says
    threads          of a block of direct_one_shot; 0: 512
    chunk            bytes of a message of direct_two_shot; 0: as much as a slot takes
    small            all_to_all by the kernel of direct_one_shot, if all blocks are equal
    lines            in lines of 128 bytes: direct_one_shot, else in packets of 16, and
                     direct_two_shot's all_reduce
    pull             direct_two_shot on symmetric buffers reads the peers' contributions
    bulk             and does so by bulk copies through shared memory, where the GPU makes them
    copies           direct_two_shot by copy engines, which hold no multiprocessors, where GPUs can
                     (docs/gpu.md); not in a CUDA graph
    """

    blocks: int = 0
    straight_blocks: int = 0
    threads: int = 0
    chunk: int = 0
    small: bool = False
    lines: bool = False
    pull: bool = False
    bulk: bool = False
    copies: bool = False


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

    beside  another stream computes meanwhile. All ranks must say the same.
    most    thread blocks that the communicator may take
    """
    each = nbytes // nranks if collective in _BLOCKED else nbytes
    if algorithm == "direct_one_shot":
        return _one_shot(each, nranks)
    if algorithm != "direct_two_shot":
        return _PLAIN
    if collective == "all_to_all":
        return _one_shot(each, nranks) if each <= _of(_LINES, nranks) else _PLAIN
    if collective == "all_reduce" and nbytes <= _of(_TWO_STEPS_IN_LINES, nranks):
        return Launch(blocks=BLOCKS_BESIDE if beside else 0, threads=_THREADS, lines=True)
    few = nranks > 2 and nbytes <= _FEW_BLOCKS_BELOW
    blocks = _FEW_BLOCKS if few else BLOCKS_BESIDE if beside else 0
    bulk = min(blocks or most, most) <= _BULK_BLOCKS
    straight = _STRAIGHT_BESIDE if beside else 0
    pull = bulk or nbytes < _PULL_BELOW
    copies = beside and collective not in _ROOTED and nbytes >= nranks * _COPIES_FROM
    return Launch(blocks, straight, pull=pull, bulk=bulk, copies=copies)


def _one_shot(each: int, nranks: int) -> Launch:
    lines = each > _of(_PACKETS, nranks)
    threads = _ONE_BLOCK if each <= _IN_ONE_BLOCK else _THREADS
    return Launch(threads=threads, lines=lines, small=True)


# Ways of a call: what sends its bytes, in words, and how many bytes cross the link for one of data.
WAYS = {
    "packets": "in packets of 16 bytes, half of them flags",
    "lines": "in lines of 128 bytes, 8 of them flags",
    "fifos": "by a kernel of its own, through FIFOs in the peers' memory",
    "written": "by a kernel of its own, with results written into the peers' symmetric buffers",
    "pulled": "by a kernel of its own, out of and into the peers' symmetric buffers",
    "steps": "interpreted: messages through FIFOs in the peers' memory",
}
# And that of large calls beside a stream that computes, in words.
BY_COPIES = "by copy engines, and kernels that combine what came"
SENT_FACTOR = {**dict.fromkeys(WAYS, 1.0), "packets": 2.0, "lines": 128 / _LINE_DATA}


@lru_cache(1024)
def device_way(
    algorithm: str, collective: str, nbytes: int, nranks: int, symmetric: bool = False
) -> str:
    """Which of `WAYS` a call of `nbytes` bytes goes, on GPUs that reach each other, with blocks of
    equal lengths (csrc/cuda_direct.cpp decides so).

    symmetric  its arrays are symmetric buffers
    """
    how = device_launch(algorithm, collective, nbytes, nranks)
    each = -(-nbytes // nranks) if collective in _BLOCKED else nbytes
    if algorithm == "direct_one_shot" or how.small:
        packets = each <= _of(_PACKET_ROOM, nranks)
        lines = each <= _line_room(nranks) * _LINE_DATA
        if collective == "barrier" or (not each and collective != "all_to_all"):
            return "steps"
        if lines and (how.lines or not packets):
            return "lines"
        if packets:
            return "packets"
        return "fifos" if collective == "all_to_all" else "steps"
    if algorithm != "direct_two_shot" or not nbytes:
        return "steps"
    share = -(-nbytes // nranks)
    if how.lines and 2 * (share // _LINE_DATA + 2) <= _line_room(nranks):
        return "lines"
    if not symmetric or collective in ("all_to_all", "broadcast", "reduce"):
        return "fifos"
    if collective == "all_gather":
        return "written"
    if how.pull:
        return "pulled"
    return "fifos" if collective == "reduce_scatter" else "written"


class DeviceTuner(Tuner):
    """Chooses algorithms for arrays on the GPUs of one node's ranks.

    refused      why the measured table is not for these GPUs, in words; "" if it is, or there is
                 none
    passed_over  why it says nothing of these ranks' calls, though it is for these GPUs; else ""
    """

    def __init__(
        self,
        nranks: int,
        rules: Iterable[Rule] = (),
        measured: Table | None = None,
        refused: str = "",
        passed_over: str = "",
    ) -> None:
        super().__init__([0] * nranks, True, rules, measured)
        self.refused = refused
        self.passed_over = passed_over

    def choose(self, collective: str, nbytes: int) -> str:
        """The algorithm for a call of `nbytes`; "" for a barrier. Raises ConfigError where a table
        of other GPUs would have to be asked.
        """
        if self.refused and self.rule(collective, nbytes) is None:
            raise ConfigError(self.refused)
        return super().choose(collective, nbytes)

    def candidates(self, collective: str, root: int = 0) -> list[str]:
        """Every algorithm that can do `collective`: none for a barrier, which has a kernel."""
        return [] if collective == "barrier" else super().candidates(collective, root)

    def way(self, algorithm: str, collective: str, nbytes: int) -> str:
        """Which of `WAYS` a call on ordinary arrays goes."""
        return device_way(algorithm, collective, nbytes, self.nranks)

    def built_in(self, collective: str) -> list[Choice]:
        """What is chosen where nothing was measured."""
        return list(device_choices(collective, self.nranks))

    def why_built_in(self, collective: str, nbytes: int) -> str:
        """Why `built_in` answers as it does, in words."""
        algorithm = device_algorithm(collective, nbytes, self.nranks)
        one_step = algorithm == "direct_one_shot" or collective == "all_to_all"
        if one_step and self.way(algorithm, collective, nbytes) in ("packets", "lines"):
            words = "so small that one message to each peer, without a hand-shake, is the fastest"
        elif collective == "all_to_all":
            words = "all that is sent to a peer is for that peer alone, so one step is the fastest"
        elif algorithm == "direct_two_shot":
            words = "so large that a second step costs less than sending all to everybody"
        else:
            words = "there is no other with one step"
        words += " (measured on two and four H200)"
        return (
            f"{words}; the table is passed over: {self.passed_over}" if self.passed_over else words
        )


def _line_room(nranks: int) -> int:
    """Lines from one rank to another."""
    return _of(_LINE_ROOM, nranks) // _LINE_DATA + 1


def _of(limits: dict[int, int], nranks: int) -> int:
    """The limit for so many ranks: that of the next number in the table, else the lowest."""
    return next((limit for n, limit in limits.items() if nranks <= n), min(limits.values()))
