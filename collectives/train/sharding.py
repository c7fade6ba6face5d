"""Flat shards: who holds which part of parameters, gradients and optimizer state.

After Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"
(SC 2020), https://arxiv.org/abs/1910.02054, section 5. With N ranks that share, a rank holds of

    sharding            parameters   gradients   optimizer state, master weights
    0  replicated           1            1              1
    1  optimizer            1            1             1/N
    2  + gradients          1           1/N            1/N
    3  + parameters        1/N          1/N            1/N

Everything is laid out as the gradient buckets are. A bucket is cut into N parts; cuts lie where
chunks of parameters end (see `norms`), near equal parts. Parts may be empty.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..array import empty
from ..bucket_layout import Bucket
from ..side_stream import SideStreams
from .norms import CHUNK

if TYPE_CHECKING:
    from ..communicator import Communicator
    from ..work import Work


class Piece(NamedTuple):
    """A part of a parameter that a rank holds."""

    name: str
    bucket: int
    low: int  # where it begins in the rank's shard of the bucket
    high: int
    offset: int  # where it begins in the parameter


def cuts(bucket: Bucket, parts: int) -> list[int]:
    """Where a bucket is cut into `parts`: parts + 1 places that ascend from 0 to its length."""
    starts = [slot.start for slot in bucket.slots]
    places = [0]
    for part in range(1, parts):
        wanted = bucket.count * part // parts
        slot = bucket.slots[max(0, bisect.bisect_right(starts, wanted) - 1)]
        inside = min(wanted - slot.start, slot.length)
        before = inside // CHUNK * CHUNK
        after = min(before + CHUNK, slot.length)
        nearest = before if inside - before <= after - inside else after
        places.append(max(places[-1], slot.start + nearest))
    return [*places, bucket.count]


class Shard:
    """What this rank holds of one bucket. Arrays are flat.

    low, high  the rank's part of the bucket
    pieces     of which parameters it consists; `lows` and `highs`: where they begin and end
    full       all parameters of the bucket, in the dtype they are used in; None while released
    used       this rank's part of them (a view of `full` where that stays)
    master     the same part as it is kept, which the optimizer steps (`used` itself if equal)
    grad       this rank's part of the reduced gradient, while a step has any (`GradientMemory`)
    state      arrays of the optimizer, like master
    """

    def __init__(self, bucket: Bucket, dtype: str, parts: int, rank: int) -> None:
        self.bucket = bucket
        self.dtype = dtype
        self.cuts = cuts(bucket, parts)
        self.counts = [b - a for a, b in itertools.pairwise(self.cuts)]
        self.low, self.high = self.cuts[rank], self.cuts[rank + 1]
        self.pieces = [
            Piece(
                slot.name,
                bucket.index,
                max(slot.start, self.low) - self.low,
                min(slot.start + slot.length, self.high) - self.low,
                max(slot.start, self.low) - slot.start,
            )
            for slot in bucket.slots
            if max(slot.start, self.low) < min(slot.start + slot.length, self.high)
        ]
        self.lows = np.array([piece.low for piece in self.pieces], np.int64)
        self.highs = np.array([piece.high for piece in self.pieces], np.int64)
        self.full: Any = None
        self.used: Any = None
        self.master: Any = None
        self.grad: Any = None
        self.state: dict[str, Any] = {}


class Store:
    """The shards of all buckets of this rank.

    comm     the ranks that share (None: every rank holds everything)
    stage    0 to 3
    offload  master weights and optimizer state of arrays on GPUs are kept in host memory
    """

    def __init__(
        self,
        comm: Communicator | None,
        stage: int,
        offload: bool,
    ) -> None:
        self.comm = comm if stage else None
        self.stage = stage
        self.offload = offload
        self.parts = self.comm.size if self.comm is not None else 1
        self.rank = self.comm.rank if self.comm is not None else 0
        self.side = SideStreams()  # which others that call `comm` in the background share
        self.shards: list[Shard] = []
        self.owners: dict[str, tuple[Shard, int, int, tuple[int, ...]]] = {}

    def build(
        self,
        buckets: Sequence[Bucket],
        values: Mapping[str, Any] | None,
        dtypes: Mapping[str, str],
        kept: Mapping[str, str],
        slots: Sequence[str],
    ) -> None:
        """Lays parameters out as `buckets`.

        values  all parameters, whole, in full precision; None: they are set later
        dtypes  in which each is used; equal within a bucket
        kept    in which the optimizer steps it and keeps its state
        slots   names of the optimizer's state arrays
        """
        self.shards, self.owners = [], {}
        for bucket in buckets:
            dtype = dtypes[bucket.slots[0].name]
            shard = Shard(bucket, dtype, self.parts, self.rank)
            self._allocate(shard, kept[bucket.slots[0].name], slots)
            if values is not None:
                self._fill(shard, values)
            self.shards.append(shard)
            for slot in bucket.slots:
                self.owners[slot.name] = (shard, slot.start, slot.length, slot.shape)

    def _allocate(self, shard: Shard, kept: str, slots: Sequence[str]) -> None:
        bucket, count = shard.bucket, (shard.high - shard.low,)
        if self.stage == 3:
            shard.used = empty(count, shard.dtype, bucket.device)
        else:
            shard.full = self._memory(shard)
            shard.used = shard.full[shard.low : shard.high]
        place = "cpu" if self.offload else bucket.device
        same = kept == shard.dtype and place == bucket.device
        shard.master = shard.used if same else empty(count, kept, place)
        for name in slots:
            shard.state[name] = empty(count, kept, place)
            shard.state[name][...] = 0

    def _fill(self, shard: Shard, values: Mapping[str, Any]) -> None:
        for piece in shard.pieces:
            part = values[piece.name].reshape(-1)[piece.offset :][: piece.high - piece.low]
            shard.used[piece.low : piece.high] = part
            if shard.master is not shard.used:
                shard.master[piece.low : piece.high] = host(part) if self.offload else part
        if shard.full is not None:
            for slot in shard.bucket.slots:
                part = values[slot.name].reshape(-1)
                shard.full[slot.start : slot.start + slot.length] = part

    def _memory(self, shard: Shard) -> Any:
        """Memory for all parameters of a bucket; symmetric where they are gathered into it."""
        bucket = shard.bucket
        if self.comm is not None and self.stage < 3 and bucket.device == "cpu":
            return self.comm.empty((bucket.count,), shard.dtype)
        return empty((bucket.count,), shard.dtype, bucket.device)

    def gather(self, comm: Communicator, side: SideStreams, shard: Shard, out: Any) -> Work:
        """Launches the all_gather of a bucket's parameters into `out`."""
        there = shard.bucket.device != "cpu"  # a GPU's stream goes on anyway
        return side.launch(
            shard.bucket.device,
            partial(comm.all_gather_v, shard.used, shard.counts, out=out, async_op=not there),
        )

    def publish(self, shard: Shard, *, rounded: bool = False) -> Work | None:
        """After the optimizer's step: the new parameters in the dtype they are used in (unless they
        are `rounded` already), and for stages 1 and 2, on all ranks.
        """
        if shard.master is not shard.used and not rounded:
            if self.offload and shard.bucket.device != "cpu":
                shard.used.set(shard.master.astype(shard.used.dtype))
            else:
                shard.used[...] = shard.master
        if self.comm is None or self.stage == 3:
            return None
        return self.gather(self.comm, self.side, shard, shard.full)

    def whole(self, key: str) -> dict[str, Any]:
        """Copies of `arrays()[key]`, whole, by parameter, on the host. Collective."""
        found: dict[str, Any] = {}
        for shard in self.shards:
            part = np.ascontiguousarray(host(self.arrays(shard)[key]))
            full = part if self.comm is None else self.comm.all_gather_v(part, shard.counts)
            for slot in shard.bucket.slots:
                flat = full[slot.start : slot.start + slot.length]
                found[slot.name] = flat.reshape(slot.shape).copy()
        return found

    def take(self, shard: Shard, arrays: Mapping[str, Any]) -> None:
        """Sets `arrays()`, and the parameters that are used. Collective."""
        for key, x in arrays.items():
            target = self.arrays(shard)[key]
            wide = x.astype(target.dtype, copy=False)
            if hasattr(target, "set"):
                target.set(wide)
            else:
                target[...] = wide
        work = self.publish(shard)
        if work is not None:
            work.wait()

    def pieces(self) -> Iterator[tuple[Shard, Piece]]:
        for shard in self.shards:
            for piece in shard.pieces:
                yield shard, piece

    def arrays(self, shard: Shard) -> dict[str, Any]:
        """What a checkpoint holds of a shard, by name."""
        return {"master": shard.master, **shard.state}

    def nbytes(self) -> dict[str, int]:
        """Bytes that this rank holds between steps: parameters, gradients in lasting buckets, state
        with masters.
        """
        sizes = {"parameters": 0, "gradients": 0, "state": 0}
        for shard in self.shards:
            held = shard.full if shard.full is not None else shard.used
            sizes["parameters"] += held.nbytes
            if self.stage < 2:
                sizes["gradients"] += shard.bucket.nbytes
            sizes["state"] += sum(a.nbytes for a in shard.state.values())
            if shard.master is not shard.used:
                sizes["state"] += shard.master.nbytes
        return sizes

    def has_master(self, name: str) -> bool:
        """True if the optimizer steps another array than the one that is used."""
        shard = self.owners[name][0]
        return shard.master is not shard.used

    def used(self) -> dict[str, Any]:
        """All parameters, whole, where they are used; not for stage 3."""
        return {name: self.view(name, owner[0].full) for name, owner in self.owners.items()}

    def view(self, name: str, full: Any) -> Any:
        """A parameter within its bucket's memory."""
        _, start, length, shape = self.owners[name]
        return full[start : start + length].reshape(shape)


def host(x: Any) -> Any:
    """The array on the host."""
    return x.get() if hasattr(x, "get") else x
