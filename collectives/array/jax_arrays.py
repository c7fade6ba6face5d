"""Arrays of jax."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import ArrayError, ArrayTypeError
from .device import cuda_view
from .dtypes import name_of_numpy
from .kind import Kind
from .memory import address
from .views import View, readonly_error, strides_error


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
            return cuda_view(x, writable, what, gpu, f"{device.platform}:{device.id}")
        # On the host this waits for the value and wraps the same memory (jax keeps the wrapper for
        # the next time).
        array = np.asarray(x)
        dtype = name_of_numpy(array.dtype, what)
        if not array.flags.c_contiguous:
            raise strides_error(what, array.strides, array.shape, "jax.numpy.array(x, copy=True)")
        return View(address(array), array.size, dtype, array.shape, True, "jax", (x, array))

    def immutable(self, x: Any) -> bool:
        return True

    def finish(self, x: Any, buffer: Any) -> Any:
        return self.jax.device_put(buffer, x.sharding, may_alias=True)
