"""Groups: what packing may not change, and what becomes of calls that are not made."""

from __future__ import annotations

import asyncio
import contextlib
import random

import numpy as np
import pytest

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
