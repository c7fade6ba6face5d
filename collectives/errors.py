"""What can go wrong, as exceptions.

Every error of this package is a `CollectiveError`; where Python has a built-in for the same thing
(`ValueError`, `TypeError`, `TimeoutError`, `ConnectionError`), the class here is a subclass of that
too. The message says what was expected, what came and what to do; what a program may want to act on
(`rank`, `peer`, `collective`, ...) is an attribute, None where it is not known.

    CollectiveError
    ├── MismatchError       ranks disagree about a call
    ├── DeadlineError       a wait ran out of time (a TimeoutError)
    ├── PeerDiedError       a peer's process or connection ended (a ConnectionError)
    ├── AbortedError        another thread or a peer aborted the communicator
    ├── ClosedError         the communicator or a peer was closed before
    ├── ScheduleError       a schedule loses, repeats or never delivers something
    ├── UnsupportedError    this cannot run here, and nothing else was run instead
    │   └── TopologyError   ... because of the number of ranks, the nodes or the links
    ├── BootstrapError      ranks did not find each other
    ├── ConfigError         a variable or another setting is malformed (a ValueError)
    └── ArrayError          an array cannot be used, e.g. its strides (a ValueError)
        └── ArrayTypeError  ... because of its dtype or its kind (a TypeError)
"""

from __future__ import annotations

from collections.abc import Iterable


class CollectiveError(RuntimeError):
    """Base of all errors of this package.

    `rank` is the rank that raised, `peer` the rank that it was about; `collective`, `algorithm`,
    `channel` and `step` say where. Each is None where it is not known.
    """

    def __init__(
        self,
        message: str = "",
        *,
        rank: int | None = None,
        peer: int | None = None,
        collective: str | None = None,
        algorithm: str | None = None,
        channel: int | None = None,
        step: int | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.peer = peer
        self.collective = collective
        self.algorithm = algorithm
        self.channel = channel
        self.step = step


class MismatchError(CollectiveError):
    """Ranks disagree about a call: another collective, dtype, count, op, root or order of calls."""


class DeadlineError(CollectiveError, TimeoutError):
    """A wait ran out of time. Every wait has a deadline (COLLECTIVES_TIMEOUT, 300 s unless set)."""


class PeerDiedError(CollectiveError, ConnectionError):
    """A peer's process or its connection ended without saying goodbye; `peer` is its rank."""


class AbortedError(CollectiveError):
    """The communicator was aborted, by another thread here or by a peer."""


class ClosedError(CollectiveError):
    """The communicator was closed before, here or by a peer that the call needs."""


class ScheduleError(CollectiveError):
    """A schedule is broken: a contribution is lost, counted twice or never delivered, or a wait
    never ends.
    """


class UnsupportedError(CollectiveError):
    """What was asked for cannot run here; nothing else was run in its place."""


class TopologyError(UnsupportedError):
    """A forced algorithm or transport does not fit the number of ranks, the nodes or the links."""


class BootstrapError(CollectiveError):
    """Ranks did not find each other: one is missing, there twice, or set up for another job."""


class ConfigError(CollectiveError, ValueError):
    """A COLLECTIVES_* variable, or another setting, has an unknown name or a malformed value."""


class ArrayError(CollectiveError, ValueError):
    """An array cannot be used as it is: strides, read-only, overlapping, on another device."""


class ArrayTypeError(ArrayError, TypeError):
    """An array's dtype, or the kind of the object, is none that a collective can work on."""


# After these a communicator cannot be used any more.
ENDINGS = (AbortedError, ClosedError, DeadlineError, PeerDiedError)


def described(error: BaseException) -> str:
    """An exception in words, for ranks that did not raise it."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The member of `known` that is most like `name`, None where none is near."""
    import difflib  # here: only messages need it

    names = list(known)
    lower = {n.lower(): n for n in reversed(names)}
    close = difflib.get_close_matches(name.lower(), list(lower), n=1, cutoff=0.6)
    return lower[close[0]] if close else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown `name`: the nearest right one, else all of them."""
    names = list(known)
    near = nearest(name, names)
    if near is not None:
        return f"did you mean {near!r}?"
    return "known: " + ", ".join(names) if names else "none is known"
