"""Faults drawn at random: the drawing, the judging, and some rounds."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter

import pytest
from launch import WORKERS

from collectives.chaos import judging, plan, playing, verify
from collectives.chaos.judging import judge, ranks_in
from collectives.chaos.stage import Outcome, Report


def chaos(*arguments, timeout=100, **more):
    env = {k: v for k, v in os.environ.items() if not k.startswith("COLLECTIVES_")} | more
    command = [sys.executable, "-m", "collectives", "chaos", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env)


# ---- drawing ------------------------------------------------------------------------------------


def test_a_seed_draws_the_same_rounds_again_and_others_from_another_seed():
    first = [plan.draw(7, number, 4) for number in range(50)]
    assert first == [plan.draw(7, number, 4) for number in range(50)]
    assert plan.draw(7, 30, 4) == first[30]
    assert first != [plan.draw(8, number, 4) for number in range(50)]


def test_every_fault_comes_at_every_moment_that_it_can():
    drawn = Counter((p.kind, p.moment) for p in (plan.draw(1, n, 4) for n in range(2000)))
    possible = {(kind, m) for m, kinds in plan.POSSIBLE.items() for kind in kinds}
    assert set(drawn) == possible
    assert {kind for kind, _ in possible} == set(plan.KINDS)
    algorithms = {plan.draw(1, n, 4).algorithm for n in range(2000)}
    assert {"ring", "direct_two_shot", "double_binary_tree", "hierarchical", None} <= algorithms


def test_what_is_drawn_for_gpus():
    rounds = [plan.draw(1, n, 4, "cuda") for n in range(3000)]
    assert rounds[7] == plan.draw(1, 7, 4, "cuda")
    possible = {(kind, m) for m, kinds in plan.POSSIBLE.items() for kind in kinds}
    assert {(p.kind, p.moment) for p in rounds} == possible
    assert {p.way for p in rounds} == set(verify.WAYS)
    assert {p.elements for p in rounds} == set(plan.COUNTS_ON_GPUS)
    known = {"direct_one_shot", "direct_two_shot", "ring", "halving_doubling", None}
    assert known | {"double_binary_tree", "hierarchical"} <= {p.algorithm for p in rounds}
    assert {p.device for p in rounds} == {"cuda"}
    assert all(p.way == "" for p in (plan.draw(1, n, 4) for n in range(100)))


def test_on_two_gpus_there_are_never_more_than_two_ranks():
    assert {plan.draw(1, n, 2, "cuda").ranks for n in range(500)} == {2}


def test_a_stopped_rank_goes_on_when_its_deadline_has_passed():
    for device in ("cpu", "cuda"):
        for one in (plan.draw(1, n, 4, device) for n in range(300)):
            if one.kind in plan.STOPPED:
                assert (one.stopped > one.timeout) == (one.kind == "sigcont")


# ---- rounds -------------------------------------------------------------------------------------


@pytest.mark.faults
def test_some_rounds(tmp_path):
    """A generous limit, since tests share their machine; `chaos` itself says one second."""
    got = chaos("--rounds", 8, "--seed", 11, "--within", 20, "--json", tmp_path / "figures.json")
    assert got.returncode == 0, got.stdout + got.stderr
    assert "8 rounds of seed 11" in got.stdout
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert len(figures["rounds"]) == 8
    assert figures["violations"] == 0
    assert sum(len(r["raised"]) for r in figures["rounds"]) > 4


def every_fault(*arguments):
    env = {k: v for k, v in os.environ.items() if not k.startswith("COLLECTIVES_")}
    command = [sys.executable, WORKERS / "every_fault.py", *arguments]
    got = subprocess.run(command, capture_output=True, text=True, timeout=110, env=env)
    assert got.returncode == 0, got.stdout + got.stderr
    return int(re.search(r"(\d+) rounds, 0 not as promised", got.stdout).group(1))


@pytest.mark.faults
def test_every_fault_at_every_moment_that_it_can_come_at():
    assert every_fault("moments") > sum(len(kinds) for kinds in plan.POSSIBLE.values())


@pytest.mark.faults
def test_a_death_in_the_middle_of_a_call_of_every_algorithm():
    assert every_fault("algorithms", "sigkill") > 30


@pytest.mark.faults
def test_a_rank_that_stops_in_the_middle_of_an_all_reduce_of_every_algorithm():
    assert every_fault("algorithms", "sigstop", "all_reduce") > 5


@pytest.mark.faults
def test_a_violation_is_shown_and_changes_the_exit_status():
    """What is right counts as wrong here, since a real violation cannot be had."""
    number = next(
        n
        for n in range(100)
        if (p := plan.draw(5, n, 4)).kind == "sigkill" and p.moment == "between calls"
    )
    program = (
        "import sys, collectives.chaos.judging as judging\n"
        "from collectives.cli import main\n"
        "judging._KINDS['sigkill'] = {'MismatchError'}\n"
        f"sys.exit(main(['chaos', '--seed', '5', '--only', '{number}']))\n"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith("COLLECTIVES_")}
    command = [sys.executable, "-c", program]
    got = subprocess.run(command, capture_output=True, text=True, timeout=100, env=env)
    assert got.returncode == 1, got.stdout + got.stderr
    assert "WRONG: rank" in got.stdout
    assert "1 not as promised" in got.stdout


def test_it_starts_its_ranks_itself():
    env = {**os.environ, "COLLECTIVES_RANK": "0", "COLLECTIVES_WORLD_SIZE": "1"}
    command = [sys.executable, "-m", "collectives", "chaos", "--rounds", "1"]
    got = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert got.returncode == 2
    assert "start it without a launcher" in got.stderr


def test_on_gpus_rounds_go_one_by_one():
    got = chaos("--device", "cuda", "--jobs", 2)
    assert got.returncode == 2
    assert "rounds on GPUs go one by one" in got.stderr


def test_without_a_gpu_it_says_what_is_missing():
    got = chaos("--device", "cuda", CUDA_VISIBLE_DEVICES="")
    assert got.returncode == 2
    assert re.search("--device cuda: .*(cupy|CUDA|GPU|driver)", got.stderr), got.stderr


def test_a_round_may_be_the_last_for_want_of_time(tmp_path):
    file = tmp_path / "figures.json"
    got = chaos("--rounds", 9, "--seconds", 1e-3, "--seed", 11, "--within", 20, "--json", file)
    assert got.returncode == 0, got.stdout + got.stderr
    assert len(json.loads(file.read_text())["rounds"]) == 1


@pytest.mark.parametrize("certain", [True, False])
def test_only_what_may_be_the_machine_s_doing_is_tried_again(monkeypatch, certain):
    played = []

    def run(stage):
        played.append(stage)
        return killed(starved=1.0, stuck=["rank 2 did not end"]) if certain else late

    late = killed(starved=1.0)
    monkeypatch.setattr(playing.Stage, "run", run)
    one = playing.play_plan(late.plan, 0.1)
    assert one.verdict.violations and one.again == (0 if certain else 3)
    assert len(played) == one.again + 1


# ---- judging ------------------------------------------------------------------------------------


def killed(**changes):
    """A good round: rank 1 of 3 is killed between two calls."""
    drawn = plan.draw(1, 0, 4)._replace(
        ranks=3, kind="sigkill", moment="between calls", victims=(1,), timeout=20.0
    )
    reports = []
    for new, rank in enumerate((0, 2)):
        error = {"kind": "PeerDiedError", "text": "rank 1 (process 7) died", "where": "call"}
        reports += [
            Report(rank, "begins", 9.0, {}),
            Report(rank, "raised", 10.2, error),
            Report(rank, "shrunk", 10.3, {"size": 2, "rank": new, "attempts": 1}),
            Report(rank, "done", 10.4, {}),
        ]
    whole = Outcome(drawn, reports, {1: 10.0}, [0, -9, 0], [], [], 1.0, 0.0)
    return whole._replace(**changes)


def altered(what, **facts):
    """The good round with some facts of a report of rank 0 changed."""
    whole = killed()
    return whole._replace(
        reports=[
            r._replace(facts={**r.facts, **facts}) if (r.what, r.rank) == (what, 0) else r
            for r in whole.reports
        ]
    )


def test_a_good_round_has_no_violation():
    verdict = judge(killed(), 1.0)
    assert verdict.violations == []
    assert verdict.detected == pytest.approx([0.2, 0.2])
    assert verdict.raised == ["PeerDiedError"] * 2


def without(what):
    return killed(reports=[r for r in killed().reports if r.what != what])


@pytest.mark.parametrize(
    ("outcome", "within", "words"),
    [
        (killed(), 0.1, "0.20 s after the blow (0.00 s of them without a processor), the"),
        (altered("raised", kind="MismatchError"), 1, "rank 0 raised MismatchError"),
        (altered("raised", text="something"), 1, "does not name rank 1"),
        (altered("raised", text="rank 11 died"), 1, "does not name rank 1"),
        (altered("shrunk", size=3), 1, "went on as 0 of 3, not 0 of 2"),
        (altered("shrunk", attempts=2), 1, "had to shrink 2 times"),
        (without("raised"), 1, "rank 0 raised nothing"),
        (without("shrunk"), 1, "rank 0 did not go on"),
        (without("done"), 1, "rank 2 did not come to its end"),
        (killed(statuses=[0, -9, -11]), 1, "rank 2 ended with status -11"),
        (killed(stuck=["rank 2 did not end"]), 1, "rank 2 did not end"),
        (killed(left=["/dev/shm/collectives is left"]), 1, "is left"),
        (killed(blows={}), 1, "rank 1 never came to its end"),
        (
            killed(reports=[*killed().reports, Report(0, "wrong", 1.0, {"text": "bad bits"})]),
            1,
            "rank 0: bad bits",
        ),
    ],
)
def test_what_is_wrong_is_found(outcome, within, words):
    found = judge(outcome, within).violations
    assert any(words in text for text in found), found


def test_time_without_a_processor_is_the_machine_s():
    assert judge(altered("raised", starved=0.05), 0.17).violations != []  # rank 2 had one
    assert judge(altered("raised", starved=0.05), 0.2001).violations == []
    whole = killed()
    reports = [
        r._replace(facts={**r.facts, "starved": 0.15}) if r.what == "raised" else r
        for r in whole.reports
    ]
    assert judge(whole._replace(reports=reports), 0.1).violations == []


def test_a_stopped_rank_may_take_as_long_as_the_deadline():
    whole = killed()
    whole = whole._replace(plan=whole.plan._replace(kind="sigstop", timeout=0.15))
    found = judge(whole, 0.1).violations
    assert all("PeerDiedError" in words for words in found), found
    assert judging._patience(whole.plan) == 0.15


def continued(kind, *victim, **changes):
    """The good round, but rank 1 was stopped and goes on; what it reports then."""
    whole = killed(statuses=[0, 0, 0], **changes)
    reports = [*whole.reports, *(Report(1, what, 14.0, facts) for what, facts in victim)]
    plan_of_it = whole.plan._replace(kind=kind, timeout=1.5)
    return whole._replace(plan=plan_of_it, reports=reports)


LATE = ("raised", {"kind": "DeadlineError", "text": "rank 1 waited", "where": "call"})
DONE = ("done", {})


@pytest.mark.parametrize(
    ("victim", "words"),
    [
        ([LATE], "rank 1 went on and did not come to its end"),
        ([DONE], "rank 1 went on as if nothing had happened"),
        ([LATE, DONE], ""),
    ],
)
def test_who_was_stopped_for_too_long_hears_of_it_too(victim, words):
    reports = [
        r._replace(facts={**r.facts, "kind": "DeadlineError"}) if r.what == "raised" else r
        for r in killed().reports
    ]
    found = judge(continued("sigcont", *victim, reports=reports), 1.0).violations
    assert any(words in text for text in found) if words else found == [], found


def test_a_pause_raises_nothing():
    found = judge(continued("pause", DONE), 1.0).violations
    assert len(found) == 2 and all("raised because of a pause" in text for text in found), found
    calm = [r for r in killed().reports if r.what not in ("raised", "shrunk")]
    assert judge(continued("pause", DONE, reports=calm), 1.0).violations == []


def test_on_gpus_a_closed_rank_may_have_died_and_the_ranks_show_a_mismatch_together():
    whole = killed()
    closed = whole._replace(plan=whole.plan._replace(kind="close"))
    assert any("PeerDiedError" in words for words in judge(closed, 1.0).violations)
    on_gpus = closed._replace(plan=closed.plan._replace(device="cuda"))
    assert judge(on_gpus, 1.0).violations == []
    reports = [
        r._replace(facts={**r.facts, "kind": "MismatchError", "text": f"count={5 + r.rank}"})
        if r.what == "raised"
        else r
        for r in whole.reports
    ]
    differ = whole._replace(
        plan=whole.plan._replace(kind="mismatch", victims=(2,), ranks=3, device="cuda"),
        reports=[*reports, *(r._replace(rank=1) for r in reports if r.rank == 0)],
        statuses=[0, 0, 0],
    )
    assert judge(differ, 1.0).violations == []
    on_host = differ._replace(plan=differ.plan._replace(device="cpu"))
    assert len([w for w in judge(on_host, 1.0).violations if "both signatures" in w]) == 3


def test_ranks_that_a_message_names():
    assert ranks_in("rank 3 died; ranks 0-2, 5 came, ranks 7 and 9 have not") == {
        3,
        0,
        1,
        2,
        5,
        7,
        9,
    }
    assert ranks_in("4 ranks, and rank x") == set()
