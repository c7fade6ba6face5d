"""The optimizer's step on this rank's shards.

What is kept in 16 bits is computed with in float32, and rounded once when it is written back.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from ..array import device_name, dtype_name, namespace
from ..gradients import address
from .fused import Parts, kinds_of, on_gpu
from .norms import sums_of_squares, whole
from .optimizers import Optimizer
from .precision import wide_dtype
from .sharding import Piece, Shard, Store, host

if TYPE_CHECKING:
    from ..work import Work

# Elements that are stepped at a time, so that their arrays stay in the cache. AdamW on 10.3 million
# float32 in blocks of 4, 8, 16, 32, 64 Ki took 43, 37, 33, 30, 28 ms (one core, Xeon).
_BLOCK = 64 * 1024

# Shards on a GPU are stepped in so many turns, if they are published: what one has stepped travels
# while the next is stepped. For 355 million parameters a kernel for each of 27 buckets took 0.78 ms
# of the host beside one H200, one for all 0.11.
_TURNS = 4

_Of = TypeVar("_Of")
_Operation = tuple[str, dict[str, float]]  # of `fused.OPERATIONS`, and its numbers


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


class _Turn:
    """Shards that are stepped together and then published: one on the host, or some on GPUs.

    runs  of each, by its number
    """

    def __init__(self, runs: Mapping[int, list[_Run]], *, there: bool) -> None:
        self.runs = runs
        self.there = there
        steps = []
        for mine in runs.values() if there else ():
            for run in mine:
                name, numbers = run.optimizer.on_gpu(1.0, 1)
                kept = run.state if "velocity" not in run.state or "momentum" in numbers else {}
                arrays = {"g": run.grad, "w": run.master, **kept}
                if run.used is not None:
                    arrays["used"] = run.used
                steps.append((name, tuple(numbers), arrays, run))
        self._kernels = _kernels(steps)

    def step(self, numbers: Callable[[_Run], Sequence[float]]) -> None:
        """Steps what is on GPUs."""
        told: dict[tuple[int, int], Sequence[float]] = {}  # which depends on these alone
        for parts, runs in self._kernels:
            keys = [(id(run.optimizer), run.missed) for run in runs]
            for key, run in zip(keys, runs, strict=True):
                if key not in told:
                    told[key] = numbers(run)
            parts.run([told[key] for key in keys])


class _How(NamedTuple):
    """One step, for all shards: see `Stepper.step`; `step` counts from 1."""

    coefficient: float
    step: int
    factor: float

    def numbers(self, run: _Run) -> tuple[float, ...]:
        """What a kernel is told of a run."""
        optimizer = run.optimizer
        _, numbers = optimizer.on_gpu(optimizer.lr * self.factor, self.step - run.missed)
        return self.coefficient, *numbers.values()


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
        # Of a step with all parameters, by the first shard, with which they go; and where gradients
        # lay then.
        self._turns: WeakKeyDictionary[Shard, tuple[list[int], list[_Turn]]] = WeakKeyDictionary()

    @property
    def lr(self) -> float:
        """Of the first group."""
        return self._optimizers[0].lr

    def build(self) -> None:
        """The store was laid out anew, or `missed` set; nothing is kept of the old one."""
        self._turns.clear()

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
            for turn in self._turns_of(unused):
                turn.step(how.numbers)
                for number, runs in turn.runs.items():
                    shard = self._store.shards[number]
                    if not turn.there:
                        for run in runs:
                            self._on_host(shard, run, how._replace(step=step - run.missed))
                    # Travels while the next ones are stepped.
                    works.append(self._store.publish(shard, rounded=turn.there))
        for work in works:
            if work is not None:
                work.wait()
        if unused:  # the same on all ranks
            self.missed |= {name: self.missed.get(name, 0) + 1 for name in unused}
            self._turns.clear()

    def _turns_of(self, unused: frozenset[str]) -> list[_Turn]:
        """All shards in turns."""
        shards = self._store.shards
        if not shards:
            return []
        places = [address(shard.grad) for shard in shards]
        known = self._turns.get(shards[0])
        if not unused and known is not None and known[0] == places:
            return known[1]
        there = [on_gpu(shard.master, shard.grad) for shard in shards]
        travel = self._store.comm is not None and self._store.stage < 3
        each = sum(shard.bucket.count for shard in shards) / (_TURNS if travel else 1)
        numbers: list[list[int]] = []
        count = math.inf  # elements in the last turn; it takes no more from `each` on
        for number, shard in enumerate(shards):
            if count >= each or not there[number]:
                numbers.append([])
                count = 0
            numbers[-1].append(number)
            count = count + shard.bucket.count if there[number] else math.inf
        turns = [
            _Turn({i: self._runs(shards[i], unused) for i in turn}, there=there[turn[0]])
            for turn in numbers
        ]
        if not unused:
            self._turns[shards[0]] = places, turns
        return turns

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
        ends: list[tuple[int, int, Optimizer, int]] = []
        for piece in shard.pieces:
            if piece.name in unused:
                continue
            like = self._optimizers[self._number[piece.name]], self.missed.get(piece.name, 0)
            if ends and ends[-1][1] == piece.low and ends[-1][2:] == like:
                ends[-1] = (ends[-1][0], piece.high, *like)
            else:
                ends.append((piece.low, piece.high, *like))
        return [_Run(shard, *end) for end in ends]

    def _layerwise(
        self, coefficient: float, unused: frozenset[str], step: int, factor: float
    ) -> None:
        """LARS and LAMB: directions, then norms of whole parameters, then steps."""
        number = {name: i for i, name in enumerate(self._number)}
        held = [
            _Layer(shard, piece, self._optimizers[self._number[piece.name]])
            for shard, piece in self._store.pieces()
            if piece.name not in unused
        ]
        there = [layer for layer in held if layer.there]
        steps = [step - self.missed.get(layer.name, 0) for layer in held]
        _on_gpu(
            (layer.arrays(directed=False), layer.optimizer.direction_on_gpu(own), coefficient)
            for layer, own in zip(held, steps, strict=True)
            if layer.there
        )
        parts = []
        for layer, own in zip(held, steps, strict=True):
            w, g = layer.w, layer.direction
            if not layer.there:
                self._gradient(layer.shard, layer.low, layer.high, coefficient, g)
                with _computed(w, layer.state) as (wide, moments):
                    layer.optimizer.direction(wide, g, moments, own, _like(w))
            i = number[layer.name]
            parts += [whole(w, 2 * i), whole(g, 2 * i + 1)]
        norms = np.sqrt(sums_of_squares(parts, 2 * len(number), self._store.comm))

        def rate(layer: _Layer) -> float:
            i = 2 * number[layer.name]
            ratio = layer.optimizer.trust(float(norms[i]), float(norms[i + 1]))
            return layer.optimizer.lr * factor * ratio

        _on_gpu(
            (layer.arrays(directed=True), layer.optimizer.on_gpu(rate(layer), step), 1.0)
            for layer in there
        )
        for layer in held:
            if not layer.there:
                with _computed(layer.w, layer.state) as (wide, moments):
                    layer.optimizer.apply(wide, layer.direction, moments, rate(layer))


class _Layer:
    """A parameter, or what a shard has of it, that a layerwise optimizer steps.

    direction  memory for it, in the dtype that is computed in
    there      on a GPU
    """

    def __init__(self, shard: Shard, piece: Piece, optimizer: Optimizer) -> None:
        self.shard, self.name, self.low, self.high = shard, piece.name, piece.low, piece.high
        self.optimizer = optimizer
        self.w = shard.master[self.low : self.high]
        self.state = {k: v[self.low : self.high] for k, v in shard.state.items()}
        self.direction = _like(self.w)
        self.there = on_gpu(self.w, shard.grad)

    def arrays(self, *, directed: bool) -> dict[str, Any]:
        """Those of a kernel that finds the direction, or that goes it."""
        if directed:
            velocity = {k: v for k, v in self.state.items() if k == "velocity"}
            return {"g": self.direction, "w": self.w, **velocity}
        moments = {k: v for k, v in self.state.items() if k != "velocity"}
        grad = self.shard.grad[self.low : self.high]
        return {"g": grad, "w": self.w, **moments, "direction": self.direction}


def _on_gpu(calls: Iterable[tuple[dict[str, Any], _Operation, float]]) -> None:
    """Runs operations on parts: their arrays, operations with numbers, and coefficients."""
    steps = [
        (name, tuple(numbers), arrays, (coefficient, *numbers.values()))
        for arrays, (name, numbers), coefficient in calls
    ]
    for parts, told in _kernels(steps):
        parts.run(told)


def _kernels(
    steps: Iterable[tuple[str, tuple[str, ...], dict[str, Any], _Of]],
) -> list[tuple[Parts, list[_Of]]]:
    """What one kernel can step, together: parts with what each is of.

    steps  operation, names of its numbers, arrays of a part, what it is of
    """
    alike: dict[Any, list[tuple[dict[str, Any], _Of]]] = {}
    for name, numbers, arrays, of in steps:
        kind = name, numbers, kinds_of(arrays), device_name(arrays["w"])
        alike.setdefault(kind, []).append((arrays, of))
    return [
        (Parts(name, numbers, [arrays for arrays, _ in found]), [of for _, of in found])
        for (name, numbers, *_), found in alike.items()
    ]


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
