"""A process group without its calls: its life, its names, and how a call is made."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .. import _core
from ..array import Stream
from .completing import Completer
from .joining import Meeting
from .monitoring import monitored_barrier
from .moving import Moving
from .profiling import shown
from .short import ShortWays
from .streams import SideStreams, StreamWork, stream_of_caller
from .tensors import Call
from .tracks import CallbackTrack, MainTrack, key_of, mix, next_key
from .work import CompletedWork, DoneWork, JoinedWork, PendingWork

_groups: weakref.WeakSet[BaseGroup] = weakref.WeakSet()
_ALONE = key_of("a group of one rank")
_alone = itertools.count()  # such groups


class BaseGroup(dist.ProcessGroup):
    """From 2.11 to 2.13 torch takes a backend written in Python only as a whole process group.
    Python asks it, and so does C++, for the methods that torch's trampoline knows.
    """

    monitors_barriers = True
    # That of `init_process_group`. Not under torch's name for it, by which device meshes tell that
    # a group can be split.
    device_id: torch.device | None = None

    def __init__(self, meeting: Meeting, name: str) -> None:
        # The constructor with a store makes torch look for C++ backends.
        super().__init__(meeting.rank, meeting.size)
        self._rank, self._size = meeting.rank, meeting.size
        self._store = meeting.store
        self._name, self._description = name, "undefined"
        # All that this group has in the store, which may have served one of the same name before.
        self._apart = meeting.set_apart("group")
        self._main = MainTrack(self._apart.connect())
        self._callbacks = CallbackTrack(
            lambda stop: self._apart.join("callbacks", stop), meeting.rank, meeting.timeout
        )
        self._beside: MainTrack | None = None  # of reduce_scatters that go on beside all else
        self._reducing: list[PendingWork] = []
        self._sides = SideStreams()
        # Calls of the main track end in the order in which they were made. Those of the other track
        # do not, so its completer is given calls that have ended.
        self.completer = Completer()
        self.callback_completer = Completer()
        # Groups of one rank that correspond have other names on other ranks.
        self._key = key_of(name) if self._size > 1 else mix(_ALONE, next(_alone))
        self._done = DoneWork(self._key, self._main)
        self._barriers = itertools.count()
        self._transfer_futures = itertools.count()
        self._coalesced: list[dist.Work] | None = None
        self._on_gpu = Moving()
        self._short = ShortWays()
        self._closed = False
        _groups.add(self)

    # ---- names

    def getBackendName(self) -> str:
        return "collectives"

    name = getBackendName
    _get_backend_name = getBackendName

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def __repr__(self) -> str:
        return f"<CollectivesGroup {self._name}: rank {self._rank} of {self._size}>"

    # ---- what torch asks of a group and of its backends

    @property
    def _device_types(self) -> list[torch.device]:
        on_gpus = _core.has_cuda and torch.cuda.is_available()
        return [torch.device(kind) for kind in (("cpu", "cuda") if on_gpus else ("cpu",))]

    def _get_backend(self, device: torch.device) -> BaseGroup:
        return self

    get_backend = _get_backend

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Memory that ranks share is made by all of them together, and torch asks for it one by
        one.
        """
        return False

    def get_group_store(self) -> Any:
        return self._store

    def _get_sequence_number_for_group(self) -> int:
        return self._main.comm._core.calls

    def _set_sequence_number_for_group(self) -> None:
        return

    def _has_hooks(self) -> bool:
        return False

    # ---- life

    @property
    def _tracks(self) -> list[MainTrack]:
        """Those whose calls are matched by their order."""
        return [self._main] if self._beside is None else [self._main, self._beside]

    def set_timeout(self, timeout: timedelta) -> None:
        """How long a wait lasts at most, from now on."""
        seconds = timeout.total_seconds()
        for track in self._tracks:
            track.comm._core.timeout = seconds
        self._callbacks.set_timeout(seconds)
        self._apart = self._apart._replace(timeout=seconds)  # for communicators that come later

    _set_default_timeout = set_timeout

    def abort(self) -> None:
        """Ends all pending calls of all ranks with AbortedError; later calls raise it too."""
        reason = f"process group {self._name} was aborted"
        self._callbacks.abort(reason)
        for track in self._tracks:
            track.comm.abort(reason)

    def shutdown(self) -> None:
        """Leaves the group, once the calls that are queued have ended."""
        if self._closed:
            return
        self._closed = True
        self._short.leave_extension(self)
        _groups.discard(self)
        self._callbacks.close()
        for track in self._tracks:
            track.comm.close()
        self.completer.close()
        self.callback_completer.close()

    # ---- how a call is made

    def _make(self, call: Call, outputs: Any, opts: Any) -> dist.Work:
        """Makes a call that is ready: at once if torch wants to wait for it, else in the
        background.
        """
        with shown(call.title):
            if call.device is not None:
                return self._make_on_gpu(call, call.device, outputs, opts)
            key = next_key(self._key)
            if key is not None and self._size > 1:
                return self._hand_over(
                    [self._callbacks.submit(key, call.steps, call.keep)], call, outputs, key, opts
                )
            if self._size == 1 or not (opts is None or opts.asyncOp):
                number = 0
                for step in call.steps:
                    number = self._main.call(step)
                if call.finish is not None:
                    call.finish()
                if key is not None:
                    return self._note(CompletedWork(outputs, key))
                return self._note(CompletedWork(outputs, self._key, number))
            return self._submit(self._main, call, outputs)

    def _submit(self, track: MainTrack, call: Call, outputs: Any) -> PendingWork:
        submitted = [track.submit(step, call.keep) for step in call.steps]
        key = mix(self._key, submitted[-1][1] if submitted else 0)
        return self._hand_over([handle for handle, _ in submitted], call, outputs, key, None)

    def _hand_over(
        self, handles: list[Any], call: Call, outputs: Any, key: int, opts: Any
    ) -> PendingWork:
        work = PendingWork(handles, outputs, call.finish, call.keep, self, key)
        if opts is not None and not opts.asyncOp:
            work.wait()
        self._note(work)
        return work

    def next_transfer_key(self) -> int:
        """The key of a future of a send or recv. These have no number that all ranks share, so
        their callbacks match by how many futures of transfers a rank has asked for.
        """
        return mix(~self._key & (1 << 64) - 1, next(self._transfer_futures))

    def release(self) -> None:
        """Lets go of the memory of calls that have ended."""
        for track in self._tracks:
            track.release()

    def _make_on_gpu(self, call: Call, device: torch.device, outputs: Any, opts: Any) -> dist.Work:
        def put_on(stream: Stream) -> None:
            for step in call.steps:
                self._main.call(step, stream)

        if opts is None or opts.asyncOp:
            work = self._sides.run(device, put_on, call.finish, outputs, call.keep)
        else:
            put_on(stream_of_caller(device))
            if call.finish is not None:
                call.finish()
            work = StreamWork(outputs, device)
        self._short.use_extension(self)
        return self._note(work)

    def _note(self, work: dist.Work) -> dist.Work:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        works, self._coalesced = self._coalesced or [], None
        return JoinedWork(works)

    def monitored_barrier(
        self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        """A barrier that names the ranks that did not come; see `monitoring`."""
        number = next(self._barriers)
        monitored_barrier(self._apart, number, timeout, wait_all_ranks=wait_all_ranks)


@atexit.register
def _leave() -> None:
    """At the end of a program that destroys no process group: calls that are still under way would
    keep its threads.
    """
    for group in list(_groups):
        with contextlib.suppress(Exception):
            if any(track.comm._core.queued for track in group._tracks):
                group.abort()
            group.shutdown()
