"""Arrays on GPUs: the engine of a communicator, set up when the first device array comes.

A call on device arrays is put on the caller's current stream (cupy's, torch's) and returns at once;
the host waits for nothing. What goes wrong in a kernel raises at the next call, and in
`Communicator.synchronize`.
"""

from __future__ import annotations

import operator
import os
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from . import _core
from . import array as _array
from .array import LEGACY_STREAM
from .bootstrap import Bootstrap, ask, host_key
from .device_memory import DeviceMemory, NoSymmetricMemory
from .errors import (
    AbortedError,
    ArrayError,
    CollectiveError,
    ConfigError,
    DeadlineError,
    MismatchError,
    PeerDiedError,
    UnsupportedError,
)
from .tuning.device import Launch, device_launch
from .work import Work, check_timeout

if TYPE_CHECKING:
    from ._core import Communicator as Core
    from .array import View

# Is it a send, peer, tag, dtype, address, count.
Transfer = tuple[bool, int, int, int, int, int]

# Looks at host arrays, and where there is an engine for them, at device arrays.
view = partial(_array.view, gpu=_core.has_cuda)


def device_of(what: str, source: View | None, target: View | None) -> str:
    """ "cpu", or "cuda:N": where the arrays of a call are. Raises ArrayError if they are apart."""
    if source is None or target is None:
        one = source if source is not None else target
        return one.device if one is not None else "cpu"
    if source.device != target.device:
        raise ArrayError(
            f"{what}: x is on {source.device}, out is on {target.device}; both must be on the same "
            "device"
        )
    return source.device


_ALONE = nullcontext()


def beside(
    what: str, ordinal: int, stream: int, streams: Sequence[int | None]
) -> AbstractContextManager[None]:
    """A block for a call on `stream` whose arrays are ready on `streams`, and used there again."""
    others = [s for s in streams if s is not None and s != stream]
    return _Beside(what, ordinal, stream, others) if others else _ALONE


class _Beside(AbstractContextManager[None]):
    """The stream waits for the others, and these for the call."""

    def __init__(self, what: str, ordinal: int, stream: int, others: list[int]) -> None:
        self._what = what
        self._ordinal = ordinal
        self._stream = stream
        self._others = others

    def __enter__(self) -> None:
        for other in self._others:
            if not _core.let_wait(self._ordinal, self._stream, other):
                raise ArrayError(
                    f"{self._what}: the arrays are on different streams, of which one is being "
                    "captured; order them and pass stream="
                )

    def __exit__(self, *_: object) -> None:
        for other in self._others:
            _core.let_wait(self._ordinal, other, self._stream)


def keep_streams_apart() -> None:
    """Gives a stream a queue of its own on the GPU, for up to 32 of them, unless the environment
    says otherwise: CUDA's default is 8, and what is put on a further stream waits behind another's
    kernel, which may wait for it. Works only before CUDA is used.
    """
    if _core.has_cuda:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def queues() -> int:
    """How many streams a GPU works on at a time, as far as the environment says."""
    text = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    return int(text) if text.isdecimal() else 8


def why_no_gpu(ordinal: int) -> str:
    """Why this process cannot use GPU `ordinal`, in words; "" if it can."""
    count, why = _core.device_count()
    if count and not 0 <= ordinal < count:
        return f"there is no GPU {ordinal}: this process sees {count}"
    return why


def checked_blocks(max_blocks: Any) -> int:
    """`max_blocks` as an int; raises TypeError or ValueError if it is no bound."""
    try:
        bound = operator.index(max_blocks)
    except TypeError:
        raise TypeError(f"max_blocks must be an integer, not {max_blocks!r}") from None
    if bound < 0:
        raise ValueError(f"max_blocks must be 0 (as many as help) or more, not {bound}")
    return bound


def _why(do: Callable[[], None]) -> str:
    """Why `do` failed, in words; "" if it did not."""
    try:
        do()
    except CollectiveError as error:
        return str(error)
    return ""


