"""Sends and receives between two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .array import View, overlap, view
from .calls import DTYPES, Calls, integer
from .errors import ArrayError
from .work import TransferWork


class PointToPoint(Calls):
    """send, recv and sendrecv of a communicator."""

    def send(self, x: Any, dest: int, tag: int = 0, *, async_op: bool = False) -> Any:
        """Sends x to rank `dest`. Returns when x may be changed; a large message waits for its
        receiver.

        tag  0 to 2**32 - 1; matches a recv with the same tag
        """
        source = view(x, writable=False, what="send: x")
        posted = self._post("post_send", dest, tag, source, async_op or self._group is not None)
        return self._finish_transfers([posted], lambda: None, (x, source), async_op)

    def recv(self, out: Any, source: int, tag: int = 0, *, async_op: bool = False) -> Any:
        """Receives into `out` what rank `source` sends with `tag`; count and dtype must match.
        Returns out.

        Raises MismatchError if the message has another length or dtype; it is dropped then.
        """
        target = view(out, writable=True, what="recv: out")
        posted = self._post("post_recv", source, tag, target, async_op or self._group is not None)
        return self._finish_transfers([posted], lambda: out, (out, target), async_op)

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
    ) -> Any:
        """Sends x to `dest` and receives `out` from `source` at the same time: never a deadlock.
        Returns out.
        """
        outgoing = view(x, writable=False, what="sendrecv: x")
        incoming = view(out, writable=True, what="sendrecv: out")
        if overlap(outgoing, incoming) != "none":
            raise ArrayError("sendrecv: x and out share memory; pass two arrays")
        background = async_op or self._group is not None
        posted = [
            self._post("post_recv", source, recv_tag, incoming, background),
            self._post("post_send", dest, send_tag, outgoing, background),
        ]
        return self._finish_transfers(posted, lambda: out, (x, out, outgoing, incoming), async_op)

    def _post(self, method: str, peer: int, tag: int, v: View, background: bool) -> Any:
        self._check_open()
        peer, tag = integer(peer, "the peer's rank"), integer(tag, "tag")
        if not 0 <= peer < self.size:
            raise ValueError(f"rank {peer} is out of range: ranks are 0 to {self.size - 1}")
        if not 0 <= tag < 1 << 32:
            raise ValueError(f"tag {tag} is out of range: 0 to 2**32 - 1")
        return getattr(self._core, method)(
            peer, tag, DTYPES[v.dtype], v.pointer, v.nbytes, background
        )

    def _finish_transfers(
        self, posted: list[Any], result: Callable[[], Any], keep: tuple[Any, ...], async_op: bool
    ) -> Any:
        if self._group is None and not async_op:
            self._core.wait(posted)
            return result()
        work = TransferWork(self._core, posted, result, self._in_flight, keep)
        return work if self._group is None else self._group.add_transfers(work)
