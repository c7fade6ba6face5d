"""One row of a benchmark: verify, then time, ours and the peers' in turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .. import _core
from ..communicator import Communicator
from ..errors import ScheduleError, UnsupportedError
from ..schedule import algorithms, schedule, why_unsupported
from ..tuning import known_algorithm
from .backends import Backend
from .cases import REDUCING, ROOTED, Bound, Case, bind, places
from .peers import Peer
from .report import bandwidth, bus_factor
from .timing import Effort, Runner, Sample, take_turns


@dataclass
class Bench:
    """How the ranks of a backend are to be measured. Collective to make.

    check      how often each result is verified before it is timed; 0 for never
    symmetric  our arrays come from `Communicator.empty`; the peers' never do
    capacity   bytes of the largest vector
    """

    backend: Backend
    capacity: int
    effort: Effort = field(default_factory=Effort)
    check: int = 1
    symmetric: bool = False
    order: str | None = None
    peers: Sequence[Peer] = ()

    def __post_init__(self) -> None:
        self.comm = self.backend.comm
        self.clock = self.backend.clock
        self.areas = self.backend.areas(self.capacity, self.symmetric)
        self._ordinary = self.areas
        self.last = np.zeros(self.comm.size, np.int64)  # rows that each rank ended last
        if self.symmetric and self.peers:
            self._ordinary = self.backend.areas(self.capacity, False)

    def chosen(self, algorithm: str, collective: str, nbytes: int) -> str:
        """The name of the algorithm that serves a call."""
        if algorithm != "auto" or collective == "barrier":
            return algorithm
        return self.backend.choose(collective, nbytes)

    def bound(self, case: Case, algorithm: str, elements: int, in_place: bool) -> Bound:
        """The call with our buffers."""
        kwargs: dict[str, Any] = {}
        if algorithm != "auto":
            kwargs["algorithm"] = algorithm
        if case.collective in REDUCING and self.order is not None:
            kwargs["order"] = self.order
        rank = self.comm.rank
        return bind(case, rank, elements, in_place, self.areas, **kwargs)

    def verify(self, bound: Bound) -> int | None:
        """Wrong elements on all ranks together, None if nothing is checked. Collective."""
        if bound.case.collective == "barrier" or not self.check:
            return None
        wrong = 0
        for _ in range(self.check):
            bound.fill()
            self.comm.barrier()
            self.backend.call(bound)
            wrong += bound.wrong()
        counted = self.comm.all_gather(np.array([wrong], np.float64))
        return int(np.sum(counted))

    def refused(
        self, case: Case, algorithms: Sequence[str], elements: int, in_place: bool
    ) -> dict[str, str]:
        """What the engine refuses, by name, with the reason: an algorithm with more channels than
        the communicator may take thread blocks, or a broken schedule, for example. Every rank is
        refused alike, before anything runs. Collective.
        """
        found = {}
        for name in algorithms:
            bound = self.bound(case, name, elements, in_place)
            bound.clear()
            try:
                self.backend.call(bound)
            except (UnsupportedError, ScheduleError) as error:
                found[name] = str(error)
        return found

    def runner(self, bound: Bound, mode: str | None = None) -> Runner:
        """A timed loop over our call."""
        bound.clear()
        return self.backend.runner(bound, mode or self.backend.modes[-1])

    def peer_runners(
        self, case: Case, elements: int, in_place: bool, mode: str | None = None
    ) -> list[Runner | None]:
        """Timed loops of the peers over the same call, on ordinary memory."""
        bound = bind(case, self.comm.rank, elements, in_place, self._ordinary)
        bound.clear()
        return [peer.runner(bound, mode or self.backend.modes[-1]) for peer in self.peers]

    def measure(
        self, case: Case, algorithm: str, elements: int, in_place: bool, mode: str | None = None
    ) -> dict[str, Any]:
        """One row. Collective."""
        bound = self.bound(case, algorithm, elements, in_place)
        wrong = self.verify(bound)
        runners = [self.runner(bound, mode), *self.peer_runners(case, elements, in_place, mode)]
        ours, *theirs = take_turns(self.clock, runners, self.effort)
        assert ours is not None
        return self.row(case, algorithm, bound, ours, wrong, theirs, mode)

    def row(
        self,
        case: Case,
        algorithm: str,
        bound: Bound,
        ours: Sample,
        wrong: int | None,
        theirs: Sequence[Sample | None] = (),
        mode: str | None = None,
    ) -> dict[str, Any]:
        """The fields of `report.FIELDS`."""
        comm, nbytes = self.comm, bound.nbytes
        name = self.chosen(algorithm, case.collective, nbytes)
        predicted = self.backend.predict(
            name, case.collective, nbytes, case.root, symmetric=self.symmetric
        )
        self.last += ours.last
        algbw = bandwidth(nbytes, ours.median)
        peers = [
            {
                "name": peer.name,
                "version": peer.version,
                "time_us": _digits(sample.median * 1e6),
                "ratio": _digits(sample.median / ours.median) if ours.median else None,
            }
            for peer, sample in zip(self.peers, theirs, strict=True)
            if sample is not None
        ]
        return {
            "collective": case.collective,
            "algorithm": name,
            "bytes": nbytes,
            "count": case.count(bound.elements),
            "dtype": case.dtype,
            "op": case.op if case.collective in REDUCING else "none",
            "root": case.root if case.collective in ROOTED else None,
            "order": (self.order or "any") if case.collective in REDUCING else None,
            "ranks": comm.size,
            "nodes": len(set(comm.nodes)),
            "transport": self.backend.transport,
            "device": self.backend.device,
            "mode": mode or self.backend.modes[-1],
            "symmetric": self.symmetric,
            "in_place": bound.in_place and case.collective != "barrier",
            "time_us": _digits(ours.median * 1e6),
            "p99_us": _digits(ours.p99 * 1e6),
            "algbw_gbs": _digits(algbw),
            "busbw_gbs": _digits(algbw * bus_factor(case.collective, comm.size)),
            "wrong": wrong,
            "predicted_us": None if predicted is None else _digits(predicted * 1e6),
            "peers": peers,
        }


def _digits(value: float) -> float:
    """Six digits: what a time or a ratio can mean."""
    return float(f"{value:.6g}")


def sizes(low: int, high: int, factor: int, step: int | None) -> list[int]:
    """Sizes from `low` to `high`: times `factor`, or plus `step` if given."""
    if high < low:
        raise ValueError(f"the largest size, {high}, is below the smallest, {low}")
    found, size = [], low
    while size <= high:
        found.append(size)
        grown = size + step if step else size * factor
        size = grown if grown > size else 1
    return found


def elements_of(case: Case, wanted: Sequence[int]) -> list[int]:
    """Elements for each size; what rounding makes equal comes once."""
    return list(dict.fromkeys(case.elements(nbytes) for nbytes in wanted))


def candidates(comm: Communicator, collective: str, root: int = 0) -> list[str]:
    """Every algorithm that can do `collective` on these ranks, and what the tuner chooses."""
    return comm._tuner.candidates(collective, root)


def check_case(comm: Communicator, case: Case, algorithm: str, order: str | None) -> None:
    """Raises, equally on all ranks, if the case cannot run here."""
    if case.root >= comm.size:
        raise ValueError(f"root {case.root} is out of range: ranks are 0 to {comm.size - 1}")
    if case.collective in REDUCING:
        why = _core.why_op_unsupported(case.op, case.dtype)
        if why:
            raise UnsupportedError(why)
    if algorithm != "auto":
        known_algorithm(algorithm, [a.name for a in algorithms()])
        why = why_unsupported(
            algorithm, case.collective, comm.size, root=case.root, node=comm.nodes
        )
        if why:
            raise UnsupportedError(
                f"{algorithm} cannot do {case.collective} with these {comm.size} ranks: {why}"
            )
        schedule(algorithm, case.collective, comm.size, root=case.root, node=comm.nodes)
    if order not in (None, "any", "rank"):
        raise ValueError(f"order {order!r}; known: any, rank")


__all__ = [
    "Bench",
    "candidates",
    "check_case",
    "elements_of",
    "places",
    "sizes",
]
