"""Calls on CUDA tensors: which stream they go on, and who waits for them.

A call that torch waits for goes on torch's current stream, where everything else is ordered
already. An asynchronous one goes on a stream of the process group beside it, so that what the
program puts on its own stream next runs meanwhile, as DDP's backward pass does. The side stream
waits for what the current stream has at the call, and `Work.wait` makes the stream that is current
then wait for the call. The host waits for neither.

Memory that a call uses on the side stream is recorded there (`record_stream`), so that torch's
allocator gives it to nobody else before the call has ended, whoever drops the tensors or the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.futures

from .. import _core
from ..array import Stream
from ..array.torch_streams import current_stream, with_stream
from ..side_stream import quietest
from .untraced import untraced_methods
from .work import NO_TIMEOUT, for_future


def stream_of_caller(device: torch.device) -> Stream:
    """torch's current stream, for a call that goes there. One of high priority is made to run
    beside another that computes, as FSDP's are: a kernel that waits for a peer on all
    multiprocessors would leave that one none. (All ranks must put a call on alike streams.)
    """
    stream = torch.cuda.current_stream(device)
    return Stream(stream.cuda_stream, device.index, beside=stream.priority < 0)


def gpus_of_barrier(used: int | None, device_id: torch.device | None, opts: Any) -> list[int]:
    """The GPUs whose current streams a barrier comes behind: the one that the group has used, if
    any; those of `device_ids`, or else of `device_id`; and the current one, if it is in use.
    """
    found = set() if used is None else {used}
    if torch.cuda.is_initialized():
        named = set(getattr(opts, "device_ids", None) or ())
        if not named:
            devices = device_id, getattr(opts, "device", None)
            named = {d.index for d in devices if d is not None and d.type == "cuda"}
        current = torch.cuda.current_device()
        if torch._C._cuda_hasPrimaryContext(current):  # which a wait would make there
            named.add(current)
        found |= named - {None}
    return sorted(found)


class Side:
    """The side stream of a GPU. It is one of torch's, which are never destroyed: when a tensor that
    was recorded on it is freed, torch marks its end there, and that may be after the group's.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = quietest(
            device.index,
            current_stream(device.index),
            lambda: torch.cuda.Stream(device),
            lambda stream: stream.cuda_stream,
        )
        self.core = _core.SideStream(device.index, self.stream.cuda_stream)
        self.for_calls = Stream(self.core.handle, device.index, beside=True)


class SideStreams:
    """A stream for each GPU, made when the first asynchronous call needs it."""

    def __init__(self) -> None:
        self._sides: dict[torch.device, Side] = {}

    def of(self, device: torch.device) -> Side:
        side = self._sides.get(device)
        if side is None:
            side = self._sides[device] = Side(device)
        return side

    def run(
        self,
        device: torch.device,
        put_on: Callable[[Stream], None],
        finish: Callable[[], None] | None,
        outputs: Any,
        used: Any,
    ) -> StreamWork:
        """Runs `put_on`, which puts a call on the side stream, which it gets.

        finish  what torch is to do there behind the call, if anything
        used    tensors, lists or tuples of them, that the call reads or writes there
        """
        side = self.of(device)
        side.core.begin(current_stream(device.index))
        put_on(side.for_calls)
        if finish is not None:
            with_stream(side.stream, finish)
        ended = side.core.end()
        for tensor in _tensors([used, outputs]):
            tensor.record_stream(side.stream)
        return StreamWork(outputs, device, side.stream, ended)


def _tensors(held: Any) -> Iterator[torch.Tensor]:
    if isinstance(held, torch.Tensor):
        if held.is_cuda:
            yield held
    elif isinstance(held, (list, tuple)):
        for part in held:
            yield from _tensors(part)


@untraced_methods
class StreamWork(dist.Work):
    """A call that streams order.

    stream  the one that it was put on, None for the stream that was current; `ended` is recorded
            behind it
    """

    def __init__(
        self,
        outputs: Any,
        device: torch.device,
        stream: Any = None,
        ended: _core.Mark | None = None,
    ) -> None:
        super().__init__()
        self._outputs = outputs
        self._device = device
        self._stream = torch.cuda.current_stream(device) if stream is None else stream
        self._ended = ended
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Makes the current stream wait for the call; returns at once. What goes wrong in the call
        raises at a later call of the group.
        """
        if self._ended is not None:
            self._ended.hold(current_stream(self._device.index))
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        """True if the GPU has ended it; for a call on the current stream, which is ordered as it
        is, always.
        """
        return self._ended is None or self._ended.done()

    is_success = is_completed

    def exception(self) -> BaseException | None:
        return None

    def result(self) -> Any:
        return self._outputs

    def source_rank(self) -> int:
        raise RuntimeError("only a recv has a source rank")

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Complete from the start for the host, so callbacks run where they are added: in the order
        of the program, as a part of it, without keys. torch makes their streams, and that of who
        waits, wait for the stream that is current where the future is completed.
        """
        if self._future is None:
            future = self._future = torch.futures.Future(devices=[self._device])
            with_stream(self._stream, lambda: future.set_result(for_future(self._outputs)))
        return self._future
