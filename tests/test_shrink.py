"""Communicator.shrink: those that are left agree who they are and go on, whoever ended and when."""

from __future__ import annotations

import re
import threading
import time

import cases
import launch
import numpy as np
import pytest
from cases import Case
from worlds import outcomes, wait_until

import collectives as cc
from collectives import _core
from collectives.shrinking import AGAIN, BUILT

pytestmark = pytest.mark.faults


def ones(count=12):
    return np.ones(count, np.float32)


def shrunk(n, how, victims, *arguments, launcher="run", options=("--keep-going",)):
    """Runs the worker; all ranks but the victims must have gone on, renumbered in order."""
    text = ",".join(map(str, victims))
    got = launch.run(
        n, "shrinking.py", how, "--victims", text, *arguments, launcher=launcher, options=options
    )
    left = [r for r in range(n) if r not in victims]
    for new, old in enumerate(left):
        assert f"rank {old} went on as {new} of {len(left)}\n" in got.output, got
    assert "AssertionError" not in got.output, got
    return got


# ---- processes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "n", "victims"),
    [
        ("killed", 4, [1]),
        ("killed", 4, [0, 3]),
        ("exits", 3, [0]),
        ("raises", 3, [2]),
        ("closes", 3, [1]),
        ("middle", 4, [2]),
        ("queued", 4, [0]),
        ("healthy", 3, []),
        ("in_subgroup", 5, [1]),
    ],
)
def test_survivors_go_on(how, n, victims):
    shrunk(n, how, victims).expect(status=0)


@pytest.mark.parametrize("delay", [0.0, 0.001, 0.004])
def test_a_death_while_the_others_shrink(delay):
    shrunk(4, "in_shrink", [1, 2], "--delay", delay).expect(status=0)


def test_until_one_is_left():
    got = launch.run(4, "shrinking.py", "again", options=("--keep-going",)).expect(status=0)
    assert "rank 0 went on as 0 of 1" in got.output, got


def test_a_stopped_rank_is_left_out_and_hears_of_it():
    got = shrunk(3, "stopped", [1]).expect(status=0)
    assert "rank 1 came too late" in got.output, got


def test_the_launcher_keeps_going_only_when_told():
    got = launch.run(3, "shrinking.py", "killed", "--victims", "1")
    assert got.status == 128 + 9, got
    assert re.search(r"rank 1 \(pid \d+\) was ended by SIGKILL", got.output), got


# ---- threads ------------------------------------------------------------------------------------


def test_thread_ranks_shrink_again_and_again():
    def body(comm):
        sizes = []
        while True:
            sizes.append(comm.size)
            cases.check(comm, Case("all_reduce", count=3000))
            if comm.size == 1:
                return sizes
            if comm.rank == comm.size // 2:
                comm.close()
                return sizes
            with pytest.raises((cc.ClosedError, cc.AbortedError)):
                while True:
                    comm.all_reduce(ones())
            smaller = comm.shrink(timeout=10)
            comm.close()
            comm = smaller

    got = outcomes(4, body)
    assert sorted(map(str, got)) == sorted(map(str, [[4], [4, 3], [4, 3, 2], [4, 3, 2, 1]])), got


def test_shrinking_after_an_abort_loses_nobody():
    """Nobody has ended: all go on, with the queue of the old communicator settled."""

    def body(comm):
        x = ones(40_000)
        works = [comm.all_reduce(x, async_op=True) for _ in range(2)]
        comm.barrier()
        if comm.rank == 1:
            comm.abort("enough")
        more = [comm.all_reduce(ones(), async_op=True)] if comm.rank == 0 else []
        new = comm.shrink(timeout=10)
        assert [w.exception() for w in works] == [None, None]
        assert all(isinstance(w.exception(), cc.AbortedError) for w in more)
        with pytest.raises(cc.AbortedError, match="enough"):
            comm.barrier()
        cases.check(new, Case("all_gather", count=30))
        return new.size

    assert outcomes(3, body) == [3, 3, 3]


def test_queued_calls_do_not_run_after_one_has_failed():
    """Behind a failure the ranks are out of step, so a later call could take another one's data."""

    def body(comm):
        if comm.rank == 1:
            wait_until(queued.is_set)
            comm.close()
            return None
        works = [comm.all_reduce(ones(), async_op=True) for _ in range(5)]
        queued.set()
        errors = [w.exception(10) for w in works]
        assert isinstance(errors[0], (cc.ClosedError, cc.AbortedError)), errors
        assert all(isinstance(e, cc.AbortedError) for e in errors[1:]), errors
        return comm._core.calls

    queued = threading.Event()
    calls = outcomes(3, body)
    assert calls == [1, None, 1]


def test_a_rank_that_does_not_come_is_left_out_and_told():
    def body(comm):
        if comm.rank == 2:
            wait_until(lambda: len(done) == 2, 20)
            with pytest.raises(cc.AbortedError, match=r"\[0, 1\] went on without"):
                comm.all_reduce(ones())
            with pytest.raises(cc.AbortedError, match="ranks 0-1 went on without rank 2"):
                comm.shrink(timeout=5)
            return "late"
        new = comm.shrink(timeout=3)
        done.append(comm.rank)
        cases.check(new, Case("all_reduce"))
        return new.size

    done = []
    assert outcomes(3, body) == [2, 2, "late"]


