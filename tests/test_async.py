"""Queued calls, groups, and messages between two ranks."""

from __future__ import annotations

import asyncio
import gc
import itertools
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import cases
import launch
import numpy as np
import pytest
from cases import Case
from worlds import outcomes, wait_until

import collectives as cc
from collectives.work import InFlight


def ones(count=12):
    return np.ones(count, np.float32)


# ---- Work ---------------------------------------------------------------------------------------


def test_a_work_is_done_when_its_call_is():
    def body(comm):
        if comm.rank == 0:
            x = ones()
            work = comm.all_reduce(x, async_op=True)
            assert isinstance(work, cc.Work)
            assert not work.done()
            for call in (work.wait, work.result, work.exception):
                began = time.monotonic()
                with pytest.raises(cc.DeadlineError, match=r"not done after 0\.05 s; it goes on"):
                    call(0.05)
                assert 0.04 < time.monotonic() - began < 10
            assert not work.done()
            go_on.set()
            assert work.wait(timeout=20) is x
            assert work.done()
            assert work.exception() is None
            assert work.result() is x
            assert work.wait() is x
        else:
            wait_until(go_on.is_set)
            x = ones()
            comm.all_reduce(x)
        return x.tolist()

    go_on = threading.Event()
    assert cc.run_threads(2, body, timeout=20) == [[2.0] * 12] * 2


def test_awaiting():
    def body(comm):
        async def several():
            works = [comm.all_reduce(np.full(9, i, np.int32), async_op=True) for i in range(20)]
            results = await asyncio.gather(*(await_one(work) for work in works))
            assert await comm.barrier(async_op=True) is None
            part = await comm.reduce_scatter(np.arange(4, dtype=np.int32), async_op=True)
            return [int(r[0]) for r in results], part.tolist()

        async def await_one(work):
            return await work

        return asyncio.run(several())

    sums = [2 * i for i in range(20)]
    assert cc.run_threads(2, body, timeout=20) == [(sums, [0, 2]), (sums, [4, 6])]


def test_awaiting_an_error_raises_it():
    def body(comm):
        async def one():
            await comm.all_reduce(ones(10 + comm.rank), async_op=True)

        with pytest.raises(cc.MismatchError):
            asyncio.run(one())
        cases.check(comm, Case("all_reduce"))

    assert cc.run_threads(2, body, timeout=20) == [None, None]


@pytest.mark.parametrize("timeout", [0, -1, -1e-9])
def test_no_time_is_left_to_wait(timeout):
    def body(comm):
        if comm.rank == 0:
            for work in (
                comm.all_reduce(ones(), async_op=True),
                comm.recv(ones(), 1, async_op=True),
            ):
                with pytest.raises(cc.DeadlineError, match="not done"):
                    work.wait(timeout)
            over.set()
        else:
            assert over.wait(10), "rank 0 waits for this one"
            comm.all_reduce(ones())
            comm.send(ones(), 0)

    over = threading.Event()
    cc.run_threads(2, body, timeout=20)


def test_other_tasks_run_while_one_awaits():
    def body(comm):
        async def tick():
            while not over.is_set():
                ticks[comm.rank] += 1
                await asyncio.sleep(0.005)

        async def wait():
            task = asyncio.create_task(tick())
            await comm.all_reduce(ones(), async_op=True)
            over.set()
            await task

        if comm.rank == 0:
            asyncio.run(wait())
        else:
            time.sleep(0.2)
            comm.all_reduce(ones())

    over = threading.Event()
    ticks = [0, 0]
    cc.run_threads(2, body, timeout=20)
    assert ticks[0] > 5


@pytest.mark.parametrize("n", [2, 3])
def test_many_queued_calls(n):
    """Of all collectives and algorithms, waited for in any order."""
    found = list(cases.sweep(n, [*cases.registry(n)], (1, 300, 9000), how="async"))[:400]

    def body(comm):
        works = []
        for i, case in enumerate(found):
            case = case._replace(collective="all_reduce", algorithm=None, v=False, root=0)
            x = cases.make_input(case, comm.rank, n)
            more = {"factor": cases.factor_of(case.dtype)} if case.op == "premul_sum" else {}
            works.append((case, comm.all_reduce(x, case.op, async_op=True, **more)))
            if i % 50 == 17:
                comm.barrier()
        order = np.random.default_rng(comm.rank).permutation(len(works))
        for i in order:
            case, work = works[i]
            got, wanted = work.wait(60), cases.expected(case, n)[comm.rank]
            if case.op == "prod" and got.dtype.kind == "c":
                got, wanted = got + 0, wanted + 0
            assert not cases.difference(got, wanted), case
        return len(works)

    assert cc.run_threads(n, body, timeout=60) == [len(found)] * n


