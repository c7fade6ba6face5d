"""Calls on arrays on a GPU like ones before: by a short way, in half of the host's time.

The way itself is in csrc/python_device_calls.cpp.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from .array import Stream
from .array.recognising import KINDS

if TYPE_CHECKING:
    from .device import DeviceEngine

Key = tuple[Hashable, ...]
_MOST = 4096  # that are kept


class KnownCalls:
    """What the general path has found of calls on the engine's GPU. A key says all that it looked
    at but the addresses: these may be others each time.
    """

    def __init__(self, engine: DeviceEngine) -> None:
        # Attributes, not methods: CPython looks those up in all bases first.
        self.call, self.learn, self.kept = engine.core.known_calls(
            engine.host, engine.device, KINDS, Stream, _MOST
        )
