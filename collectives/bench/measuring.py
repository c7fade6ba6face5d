"""One row of a benchmark: verify, then time, ours and the peers' in turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .. import _core
from ..communicator import Communicator
from ..errors import UnsupportedError
from ..schedule import algorithms, why_unsupported
from ..tuning import known_algorithm, model
from .cases import REDUCING, Bound, Buffers, Case, as_user, bind, call, places, prepare
from .machine import cores
from .peers import Peer
from .report import bandwidth, bus_factor
from .timing import Clock, Effort, Runner, Sample, core_loop, python_loop, take_turns


@dataclass
class Bench:
    """Ranks and how they are to be measured. Collective to make.

    check      how often each result is verified before it is timed; 0 for never
    python     loops in Python, through the methods that users call
    symmetric  our arrays come from `Communicator.empty`; the peers' never do
    capacity   bytes of the largest vector
    """

    comm: Communicator
    capacity: int
    effort: Effort = field(default_factory=Effort)
    check: int = 1
    python: bool = False
    symmetric: bool = False
    order: str | None = None
    peers: Sequence[Peer] = ()

    def __post_init__(self) -> None:
        self.clock = Clock(self.comm)
        self.cores = cores(self.comm)
        table = self.comm._tuner.measured
        self.figures = table.figures if table is not None else None
        self.buffers = Buffers(self.comm, self.capacity, symmetric=self.symmetric)
        self._ordinary = self.buffers
        self.last = np.zeros(self.comm.size, np.int64)  # calls that each rank ended last
        if self.symmetric and self.peers:
            self._ordinary = Buffers(self.comm, self.capacity)

    def chosen(self, algorithm: str, collective: str, nbytes: int) -> str:
        """The name of the algorithm that serves a call."""
        if algorithm != "auto" or collective == "barrier":
            return algorithm
        return self.comm._tuner.choose(collective, nbytes)

    def bound(self, case: Case, algorithm: str, elements: int, in_place: bool) -> Bound:
        """The call with our buffers."""
        kwargs: dict[str, Any] = {}
        if algorithm != "auto":
            kwargs["algorithm"] = algorithm
        if case.collective in REDUCING and self.order is not None:
            kwargs["order"] = self.order
        rank = self.comm.rank
        return bind(case, rank, elements, in_place, self.buffers, **kwargs)

    def verify(self, bound: Bound) -> int | None:
        """Wrong elements on all ranks together, None if nothing is checked. Collective."""
        if bound.case.collective == "barrier" or not self.check:
            return None
        wrong = 0
        for _ in range(self.check):
            bound.fill()
            self.comm.barrier()
            call(self.comm, bound)
            wrong += bound.wrong()
        counted = self.comm.all_gather(np.array([wrong], np.float64))
        return int(np.sum(counted))

    def runner(self, bound: Bound) -> Runner:
        """A timed loop over our call."""
        bound.clear()
        if self.python:
            return python_loop(self.comm, bound, as_user(self.comm, bound))
        return core_loop(self.comm, prepare(self.comm, bound))

    def peer_runners(self, case: Case, elements: int, in_place: bool) -> list[Runner | None]:
        """Timed loops of the peers over the same call, on ordinary memory."""
        bound = bind(case, self.comm.rank, elements, in_place, self._ordinary)
        bound.clear()
        return [peer.runner(bound) for peer in self.peers]

    def measure(self, case: Case, algorithm: str, elements: int, in_place: bool) -> dict[str, Any]:
        """One row. Collective."""
        bound = self.bound(case, algorithm, elements, in_place)
        wrong = self.verify(bound)
        runners = [self.runner(bound), *self.peer_runners(case, elements, in_place)]
        ours, *theirs = take_turns(self.clock, runners, self.effort)
        assert ours is not None
        return self.row(case, algorithm, bound, ours, wrong, theirs)

    def row(
        self,
        case: Case,
        algorithm: str,
        bound: Bound,
        ours: Sample,
        wrong: int | None,
        theirs: Sequence[Sample | None] = (),
    ) -> dict[str, Any]:
        """The fields of `report.FIELDS`."""
        comm, nbytes = self.comm, bound.nbytes
        name = self.chosen(algorithm, case.collective, nbytes)
        predicted = model.predict(
            name,
            case.collective,
            nbytes,
            comm.nodes,
            comm.transports,
            root=case.root,
            cores=self.cores,
            figures=self.figures,
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
            "ranks": comm.size,
            "nodes": len(set(comm.nodes)),
            "transport": comm.transports,
            "device": "cpu",
            "mode": "host",
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