def test_a_blocking_call_waits_for_those_in_the_queue():
    def body(comm):
        x = ones(200_000)
        works = [comm.all_reduce(x, async_op=True) for _ in range(5)]
        comm.all_reduce(x)  # on the same array: the order shows in the result
        assert all(work.done() for work in works)
        x -= 1
        comm.all_reduce(x, async_op=True)
        comm.barrier()
        return float(x[0]), float(x[-1])

    wanted = (2.0**6 - 1) * 2
    assert cc.run_threads(2, body, timeout=20) == [(wanted, wanted)] * 2


def test_results_of_immutable_inputs():
    def body(comm):
        scalar = comm.all_reduce(np.float32(2.5), async_op=True)
        moved = comm.all_gather(b"ab", async_op=True)
        assert scalar.wait(20) == 5.0
        assert isinstance(scalar.result(), np.float32)
        assert moved.wait(20) == b"abab"
        assert comm.all_reduce(b"\x01\x02").hex() == "0204"
        return True

    assert all(cc.run_threads(2, body, timeout=20))


def test_arrays_live_as_long_as_their_calls():
    def body(comm):
        if comm.rank == 0:
            works = [comm.all_reduce(np.full(50_000, 1.0), async_op=True) for _ in range(8)]
            works.append(comm.all_to_all(x := np.arange(50_000.0), out=x, async_op=True))
            works.append(comm.reduce(np.full(50_000, 1.0), 1, async_op=True))
            del x
            gc.collect()
            junk = [np.full(50_000, 7.0) for _ in range(16)]
            go_on.set()
            del junk
        else:
            wait_until(go_on.is_set)
            works = [comm.all_reduce(np.full(50_000, 1.0), async_op=True) for _ in range(8)]
            works.append(comm.all_to_all(x := np.arange(50_000.0), out=x, async_op=True))
            works.append(comm.reduce(np.full(50_000, 1.0), 1, async_op=True))
        results = [work.wait(20) for work in works]
        assert all((r == 2.0).all() for r in results[:8])
        half = np.arange(25_000.0) + comm.rank * 25_000
        assert (results[8] == np.concatenate([half, half])).all()
        assert results[9] is None if comm.rank == 0 else (results[9] == 2.0).all()

    go_on = threading.Event()
    assert cc.run_threads(2, body, timeout=20) == [None, None]


def test_closing_with_calls_in_the_queue():
    """Calls that all ranks made are done; close() waits for them."""

    def body(comm):
        xs = [ones(10_000) for _ in range(10)]
        works = [comm.all_reduce(x, async_op=True) for x in xs]
        comm.close()
        assert all(work.done() for work in works)
        return all(work.exception() is None and (work.result() == 2).all() for work in works)

    assert cc.run_threads(2, body, timeout=20) == [True, True]


def test_two_communicators_in_opposite_orders():
    """Blocking calls in such orders would wait for each other for ever; queued ones do not."""

    def body(comm):
        other = comm.duplicate()
        order = [comm, other] if comm.rank == 0 else [other, comm]
        works = []
        for size in (10, 100_000):
            for one in order:
                for algorithm in (None, "ring"):
                    works.append(one.all_reduce(ones(size), algorithm=algorithm, async_op=True))
        result = all((work.wait(20) == 2).all() for work in works)
        other.close()
        return result

    assert cc.run_threads(2, body, timeout=20) == [True, True]


def test_the_queue_in_processes():
    launch.run(3, "queueing.py", timeout=60).expect(status=0)


@pytest.mark.mpi
@pytest.mark.parametrize("launcher", ["openmpi", "mpich"])
def test_the_queue_and_messages_over_mpi(launcher):
    env = {"COLLECTIVES_TRANSPORT": "mpi"}
    launch.run(3, "queueing.py", launcher=launcher, env=env, timeout=90).expect(status=0)


