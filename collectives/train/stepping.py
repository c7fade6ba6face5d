"""The optimizer's step on this rank's shards.

What is kept in 16 bits is computed with in float32, and rounded once when it is written back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from ..array import dtype_name, namespace
from .fused import on_gpu, run
from .norms import sums_of_squares, whole
from .optimizers import LAMB, Optimizer
from .precision import wide_dtype
from .sharding import Piece, Shard, Store, host

if TYPE_CHECKING:
    from ..work import Work

# Elements that are stepped at a time, so that their arrays stay in the cache. AdamW on 10.3 million
# float32 in blocks of 4, 8, 16, 32, 64 Ki took 43, 37, 33, 30, 28 ms (one core, Xeon).
_BLOCK = 64 * 1024


class _Run:
    """Neighbouring pieces of a shard that one optimizer steps and that were left alone in as many
    steps (`missed`), and views of what it steps.
    """

    def __init__(
        self, shard: Shard, low: int, high: int, optimizer: Optimizer, missed: int
    ) -> None:
        self.low, self.high, self.optimizer = low, high, optimizer
        self.missed = missed
        self.master, self.grad = shard.master[low:high], shard.grad[low:high]
        self.state = {k: v[low:high] for k, v in shard.state.items()}
        self.used = None if shard.used is shard.master else shard.used[low:high]


class _How(NamedTuple):
    """One step, for all shards: see `Stepper.step`; `step` counts from 1."""

    coefficient: float
    step: int
    factor: float


class Stepper:
    """Steps shards with optimizers.

    optimizers  of one kind, with the settings of each parameter group
    number      which of them steps which parameter
    missed      steps in which a parameter was left alone; its bias corrections count the others
    """

    def __init__(
        self, store: Store, optimizers: Sequence[Optimizer], number: Mapping[str, int]
    ) -> None:
        self._store = store
        self._optimizers = optimizers
        self._number = number
        self.missed: dict[str, int] = {}
        self._all_runs: WeakKeyDictionary[Shard, list[_Run]] = WeakKeyDictionary()

    @property
    def lr(self) -> float:
        """Of the first group."""
        return self._optimizers[0].lr

    def build(self) -> None:
        """The store was laid out anew, or `missed` set; nothing is kept of the old one."""
        self._all_runs.clear()

    def step(self, updates: int, factor: float, coefficient: float, unused: frozenset[str]) -> None:
        """One step, and its result in the parameters of all ranks. Collective over the ranks that
        share.

        updates      steps that were taken before
        factor       of the learning rate
        coefficient  by which gradients are multiplied
        unused       parameters to be left alone
        """
        step = updates + 1
        how = _How(coefficient, step, factor)
        works: list[Work | None] = []
        if self._optimizers[0].layerwise:
            self._layerwise(coefficient, unused, step, factor)
            works = [self._store.publish(shard) for shard in self._store.shards]
        else:
            for shard in self._store.shards:
                gpu = on_gpu(shard.master, shard.grad)
                for part in self._runs(shard, unused):
                    own = how._replace(step=step - part.missed)
                    (self._on_gpu if gpu else self._on_host)(shard, part, own)
                # Travels while the next one is stepped.
                works.append(self._store.publish(shard, rounded=gpu))
        for work in works:
            if work is not None:
                work.wait()
        if unused:  # the same on all ranks
            self.missed |= {name: self.missed.get(name, 0) + 1 for name in unused}
            self._all_runs.clear()

    def _on_gpu(self, shard: Shard, part: _Run, how: _How) -> None:
        name, numbers = part.optimizer.on_gpu(part.optimizer.lr * how.factor, how.step)
        kept = part.state if "velocity" not in part.state or "momentum" in numbers else {}
        run(name, part.master, part.grad, how.coefficient, kept, numbers, part.used)

    def _on_host(self, shard: Shard, part: _Run, how: _How) -> None:
        low, high, optimizer = part.low, part.high, part.optimizer
        lr = optimizer.lr * how.factor
        if optimizer.fused(part.master, part.grad, how.coefficient, part.state, lr, how.step):
            return
        scratch = [_like(part.master[:_BLOCK]) for _ in "gw"]
        for at in range(low, high, _BLOCK):
            end = min(high, at + _BLOCK)
            g, work = (x[: end - at] for x in scratch)
            self._gradient(shard, at, end, how.coefficient, g)
            kept = {k: v[at:end] for k, v in shard.state.items()}
            with _computed(shard.master[at:end], kept) as (w, state):
                # In one pass where only the dtype was in the way of that.
                if not optimizer.fused(w, g, 1.0, state, lr, how.step):
                    optimizer.update(w, g, state, lr, how.step, work)

    def _gradient(self, shard: Shard, low: int, high: int, coefficient: float, out: Any) -> None:
        """A part of the gradient in the dtype of `out`, unscaled and clipped."""
        grad = shard.grad[low:high]
        if self._store.offload:
            grad = host(grad)
        if grad.dtype == out.dtype:
            namespace(out).multiply(grad, coefficient, out=out)
        else:
            out[...] = grad
            out *= coefficient

    def _runs(self, shard: Shard, unused: frozenset[str]) -> list[_Run]:
        """Neighbouring pieces with one optimizer, as one."""
        if not unused and shard in self._all_runs:
            return self._all_runs[shard]
        ends: list[tuple[int, int, Optimizer, int]] = []
        for piece in shard.pieces:
            if piece.name in unused:
                continue
            like = self._optimizers[self._number[piece.name]], self.missed.get(piece.name, 0)
            if ends and ends[-1][1] == piece.low and ends[-1][2:] == like:
                ends[-1] = (ends[-1][0], piece.high, *like)
            else:
                ends.append((piece.low, piece.high, *like))
        runs = [_Run(shard, *end) for end in ends]
        if not unused:
            self._all_runs[shard] = runs
        return runs

    def _layerwise(
        self, coefficient: float, unused: frozenset[str], step: int, factor: float
    ) -> None:
        """LARS and LAMB: directions, then norms of whole parameters, then steps."""
        number = {name: i for i, name in enumerate(self._number)}
        held: list[tuple[Piece, Any, Any, dict[str, Any]]] = []
        parts = []
        for shard, piece in self._store.pieces():
            if piece.name in unused:
                continue
            optimizer = self._optimizers[self._number[piece.name]]
            own = step - self.missed.get(piece.name, 0)
            w = shard.master[piece.low : piece.high]
            g, work = (_like(w) for _ in "gw")
            state = {k: v[piece.low : piece.high] for k, v in shard.state.items()}
            if isinstance(optimizer, LAMB) and on_gpu(w, shard.grad):
                name, numbers = optimizer.direction_on_gpu(own)
                grad = shard.grad[piece.low : piece.high]
                run(name, w, grad, coefficient, state | {"direction": g}, numbers)
            else:
                self._gradient(shard, piece.low, piece.high, coefficient, g)
                with _computed(w, state) as (wide, moments):
                    optimizer.direction(wide, g, moments, own, work)
            held.append((piece, w, g, state))
            parts += [whole(w, 2 * number[piece.name]), whole(g, 2 * number[piece.name] + 1)]
        norms = np.sqrt(sums_of_squares(parts, 2 * len(number), self._store.comm))
        for piece, w, g, state in held:
            optimizer = self._optimizers[self._number[piece.name]]
            i = number[piece.name]
            ratio = optimizer.trust(float(norms[2 * i]), float(norms[2 * i + 1]))
            lr = optimizer.lr * factor * ratio
            if on_gpu(w, g):
                name, numbers = optimizer.on_gpu(lr, step)
                run(name, w, g, 1.0, state if "velocity" in state else {}, numbers)
            else:
                with _computed(w, state) as (wide, moments):
                    optimizer.apply(wide, g, moments, lr)


def _like(x: Any) -> Any:
    """Memory for what is computed with x."""
    return namespace(x).empty(x.shape, wide_dtype(dtype_name(x.dtype)))


@contextlib.contextmanager
def _computed(w: Any, state: Mapping[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """A parameter and its state in the dtype that is computed in: themselves, or copies, which are
    rounded into them when the block ends.
    """
    kept = [w, *state.values()]
    wide = [x.astype(wide_dtype(dtype_name(x.dtype)), copy=False) for x in kept]
    yield wide[0], dict(zip(state, wide[1:], strict=True))
    for x, result in zip(kept, wide, strict=True):
        if result is not x:
            x[...] = result
