"""Groups: what packing may not change, and what becomes of calls that are not made."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from pathlib import Path

import launch
import numpy as np
import pytest
from disagreements import Disagreement, check
from worlds import wait_until

import collectives as cc


def read_after_write(comm):
    x, y = np.ones(4), np.zeros(3)
    comm.all_reduce(x)
    comm.all_reduce(x[1:], out=y)
    return [x, y]


def write_after_read(comm):
    a, x, b, c = np.ones(2), np.full(2, 5.0), np.zeros(2), np.full(2, 7.0)
    comm.all_reduce(a)
    comm.all_reduce(x, op="max", out=b)
    comm.all_reduce(c, out=x)
    return [a, x, b]


def write_after_write(comm):
    z = np.zeros(2)
    comm.all_reduce(np.ones(2), out=z)
    comm.all_reduce(np.full(2, 5.0), op="max", out=z)
    comm.all_reduce(np.full(2, 7.0), out=z)
    return [z]


def read_in_a_later_pack(comm):
    x, n, y = np.ones(2, np.float32), np.ones(2, np.int32), np.zeros(2, np.float32)
    comm.all_reduce(x)
    comm.all_reduce(n)
    comm.all_reduce(x[1:], op="max", out=y[1:])
    comm.all_reduce(y)
    return [x, n, y]


def twice_in_place(comm):
    x = np.ones(3)
    comm.all_reduce(x)
    comm.all_reduce(np.ones(3), op="max")
    comm.all_reduce(x)
    return [x]


def all_to_all_in_place(comm):
    x = np.arange(comm.size) + 10 * comm.rank
    comm.all_reduce(x)
    comm.all_to_all(x, out=x)
    comm.all_to_all(x, out=x)
    return [x]


CALLS = (read_after_write, write_after_read, write_after_write, read_in_a_later_pack)


@pytest.mark.parametrize(
    "calls", [*CALLS, twice_in_place, all_to_all_in_place], ids=lambda f: f.__name__
)
def test_a_group_keeps_the_order_of_reads_and_writes(calls):
    def body(comm):
        expected = calls(comm)
        with comm.group():
            found = calls(comm)
        for wanted, got in zip(expected, found, strict=True):
            np.testing.assert_array_equal(got, wanted)

    cc.run_threads(3, body, timeout=20)


def test_transfers_are_in_order_with_calls_on_their_arrays():
    def body(comm):
        other, big = 1 - comm.rank, 300_000
        x, y, z, w = np.ones(4), np.zeros(4), np.full(big, 1.0 + comm.rank), np.zeros(big)
        with comm.group():
            comm.recv(w, other)
            comm.send(z, other)
            comm.all_reduce(w)  # of what is received
            comm.broadcast(z, 0)  # which sends the old one before
            comm.all_reduce(x)
            sent = comm.send(x, other, 1)  # the sum
            got = comm.recv(y, other, 1)
            comm.all_reduce(y, "max")
            late = comm.recv(x, other, 2)
            comm.send(np.full(4, 7.0), other, 2)
        assert (w == 3).all() and (z == 1).all() and (y == 2).all() and (x == 7).all()
        assert got.wait() is y and late.wait() is x and sent.done()
        # Who only reads what is sent does not wait for it, since the other's receive comes later.
        with comm.group():
            comm.send(z, other)
            comm.all_reduce(z, out=w)
            comm.recv(w, other)
        assert (w == z).all()

    cc.run_threads(2, body, timeout=20)


@pytest.mark.parametrize("count", [4, 300_000])
def test_transfers_of_one_array_are_in_order(count):
    """Each gives what it gives where it stands; and messages with one tag keep their order."""

    def body(comm):
        other = 1 - comm.rank
        x, y, z = (np.full(count, v) for v in (1.0, 2.0, 3.0))
        if comm.rank == 0:
            with comm.group():
                comm.recv(y, other)
                comm.send(y, other)  # what was received
                comm.send(x, other)  # behind it: there the first receive is y's
                comm.recv(y, other)
            assert (y == 20).all()
        else:
            a, b = np.zeros(count), np.zeros(count)
            with comm.group():
                comm.send(np.full(count, 10.0), other)
                first, second = comm.recv(a, other), comm.recv(b, other)
                comm.send(np.full(count, 20.0), other)
            assert (a == 10).all() and (b == 1).all()
            assert first.wait() is a and second.wait() is b
        with comm.group():  # one after the other into the same memory
            for i in range(6):
                comm.send(np.full(count, float(i)), other, i)
            for i in reversed(range(6)):
                comm.recv(z, other, i)
        assert (z == 0).all()

    cc.run_threads(2, body, timeout=20)


def test_a_receive_into_what_is_sent_before_it():
    """It waits until that was taken."""

    def body(comm):
        count = 4_000_000
        x, y = np.full(count, comm.rank + 1.0), np.zeros(count)
        with comm.group():
            if comm.rank == 0:
                comm.send(x, 1)
                comm.recv(x, 1)
            else:
                comm.send(x, 0)
                comm.recv(y, 0)
        assert ((x if comm.rank == 0 else y) == 2 - comm.rank).all()

    cc.run_threads(2, body, timeout=20)


def test_late_transfers_of_a_group_that_failed_go_on():
    """Those that are posted when a call behind them fails, and those alone."""

    def body(comm):
        other = 1 - comm.rank
        x, y = np.ones(300_000), np.zeros(300_000)
        with pytest.raises(cc.MismatchError), comm.group():
            comm.all_reduce(x)
            late = [comm.send(x, other), comm.recv(y, other)]
            failed = comm.broadcast(np.ones(2 + comm.rank))
            after = np.ones(2)
            comm.broadcast(after)
            unmade = comm.send(after, other, 1)
        assert isinstance(failed.exception(), cc.MismatchError)
        assert late[0].wait(10) is None and late[1].wait(10) is y and (y == 2).all()
        wait_until(lambda: all(work.done() for work in late))
        with pytest.raises(cc.CollectiveError, match="not made: a call before it"):
            unmade.wait()

    cc.run_threads(2, body, timeout=20)


def test_an_all_to_all_in_place_sends_what_was_received_before_it():
    def body(comm):
        other = 1 - comm.rank
        x = np.zeros(4)
        with comm.group():
            comm.recv(x, other)
            comm.send(np.arange(4.0) + 10 * comm.rank, other)
            comm.all_to_all(x, out=x)
        assert x.tolist() == ([10, 11, 0, 1] if comm.rank == 0 else [12, 13, 2, 3])

    cc.run_threads(2, body, timeout=20)


# Integers of any bits can be reduced by any of these, so that arrays may overlap across dtypes.
DTYPES = (np.int32, np.uint32, np.int64, np.uint8)
OPS = ("sum", "max", "min", "bxor")
BYTES = 192


def random_view(dice, memory, dtype, length=None):
    """Some elements of `memory`, read as `dtype`."""
    elements = memory.view(dtype)
    length = dice.randint(0, min(12, len(elements))) if length is None else length
    begin = dice.randint(0, len(elements) - length)
    return elements[begin : begin + length]


def random_call(dice, comm, memory):
    """A call on parts of `memory`; None if it is refused: input and output overlap in part."""
    dtype, op = dice.choice(DTYPES), dice.choice(OPS)
    kind = dice.choice(["all_reduce"] * 6 + ["broadcast", "all_gather", "all_gather_v"])
    x = random_view(dice, memory, dtype)
    try:
        if kind == "broadcast":
            return comm.broadcast(x, dice.randrange(comm.size))
        if kind == "all_gather":
            return comm.all_gather(x, out=random_view(dice, memory, np.uint8, 0).view(dtype))
        if kind == "all_gather_v":
            return comm.all_gather_v(x)
        place = dice.choice(["in place", "view", "view", "new"])
        if place == "in place":
            return comm.all_reduce(x, op)
        if place == "new":
            return comm.all_reduce(x, op, out=np.empty_like(x))
        return comm.all_reduce(x, op, out=random_view(dice, memory, dtype, len(x)))
    except cc.ArrayError:
        return None


@pytest.mark.parametrize("seed", range(3))
def test_random_calls_on_overlapping_views_give_the_same_in_a_group(seed):
    def body(comm):
        for case in range(60):
            first = random.Random(f"{seed} {case} {comm.rank}").randbytes(BYTES)
            runs = []
            for grouped in (False, True):
                memory = np.frombuffer(first, np.uint8).copy()
                dice = random.Random(f"{seed} {case}")
                with comm.group() if grouped else contextlib.nullcontext():
                    made = [random_call(dice, comm, memory) for _ in range(dice.randint(2, 25))]
                if grouped:
                    made = [work and work.wait() for work in made]
                runs.append([memory, *made])
            for i, (wanted, got) in enumerate(zip(*runs, strict=True)):
                if wanted is None or got is None:
                    assert wanted is got
                else:
                    np.testing.assert_array_equal(got, wanted, f"case {case}, call {i - 1}")

    cc.run_threads(3, body, timeout=60)


def test_counts_that_are_not_given_are_found_out_inside_a_group():
    def body(comm):
        rank, n = comm.rank, comm.size
        mine = np.full((rank + 1, 2), float(rank))
        sends = [rank + d for d in range(n)]
        parts = np.repeat(np.arange(n) + 10.0 * rank, sends)

        def calls():
            return [
                comm.all_reduce(np.ones(3)),
                comm.all_gather_v(mine),
                comm.gather_v(mine, 1),
                comm.all_to_all_v(parts, sends),
                comm.all_reduce(np.ones(2)),
            ]

        expected = calls()
        with comm.group():
            works = calls()
        for wanted, work in zip(expected, works, strict=True):
            np.testing.assert_array_equal(work.wait(), wanted)

    cc.run_threads(3, body, timeout=20)


# Counts of the all_reduce calls in a group, on one rank and on the others.
UNLIKE = [([4, 2], [2, 4]), ([3, 5], [5, 3]), ([3, 5], [8]), ([4, 0], [4]), ([2, 2, 2], [2, 4])]
IN_A_GROUP = """
import sys
from test_group import check_unlike
import collectives as cc
comm = cc.init(timeout=20)
check_unlike(comm)
comm.barrier()
print("told", flush=True)
"""


def check_unlike(comm):
    """Ranks that pack other calls hear of it, though the sums of their counts are the same."""

    def grouped(c, deviates, x, out, unlike):
        at, each = 0, unlike[deviates]
        with c.group():
            for count in each:
                c.all_reduce(x[at : at + count], out=out[at : at + count])
                at += count

    for i, unlike in enumerate(UNLIKE):
        for deviant in range(comm.size):
            says = (f"count={sum(unlike[0])}, ", ", counts=")
            one = Disagreement(
                f"{unlike}", lambda c, d, x, out, unlike=unlike: grouped(c, d, x, out, unlike), says
            )
            check(comm, one, (deviant + i) % comm.size)
    for _ in range(3):  # packs of equal sums, one after the other
        for unlike in UNLIKE:
            for each in unlike:
                xs = [np.full(count, comm.rank + 1.0) for count in each]
                with comm.group():
                    for x in xs:
                        comm.all_reduce(x)
                assert all((x == comm.size * (comm.size + 1) / 2).all() for x in xs)


@pytest.mark.parametrize("n", [2, 3])
def test_ranks_that_pack_other_calls_hear_of_it(n):
    cc.run_threads(n, check_unlike, timeout=30)


def processes_hear_of_it(tmp_path, **how):
    script = tmp_path / "unlike.py"
    script.write_text(IN_A_GROUP)
    env = {"PYTHONPATH": f"{Path(cc.__file__).parents[1]}:{Path(__file__).parent}"}
    got = launch.run(3, script, env={**env, **how.pop("env", {})}, timeout=60, **how)
    assert (got.status, got.output.count("told")) == (0, 3), got


def test_processes_that_pack_other_calls_hear_of_it(tmp_path):
    processes_hear_of_it(tmp_path)


@pytest.mark.mpi
def test_ranks_of_mpi_that_pack_other_calls_hear_of_it(tmp_path):
    env = {"COLLECTIVES_TRANSPORT": "mpi"}
    processes_hear_of_it(tmp_path, launcher="openmpi", env=env)


def test_calls_that_change_places_in_a_group():
    def body(comm):
        w, v = np.full(4, 1.0), np.full(2, 10.0)
        with pytest.raises(cc.MismatchError, match="counts="), comm.group():
            for x in (w, v) if comm.rank == 0 else (v, w):
                comm.all_reduce(x)
        assert (w == 1).all() and (v == 10).all()

    cc.run_threads(2, body, timeout=20)


def test_a_group_is_of_one_thread():
    """What another one calls meanwhile is refused: it would be made later, if at all."""

    def calls(comm):
        x = np.ones(2 * comm.size)
        return [
            lambda: comm.all_reduce(x),
            lambda: comm.all_reduce(x, async_op=True),
            lambda: comm.all_reduce(x, algorithm="ring"),
            lambda: comm.barrier(),
            lambda: comm.broadcast(x, 0),
            lambda: comm.all_to_all(x, out=x),
            lambda: comm.all_gather_v(x),
            lambda: comm.all_to_all_v(x, [2] * comm.size),
            lambda: comm.send(x, 1 - comm.rank),
            lambda: comm.recv(x, 1 - comm.rank, async_op=True),
            lambda: comm.group().__enter__(),
        ]

    def body(comm):
        told, made = [], calls(comm)

        def other():
            for call in made:
                with pytest.raises(cc.CollectiveError, match=r"another thread has a group.*duplic"):
                    call()
                told.append(call)

        mine = np.ones(3)
        with comm.group():
            thread = threading.Thread(target=other)
            thread.start()
            thread.join(20)
            comm.all_reduce(mine)
            lengths = comm.all_gather_v(np.ones(comm.rank + 1))
        assert len(told) == len(made) and (mine == 2).all() and len(lengths.wait()) == 3
        comm.barrier()

    cc.run_threads(2, body, timeout=20)


def test_works_of_a_group_that_failed_say_why():
    def body(comm):
        with pytest.raises(cc.MismatchError) as raised, comm.group():
            first = comm.all_reduce(np.ones(2))
            failed = comm.broadcast(np.ones(2 + comm.rank))
            later = [comm.all_reduce(np.ones(2)), comm.barrier()]
        assert first.wait(0).tolist() == [2, 2] and failed.done()
        with pytest.raises(cc.MismatchError):
            failed.wait()
        for work in later:
            assert work.done()
            with pytest.raises(cc.CollectiveError, match="not made: a call before it") as told:
                work.wait(0)
            assert "MismatchError" in str(told.value) and told.value.__cause__ is raised.value
            assert work.exception() is told.value

    cc.run_threads(2, body, timeout=20)


def test_works_of_a_pack_that_failed_say_why():
    def body(comm):
        with pytest.raises(cc.MismatchError), comm.group():
            works = [comm.all_reduce(np.ones(2 + comm.rank)) for _ in range(3)]
        for work in works:
            assert work.done() and isinstance(work.exception(), cc.MismatchError)

    cc.run_threads(2, body, timeout=20)


def test_works_of_a_block_that_raised_say_why():
    async def awaited(work):
        return await work

    def body(comm):
        with pytest.raises(KeyError), comm.group():
            works = [comm.all_reduce(np.ones(2)), comm.barrier()]
            raise KeyError("lost")
        for work in works:
            assert work.done()
            with pytest.raises(cc.CollectiveError, match=r"not made: the with block.*'lost'"):
                work.wait()
            with pytest.raises(cc.CollectiveError, match="not made"):
                asyncio.run(awaited(work))

    cc.run_threads(2, body, timeout=20)


def test_a_group_is_used_once():
    """Its calls would be made again."""

    def body(comm):
        group, x = comm.group(), np.ones(2)
        with group:
            comm.all_reduce(x)
        with pytest.raises(cc.CollectiveError, match="used once"), group:
            comm.all_reduce(np.ones(2))
        assert (comm.all_reduce(np.ones(2)) == 2).all() and (x == 2).all()

    cc.run_threads(2, body, timeout=20)
