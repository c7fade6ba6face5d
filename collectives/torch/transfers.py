"""Sends and receives of a process group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from .base import BaseGroup
from .tensors import Call, Tensor, dense, moved
from .work import TransferHandle, TransferWork

ANY = -1


class Transfers(BaseGroup):
    """They are matched by rank and tag, so it does not matter which thread makes them, nor when."""

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int = 0) -> dist.Work:
        tensor = _one(tensors)
        held = dense(tensor if tensor.is_cpu else tensor.detach().cpu())
        number, _ = moved(held)
        posted = self._main.comm._core.post_send(
            self._peer(dst), self._tag(tag), number, held.data_ptr(), held.nbytes, True
        )
        return self._under_way(posted, [tensor], None, (tensors, held))

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int = 0) -> dist.Work:
        return self._recv(tensors, self._peer(src), tag)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> dist.Work:
        """Takes the first message with the tag from any rank; `source_rank` says whose it was."""
        return self._recv(tensors, ANY, tag)

    def _recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> dist.Work:
        tensor = _one(tensors)
        landing = tensor if tensor.is_cpu else tensor.detach().cpu()
        call = Call(landing)
        held = call.target(landing)
        if landing is not tensor:
            call.after.append(lambda: tensor.detach().copy_(landing))
        number, _ = moved(held)
        posted = self._main.comm._core.post_recv(
            peer, self._tag(tag), number, held.data_ptr(), held.nbytes, True
        )
        return self._under_way(posted, [tensor], call.finish, (tensors, held, landing))

    def _under_way(self, posted: Any, outputs: Any, finish: Any, keep: Any) -> dist.Work:
        handle = TransferHandle(self._main.comm._core, posted)
        # What is under way is kept, whether or not anybody holds the work.
        self._moving = [(h, k) for h, k in self._moving if not h.done()]
        self._moving.append((handle, keep))
        return self._note(TransferWork([handle], outputs, finish, keep, self, key=0))

    def _peer(self, rank: int) -> int:
        if not 0 <= rank < self._size:
            raise ValueError(f"rank {rank} is out of range: ranks are 0 to {self._size - 1}")
        return rank

    @staticmethod
    def _tag(tag: int) -> int:
        if not 0 <= tag < 1 << 32:
            raise ValueError(f"tag {tag} is out of range: 0 to 2**32 - 1")
        return tag


def _one(tensors: Sequence[Tensor]) -> Tensor:
    if len(tensors) != 1:
        raise ValueError(f"one tensor can be sent or received at a time, not {len(tensors)}")
    return tensors[0]
