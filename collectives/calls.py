"""What all collectives share: arguments are checked, an algorithm is chosen, the call runs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _core
from .array import Stream, View, finish, new_like, stream_of
from .device import DeviceEngine, DeviceWork, beside, device_of, view, wait_for
from .device_table import tuner_of
from .errors import (
    ArrayError,
    ClosedError,
    CollectiveError,
    MismatchError,
    UnsupportedError,
    did_you_mean,
)
from .known_calls import Key, KnownCalls
from .schedule import algorithms, is_written, schedule, why_unsupported
from .staging import StagedEngine
from .tuning import ANY_SIZE, Tuner, known_algorithm
from .tuning.device import DeviceTuner
from .tuning.rails import parts_of, why_staged
from .work import InFlight, QueuedWork

if TYPE_CHECKING:
    from ._core import Communicator as Core
    from .bootstrap import Bootstrap
    from .communicator import Communicator
    from .group import Group
    from .tuning.tables import Table


def integer(value: Any, name: str) -> int:
    """`value` as an int; raises TypeError that names the argument if it is none."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {value!r}") from None


# nbytes of an all_to_all_v: pairs have sizes of their own, which ranks cannot compare; the
# algorithm must not depend on them.
ANY_PAIR = 1 << 62

# The numbers that the core gives to names.
COLLECTIVES = {name: i for i, name in enumerate(_core.collectives)}
DTYPES = {name: i for i, name in enumerate(_core.dtypes)}
OPS = {name: i for i, name in enumerate(_core.ops)}
_OPS_WITHOUT_FACTOR = {name: i for name, i in OPS.items() if name != "premul_sum"}
ORDERS = {None: 0, "any": 0, "rank": 1}  # of sums
# Where a call's arguments to the core have the addresses of its input and output, and its order.
_SOURCE, _TARGET, _ORDER = 4, 5, 10

# What `_op` answers for ops without a factor, once it was asked.
_PLAIN_OPS: dict[tuple[str, str], tuple[int, float, float]] = {}


def room(x: Any, shape: tuple[int, ...] | None) -> Any:
    """An array of that shape like x, which is numpy's; None if there is no shape."""
    return None if shape is None else np.empty(shape, x.dtype)


def check_algorithm(algorithm: Any) -> None:
    """Raises TypeError if `algorithm` is neither None nor a name."""
    if algorithm is not None and (not isinstance(algorithm, str) or not algorithm):
        raise TypeError(f"algorithm must be a name such as 'ring', not {algorithm!r}")


