"""For tests of messages between GPUs: what is sent, and memory that shows what else was written."""

from __future__ import annotations

import numpy as np
from on_device import Array, DeviceArray, OnDevice

from collectives.array import numpy_dtype

GUARD = 64


class Box:
    """Arrays in a rank's memory on the GPU, one behind the other, with guard bytes around them."""

    def __init__(self, comm: OnDevice) -> None:
        self.comm = comm
        self.at = 0
        self.guards: list[tuple[int, int]] = []

    def put(self, values: Array, shift: int = 0) -> DeviceArray:
        """A copy on the GPU, `shift` bytes behind an address that is a multiple of 256."""
        whole = np.full(values.nbytes + 2 * GUARD, 0xA5, np.uint8)
        whole[GUARD : GUARD + values.nbytes] = values.reshape(-1).view(np.uint8)
        base = self.comm.memory.ptr + self.at + shift
        self.at += (whole.nbytes + shift + 511) // 256 * 256
        assert self.at <= 48 << 20
        self.comm.copy(base, whole.ctypes.data, whole.nbytes, 1)
        self.guards.append((base, whole.nbytes))
        stream = self.comm.stream.ptr
        return DeviceArray(base + GUARD, values, stream, self.comm.device)

    def empty(self, like: Array, shift: int = 0) -> DeviceArray:
        return self.put(np.full(like.shape, 0x5A, np.uint8).repeat(like.itemsize).view(like.dtype),
                        shift)  # fmt: skip

    def get(self, array: DeviceArray) -> Array:
        where = array.__cuda_array_interface__
        values = np.empty(where["shape"], array.dtype)
        self.comm.copy(values.ctypes.data, where["data"][0], values.nbytes, 2)
        return values

    def check_guards(self) -> None:
        for base, nbytes in self.guards:
            for at in (base, base + nbytes - GUARD):
                guard = np.empty(GUARD, np.uint8)
                self.comm.copy(guard.ctypes.data, at, GUARD, 2)
                assert (guard == 0xA5).all(), "bytes beside an array were written"


def message(source: int, to: int, count: int, dtype: str = "uint8", number: int = 0) -> Array:
    """What rank `source` sends to rank `to`; any bytes, and others for each number."""
    seed = (source * 17 + to) * 1000 + number
    itemsize = numpy_dtype(dtype).itemsize
    raw = np.random.default_rng(seed).integers(0, 256, count * itemsize, np.uint8)
    return raw.view(numpy_dtype(dtype))


def same(got: Array, wanted: Array) -> bool:
    return got.tobytes() == wanted.tobytes()