# ---- groups -------------------------------------------------------------------------------------


def mixed(comm, x, group=None):
    """Some calls; with `group`, inside of it."""
    other = (comm.rank + 1) % comm.size
    before = (comm.rank - 1) % comm.size
    calls = [
        lambda: comm.all_reduce(x.copy()),
        lambda: comm.all_reduce(x[:7].copy(), "max"),
        lambda: comm.all_reduce(x.astype(np.int64)),
        lambda: comm.all_reduce(x.copy(), algorithm="ring"),
        lambda: comm.all_reduce(x.copy(), order="rank"),
        lambda: comm.all_reduce(x.copy(), "premul_sum", factor=0.5),
        lambda: comm.all_reduce(x.copy(), out=np.empty_like(x)),
        lambda: comm.all_reduce(np.tile(x, 400)),
        lambda: comm.all_reduce(x[:0].copy()),
        lambda: comm.reduce(x.copy(), 1),
        lambda: comm.broadcast(x.copy(), 1),
        lambda: comm.all_gather(x),
        lambda: comm.reduce_scatter(x),
        lambda: comm.all_to_all(x[: 3 * comm.size].copy()),
        lambda: comm.gather(x, 0),
        lambda: comm.scatter(x[: 3 * comm.size], 0, out=np.empty(3, x.dtype)),
        lambda: comm.sendrecv(x, other, np.empty_like(x), before),
    ]
    if group is None:
        return [call() for call in calls]
    with comm.group():
        works = [call() for call in calls]
        assert not works[0].done()
    return [work.wait(20) for work in works]


@pytest.mark.parametrize("n", [2, 3])
def test_a_group_gives_what_the_calls_give_one_by_one(n):
    def body(comm):
        x = cases.random_values(comm.rank, 200, "float32", 5)
        together, one_by_one = mixed(comm, x, group=True), mixed(comm, x)
        for i, (a, b) in enumerate(zip(together, one_by_one, strict=True)):
            words = cases.difference(a, b)
            assert not words, f"call {i}: {words}"
        return len(together)

    assert cc.run_threads(n, body, timeout=20) == [17] * n


def test_a_group_coalesces_small_sums():
    """Which shows in the count of a call that a peer makes alone."""

    def body(comm):
        with pytest.raises(cc.MismatchError, match="count=60"):
            if comm.rank == 0:
                with comm.group():
                    for _ in range(5):
                        comm.all_reduce(ones())
            else:
                comm.all_reduce(ones(61))

    assert cc.run_threads(2, body, timeout=20) == [None, None]


def test_groups_keep_what_they_need():
    """Temporary arrays live until the group has run."""

    def body(comm):
        with comm.group():
            works = [comm.all_reduce(np.full(30_000, i + 1.0), algorithm="ring") for i in range(4)]
            moved = comm.all_to_all(x := np.arange(30_000.0), out=x)
            comm.reduce(np.full(30_000, 1.0), 1)
            del x
            gc.collect()
            junk = [np.full(30_000, 7.0) for _ in range(16)]
        del junk
        for i, work in enumerate(works):
            assert (work.wait() == 2 * (i + 1.0)).all()
        half = np.arange(15_000.0) + comm.rank * 15_000
        assert (moved.wait() == np.concatenate([half, half])).all()

    assert cc.run_threads(2, body, timeout=20) == [None, None]


def test_messages_in_a_group_come_in_any_order():
    def body(comm):
        peers = [p for p in range(comm.size) if p != comm.rank]
        out = {(p, tag): np.zeros(60_000, np.int32) for p in peers for tag in range(3)}
        with comm.group():
            for p, tag in itertools.product(peers, range(3)):
                comm.send(np.full(60_000, comm.rank * 10 + tag, np.int32), p, tag)
            for p, tag in reversed(list(out)):
                comm.recv(out[p, tag], p, tag)
        assert all((x == p * 10 + tag).all() for (p, tag), x in out.items())

    assert cc.run_threads(3, body, timeout=20) == [None] * 3


