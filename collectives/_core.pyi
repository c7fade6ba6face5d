"""What csrc/bindings*.cpp and csrc/python_calls.cpp define.

Collectives, dtypes, ops and orders are numbers here: the index of the name in `collectives`,
`dtypes` and `ops`; orders are 0, any, and 1, rank. Addresses are integers.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, TypeAlias, TypedDict, final

import numpy as np
import numpy.typing as npt

from .array.kind import Kind
from .array.streams import Stream

commit: str
dtypes: tuple[str, ...]
ops: tuple[str, ...]
collectives: tuple[str, ...]
itemsizes: dict[str, int]

def why_op_unsupported(op: str, dtype: str) -> str: ...
def simd_level() -> str: ...

# Schedules. A transfer is (src, dst, chunk, reduce, channel).

_Transfer: TypeAlias = tuple[int, int, int, bool, int]

class _AlgorithmInfo(TypedDict):
    name: str
    summary: str
    when: str
    source: str

@final
class Schedule:
    def __init__(
        self,
        algorithm: str,
        collective: str,
        nranks: int,
        nchunks: int,
        rounds: Sequence[Sequence[_Transfer]],
        root: int = 0,
        node: Sequence[int] = ...,
    ) -> None: ...
    @property
    def algorithm(self) -> str: ...
    @property
    def collective(self) -> str: ...
    @property
    def nranks(self) -> int: ...
    @property
    def root(self) -> int: ...
    @property
    def node(self) -> list[int]: ...
    @property
    def nchunks(self) -> int: ...
    @property
    def nchannels(self) -> int: ...
    @property
    def rounds(self) -> list[list[_Transfer]]: ...
    def verify(self) -> None: ...
    def cost(self) -> dict[str, float]: ...
    def messages(self) -> npt.NDArray[np.int32]:
        """Rows: round, src, dst, channel, chunks, chunks that are combined; a column a message."""
    def lowered(self, rank: int, order: str = "any") -> list[list[dict[str, Any]]]: ...
    def check_deadlock(self, depth: int = 1, order: str = "any") -> None: ...

def build_schedule(
    algorithm: str, collective: str, nranks: int, root: int = 0, node: Sequence[int] = ...
) -> Schedule: ...
def why_unsupported(
    algorithm: str, collective: str, nranks: int, root: int = 0, node: Sequence[int] = ...
) -> str: ...
def algorithms() -> list[_AlgorithmInfo]: ...
def simulate(
    *,
    messages: npt.NDArray[np.int32],
    amounts: npt.NDArray[np.float64],
    routes: tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.float64]],
    capacity: npt.NDArray[np.float64],
    combine_s_byte: npt.NDArray[np.float64],
    late_s: npt.NDArray[np.float64],
    segments: int,
    lanes: int,
    slots: int,
) -> tuple[float, list[float], int, int]:
    """Seconds, seconds by rank, steps, events. messages: rows round, src, dst, channel, route;
    amounts: rows bytes, bytes combined, weight; routes: where each begins in the list of links,
    that list, latencies. csrc/simulate.hpp tells more.
    """

# Memory and links.

@final
class Region:
    def handle(self) -> str: ...
    def close_handle(self) -> None: ...
    @property
    def bytes(self) -> int: ...

def pull_probe() -> tuple[int, int]: ...
def can_read_process(pid: int, address: int, value: int) -> bool: ...
def make_region(
    shared: bool,
    nranks: int,
    *,
    fifo_slot: int,
    fifo_depth: int,
    stage_slot: int,
    stage_depth: int,
) -> Region: ...
def open_region(
    handle: str,
    nranks: int,
    *,
    fifo_slot: int,
    fifo_depth: int,
    stage_slot: int,
    stage_depth: int,
) -> Region: ...

@final
class MpiTransport:
    def __init__(
        self,
        comm: int,
        *,
        slot_bytes: int,
        depth: int,
        timeout: float,
        slots: GpuSlots | None = None,
    ) -> None: ...
    @property
    def threads(self) -> str: ...
    @property
    def any_thread(self) -> bool: ...
    @property
    def version(self) -> str: ...
    @property
    def abi(self) -> str: ...

# One step of Adam on arrays at addresses; step: coefficient, l2, decay, beta1, beta2, eps, factor.
def adam(
    wide: bool,
    w: int,
    g: int,
    first: int,
    second: int,
    count: int,
    step: tuple[float, float, float, float, float, float, float],
) -> None: ...
def loaded_mpi() -> dict[str, str]: ...

# GPUs.

has_cuda: bool  # built with CUDA

def device_count() -> tuple[int, str]: ...  # and why there is none

@final
class DeviceCommunicator:
    def __init__(
        self,
        *,
        rank: int,
        nranks: int,
        node: Sequence[int],
        device: int,
        sharing: int,
        threads: int,
        max_blocks: int,
        timeout: float,
    ) -> None: ...
    @property
    def blocks(self) -> int: ...
    @property
    def arena_bytes(self) -> int: ...
    def allocate(self, home: str, blocks: int) -> None: ...
    def handle(self) -> str: ...
    def open(self, handles: Sequence[str]) -> None: ...
    def probe_write(self) -> None: ...
    def probe_check(self) -> str: ...
    def meet(self) -> None: ...
    def define(self, algorithm: str, schedule: Schedule) -> None: ...
    def keeps_lines(self) -> bool: ...
    def use_lines(self, all: bool) -> None: ...
    def writes_words(self) -> bool: ...
    def use_copies(self, all: bool) -> None: ...
    @property
    def captured(self) -> bool: ...
    @property
    def exchanges(self) -> int: ...
    def make_segment(self, bytes: int) -> str: ...
    def open_segment(self, id: int, handles: Sequence[str]) -> int: ...
    def release_segment(self, id: int) -> None: ...
    def export_array(self, address: int, bytes: int) -> tuple[str, str]: ...
    def open_array(self, id: int, bytes: int, handles: Sequence[str]) -> None: ...
    def caller(self, comm: Communicator, /) -> Callable[..., None]:
        """call(options, stream, ...), with the 13 numbers of `Communicator.caller`'s call. What a
        call raises is told to the peers, who come to it or wait in one.
        """
    def known_calls(
        self,
        comm: Communicator,
        ordinal: int,
        kinds: dict[type, Kind],
        stream_type: type[Stream],
        most: int,
        /,
    ) -> tuple[_KnownCall, _Learn, Callable[[], int]]:
        """call, learn and kept of `known_calls.KnownCalls`."""
    def transfer(
        self,
        comm: Communicator,
        transfers: Sequence[tuple[bool, int, int, int, int, int]],
        stream: int,
        /,
    ) -> None:
        """Transfers: (is it a send, peer, tag, dtype, address, count)."""
    def check(self) -> None: ...
    def idle(self) -> bool: ...
    def abort(self, reason: str, kind: str = "aborted", about: int = -1) -> None: ...
    def close(self) -> None: ...

def device_options(
    algorithm: str,
    *,
    blocks: int = 0,
    straight_blocks: int = 0,
    threads: int = 0,
    chunk: int = 0,
    small: bool = False,
    lines: bool = False,
    pull: bool = False,
    bulk: bool = False,
    copies: bool = False,
) -> object:
    """How calls on device arrays are done, for `DeviceCommunicator.caller`'s call."""

