"""Sends and receives of CUDA tensors from GPU to GPU.

They go on the side stream of the process group, in the order in which they are made, and what does
not fit between two ranks waits there for its receiver. So those of one `batch_isend_irecv` must go
on together. torch (2.11 to 2.13) makes them one by one, and tells a group of this kind nothing of
the batch; its list is seen in the frames of the call.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .streams import StreamWork

if TYPE_CHECKING:
    from ..device import Transfer
    from .streams import SideStreams
    from .tracks import MainTrack

_NEAR = 6  # frames between a batch's and the group's, at most: isend, and what decorates it


class MovedWork(StreamWork):
    """A send or recv on the side stream."""

    def __init__(self, outputs: Any, device: torch.device, peer: int) -> None:
        super().__init__(outputs, device)
        self._peer = peer

    def put_on(self, other: StreamWork) -> None:
        """It has been put on a stream together with others."""
        self._stream, self._ended = other._stream, other._ended

    def source_rank(self) -> int:
        """The rank that a message comes from, or goes to."""
        return self._peer

    _source_rank = source_rank


class Moving(threading.local):
    """The sends and receives of a thread that are about to go on together."""

    def __init__(self) -> None:
        self._batch: Any = None  # torch's list
        self._forget()

    def _forget(self) -> None:
        self._transfers: list[Transfer] = []
        self._works: list[MovedWork] = []
        self._finishes: list[Callable[[], None]] = []
        self._used: list[Any] = []

    def add(
        self,
        transfer: Transfer,
        work: MovedWork,
        finish: Callable[[], None] | None,
        used: Any,
    ) -> bool:
        """Notes one; True if it is the last of those that go on together."""
        batch = _batch_of_this_call()
        if batch is not self._batch or batch is None:
            self._forget()  # a batch in which torch has raised is not ended
        self._batch = batch
        self._transfers.append(transfer)
        self._works.append(work)
        if finish is not None:
            self._finishes.append(finish)
        self._used.append(used)
        return batch is None or len(self._works) == sum(op.tensor.is_cuda for op in batch)

    def go(self, track: MainTrack, sides: SideStreams, device: torch.device) -> None:
        """Puts them on the side stream."""
        transfers, works, finishes = self._transfers, self._works, self._finishes
        used = self._used
        self._batch = None
        self._forget()

        def finish() -> None:
            for one in finishes:
                one()

        together = sides.run(
            device, lambda stream: track.transfer(transfers, device, stream.handle),
            finish if finishes else None, [work.result() for work in works], used,
        )  # fmt: skip
        for work in works:
            work.put_on(together)


def _batch_of_this_call() -> Any:
    """The operations that torch's batch_isend_irecv makes, this call among them; or None."""
    frame: Any = sys._getframe(2)
    for _ in range(_NEAR):
        if frame is None:
            return None
        if frame.f_code.co_name == "batch_isend_irecv":
            return frame.f_locals.get("p2p_op_list")
        frame = frame.f_back
    return None
