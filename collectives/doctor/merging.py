"""The dumps of all ranks, and what they say together: who is behind, where, and since when."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from ..bootstrap.groups import have, name_ranks
from ..errors import ConfigError
from ..flight_recorder import FORMAT, VERSION
from .gpu_calls import GpuCalls
from .records import Dump, age, call_in_words, damage, size_in_words
from .starts import starts_in_words

_IN_IT = ("entered", "running")


def read(paths: Iterable[str | Path]) -> list[Dump]:
    """The communicators in some files, and the starts of processes (with "start") that are under
    way or failed. Raises ConfigError for a file that is no dump.
    """
    found: list[Dump] = []
    for path in paths:
        file = Path(path)
        if file.exists() and not file.is_file() and not file.is_dir():
            raise ConfigError(f"{path} is no file, but a device or a pipe")
        try:
            whole = json.loads(file.read_text())
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is no JSON: {error}") from error
        if not isinstance(whole, dict) or whole.get("format") != FORMAT:
            raise ConfigError(f"{path} is no dump of a flight recorder")
        if whole.get("version") != VERSION:
            raise ConfigError(
                f"{path} is a dump of version {whole.get('version')}; this doctor reads {VERSION}"
            )
        if words := damage(whole):
            raise ConfigError(f"{path} is a damaged dump: {words}")
        process = {"host": whole["host"], "pid": whole["pid"]}
        found += [{**one, **process} for one in whole["communicators"]]
        if "start" in whole:
            found.append({"start": whole["start"], "time": whole["time"], **process})
    return found


class Diagnosis(NamedTuple):
    """What the dumps of one communicator say. `trouble`: somebody waits, or something failed."""

    communicator: str
    size: int
    trouble: bool
    sentence: str


def diagnose(dumps: Sequence[Dump]) -> list[str]:
    """The sentences of `judge`."""
    return [one.sentence for one in judge(dumps)]


def judge(dumps: Sequence[Dump]) -> list[Diagnosis]:
    """A sentence for each communicator: those with trouble first, the largest before its parts;
    before them what is to say of ranks that did not come so far as to have one.
    """
    groups: dict[str, dict[int, Dump]] = {}
    for dump in dumps:
        if "start" in dump:
            continue
        ranks = groups.setdefault(dump["name"], {})
        known = ranks.get(dump["rank"])
        if known is None or known["time"] < dump["time"]:
            ranks[dump["rank"]] = dump
    judged = [
        Diagnosis(name, group.size, group.trouble, group.sentence)
        for name, group in ((name, _Group(ranks)) for name, ranks in groups.items())
    ]
    judged.sort(key=lambda one: (not one.trouble, -one.size))
    starts = [dump for dump in dumps if "start" in dump]
    return [Diagnosis("", *starts_in_words(starts)), *judged] if starts else judged


class _Group:
    """The ranks of one communicator."""

    def __init__(self, ranks: dict[int, Dump]) -> None:
        self._ranks = dict(sorted(ranks.items()))
        some = next(iter(self._ranks.values()))
        self.size: int = some["size"]
        self._last = {r: d["calls"][-1] for r, d in self._ranks.items() if d["calls"]}
        self._gpu = GpuCalls(self._ranks)
        self.trouble = True
        words = self._words()
        if not words:
            self.trouble = False
            words = self._calm()
        name = f"communicator {some['name'][:8]} of {self.size}"
        absent = sorted(set(range(self.size)) - self._ranks.keys())
        if absent:
            words += f"; no dump of {name_ranks(absent)}"
        self.sentence = f"{name}: {words}"

    def _words(self) -> str:
        """What is wrong; "" if nothing is."""
        return (
            self._dead()
            or self._gpu.disagreement()
            or self._mismatch()
            or self._disagreement()
            or self._earlier(self._behind(), self._gpu.behind())
            or self._stuck()
            or "; ".join(filter(None, (self._gpu.stuck(), self._gpu.moving())))
            or self._transfers()
            or self._failed()
        )

    def _dead(self) -> str:
        died = [
            (r, d["error"])
            for r, d in self._ranks.items()
            if d.get("error", {}).get("kind") == "peer_died"
        ]
        if not died:
            return ""
        gone = sorted({e["peer"] for _, e in died if "peer" in e})
        seen = [r for r, _ in died]
        where = next((words for r in seen if (words := self._where(r))), "a call")
        names = name_ranks(gone) if gone else "a rank"
        return f"{names} died; {name_ranks(seen)} noticed in {where}"

    def _mismatch(self) -> str:
        for dump in self._ranks.values():
            error = dump.get("error")
            if error and error["kind"] == "mismatch":
                last = dump["calls"][-1] if dump["calls"] else None
                if last is None or last["state"] == "failed" or "gpu_broken" in dump:
                    return str(error["message"])
        return ""

    def _disagreement(self) -> str:
        """Ranks that are in one call by number and in different ones by name."""
        newest = max((r["sequence"] for r in self._last.values()), default=0)
        calls: dict[str, list[int]] = {}
        for rank, record in self._last.items():
            if record["sequence"] == newest and record["state"] != "done":
                calls.setdefault(call_in_words(record), []).append(rank)
        if len(calls) < 2:
            return ""
        sides = [f"{call} on {name_ranks(ranks)}" for call, ranks in calls.items()]
        return "the ranks make different calls: " + ", ".join(sides)

    @staticmethod
    def _earlier(*found: tuple[float, str]) -> str:
        """What ranks came to first: they are behind in the rest because of it."""
        return min((one for one in found if one[1]), default=(0.0, ""))[1]

    def _where(self, rank: int) -> str:
        """The call that a rank was in when it failed."""
        if rank in self._gpu.failed:
            return f"{call_in_words(self._gpu.failed[rank])} on its GPU"
        return call_in_words(self._last[rank]) if rank in self._last else ""

    def _behind(self) -> tuple[float, str]:
        """Who has not come to a call that others wait in, and when the first of them came."""
        newest = max((r["sequence"] for r in self._last.values()), default=0)
        # Who is done with it has been there, and needs nobody any more.
        waiting = [
            r
            for r, record in self._last.items()
            if record["sequence"] == newest and record["state"] != "done"
        ]
        behind = [
            r for r in self._ranks if r not in self._last or self._last[r]["sequence"] < newest
        ]
        if not waiting or not behind:
            return 0, ""
        call = call_in_words(self._last[waiting[0]])
        words = f"{name_ranks(behind)} {have(behind)} not entered {call}"
        told = [self._doing(rank) for rank in behind[:3]]
        since = min(self._last[r]["begin"] for r in waiting)
        return since, f"{words} ({'; '.join(told)}); {self._since(waiting)}"

    def _stuck(self) -> str:
        inside = [r for r, record in self._last.items() if record["state"] in _IN_IT]
        if not inside:
            return ""
        ends = [r for r in self._ranks if r not in inside]
        words = f"{name_ranks(inside)} {'is' if len(inside) == 1 else 'are'} in "
        words += call_in_words(self._last[inside[0]])
        waits = [self._waits(r) for r in inside if "waiting" in self._ranks[r]]
        words += f"; {'; '.join(waits[:4])}" if waits else f", {self._since(inside)}"
        return words + (f"; {name_ranks(ends)} {have(ends)} finished it" if ends else "")

    def _transfers(self) -> str:
        """A send or recv that the other side has not answered."""
        for rank, dump in self._ranks.items():
            for t in dump["transfers"]:
                if t["state"] not in _IN_IT:
                    continue
                way = "from" if t["collective"] == "recv" else "to"
                other = "send" if t["collective"] == "recv" else "recv"
                words = (
                    f"rank {rank} is in {t['collective']} {way} rank {t['peer']} with tag "
                    f"{t['tag']} ({t['dtype']}, {size_in_words(t)}) since {age(dump, t)}"
                )
                peer = self._ranks.get(t["peer"])
                if peer is None:
                    return words
                pairs = [
                    p
                    for p in peer["transfers"]
                    if (p["collective"], p["peer"], p["tag"]) == (other, rank, t["tag"])
                    and p["state"] in _IN_IT
                ]
                return words + (
                    "" if pairs else f"; rank {t['peer']} waits in no {other} with that tag"
                )
        return ""

    def _failed(self) -> str:
        failed = {r: d["error"] for r, d in self._ranks.items() if "error" in d}
        broken = {
            r: e
            for r, e in failed.items()
            if self._ranks[r]["state"] != "open" or "gpu_broken" in self._ranks[r]
        }
        if not broken:
            return ""
        first = min(broken, key=lambda r: broken[r]["time"])
        return f"rank {first} was the first to fail: {broken[first]['message']}"

    def _calm(self) -> str:
        done = {r["sequence"] for r in self._last.values()}
        on_gpus = self._gpu.calm()
        if not done:
            return on_gpus or "no call has been made"
        return self._calm_on_hosts(done) + (f"; {on_gpus}" if on_gpus else "")

    def _calm_on_hosts(self, done: set[int]) -> str:
        if len(done) == 1 and len(self._last) == len(self._ranks):
            record = next(iter(self._last.values()))
            return f"all ranks that are here have finished {call_in_words(record)}; nobody waits"
        numbers = [f"rank {r} #{record['sequence']}" for r, record in self._last.items()]
        return f"nobody waits in a call; the last that they finished: {', '.join(numbers)}"

    # ---- words -----------------------------------------------------------------------------------

    def _doing(self, rank: int) -> str:
        record = self._last.get(rank)
        if record is None:
            return f"rank {rank} has made no call yet" if len(self._ranks) > 1 else "no call yet"
        dump = self._ranks[rank]
        state = "finished" if record["state"] == "done" else record["state"]
        since = dump["time"] - record.get("end", record["begin"])
        words = f"rank {rank} {state} {record['collective']} #{record['sequence']}"
        return f"{words} {since:.1f} s ago" if state == "finished" else words

    def _since(self, ranks: Sequence[int]) -> str:
        gave_up = all(self._last[r]["state"] == "failed" for r in ranks)
        first = min(ranks, key=lambda r: self._last[r]["begin"])
        record = self._last[first]
        if gave_up:
            seconds = record.get("end", self._ranks[first]["time"]) - record["begin"]
            return f"{name_ranks(ranks)} gave up after {seconds:.1f} s in it"
        verb = "waits" if len(ranks) == 1 else "wait"
        return f"{name_ranks(ranks)} {verb} in it since {age(self._ranks[first], record)}"

    def _waits(self, rank: int) -> str:
        w = self._ranks[rank]["waiting"]
        words = f"rank {rank} waits for {w['for']}"
        if "peer" in w:
            words += f" of rank {w['peer']}"
        if "step" in w:
            words += f", step {w['step']}"
        return f"{words}, since {w['seconds']:.1f} s"
