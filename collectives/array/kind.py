"""What there is to know about a kind of array."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from .dtypes import numpy_dtype
from .memory import aligned_empty
from .views import View


class Kind(ABC):
    """What there is to know about one kind of array; the defaults are those of a host array that
    numpy understands.
    """

    name = ""

    @abstractmethod
    def view(self, x: Any, writable: bool, what: str, gpu: bool) -> View:
        """Where x lies; see `collectives.array.view`."""

    def immutable(self, x: Any) -> bool:
        return False

    def new_like(self, x: Any, shape: tuple[int, ...]) -> Any:
        return aligned_empty(shape, numpy_dtype(self.view(x, False, "array", False).dtype))

    def finish(self, x: Any, buffer: Any) -> Any:
        return buffer