class Calls:
    """A rank's end of a group of ranks that is connected; `Communicator` says what users see."""

    rank: int
    size: int
    nodes: list[int]
    max_blocks: int

    # The core's end, and its functions: see `Communicator.caller` in _core.pyi.
    _core: Core
    _fast_sum: Callable[..., bool]
    _plain: Callable[[int, Any, Any, int, int, int | None], bool]
    _transfer: Callable[[bool, Any, int, int], bool]
    _choose: Callable[[int, list[tuple[int, int]]], None]
    _call: Callable[..., None]
    _submit: Callable[..., Any]

    _bootstrap: Bootstrap
    _device: DeviceEngine | None  # None until the first device array
    _gpu_path: str  # COLLECTIVES_GPU_PATH
    _moved_by_host: bool  # what is on the GPU was sent or received by way of the host
    _known: KnownCalls | None  # None until there is a GPU engine, and when closed
    _closed: bool
    _in_flight: InFlight
    _group: Group | None  # the one that is open
    _tuner: Tuner
    _gpu_tuner: DeviceTuner  # for arrays on GPUs, where all ranks are on one node
    _gpu_table: Table | None  # measured on so many GPUs; set-up sees whether on these
    _choose_on_gpu: Callable[[str, int], str]  # the GPU tuner's choices, kept
    _choices: dict[str, list[tuple[int, int]]]  # collective -> (limit, the core's number)
    _forced: dict[tuple[str, str, int], int]  # algorithm, collective, root -> the core's number

    # A communicator of some of the ranks, which must all call it, under a name.
    _of_ranks: Callable[[Sequence[int], str], Communicator]

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this communicator is closed", rank=self.rank)

    # ---- choosing --------------------------------------------------------------------------------

    def _intern(self, algorithm: str, collective: str, root: int = 0) -> int:
        """The core's number of an algorithm, which can then run `collective`."""
        key = (algorithm, collective, root)
        number = self._forced.get(key)
        if number is not None:
            return number
        known_algorithm(algorithm, (a.name for a in algorithms()))
        why = why_unsupported(algorithm, collective, self.size, root=root, node=self.nodes)
        if why:
            raise UnsupportedError(
                f"{algorithm} cannot do {collective} with these {self.size} ranks: {why}",
                rank=self.rank,
            )
        if is_written(algorithm):
            written = schedule(algorithm, collective, self.size, root=root, node=self.nodes)
            self._core.define(algorithm, written._core)
        number = self._forced[key] = self._core.intern(algorithm)
        return number

    def _table(self, collective: str) -> list[tuple[int, int]]:
        table = self._choices.get(collective)
        if table is None:
            if collective == "barrier" and self._tuner.rule("barrier", 0) is None:
                table = [(ANY_SIZE, -1)]  # the core's own: entering a call together is one
            else:
                table = [
                    (c.limit, self._intern(c.algorithm, collective))
                    for c in self._tuner.table(collective)
                ]
            self._choices[collective] = table
            self._choose(COLLECTIVES[collective], table)
        return table

    def _algorithm(self, collective: str, nbytes: int, algorithm: str | None, root: int = 0) -> int:
        if nbytes > ANY_PAIR:
            raise ValueError(f"{collective} of {nbytes} bytes is more than any memory holds")
        check_algorithm(algorithm)
        if algorithm is None or algorithm == "auto":
            return next(number for limit, number in self._table(collective) if nbytes <= limit)
        return self._intern(algorithm, collective, root)

    # ---- running ---------------------------------------------------------------------------------

    def _at_once(
        self,
        collective: str,
        x: Any,
        out: Any,
        algorithm: str | None,
        *,
        op: Any = "sum",
        root: Any = 0,
    ) -> bool:
        """Makes a call on plain arrays of numpy. False, and nothing done, if they are none, if a
        group is open, or what is named was not looked at before: that is for the general path.
        """
        if self._group is not None or type(op) is not str or type(root) is not int:
            return False
        forced = None
        if algorithm is not None:
            if type(algorithm) is not str:
                return False
            forced = self._forced.get((algorithm, collective, root))
            if forced is None and algorithm != "auto":
                return False
        number = _OPS_WITHOUT_FACTOR.get(op)
        return number is not None and self._plain(
            COLLECTIVES[collective], x, out, number, root, forced
        )

    def _joined(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of the arrays of all ranks, one behind the other; scalars make a vector."""
        return (self.size * shape[0], *shape[1:]) if shape else (self.size,)

    def _divided(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Of a rank's rows; None if ranks have not as many each."""
        if not shape or shape[0] % self.size:
            return None
        return (shape[0] // self.size, *shape[1:])

    def _op(self, op: str, dtype: str, factor: complex | None) -> tuple[int, float, float]:
        if not isinstance(op, str):
            raise TypeError(f"op must be a name such as 'sum', not {op!r}")
        if factor is None and (plain := _PLAIN_OPS.get((op, dtype))) is not None:
            return plain
        number = OPS.get(op)
        if number is None:
            raise ValueError(f"unknown op {op!r}; {did_you_mean(op, _core.ops)}")
        why = _core.why_op_unsupported(op, dtype)
        if why:
            raise UnsupportedError(why, rank=self.rank)
        if op == "premul_sum":
            if factor is None:
                raise ValueError("premul_sum multiplies every contribution: pass factor=")
            try:
                factor = complex(factor)
            except (TypeError, ValueError):
                raise TypeError(f"factor must be a number, not {factor!r}") from None
            if factor.imag and not dtype.startswith("complex"):
                raise ValueError(f"factor {factor} is complex, the arrays are {dtype}")
            return number, factor.real, factor.imag
        if factor is not None:
            raise ValueError(f"factor= belongs to op='premul_sum', not to {op!r}")
        _PLAIN_OPS[op, dtype] = number, 1.0, 0.0
        return number, 1.0, 0.0

    def _root(self, root: int) -> int:
        root = integer(root, "root")
        if not 0 <= root < self.size:
            raise ValueError(f"root {root} is out of range: ranks are 0 to {self.size - 1}")
        return root

    def _run(
        self,
        collective: str,
        source: View | None,
        target: View | None,
        *,
        count: int = 0,
        in_blocks: Any = None,
        out_blocks: Any = None,
        dtype: str = "uint8",
        op: tuple[int, float, float] = (0, 1.0, 0.0),
        root: int = 0,
        nbytes: int = 0,
        algorithm: str | None = None,
        order: str | None = None,
        async_op: bool = False,
        stream: Any = None,
        result: Callable[[], Any],
        keep: tuple[Any, ...] = (),
        key: Key | None = None,
    ) -> Any:
        """Runs or queues a call on checked views; what the user gets is `result()`, or a Work for
        it.

        key  as what `KnownCalls` is to keep it
        """
        self._check_open()
        if order is not None and (not isinstance(order, str) or order not in ORDERS):
            raise ValueError(f"order={order!r}; known: 'any', 'rank'")
        device = device_of(collective, source, target)
        if stream is not None and device == "cpu":
            raise ArrayError(
                f"{collective}: stream= orders calls on arrays on a GPU, and these are on the "
                "host; leave it out"
            )
        arguments = (
            COLLECTIVES[collective],
            DTYPES[dtype],
            op[0],
            root,
            source.pointer if source is not None else 0,
            target.pointer if target is not None else 0,
            count,
            in_blocks,
            out_blocks,
            self._algorithm(collective, nbytes, algorithm, root) if device == "cpu" else 0,
            ORDERS[order],
            op[1],
            op[2],
        )
        if device != "cpu":
            check_algorithm(algorithm)
            own = (target or source).stream  # type: ignore[union-attr]
            put_on = None if stream is None else stream_of(stream, collective)
            start = (device, collective, arguments, root, nbytes, algorithm, own or 0, put_on)
            streams = [v.stream for v in (source, target) if v is not None and put_on is None]
            in_order = beside(collective, int(device.partition(":")[2]), own or 0, streams)
            if (source or target).stream is None:  # type: ignore[union-attr]
                # jax: what is handed out is written already.
                ended = partial(self._ended, device, result)
            else:
                ended = result  # type: ignore[assignment]
            if (group := self._group) is not None:

                def run_there(held: tuple[Any, ...] = (source, target, *keep)) -> Any:
                    with in_order:
                        self._run_on_device(*start)
                    return self._device_work(device, result, held, own, put_on)

                return group.add(run_there)
            with in_order:
                options = self._run_on_device(*start)
            if key is not None and options is not None and self._known is not None:
                assert source is not None and target is not None, "a call that has a key has both"
                self._known.learn(key, options, arguments, (source.nbytes, target.nbytes))
            if async_op:
                return self._device_work(device, result, (source, target, *keep), own, put_on)
            return ended()
        if (group := self._group) is not None:

            def run(held: tuple[Any, ...] = (source, target, *keep)) -> Any:
                # The group makes the call later, and what it works on lives as long as this.
                self._call_with(held, *arguments)
                return result()

            return group.add(run, source, target)
        if async_op:
            held = self._in_flight.hold((source, target, *keep))
            try:
                work = self._submit(*arguments)
            except CollectiveError:  # of the core, which has queued nothing
                held.arrays = None
                raise
            held.done = work.done
            return QueuedWork(work, result, held)
        self._call_with((source, target, *keep), *arguments)
        self._in_flight.tidy()
        return result()

    def _device_work(
        self,
        device: str,
        result: Callable[[], Any],
        held: tuple[Any, ...],
        own: int | None,
        put_on: Stream | None,
    ) -> DeviceWork:
        """The work of a call that was put on a stream just now."""
        stream = put_on.handle if put_on is not None else own or 0
        return DeviceWork(self._engine(device), result, held, stream)

    def _call_with(self, arrays: tuple[Any, ...], *arguments: Any) -> None:
        """Makes a call on the host, on these arrays."""
        try:
            self._call(*arguments)
        except BaseException:
            if self._core.lends:
                self._in_flight.hold(arrays)
            raise

    def _again(
        self, x: Any, out: Any, stream: Any, *how: Hashable, writes: bool = True
    ) -> Key | None:
        """Makes a call on a GPU that is like one before; see `KnownCalls.call`."""
        known = self._known
        if known is None or self._group is not None:
            return None
        return known.call(x, out, stream, how, writes)

    # ---- on GPUs ---------------------------------------------------------------------------------

    def _engine(self, device: str) -> DeviceEngine:
        """The engine for arrays on `device`; collective at the first call on such arrays."""
        engine = self._device
        if engine is not None and engine.place == device:
            return engine
        kind, _, number = device.partition(":")
        if self._device is None:
            if kind != "cuda":
                raise UnsupportedError(f"arrays on {device}: the GPU engine is for CUDA")
            try:
                # The others must be in a call on device arrays too, or this would wait for them.
                self._call(
                    COLLECTIVES["broadcast"], DTYPES["uint8"], 0, 0, 0, 0, 0, None, None,
                    self._algorithm("broadcast", 0, None), 0, 1.0, 0.0,
                )  # fmt: skip
            except MismatchError as error:
                raise MismatchError(
                    f"rank {self.rank} calls with an array on {device}, another rank with one on "
                    f"the host; pass all on the same side ({error})",
                    rank=self.rank,
                ) from error
            self._set_up_device(int(number))
        assert self._device is not None
        if kind != "cuda" or int(number) != self._device.device:
            raise ArrayError(
                f"the array is on {device}, and rank {self.rank} of this communicator works on "
                f"cuda:{self._device.device}; move it there"
            )
        return self._device

    def _set_up_device(self, ordinal: int) -> None:
        """Collective: makes the engine for this rank's GPU."""
        here = (self.nodes, ordinal, self.max_blocks, self._gpu_path)
        if len(set(self.nodes)) > 1:
            self._device = StagedEngine(self._bootstrap, self._core, *here, part=self._of_ranks)
            return
        engine = DeviceEngine(self._bootstrap, self._core, *here, self._moved_by_host)
        try:
            self._choose_by(tuner_of(engine, self._bootstrap, self._tuner.rules, self._gpu_table))
            self._known = KnownCalls(engine)
        except BaseException:
            engine.close()
            raise
        self._device = engine

    def _choose_by(self, tuner: DeviceTuner) -> None:
        """Makes `tuner` what chooses for device arrays."""
        self._gpu_tuner = tuner
        self._choose_on_gpu = lru_cache(1024)(tuner.choose)

    def _checked_algorithm(self, collective: str, nbytes: int) -> str:
        algorithm = self._choose_on_gpu(collective, nbytes)
        self._intern(algorithm, collective)
        return algorithm

    def _run_on_device(
        self,
        device: str,
        collective: str,
        arguments: tuple[Any, ...],
        root: int,
        nbytes: int,
        algorithm: str | None,
        stream: int,
        put_on: Stream | None,
    ) -> object:
        """Puts a call on a stream. Returns the options that the core was told, None if the call
        goes by way of the host.
        """
        engine = self._engine(device)
        if put_on is not None:
            self._check_stream(put_on, engine, collective)
            stream = put_on.handle
        beside = put_on is not None and put_on.beside
        if isinstance(engine, StagedEngine):
            self._run_staged(engine, collective, arguments, root, nbytes, algorithm, stream, beside)
            return None
        in_place = nbytes > 0 and arguments[_SOURCE] == arguments[_TARGET]
        if algorithm is None or algorithm == "auto":
            algorithm = self._choose_on_gpu(collective, nbytes)
            if collective == "all_to_all" and in_place:
                algorithm = self._in_place(algorithm, nbytes)
        if collective == "all_to_all" and algorithm != "direct_two_shot":
            if nbytes >= ANY_PAIR:
                raise UnsupportedError(
                    f"all_to_all_v on device arrays goes by direct_two_shot, not by {algorithm}"
                )
            if in_place:
                raise ArrayError(
                    f"all_to_all: on the GPU, {algorithm} needs another array for out than x; "
                    "direct_two_shot does not"
                )
        if algorithm:
            self._intern(algorithm, collective, root)
            if is_written(algorithm):
                written = schedule(algorithm, collective, self.size, root=root, node=self.nodes)
                engine.define(algorithm, collective, root, written._core)
        return engine.run(arguments, algorithm, stream, nbytes, beside)

    def _in_place(self, algorithm: str, nbytes: int) -> str:
        """What serves an all_to_all in place, where `algorithm` was chosen: tables are measured out
        of place, and one algorithm alone can do both. A rule stays.
        """
        forced = self._gpu_tuner.rule("all_to_all", nbytes) is not None
        return algorithm if forced else "direct_two_shot"

    def _run_staged(
        self,
        engine: StagedEngine,
        collective: str,
        arguments: tuple[Any, ...],
        root: int,
        nbytes: int,
        algorithm: str | None,
        stream: int,
        beside: bool,
    ) -> None:
        """A call between nodes: along rails where it can go there, else whole."""
        asked = None if algorithm == "auto" else algorithm
        if asked is None and (rule := self._tuner.rule(collective, nbytes)) is not None:
            asked = rule.algorithm
        order = "rank" if arguments[_ORDER] else None
        if engine.rails is not None and not why_staged(collective, nbytes, asked, order):
            number = self._intern(asked or "hierarchical", collective, root)
            parts = parts_of(asked or "hierarchical")
            assert parts is not None, "all others are staged"
            engine.rails.run(arguments, number, nbytes, parts, stream, beside=beside)
            return
        # A call of a slice, by what serves host arrays.
        some = nbytes if nbytes >= ANY_PAIR else min(nbytes, engine.slot_bytes)
        number = self._algorithm(collective, some, algorithm, root)
        engine.run_staged(self._core, arguments, number, stream)

    def _check_stream(self, stream: Stream, engine: DeviceEngine, collective: str) -> None:
        if stream.ordinal not in (None, engine.device):
            raise ArrayError(
                f"{collective}: stream= is a stream of cuda:{stream.ordinal}, and rank {self.rank} "
                f"works on cuda:{engine.device}; pass a stream of that GPU",
                rank=self.rank,
            )

    def _ended(self, device: str, result: Callable[[], Any]) -> Any:
        """`result()` once the calls on the GPU have ended; raises what went wrong in them."""
        wait_for(self._engine(device), None)
        return result()

    def _barrier_on(self, stream: Stream, async_op: bool) -> Any:
        self._check_open()
        if (group := self._group) is not None:
            return group.add(lambda: self._barrier_on(stream, async_op=True))
        if self._device is None:
            raise UnsupportedError(
                "barrier(stream=...) before any call on device arrays: rank "
                f"{self.rank} does not know its GPU yet"
            )
        arguments = (COLLECTIVES["barrier"], 0, 0, 0, 0, 0, 0, None, None, 0, 0, 1.0, 0.0)
        self._check_stream(stream, self._device, "barrier")
        if isinstance(self._device, StagedEngine):
            number = self._algorithm("barrier", 0, None)
            self._device.run_staged(self._core, arguments, number, stream.handle)
        else:
            self._device.run(arguments, "", stream.handle)
        return DeviceWork(self._device, lambda: None, None, stream.handle) if async_op else None

    def _target(
        self, what: str, x: Any, source: View, out: Any, shape: Sequence[int], stream: Any
    ) -> tuple[View, Any, Callable[[], Any]]:
        """Output view, output array and what to return, for a call whose output is another array.

        source  the view of x
        shape   of the array that is made if `out` is None
        stream  the call's, None if it goes on the current one
        """
        if out is None:
            buffer = new_like(x, shape)
            target = view(buffer, writable=True, what=f"{what}: out")
            if stream is not None and source.stream is not None:
                # Its library may have that memory in use on the current stream till now.
                ordinal = int(target.device.partition(":")[2])
                _core.let_wait(ordinal, stream_of(stream, what).handle, target.stream or 0)
            return target, buffer, lambda: finish(x, buffer)
        target = view(out, writable=True, what=f"{what}: out")
        if target.dtype != source.dtype:
            raise ArrayError(
                f"{what}: x is {source.dtype}, out is {target.dtype}; both must be the same"
            )
        return target, out, lambda: out

    @staticmethod
    def _expect(what: str, name: str, got: int, expected: int) -> None:
        if got != expected:
            raise ArrayError(f"{what}: {name} has {got} elements, needed are {expected}")

    def _counts(self, counts: Sequence[int]) -> list[int]:
        try:
            lengths = [integer(c, "counts") for c in counts]
        except TypeError:
            raise TypeError(
                f"counts must be {self.size} integers, one for each rank, not {counts!r}"
            ) from None
        if len(lengths) != self.size:
            raise ValueError(f"counts has {len(lengths)} entries, there are {self.size} ranks")
        if min(lengths, default=0) < 0:
            raise ValueError(f"counts {lengths} has negative entries")
        if sum(lengths) >= ANY_PAIR:
            raise ValueError(f"counts {lengths} are more than any memory holds")
        return lengths
