"""Works: what they hold and for how long, how long they wait, and what they say of arguments."""

from __future__ import annotations

import gc
import math
import threading
import time
import weakref
from types import SimpleNamespace

import launch
import numpy as np
import pytest
from worlds import wait_until

import collectives as cc
from collectives.array import view
from collectives.work import InFlight


class Watched(np.ndarray):
    """An array that can be watched."""


def watched(count=8):
    x = np.ones(count).view(Watched)
    return x, weakref.ref(x)


def reduce(comm, x):
    return comm.all_reduce(x, async_op=True)


def exchange(comm, x):
    return comm.sendrecv(x, 1 - comm.rank, np.empty(x.size), 1 - comm.rank, async_op=True)


# ---- what they hold -----------------------------------------------------------------------------


@pytest.mark.parametrize("start", [reduce, exchange])
def test_a_work_that_is_done_holds_no_array(start):
    """It was asked, or dropped: its own result is all that may keep it."""

    def body(comm):
        x, asked = watched()
        work = start(comm, x)
        wait_until(work.done)
        work._result = None
        del x
        held = asked() is not None
        x, dropped = watched()
        work = start(comm, x)
        wait_until(work._held.done)
        del x
        held |= dropped() is None
        del work
        return held, dropped() is not None

    assert cc.run_threads(2, body, timeout=20) == [(False, False)] * 2


@pytest.mark.parametrize("start", [reduce, exchange])
@pytest.mark.parametrize("then", ["barrier", "all_reduce"])
def test_a_call_that_waits_frees_what_dropped_calls_needed(start, then):
    def body(comm):
        alive = []
        for _ in range(40):
            x, one = watched()
            alive.append(one)
            start(comm, x)  # and nobody waits
            del x
        time.sleep(0.1)
        if then == "barrier":
            comm.barrier()
        else:
            comm.all_reduce(bytearray(8), "max")  # not the shortest way
        return sum(one() is not None for one in alive)

    assert cc.run_threads(2, body, timeout=20) == [0, 0]


def in_flight():
    return InFlight(SimpleNamespace(lends=False))


