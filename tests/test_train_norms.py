"""What the kernel of norms is given, on a stand-in for cupy whose kernels are loops on the host."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from collectives.train import norms, norms_on_gpu
from collectives.train.fixed_point import CHUNK, LIMBS
from collectives.train.norms import Spans, exact, sums_of_squares, whole


class Array:
    """An array of cupy, as far as norms look at it, in memory of the host."""

    def __init__(self, values: np.ndarray[Any, Any], ordinal: int = 0) -> None:
        self.held = values
        self.size, self.dtype, self.itemsize = values.size, values.dtype, values.itemsize
        self.data = SimpleNamespace(ptr=values.ctypes.data, device_id=ordinal)

    def get(self) -> np.ndarray[Any, Any]:
        return self.held


class Device:
    current = -1
    asked: ClassVar[list[int]] = []

    def __init__(self, ordinal: int) -> None:
        self._ordinal = ordinal

    @property
    def attributes(self) -> dict[str, int]:
        Device.asked.append(self._ordinal)
        return {"MultiProcessorCount": 2}

    def __enter__(self) -> Device:
        Device.current = self._ordinal
        return self

    def __exit__(self, *_: object) -> None:
        Device.current = -1


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Launches of the kernel are noted in `launched`: the GPU, the blocks and the rows."""
    launched: list[tuple[int, int, np.ndarray[Any, Any]]] = []

    def kernel(name: str) -> Any:
        dtype = np.dtype(name)

        def launch(grid: tuple[int], block: tuple[int], arguments: tuple[Any, ...]) -> None:
            rows, count, chunks, table = arguments
            assert len(rows.held) == count
            first = 0
            for pointer, size, group, at in rows.held.tolist():
                assert at == first and size > 0
                first += -(-size // CHUNK)
                raw = (ctypes.c_char * (size * dtype.itemsize)).from_address(pointer)
                sums = norms.chunk_squares(np.frombuffer(raw, dtype))
                table.held += exact(sums, np.full(sums.size, group), len(table.held))
            assert first == chunks
            launched.append((Device.current, grid[0], rows.held))

        return launch

    stand_in = SimpleNamespace(
        cuda=SimpleNamespace(Device=Device),
        zeros=lambda shape, dtype: Array(np.zeros(shape, dtype)),
        asarray=Array,
        launched=launched,
    )
    monkeypatch.setitem(sys.modules, "cupy", stand_in)
    monkeypatch.setattr(norms_on_gpu, "_kernel", kernel)
    norms_on_gpu._most_blocks.cache_clear()
    Device.asked.clear()
    yield stand_in
    norms_on_gpu._most_blocks.cache_clear()


def spans(values: Any, lengths: list[int]) -> Spans:
    """Parts that lie behind each other, each in a group of its own."""
    ends = np.cumsum(lengths)
    return Spans(values, ends - lengths, ends, np.arange(len(lengths)))


def test_parts_of_arrays_on_several_gpus(cupy: SimpleNamespace) -> None:
    """Of two dtypes and GPUs, with empty parts among them: what the host has of the same values."""
    random = np.random.default_rng(3)
    lengths = [CHUNK + 1, 0, 5, 3 * CHUNK]
    values = [
        random.normal(size=sum(lengths)).astype(dtype)
        for dtype in ("float32", "float32", "float64")
    ]
    there = [spans(Array(x, gpu), lengths) for x, gpu in zip(values, (0, 0, 1), strict=True)]
    found = sums_of_squares(there, 4, None)
    assert (found == sums_of_squares([spans(x, lengths) for x in values], 4, None)).all()
    assert found[1] == 0
    assert [(gpu, blocks, len(rows)) for gpu, blocks, rows in cupy.launched] == [
        (0, 8, 6),
        (1, 6, 3),
    ]
    sums_of_squares(there, 4, None)
    assert Device.asked == [0, 1]  # once each


def test_nothing_on_a_gpu(cupy: SimpleNamespace) -> None:
    """A rank whose shard is empty still has its table."""
    empty = Array(np.empty(0, np.float32))
    assert (norms_on_gpu.exact_squares([whole(empty, 0)], 2) == np.zeros((2, LIMBS + 1))).all()
    none = np.empty(0, np.int64)
    assert sums_of_squares([Spans(empty, none, none, none)], 1, None) == [0]
    assert cupy.launched == []


def test_parts_on_the_host_are_summed_by_group() -> None:
    x = np.arange(2.0 * CHUNK + 3)
    at = np.array([0, CHUNK, x.size])
    cut = Spans(x, at[:-1], at[1:], np.array([0, 0]))
    assert sums_of_squares([cut], 1, None) == sums_of_squares([whole(x, 0)], 1, None)
    apart = Spans(x, at[:-1], at[1:], np.array([1, 0]))
    assert (
        sums_of_squares([apart], 2, None)[::-1] == [(x[:CHUNK] ** 2).sum(), (x[CHUNK:] ** 2).sum()]
    ).all()