def test_misused_groups():
    def body(comm):
        with comm.group():
            with pytest.raises(cc.CollectiveError, match="nest"), comm.group():
                pass
            work = comm.all_reduce(ones())
            with pytest.raises(cc.CollectiveError, match="after the with block"):
                work.wait()
        assert work.wait().tolist() == [2.0] * 12
        # An exception inside: nothing runs, and the communicator goes on.
        x = ones()
        with pytest.raises(KeyError), comm.group():
            comm.all_reduce(x)
            raise KeyError
        assert (x == 1).all()
        # Bad input inside: raised where it is written.
        with pytest.raises(ValueError, match="unknown op"), comm.group():
            comm.all_reduce(x, "summ")
        # Ranks that disagree: raised at the end.
        with pytest.raises(cc.MismatchError), comm.group():
            comm.all_reduce(ones(5 + comm.rank), "max")
        cases.check(comm, Case("all_reduce"))

    assert cc.run_threads(2, body, timeout=20) == [None, None]


# ---- messages -----------------------------------------------------------------------------------

COUNTS = (0, 1, 7, 64, 65_536, 65_537, 1_000_003)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_rings(n):
    def body(comm):
        to, source = (comm.rank + 1) % n, (comm.rank - 1) % n
        for count in COUNTS:
            x = cases.any_bytes(comm.rank, count, "uint8", count)
            out = np.zeros_like(x)
            assert comm.sendrecv(x, to, out, source, send_tag=count, recv_tag=count) is out
            assert (out == cases.any_bytes(source, count, "uint8", count)).all()
            out[:] = 0
            work = comm.sendrecv(x, to, out, source, async_op=True)
            assert work.wait(20) is out
            assert work.done()
            assert (out == cases.any_bytes(source, count, "uint8", count)).all()

    assert cc.run_threads(n, body, timeout=30) == [None] * n


def test_large_messages_both_ways_at_once():
    def body(comm):
        other = 1 - comm.rank
        x = np.full(3_000_000, comm.rank + 1.0)
        outs = [np.zeros_like(x) for _ in range(3)]
        works = [comm.send(x, other, i, async_op=True) for i in range(3)]
        works += [comm.recv(outs[i], other, i, async_op=True) for i in (2, 0, 1)]
        for work in reversed(works):
            work.wait(30)
        return all((out == other + 1.0).all() for out in outs)

    assert cc.run_threads(2, body, timeout=30) == [True, True]


def test_tags_match_in_any_order():
    def body(comm):
        tags = [0, 5, 2**32 - 1, 5, 17]
        if comm.rank == 0:
            for i, tag in enumerate(tags):
                comm.send(np.full(10, i), 1, tag)
            return None
        got = []
        for tag in (17, 5, 2**32 - 1, 5, 0):  # of equal tags, the first sent comes first
            got.append(int(comm.recv(np.zeros(10, np.int64), 0, tag)[3]))
        return got

    assert cc.run_threads(2, body, timeout=20)[1] == [4, 1, 2, 3, 0]


def test_messages_to_oneself():
    def body(comm):
        x = np.arange(500_000)
        comm.send(x, comm.rank, 3)
        comm.send(x * 2, comm.rank, 4)
        x_before = x.copy()
        x[:] = 0  # sent is sent
        out = np.zeros_like(x)
        assert (comm.recv(out, comm.rank, 4) == x_before * 2).all()
        assert (comm.recv(out, comm.rank, 3) == x_before).all()
        assert (comm.sendrecv(x_before, comm.rank, out, comm.rank) == x_before).all()

    for n in (1, 2):
        assert cc.run_threads(n, body, timeout=20) == [None] * n


@pytest.mark.parametrize("count", [10, 100_000])
@pytest.mark.parametrize("early", [True, False])
def test_messages_of_another_length_or_dtype(count, early):
    """Raised at the receiver with both; the message is dropped, and the next one comes."""

    def body(comm):
        right = np.arange(count)
        if comm.rank == 0:
            if not early:
                wait_until(waiting.is_set)
                time.sleep(0.05)
            comm.send(np.zeros(count + 1), 1, 7)
            comm.send(right.astype(np.float64), 1, 7)
            comm.send(right, 1, 7)
            return
        if early:
            time.sleep(0.05)
        waiting.set()
        out = np.full(count, -1)
        says = rf"tag 7 expects {count} x int64.*rank 0 sent {count + 1} x float64.*dropped"
        with pytest.raises(cc.MismatchError, match=says):
            comm.recv(out, 0, 7)
        with pytest.raises(cc.MismatchError, match=rf"rank 0 sent {count} x float64"):
            comm.recv(out, 0, 7, async_op=True).wait(20)
        assert (out == -1).all()
        assert (comm.recv(out, 0, 7) == right).all()

    waiting = threading.Event()
    assert cc.run_threads(2, body, timeout=20) == [None, None]


