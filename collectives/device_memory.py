"""Symmetric buffers and registered arrays on GPUs: mapped into all ranks, so that kernels work in
the peers' arrays and nothing is staged.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from . import _core
from .array import dtype_name
from .array.dtypes import numpy_dtype, torch_dtype
from .errors import (
    ArrayError,
    ArrayTypeError,
    ClosedError,
    CollectiveError,
    UnsupportedError,
    did_you_mean,
)
from .registration import Registration
from .symmetric import LARGEST

if TYPE_CHECKING:
    from .array import View
    from .device import DeviceEngine

KINDS = ("cupy", "torch")


class _Owner:
    """Bytes in device memory, with the core that they belong to."""

    def __init__(self, core: _core.DeviceCommunicator, pointer: int, nbytes: int) -> None:
        self._core = core
        self.pointer, self.nbytes = pointer, nbytes
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
        }


class DeviceMemory:
    """The symmetric buffers and registered arrays of one communicator, numbered alike on all ranks.

    A buffer lives as long as its array on any rank, since CUDA leaves undefined what becomes of
    memory that is freed while another process has it mapped; and after it until the next one is
    made or the communicator is closed: freeing waits for the GPU, which must not happen in the
    middle of a call. (One whose array is kept for longer than that ends with the process, or when
    another communicator is made.)
    """

    def __init__(self, engine: DeviceEngine) -> None:
        self._engine = engine
        self._numbers = itertools.count(1)
        self._dropped: list[int] = []  # buffers whose array is gone
        self._registered: dict[int, Registration] = {}
        self._places: dict[int, tuple[int, int]] = {}  # of these: address and bytes

    def empty(self, shape: Sequence[int], dtype: Any, kind: str | None) -> Any:
        """What `Communicator.empty` says, on this rank's GPU. Collective."""
        engine, name = self._engine, dtype_name(dtype)
        kind = _library(kind)
        if any(n < 0 for n in shape):
            raise ValueError(f"shape {tuple(shape)} has negative lengths")
        nbytes = math.prod(shape) * _core.itemsizes[name]
        room = max(nbytes, 1)
        number, pointer = self._open(nbytes, room)
        owner = _Owner(engine.core, pointer, room)
        weakref.finalize(owner, self._dropped.append, number).atexit = False
        make = _cupy_array if kind == "cupy" else _torch_tensor
        return make(owner, shape, name, engine.device)

    def _open(self, nbytes: int, room: int) -> tuple[int, int]:
        """The number and address of a new buffer, that all ranks have mapped; raises on all if one
        cannot.
        """
        core, mine = self._engine.core, {"bytes": nbytes, "handle": "", "why": ""}
        number, pointer, why = 0, 0, ""
        try:
            if nbytes > LARGEST:
                raise ArrayError(f"{nbytes} bytes are more than any machine addresses")
            mine["handle"] = core.make_segment(room)
        except ClosedError:  # in a forked child, say, which is no rank
            raise
        except CollectiveError as error:  # the others are told, rather than left to wait
            mine["why"] = str(error)
        try:
            answers = self._ask({**mine, "dropped": sorted(self._dropped)})
            _raise_reasons(answers)
            if len({a["bytes"] for a in answers}) > 1:
                words = ", ".join(f"rank {r}: {a['bytes']} bytes" for r, a in enumerate(answers))
                raise ArrayError(f"empty: the ranks ask for different sizes ({words})")
            number = next(self._numbers)  # all ranks have come here
            try:
                pointer = core.open_segment(number, [a["handle"] for a in answers])
            except CollectiveError as error:
                why = str(error)
            for dropped in set.intersection(*(set(a["dropped"]) for a in answers)):
                self._dropped.remove(dropped)
                core.release_segment(dropped)
            _raise_reasons(self._ask({"why": why}))
        except CollectiveError:
            core.release_segment(number)
            raise
        return number, pointer

    def release_dropped(self) -> None:
        """Frees buffers whose arrays are gone on this rank: the communicator is being closed."""
        for number in self._dropped:
            self._engine.core.release_segment(number)
        self._dropped.clear()

    def register(self, array: Any, seen: View) -> Registration:
        """What `Communicator.register` says. Collective."""
        engine, nbytes = self._engine, seen.nbytes
        handle, why = "", ""
        try:
            handle, why = engine.core.export_array(seen.pointer, nbytes)
        except ClosedError:
            raise
        except CollectiveError as error:  # the others are told, rather than left to wait
            why = str(error)
        begin, end = seen.pointer, seen.pointer + nbytes
        meets = [
            [number, begin - there]
            for number, (there, size) in sorted(self._places.items())
            if there < end and begin < there + size
        ]
        answers = self._ask({"bytes": nbytes, "handle": handle, "why": why, "meets": meets})
        if len({a["bytes"] for a in answers}) > 1:
            words = ", ".join(f"rank {r}: {a['bytes']} bytes" for r, a in enumerate(answers))
            raise ArrayError(f"register: the ranks pass arrays of different sizes ({words})")
        if any(a["meets"] != meets for a in answers):
            raise ArrayError(
                "register: the array overlaps others that are registered, and not alike on all "
                "ranks (" + "; ".join(_overlap(r, a["meets"]) for r, a in enumerate(answers)) + ")"
            )
        number, why = next(self._numbers), _reasons(answers)
        if not why:
            mine = ""
            try:
                engine.core.open_array(number, nbytes, [a["handle"] for a in answers])
            except CollectiveError as error:
                mine = str(error)
            why = _reasons(self._ask({"why": mine}))
            if why:
                engine.core.release_segment(number)
        made = Registration(self, number, array, nbytes, why)
        if not why:
            self._registered[number] = made
            self._places[number] = (seen.pointer, nbytes)
        return made

    def release(self, number: int, together: bool) -> None:
        """Unmaps a registered array; returns when all ranks have, if they do it together."""
        self._places.pop(number, None)
        if self._registered.pop(number, None) is None:
            return
        self._engine.core.release_segment(number)
        if together:
            self._engine.gather(b"")

    def forget(self) -> None:
        """The communicator is closed, and what was registered unmapped."""
        for made in self._registered.values():
            made.forget("the communicator is closed")
        self._registered.clear()

    def _ask(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        return [json.loads(b) for b in self._engine.gather(json.dumps(mine).encode())]


class NoSymmetricMemory:
    """Stands for the symmetric buffers of GPUs, which reach no other node."""

    def empty(self, shape: Sequence[int], dtype: Any, kind: str | None) -> NoReturn:
        raise UnsupportedError(
            "empty: a symmetric buffer on GPUs is mapped into all ranks, and these are on several "
            "nodes; use an array of your library, or a communicator of one node "
            "(split(by='node'))"
        )

    def register(self, array: Any, seen: View) -> Registration:
        """Arrays are staged whether they are registered or not."""
        why = "the ranks are on several nodes, between which arrays are staged"
        return Registration(self, 0, array, seen.nbytes, why)

    def release(self, number: int, together: bool) -> None:
        """Nothing is mapped."""

    def release_dropped(self) -> None:
        """Nothing is mapped."""

    def forget(self) -> None:
        """Nothing is mapped."""


def _reasons(answers: Sequence[dict[str, Any]]) -> str:
    return "; ".join(f"rank {r}: {a['why']}" for r, a in enumerate(answers) if a["why"])


def _overlap(rank: int, meets: list[list[int]]) -> str:
    words = ", ".join(f"no. {number} from byte {at} on" for number, at in meets)
    return f"rank {rank}: {words or 'none'}"


def _raise_reasons(answers: Sequence[dict[str, Any]]) -> None:
    words = _reasons(answers)
    if words:
        raise CollectiveError(f"empty: no symmetric buffer, on any rank: {words}")


def _library(kind: str | None) -> str:
    """The array library that a buffer is for: the one that was asked for, else that is in use."""
    if kind is None:
        kind = next((k for k in KINDS if k in sys.modules), "")
        if not kind:
            raise UnsupportedError("empty: import cupy or torch first, whose array this will be")
    if kind not in KINDS:
        raise ArrayTypeError(f"unknown kind of device array {kind!r}; {did_you_mean(kind, KINDS)}")
    if kind not in sys.modules:
        raise UnsupportedError(f"kind={kind!r}, but {kind} is not imported: import it first")
    return kind


def _cupy_array(owner: _Owner, shape: Sequence[int], dtype: str, device: int) -> Any:
    cupy = sys.modules["cupy"]
    memory = cupy.cuda.UnownedMemory(owner.pointer, owner.nbytes, owner, device)
    return cupy.ndarray(tuple(shape), numpy_dtype(dtype), cupy.cuda.MemoryPointer(memory, 0))


def _torch_tensor(owner: _Owner, shape: Sequence[int], dtype: str, device: int) -> Any:
    torch = sys.modules["torch"]
    raw = torch.as_tensor(owner, device=f"cuda:{device}")
    nbytes = math.prod(shape) * _core.itemsizes[dtype]
    return raw[:nbytes].view(torch_dtype(torch, dtype)).reshape(tuple(shape))