@final
class GpuSlots:
    @property
    def slot_bytes(self) -> int: ...

@final
class Staging:
    def __init__(self, *, device: int, slot_bytes: int, threads: int) -> None: ...
    def run(
        self,
        comm: Communicator,
        arguments: tuple[Any, ...],
        stream: int,
        way: str = "whole",
    ) -> None:
        """`way`: "whole"; "rail", with the arguments of a call of the rail's ranks; or "agreement",
        that all ranks are in this call.
        """
    def refuse_capture(self, stream: int, /) -> None: ...
    def join(self, near: DeviceCommunicator, rail: Communicator, ranks: Sequence[int], /) -> None:
        """`ranks`: the numbers of the rail's among all."""
    def make_scratch(self, bytes: int, /) -> int: ...
    def make_slots(self, nranks: int) -> GpuSlots: ...
    def probe(self, slots: GpuSlots, mpi: MpiTransport, timeout: float, strictly: bool, /) -> str:
        """Why MPI does not take pointers to memory of the GPU; "" if it does. Collective."""
    def go_straight(
        self, comm: Communicator, mpi: MpiTransport, slots: GpuSlots, from_bytes: int, /
    ) -> None: ...
    def streams_apart(self) -> bool: ...
    @property
    def straight_calls(self) -> int: ...
    def check(self) -> None: ...
    def idle(self) -> bool: ...
    def abort(self, reason: str, kind: str = "aborted", about: int = -1) -> None: ...
    def close(self) -> None: ...

