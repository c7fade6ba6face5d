"""Plays many rounds: one after the other, or several at a time."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import IO, NamedTuple

from ..children import die_with_parent
from ..errors import CollectiveError
from . import plan
from .judging import Verdict, judge
from .stage import Outcome, Stage

# A round in which the machine let a process wait for a processor for so long says nothing of time.
STARVED = 0.5  # seconds
_AGAIN = 3


class Played(NamedTuple):
    """A round as it came out. `again`: how often it was played anew, for want of a processor."""

    outcome: Outcome
    verdict: Verdict
    again: int


class Game(NamedTuple):
    """What is played: see the options of the command."""

    seed: int
    ranks: int
    within: float

    def play(self, number: int) -> Played:
        drawn = plan.draw(self.seed, number, self.ranks)
        again = 0
        while True:
            outcome = Stage(drawn).run()
            verdict = judge(outcome, self.within)
            hungry = bool(verdict.violations) and outcome.starved >= STARVED
            if not hungry or again == _AGAIN:
                return Played(outcome, verdict, again)
            again += 1


def play(game: Game, numbers: Sequence[int], jobs: int) -> Iterator[Played]:
    """The rounds, in the order of their numbers within each of `jobs` processes."""
    if jobs == 1:
        yield from map(game.play, numbers)
        return
    yield from _beside(game.play, [numbers[j::jobs] for j in range(jobs)])


def _beside(one: Callable[[int], Played], shares: Sequence[Sequence[int]]) -> Iterator[Played]:
    """Each share in a process of its own; what comes out of them in turn."""
    this = os.getpid()
    children: list[tuple[int, IO[bytes]]] = []
    try:
        for share in shares:
            reading, writing = os.pipe()
            pid = os.fork()
            if pid == 0:
                die_with_parent(this)
                os.close(reading)
                status = 1
                try:
                    with os.fdopen(writing, "wb") as out:
                        for number in share:
                            pickle.dump(one(number), out)
                            out.flush()
                    status = 0
                finally:
                    os._exit(status)
            os.close(writing)
            children.append((pid, os.fdopen(reading, "rb")))
        for place in range(max(map(len, shares))):
            for share, (_, source) in zip(shares, children, strict=True):
                if place < len(share):
                    try:
                        yield pickle.load(source)  # what our own child wrote
                    except EOFError:
                        raise CollectiveError(f"round {share[place]}: its stage broke") from None
    finally:
        for pid, source in children:
            source.close()
            os.waitpid(pid, 0)
