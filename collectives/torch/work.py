"""What calls return to torch: works."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
import torch.futures

from ..errors import DeadlineError
from .futures import Future, as_future_error
from .tracks import Job, MainTrack, mix

if TYPE_CHECKING:
    from .. import _core
    from .completing import Completer

NO_TIMEOUT = timedelta(0)


class Handle(Protocol):
    """Something under way: a call in the core's queue, one on the callback track, a transfer."""

    def done(self) -> bool: ...
    def wait(self, seconds: float) -> bool: ...
    def raise_error(self) -> None: ...


class Owner(Protocol):
    """What a work needs of its process group."""

    completer: Completer
    callback_completer: Completer

    def next_transfer_key(self) -> int: ...

    def release(self) -> None: ...


class Gathered(list[Any]):
    """The outputs of an all_gather into lists of tensors."""

    def for_future(self) -> list[Any]:
        """As NCCL's futures have it, and torch's quantisation hooks need it: one tensor for each
        list, whose first axis is the rank. Lists of unequal tensors stay as they are.
        """
        return [
            torch.stack(list(tensors)) if len({t.shape for t in tensors}) == 1 else tensors
            for tensors in self
        ]


def for_future(outputs: Any) -> Any:
    return outputs.for_future() if isinstance(outputs, Gathered) else outputs


class CompletedWork(dist.Work):
    """A call that was over before it returned. `key` as in PendingWork; with a `number`, that of
    what follows from it under this number, which is made when it is asked for.
    """

    def __init__(self, outputs: Any, key: int, number: int | None = None) -> None:
        super().__init__()
        self._outputs = outputs
        self._key = key
        self._number = number
        self._future: Future | None = None

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        return True

    def get_future(self) -> Future:
        if self._future is None:
            self._future = Future(self.future_key())
            self._future.set_result(for_future(self._outputs))
        return self._future

    def future_key(self) -> int:
        return self._key if self._number is None else mix(self._key, self._number)

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> BaseException | None:
        return None

    def synchronize(self) -> None:
        return

    def result(self) -> Any:
        return self._outputs

    def source_rank(self) -> int:
        return -1

    _source_rank = source_rank


class DoneWork(CompletedWork):
    """One for all calls of a track that torch waits for, and whose work it drops: to make one for
    each would take 0.7 us of 7. Its future is that of the track's last call, and holds no tensors.
    """

    def __init__(self, key: int, track: MainTrack) -> None:
        super().__init__([], key)
        self._track = track

    def get_future(self) -> Future:
        number = self._track.numbered
        if number != self._number:
            self._number, self._future = number, None
        return super().get_future()


