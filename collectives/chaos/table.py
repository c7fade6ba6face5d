"""The figures of many rounds."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from .plan import KINDS, MOMENTS, as_json
from .playing import Played

Judged = Sequence[Played]


def as_text(rounds: Judged) -> str:
    """One line for each fault and moment that was drawn."""
    lines = [
        f"{'fault':9} {'moment':14} {'rounds':>6} {'wrong':>5}   {'median':>8} {'worst':>8}   "
        "survivors raised"
    ]
    for kind in KINDS:
        for moment in MOMENTS:
            some = [
                r for r in rounds if (r.outcome.plan.kind, r.outcome.plan.moment) == (kind, moment)
            ]
            if some:
                lines.append(f"{kind:9} {moment:14} {_figures(some)}")
    lines.append(f"{'all':24} {_figures(rounds)}")
    return "\n".join(lines)


def round_as_text(one: Played) -> str:
    """One round in full: what was drawn, what is wrong, and all reports."""
    outcome, verdict = one.outcome, one.verdict
    lines = [f"round {outcome.plan.number}: {outcome.plan}"]
    lines += [f"  WRONG: {words}" for words in verdict.violations]
    reports = sorted(outcome.reports, key=lambda r: r.at)
    lines += [
        f"  {r.at - reports[0].at:8.4f} s  rank {r.rank} {r.what} {r.facts or ''}" for r in reports
    ]
    return "\n".join(lines)


def _figures(rounds: Judged) -> str:
    times = sorted(t for _, verdict, _ in rounds for t in verdict.detected)
    raised = Counter(kind for _, verdict, _ in rounds for kind in verdict.raised)
    wrong = sum(bool(verdict.violations) for _, verdict, _ in rounds)
    median = f"{statistics.median(times) * 1e3:5.0f} ms" if times else "-"
    worst = f"{times[-1] * 1e3:5.0f} ms" if times else "-"
    words = ", ".join(f"{kind} {count}" for kind, count in raised.most_common()) or "nothing"
    return f"{len(rounds):6} {wrong:5}   {median:>8} {worst:>8}   {words}"


def as_json_document(rounds: Judged, seed: int, seconds: float) -> dict[str, Any]:
    """Everything, round by round."""
    return {
        "seed": seed,
        "seconds": round(seconds, 3),
        "violations": sum(len(verdict.violations) for _, verdict, _ in rounds),
        "rounds": [
            {
                **as_json(outcome.plan),
                "seconds": round(outcome.seconds, 4),
                "raised": verdict.raised,
                "detected": [round(t, 5) for t in verdict.detected],
                "starved": [round(t, 5) for t in verdict.starved],
                "violations": verdict.violations,
                "again": again,
            }
            for outcome, verdict, again in rounds
        ],
    }
