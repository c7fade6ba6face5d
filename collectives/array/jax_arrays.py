"""Arrays of jax."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..errors import ArrayError, ArrayTypeError, UnsupportedError
from .dtypes import name_of_numpy
from .kind import Kind
from .memory import address
from .views import View, no_gpu_error, readonly_error, strides_error

_CUDA = ("gpu", "cuda")  # what jax calls the platform


def _ordinal(device: Any) -> int:
    """Number of a jax device in this process, as CUDA counts."""
    local = getattr(device, "local_hardware_id", None)
    return int(device.id if local is None else local)


class _Gpu(NamedTuple):
    """A GPU by its number in this process, as cupy names it."""

    id: int


class Fresh:
    """A jax array on a GPU that nobody has seen yet, so that it may be written once."""

    def __init__(self, array: Any, ordinal: int) -> None:
        self.array = array
        self.dtype = array.dtype
        self.device = _Gpu(ordinal)
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": tuple(array.shape),
            "typestr": f"|V{array.dtype.itemsize}",  # `dtype` says which
            "data": (array.unsafe_buffer_pointer() if array.size else 0, False),
            "strides": None,
            "stream": None,
        }


class Jax(Kind):
    name = "jax"

    def __init__(self, jax: Any) -> None:
        self.jax = jax

    def view(self, x: Any, writable: bool, what: str, gpu: bool) -> View:
        if isinstance(x, self.jax.core.Tracer):
            raise ArrayTypeError(
                f"{what}: a jax array inside jit, grad or vmap has no values yet; call the "
                "collective outside, or through jax.experimental.io_callback"
            )
        if not isinstance(x.dtype, np.dtype):
            raise ArrayTypeError(
                f"{what}: dtype {x.dtype} holds random keys of jax, which are no numbers; pass "
                "jax.random.key_data(x), and wrap_key_data(...) of what comes back"
            )
        if writable:
            raise readonly_error(
                what, "jax arrays are immutable: use the array that the collective returns"
            )
        if x.is_deleted():
            raise ArrayError(f"{what}: this jax array was deleted or donated")
        devices = x.devices()
        if len(devices) != 1 or not x.is_fully_addressable:
            raise ArrayError(
                f"{what}: this jax array is spread over {len(devices)} devices; pass one shard of "
                "it: x.addressable_shards[i].data"
            )
        device = next(iter(devices))
        if device.platform != "cpu":
            return self._on_gpu(x, device, what, gpu)
        # On the host this waits for the value and wraps the same memory (jax keeps the wrapper for
        # the next time).
        array = np.asarray(x)
        dtype = name_of_numpy(array.dtype, what)
        if not array.flags.c_contiguous:
            raise strides_error(what, array.strides, array.shape, "jax.numpy.array(x, copy=True)")
        return View(address(array), array.size, dtype, array.shape, True, "jax", (x, array))

    def _on_gpu(self, x: Any, device: Any, what: str, gpu: bool) -> View:
        """jax puts its work on streams of its own and tells of none, so this waits for the value.
        (`__cuda_array_interface__` would too, and lacks bfloat16 and float8.)
        """
        if device.platform not in _CUDA:
            raise UnsupportedError(
                f"{what}: the jax array is on {device.platform}:{device.id}, which is no CUDA GPU; "
                "pass a copy on the host: numpy.asarray(x)"
            )
        place = f"cuda:{_ordinal(device)}"
        if not gpu:
            raise no_gpu_error(what, place)
        dtype = name_of_numpy(x.dtype, what)
        x.block_until_ready()
        pointer = x.unsafe_buffer_pointer() if x.size else 0
        return View(pointer, x.size, dtype, tuple(x.shape), True, "jax", x, place, None)

    def new_like(self, x: Any, shape: tuple[int, ...]) -> Any:
        device = next(iter(x.devices()))
        if device.platform == "cpu":
            return super().new_like(x, shape)
        array = self.jax.numpy.empty(shape, x.dtype, device=x.sharding)
        return Fresh(array.block_until_ready(), _ordinal(device))

    def immutable(self, x: Any) -> bool:
        return True

    def finish(self, x: Any, buffer: Any) -> Any:
        if isinstance(buffer, Fresh):
            return buffer.array
        return self.jax.device_put(buffer, x.sharding, may_alias=True)