@final
class Mark:
    def hold(self, stream: int) -> None: ...
    def done(self) -> bool: ...
    def wait(self) -> None: ...
    def seconds_since(self, other: Mark) -> float: ...

@final
class SideStream:
    def __init__(self, device: int, stream: int = 0) -> None: ...
    @property
    def handle(self) -> int: ...
    def mark(self, stream: int) -> Mark: ...
    def begin(self, current: int) -> Mark: ...
    def end(self) -> Mark: ...

def gpu_of(pointer: int) -> int: ...
def let_wait(device: int, stream: int, before: int) -> bool: ...
def slowdown(device: int, computing: int, waiting: int) -> float: ...

# Communicators.

@final
class HostTuning:
    lines_max: int
    chunk_bytes: int
    nontemporal_min: int
    symmetric_min: int
    pull_shared_min: int
    pull_split_min: int
    spins: int
    crowded: bool
    assembled_max: int
    assembled_by_node_max: int
    lanes: int
    segment_bytes: int
    def __init__(self) -> None: ...

@final
class Work:
    def done(self) -> bool: ...
    def wait(self, seconds: float) -> bool: ...
    def span(self) -> tuple[float, float]: ...
    def raise_error(self) -> None: ...

Message = tuple[bool, int, int, int, int, int]  # sends?, peer, tag, dtype, data, bytes

@final
class PostedTransfer: ...

# What ranks settle when calls no longer work; see csrc/council.hpp.

letter_bytes: int
outdated: int

@final
class Council:
    @property
    def me(self) -> int: ...
    @property
    def size(self) -> int: ...
    def gone(self, q: int, /) -> str: ...
    def process(self, q: int, /) -> int: ...
    def told(self) -> str: ...
    def join(self, attempt: int, /) -> None: ...
    def joined(self, q: int, /) -> int: ...
    def propose(self, attempt: int, members: Sequence[int], /) -> list[int]: ...
    def decided(self, attempt: int, /) -> list[int] | None: ...
    def settle(self, attempt: int, outcome: int, /) -> int: ...
    def settled(self, attempt: int, /) -> int: ...
    def post(self, part: bool, tag: int, round: int, data: bytes, /) -> None: ...
    def fetch(self, q: int, part: bool, tag: int, round: int, /) -> bytes | None: ...

# The flight recorder; see csrc/recorder.hpp.

def set_dump_directory(directory: str, /) -> None: ...
def note_start(json: str, /) -> None: ...
def dump_process(reason: str, /) -> str: ...
def dump_on_signal(number: int, /) -> None: ...

# None: no blocks; k: k elements a rank; (total,): split like numpy.array_split; [lengths], or
# ([lengths], [offsets]).
_Blocks: TypeAlias = int | tuple[int] | list[int] | tuple[list[int], list[int]] | None

class _AllReduceInPlace(Protocol):
    def __call__(self, x: Any, /) -> bool: ...

class _Plain(Protocol):
    def __call__(
        self, collective: int, x: Any, out: Any, op: int, root: int, algorithm: int | None, /
    ) -> bool: ...

class _PlainTransfer(Protocol):
    def __call__(self, sends: bool, x: Any, peer: int, tag: int, /) -> bool: ...

class _Choose(Protocol):
    def __call__(self, collective: int, choices: list[tuple[int, int]], /) -> None: ...

class _Call(Protocol):
    def __call__(
        self,
        collective: int,
        dtype: int,
        op: int,
        root: int,
        input: int,
        output: int,
        count: int,
        in_blocks: _Blocks,
        out_blocks: _Blocks,
        algorithm: int,
        order: int,
        factor_real: float,
        factor_imag: float,
        parts: list[int] = ...,
        /,
    ) -> None:
        """parts: the counts of calls that were packed into this one, which ranks compare."""

class _KnownCall(Protocol):
    def __call__(
        self,
        x: Any,
        out: Any,
        stream: Any,
        how: tuple[Hashable, ...],
        writes: bool = True,
        /,
    ) -> tuple[Hashable, ...] | None:
        """Makes a call and returns () if one like it is known; else the key to `learn` it under,
        None if the arrays or the stream need a closer look. None is made then.

        out     the array that is written; x itself, or None for it
        how     the collective's name, and its other arguments, which may be wrong
        writes  this rank's array is written
        """

