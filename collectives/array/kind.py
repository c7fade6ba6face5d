"""What there is to know about a kind of array."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from .dtypes import numpy_dtype
from .memory import aligned_empty
from .streams import LEGACY_STREAM
from .views import View


class Kind(ABC):
    """What there is to know about one kind of array; the defaults are those of a host array that
    numpy understands.
    """

    name = ""
    # All that `glance` tells are x.data.ptr, x.size, x.dtype and x.data.device_id, of arrays with
    # x.flags.c_contiguous, and `has_written` does nothing: the core reads such arrays by itself.
    plain = False

    @abstractmethod
    def view(self, x: Any, writable: bool, what: str, gpu: bool) -> View:
        """Where x lies; see `collectives.array.view`."""

    def glance(self, x: Any) -> tuple[int, int, Any, int] | None:
        """Address, elements, the library's dtype and the GPU of an array there; None for one on the
        host, and for what only `view` can judge.
        """
        return None

    def current_stream(self, ordinal: int) -> int:
        """The handle of the library's current stream of a GPU: the default stream, if it knows of
        no other.
        """
        return LEGACY_STREAM

    def has_written(self, x: Any) -> None:
        """A call wrote into an array that `glance` knows."""
        return

    def immutable(self, x: Any) -> bool:
        return False

    def new_like(self, x: Any, shape: tuple[int, ...]) -> Any:
        return aligned_empty(shape, numpy_dtype(self.view(x, False, "array", False).dtype))

    def finish(self, x: Any, buffer: Any) -> Any:
        return buffer
