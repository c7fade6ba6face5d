"""Plays rounds of `chaos` that are chosen, not drawn, and writes what was not as promised.

every_fault.py moments            every fault at every moment that it can come at: to rank 0, which
                                  hosts the rendezvous, and to the last rank, where the launcher
                                  does; where a deadline has to pass, to one of them
every_fault.py algorithms KIND [COLLECTIVE]
                                  the fault KIND in the middle of a large call, of every algorithm
                                  of every collective, or of one
every_fault.py gpus JOBS          rounds on GPUs, JOBS at a time: most kinds of faults and moments,
                                  and every way of calling
"""

from __future__ import annotations

import os
import sys

from collectives.chaos import plan, playing, table
from collectives.chaos.gauge import Gauge
from collectives.schedule import algorithms, why_unsupported

RANKS = 3
WITHIN = 20.0  # seconds: tests share their machine
AT_A_TIME = 8  # most of a round is waiting

BASE = plan.draw(0, 0, RANKS)._replace(
    ranks=RANKS,
    delay=0.005,
    server="rank 0",
    collective="all_reduce",
    algorithm=None,
    elements=70_000,
    dtype="float32",
    async_op=False,
)


def timeout_of(kind: str, moment: str) -> float:
    return 1.5 if kind in ("sigstop", "sigcont") or "init" in moment else 30.0


def moments() -> list[plan.Plan]:
    found = []
    for moment, kinds in plan.POSSIBLE.items():
        for i, kind in enumerate(kinds):
            timeout = timeout_of(kind, moment)
            # Where the rendezvous is asked, one that is stopped costs many seconds.
            silent = kind in ("sigstop", "sigcont") and moment == "in a subgroup"
            for victim in (0, RANKS - 1) if timeout > 10 else ((i % 2) * (RANKS - 1),):
                # In shrink, rank 1 dies first, so that there is something to shrink.
                victims = (1, victim) if moment == "in shrink" else (victim,)
                found.append(
                    BASE._replace(
                        kind=kind,
                        moment=moment,
                        victims=victims,
                        timeout=timeout,
                        server="apart" if silent or (victim and "init" not in moment) else "rank 0",
                    )
                )
    return found


def of_algorithms(kind: str, *only: str) -> list[plan.Plan]:
    return [
        BASE._replace(
            kind=kind,
            moment="in a call",
            victims=(1,),
            timeout=timeout_of(kind, ""),
            collective=collective,
            algorithm=algorithm.name,
            elements=600_000,
        )
        for collective in only or plan.COLLECTIVES
        for algorithm in algorithms()
        if not why_unsupported(algorithm.name, collective, RANKS, node=[0] * RANKS)
    ]


# Fault, moment, algorithm, collective, elements, way.
ON_GPUS: tuple[tuple[str, str, str | None, str, int, str], ...] = (
    ("sigkill", "in a call", "direct_two_shot", "all_reduce", 600_000, "symmetric graph"),
    ("sigkill", "in a call", "ring", "all_reduce", 70_000, "graph"),
    ("sigkill", "in shrink", None, "all_reduce", 5_000, "stream"),
    ("exit", "queued calls", None, "all_to_all", 1, "stream"),  # of no elements
    ("raise", "in a subgroup", None, "all_gather", 5_000, "symmetric"),
    ("close", "between calls", None, "all_reduce", 70_000, "stream"),
    ("abort", "in a call", "direct_two_shot", "all_reduce", 70_000, "graph"),
    ("mismatch", "between calls", "ring", "all_reduce", 70_000, "symmetric"),
    ("sigstop", "between calls", "direct_two_shot", "reduce_scatter", 70_000, "symmetric"),
)


def on_gpus() -> list[plan.Plan]:
    found = []
    for number, (kind, moment, algorithm, collective, elements, way) in enumerate(ON_GPUS):
        waits = kind in ("sigstop", "sigcont")
        found.append(
            BASE._replace(
                kind=kind,
                moment=moment,
                # In shrink, rank 1 dies first, so that there is something to shrink.
                victims=(1, 0) if moment == "in shrink" else (number % RANKS,),
                timeout=3.0 if waits else 30.0,
                server="apart",
                collective=collective,
                algorithm=algorithm,
                elements=elements,
                async_op=number % 2 == 1,
                device="cuda",
                way=way,
            )
        )
    return found


def chosen(what: str, *more: str) -> list[plan.Plan]:
    if what == "gpus":
        return on_gpus()
    return moments() if what == "moments" else of_algorithms(*more)


def main() -> None:
    what = sys.argv[1]
    plans = [one._replace(number=n) for n, one in enumerate(chosen(*sys.argv[1:]))]
    jobs = int(sys.argv[2]) if what == "gpus" else AT_A_TIME
    # Of rounds that go on at a time nobody can tell whose the memory is.
    gauge = Gauge() if what == "gpus" and jobs == 1 else None

    def play(number: int) -> playing.Played:
        return playing.play_plan(plans[number], WITHIN, gauge)

    rounds = list(playing.play_all(play, range(len(plans)), jobs))
    if gauge:
        gauge.close()
    for one in rounds:
        if one.verdict.violations:
            print(table.round_as_text(one))
    print(table.as_text(rounds))
    bad = sum(bool(one.verdict.violations) for one in rounds)
    print(f"{len(rounds)} rounds, {bad} not as promised")
    sys.exit(bad != 0)


os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
main()