def test_held_arrays_are_bounded_in_number_and_bytes():
    for count, most in ((1, 17), (InFlight._BYTES // 24, 4)):
        arrays = in_flight()
        for _ in range(100):
            arrays.hold((view(np.empty(count), writable=True), "x")).done = lambda: True
            assert len(arrays.held) <= most


def test_many_that_are_under_way_are_seldom_looked_at():
    arrays, looks = in_flight(), []
    for _ in range(1000):
        arrays.hold(("x",)).done = lambda: bool(looks.append(1))
    assert len(looks) < 3000
    arrays.tidy()
    before = len(looks)
    for _ in range(100):
        arrays.tidy()
    assert len(looks) == before


def test_nothing_is_let_go_of_while_messages_may_leave():
    core = SimpleNamespace(lends=False)
    arrays = InFlight(core)
    held = arrays.hold(("x",))

    def fails():
        core.lends = True
        return True

    held.done = fails
    assert not held.release() and held.arrays == ("x",)


FORKS = """
import os, sys
import numpy as np
import collectives as cc
comm = cc.init(timeout=20)
other = comm.duplicate()
if comm.rank == 0:
    works = [comm.all_reduce(np.ones(2), async_op=True), comm.recv(np.ones(2), 1, async_op=True)]
    child = os.fork()
    if child == 0:
        sys.unraisablehook = lambda _: os._exit(7)
        works.clear()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
other.barrier()
if comm.rank == 1:
    works = [comm.all_reduce(np.ones(2), async_op=True), comm.send(np.ones(2), 0, async_op=True)]
for work in works:
    work.wait(20)
print("done", flush=True)
"""


def test_a_work_that_is_dropped_in_a_forked_process(tmp_path):
    """Its call is the parent's."""
    script = tmp_path / "forks.py"
    script.write_text(FORKS)
    got = launch.run(2, script, timeout=40)
    assert (got.status, got.output.count("done")) == (0, 2), got


def test_messages_come_into_no_array_that_is_gone():
    """All counts as done on a communicator that is broken, and what is posted may come in yet."""

    def body(comm):
        x, one = watched()
        work = comm.recv(x, 1 - comm.rank, async_op=True)
        comm.barrier()
        comm.abort("for a reason")
        del x
        assert work.done()
        del work
        gc.collect()
        kept = one() is not None
        comm.close()
        gc.collect()
        return kept, one() is None

    assert cc.run_threads(2, body, timeout=20) == [(True, True)] * 2


# ---- how long they wait -------------------------------------------------------------------------


@pytest.mark.parametrize("wait", ["wait", "result", "exception"])
@pytest.mark.parametrize("timeout", [math.inf, 15.0, None])
def test_a_wait_for_a_transfer_ends_with_the_deadline(wait, timeout):
    def body(comm):
        if comm.rank == 1:
            assert over.wait(20)  # alive, and never sends
            return
        comm._core.timeout = 0.5
        work, began = comm.recv(np.ones(2), 1, async_op=True), time.monotonic()
        if wait == "exception":
            error = work.exception(timeout)
        else:
            with pytest.raises(cc.DeadlineError) as raised:
                getattr(work, wait)(timeout)
            error = raised.value
        over.set()
        assert isinstance(error, cc.DeadlineError) and "waits for a message of rank 1" in str(error)
        assert 0.4 < time.monotonic() - began < 10
        with pytest.raises(cc.DeadlineError, match="a message of rank 1"):
            work.wait(timeout)  # what it has ended with

    over = threading.Event()
    cc.run_threads(2, body, timeout=20)


def test_the_error_of_a_transfer_is_returned():
    def body(comm):
        if comm.rank == 0:
            comm.send(np.ones(3), 1)
            return
        work = comm.recv(np.ones(2), 0, async_op=True)
        assert isinstance(work.exception(), cc.MismatchError)
        with pytest.raises(cc.MismatchError):
            work.wait()

    cc.run_threads(2, body, timeout=20)


# ---- what they say of arguments -----------------------------------------------------------------


@pytest.mark.parametrize("timeout", ["1", [1], 1j])
def test_a_timeout_that_is_no_number(timeout):
    def body(comm):
        works = [
            comm.all_reduce(np.ones(2), async_op=True),
            comm.sendrecv(np.ones(2), comm.rank, np.ones(2), comm.rank, async_op=True),
        ]
        for work in works:
            for wait in (work.wait, work.result, work.exception):
                with pytest.raises(TypeError, match="timeout must be a number of seconds, not "):
                    wait(timeout)
            work.wait(20)
        with pytest.raises(TypeError, match="timeout must be a number of seconds, not "):
            comm.synchronize(timeout)

    cc.run_threads(2, body, timeout=20)


@pytest.mark.parametrize("name", [["ring"], {"ring"}, np.array(["ring", "auto"]), 3, b"ring", ""])
def test_an_algorithm_that_is_no_name(name):
    def body(comm):
        x = np.ones(2 * comm.size)
        for call in (
            lambda how: comm.all_reduce(x, algorithm=name, **how),
            lambda how: comm.broadcast(x, algorithm=name, **how),
            lambda how: comm.all_to_all(x, out=np.empty_like(x), algorithm=name, **how),
            lambda how: comm.all_gather_v(x, algorithm=name, **how),
            lambda how: comm.barrier(algorithm=name, **how),
        ):
            for how in ({}, {"async_op": True}):
                with pytest.raises(TypeError, match="algorithm must be a name such as 'ring', not"):
                    call(how)
            with (
                comm.group(),
                pytest.raises(TypeError, match="algorithm must be a name such as 'ring', not"),
            ):
                call({})

    cc.run_threads(2, body, timeout=20)


@pytest.mark.parametrize("order", [["rank"], {}, 1])
def test_an_order_that_is_none(order):
    def body(comm):
        with pytest.raises(ValueError, match=r"order=.*known: 'any', 'rank'"):
            comm.all_reduce(np.ones(2), order=order)

    cc.run_threads(1, body, timeout=20)