class _Learn(Protocol):
    def __call__(
        self,
        key: tuple[Hashable, ...],
        options: object,
        arguments: tuple[Any, ...],
        nbytes: tuple[int, int],
        /,
    ) -> None:
        """Keeps how a call was made.

        options, arguments  of `DeviceCommunicator.caller`'s call
        nbytes              of source and target
        """

class _Submit(Protocol):
    def __call__(
        self,
        collective: int,
        dtype: int,
        op: int,
        root: int,
        input: int,
        output: int,
        count: int,
        in_blocks: _Blocks,
        out_blocks: _Blocks,
        algorithm: int,
        order: int,
        factor_real: float,
        factor_imag: float,
        /,
    ) -> Work: ...

@final
class Communicator:
    def __init__(
        self,
        *,
        name: str,
        rank: int,
        nranks: int,
        node: Sequence[int],
        local_of: Sequence[int],
        group: Sequence[int],
        region: Region | None,
        mpi: MpiTransport | None,
        threads: bool,
        tuning: HostTuning,
        can_pull: bool,
        slot_bytes: int,
        timeout: float,
    ) -> None: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def transports(self) -> str: ...
    @property
    def one_region(self) -> bool: ...
    @property
    def calls(self) -> int: ...
    @property
    def queued(self) -> int: ...
    @property
    def lends(self) -> bool:
        """May messages still leave from the arrays of a call that failed, or come into them?"""
    @property
    def tuning(self) -> HostTuning: ...
    @property
    def closed(self) -> bool: ...
    @property
    def broken(self) -> bool: ...
    @property
    def why_broken(self) -> str: ...
    @property
    def council(self) -> Council | None: ...
    def watch_peers(self) -> None: ...
    def drain(self, seconds: float, /) -> bool: ...
    def dump(self) -> str: ...
    def forget_plans(self) -> None: ...
    def intern(self, algorithm: str, /) -> int: ...
    def define(self, algorithm: str, schedule: Schedule, /) -> None: ...
    def caller(self) -> tuple[_AllReduceInPlace, _Plain, _PlainTransfer, _Choose, _Call, _Submit]:
        """sum, plain, transfer, choose, call and submit: plain functions, bound to this
        communicator.

        sum(x[, out]) sums plain buffers; False, and nothing done, for anything else.

        plain(collective, x, out, op, root, algorithm) makes any call by numbers, None for an array
        that it lacks, if its arrays are contiguous ones of numpy of a dtype that numpy has, and lie
        as the collective needs; False, and nothing done, for anything else, which the general path
        judges.

        transfer(sends, x, peer, tag) sends or receives such an array.

        choose(collective, choices) says which algorithms serve these two where none is named:
        (limit in bytes, number of the algorithm), by rising limit. Until then they answer False.
        Algorithm -1 is the core's own choice.
        """
    def end_queue(self) -> None: ...
    def close(self) -> None: ...
    def enter_device_call(self) -> None:
        """Tells peers that a call is put on the GPU; raises what a peer told."""
    def look(self) -> None:
        """Raises what a peer told."""
    def look_around(self) -> None:
        """Raises what a peer told, of any node, or that a process of this node has ended."""
    def abort(self, reason: str, /) -> None: ...
    def post(self, message: Message, background: bool, /) -> PostedTransfer: ...
    def transfer(self, messages: Sequence[Message], /) -> None:
        """Posts all and waits for them."""
    def wait(self, posted: Sequence[PostedTransfer], /) -> None: ...
    def transfer_done(self, posted: PostedTransfer, /) -> bool: ...
    def transfer_peer(self, posted: PostedTransfer, /) -> int: ...
    timeout: float
    def make_segment(self, bytes: int, /) -> str: ...
    def open_segment(self, id: int, bytes: int, handles: Sequence[str], /) -> int: ...
    def release_segment(self, id: int, /) -> None: ...

# Timed loops: (begin, end) of each iteration, in nanoseconds of CLOCK_MONOTONIC.

def time_call(
    comm: Communicator, warmup: int, iterations: int, touch_input: bool, /, *call: Any
) -> list[tuple[int, int]]: ...
def time_mpi(
    comm: Communicator,
    mpi_comm: int,
    warmup: int,
    iterations: int,
    touch_input: bool,
    collective: str,
    dtype: int,
    op: int,
    root: int,
    input: int,
    output: int,
    count: int,
    /,
) -> list[tuple[int, int]]: ...
def cache_line_exchange(comm: Communicator, rounds: int, /) -> float: ...