def test_messages_beside_collectives():
    """Neither waits for the other, and neither gets the other's data."""

    def body(comm):
        other = 1 - comm.rank
        out = np.zeros(400_000)
        work = comm.recv(out, other, 1, async_op=True)
        for algorithm in (None, "ring"):
            cases.check(comm, Case("all_reduce", algorithm, count=100_000))
        assert not work.done()
        comm.barrier()
        sent = comm.send(np.full(400_000, 3.0), other, 1, async_op=True)
        cases.check(comm, Case("all_gather", "ring", count=100_000))
        assert (work.wait(20) == 3.0).all()
        sent.wait(20)

    assert cc.run_threads(2, body, timeout=20) == [None, None]


def test_a_small_message_needs_no_receiver():
    def body(comm):
        if comm.rank == 0:
            comm.send(ones(1000), 1)
        comm.barrier()
        if comm.rank == 1:
            assert comm.recv(np.zeros(1000, np.float32), 0).sum() == 1000

    assert outcomes(2, body, timeout=20) == [None, None]


def test_grouped_calls_that_need_each_other_run_in_order():
    """Packing must not move an all_reduce before a call whose result it needs."""

    def body(comm):
        a, b = np.ones(3), np.full(3, float(comm.rank))
        with comm.group():
            comm.all_reduce(a)
            comm.broadcast(b, root=1)
            comm.all_reduce(b)
            comm.all_reduce(a)
        return a.tolist(), b.tolist()

    n = 3
    for a, b in cc.run_threads(n, body):
        assert a == [n * n] * 3
        assert b == [n * 1.0] * 3


def test_symmetric_memory_is_given_back():
    """An array that was dropped frees its segment when the next one is made."""

    def body(comm):
        for _ in range(8):
            comm.empty((1 << 20,))[:] = 1
        comm.barrier()
        return len(comm._memory._dropped._segments)

    assert all(left <= 1 for left in cc.run_threads(2, body))


def test_a_work_tells_when_it_ran():
    def body(comm):
        before = time.monotonic()
        works = [comm.all_reduce(ones(1000), async_op=True) for _ in range(3)]
        for work in works:
            work.wait()
        times = [t for work in works for t in work.span()]
        assert times == sorted(times)  # one after the other
        assert before <= times[0] and times[-1] <= time.monotonic()

    cc.run_threads(2, body, timeout=20)


def test_signals_are_for_the_threads_of_the_program():
    def threads():
        return {int(task.name) for task in Path("/proc/self/task").iterdir()}

    def body(comm):
        comm.all_reduce(ones(), async_op=True).wait()  # starts a thread of the library
        comm.barrier()
        if comm.rank == 0:
            own = threads() - before - {thread.native_id for thread in threading.enumerate()}
            for thread in own:
                status = Path(f"/proc/self/task/{thread}/status").read_text()
                blocked = int(status.split("SigBlk:")[1].split()[0], 16)
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGUSR1):
                    assert blocked >> (number - 1) & 1, f"{number!r} is not blocked"
            started.extend(own)
        comm.barrier()

    before, started = threads(), []
    cc.run_threads(2, body, timeout=20)
    assert len(started) == 2


def test_calls_of_two_threads_are_all_kept():
    """While one sorts out what is done, another comes: it would be forgotten."""
    sorting, go_on = threading.Event(), threading.Event()
    in_flight = InFlight(SimpleNamespace(lends=False))
    in_flight.hold(("first",)).done = lambda: sorting.set() or not go_on.wait(20)
    in_flight._bytes = in_flight._BYTES
    threads = [threading.Thread(target=in_flight.hold, args=((name,),)) for name in "ab"]
    threads[0].start()
    assert sorting.wait(20)
    threads[1].start()
    threads[1].join(20)
    assert not threads[1].is_alive()  # it need not wait
    go_on.set()
    threads[0].join(20)
    assert sorted(held.arrays[0] for held in in_flight.held) == ["a", "b", "first"]
