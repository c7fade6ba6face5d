"""A registered array: memory of a GPU that somebody else has allocated, mapped into all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from types import TracebackType


class Registry(Protocol):
    """Where registrations are known by number."""

    def release(self, number: int, together: bool) -> None:
        """Ends one; on all ranks, if they do it together."""


class Registration:
    """What `Communicator.register` returns; a context manager, which closes it.

    array      this rank's array, which lives as long as the registration is open
    nbytes     its size, equal on all ranks
    zero_copy  calls work in the peers' arrays; False: they go through FIFOs, as on any other array
    why        why not, with the ranks that it is about; "" if they do
    """

    def __init__(self, memory: Registry, number: int, array: Any, nbytes: int, why: str) -> None:
        self._memory: Registry | None = memory
        self._number = number
        self.array = array
        self.nbytes = nbytes
        self.why = why

    @property
    def zero_copy(self) -> bool:
        return not self.why

    def close(self) -> None:
        """Ends the registration, once this rank's calls on the GPU have ended. Collective: after
        it, no rank has the array mapped, so it may be freed.
        """
        self._close(together=True)

    def forget(self, why: str) -> None:
        """Notes that it has ended, and `why`."""
        self._memory, self.array, self.why = None, None, why

    def _close(self, together: bool) -> None:
        memory = self._memory
        if memory is not None:
            self.forget("it is closed")
            memory.release(self._number, together)

    def __enter__(self) -> Registration:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # After an error, the others may never come.
        self._close(together=error is None)

    def __repr__(self) -> str:
        how = "zero-copy" if self.zero_copy else f"not zero-copy: {self.why}"
        return f"<Registration no. {self._number}, {self.nbytes} bytes, {how}>"
