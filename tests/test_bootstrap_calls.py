"""Calls of a bootstrap: what they return, and who is named when one of them cannot end."""

import contextlib
import time

import pytest
from bootstraps import run_all, tcp_world, thread_world

from collectives import bootstrap
from collectives.bootstrap import Solo, Threads
from collectives.errors import (
    AbortedError,
    ClosedError,
    CollectiveError,
    DeadlineError,
    MismatchError,
    PeerDiedError,
)


@contextlib.contextmanager
def solo_world(size, timeout=10.0):
    assert size == 1
    yield [Solo(timeout)]


WORLDS = [
    pytest.param(thread_world, id="threads"),
    pytest.param(tcp_world, id="tcp"),
]


@pytest.mark.parametrize(
    ("world", "size"),
    [(solo_world, 1), *[(w, n) for w in (thread_world, tcp_world) for n in (1, 2, 5)]],
)
def test_calls(world, size):
    with world(size) as ranks:

        def work(rank):
            gathered = [rank.all_gather(bytes([rank.rank]) * i * rank.rank) for i in range(4)]
            sent = rank.broadcast(b"from %d" % rank.rank, root=size - 1)
            rank.barrier()
            rank.check()
            large = rank.all_gather(bytes([rank.rank]) * 300_000)
            return gathered, sent, large

        for gathered, sent, large in run_all(*(lambda r=r: work(r) for r in ranks)):
            assert gathered == [[bytes([r]) * i * r for r in range(size)] for i in range(4)]
            assert sent == b"from %d" % (size - 1)
            assert large == [bytes([r]) * 300_000 for r in range(size)]
        assert [rank.rank for rank in ranks] == list(range(size))
        assert {rank.size for rank in ranks} == {size}
        assert len({rank.job for rank in ranks}) == 1
        assert isinstance(ranks[0], bootstrap.Bootstrap)
        with pytest.raises(CollectiveError, match=f"root is {size}; ranks are 0 to {size - 1}"):
            ranks[0].broadcast(b"", root=size)


@pytest.mark.parametrize("world", WORLDS)
def test_subgroups(world):
    with world(4) as ranks:

        def work(rank):
            if rank.rank == 1:
                return None
            group = rank.subgroup([3, 0, 2], "some")
            got = group.all_gather(b"%d" % rank.rank)
            group.close()
            return group.rank, group.size, group.job, got

        results = run_all(*(lambda r=r: work(r) for r in ranks))
        assert [results[r][0] for r in (3, 0, 2)] == [0, 1, 2]
        assert all(
            result[1] == 3 and result[3] == [b"3", b"0", b"2"] for result in results if result
        )
        jobs = {result[2] for result in results if result}
        assert len(jobs) == 1 and ranks[0].job not in jobs
        run_all(*(rank.barrier for rank in ranks))
        with pytest.raises(CollectiveError, match="lacks this rank, 0"):
            ranks[0].subgroup([1, 2], "others")
        with pytest.raises(CollectiveError, match="ranks must be different and 0 to 3"):
            ranks[0].subgroup([0, 0], "twice")


@pytest.mark.parametrize("world", WORLDS)
def test_deadline_names_who_is_missing(world):
    with world(4) as ranks:
        calls = [lambda r=r: ranks[r].all_gather(b"", timeout=0.2 if r == 0 else 9) for r in (0, 2)]
        for error in run_all(*calls):
            assert isinstance(error, DeadlineError) and isinstance(error, TimeoutError)
            assert (
                "rank 0 waited 0.2 s; ranks 0, 2 of 4 came, ranks 1, 3 have not called it"
                in str(error)
            )
        with pytest.raises(DeadlineError, match="rank 0 waited"):  # the group stays broken
            ranks[3].barrier()


@pytest.mark.parametrize("world", WORLDS)
def test_mismatch(world):
    with world(2) as ranks:
        for error in run_all(ranks[0].barrier, lambda: ranks[1].all_gather(b"")):
            assert isinstance(error, MismatchError)
            assert "barrier" in str(error) and "all_gather" in str(error)


@pytest.mark.parametrize("world", WORLDS)
def test_abort_ends_a_pending_call(world):
    with world(3) as ranks:

        def abort():
            time.sleep(0.1)
            ranks[2].abort("no more data")

        errors = run_all(ranks[0].barrier, ranks[1].barrier, abort)
        for error in errors[:2]:
            assert isinstance(error, AbortedError) and error.peer == 2
            assert "rank 2 aborted: no more data" in str(error)
        with pytest.raises(AbortedError):
            ranks[0].check()


@pytest.mark.parametrize("world", WORLDS)
def test_abort_by_another_thread_of_the_same_rank(world):
    with world(2) as ranks:

        def abort():
            time.sleep(0.1)
            ranks[0].abort("stop")

        error, _ = run_all(ranks[0].barrier, abort)
        assert isinstance(error, AbortedError)


@pytest.mark.parametrize("world", WORLDS)
def test_closed_ranks_are_named(world):
    with world(3) as ranks:
        ranks[1].close()
        with pytest.raises(ClosedError, match="this communicator is closed"):
            ranks[1].barrier()
        for error in run_all(ranks[0].barrier, ranks[2].barrier):
            assert isinstance(error, ClosedError) and error.peer == 1
            assert "barrier needs rank 1, which has closed before" in str(error)
        ranks[1].close()


def test_threads_tell_why_one_failed():
    ranks = Threads.world(3)
    group = run_all(*(lambda r=r: r.subgroup([0, 2], "g") for r in (ranks[0], ranks[2])))

    def fail():
        time.sleep(0.05)
        ranks[2].fail(KeyError("x"))

    errors = run_all(ranks[0].barrier, ranks[1].barrier, group[0].barrier, fail)
    for error in errors[:3]:
        assert isinstance(error, PeerDiedError)
        assert "rank 2 failed: KeyError: 'x'" in str(error)
    assert [error.peer for error in errors[:3]] == [2, 2, 1]


def test_threads_subgroups_must_agree():
    ranks = Threads.world(2)
    ranks[0].subgroup([0, 1], "g")
    with pytest.raises(MismatchError, match=r"its ranks are \(1, 0\), another said \(0, 1\)"):
        ranks[1].subgroup([1, 0], "g")