class DeviceEngine:
    """The GPU half of a rank. Making one is collective over the bootstrap.

    host        the rank's end on the host, which hears first what other ranks tell
    device      ordinal of this rank's GPU; `place` names it as arrays do
    max_blocks  thread blocks that its kernels may take at most; 0: as many as help. The smallest
                bound of all ranks counts.
    path        "auto"; "peer" or "host" forces a way (COLLECTIVES_GPU_PATH); "direct": as "peer",
                where nobody has asked for it
    by_host     this rank has sent or received what is on its GPU by way of the host
    sharing     ranks of this process that use this GPU at the same time, if other ones do than
                those here

    After that, `bound` is the smallest bound of thread blocks, 0 if there is none. `moves` is False
    if a rank has sent so: then another may still be to receive it there. And
    `path` is how the ranks reach each other: "peer", in memory of their GPUs, or "host", in pinned
    memory of the host, and `fallback` says why it is the second one, where that was not forced.
    Rank 0 warns of it.

    Raises UnsupportedError on all ranks, in words, where they cannot reach each other.
    """

    def __init__(
        self,
        bootstrap: Bootstrap,
        host: Core,
        nodes: Sequence[int],
        device: int,
        max_blocks: int = 0,
        path: str = "auto",
        by_host: bool = False,
        sharing: int = 0,
    ) -> None:
        self.host = host
        self.device = device
        self.place = f"cuda:{device}"
        self._bootstrap = bootstrap
        self._defined: set[tuple[str, str, int]] = set()
        why = why_no_gpu(device)
        infos = self._agree(
            "has no GPU", why, host=host_key(), pid=os.getpid(), device=device, bound=max_blocks,
            path=path, by_host=by_host,
        )  # fmt: skip
        self.moves = not any(i["by_host"] for i in infos)
        max_blocks = self.bound = min((i["bound"] for i in infos if i["bound"]), default=0)
        if len({i["host"] for i in infos}) > 1:
            raise UnsupportedError(
                "device arrays: the ranks are on several hosts, and the GPU engine works within "
                "one; pass copies on the host"
            )
        if len({i["path"] for i in infos}) > 1:
            paths = ", ".join(f"rank {r}: {i['path']}" for r, i in enumerate(infos))
            raise ConfigError(f"COLLECTIVES_GPU_PATH differs between ranks ({paths})")
        mine = (os.getpid(), device)
        sharing = max(sharing, sum((i["pid"], i["device"]) == mine for i in infos))
        threads = sum(i["pid"] == os.getpid() for i in infos)
        blocks, core = 0, None
        try:
            core = _core.DeviceCommunicator(
                rank=bootstrap.rank,
                nranks=bootstrap.size,
                node=nodes,
                device=device,
                sharing=sharing,
                threads=max(threads, sharing),
                max_blocks=max_blocks,
                timeout=bootstrap.timeout,
            )
            blocks, why = core.blocks, ""
        except CollectiveError as error:
            why = str(error)
        answers = self._agree("cannot set up its GPU", why, blocks=blocks)
        assert core is not None
        self.core = core
        self.blocks = min(int(a["blocks"]) for a in answers)
        self.path, self.fallback = self._choose_path(
            path, shared=len({i["pid"] for i in infos}) > 1
        )
        self._agree("did not meet the others", _why(core.meet))
        self.call = core.caller(host)
        self._options: dict[tuple[str, Launch], object] = {}
        self.memory: DeviceMemory | NoSymmetricMemory = DeviceMemory(self)
        if self.fallback and bootstrap.rank == 0:
            warnings.warn(
                "device arrays go through pinned memory of the host, which is slower than from GPU "
                f"to GPU: {self.fallback}",
                RuntimeWarning,
                stacklevel=2,
            )

    def _choose_path(self, path: str, shared: bool) -> tuple[str, str]:
        """Sets up the way between the ranks; "peer" or "host", and why it is not "peer" unless it
        was asked for.

        shared  the ranks are several processes
        """
        failed = ""
        if path != "host":
            failed = self._connect("device")
            if failed and path != "auto":
                forbids = (
                    " (COLLECTIVES_GPU_PATH=peer forbids the way through pinned memory of the host)"
                )
                raise UnsupportedError(
                    f"device arrays: {failed}{forbids if path == 'peer' else ''}",
                    rank=self._bootstrap.rank,
                )
        if path != "host" and not failed:
            return "peer", ""
        again = self._connect("shared" if shared else "pinned")
        if again:
            first = f"{failed}; then, through pinned memory of the host: " if failed else ""
            raise UnsupportedError(f"device arrays: {first}{again}", rank=self._bootstrap.rank)
        return "host", failed

    def _connect(self, home: str) -> str:
        """Makes and maps arenas in a `home`, and tests that every pair of ranks really writes and
        reads both ways. Why that does not work, alike on all ranks; "" if it does. Collective.
        Raises UnsupportedError where a GPU has no memory for it.
        """
        core, handles = self.core, [""]

        def allocate() -> None:
            core.allocate(home, self.blocks)
            handles[0] = core.handle()

        why = _why(allocate)
        answers, failed = self._ask("cannot set up its GPU's memory", why, handle=handles[0])
        if failed and home == "device":  # too little memory, say: no matter of the way
            raise UnsupportedError(f"device arrays: {failed}", rank=self._bootstrap.rank)
        every = [str(a["handle"]) for a in answers]
        for what, do in (
            ("cannot map a peer's memory", lambda: core.open(every)),
            ("cannot write to a peer's memory", core.probe_write),
        ):
            if failed:
                return failed
            failed = self._ask(what, _why(do))[1]
        if failed:
            return failed
        wrong: list[str] = []
        why = _why(lambda: wrong.append(core.probe_check()))
        answers, failed = self._ask(
            "failed the self-test", why or wrong[0], lines=core.keeps_lines(),
            words=core.writes_words(),
        )  # fmt: skip
        core.use_lines(all(a["lines"] for a in answers))
        core.use_copies(all(a["words"] for a in answers))
        return failed

    def _ask(self, what: str, why: str, **more: Any) -> tuple[list[dict[str, Any]], str]:
        """What all ranks say, and in words, which of them say why they cannot go on."""
        answers = ask(self._bootstrap, {"why": why, **more})
        words = "; ".join(f"rank {r} {what}: {a['why']}" for r, a in enumerate(answers) if a["why"])
        return answers, words

    def _agree(self, what: str, why: str, **more: Any) -> list[dict[str, Any]]:
        """What all ranks say; raises on all of them if one says why it cannot go on."""
        answers, words = self._ask(what, why, **more)
        if words:
            raise UnsupportedError(f"device arrays: {words}", rank=self._bootstrap.rank)
        return answers

    def define(self, algorithm: str, collective: str, root: int, schedule: Any) -> None:
        """Hands over the schedule of an algorithm that is written in Python."""
        if (algorithm, collective, root) not in self._defined:
            self.core.define(algorithm, schedule)
            self._defined.add((algorithm, collective, root))

    def gather(self, mine: bytes) -> list[bytes]:
        """What all ranks say. Collective, on the host."""
        return self._bootstrap.all_gather(mine)

    def options(self, algorithm: str, collective: str, nbytes: int, beside: bool = False) -> object:
        """How `algorithm` does calls of so many bytes, `beside` a stream that computes or not: what
        the core's call takes.
        """
        size = self._bootstrap.size
        how = device_launch(algorithm, collective, nbytes, size, beside, self.blocks)
        known = self._options.get((algorithm, how))
        if known is None:
            known = self._options[algorithm, how] = _core.device_options(algorithm, **how._asdict())
        return known

    def run(
        self,
        arguments: tuple[Any, ...],
        algorithm: str,
        stream: int,
        nbytes: int = 0,
        beside: bool = False,
    ) -> object:
        """Puts a call of `nbytes` bytes (alike on all ranks) on a stream. Returns its options.

        Raises what a peer told on the host, after ending the kernels that wait for it.
        """
        collective = _core.collectives[arguments[0]]
        options = self.options(algorithm, collective, nbytes, beside)
        self.call(options, stream, *arguments)
        return options

    def transfer(self, transfers: list[Transfer], stream: int) -> None:
        """Puts sends and receives, which go on together, on a stream. Not collective.

        Raises as `run` does.
        """
        self.core.transfer(self.host, transfers, stream)

    def abort(self, reason: str) -> None:
        """Ends the kernels that wait, here and at the peers."""
        self.core.abort(reason)

    def close(self) -> None:
        """Ends the rank's part, once its calls on the GPU have."""
        self.memory.release_dropped()
        self.core.close()
        self.memory.forget()

    def pass_on(self, error: CollectiveError) -> None:
        """Ends the kernels that wait, here and at the peers: a death stays one for everybody."""
        died, differ = isinstance(error, PeerDiedError), isinstance(error, MismatchError)
        kind = "peer_died" if died else "mismatch" if differ else "aborted"
        self.core.abort(str(error), kind, error.peer if died and error.peer is not None else -1)

    def _with_reason(self, error: AbortedError) -> AbortedError:
        """What the peer that aborted said on the host; a kernel knows only that one has."""
        try:
            self.host.look()
        except AbortedError as told:
            return told
        except CollectiveError:  # of something else, which the next call raises
            pass
        return error

    def idle(self) -> bool:
        """True when all calls so far have ended. Raises what went wrong in them, and what a peer
        told, as `run` does.
        """
        try:
            if self.core.idle():
                return True
        except AbortedError as error:
            raise self._with_reason(error) from None
        try:
            self.host.look()
        except CollectiveError as error:
            self.pass_on(error)
            raise
        return False

    @cached_property
    def marks(self) -> _core.SideStream:
        """Makes marks in streams of this GPU."""
        return _core.SideStream(self.device, LEGACY_STREAM)

    def mark(self, stream: int) -> _core.Mark | None:
        """The end of the last call, which was put on `stream`; None if that is being captured."""
        return None if self.core.captured else self.marks.mark(stream)

    def ended(self, mark: _core.Mark | None) -> bool:
        """True when the GPU has come to the mark of a call; without one, when all calls so far have
        ended. Raises as `idle` does.
        """
        if self.idle():
            return True
        return mark is not None and mark.done()

    def wait(self, timeout: float | None, mark: _core.Mark | None = None) -> bool:
        """Waits until `ended`; False if that is not so after `timeout` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        pause = 0.0
        while not self.ended(mark):
            if end is not None and time.monotonic() > end:
                return False
            time.sleep(pause)
            pause = min(1e-3, pause + 1e-5)
        return True


class DeviceWork(Work):
    """A call on device arrays. Its stream is what orders it; waiting here makes the host wait, for
    this call and all before it. Made when the call has just been put on `stream`.
    """

    def __init__(
        self, engine: DeviceEngine, result: Callable[[], Any], keep: Any, stream: int
    ) -> None:
        self._engine = engine
        self._result = result
        self._keep = keep
        self._end = engine.mark(stream)
        self._over = False  # it was seen to have ended well, or not
        self._error: CollectiveError | None = None

    def done(self) -> bool:
        return self._over or self._look(lambda: self._engine.ended(self._end))

    def _wait(self, timeout: float | None) -> bool:
        return self._over or self._look(lambda: self._engine.wait(timeout, self._end))

    def _look(self, ended: Callable[[], bool]) -> bool:
        try:
            self._over = ended()
            if self._over:
                self._engine.core.check()
        except CollectiveError as error:
            self._over, self._error = True, error
        return self._over

    def _finish(self) -> Any:
        if self._error is not None:
            raise self._error
        self._keep = None
        return self._result()


def wait_for(engine: DeviceEngine | None, timeout: float | None) -> None:
    """`Communicator.synchronize`."""
    check_timeout(timeout)
    if engine is not None and not engine.wait(timeout):
        raise DeadlineError(f"the calls on the GPU are not done after {timeout:g} s; they go on")
