"""What an asynchronous call returns: a Work to wait for, to ask, or to await."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

from .array import View
from .errors import CollectiveError, DeadlineError

if TYPE_CHECKING:
    from . import _core


def check_timeout(timeout: float | None) -> None:
    """Raises TypeError for what is no number, ValueError for NaN, which no time comes after."""
    words = f"timeout must be a number of seconds, not {timeout!r}"
    try:
        if timeout is not None and math.isnan(timeout):
            raise ValueError(words)
    except TypeError:
        raise TypeError(words) from None


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
        """Waits up to `timeout` seconds, and at most as long as the communicator's own deadline
        allows, and returns the result.

        Raises what the call raised; DeadlineError if it is not done by then (it goes on, if it was
        `timeout`).
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

    core  for `release`: nothing is let go of while it lends
    """

    __slots__ = ("_core", "arrays", "done")

    def __init__(self, arrays: tuple[Any, ...], core: _core.Communicator | None = None) -> None:
        self._core = core
        self.done: Callable[[], bool] = _not_known
        self.arrays: tuple[Any, ...] | None = arrays

    def release(self) -> bool:
        """Lets go of the arrays if the call is done. True if they are not held any more."""
        if self.arrays is not None and self.done():
            lends = self._core is not None and self._core.lends  # now: the call may have begun it
            self.arrays = self.arrays if lends else None
        return self.arrays is None


class InFlight:
    """Keeps the arrays of a communicator's asynchronous calls, so that who drops a Work does not
    free memory that the call still reads or writes.

    Where messages of a call that failed wait to leave from where they lie, for a peer that does not
    take them, MPI cannot be made to forget them: nothing is let go of then, until the process ends.
    """

    _lent: ClassVar[list[Held]] = []
    _BYTES = 64 << 20  # of arrays that came since the last look, at which there is another

    def __init__(self, core: _core.Communicator) -> None:
        self._core = core
        # Threads change it at once, and so does what runs when arrays are freed: no lock, and
        # nothing but what the interpreter does in one go.
        self.held: set[Held] = set()
        self._left = 0  # of it, after the last look
        self._bytes = 0

    def hold(self, arrays: tuple[Any, ...]) -> Held:
        """Until what the caller sets as its `done` is true, or the Work has seen that it is."""
        held = Held(arrays, self._core)
        self._bytes += sum(one.nbytes for one in arrays if type(one) is View)
        if len(self.held) >= max(16, 2 * self._left) or self._bytes >= self._BYTES:
            self.sort_out()
        self.held.add(held)
        return held

    def sort_out(self) -> None:
        """Lets go of the arrays of calls that are done."""
        self._bytes = 0
        for one in self.held.copy():
            if one.release():
                self.held.discard(one)
        self._left = len(self.held)

    def tidy(self) -> None:
        """Sorts out behind a call that has waited for those before it. Of many that are left after
        a look, such as receives, some more must have come.
        """
        if self.held and (self._left <= 4 or len(self.held) - self._left > self._left // 16):
            self.sort_out()

    def forget(self) -> None:
        if self._core.lends:
            self._lent.extend(self.held)
        self.held.clear()


def _release_dropped(held: Held) -> None:
    """Of a Work that goes. Its call may be under way, and is the parent's in a forked process."""
    with suppress(CollectiveError):
        held.release()


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

    def __del__(self) -> None:
        _release_dropped(self._held)

    def done(self) -> bool:
        done = bool(self._core.done())
        if done:
            self._held.release()
        return done

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
        self._error: CollectiveError | None = None
        # Not self.done: the arrays may outlive the Work, which then goes. On a communicator that is
        # broken everything counts as done, and messages may come in.
        held.done = lambda: all(core.transfer_done(p) for p in posted) and not core.broken

    def __del__(self) -> None:
        _release_dropped(self._held)

    def done(self) -> bool:
        done = all(self._core.transfer_done(p) for p in self.posted)
        if done:
            self._held.release()
        return done

    def _patience(self) -> float:
        return self._core.timeout  # what is posted may stay so for longer, where nobody waits

    def _wait(self, timeout: float | None) -> bool:
        if self._error is not None:
            return True
        if timeout is None or timeout > self._core.timeout:
            try:
                self._core.wait(self.posted)  # up to the communicator's deadline
            except CollectiveError as error:
                self._error = error
            return True
        end = time.monotonic() + timeout
        while not self.done():
            if time.monotonic() > end:
                return False
            time.sleep(5e-5)
        return True

    def _finish(self) -> Any:
        if self._error is not None:
            raise self._error
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