class PendingWork(dist.Work):
    """A call that goes on.

    handles    all must end
    outputs    the tensors that it writes, as torch wants them in the future
    finish     run once when all have ended well, by whoever sees it first: copies results out of
               scratch
    keep       what must live until then
    group      the process group
    key        the call's key
    """

    def __init__(
        self,
        handles: Sequence[Handle],
        outputs: Any,
        finish: Callable[[], None] | None,
        keep: Any,
        group: Owner,
        key: int,
    ) -> None:
        super().__init__()
        self._handles = handles
        self._outputs = outputs
        self._finish = finish
        self._keep = keep
        self._group = group
        self._key = key
        self._lock = threading.Lock()
        self._settled = False
        self._error: BaseException | None = None
        self._future: Future | None = None

    # ---- what torch calls

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Waits up to `timeout` (0: as long as the group's timeout allows; below 0, as the rest of
        a deadline that has passed, not at all). Raises what the call raised; DeadlineError if it is
        not done by then, and then it goes on.
        """
        if not self._settled:
            seconds = timeout.total_seconds()
            if not self.settle(seconds if timeout != NO_TIMEOUT else None):
                raise DeadlineError(
                    f"Work.wait timed out: the call is not done after {seconds:g} s; it goes on"
                )
        if self._error is not None:
            raise self._error
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        return self._settled or self.settle(0.0)

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error if self.is_completed() else None

    def result(self) -> Any:
        self.wait()
        return self._outputs

    def get_future(self) -> Future:
        with self._lock:
            if self._future is not None:
                return self._future
            self._future = future = Future(self.future_key())
        if self.is_completed():
            self.complete()
        else:
            self._watch()
        return future

    def future_key(self) -> int:
        return self._key

    def source_rank(self) -> int:
        raise RuntimeError("only a recv has a source rank")

    _source_rank = source_rank

    # ---- how it ends

    def _watch(self) -> None:
        """Sees to it that a thread completes the future, of a call that goes on."""
        group, handles = self._group, self._handles
        if handles and isinstance(handles[0], Job):
            handles[0].when_ended(lambda: group.callback_completer.watch(self))
        else:
            group.completer.watch(self)

    def settle(self, seconds: float | None) -> bool:
        """Waits, and finishes what has ended; False if something has not."""
        end = None if seconds is None else time.monotonic() + seconds
        for handle in self._handles:
            if not handle.wait(-1.0 if end is None else max(0.0, end - time.monotonic())):
                return False
        with self._lock:
            if not self._settled:
                try:
                    for handle in self._handles:
                        handle.raise_error()
                    self._note_end()
                    if self._finish is not None:
                        self._finish()
                except Exception as error:
                    self._error = error
                self._handles, self._finish, self._keep = (), None, None
                self._settled = True
                self._group.release()
        return True

    def _note_end(self) -> None:
        """Takes from the handles what must be known once the work counts as ended well."""

    def await_end(self) -> None:
        self.settle(None)

    def complete(self) -> None:
        assert self._future is not None
        if self._error is not None:
            self._future.set_exception(as_future_error(self._error))
        else:
            self._future.set_result(for_future(self._outputs))


class TransferHandle:
    """A send or recv under way."""

    def __init__(self, core: _core.Communicator, posted: _core.PostedTransfer) -> None:
        self._core = core
        self.posted = posted
        self._error: BaseException | None = None

    def done(self) -> bool:
        return self._core.transfer_done(self.posted)

    def wait(self, seconds: float) -> bool:
        if seconds < 0:
            self._await()
            return True
        end = time.monotonic() + seconds
        pause = 2e-5
        while not self.done():
            if time.monotonic() >= end:
                return False
            time.sleep(pause)
            pause = min(1e-3, pause * 1.5)
        self._await()
        return True

    def _await(self) -> None:
        try:
            self._core.wait([self.posted])
        except Exception as error:
            self._error = error

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def peer(self) -> int:
        return self._core.transfer_peer(self.posted)


class TransferWork(PendingWork):
    """A send or recv."""

    _peer = -1

    def _note_end(self) -> None:
        for handle in self._handles:
            if isinstance(handle, TransferHandle):
                self._peer = handle.peer()

    def source_rank(self) -> int:
        """The rank that a message came from, or that one went to."""
        self.wait()
        return self._peer

    _source_rank = source_rank

    def future_key(self) -> int:
        return self._group.next_transfer_key()

    def _watch(self) -> None:
        # Transfers end in any order, so each is waited for by a thread of its own.
        def run() -> None:
            self.await_end()
            self.complete()

        threading.Thread(target=run, name="collectives-transfer", daemon=True).start()


class JoinedWork(dist.Work):
    """Several works as one."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Waits for all of them, up to `timeout` in all; see PendingWork."""
        end = time.monotonic() + timeout.total_seconds()
        for work in self._works:
            if timeout == NO_TIMEOUT:
                work.wait()
            else:  # never NO_TIMEOUT, which waits for long
                left = timedelta(seconds=end - time.monotonic())
                work.wait(left or -timedelta.resolution)
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        return next((e for e in (w.exception() for w in self._works) if e is not None), None)

    def result(self) -> Any:
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> Any:
        return torch.futures.collect_all([work.get_future() for work in self._works]).then(
            lambda _: self.result()
        )
