"""Sends and receives of a process group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ..errors import UnsupportedError
from ..work import Held
from .base import BaseGroup
from .moving import MovedWork
from .profiling import shown
from .tensors import Call, Tensor, dense, expect_strided, moved, with_memory
from .work import TransferHandle, TransferWork

if TYPE_CHECKING:
    from .. import _core

ANY = -1
_TITLES = {True: "send", False: "recv"}


class Transfers(BaseGroup):
    """On the host they are matched by rank and tag, so it does not matter which thread makes them,
    nor when.

    CUDA tensors go from GPU to GPU where the ranks' GPU engine is set up, which the first
    collective on CUDA tensors does: on the group's side stream, matched in order (see
    `PointToPoint`). Else, between nodes, and from then on if one of the ranks has sent or received
    CUDA tensors before that, they go by way of the host.
    """

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int = 0) -> dist.Work:
        tensor, peer, tag = _one(tensors), self._peer(dst), self._tag(tag)
        if self._from_gpu(tensor):
            call = Call(tensor)
            return self._move(True, peer, tag, call, call.source(tensor), tensor)
        expect_strided(tensor)
        held = dense(with_memory(tensor) if tensor.is_cpu else tensor.detach().cpu())
        number, _ = moved(held)
        message = (True, peer, tag, number, held.data_ptr(), held.nbytes)
        return self._post(message, [tensor], None, (tensors, held))

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int = 0) -> dist.Work:
        tensor, peer, tag = _one(tensors), self._peer(src), self._tag(tag)
        if self._from_gpu(tensor):
            call = Call(tensor)
            return self._move(False, peer, tag, call, call.target(tensor), tensor)
        return self._recv(tensor, peer, tag)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> dist.Work:
        """Takes the first message with the tag from any rank; `source_rank` says whose it was.

        Always by way of the host. Raises UnsupportedError for a CUDA tensor where those go from GPU
        to GPU, since what is sent that way would not come here.
        """
        tensor, tag = _one(tensors), self._tag(tag)
        if self._from_gpu(tensor):
            raise UnsupportedError(
                "recv from any rank into a CUDA tensor: CUDA tensors go from GPU to GPU here, "
                "where a receive is for one rank; name the rank, or send and receive CPU tensors",
                rank=self._rank,
            )
        return self._recv(tensor, ANY, tag)

    def _recv(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        landing = tensor if tensor.is_cpu else tensor.detach().cpu()
        call = Call(landing)
        held = call.target(landing)
        if landing is not tensor:
            call.after.append(lambda: tensor.detach().copy_(landing))
        number, _ = moved(held)
        message = (False, peer, tag, number, held.data_ptr(), held.nbytes)
        return self._post(message, [tensor], call.finish, (tensor, held, landing))

    def _from_gpu(self, tensor: Tensor) -> bool:
        """Does it go from GPU to GPU? If it does not, though it is there, the ranks hear of that
        when they set their engines up.
        """
        if not tensor.is_cuda:
            return False
        comm = self._main.comm
        if comm._device is not None and comm._device.moves:
            return True
        comm._moved_by_host = True
        return False

    def _move(
        self, sends: bool, peer: int, tag: int, call: Call, held: Tensor, tensor: Tensor
    ) -> dist.Work:
        number, times = moved(held)
        work = MovedWork([tensor], call.device, peer)
        transfer = (sends, peer, tag, number, held.data_ptr(), held.numel() * times)
        with shown(_TITLES[sends]):
            if self._on_gpu.add(transfer, work, call.finish, call.keep):
                self._on_gpu.go(self._main, self._sides, call.device)
        return self._note(work)

    def _post(
        self, message: _core.Message, outputs: Any, finish: Any, keep: tuple[Any, ...]
    ) -> dist.Work:
        """What it needs is kept until it is done, whether or not anybody holds the work."""
        held = Held(keep)
        self._main.hold_moving(held)
        core = self._main.comm._core
        with shown(_TITLES[message[0]]):
            handle = TransferHandle(core, core.post(message, True))
        held.done = handle.done
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
