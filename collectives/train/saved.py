"""What autograd saves in the forward of a module, under stage 3: parameters are gathered again when
backward asks for them, whatever the module returns, and wherever it leaves what it has computed.

A saved parameter, or a view of it, is kept as it is: it has no memory in between, like all that
lies where it does. Cost: 3 us of the host for each tensor that is saved in such a forward, 2 of
them there (one core of a Xeon).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

_autograd: Any = torch._C._autograd


class _Saved(NamedTuple):
    """bucket: where the tensor lies, if it is of parameters."""

    tensor: torch.Tensor
    version: int
    bucket: int | None


class _Theirs(NamedTuple):
    """What other hooks have packed."""

    unpack: Callable[[Any], torch.Tensor]
    packed: Any


class Saving:
    """Hooks for what autograd saves between `begin` and `end`.

    bucket_of  the bucket in whose memory a tensor lies, None if it is none
    fetch      fetch(bucket, tensor) gathers the bucket, in which a saved tensor lies
    """

    def __init__(
        self,
        bucket_of: Callable[[torch.Tensor], int | None],
        fetch: Callable[[int, torch.Tensor], None],
    ) -> None:
        self.bucket_of = bucket_of
        self.fetch = fetch
        self._alone = _Hooks(self, None)

    def begin(self) -> bool:
        """False if nothing is to be ended: these hooks are set, or none may be (by torch.func)."""
        if not _autograd._saved_tensors_hooks_is_enabled():
            return False
        hooks = self._alone
        # Others, such as those of activation checkpointing, get all that is not of parameters.
        top = _autograd._top_saved_tensors_default_hooks(True)
        if top is not None:
            owner = getattr(top[0], "__self__", None)
            if isinstance(owner, _Hooks) and owner.saving is self:
                return False
            hooks = _Hooks(self, top)
        hooks.both.__enter__()
        return True

    def end(self) -> None:
        """Sets the hooks that were there before."""
        self._alone.both.__exit__()


class _Hooks:
    """below: the hooks that are set already."""

    def __init__(
        self,
        saving: Saving,
        below: tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None,
    ) -> None:
        self.saving = saving
        self._below = below
        self.both = saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> Any:
        bucket = self.saving.bucket_of(tensor)
        if bucket is None and self._below is not None:
            pack, unpack = self._below
            return _Theirs(unpack, pack(tensor))
        # Not the tensor: it may be an output of the node that saves it, and keep that alive.
        return _Saved(tensor.detach(), tensor._version, bucket)

    def _unpack(self, saved: Any) -> torch.Tensor:
        if isinstance(saved, _Theirs):
            return saved.unpack(saved.packed)
        tensor, version, bucket = saved
        if tensor._version != version:  # with hooks set, torch does not look
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a {tensor.dtype} of shape {tuple(tensor.shape)} is at version "
                f"{tensor._version}; expected version {version} instead"
            )
        if bucket is not None:
            self.saving.fetch(bucket, tensor)
        return tensor
