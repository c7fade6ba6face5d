"""Memory of buckets; transient ones take turns in a few buffers of each kind."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from .array import empty, release
from .bucket_layout import Bucket, Slot
from .lent_memory import Lend, Pieces

if TYPE_CHECKING:
    from .communicator import Communicator

_POOL = 3  # of a kind: one being filled, one on the wire, one in between


def memory(comm: Communicator, count: int, dtype: str, device: str) -> Any:
    """A buffer for a bucket of `count` elements; on the host one in symmetric memory."""
    if device == "cpu":
        return comm.empty((count,), dtype)
    return empty((count,), dtype, device)


def trim(comm: Communicator, buckets: Sequence[Bucket]) -> None:
    """Gives memory that is not used back to GPUs, since pieces have other sizes from now on, or
    what was used once is not needed again. Freeing waits for the GPU, so nobody may have put on it
    what waits for another rank: collective.
    """
    places = {bucket.device for bucket in buckets} - {"cpu"}
    if places:
        comm.barrier()
        for place in places:
            release(place)
        comm.barrier()


class BucketPool:
    """Buffers for the transient buckets of each dtype and device, as many as are in use at once;
    and gradients that came before their bucket had one.
    """

    def __init__(self, comm: Communicator, lend: Lend) -> None:
        self._comm = comm
        self._lend = lend
        self._pieces: dict[tuple[str, str], Pieces] = {}
        self.held: dict[str, Any] = {}  # gradients by name
        self._buckets: Sequence[Bucket] = ()
        self._turn: dict[int, int] = {}  # bucket -> its number among those of its kind

    def serve(self, buckets: Sequence[Bucket]) -> None:
        """From now on these are the buckets."""
        self._buckets = buckets
        self._turn = {}
        for kind in dict.fromkeys((b.dtype, b.device) for b in buckets):
            same = self._of(kind)
            self._turn.update({b.index: i for i, b in enumerate(same)})
            places = min(_POOL, len(same))
            # Each is as large as the buckets that it serves need: one may be far beyond the rest.
            counts = [max(b.count for b in same[i::places]) for i in range(places)]
            held = self._pieces.get(kind)
            if held is None or held.counts != counts:
                make = partial(memory, self._comm)
                self._pieces[kind] = Pieces(counts, kind, self._lend, make)

    def open(self, bucket: Bucket, wait: bool) -> float:
        """Gives a bucket its memory; the seconds that it waited for the bucket that had it before.
        If that one is not even launched, the bucket remains without; so it does on the host where
        that one is not reduced yet, unless it may `wait`. (On a GPU the stream waits.)
        """
        kind = (bucket.dtype, bucket.device)
        pieces = self._pieces[kind]
        turn = self._turn[bucket.index]
        waited = 0.0
        if turn >= len(pieces.counts):
            last = self._of(kind)[turn - len(pieces.counts)]
            if last.work is None:
                return 0.0
            if not wait and bucket.device == "cpu" and not last.work.done():
                return 0.0
            began = time.monotonic()
            last.work.wait()
            waited = time.monotonic() - began
            last.buffer = None
        pieces.take()
        bucket.buffer = pieces.arrays[turn % len(pieces.counts)][: bucket.count]
        return waited

    def rest(self) -> None:
        """What was lent is needed no more: the current stream has waited for all reductions."""
        for pieces in self._pieces.values():
            pieces.give()

    def hold(self, bucket: Bucket, slot: Slot) -> Any:
        """Memory for a gradient that has none in its bucket yet."""
        held = self.held[slot.name] = empty(slot.shape, bucket.dtype, bucket.device)
        return held

    @property
    def held_bytes(self) -> int:
        return sum(x.nbytes for x in self.held.values())

    def take_held(self, bucket: Bucket) -> None:
        """Gradients of a bucket that were held go there, now that it has memory."""
        for slot in bucket.slots:
            held = self.held.pop(slot.name, None)
            if held is not None:
                bucket.buffer[slot.start : slot.start + slot.length] = held.reshape(-1)

    def _of(self, kind: tuple[str, str]) -> list[Bucket]:
        return [b for b in self._buckets if (b.dtype, b.device) == kind]
