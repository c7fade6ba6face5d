"""What the dumps of processes say that wait in `init`, or failed there."""

from __future__ import annotations

from collections.abc import Sequence

from ..bootstrap.groups import name_ranks
from .records import Dump


def starts_in_words(dumps: Sequence[Dump]) -> tuple[int, bool, str]:
    """How many ranks there were to be (0: nobody knows), true, and the sentence."""
    size = max((d["start"].get("size", 0) for d in dumps), default=0)
    failed: dict[str, list[Dump]] = {}
    waiting = []
    for dump in dumps:
        if "error" in dump["start"]:
            error = dump["start"]["error"]
            failed.setdefault(f"{error['message']} ({error['kind']})", []).append(dump)
        else:
            waiting.append(dump)
    parts = [f"{_who(some)} could not start: {words}" for words, some in failed.items()]
    if waiting:
        seconds = max(d["time"] - d["start"]["begin"] for d in waiting)
        verb = "waits" if len(waiting) == 1 else "wait"
        parts.append(f"{_who(waiting)} {verb} in init since {max(0.0, seconds):.1f} s")
    known = {d["start"]["rank"] for d in dumps if "rank" in d["start"]}
    silent = set(range(size)) - known
    if silent and len(known) == len(dumps):
        parts.append(f"no dump of {name_ranks(silent)}")
    return size, True, "; ".join(parts)


def _who(dumps: Sequence[Dump]) -> str:
    ranks = [d["start"]["rank"] for d in dumps if "rank" in d["start"]]
    others = [f"process {d['pid']} on {d['host']}" for d in dumps if "rank" not in d["start"]]
    return " and ".join(([name_ranks(ranks)] if ranks else []) + others)
