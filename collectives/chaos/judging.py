"""Holds what the ranks of a round have reported to what is promised (docs/reliability.md)."""

from __future__ import annotations

import re
from typing import NamedTuple

from ..bootstrap.wire import GRACE
from .plan import Plan
from .stage import Outcome, Report

# What survivors may raise. Who hears from a peer that gave up raises AbortedError, with its reason.
_KINDS = {
    "sigkill": {"PeerDiedError", "AbortedError"},
    "exit": {"PeerDiedError", "AbortedError"},
    # Python drops what a failed program still holds on its way out, which closes it.
    "raise": {"PeerDiedError", "AbortedError", "ClosedError"},
    "leave": {"PeerDiedError", "AbortedError", "ClosedError"},
    "sigstop": {"DeadlineError", "AbortedError"},
    "sigcont": {"DeadlineError", "AbortedError"},
    "close": {"ClosedError", "AbortedError"},
    "abort": {"AbortedError"},
    "mismatch": {"MismatchError"},
}
# A kernel that waits for a rank which has closed hears of it when its process ends.
_ON_GPUS = {"close": {"PeerDiedError"}}
_AT_INIT = {"BootstrapError", "PeerDiedError", "DeadlineError", "ClosedError", "AbortedError"}


class Verdict(NamedTuple):
    """What is wrong with a round (nothing, if all is well), and what it tells of the runtime.

    detected  seconds from the blow until each survivor raised, by the clock
    starved   seconds of these in which it had no processor
    raised    the class that each survivor raised first
    """

    violations: list[str]
    detected: list[float]
    raised: list[str]
    starved: list[float]


def judge(outcome: Outcome, within: float) -> Verdict:
    """`within`: seconds in which a survivor must have raised, beyond a deadline where one is to
    pass first.
    """
    plan = outcome.plan
    wrong = [*outcome.stuck, *outcome.left]
    wrong += [f"rank {r.rank}: {r.facts['text']}" for r in outcome.reports if r.what == "wrong"]
    verdict = Verdict(wrong, [], [], [])
    for rank in plan.survivors:
        of_rank = [r for r in outcome.reports if r.rank == rank]
        _judge_rank(outcome, rank, of_rank, within, verdict)
    if plan.kind == "sigcont":
        _judge_continued(outcome, verdict)
    if plan.moment not in ("at close",) and plan.kind != "mismatch":
        missing = [v for v in plan.victims if v not in outcome.blows]
        if missing:
            wrong.append(f"rank {missing[0]} never came to its end")
    return verdict


def _judge_continued(outcome: Outcome, verdict: Verdict) -> None:
    """Who was stopped for longer than the deadline: its own calls say so, and it ends in order."""
    plan, wrong = outcome.plan, verdict.violations
    for rank in plan.victims:
        reports = [r for r in outcome.reports if r.rank == rank]
        if outcome.statuses[rank] != 0 or not any(r.what == "done" for r in reports):
            wrong.append(f"rank {rank} went on and did not come to its end")
        raised = [r.facts["kind"] for r in reports if r.what == "raised"]
        if plan.moment != "at close" and not set(raised) & (_KINDS["sigcont"] | {"ClosedError"}):
            wrong.append(f"rank {rank} went on as if nothing had happened: it raised {raised}")


def _judge_rank(
    outcome: Outcome, rank: int, reports: list[Report], within: float, verdict: Verdict
) -> None:
    plan, wrong = outcome.plan, verdict.violations
    if not any(r.what == "done" for r in reports):
        wrong.append(f"rank {rank} did not come to its end")
    if outcome.statuses[rank] != 0:
        wrong.append(f"rank {rank} ended with status {outcome.statuses[rank]}")
    raised = next((r for r in reports if r.what == "raised"), None)
    if plan.moment == "at close":
        if raised is not None:
            wrong.append(f"rank {rank} raised at the close: {raised.facts['text']}")
        return
    if plan.kind == "pause":
        if raised is not None:
            wrong.append(f"rank {rank} raised because of a pause: {raised.facts['text']}")
        return
    if raised is None:
        wrong.append(f"rank {rank} raised nothing")
        return
    verdict.raised.append(raised.facts["kind"])
    _judge_error(outcome, rank, raised, within, verdict)
    if plan.kind == "mismatch" or raised.facts["where"] == "init":
        return
    shrunk = next((r for r in reports if r.what == "shrunk"), None)
    if shrunk is None:
        wrong.append(f"rank {rank} did not go on")
        return
    left = plan.survivors
    expected = (len(left), left.index(rank))
    got = (shrunk.facts["size"], shrunk.facts["rank"])
    # A death during init may part the ranks: some have a communicator, others never got one.
    if plan.moment != "in init" and got != expected:
        wrong.append(
            f"rank {rank} went on as {got[1]} of {got[0]}, not {expected[1]} of {expected[0]}"
        )
    if shrunk.facts["attempts"] > 1 and plan.moment not in ("in shrink", "in init"):
        wrong.append(f"rank {rank} had to shrink {shrunk.facts['attempts']} times")


