"""What the ranks' dumps say about calls on GPU arrays.

A rank puts a call on a stream and goes on. So one that has put more calls than another may be ahead
by right, until it waits; and a call that it has not looked for since may have ended long ago. What
is said here is what is known: who has put which call on its GPU, and who waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..bootstrap.groups import have, name_ranks
from .records import Dump, Record, age, call_in_words, size_in_words


class GpuCalls:
    """The calls on GPU arrays of the ranks of one communicator.

    failed   the call in which a rank's kernels gave up, where that is known
    """

    def __init__(self, ranks: Mapping[int, Dump]) -> None:
        # A rank without a ring has never made a call on a GPU.
        self._ranks = ranks
        self._calls = {r: d["gpu_calls"] for r, d in ranks.items() if d.get("gpu_calls")}
        self._last: dict[int, Record] = {r: calls[-1] for r, calls in self._calls.items()}
        self._newest = max((c["sequence"] for c in self._last.values()), default=0)
        self.failed: dict[int, Record] = {}
        for rank, calls in self._calls.items():
            for call in calls:
                if call["state"] == "failed":
                    self.failed.setdefault(rank, call)

    def disagreement(self) -> str:
        """Ranks whose newest calls have one number and are different calls. (Kernels tell each
        other once they run.)
        """
        calls: dict[str, list[int]] = {}
        for rank, record in self._last.items():
            if record["sequence"] == self._newest and record["state"] != "done":
                calls.setdefault(call_in_words(record), []).append(rank)
        if len(calls) < 2:
            return ""
        sides = [f"{call} on {name_ranks(ranks)}" for call, ranks in calls.items()]
        return "the ranks make different calls on their GPUs: " + ", ".join(sides)

    def behind(self) -> tuple[float, str]:
        """Who has not put a call on its GPU that others have, and when the first of them did."""
        ahead = [
            r
            for r, record in self._last.items()
            if record["sequence"] == self._newest and record["state"] in ("entered", "failed")
        ]
        behind = [r for r in self._ranks if r not in ahead and self._number(r) < self._newest]
        if not ahead or not behind:
            return 0, ""
        # The call that the first of them lacks, as a rank that has it calls it.
        lacks = 1 + min(self._number(r) for r in behind)
        holder = next((r for r in ahead if self._record(r, lacks) is not None), None)
        if holder is None:  # so far behind that the others' rings have lost it
            holder, lacks = ahead[0], self._newest
        record = self._record(holder, lacks)
        assert record is not None
        late = [r for r in behind if self._number(r) < lacks]
        there = [r for r in self._ranks if r not in late]
        told = "; ".join(self._doing(r) for r in late[:3])
        words = (
            f"{name_ranks(late)} {have(late)} not put {call_in_words(record)} on "
            f"{'its GPU' if len(late) == 1 else 'their GPUs'} ({told}); "
            f"{self._there(there, lacks)}"
        )
        begun = min(c["begin"] for r in there if (c := self._record(r, lacks)) is not None)
        return begun, words

    def stuck(self) -> str:
        """All have put their calls on their GPUs, and hosts wait for them."""
        waiting = [r for r in self._last if "gpu_waiting" in self._ranks[r]]
        captured = [r for r in self._last if self._last[r]["state"] == "captured"]
        if not waiting:
            return ""
        record = self._record(waiting[0], self._ranks[waiting[0]]["gpu_waiting"]["sequence"])
        call = call_in_words(record) if record is not None else "a call"
        words = (
            f"{name_ranks(waiting)} {'waits' if len(waiting) == 1 else 'wait'} for {call} on "
            f"{'its GPU' if len(waiting) == 1 else 'their GPUs'} since {self._longest(waiting)}"
        )
        if captured:
            words += (
                f"; {name_ranks(captured)} {have(captured)} captured {call} into a graph, which "
                "runs it when it is launched"
            )
        return words

    def moving(self) -> str:
        """Sends and receives on GPUs that hosts wait for, as far as they know."""
        told = []
        for rank, dump in self._ranks.items():
            begun = [t for t in dump.get("gpu_transfers", ()) if t["state"] == "entered"]
            if begun and not dump.keys().isdisjoint(("gpu_waiting", "gpu_transfers_waiting")):
                first = begun[0]
                way = "from" if first["collective"] == "recv" else "to"
                more = f" and {len(begun) - 1} more" if len(begun) > 1 else ""
                what = f"{first['collective']} {way} rank {first['peer']} with tag {first['tag']}"
                told.append(
                    f"rank {rank} waits for its GPU, where it put a {what} ({first['dtype']}, "
                    f"{size_in_words(first)}){more} {age(dump, first)} ago"
                )
        return "; ".join(told[:4])

    def calm(self) -> str:
        """What the ranks put on their GPUs last; "" if there were no such calls."""
        if not self._last:
            return ""
        numbers = {record["sequence"] for record in self._last.values()}
        states = {record["state"] for record in self._last.values()}
        if len(numbers) == 1 and states == {"done"} and len(self._last) == len(self._ranks):
            call = call_in_words(next(iter(self._last.values())))
            return f"on their GPUs all ranks that are here have finished {call}"
        ranks = sorted(self._last)
        return "the last on GPUs: " + ", ".join(self._doing(r) for r in ranks)

    # ---- words -----------------------------------------------------------------------------------

    def _number(self, rank: int) -> int:
        return int(self._last[rank]["sequence"]) if rank in self._last else 0

    def _record(self, rank: int, sequence: int) -> Record | None:
        return next((c for c in self._calls.get(rank, ()) if c["sequence"] == sequence), None)

    def _doing(self, rank: int) -> str:
        record = self._last.get(rank)
        if record is None:
            return f"rank {rank} has put no call there yet"
        words = f"{record['collective']} #{record['sequence']}"
        ago = f"{age(self._ranks[rank], record)} ago"
        if record["state"] == "captured":
            return f"rank {rank} captured {words} {ago}"
        if record["state"] == "failed":
            return f"rank {rank} gave up in {words}"
        ended = ", which has ended" if record["state"] == "done" else ""
        return f"rank {rank} put {words} there {ago}{ended}"

    def _there(self, ranks: Sequence[int], sequence: int) -> str:
        """Those who have put a call there: do they wait, or have they given up?"""
        waiting = [r for r in ranks if "gpu_waiting" in self._ranks[r]]
        if waiting:
            verb = "waits" if len(waiting) == 1 else "wait"
            return f"{name_ranks(waiting)} {verb} since {self._longest(waiting)}"
        gave_up = [r for r in ranks if r in self.failed]
        if gave_up:
            return f"{name_ranks(gave_up)} gave up in it"
        known = [r for r in ranks if self._record(r, sequence) is not None]
        first = min(known, key=lambda r: self._calls[r][-1]["begin"])
        record = self._record(first, sequence)
        assert record is not None
        return f"{name_ranks(known)} did {age(self._ranks[first], record)} ago"

    def _longest(self, ranks: Sequence[int]) -> str:
        seconds = (self._ranks[r]["time"] - self._ranks[r]["gpu_waiting"]["since"] for r in ranks)
        return f"{max(0.0, *seconds, 0.0):.1f} s"
