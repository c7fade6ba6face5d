"""Ranks compare what they are about to do, before they do it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import MismatchError

if TYPE_CHECKING:
    from .communicator import Communicator

_SHOWN = 5  # differences that a message lists


def plain(value: Any) -> Any:
    """A number of numpy as one of Python, for JSON, which asks for what it does not hold."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is nothing that JSON holds")


def exchange(comm: Communicator, value: Any) -> list[Any]:
    """What all ranks give, in rank order. Collective; `value` is anything that JSON holds, with
    numbers of numpy.
    """
    comm._check_open()
    answers = comm._bootstrap.all_gather(json.dumps(value, default=plain).encode())
    return [json.loads(answer) for answer in answers]


def on_rank_0(comm: Communicator, what: str, do: Callable[[], Any]) -> None:
    """Runs `do` on rank 0. Raises OSError on all ranks, which says what cannot be done and why, if
    it does there. Collective.
    """
    error = ""
    if comm.rank == 0:
        try:
            do()
        except OSError as problem:
            error = f"rank 0 cannot {what}: {problem}"
    told = exchange(comm, error)[0]
    if told:
        raise OSError(told)


def agree(comm: Communicator, what: str, mine: Mapping[str, Any]) -> None:
    """Raises MismatchError on all ranks, which names keys, values and ranks, unless all ranks give
    the same. Collective.

    what  what a key is, e.g. "parameter"
    mine  values that JSON holds
    """
    answers = exchange(comm, dict(mine))
    keys = dict.fromkeys(key for answer in answers for key in answer)
    differences = []
    for key in keys:
        ranks_of: dict[str, list[int]] = {}
        for rank, answer in enumerate(answers):
            text = json.dumps(answer[key]) if key in answer else "missing"
            ranks_of.setdefault(text, []).append(rank)
        if len(ranks_of) > 1:
            sides = "; ".join(
                f"{text} on rank{'s'[: len(ranks) - 1]} {', '.join(map(str, ranks))}"
                for text, ranks in ranks_of.items()
            )
            differences.append(f"{what} {key!r} is {sides}")
    if differences:
        more = len(differences) - _SHOWN
        tail = f"\nand {more} more" if more > 0 else ""
        raise MismatchError(
            "the ranks differ: " + "\n".join(differences[:_SHOWN]) + tail, rank=comm.rank
        )
