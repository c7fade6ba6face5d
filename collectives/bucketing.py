"""Gradient buckets: gradients are reduced in the background while backward goes on.

    bucketer = Bucketer(comm, parameters)            # a mapping of names to arrays
    for batch in batches:
        ...                                          # backward, from the last layer to the first
        bucketer.ready("w2", grad_w2)                # a full bucket is launched at once
        bucketer.ready("w1", grad_w1)
        bucketer.finish()                            # waits for what is not hidden
        update(w1, bucketer.view("w1"))              # the sum over all ranks

Gradients come in about the reverse order of the parameters, so buckets are filled in that order.
The first bucket is small, so that communication begins early. Whatever order they become ready in,
all ranks launch their buckets in the same order: by number. The idea and the usual sizes are those
of Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (VLDB 2020),
https://doi.org/10.14778/3415478.3415530, section 3.2.

Cost: every gradient is copied once into its bucket, unless it was written there (`view`). Memory:
one copy of all gradients in symmetric buffers, or `pool` buckets with `transient`.

Gradients on a GPU are reduced on a stream beside the caller's, which is cupy's current stream, or
torch's where the gradients are tensors of torch. `finish` makes that stream wait, and the host not:
what went wrong raises at the next call, or in `comm.synchronize()`. Tensors of torch are kept until
their bucket is full, and copied there together; hand them over, and write them no more.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .agreement import agree
from .array import device_name, dtype_name, native
from .bucket_layout import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    Bucket,
    Slot,
    Spec,
    make_buckets,
    order_of_rank_0,
    spec_of,
)
from .bucket_pool import BucketPool, memory
from .bucket_trace import NvtxRange, Statistics, Trace, write_events
from .bucket_usage import Usage
from .errors import (
    ENDINGS,
    ArrayError,
    CollectiveError,
    MismatchError,
    UnsupportedError,
    described,
    did_you_mean,
)
from .gradients import meets, misfit, put, settled
from .lent_memory import Lend
from .side_stream import SideStreams
from .work import Work

if TYPE_CHECKING:
    from .communicator import Communicator
    from .torch_gradients import Known, TorchGradients


class Bucketer:
    """Reduces the gradients of a model in buckets, beside backward. Making one is collective.

    comm                the communicator; the bucketer calls it in the background between the first
                        `ready` and the end of `finish`, so nothing else may then
    parameters          mapping of names to arrays (or Spec); their order counts
    bucket_bytes, first_bucket_bytes
                        sizes of buckets; a single parameter may be larger
    dtype               in which gradients are added and reduced; that of each gradient if None
    op, order           as in `Communicator.all_reduce`
    find_unused         gradients may be missing: they count as zero, one more small all_reduce
                        finds those missing on every rank, and these are left as they are
    static_graph        the same gradients are missing in every step, so they are found once
    rebuild             after the first step, fill buckets in the order in which gradients became
                        ready on rank 0
    layout              names in the order in which buckets are filled, instead of the reverse
    transient           buckets have memory only while they are filled and reduced
    lend                lends memory for transient buckets during a pass
    reduce              launches the reduction of a bucket and returns its Work, in place of an
                        all_reduce
    trace               keep the times of all steps, not only of the last

    Raises MismatchError, which names parameters and ranks, if the ranks differ in any of this.
    """

    def __init__(
        self,
        comm: Communicator,
        parameters: Mapping[str, Any],
        *,
        bucket_bytes: int = BUCKET_BYTES,
        first_bucket_bytes: int = FIRST_BUCKET_BYTES,
        dtype: Any = None,
        op: str = "sum",
        order: str | None = None,
        find_unused: bool = False,
        static_graph: bool = False,
        rebuild: bool = True,
        layout: Sequence[str] | None = None,
        transient: bool = False,
        lend: Lend = lambda *_: None,
        reduce: Callable[[Bucket], Work] | None = None,
        trace: bool = False,
    ) -> None:
        if bucket_bytes < 1 or first_bucket_bytes < 1:
            raise ValueError("bucket_bytes and first_bucket_bytes must be at least 1")
        self.comm = comm
        self._sizes = (first_bucket_bytes, bucket_bytes)
        self.specs: dict[str, Spec] = {
            name: spec_of(name, x, dtype) for name, x in parameters.items()
        }
        names = list(self.specs)
        self.layout = list(reversed(names)) if layout is None else list(layout)
        if sorted(self.layout) != sorted(names):
            raise ValueError("layout must name every parameter once")
        self._op, self._order = op, order
        self.usage = Usage(comm, names, find_unused or static_graph, static_graph)
        self._transient = transient
        self._rebuild = rebuild and not transient
        self._reduce = reduce or self._all_reduce
        agree(comm, "parameter", {n: [list(s.shape), s.dtype] for n, s in self.specs.items()})
        agree(
            comm,
            "setting",
            {
                "bucket_bytes": bucket_bytes,
                "first_bucket_bytes": first_bucket_bytes,
                "dtype": sorted({s.carried for s in self.specs.values()}),
                "op": op,
                "order": order,
                "find_unused": self.usage.find_unused,
                "static_graph": static_graph,
                "rebuild": self._rebuild,
                "transient": transient,
                "layout": self.layout,
                "order of parameters": names,
            },
        )
        self.siblings: list[Communicator] = []  # that are aborted along with comm
        self.side = SideStreams()
        self._torch: TorchGradients | None = None
        # For the others in a pass; else only in finish, where gradients may be missing, so that a
        # rank that has one meets those that lack it in other calls before.
        self.waits = True
        self.twice = "end a pass with finish(), or leave no_sync()"  # advice on a second ready
        self.rebuilt = False  # True once buckets were filled anew
        self._pool = BucketPool(comm, lend)
        self._sync = True
        self._running = False  # between the first ready and the end of finish
        self._seen: dict[str, None] = {}  # ready in this pass, in order
        self.peak = 0  # most bytes of gradients that waited for memory of a transient bucket
        self._touched: set[str] = set()  # have a gradient since the last reduction
        self._next = 0  # the bucket to be launched next
        self._trace = Trace(comm.rank, keep=trace)
        self._make(self.layout)

    # ---- what users call -------------------------------------------------------------------------

    def view(self, name: str) -> Any:
        """The gradient's place in its bucket, an array of the parameter's shape. A gradient may be
        written there; then call `ready(name)`. After `finish` it holds the result.

        It is another place after the one rebuild, so look it up in every step. Not for transient
        buckets.
        """
        bucket, slot = self._slot(name)
        if self._transient:
            raise UnsupportedError("transient buckets have no lasting views", rank=self.comm.rank)
        return bucket.part(slot)

    def ready(self, name: str, grad: Any = None, scale: float = 1.0) -> None:
        """The gradient of parameter `name` is there; launches all buckets that are full and next.

        grad   array of the parameter's shape, with the dtype of the parameter or of the bucket;
               copied (after `no_sync`, added). None if it was written into `view(name)`.
        scale  what it is multiplied by on the way

        Raises CollectiveError if it is ready for the second time in this pass, ArrayError for
        another shape or dtype. Both abort the communicator, since the other ranks wait for this
        gradient.
        """
        tensors = self._torch
        if (
            tensors is not None
            and scale == 1.0
            and self._running
            and name not in self._seen
            and name not in self._pool.held
            and (self.usage.usual is None or name in self.usage.usual)
        ):
            known = tensors.like_before(name, grad)
            if known is not None:
                self._keep(tensors, name, grad, known)
                return
        bucket, slot = self._slot(name)
        if not self._running:
            self._begin()
        if name in self._seen:
            self._fail(
                f"the gradient of {name!r} became ready twice in one pass on rank "
                f"{self.comm.rank}; {self.twice}"
            )
        if self.usage.usual is not None and name not in self.usage.usual and self._sync:
            self._fail(
                f"static_graph: {name!r} has a gradient on rank {self.comm.rank}, and had none in "
                "the first step"
            )
        now = time.monotonic()
        if grad is None:
            if self._transient:
                raise UnsupportedError("transient buckets need the gradient", rank=self.comm.rank)
            if scale != 1.0:
                part = bucket.part(slot)
                put(part, part, scale, add=False)
        else:
            self._store(bucket, slot, grad, scale)
        self._touched.add(name)
        self._seen[name] = None
        self._arrived(bucket, now)

    def began(self, bucket: Bucket) -> None:
        """The first gradient of a bucket is there, and comes with `ready_together`."""
        if not self._running:
            self._begin()
        bucket.times.first = bucket.times.first or time.monotonic()

    def ready_together(self, bucket: Bucket, grads: Sequence[Any]) -> None:
        """`ready` for all gradients of a bucket at once, in the order of its slots, if they are as
        torch's autograd leaves them: like their parameters. For tensors on a GPU it costs the host
        little more than one `ready`.
        """
        self.began(bucket)
        named = {slot.name: grad for slot, grad in zip(bucket.slots, grads, strict=True)}
        again = named.keys() & self._touched
        if (
            self._torch is None
            or self.usage.usual is not None
            or self._pool.held
            or bucket.missing < len(named)
            or 0 < len(again) < len(named)
            or not self._torch.put_all(bucket, named, again=bool(again))
        ):
            for name, grad in named.items():
                self.ready(name, grad)
            return
        self._note_peak()
        self._touched.update(named)
        self._seen.update(dict.fromkeys(named))
        bucket.missing = 0
        self._full(bucket)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of the pass in this block are added up locally and reduced with those of the
        next pass outside of it. If the block raises, they are discarded.
        """
        if self._running:
            raise CollectiveError("no_sync() must begin before the first ready() of a pass")
        before, self._sync = self._sync, False  # one block may be within another
        try:
            yield
            self._flush()
        except BaseException as error:
            self.discard(error)
            raise
        finally:
            self._sync = before
            self._running = False

    def discard(self, cause: BaseException) -> bool:
        """Forgets all gradients since the last reduction, as after a pass that raised, so that the
        next pass begins anew; every rank has to.

        Returns True where that cannot be: buckets of this pass are launched already, and other
        ranks wait for the rest; or the `cause` has ended a communicator. Then all are aborted, in
        words that give it. (A MismatchError was raised on all ranks, and on the host has ended
        their calls.)
        """
        hopeless = (self._running and self._next > 0) or isinstance(cause, ENDINGS)
        if isinstance(cause, MismatchError) and all(b.device == "cpu" for b in self.buckets):
            hopeless = False
        if hopeless:
            self._abort(f"rank {self.comm.rank} gave up a pass: {described(cause)}")
        self._running = False
        self._seen = {}
        self._touched.clear()
        self._pool.held.clear()
        if self._torch is not None:
            self._torch.discard(self.buckets)
        return hopeless

    def finish(self, timeout: float | None = None, *, absent: bool = False) -> frozenset[str]:
        """Ends the pass: waits until all buckets are reduced. Returns the names of the parameters
        that have a gradient on no rank (with `find_unused`), whose views are as they were.

        timeout  seconds for each bucket
        absent   this rank has no data, so what is missing counts as zero

        Raises CollectiveError that names the parameters that are not ready.
        """
        if not self._running:
            self._begin()
        if not self._sync:
            self._flush()
            self._running = False
            return frozenset()
        with self._on_stream_of_gradients():
            return self._finish(timeout, absent)

    def check_pass(self, absent: bool = False) -> None:
        """Raises what `finish` does where gradients lack that must not, in a pass that reduces."""
        lacks = self.usage.lacks(self._slots, self._touched, self._seen, absent)
        if lacks and self._sync:
            self._fail(f"rank {self.comm.rank} has no gradient of {lacks}")

    def _finish(self, timeout: float | None, absent: bool) -> frozenset[str]:
        called = time.monotonic()
        kept = self._fill_missing(absent)
        self._launch_full(wait=True)
        nowhere = self.usage.nowhere(self._touched, self._seen, absent)
        device = next((b.device for b in self.buckets if b.device != "cpu"), None)
        mark = None if device is None else self.side.of(device).mark()
        for bucket in self.buckets:
            assert bucket.work is not None
            bucket.work.wait(timeout)
        self._trace.end_pass(self.buckets, called, time.monotonic(), mark)
        for name in nowhere & kept.keys():
            bucket, slot = self._slot(name)
            bucket.part(slot)[...] = kept[name]
        self._running = False
        self._touched.clear()
        self._pool.rest()
        if self._rebuild:
            self._rebuild = False
            self._fill_anew()
        return nowhere

    def buckets_for(self, layout: Sequence[str]) -> list[Bucket]:
        """Buckets without memory, as they would be if they were filled in order `layout`."""
        return make_buckets(self.specs, layout, *self._sizes)

    def fill_as(self, layout: Sequence[str]) -> None:
        """Fills buckets in order `layout` from now on; there will be no rebuild. Collective, with
        one layout on all ranks, between passes.
        """
        self._rebuild = False
        if list(layout) != self.layout:
            self._make(layout)

    @property
    def will_rebuild(self) -> bool:
        """True if the end of the next step may fill the buckets anew."""
        return self._rebuild

    @property
    def statistics(self) -> Statistics:
        """Sums over all steps, and what of the communication was hidden. Waits for GPUs."""
        self._trace.settle(wait=True)
        return self._trace.statistics

    def trace(self) -> list[dict[str, Any]]:
        """Events in the Trace Event Format of Chrome and Perfetto: for every bucket when it was
        filled, when it waited, when it was on the wire, and what of that was exposed. Times are
        microseconds of a clock that the processes of a host share; pid is the rank.
        """
        self._trace.settle(wait=True)
        return self._trace.events()

    def write_trace(self, path: str | Path) -> None:
        """Writes `trace()` of all ranks to one JSON file, by rank 0. Collective. Raises OSError on
        all ranks if rank 0 cannot write it.
        """
        write_events(self.comm, self.trace(), path)

    # ---- buckets ---------------------------------------------------------------------------------

    def _make(self, order: Sequence[str]) -> None:
        self.layout = list(order)
        if self._torch is not None:
            self._torch.forget()
        self.buckets = make_buckets(self.specs, order, *self._sizes)
        self._slots = {s.name: (b, s) for b in self.buckets for s in b.slots}
        if self._transient:
            self._pool.serve(self.buckets)
        else:
            for bucket in self.buckets:
                bucket.buffer = memory(self.comm, bucket.count, bucket.dtype, bucket.device)

    def _slot(self, name: str) -> tuple[Bucket, Slot]:
        found = self._slots.get(name)
        if found is None:
            raise CollectiveError(
                f"there is no parameter {name!r}; {did_you_mean(name, self._slots)}",
                rank=self.comm.rank,
            )
        return found

    def _all_reduce(self, bucket: Bucket) -> Work:
        on_host = bucket.device == "cpu"  # a GPU's stream goes on anyway
        call = partial(self.comm.all_reduce, bucket.buffer, self._op, order=self._order)
        return self.side.launch(bucket.device, partial(call, async_op=on_host))

    def _abort(self, message: str) -> None:
        """Tells the other ranks, which wait for this one."""
        for comm in (self.comm, *self.siblings):
            comm.abort(message)

    def _fail(self, message: str) -> None:
        self._abort(message)
        raise CollectiveError(message, rank=self.comm.rank)

    # ---- a pass ----------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._running = True
        self._seen = {}
        self._next = 0
        for bucket in self.buckets:
            bucket.begin()
            if self._transient:
                bucket.buffer = None
        if self._sync and self.usage.usual is not None:
            now = time.monotonic()
            for bucket, slot in list(self._slots.values()):
                if slot.name not in self.usage.usual:
                    if slot.name not in self._touched:
                        bucket.zeros.append(slot)
                    self._arrived(bucket, now)

    def _store(self, bucket: Bucket, slot: Slot, grad: Any, scale: float) -> None:
        if scale == 1.0 and bucket.device != "cpu" and self._wait_for_bucket(bucket, slot, grad):
            return
        name = slot.name
        try:
            array = native(grad, f"gradient of {name!r}")
            dtype = dtype_name(array.dtype)
        except ArrayError as error:
            self._abort(str(error))
            raise
        self._check(name, tuple(array.shape), dtype, device_name(array))
        part = self._pool.held.get(name)
        if part is None:
            part = self._place(bucket, slot)
        fresh = name not in self._touched
        if meets(array, part):  # it was written in place
            array, fresh = settled(array, part), True
            if array is part and scale == 1.0:
                return
        put(part, array, scale, add=not fresh)

    def _check(self, name: str, shape: tuple[int, ...], dtype: str, device: str) -> None:
        """Raises what `ready` says if a gradient is not what was announced."""
        error = misfit(name, self.specs[name], shape, dtype, device, self.comm.rank)
        if error is not None:
            self._abort(str(error))
            raise error

    # ---- tensors of torch on a GPU ---------------------------------------------------------------

    def _wait_for_bucket(self, bucket: Bucket, slot: Slot, grad: Any) -> bool:
        """Keeps a gradient until its bucket is full, if it is such a tensor; False if it is not."""
        torch = sys.modules.get("torch")
        if torch is None or type(grad) is not torch.Tensor or slot.name in self._pool.held:
            return False
        from .torch_gradients import TorchGradients, dtype_of

        dtype = dtype_of(grad)
        if dtype is None:
            return False
        ordinal = grad.get_device()
        self._check(slot.name, tuple(grad.shape), dtype, f"cuda:{ordinal}")
        if self._torch is None:
            self._torch = TorchGradients(ordinal, lasting=not self._transient)
        known = self._torch.admit(bucket, slot, grad)
        self._torch.put(slot.name, grad, known, again=slot.name in self._touched)
        self._note_peak()
        return True

    def _keep(self, tensors: TorchGradients, name: str, grad: Any, known: Known) -> None:
        """`ready` for a gradient that is like the one before, whose bucket waits for it."""
        bucket = known.bucket
        if bucket.missing == len(bucket.slots):
            bucket.times.first = time.monotonic()
        tensors.put(name, grad, known, again=name in self._touched)
        if self._transient:
            self._note_peak()
        self._touched.add(name)
        self._seen[name] = None
        bucket.missing -= 1
        if not bucket.missing:
            self._full(bucket)

    def _flush(self) -> None:
        """Gradients that wait for lasting buckets go there."""
        if self._torch is not None and not self._transient:
            for bucket in self.buckets:
                self._torch.flush(bucket)

    def _on_stream_of_gradients(self) -> contextlib.AbstractContextManager[None]:
        """What cupy does in this block is ordered with what made the gradients."""
        return contextlib.nullcontext() if self._torch is None else self._torch.stream()

    def _place(self, bucket: Bucket, slot: Slot) -> Any:
        """Where a gradient goes, of which nothing is there: into its bucket if that has memory."""
        if not self._transient or self._open(bucket, self.waits):
            return bucket.part(slot)
        held = self._pool.hold(bucket, slot)
        self._note_peak()
        return held

    def _note_peak(self) -> None:
        waiting = 0 if self._torch is None else self._torch.nbytes
        self.peak = max(self.peak, waiting + self._pool.held_bytes)

    def _open(self, bucket: Bucket, wait: bool) -> bool:
        """Gives a transient bucket its memory if it may have some now; True if it has."""
        if bucket.buffer is None and self._sync:
            self._trace.statistics.exposed += self._pool.open(bucket, wait)
        return bucket.buffer is not None

    def _arrived(self, bucket: Bucket, now: float) -> None:
        times = bucket.times
        times.first = times.first or now
        bucket.missing -= 1
        if not bucket.missing:
            self._full(bucket)

    def _full(self, bucket: Bucket) -> None:
        """Launches all buckets that are full and next."""
        bucket.times.filled = time.monotonic()
        with self._on_stream_of_gradients():
            if self._torch is not None and not self._transient:
                self._torch.flush(bucket)
            # On a GPU another rank may put its part behind all else of its pass, which waits for
            # what this one does behind its own: no stream is to wait for that in a pass.
            if self._sync and (self.waits or bucket.device == "cpu" or self.usage.alike):
                self._launch_full(self.waits)

    def _launch_full(self, wait: bool) -> None:
        while self._next < len(self.buckets) and self.buckets[self._next].missing == 0:
            if not self._launch(self.buckets[self._next], wait):
                return  # the next full bucket tries again, or finish
            self._next += 1

    def _launch(self, bucket: Bucket, wait: bool) -> bool:
        """False if there is no memory for a transient bucket yet."""
        if self._transient:
            if not self._open(bucket, wait):
                return False
            if self._torch is not None:
                self._torch.flush(bucket)
            self._pool.take_held(bucket)
        for slot in bucket.zeros:
            bucket.part(slot).fill(0)  # no kernel, which would be loaded while others wait
        bucket.times.launched = time.monotonic()
        with NvtxRange(bucket.device, f"bucket {bucket.index}"):
            bucket.work = self._reduce(bucket)
        return True

    def _fill_missing(self, absent: bool) -> dict[str, Any]:
        """Gradients that are missing count as zero; returns what was in their place."""
        self.check_pass(absent)
        usual = self.usage.usual
        if usual is not None and not absent:
            return {}
        missing = [n for n in self._slots if n not in self._seen and (usual is None or n in usual)]
        kept = {}
        now = time.monotonic()
        for name in missing:
            bucket, slot = self._slots[name]
            if name not in self._touched:
                if not self._transient:
                    kept[name] = bucket.part(slot).copy()
                bucket.zeros.append(slot)
            self._arrived(bucket, now)
        return kept

    def _fill_anew(self) -> None:
        """Buckets in the order in which gradients became ready on rank 0; results are kept."""
        agreed = order_of_rank_0(self.comm, list(self.specs), self._seen, self.layout)
        if agreed == self.layout:
            return
        old = self._slots
        self._make(agreed)
        for name, (bucket, slot) in self._slots.items():
            before, place = old[name]
            bucket.part(slot)[...] = before.part(place)
        self.rebuilt = True
