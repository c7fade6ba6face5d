"""Ways of doing the same, measured in turns: what benchmarks of training have in common.

Rounds go forth and back over the ways (A B C, C B A), so that a machine that gets slower or faster
as it goes on does so for all alike, and then in another order (B C A, A C B, ...), so that none
always comes behind the same one: on GPUs that are at the limit of their power a way takes some
percent longer behind one that works them harder. They end after a number of rounds, or in time.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, TypeVar

Name = TypeVar("Name", bound=Hashable)
Value = TypeVar("Value")

LEAST = 2  # rounds, even if there is no time for them: one forth, one back


def in_turns(
    names: Sequence[Name],
    measure: Callable[[Name], Value],
    told: Callable[[dict[Name, list[Value]]], None],
    *,
    rounds: int,
    until: float | None = None,
    agree: Callable[[bool], bool] = bool,
) -> dict[Name, list[Value]]:
    """What `measure` returned for each name, by rounds. All ranks make the same calls.

    told    called with all values so far, after each
    rounds  how many, unless there is `until`: a time of time.monotonic() by which the rounds after
            the first two must have ended, judged by the longest so far
    agree   makes of what each rank thinks what rank 0 thinks
    """
    found: dict[Name, list[Value]] = {name: [] for name in names}
    longest, order = 0.0, list(names)
    for number in itertools.count():
        began = time.monotonic()
        if until is None:
            if number == rounds:
                return found
        elif not agree(number < LEAST or began + longest < until):
            return found
        if number % 2 == 0:  # on all ranks alike
            order = random.Random(number).sample(list(names), len(names))
        else:
            order.reverse()
        for name in order:
            found[name].append(measure(name))
            told(found)
        longest = max(longest, time.monotonic() - began)
    raise AssertionError("unreachable")


def spread(values: Sequence[float]) -> list[float]:
    """The least and the greatest."""
    return [min(values), max(values)]


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """Ours divided by theirs, round by round: the median, the least and the greatest."""
    both = [a / b for a, b in zip(ours, theirs, strict=False) if b > 0]
    if not both:
        return {"median": None, "spread": None}
    return {"median": statistics.median(both), "spread": spread(both)}


def write(path: Path | None, content: dict[str, Any]) -> None:
    """Replaces a file at once, so that one who reads finds the old or the new."""
    if path is not None:
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(content, indent=1) + "\n")
        part.replace(path)
