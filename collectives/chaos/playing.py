"""Plays many rounds: one after the other, or several at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NamedTuple

from ..children import die_with_parent
from ..errors import CollectiveError
from . import plan
from .gauge import Gauge
from .judging import Verdict, judge
from .stage import Outcome, Stage

# A round in which the machine let a process wait for a processor for so long says nothing of time;
# of wrong results and of what never ends it does.
STARVED = 0.5  # seconds
_AGAIN = 3


class Played(NamedTuple):
    """A round as it came out. `again`: how often it was played anew, for want of a processor."""

    outcome: Outcome
    verdict: Verdict
    again: int


class Game(NamedTuple):
    """What is played: see the options of the command. With a gauge, on GPUs."""

    seed: int
    ranks: int
    within: float
    gauge: Gauge | None = None

    def play(self, number: int) -> Played:
        device = "cuda" if self.gauge else "cpu"
        drawn = plan.draw(self.seed, number, self.ranks, device)
        return play_plan(drawn, self.within, self.gauge)


def play_plan(drawn: plan.Plan, within: float, gauge: Gauge | None = None) -> Played:
    """A round, anew if it was not as promised and a process got no processor for long."""
    again = 0
    while True:
        outcome = Stage(drawn, gauge).run()
        verdict = judge(outcome, within)
        wrong = [r.facts["text"] for r in outcome.reports if r.what == "wrong"]
        certain = bool(outcome.stuck) or any(text.startswith("WrongResult") for text in wrong)
        hungry = bool(verdict.violations) and outcome.starved >= STARVED and not certain
        if not hungry or again == _AGAIN:
            return Played(outcome, verdict, again)
        again += 1


def play(game: Game, numbers: Sequence[int], jobs: int) -> Iterator[Played]:
    """The rounds, in the order of their numbers within each of `jobs` processes."""
    return play_all(game.play, numbers, jobs)


def play_all(one: Callable[[int], Played], numbers: Sequence[int], jobs: int) -> Iterator[Played]:
    """one(number) for each number, in `jobs` processes."""
    if jobs == 1:
        yield from map(one, numbers)
        return
    yield from _beside(one, [numbers[j::jobs] for j in range(jobs)])


def _beside(one: Callable[[int], Played], shares: Sequence[Sequence[int]]) -> Iterator[Played]:
    """Each share in a process of its own; what comes out of them in turn."""
    this = os.getpid()
    children: list[tuple[int, Connection]] = []
    try:
        for share in shares:
            reading, writing = Pipe(duplex=False)  # to our own child: nothing foreign comes in
            pid = os.fork()
            if pid == 0:
                die_with_parent(this)
                reading.close()
                status = 1
                try:
                    for number in share:
                        writing.send(one(number))
                    status = 0
                finally:
                    os._exit(status)
            writing.close()
            children.append((pid, reading))
        for place in range(max(map(len, shares))):
            for share, (_, source) in zip(shares, children, strict=True):
                if place < len(share):
                    try:
                        yield source.recv()
                    except EOFError:
                        raise CollectiveError(f"round {share[place]}: its stage broke") from None
    finally:
        for pid, source in children:
            source.close()
            os.waitpid(pid, 0)
