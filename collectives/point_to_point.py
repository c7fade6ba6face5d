"""Sends and receives between two ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from . import _core
from .array import Stream, View, finish, is_immutable, new_like, overlap, stream_of
from .calls import DTYPES, Calls, integer
from .device import DeviceWork, beside, device_of, view
from .errors import ArrayError, CollectiveError, UnsupportedError
from .staging import StagedEngine
from .work import TransferWork


class Part(NamedTuple):
    """One direction of a call."""

    sends: bool
    peer: int
    tag: int
    array: View


class PointToPoint(Calls):
    """send, recv and sendrecv of a communicator.

    With arrays on a GPU they are put on `stream`, or the current stream of the array's library, and
    return at once (docs/gpu.md, Sends and receives). There all ranks must have made a collective
    call on device arrays before, and the messages of two ranks are received in the order in which
    they were sent: another tag, count or dtype than that of the next one is a MismatchError.
    """

    def send(
        self, x: Any, dest: int, tag: int = 0, *, async_op: bool = False, stream: Any = None
    ) -> Any:
        """Sends x to rank `dest`. Returns when x may be changed; a large message waits for its
        receiver.

        tag     0 to 2**32 - 1; matches a recv with the same tag
        stream  as of any collective, for arrays on a GPU
        """
        if not async_op and stream is None and self._at_once_to(True, x, dest, tag):
            return None
        source = view(x, writable=False, what="send: x")
        part = self._part(True, dest, tag, source)
        return self._move("send", [part], lambda: None, (x, source), async_op, stream)

    def recv(
        self, out: Any, source: int, tag: int = 0, *, async_op: bool = False, stream: Any = None
    ) -> Any:
        """Receives into `out` what rank `source` sends with `tag`; count and dtype must match.
        Returns out. jax arrays are never written: one says what comes, and a new one is returned.

        stream  as of any collective, for arrays on a GPU

        Raises MismatchError if the message has another length or dtype; it is dropped then.
        """
        if not async_op and stream is None and self._at_once_to(False, out, source, tag):
            return out
        target, result = _landing(out, "recv: out")
        part = self._part(False, source, tag, target)
        return self._move("recv", [part], result, (out, target), async_op, stream)

    def sendrecv(
        self,
        x: Any,
        dest: int,
        out: Any,
        source: int,
        send_tag: int = 0,
        recv_tag: int = 0,
        *,
        async_op: bool = False,
        stream: Any = None,
    ) -> Any:
        """Sends x to `dest` and receives `out` from `source` at the same time: never a deadlock.
        Returns out, or as `recv` does.

        stream  as of any collective, for arrays on a GPU
        """
        outgoing = view(x, writable=False, what="sendrecv: x")
        incoming, result = _landing(out, "sendrecv: out")
        if overlap(outgoing, incoming) != "none":
            raise ArrayError("sendrecv: x and out share memory; pass two arrays")
        device_of("sendrecv", outgoing, incoming)
        parts = [
            self._part(False, source, recv_tag, incoming),
            self._part(True, dest, send_tag, outgoing),
        ]
        return self._move("sendrecv", parts, result, (x, out, outgoing, incoming), async_op, stream)

    def _at_once_to(self, sends: bool, x: Any, peer: Any, tag: Any) -> bool:
        """Sends or receives a plain array of numpy. False, and nothing done, if it is none, or a
        group is open: that is for the general path.
        """
        plain = type(x) is np.ndarray and type(peer) is int and type(tag) is int
        return plain and self._group is None and self._transfer(sends, x, peer, tag)

    def _part(self, sends: bool, peer: int, tag: int, array: View) -> Part:
        self._check_open()
        peer, tag = integer(peer, "the peer's rank"), integer(tag, "tag")
        if not 0 <= peer < self.size:
            raise ValueError(f"rank {peer} is out of range: ranks are 0 to {self.size - 1}")
        if not 0 <= tag < 1 << 32:
            raise ValueError(f"tag {tag} is out of range: 0 to 2**32 - 1")
        return Part(sends, peer, tag, array)

    def _move(
        self,
        what: str,
        parts: list[Part],
        result: Callable[[], Any],
        keep: tuple[Any, ...],
        async_op: bool,
        stream: Any,
    ) -> Any:
        """Makes a call on checked parts, all on the same device."""
        if parts[0].array.device != "cpu":
            put_on = None if stream is None else stream_of(stream, what)
            return self._move_on_device(what, parts, result, keep, async_op, put_on)
        if stream is not None:
            raise ArrayError(
                f"{what}: stream= orders calls on arrays on a GPU, and these are on the host; "
                "leave it out"
            )
        transfers = [
            (p.sends, p.peer, p.tag, DTYPES[p.array.dtype], p.array.pointer, p.array.nbytes)
            for p in parts
        ]
        group = self._group
        if not async_op and group is None:
            self._core.transfer(transfers)
            return result()

        def post() -> TransferWork:
            held = self._in_flight.hold(keep)
            posted: list[_core.PostedTransfer] = []
            try:
                for transfer in transfers:
                    posted.append(self._core.post(transfer, True))
            except CollectiveError:
                if not posted:
                    held.arrays = None
                raise
            return TransferWork(self._core, posted, result, held)

        if group is None:
            return post()
        sent = [p.array for p in parts if p.sends]
        received = [p.array for p in parts if not p.sends]
        return group.add_transfers(post, sent, received)

    def _move_on_device(
        self,
        what: str,
        parts: list[Part],
        result: Callable[[], Any],
        keep: tuple[Any, ...],
        async_op: bool,
        put_on: Stream | None,
    ) -> Any:
        device = parts[0].array.device
        if self._device is None and self.size > 1:
            raise UnsupportedError(
                f"{what} of an array on {device} before any collective call on device arrays: the "
                "GPU engine is not set up, and all ranks do that together. Let all ranks make a "
                "collective call on an array on their GPU first, such as all_reduce",
                rank=self.rank,
            )
        engine = self._engine(device)
        if isinstance(engine, StagedEngine):
            raise UnsupportedError(
                f"{what} of arrays on GPUs works within a node, and these {self.size} ranks are on "
                f"{len(set(self.nodes))}; send copies on the host",
                rank=self.rank,
            )
        streams = [p.array.stream for p in parts]
        stream = next((s for s in streams if s is not None), 0)
        if put_on is not None:
            self._check_stream(put_on, engine, what)
            stream = put_on.handle
        transfers = [
            (p.sends, p.peer, p.tag, DTYPES[p.array.dtype], p.array.pointer, p.array.count)
            for p in parts
        ]
        # jax: what is handed out is written already, and what is sent read.
        ended = partial(self._ended, device, result) if None in streams else result
        in_order = beside(what, engine.device, stream, () if put_on is not None else streams)
        if (group := self._group) is not None:
            return group.add_device_transfers(engine, transfers, stream, result, keep, in_order)
        with in_order:
            engine.transfer(transfers, stream)
        return DeviceWork(engine, result, keep, stream) if async_op else ended()


def _landing(out: Any, what: str) -> tuple[View, Callable[[], Any]]:
    """Where to write what comes for `out`, and what the user gets."""
    like = view(out, writable=False, what=what) if is_immutable(out, what) else None
    if like is None or like.kind != "jax":  # others that are never written raise
        return view(out, writable=True, what=what), lambda: out
    buffer = new_like(out, like.shape)
    target = view(buffer, writable=True, what=what)
    target.stream = like.stream  # no other library knows of the buffer
    return target, lambda: finish(out, buffer)
