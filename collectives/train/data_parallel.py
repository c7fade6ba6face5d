"""The trainer: data-parallel steps, from replicated parameters to ZeRO-3, with one result.

One convention holds for every stage: a gradient is the sum over ranks, in rank order, of what each
rank has added up over its micro-batches, each weighted with its share of the global batch before
anything is added. Shards only decide who computes which elements. So all stages take the same steps
bit for bit; see `norms` for why clipping does not break that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..array import device_name, dtype_name, native
from ..bucket_layout import BUCKET_BYTES, FIRST_BUCKET_BYTES, Bucket
from ..bucket_pool import trim
from ..bucketing import Bucketer
from ..errors import CollectiveError
from ..gradients import put
from ..work import ThenWork, Work
from .allowed import check_changes
from .batches import counted, joined, micro_batches, samples
from .gathering import Gatherer, ranks_of_gathers
from .gradient_memory import GradientMemory
from .gradient_norm import gradient_norm, who_is_not_finite
from .interrupted import Cause, end, meet
from .losses import told
from .model import Sink, model_of
from .norms import finite
from .parameter_groups import parameter_groups
from .precision import LossScale, check_kept, compute_dtype, kept_dtypes, specs_of, used_dtypes
from .progress import Log, Metrics, number
from .progress_bar import with_bar
from .schedules import Constant, Schedule, factor_at
from .settings import agree_on, check_parameters, check_settings, text_of
from .sharding import Shard, Store
from .stepping import Stepper
from .untrained import Untrained

if TYPE_CHECKING:
    from ..communicator import Communicator


class Trainer:
    """Trains one model on all ranks of a communicator. Making one is collective, and so are `step`,
    `parameters`, `save` and `load`.

    model          a function loss_and_grads(params, batch, emit), see `FunctionModel`; or a
                   torch.nn.Module
    optimizer      of collectives.train; for a module also a torch optimizer made on its parameters
    comm           the ranks; it is busy in the background during a step
    params         for functions: arrays by name
    loss           for modules: loss(module, batch) -> the mean loss over the batch
    sharding       0 replicated, 1 optimizer state, 2 and gradients, 3 and parameters (ZeRO)
    shard_group    "node": shard within a node, replicate across nodes
    precision      "bf16", "fp16": parameters have this dtype in forward and backward, but those of
                   a module's batch normalisation, which keep theirs. None: that in which they came
                   in. Buffers keep theirs in any case
    master_weights True: parameters of 16 bits have master weights and optimizer state in the dtype
                   that came in, at least float32. False: they have no masters, and state of their
                   own dtype: with Adam in bf16, 6 bytes a parameter instead of 14. Each step is
                   computed in float32 then too, and its results are rounded once. What is less than
                   half a last bit of a parameter (in bf16 1/512 of it) is lost. In fp16 SGD and
                   LARS alone can do without masters (gradients are unscaled in float32): second
                   moments of most gradients are below what float16 holds
    reduce_dtype   dtype of real floats in which gradients are added up and reduced; that of the
                   gradients if None
    accumulate     micro-batches in a step
    reduce_every   "step": micro-batches are added up on each rank and reduced once. "micro-batch":
                   each is reduced and what this rank holds is added up, so that stages 2 and 3
                   never hold whole gradients; sends `accumulate` times as much. Stages have the
                   same bits with either, one not those of the other
    clip_norm      largest norm of the whole gradient
    normalize      "samples": the loss is a mean over samples, "tokens": over what `count` counts;
                   in both cases the step is that of the mean over the global batch
    count          count(batch) -> samples or tokens in a (micro-)batch; the length of its first
                   array if None
    schedule       factor of the learning rate for each step, from `schedules`; or a function or
                   object of your own, but no lambda: ranks and checkpoints compare it
    groups         parameter groups: {"params": [names or patterns], **settings of the optimizer}
    frozen         for functions: names of parameters that have no gradient
    offload        "host": master weights and optimizer state of GPU parameters live on the host
    order          "rank": sums in rank order, the same bits for every stage. "any" may be faster
                   between nodes
    find_unused, static_graph, bucket_bytes, first_bucket_bytes
                   as for `Bucketer`
    loss_scale     of fp16
    metrics        file of JSON lines, one for each step, written by rank 0
    trace          keep the times of all buckets for `write_trace`
    seed           of `random`, a numpy generator for the model's use, another on each rank

    Raises MismatchError, which names parameters or settings and ranks, where ranks differ.
    Parameters and buffers begin as those of rank 0.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        comm: Communicator,
        *,
        params: Mapping[str, Any] | None = None,
        loss: Callable[..., Any] | None = None,
        sharding: int = 0,
        shard_group: str | None = None,
        precision: str | None = None,
        master_weights: bool = True,
        reduce_dtype: Any = None,
        accumulate: int = 1,
        reduce_every: str = "step",
        clip_norm: float | None = None,
        normalize: str = "samples",
        count: Callable[[Any], int] | None = None,
        schedule: Schedule | None = None,
        groups: Sequence[Mapping[str, Any]] = (),
        frozen: Sequence[str] = (),
        offload: str | None = None,
        order: str | None = "rank",
        find_unused: bool = False,
        static_graph: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
        first_bucket_bytes: int = FIRST_BUCKET_BYTES,
        loss_scale: LossScale | None = None,
        metrics: str | Path | None = None,
        trace: bool = False,
        seed: int = 0,
    ) -> None:
        check_settings(
            sharding=sharding,
            shard_group=shard_group,
            normalize=normalize,
            count=count,
            accumulate=accumulate,
            reduce_every=reduce_every,
            reduce_dtype=reduce_dtype,
            clip_norm=clip_norm,
            offload=offload,
            precision=precision,
            loss_scale=loss_scale,
        )
        self.comm = comm
        self.sharding = sharding
        self.accumulate = accumulate
        self._each = reduce_every == "micro-batch" and accumulate > 1
        self._first = True  # micro-batch of a step
        self.clip_norm = clip_norm
        self.schedule = schedule or Constant()
        self.updates = 0  # optimizer steps that were taken
        self.steps = 0  # with those that were left out
        self.last: Metrics | None = None
        self._closed = False
        # For dropout and the like: another stream on each rank, kept in checkpoints.
        self.random = np.random.default_rng([seed, comm.rank])
        self._dtype = compute_dtype(precision)
        fp16 = self._dtype == "float16"
        self.loss_scale = dataclasses.replace(loss_scale or LossScale()) if fp16 else None
        self._count = count or samples
        self._model = model_of(model, params, loss, frozen)
        check_parameters(self._model.parameters)
        self.names = list(self._model.parameters)
        self._optimizers, self._number, self._torch = parameter_groups(
            self._model, optimizer, groups
        )
        self.settings = {
            "model": type(self._model).__name__,
            "optimizer": text_of(self._optimizers),
            "sharding": sharding,
            "shard_group": shard_group,
            "precision": self._dtype,
            "master_weights": master_weights,
            "reduce_dtype": reduce_dtype and dtype_name(reduce_dtype),
            "accumulate": accumulate,
            "reduce_every": reduce_every,
            "clip_norm": clip_norm,
            "normalize": normalize,
            "schedule": text_of(self.schedule),
            "offload": offload,
            "order": order,
            "loss_scale": text_of(self.loss_scale),
        }
        agree_on(comm, self._model, self.settings, self._number)
        self._log = Log(metrics, comm)
        for name, x in self._model.parameters.items():
            self._model.parameters[name] = comm.broadcast(x)
        self.untrained = Untrained(self._model, comm, self._dtype)
        self._order = order
        self._hybrid = shard_group == "node"
        group = comm.split(by="node") if self._hybrid else comm if sharding else None
        self.store = Store(group, sharding, offload == "host")
        values = self._model.parameters
        self._dtypes = used_dtypes(values, self._dtype, self._model.wide)
        self.kept = kept_dtypes(values, self._dtypes, master_weights)  # of what is stepped
        check_kept(self.kept.values(), self.slots)
        self.bucketer = Bucketer(
            comm,
            specs_of(values, self._dtypes, self.kept, reduce_dtype),
            bucket_bytes=bucket_bytes,
            first_bucket_bytes=first_bucket_bytes,
            order=order,
            find_unused=find_unused,
            static_graph=static_graph,
            rebuild=sharding < 2,
            transient=sharding >= 2,
            lend=self._model.lend,
            reduce=self._reduce,
            trace=trace,
        )
        self.bucketer.twice = self._model.twice
        self.store.side = self.bucketer.side
        self._gatherer: Gatherer | None = None
        if sharding == 3:
            assert group is not None
            gathers = ranks_of_gathers(group, {device_name(x) for x in values.values()})
            self._gatherer = Gatherer(gathers, self.store, self._model, self.bucketer)
            self.bucketer.siblings.append(gathers)
            self.bucketer.waits = not (find_unused or static_graph)
        if group is not None and group is not comm:
            self.bucketer.siblings.append(group)
        self._gradients = GradientMemory(own=sharding >= 2 or self._each, lend=self._model.lend)
        self._stepper: Any = Stepper(self.store, self._optimizers, self._number)
        if self._torch is not None:
            from .torch_optimizer import TorchStepper

            self._stepper = TorchStepper(self.store, self._torch, self._optimizers[0])
        self._build(values)
        # What masters began as is kept whole as long as buckets may be filled anew, and no longer.
        self._values: dict[str, Any] | None = None
        if self.bucketer.will_rebuild:
            self._values = {n: x for n, x in values.items() if self.store.has_master(n)}
        self._model.parameters = {}
        del values
        trim(comm, self.bucketer.buckets)
        self._bad: set[str] = set()  # not finite on this rank, in this step
        # Why the last step was given up before it had reduced anything.
        self._cause: Cause | None = None

    # ---- a step --------------------------------------------------------------------------------

    def step(self, batch: Any) -> Metrics:
        """One optimizer step on what this rank has of the global batch.

        batch  arrays whose first axes run over samples, in any nesting of tuples, lists and dicts,
               split into `accumulate` micro-batches; or a list of these. None: no data here.

        Raises CollectiveError on all ranks, and writes nothing, if a gradient is not finite (in
        fp16 the step is left out instead); it names the parameters, and the ranks where they are
        known.

        What the model raises passes through, with no gradient kept. If it raises on all ranks they
        may go on. If it does on some alone, or after reductions have begun, calls of the others
        raise too, at the latest when this rank steps again.
        """
        with self._model.stream():
            return self._step(batch)

    def _step(self, batch: Any) -> Metrics:
        self._settle("step")
        began = time.monotonic()
        before = dataclasses.replace(self.bucketer.statistics)
        scale = self.loss_scale.scale if self.loss_scale is not None else 1.0
        try:  # whatever is wrong with what comes from the user is found here
            parts = micro_batches(batch, self.accumulate)
            counts = [0 if part is None else counted(self._count, part) for part in parts]
            # A mean over nothing is NaN, whatever its weight.
            parts = [part if count else None for part, count in zip(parts, counts, strict=True)]
            factor = factor_at(self.schedule, self.updates)
            total = self._total(counts)
            losses, unused = self._passes(parts, counts, total, scale)
        except BaseException as error:
            self._give_up(error)
            raise
        with_torch = self.torch_stepper
        lr = self._stepper.lr * factor if with_torch is None else with_torch.lr(factor)
        try:
            norm, overflow = self._norm(scale, unused)
            # That it comes about tells all ranks that no other has given the step up.
            sums = np.array([sum(number(loss) * count for loss, count in losses)], np.float64)
            self.comm.all_reduce(sums, order="rank")
            if not overflow:
                clip = 1.0
                if self.clip_norm is not None and norm > self.clip_norm:
                    clip = self.clip_norm / norm
                self._stepper.step(self.updates, factor, clip / scale, unused)
                self.updates += 1
            if self.loss_scale is not None:
                self.loss_scale.update(overflow)
            self.steps += 1
        except BaseException as error:
            end([self.comm, *self.bucketer.siblings], error, self.steps + 1)
            raise
        finally:
            self._gradients.give()
        after = self.bucketer.statistics
        busy, exposed = after.busy - before.busy, after.exposed - before.exposed
        self.last = Metrics(
            step=self.steps,
            loss=float(sums[0]) / total,
            lr=lr,
            samples=total,
            grad_norm=norm,
            skipped=overflow,
            scale=scale,
            seconds=time.monotonic() - began,
            exposed=exposed,
            overlap=100.0 * max(0.0, 1 - exposed / busy) if busy else 100.0,
        )
        self._log.write(self.last)
        return self.last

    def _passes(
        self, parts: Sequence[Any], counts: Sequence[int], total: int, scale: float
    ) -> tuple[list[tuple[Any, int]], frozenset[str]]:
        """Forward, backward and reduction of all micro-batches: their losses with their samples,
        and the parameters that have a gradient on no rank.
        """
        losses = []
        self._bad.clear()
        # On a GPU the host would have to wait for each gradient to see whether it is finite.
        ready = self.bucketer.ready if self._model.on_gpu else self._ready
        together = self._model.on_gpu and not self.bucketer.will_rebuild
        sink = Sink(ready, self.bucketer if together else None)
        unused: frozenset[str] = frozenset()
        for i, (part, count) in enumerate(zip(parts, counts, strict=True)):
            self._first = i == 0 or not self._each
            reduced = self._each or i == len(parts) - 1
            with contextlib.nullcontext() if reduced else self.bucketer.no_sync():
                finish: Callable[[], frozenset[str]] = frozenset
                if reduced:
                    finish = partial(self.bucketer.finish, absent=part is None)
                if part is None and self._gatherer is not None:
                    nowhere = self._gatherer.follow_pass(finish, self.comm.abort)
                else:
                    if part is not None:
                        loss = self._model.run(part, count / total, scale, sink)
                        losses.append((told(loss), count))
                    if self._gatherer is not None:
                        self._gatherer.end_pass()
                    nowhere = finish()
                if reduced:
                    self._after_reduction(nowhere)
                    unused = nowhere if self._first else unused & nowhere
        return losses, unused

    def _give_up(self, error: BaseException) -> None:
        """Forgets the gradients of a step that raised. If other ranks cannot, they hear why."""
        if self._gatherer is not None:
            self._gatherer.explain(error)
        if not self.bucketer.discard(error):
            self._cause = Cause.of(error)
            self._gradients.give()

    def _settle(self, changes: str = "") -> None:
        """After a step that was given up: all ranks have, or all raise.

        changes  the call that is about to change parameters
        """
        if changes:
            check_changes(changes, self._closed, self._gatherer)
        if self._cause is not None:
            meet([self.comm, *self.bucketer.siblings], self._cause, self.steps + 1)
            self._cause = None
            if self._gatherer is not None:
                with self._model.stream():
                    self._gatherer.discard()

    def progress(self, batches: Iterable[Any], total: int | None = None) -> Iterator[Any]:
        """Yields `batches` as `join` does, with a line about the steps on rank 0's terminal."""
        return with_bar(self, batches, total)

    def join(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yields `batches`, then None until every rank is through: ranks may have different
        numbers of batches. One more small all_reduce for each. Call `step` with what comes, None
        too.
        """
        return joined(self.comm, batches)

    @property
    def global_batch(self) -> str:
        """How the size of the global batch comes about, in words, for the last step."""
        total = self.last.samples if self.last is not None else 0
        micro = total / (self.comm.size * self.accumulate)
        return (
            f"global batch {total} = {micro:g} (micro) x {self.comm.size} (ranks) x "
            f"{self.accumulate} (accumulation)"
        )

    # ---- parameters ----------------------------------------------------------------------------

    def parameters(self) -> dict[str, Any]:
        """Copies of all parameters, whole, as they are kept, as arrays of numpy. Collective."""
        return self.whole("master")

    def whole(self, key: str) -> dict[str, Any]:
        """Copies of "master" or of an optimizer's state array, whole, by parameter. Collective."""
        with self._model.stream():
            self._settle()
            found = self.store.whole(key)
        return {name: found[name] for name in self.names}

    @contextlib.contextmanager
    def gathered(self) -> Iterator[Any]:
        """In this block all parameters are there, under every stage, for evaluation: yields the
        module, or for functions the parameters by name. Collective. Under stage 3 they are copies:
        `step` and `load` raise CollectiveError in this block.
        """
        block: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._gatherer is not None:
            self._settle()
            block = self._gatherer.everything()
        with block:
            yield self._model.whole()

    def nbytes(self) -> dict[str, int]:
        """Bytes that this rank holds between steps."""
        sizes = self.store.nbytes()
        sizes["gradients"] += self._gradients.nbytes
        return sizes

    def close(self) -> None:
        """Leaves the groups of ranks that the trainer made for itself; `comm` stays. Local. Under
        stage 3 a module is left without parameters: see `release`.
        """
        self._closed = True
        self._model.close()
        for comm in self.bucketer.siblings:
            comm.close()

    def release(self) -> None:
        """Gives a module its parameters, whole under every stage, in the dtype they were used in,
        and closes the trainer. Collective.
        """
        if self._gatherer is not None:
            with self._model.stream():
                self._settle("release")
                self._gatherer.gather_everything()
        self._model.release()
        self.close()

    def write_trace(self, path: str | Path) -> None:
        """Writes a trace for Chrome or Perfetto, by rank 0. Collective."""
        self.bucketer.write_trace(path)

    def save(self, path: str | Path, *, sampler: Any = None) -> None:
        """See `checkpoint.save`."""
        from .checkpoint import save

        with self._model.stream():
            self._settle()
            save(self, path, sampler)

    def load(self, path: str | Path, *, sampler: Any = None) -> None:
        """See `checkpoint.load`."""
        from .checkpoint import load

        with self._model.stream():
            self._settle("load")
            load(self, path, sampler)

    # ---- for checkpoints -----------------------------------------------------------------------

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the optimizer's state arrays, of any group."""
        return tuple(dict.fromkeys(slot for own in self._optimizers for slot in own.kept))

    @property
    def torch_stepper(self) -> Any:
        """Steps with an optimizer of torch, which keeps its state itself; None with our own."""
        return self._stepper if self._torch is not None else None

    @property
    def missed(self) -> dict[str, int]:
        """Updates in which parameters had a gradient on no rank and were left alone, by name."""
        missed: dict[str, int] = self._stepper.missed
        return missed

    @property
    def first_replica(self) -> bool:
        """True if this rank is among the first that hold all shards together."""
        return not self._hybrid or self.comm.node == self.comm.nodes[0]

    def shards_for(self, layout: Sequence[str]) -> list[Shard]:
        """Empty shards as this rank would have them if buckets were filled in order `layout`."""
        store = self.store
        return [
            Shard(bucket, self._dtypes[bucket.slots[0].name], store.parts, store.rank)
            for bucket in self.bucketer.buckets_for(layout)
        ]

    def restore(
        self, layout: Sequence[str], shards: Sequence[Mapping[str, Any]], buffers: Mapping[str, Any]
    ) -> None:
        """Takes over the master weights and state of all shards. Collective."""
        with self._model.stream():
            self._restore(layout, shards, buffers)

    def _restore(
        self, layout: Sequence[str], shards: Sequence[Mapping[str, Any]], buffers: Mapping[str, Any]
    ) -> None:
        self.bucketer.fill_as(layout)
        self._values = None
        self._build(None)
        for shard, arrays in zip(self.store.shards, shards, strict=True):
            self.store.take(shard, arrays)
        self.untrained.restore(buffers)

    # ---- setting up ----------------------------------------------------------------------------

    def _build(self, values: Mapping[str, Any] | None) -> None:
        self.store.build(self.bucketer.buckets, values, self._dtypes, self.kept, self.slots)
        self._gradients.serve(self.store.shards)
        self._model.bind(self.store, self._gatherer, self._dtype)
        self._stepper.build()

    # ---- gradients -----------------------------------------------------------------------------

    def _total(self, counts: Sequence[int]) -> int:
        """Samples, or tokens, of the global batch."""
        total = np.array([sum(counts), not all(counts)], np.int64)
        self.comm.all_reduce(total)
        if total[0] < 1:
            raise ValueError("step: no rank has a sample")
        if self._gatherer is not None:
            self._gatherer.begin_step(absent=bool(total[1]))
        return int(total[0])

    def _ready(self, name: str, grad: Any, scale: float = 1.0) -> None:
        if self._dtype != "float16":
            array = native(grad, f"gradient of {name!r}")
            if device_name(array) == "cpu" and not finite(array):
                self._bad.add(name)
        self.bucketer.ready(name, grad, scale)

    def _reduce(self, bucket: Bucket) -> Work:
        """Launches the reduction of a bucket, into this rank's shard."""
        comm = self.comm
        self._gradients.take()
        shard = self.store.shards[bucket.index]
        # While buckets may still be filled anew, shards are not settled: all get everything. In
        # hybrid sharding all do too: sums within nodes first would be in another order.
        if self.sharding == 0 or self._hybrid or self.bucketer.will_rebuild:
            call, out = partial(comm.all_reduce, bucket.buffer), None
        else:
            part = self.sharding == 1 or self._each
            out = bucket.buffer[shard.low : shard.high] if part else shard.grad
            call = partial(comm.reduce_scatter_v, bucket.buffer, shard.counts, out=out)
        work = self.bucketer.side.launch(
            bucket.device, partial(call, order=self._order, async_op=bucket.device == "cpu")
        )
        if self.sharding >= 2 and out is not shard.grad:  # before the bucket gives its memory back
            return ThenWork(work, partial(self._take, shard))
        return work

    def _take(self, shard: Shard) -> None:
        """Takes this rank's part of a reduced bucket into its gradient."""
        put(shard.grad, shard.bucket.buffer[shard.low : shard.high], 1.0, add=not self._first)

    def _after_reduction(self, nowhere: frozenset[str]) -> None:
        """After the first reduction: buckets may have been filled anew, and nothing was stepped
        yet. What is reduced in lasting buckets is added up, if there is more than one in a step.
        """
        if self._values is not None:
            values, self._values = self._values, None
            if self.bucketer.rebuilt:
                values = self.store.used() | values  # what the program wrote meanwhile is there
                self.store.shards, self.store.owners = [], {}
                trim(self.comm, self.bucketer.buckets)
                self._build(values)
            del values
            trim(self.comm, self.bucketer.buckets)
            self._gradients.take()
        if self._each and self.sharding < 2:
            for name in nowhere:
                self.bucketer.view(name)[...] = 0  # the bucketer left what was there
            for shard in self.store.shards:
                self._take(shard)

    def _norm(self, scale: float, unused: frozenset[str]) -> tuple[float, bool]:
        """The norm of the gradient, and whether it overflowed in fp16."""
        norm = gradient_norm(self.store, unused)
        for comm in (self.comm, *self.bucketer.siblings):
            comm.synchronize()  # GPUs are through: raises what went wrong there
        if math.isfinite(norm):
            return norm / scale, False
        if self.loss_scale is not None:
            return math.nan, True
        # All ranks are here: they have the same norm.
        words = who_is_not_finite(self.comm, self.store, self.names, self._bad)
        raise CollectiveError(
            f"step {self.steps + 1}: gradients are not finite: {words}; nothing was written",
            rank=self.comm.rank,
        )