def test_the_deadline_of_calls_is_not_that_of_shrinking():
    """How long to wait for the others is one thing, how long their calls may be apart another."""

    def body(comm):
        comm.barrier()
        smaller = comm.shrink(timeout=1)
        if smaller.rank == 1:
            time.sleep(1.3)
        got = smaller.all_reduce(np.ones(3))
        part = smaller.split(0)
        return float(got[0]), smaller._bootstrap.timeout, part._core.timeout

    assert cc.run_threads(2, body, timeout=60) == [(2.0, 60, 60)] * 2


def test_what_is_asked_of_a_closed_or_lonely_one():
    def body(comm):
        alone = comm.shrink()
        assert (alone.size, alone.transports) == (1, "self")
        comm.close()
        with pytest.raises(cc.ClosedError):
            comm.shrink()
        return alone.all_reduce(ones(1)).tolist()

    assert cc.run_threads(1, body) == [[1.0]]


def test_groups_of_a_shrunk_communicator():
    """Its control plane carries everything that the old one did."""

    def body(comm):
        if comm.rank == 0:
            comm.close()
            return None
        comm = comm.shrink(timeout=10)
        for turn in range(6):  # parts of different sizes, so that some are ahead of others
            part = comm.split(comm.rank % 2 if turn % 2 else int(comm.rank == 0))
            cases.check(part, Case("all_reduce"))
            part.close()
            x = comm.empty(3)
            x[:] = turn
            assert comm.all_reduce(x)[0] == turn * comm.size
        large = bytes([comm.rank]) * 100_000  # of several letters
        assert [len(b) for b in comm._bootstrap.all_gather(large)] == [100_000] * comm.size
        twin = comm.duplicate()
        cases.check(twin, Case("broadcast"))
        return comm.size

    assert outcomes(6, body) == [None, *[5] * 5]


# ---- the decision itself ------------------------------------------------------------------------


def test_one_proposal_wins_and_stays():
    """Many threads propose different members at once: all read one decision, one of those."""

    def body(comm):
        council = comm._core.council
        got = []
        for attempt in range(1, 60):
            comm.barrier()
            mine = sorted({comm.rank, attempt % comm.size})
            got.append((council.propose(attempt, mine), council.settle(attempt, 1 + comm.rank)))
            assert council.decided(attempt) == got[-1][0]
            assert council.settled(attempt) == got[-1][1]
        return got

    got = outcomes(4, body)
    for attempt, said in enumerate(zip(*got, strict=True), 1):
        assert len({str(one) for one in said}) == 1, said
        assert said[0][0] in [sorted({r, attempt % 4}) for r in range(4)]


def test_what_is_forgotten_counts_as_outdated():
    def body(comm):
        council = comm._core.council
        if comm.rank == 0:
            assert council.decided(1) is None
            assert council.settled(1) == 0
            for attempt in range(1, 18):
                council.propose(attempt, [0])
                council.settle(attempt, AGAIN)
            assert council.decided(17) == [0]
            assert council.decided(1) == []
            assert council.settled(1) == _core.outdated
            assert council.settle(1, BUILT) == _core.outdated

    assert outcomes(2, body) == [None, None]


# ---- MPI ----------------------------------------------------------------------------------------


@pytest.mark.mpi
def test_survivors_under_an_mpi_that_lets_them_live():
    """Open MPI's mpirun --enable-recovery; shrinking itself needs nothing of MPI within a host."""
    got = launch.run(3, "shrinking.py", "killed", "--victims", "1", launcher="openmpi-recovery")
    for words in ("rank 0 went on as 0 of 2\n", "rank 2 went on as 1 of 2\n"):
        assert words in got.output, got


@pytest.mark.mpi
def test_between_nodes_only_a_whole_communicator_can_shrink():
    got = launch.run(3, "shrinking.py", "nodes", launcher="openmpi").expect(status=0)
    assert got.output.count("UnsupportedError: shrink: the ranks are on several nodes") == 3, got


@pytest.mark.mpi
@pytest.mark.faults
@pytest.mark.parametrize("how", ["nodes-killed", "nodes-unnoticed"])
def test_after_a_death_between_nodes_the_error_says_what_can_be_done(how):
    """And it can: the part of the ranks of one node shrinks and works."""
    got = launch.run(4, "shrinking.py", how, launcher="openmpi-recovery")
    for rank in (0, 2, 3):
        (words,) = re.findall(rf"^rank {rank}: UnsupportedError: (.*)", got.output, re.MULTILINE)
        for part in ("ULFM, is not used", "comm.split(comm.node)", "what failed: ", "time: True"):
            assert part in words, got
        assert f"rank {rank}: a part of {1 if rank == 3 else 2} works" in got.output, got
    raised = re.findall(r"^rank \d: (\w+)$", got.output, re.MULTILINE)
    if how == "nodes-killed":
        assert len(raised) == 3 and set(raised) <= {"PeerDiedError", "DeadlineError"}, got