def _judge_error(
    outcome: Outcome, rank: int, raised: Report, within: float, verdict: Verdict
) -> None:
    plan, wrong = outcome.plan, verdict.violations
    kind, text = raised.facts["kind"], raised.facts["text"]
    allowed = _KINDS[plan.kind]
    if plan.moment in ("before init", "in init"):
        allowed = allowed | _AT_INIT
    on_gpus = plan.device == "cuda"
    if on_gpus:
        allowed = allowed | _ON_GPUS.get(plan.kind, set())
    if kind not in allowed:
        wrong.append(f"rank {rank} raised {kind}: {text}")
    if plan.kind == "mismatch":
        # On GPUs a rank may leave before the others have told it of their call, and the count of an
        # all_to_all is told as the bytes of a pair too.
        told = [r for r in outcome.reports if r.what == "raised"] if on_gpus else [raised]
        words = " ".join(r.facts["text"] for r in told)
        shown = len(set(re.findall(r"count=\d+", words)))
        if shown < 2 or (shown > 2 and not on_gpus):
            wrong.append(f"rank {rank}: both signatures are not shown: {words}")
        return
    if plan.kind == "abort":
        if "chaos" not in text:
            wrong.append(f"rank {rank}: the error does not give the reason: {text}")
    elif not _names(plan) & ranks_in(text):
        wrong.append(f"rank {rank}: the error does not name rank {plan.victims[0]}: {text}")
    blow = outcome.blows.get(plan.victims[0])
    if blow is None:
        return
    # Before a rank has begun it waits for nobody.
    began = min(r.at for r in outcome.reports if (r.rank, r.what) == (rank, "begins"))
    seconds = max(0.0, raised.at - max(blow, began))
    verdict.detected.append(seconds)
    verdict.starved.append(raised.facts.get("starved", 0.0))
    limit = within + _patience(plan)
    # A rank that gets no processor can notice nothing: that time is the machine's, not ours.
    starved = raised.facts.get("starved", 0.0)
    if seconds - starved > limit:
        wrong.append(
            f"rank {rank} raised {seconds:.2f} s after the blow ({starved:.2f} s of them without a "
            f"processor), the limit is {limit:g} s"
        )


def _names(plan: Plan) -> set[int]:
    """What the victim may be called: its rank, and in a subgroup that in the subgroup."""
    names = {plan.victims[0]}
    if plan.moment == "in a subgroup" and plan.ranks > 3:
        names.add(plan.victims[0] // 2)
    return names


def ranks_in(text: str) -> set[int]:
    """All ranks that a message names: "rank 3", "ranks 0-2, 5"."""
    found: set[int] = set()
    for spans in re.findall(r"\branks? (\d+(?:-\d+)?(?:(?:, | and )\d+(?:-\d+)?)*)", text):
        for low, high in re.findall(r"(\d+)(?:-(\d+))?", spans):
            found |= set(range(int(low), int(high or low) + 1))
    return found


def _patience(plan: Plan) -> float:
    """Seconds that must pass before anybody may give up."""
    at_init = plan.moment in ("before init", "in init")
    if plan.kind not in ("sigstop", "sigcont") and not at_init:
        return 0.0
    # Who asks a server that is stopped waits a little longer for its word.
    asks = at_init or plan.moment == "in a subgroup"
    silent = asks and plan.server == "rank 0" and 0 in plan.victims
    # The part before may have been closed meanwhile, which asks it too.
    closing = min(GRACE, plan.timeout) if plan.moment == "in a subgroup" else 0.0
    return plan.timeout + (GRACE + closing if silent else 0.0)
