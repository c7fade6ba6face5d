"""What an asynchronous call returns: a Work to wait for, to ask, or to await."""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, ClassVar

from .errors import CollectiveError, DeadlineError

if TYPE_CHECKING:
    from . import _core


def check_timeout(timeout: float | None) -> None:
    """Raises ValueError for NaN, which no time comes after."""
    if timeout is not None and math.isnan(timeout):
        raise ValueError(f"timeout must be a number of seconds, not {timeout!r}")


class Work(ABC):
    """An asynchronous call. Its arrays must not be touched until it is done.

    `await work` gives its result too; of a send or recv it raises DeadlineError once it has lasted
    as long as the communicator's timeout.
    """

    @abstractmethod
    def done(self) -> bool:
        """True when the call has ended, well or not."""

    @abstractmethod
    def _wait(self, timeout: float | None) -> bool: ...

    @abstractmethod
    def _finish(self) -> Any:
        """The result of an ended call; raises its error."""

    def _patience(self) -> float:
        """Seconds that `await` waits at most; without end where the call ends by itself. Raises
        where it cannot end meanwhile.
        """
        return math.inf

    @staticmethod
    def _late(timeout: float) -> DeadlineError:
        return DeadlineError(f"the call is not done after {timeout:g} s; it goes on")

    def _wait_up_to(self, timeout: float | None) -> None:
        check_timeout(timeout)
        if not self._wait(timeout):
            assert timeout is not None
            raise self._late(timeout)

    def wait(self, timeout: float | None = None) -> Any:
        """Waits up to `timeout` seconds (without: as long as the communicator's own deadline
        allows) and returns the result.

        Raises what the call raised; DeadlineError if it is not done by then (it goes on).
        """
        self._wait_up_to(timeout)
        return self._finish()

    def result(self, timeout: float | None = None) -> Any:
        """The same as `wait`."""
        return self.wait(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits like `wait`; returns the call's error, None if there is none."""
        self._wait_up_to(timeout)
        try:
            self._finish()
        except Exception as error:  # this is what was asked for
            return error
        return None

    def __await__(self) -> Generator[Any, None, Any]:
        import asyncio  # here: it takes 40 ms, and who awaits has it already

        patience, pause = self._patience(), 0.0
        end = time.monotonic() + patience
        while not self.done():
            if time.monotonic() > end:
                raise self._late(patience)
            yield from asyncio.sleep(pause).__await__()
            pause = min(1e-3, pause + 2e-5)
        return self._finish()


def _not_known() -> bool:
    return False


class Held:
    """What a call that is under way needs: its arrays, until `done()`.

    Made before the call is, and `done` is set after it: a signal handler that raises in between
    would otherwise free arrays that the call works on.
    """

    __slots__ = ("arrays", "done")

    def __init__(self, arrays: tuple[Any, ...]) -> None:
        self.done: Callable[[], bool] = _not_known
        self.arrays: tuple[Any, ...] | None = arrays


class InFlight:
    """Keeps the arrays of a communicator's asynchronous calls, so that who drops a Work does not
    free memory that the call still reads or writes.

    Where messages of a call that failed wait to leave from where they lie, for a peer that does not
    take them, MPI cannot be made to forget them: nothing is let go of then, until the process ends.
    """

    _lent: ClassVar[list[Held]] = []

    def __init__(self, core: _core.Communicator) -> None:
        self._core = core
        self._held: list[Held] = []
        self._limit = 16  # entries at which those that are done are sorted out
        self._lock = threading.Lock()  # a collective and a send may come from two threads

    def hold(self, arrays: tuple[Any, ...]) -> Held:
        """Until what the caller sets as its `done` is true, or the Work has seen that it is."""
        held = Held(arrays)
        with self._lock:
            if len(self._held) >= self._limit and not self._core.lends:
                self._held = [one for one in self._held if one.arrays is not None]
                self._held = [one for one in self._held if not one.done()]
                self._limit = max(16, 2 * len(self._held))
            self._held.append(held)
        return held

    def forget(self) -> None:
        with self._lock:
            if self._core.lends:
                self._lent.extend(self._held)
            self._held.clear()


class Spanned(Work):
    """A call of which is known when it ran."""

    @abstractmethod
    def span(self) -> tuple[float, float]:
        """When the call began and ended, in seconds of time.monotonic(); 0 where it has not."""


class QueuedWork(Spanned):
    """A collective in the communicator's queue."""

    def __init__(self, core: _core.Work, result: Callable[[], Any], held: Held) -> None:
        self._core = core
        self._result = result
        self._held = held

    def done(self) -> bool:
        return bool(self._core.done())

    def span(self) -> tuple[float, float]:
        return self._core.span()

    def _wait(self, timeout: float | None) -> bool:
        return bool(self._core.wait(-1.0 if timeout is None else max(0.0, timeout)))

    def _finish(self) -> Any:
        self._core.raise_error()
        self._held.arrays = None
        return self._result()


class ThenWork(Work):
    """A collective, and what the caller does once when it is over."""

    def __init__(self, first: Spanned, then: Callable[[], None]) -> None:
        self.first = first
        self._then: Callable[[], None] | None = then

    def done(self) -> bool:
        return self.first.done()

    def span(self) -> tuple[float, float]:
        """When the collective began and ended, as `Spanned.span` says."""
        return self.first.span()

    def _wait(self, timeout: float | None) -> bool:
        return self.first._wait(timeout)

    def _finish(self) -> Any:
        result = self.first._finish()
        then, self._then = self._then, None
        if then is not None:
            then()
        return result


class TransferWork(Work):
    """Sends and receives that are under way."""

    def __init__(
        self,
        core: _core.Communicator,
        posted: list[_core.PostedTransfer],
        result: Callable[[], Any],
        held: Held,
    ) -> None:
        self._core = core
        self.posted = posted
        self._result = result
        self._held = held
        # Not self.done: the arrays may outlive the Work, which then goes.
        held.done = lambda: all(core.transfer_done(p) for p in posted)

    def done(self) -> bool:
        return all(self._core.transfer_done(p) for p in self.posted)

    def _patience(self) -> float:
        return self._core.timeout  # what is posted may stay so for longer, where nobody waits

    def _wait(self, timeout: float | None) -> bool:
        if timeout is None:
            self._core.wait(self.posted)
            return True
        end = time.monotonic() + timeout
        while not self.done():
            if time.monotonic() > end:
                return False
            time.sleep(5e-5)
        return True

    def _finish(self) -> Any:
        self._core.wait(self.posted)
        self._held.arrays = None
        return self._result()


class CompletedWork(Work):
    """A call that was over before it returned."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def done(self) -> bool:
        return True

    def _wait(self, timeout: float | None) -> bool:
        return True

    def _finish(self) -> Any:
        return self._value


class GroupWork(Work):
    """A call inside a group: done when the group has ended, well or not; on a GPU, when it has."""

    def __init__(self) -> None:
        self._value: Any = None
        self._error: BaseException | None = None
        self._done = False
        self._goes_on: Work | None = None  # on a GPU, where the end of the group put it

    def complete(self, value: Any) -> None:
        """The call has given `value`; a Work, if it goes on and its result is this one's."""
        if isinstance(value, Work):
            self._goes_on = value
        self._value, self._done = value, True

    def fail(self, error: BaseException) -> None:
        """The call has raised `error`, or was not made because of it; of one that is done nothing
        changes.
        """
        if not self._done:
            self._error, self._done = error, True

    def done(self) -> bool:
        return self._done and (self._goes_on is None or self._goes_on.done())

    def _patience(self) -> float:
        if not self._done:
            raise CollectiveError("this call runs when its group() ends: wait after the with block")
        return super()._patience() if self._goes_on is None else self._goes_on._patience()

    def _wait(self, timeout: float | None) -> bool:
        self._patience()
        return self._goes_on is None or self._goes_on._wait(timeout)

    def _finish(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value if self._goes_on is None else self._goes_on._finish()
