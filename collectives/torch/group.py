"""The process group: every call of torch.distributed.

torch has two generations of names for some calls (`_allgather_base` and `all_gather_single`, ...);
both are here. C++ and `torch.distributed` pass an options object; the older plain arguments work
too.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from ..calls import ANY_PAIR
from ..errors import ArrayError
from . import handed_over, overlap
from .base import BaseGroup
from .joining import Meeting
from .profiling import profiled, shown
from .sparse import all_reduce_sparse
from .streams import gpus_of_barrier
from .tensors import (
    PLAIN,
    SUM,
    Call,
    Op,
    Tensor,
    dense,
    divide_integers,
    expect,
    moved,
    op_for,
    reduced,
)
from .tracks import MainTrack, Step, in_callback
from .transfers import Transfers
from .untraced import untraced_methods
from .work import Gathered, PendingWork


def _rooted(opts: Any, root: int | None = None) -> Any:
    """An options object for a call with plain arguments."""
    return SimpleNamespace(rootRank=opts if root is None else root, asyncOp=True, rootTensor=0)


def _plain_op(opts: Any, op: Any) -> Any:
    """Options of a reduction: an options object, or a ReduceOp, or nothing."""
    if hasattr(opts, "reduceOp"):
        return opts
    chosen = op if op is not None else opts if opts is not None else dist.ReduceOp.SUM
    if not isinstance(chosen, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
        chosen = dist.ReduceOp.SUM
    return SimpleNamespace(reduceOp=chosen, asyncOp=True, rootRank=0)


def _listed(x: Any) -> Any:
    return [x] if isinstance(x, Tensor) else x


@untraced_methods
class CollectivesGroup(Transfers, BaseGroup):
    """A process group on this runtime."""

    @classmethod
    def create(cls, options: Any, backend_options: Any = None) -> CollectivesGroup:
        """What torch calls for a new group; collective over its ranks."""
        handed_over.install()
        seconds = options.timeout
        if isinstance(seconds, timedelta):
            seconds = seconds.total_seconds()
        meeting = Meeting(
            options.store,
            options.group_rank,
            options.group_size,
            float(seconds),
            tuple(options.global_ranks_in_group),
        )
        return cls(meeting, str(options.group_id))

    # ---- reductions

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None, op: Any = None) -> Any:
        if isinstance(tensors, Tensor):
            tensors = [tensors]
        if opts is None or not hasattr(opts, "reduceOp"):
            opts = _plain_op(opts, op)
        if len(tensors) == 1 and type(tensor := tensors[0]).__torch_dispatch__ is PLAIN:
            if not opts.asyncOp:
                if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_sparse:
                    done = self._all_reduce_now(tensor, opts)
                    if done is not None:
                        return done
            elif tensor.is_cuda:
                beside = self._short.all_reduce(self, tensor, opts)
                if beside is not None:
                    return beside
        return self._all_reduce(tensors, opts)

    def _all_reduce_now(self, tensor: Tensor, opts: Any) -> Any:
        """The path of most calls: one contiguous tensor, and torch waits for it."""
        dtype = tensor.dtype
        op = op_for(opts.reduceOp, dtype)
        if op.divide or self._coalesced is not None or tensor.is_conj() or tensor.is_neg():
            return None
        if profiled() or in_callback():
            return None
        if self._size == 1 and op is SUM:
            self._main.next_number()
            return self._done
        number, times = reduced(dtype)
        pointer, count = tensor.data_ptr(), tensor.numel() * times
        if not pointer and count:
            return None
        self._main.all_reduce(number, pointer, count, op.number, op.factor, tensor.nbytes)
        return self._done

    def _all_reduce(self, tensors: Sequence[Tensor], opts: Any) -> Any:
        if any(t.layout is not torch.strided for t in tensors):
            return all_reduce_sparse(self, tensors, opts)
        return self._make(self._all_reduce_call(tensors, opts), list(tensors), opts)

    def _all_reduce_call(self, tensors: Sequence[Tensor], opts: Any) -> Call:
        call = Call(tensors[0] if tensors else None)
        # One call for all tensors of a dtype that lie in scratch or behind each other anyway; a
        # tensor alone is worked on where it is.
        for tensor in tensors:
            op = op_for(opts.reduceOp, tensor.dtype)
            held = call.target(tensor, loaded=True)
            number, times = reduced(tensor.dtype)
            self._add(call, "all_reduce", number, held, held, op, count=held.numel() * times)
            self._divide(call, op, held)
        return call

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        tensors = _listed(tensors)
        opts = _plain_op(opts, None)
        if len(tensors) < 2 or any(t.layout is not torch.strided for t in tensors):
            return self._all_reduce(tensors, opts)
        if len({t.dtype for t in tensors}) > 1 or sum(t.nbytes for t in tensors) > _PACK_BELOW:
            return self._all_reduce(tensors, opts)
        call = Call(tensors[0])
        dtype = tensors[0].dtype
        op, (number, times) = op_for(opts.reduceOp, dtype), reduced(dtype)
        held = call.target_of(tensors, loaded=True)
        count, nbytes = sum(t.numel() for t in tensors), sum(t.nbytes for t in tensors)
        self._add(call, "all_reduce", number, held, held, op, count=count * times, nbytes=nbytes)
        if op.divide:  # each where it is
            call.after += [partial(divide_integers, t, self._size) for t in tensors]
        return self._make(call, list(tensors), opts)

    def reduce(
        self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None, root: Any = None
    ) -> Any:
        tensors = _listed(tensors)
        if not hasattr(opts, "reduceOp"):
            opts = _plain_op(op, op)
            opts.rootRank = root if root is not None else 0
        call = Call(tensors[0])
        for tensor in tensors:
            op = op_for(opts.reduceOp, tensor.dtype)
            mine = self._rank == opts.rootRank
            held = call.target(tensor, loaded=True) if mine else call.source(tensor)
            number, times = reduced(tensor.dtype)
            self._add(
                call, "reduce", number, held, held, op, count=held.numel() * times,
                root=opts.rootRank,
            )  # fmt: skip
            if mine:
                self._divide(call, op, held)
        return self._make(call, list(tensors), opts)

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, op: Any = None
    ) -> Any:
        """Blocks may differ in length from rank to rank."""
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = _plain_op(opts, op)
        call = Call(outputs[0])
        for output, blocks in zip(outputs, inputs, strict=True):
            expect("reduce_scatter: the list of inputs", len(blocks), self._size)
            expect("reduce_scatter: output", output.numel(), blocks[self._rank].numel())
            for block in blocks:
                _same_dtype("reduce_scatter", output, block)
            op = op_for(opts.reduceOp, output.dtype)
            number, times = reduced(output.dtype)
            source, target = call.source_of(blocks), call.target(output)
            lengths = [b.numel() * times for b in blocks]
            even = len(set(lengths)) == 1
            self._add(
                call, "reduce_scatter", number, source, target, op,
                in_blocks=lengths[0] if even else lengths,
                nbytes=sum(lengths) * output.element_size() // times,
            )  # fmt: skip
            self._divide(call, op, target)
        return self._make(call, list(outputs), opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Any:
        call = self._reduce_scatter_call(outputs, inputs, _plain_op(opts, None))
        return self._make(call, list(outputs), opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def begin_reduce_scatter(self, output: Tensor, input: Tensor, op: Any) -> PendingWork:
        """A reduce_scatter on a communicator of its own: no other call waits for it, but the next
        one of these. On CPU tensors; see `overlap`.
        """
        if self._beside is None:
            self._beside = MainTrack(self._apart.join("beside"))
        call = self._reduce_scatter_call([output], [input], _plain_op(op, None))
        with shown(call.title):
            work = self._submit(self._beside, call, [output])
        self._reducing.append(work)
        return work

    def end_reduce_scatters(self) -> None:
        """Waits for all that `begin_reduce_scatter` began; raises what went wrong in them."""
        works, self._reducing = self._reducing, []
        for work in works:
            work.wait()

    def _reduce_scatter_call(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any
    ) -> Call:
        call = Call(outputs[0] if outputs else None, "_reduce_scatter_base")
        for output, tensor in zip(outputs, inputs, strict=True):
            _same_dtype("reduce_scatter", output, tensor)
            expect("reduce_scatter: input", tensor.numel(), output.numel() * self._size)
            op = op_for(opts.reduceOp, output.dtype)
            number, times = reduced(output.dtype)
            source, target = call.source(tensor), call.target(output)
            self._add(
                call, "reduce_scatter", number, source, target, op,
                in_blocks=output.numel() * times, nbytes=tensor.nbytes,
            )  # fmt: skip
            self._divide(call, op, target)
        return call

    # ---- movements

    def broadcast(
        self, tensors: Any, opts: Any = None, timeout: Any = None, root: int | None = None
    ) -> Any:
        tensors = _listed(tensors)
        if not hasattr(opts, "rootRank"):
            opts = _rooted(opts, root)
        root = opts.rootRank
        call = Call(tensors[0])
        for tensor in tensors:
            mine = self._rank == root
            held = call.source(tensor) if mine else call.target(tensor)
            number, times = moved(tensor)
            self._add(call, "broadcast", number, held, held, count=held.numel() * times, root=root)
        return self._make(call, list(tensors), opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced([output], [input], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Any:
        if not overlap.installed:  # FSDP2 gathers parameters before it reduces gradients
            overlap.install()
        return self._make(self._all_gather_call(outputs, inputs), list(outputs), opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _all_gather_call(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Call:
        call = Call(outputs[0] if outputs else None, "_all_gather_base")
        for output, tensor in zip(outputs, inputs, strict=True):
            _same_dtype("all_gather", output, tensor)
            expect("all_gather: output", output.numel(), tensor.numel() * self._size)
            number, times = moved(tensor)
            source, target = call.source(tensor), call.target(output)
            source = _apart(call, source, target, output.numel(), self._rank * source.numel())
            self._add(
                call, "all_gather", number, source, target, out_blocks=tensor.numel() * times,
                nbytes=output.nbytes,
            )  # fmt: skip
        return call

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        """The lengths may differ from rank to rank: those of the list's tensors count."""
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        call = Call(inputs[0])
        for blocks, tensor in zip(outputs, inputs, strict=True):
            expect("all_gather: the list of outputs", len(blocks), self._size)
            self._gather_blocks(call, "all_gather", tensor, blocks)
        return self._make(call, Gathered(list(blocks) for blocks in outputs), opts)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """outputs[rank][i] gets inputs[i] of that rank."""
        expect("all_gather: the list of outputs", len(outputs), self._size)
        call = Call(inputs[0])
        for i, tensor in enumerate(inputs):
            self._gather_blocks(call, "all_gather", tensor, [of_rank[i] for of_rank in outputs])
        return self._make(call, [list(of_rank) for of_rank in outputs], opts)

    def gather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, root: Any = None
    ) -> Any:
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        if not hasattr(opts, "rootRank"):
            opts = _rooted(opts, root)
        call = Call(inputs[0])
        for i, tensor in enumerate(inputs):
            if self._rank == opts.rootRank:
                expect("gather: the list of outputs", len(outputs[i]), self._size)
                self._gather_blocks(call, "gather", tensor, outputs[i], opts.rootRank, even=True)
            else:
                number, times = moved(tensor)
                count = tensor.numel() * times
                self._add(
                    call, "gather", number, call.source(tensor), None, root=opts.rootRank,
                    out_blocks=count, nbytes=tensor.nbytes * self._size,
                )  # fmt: skip
        return self._make(call, [list(blocks) for blocks in outputs], opts)

    def gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """The output of the root has the blocks of all ranks; that of others is not used."""
        call = Call(input)
        number, times = moved(input)
        source, target = call.source(input), None
        if self._rank == opts.rootRank:
            _same_dtype("gather", output, input)
            expect("gather: output", output.numel(), input.numel() * self._size)
            target = call.target(output)
            source = _apart(call, source, target, output.numel(), self._rank * source.numel())
        self._add(
            call, "gather", number, source, target, root=opts.rootRank,
            out_blocks=input.numel() * times, nbytes=input.nbytes * self._size,
        )  # fmt: skip
        return self._make(call, [output], opts)

    gather_into_tensor = gather_single

    def scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, root: Any = None
    ) -> Any:
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        if not hasattr(opts, "rootRank"):
            opts = _rooted(opts, root)
        call = Call(outputs[0])
        for i, output in enumerate(outputs):
            number, times = moved(output)
            source = None
            if self._rank == opts.rootRank:
                expect("scatter: the list of inputs", len(inputs[i]), self._size)
                for block in inputs[i]:
                    _same_dtype("scatter", output, block)
                    expect("scatter: an input", block.numel(), output.numel())
                source = call.source_of(inputs[i])
            target = call.target(output)
            self._add(
                call, "scatter", number, source, target, root=opts.rootRank,
                in_blocks=output.numel() * times, nbytes=output.nbytes * self._size,
            )  # fmt: skip
        return self._make(call, list(outputs), opts)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
    ) -> Any:
        """Splits are rows of the first axis; without any, all blocks are equal."""
        _same_dtype("all_to_all", output, input)
        call = Call(input)
        source, target = call.source(input), call.target(output)
        if target.numel() and target.data_ptr() == source.data_ptr():
            source = source.clone()
            call.keep.append(source)
        if not output_split_sizes and not input_split_sizes:
            expect("all_to_all: output", output.numel(), input.numel())
            if input.numel() % self._size or (input.dim() and input.shape[0] % self._size):
                raise ArrayError(
                    f"all_to_all: the first axis has length {list(input.shape[:1])}, no multiple "
                    f"of {self._size} ranks; pass split sizes"
                )
            number, times = moved(input)
            each = input.numel() // self._size * times
            self._add(
                call, "all_to_all", number, source, target, in_blocks=each, out_blocks=each,
                nbytes=input.nbytes,
            )  # fmt: skip
        else:
            self._exchange(
                call, source, target,
                self._rows(input, input_split_sizes, "input"),
                self._rows(output, output_split_sizes, "output"),
            )  # fmt: skip
        return self._make(call, [output], opts)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        call = Call(inputs[0])
        expect("all_to_all: the list of outputs", len(outputs), self._size)
        expect("all_to_all: the list of inputs", len(inputs), self._size)
        for tensor in (*outputs, *inputs):
            _same_dtype("all_to_all", tensor, inputs[0])
        source, target = call.source_of(inputs), call.target_of(outputs)
        if target.numel() and target.data_ptr() == source.data_ptr():
            source = torch.cat([t.detach().reshape(-1) for t in inputs])
            call.keep.append(source)
        self._exchange(
            call, source, target, [t.numel() for t in inputs], [t.numel() for t in outputs]
        )
        return self._make(call, list(outputs), opts)

    def barrier(self, opts: Any = None, timeout: Any = None) -> Any:
        """Behind what is on torch's current streams of `gpus_of_barrier`: the host waits for that,
        also if the barrier is asynchronous.
        """
        engine = self._main.comm._device
        used = None if engine is None else engine.device
        for ordinal in gpus_of_barrier(used, self.device_id, opts):
            torch.cuda.current_stream(ordinal).synchronize()
        call = Call(None)
        call.steps.append(Step("barrier", 0, 0, 0))
        limit = getattr(opts, "timeout", timeout)
        if limit is None or limit <= timedelta(0):  # torch's "unset" is negative
            return self._make(call, [], opts)
        work = self._make(call, [], None)
        if opts is None or opts.asyncOp:
            return work
        work.wait(limit)
        return work

    # ---- steps

    def _add(
        self,
        call: Call,
        collective: str,
        number: int,
        source: Tensor | None,
        target: Tensor | None,
        op: Op = SUM,
        *,
        count: int = 0,
        in_blocks: Any = None,
        out_blocks: Any = None,
        root: int = 0,
        nbytes: int | None = None,
    ) -> None:
        if not 0 <= root < self._size:
            raise ValueError(
                f"{collective}: root {root} is out of range: ranks are 0 to {self._size - 1}"
            )
        held = source if source is not None else target
        assert held is not None
        call.steps.append(
            Step(
                collective,
                number,
                source.data_ptr() if source is not None else 0,
                target.data_ptr() if target is not None else 0,
                count,
                in_blocks,
                out_blocks,
                op.number,
                root,
                op.factor,
                held.nbytes if nbytes is None else nbytes,
                call.device,
            )
        )

    def _divide(self, call: Call, op: Op, tensor: Tensor) -> None:
        if op.divide:
            call.after.insert(0, lambda: divide_integers(tensor, self._size))

    def _gather_blocks(
        self,
        call: Call,
        collective: str,
        tensor: Tensor,
        blocks: Sequence[Tensor],
        root: int = 0,
        even: bool = False,
    ) -> None:
        for block in blocks:
            _same_dtype(collective, block, tensor)
        expect(f"{collective}: this rank's output", blocks[self._rank].numel(), tensor.numel())
        number, times = moved(tensor)
        lengths = [b.numel() * times for b in blocks]
        if len(set(lengths)) == 1:
            even = True
        elif even:
            raise ArrayError(f"{collective}: outputs have {lengths} elements; all must be equal")
        source, target = call.source(tensor), call.target_of(blocks)
        before = sum(lengths[: self._rank])
        source = _apart(call, source, target, sum(lengths) // times, before // times)
        self._add(
            call, collective, number, source, target, root=root,
            out_blocks=lengths[0] if even else lengths,
            nbytes=sum(lengths) * tensor.element_size() // times,
        )  # fmt: skip

    def _rows(self, tensor: Tensor, splits: Sequence[int], what: str) -> list[int]:
        rows = tensor.shape[0] if tensor.dim() else 1
        if not splits:
            if rows % self._size:
                raise ArrayError(f"all_to_all: {what} has {rows} rows for {self._size} ranks")
            splits = [rows // self._size] * self._size
        expect(f"all_to_all: {what} splits", len(splits), self._size)
        if min(splits) < 0:
            raise ArrayError(f"all_to_all: {what} splits {list(splits)} must not be negative")
        if sum(splits) != rows:
            raise ArrayError(
                f"all_to_all: {what} has {rows} rows, its splits {list(splits)} sum to "
                f"{sum(splits)}"
            )
        row = tensor.numel() // rows if rows else 0
        return [int(s) * row for s in splits]

    def _exchange(
        self,
        call: Call,
        source: Tensor,
        target: Tensor,
        sends: Sequence[int],
        receives: Sequence[int],
    ) -> None:
        if self._size == 1:  # ranks of larger groups are told by each other
            expect("all_to_all: input", sends[0], receives[0])
        number, times = moved(source)
        self._add(
            call, "all_to_all", number, source, target,
            in_blocks=[n * times for n in sends], out_blocks=[n * times for n in receives],
            nbytes=ANY_PAIR,
        )  # fmt: skip


# allreduce_coalesced copies tensors together up to this many bytes: a call costs some 5 us, and
# copying there and back costs about 0.5 us a KiB.
_PACK_BELOW = 64 << 10


def _apart(call: Call, source: Tensor, target: Tensor, count: int, before: int) -> Tensor:
    """The source of a gather into `count` elements at `target`, of which this rank's come after
    `before`. A copy if it lies where others' come, which may be there before it is read.
    """
    size, at, begin = source.element_size(), source.data_ptr(), target.data_ptr()
    meets = begin < at + source.nbytes and at < begin + count * size
    if meets and at != begin + before * size:
        source = source.clone()
        call.keep.append(source)
    return source


def _same_dtype(what: str, output: Tensor, tensor: Tensor) -> None:
    if output.dtype is not tensor.dtype:
        raise ArrayError(f"{what}: the input is {tensor.dtype}, the output {output.dtype}")


__all__ = ["CollectivesGroup", "dense"]
