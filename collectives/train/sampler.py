"""Which rank sees which sample: every one once in an epoch, in an order that a seed gives."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np

from ..agreement import agree
from ..errors import did_you_mean

if TYPE_CHECKING:
    from ..communicator import Communicator

_LAST = ("uneven", "pad", "drop")


class Sampler:
    """Deals the samples of a data set to the ranks, step by step.

        for indices in sampler:                     # the rest of this epoch; then the next one
            trainer.step((images[indices], labels[indices]))

    samples     how many there are
    comm        the ranks
    micro       samples a rank has in one micro-batch
    accumulate  micro-batches a rank has in one step
    seed        of the order, which is another in every epoch
    last        what is done with the last samples, too few for a whole step: "uneven" spreads them
                (some ranks get fewer, or None), "pad" repeats samples from the beginning of the
                epoch until all are even, "drop" leaves them out

    A step takes the next micro·accumulate·ranks samples of the epoch's order, and every rank the
    part that numpy.array_split gives it. So steps hold the same samples for any number of ranks,
    if the global batch is the same.

    Making one is collective; raises MismatchError if the ranks differ.
    """

    def __init__(
        self,
        samples: int,
        comm: Communicator,
        *,
        micro: int,
        accumulate: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        last: str = "uneven",
    ) -> None:
        if last not in _LAST:
            raise ValueError(f"last={last!r}; {did_you_mean(str(last), _LAST)}")
        numbers: dict[str, Any] = {"samples": samples, "micro": micro, "seed": seed}
        for name, given in (numbers | {"accumulate": accumulate}).items():
            if not isinstance(given, Integral):
                kind = type(given).__name__
                raise TypeError(f"Sampler: {name} is a {kind}, and must be a whole number")
        if samples < 1 or micro < 1 or accumulate < 1:
            raise ValueError("samples, micro and accumulate must be at least 1")
        # Numbers of Python, also of those of numpy: `state` is for JSON.
        samples, seed, batch = map(int, (samples, seed, micro * accumulate * comm.size))
        self.samples = samples
        self.rank, self.ranks = comm.rank, comm.size
        self.batch = batch  # the global one
        self.seed, self.shuffle, self.last = seed, shuffle, last
        if last == "drop" and samples < self.batch:
            raise ValueError(
                f"{samples} samples make no batch of {self.batch} (micro x accumulate x ranks), "
                "and last='drop' leaves all of them out"
            )
        agree(
            comm,
            "sampler's",
            {
                "samples": samples,
                "global batch": self.batch,
                "seed": seed,
                "shuffle": shuffle,
                "last": last,
            },
        )
        self.epoch = 0
        self.position = 0  # steps of this epoch that are done

    def __len__(self) -> int:
        """Steps in an epoch."""
        if self.last == "drop":
            return self.samples // self.batch
        return -(-self.samples // self.batch)

    def order(self, epoch: int) -> np.ndarray[Any, Any]:
        """The samples in the order in which an epoch takes them."""
        if not self.shuffle:
            return np.arange(self.samples)
        return np.random.default_rng([self.seed, epoch]).permutation(self.samples)

    def __iter__(self) -> Iterator[np.ndarray[Any, Any] | None]:
        """What is left of the epoch: this rank's indices for each step, None where it has none."""
        epoch, order = -1, np.empty(0, np.int64)
        while self.position < len(self):
            if epoch != self.epoch:  # at first, or what `load` went to
                epoch, order = self.epoch, self.order(self.epoch)
                if self.last == "pad":
                    order = np.resize(order, len(self) * self.batch)
            low = self.position * self.batch
            part = np.array_split(order[low : low + self.batch], self.ranks)[self.rank]
            self.position += 1
            yield part if part.size else None
        self.epoch, self.position = self.epoch + 1, 0

    def state(self) -> dict[str, Any]:
        """Where it is, for a checkpoint; the same on all ranks."""
        about = {"samples": self.samples, "seed": self.seed, "shuffle": self.shuffle}
        place = {"epoch": self.epoch, "taken": self.position * self.batch}
        return about | place | {"over": self.position >= len(self)}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError if `load` cannot go on from `state`: it belongs to other data or
        another order, or its place in the epoch is not between steps of this many ranks.
        """
        mine = {key: self.state()[key] for key in ("samples", "seed", "shuffle")}
        given = {key: state.get(key) for key in mine}
        if mine != given:
            raise ValueError(f"the sampler's state is of {json.dumps(given)}, this one {mine}")
        taken = int(state["taken"])
        if taken % self.batch and not self._over(state):
            raise ValueError(
                f"{taken} samples of the epoch were taken, which are no whole steps of "
                f"{self.batch} samples; take a batch that divides it, or begin an epoch"
            )

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`, also with another number of ranks if the samples taken are whole
        steps. After an epoch that is over, what is left of it is nothing, and then comes the next
        one. Raises ValueError as `check` does.
        """
        self.check(state)
        self.epoch = int(state["epoch"])
        self.position = len(self) if self._over(state) else int(state["taken"]) // self.batch

    def _over(self, state: Mapping[str, Any]) -> bool:
        """True if the epoch is, also where its last samples were left out."""
        return bool(state.get("over")) or int(state["taken"]) >= self.samples
