"""Ranks that die, leave, fail, hang or are closed: the others raise in words and in time, and no
process prints what only the core understands.
"""

from __future__ import annotations

import asyncio
import re
import signal
import threading
import time

import cases
import launch
import numpy as np
import pytest
from cases import Case
from worlds import outcomes, wait_until

import collectives as cc

SOON = 10.0  # seconds until a survivor must have raised, on a machine that does much else


def ones(count=12):
    return np.ones(count, np.float32)


# Ways to wait for rank `peer`, which never comes.
WAITS = {
    "lines": lambda c, peer: c.all_reduce(ones()),
    "staged": lambda c, peer: c.all_reduce(ones(20_000)),
    "forced": lambda c, peer: c.all_reduce(ones(), algorithm="ring"),
    "movement": lambda c, peer: c.broadcast(ones(), peer),
    "barrier": lambda c, peer: c.barrier(),
    "queued": lambda c, peer: c.all_reduce(ones(), async_op=True).wait(),
    "message": lambda c, peer: c.recv(ones(), peer),
    "large message": lambda c, peer: c.send(ones(5_000_000), peer),
}


# ---- deadlines ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", WAITS)
def test_a_deadline_names_who_is_missing(how):
    def body(comm):
        if comm.rank == 1:
            wait_until(lambda: len(raised) == 2)
            return None
        try:
            WAITS[how](comm, 1)
        finally:
            raised.append(comm.rank)

    raised = []
    began = time.monotonic()
    first, late, last = outcomes(3, body, timeout=0.4)
    assert 0.4 < time.monotonic() - began < 0.4 + SOON
    assert late is None
    # One of them may hear from the other that it gave up.
    kinds = {type(first), type(last)}
    assert cc.DeadlineError in kinds
    assert kinds <= {cc.DeadlineError, cc.AbortedError}
    for error in (first, last):
        if isinstance(error, cc.DeadlineError):
            assert isinstance(error, TimeoutError)
            assert re.search(
                r"gave up after [\d.]+ s: rank \d waits for .* of rank 1\b", str(error)
            )
            assert "COLLECTIVES_TIMEOUT" in str(error)


def test_who_comes_after_the_deadline_is_told():
    """Its first call may still find the data of the rank that gave up; the next does not wait."""

    def body(comm):
        if comm.rank == 0:
            with pytest.raises(cc.DeadlineError):
                comm.recv(ones(), 1, async_op=True).wait()
            gave_up.set()
            wait_until(told.is_set)
            return None
        wait_until(gave_up.is_set)
        began = time.monotonic()
        try:
            comm.all_reduce(ones())
            comm.all_reduce(ones())
        except cc.CollectiveError as error:
            return error, time.monotonic() - began
        finally:
            told.set()
        return None

    gave_up, told = threading.Event(), threading.Event()
    error, seconds = outcomes(2, body, timeout=2.2)[1]
    assert isinstance(error, cc.AbortedError)
    assert "rank 0" in str(error)
    assert seconds < SOON


def test_a_communicator_that_gave_up_says_so():
    def body(comm):
        if comm.rank == 1:
            wait_until(gave_up.is_set)
            return
        with pytest.raises(cc.DeadlineError):
            comm.all_reduce(ones())
        for _ in range(2):
            with pytest.raises(cc.AbortedError, match="cannot be used any more: gave up"):
                comm.all_reduce(ones(), algorithm="ring")
        gave_up.set()

    gave_up = threading.Event()
    assert outcomes(2, body, timeout=0.3) == [None, None]


@pytest.mark.parametrize("started", [True, False])
def test_ranks_of_an_interrupted_run_threads_end(started, monkeypatch):
    """In calls, or while they still meet."""
    ended = []

    def body(comm):
        try:
            while True:
                comm.all_reduce(np.ones(4))
        finally:
            ended.append(comm.rank)

    def meet(comm, *args, **options):
        bootstrap = args[0]
        if bootstrap.rank == 0:
            time.sleep(1)
        original(comm, *args, **options)

    if not started:
        original = cc.Communicator.__init__
        monkeypatch.setattr(cc.Communicator, "__init__", meet)
    main = threading.main_thread().ident
    timer = threading.Timer(0.5, signal.pthread_kill, [main, signal.SIGINT])
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            cc.run_threads(3, body, timeout=60)
    finally:
        signal.signal(signal.SIGINT, handler)
    end = time.monotonic() + 20
    while any(t.name.startswith("rank-") for t in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert sorted(ended) == ([0, 1, 2] if started else [])


@pytest.mark.mpi
@pytest.mark.parametrize("launcher", ["openmpi", "mpich"])
def test_an_interrupted_call_over_mpi(launcher):
    """MPI still writes into what the call gave it; and the rank is out of step from then on."""
    got = launch.run(2, "interrupted.py", launcher=launcher, timeout=40).expect(status=0)
    assert got.output.count("ended well") == 2, got


def test_an_interrupted_call_over_the_memory_of_a_shrunk_communicator():
    done = threading.Barrier(2, timeout=20)

    def body(comm):
        smaller = comm.shrink()
        group = smaller._bootstrap
        group.timeout = 1.0
        if smaller.rank == 0:

            def interrupt():
                raise KeyboardInterrupt

            trouble, group._trouble = group._trouble, interrupt
            with pytest.raises(KeyboardInterrupt):
                group.all_gather(b"x" * 100_000)
            group._trouble = trouble
            with pytest.raises(cc.CollectiveError, match="was interrupted by KeyboardInterrupt"):
                group.all_gather(b"y" * 100_000)
        else:
            time.sleep(0.1)
            with pytest.raises(cc.DeadlineError, match="rank 0 has not called it"):
                group.all_gather(b"z" * 100_000)
        done.wait()
        smaller.abort("enough")

    cc.run_threads(2, body)


@pytest.mark.mpi
@pytest.mark.parametrize("launcher", ["openmpi", "mpich"])
def test_a_deadline_over_mpi(launcher):
    got = launch.run(2, "failing.py", "late", "--mpi", launcher=launcher, timeout=40)
    assert re.search(
        r"rank 0: DeadlineError after [12]\.\d s: gave up after .* of rank 1\b", got.output
    ), got
    assert "RuntimeError" not in got.output, got


# ---- ranks that end -----------------------------------------------------------------------------


@pytest.mark.faults
@pytest.mark.parametrize("how", ["killed", "exits"])
def test_survivors_of_a_death(how):
    """Each waits in another way; all name the dead rank within two seconds."""
    got = launch.run(5, "failing.py", how, timeout=30)
    lines = re.findall(r"^rank (\d): (\w+) after (\d+\.\d) s: (.*)$", got.output, re.MULTILINE)
    assert len(lines) == 4, got
    for rank, kind, seconds, text in lines:
        assert rank != "2", got
        assert kind in ("PeerDiedError", "AbortedError", "ClosedError"), got
        assert float(seconds) < SOON, got
        assert "rank 2" in text, got
        if how == "killed" and kind == "PeerDiedError":
            assert re.search(r"rank 2 \(process \d+\) died", text), got
    assert any(line[1] in ("PeerDiedError", "ClosedError") for line in lines), got
    assert "terminate called" not in got.output, got


@pytest.mark.faults
def test_who_hears_of_a_death_later_is_told_the_rank():
    """Also where another rank, with a smaller number, has closed and ended."""
    got = launch.run(4, "failing.py", "later", options=("--keep-going",), timeout=30)
    lines = re.findall(r"^rank (\d): (\w+) of rank (-?\d+)$", got.output, re.MULTILINE)
    assert sorted(lines) == [("1", "PeerDiedError", "2"), ("3", "PeerDiedError", "2")], got


@pytest.mark.faults
@pytest.mark.parametrize("algorithm", ["direct_two_shot", "ring", "movement"])
def test_survivors_of_a_death_in_the_middle_of_a_call(algorithm):
    got = launch.run(3, "failing.py", "middle", "--algorithm", algorithm, timeout=30)
    lines = re.findall(r"^rank (\d): (\w+) after (\d+\.\d) s: (.*)$", got.output, re.MULTILINE)
    assert sorted(line[0] for line in lines) == ["0", "1"], got
    for _, kind, seconds, text in lines:
        assert kind in ("PeerDiedError", "AbortedError"), got
        assert float(seconds) < SOON, got
        assert "rank 2" in text, got


def test_a_peer_that_closed():
    def body(comm):
        comm.all_reduce(ones())
        if comm.rank == 1:
            comm.close()
            return None
        return WAITS[how](comm, 1)

    for how in WAITS:
        began = time.monotonic()
        first, _, last = outcomes(3, body)
        assert time.monotonic() - began < SOON
        assert cc.ClosedError in (type(first), type(last)), (how, first, last)
        for error in (first, last):
            assert isinstance(error, (cc.ClosedError, cc.AbortedError)), (how, error)
            assert "rank 1 has closed" in str(error), (how, error)


def test_who_closes_after_the_last_call_disturbs_nobody():
    """A rank may leave as soon as its own call is over, while others are still in it."""

    def body(comm, algorithm):
        if comm.rank == 1:
            time.sleep(0.05)
        for case in cases.sweep(comm.size, [(algorithm, "all_reduce")], (3, 70_000)):
            cases.check(comm, case)
        comm.close()

    for algorithm in (None, "ring", "double_binary_tree"):
        for n in (2, 3):
            assert cc.run_threads(n, body, algorithm, timeout=20) == [None] * n


def test_a_process_need_not_close():
    got = launch.run(3, "failing.py", "leaves", timeout=30).expect(status=0)
    assert got.output.count("left") == 3, got
    assert "Error" not in got.output, got


# ---- threads ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", WAITS)
def test_a_rank_that_raises_releases_the_others(how):
    def body(comm):
        if comm.rank == 1:
            raise ZeroDivisionError("the fault of rank 1")
        try:
            WAITS[how](comm, 1)
        except cc.AbortedError as error:
            heard.append(str(error))
            raise

    heard = []
    began = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="the fault of rank 1"):
        cc.run_threads(3, body, timeout=20)
    assert time.monotonic() - began < SOON
    assert len(heard) == 2
    assert all("ZeroDivisionError: the fault of rank 1" in text for text in heard)


def test_two_threads_on_one_communicator():
    def body(comm):
        if comm.rank == 1:
            wait_until(go_on.is_set)
            comm.all_reduce(ones())
        else:
            helper = threading.Thread(target=lambda: got.append(comm.all_reduce(ones())))
            helper.start()
            time.sleep(0.1)
            try:
                with pytest.raises(cc.CollectiveError, match=r"two threads.*duplicate\(\)"):
                    comm.all_reduce(ones())
                with pytest.raises(cc.CollectiveError, match="two threads"):
                    comm.barrier()
            finally:
                go_on.set()
                helper.join(20)
            assert got[0].tolist() == [2.0] * 12
        cases.check(comm, Case("all_reduce"))

    got = []
    go_on = threading.Event()
    assert cc.run_threads(2, body, timeout=20) == [None, None]


@pytest.mark.parametrize("front", ["", "."])
def test_a_long_reason_ends_with_a_whole_character(front):
    """There is room for 511 bytes of it; with `front` or without, those would end within one."""

    def body(comm):
        if comm.rank == 0:
            comm.abort(front + 300 * "é")
        comm.all_reduce(ones())

    for error in outcomes(2, body):
        assert isinstance(error, cc.AbortedError)
        assert front + 200 * "é" in str(error)


def test_a_reason_that_is_no_text_to_send_is_told():
    """Half of a surrogate pair, as a file name that is no UTF-8 has one; and no text at all."""
    for reason, told in (("fil\udcff", r"fil\udcff"), (OSError(28, "No space"), "No space")):

        def body(comm, reason=reason):
            if comm.rank == 0:
                comm.abort(reason)
            comm.all_reduce(ones())

        for error in outcomes(2, body):
            assert isinstance(error, cc.AbortedError)
            assert told in str(error)


def test_abort_from_another_thread():
    def body(comm):
        def abort():
            comm.abort("enough")
            aborted.set()

        if comm.rank == 0:
            threading.Timer(0.1, abort).start()
        elif comm.rank == 2:
            aborted.wait(SOON)  # it does not take part before
        comm.all_reduce(ones())

    aborted = threading.Event()
    began = time.monotonic()
    for error in outcomes(3, body):
        assert isinstance(error, cc.AbortedError)
        assert "enough" in str(error)
    assert time.monotonic() - began < SOON


def test_other_threads_run_while_a_rank_waits():
    def body(comm):
        if comm.rank == 0:
            comm.all_reduce(ones())
            return ticks[0]
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            ticks[0] += 1
            time.sleep(0.001)
        comm.all_reduce(ones())
        return None

    ticks = [0]
    assert cc.run_threads(2, body, timeout=20)[0] > 20


def test_a_signal_ends_a_wait():
    """Python's handlers run while a rank waits, and what they raise ends the call."""
    got = launch.run(2, "failing.py", "signal", timeout=30)
    assert re.search(r"rank 0: InterruptedError after 0\.\d s: alarm", got.output), got


# ---- closed -------------------------------------------------------------------------------------

CALLS = {
    "all_reduce": lambda c: c.all_reduce(ones()),
    "all_reduce out": lambda c: c.all_reduce(ones(), out=ones()),
    "all_reduce queued": lambda c: c.all_reduce(ones(), async_op=True),
    "reduce": lambda c: c.reduce(ones()),
    "reduce_scatter": lambda c: c.reduce_scatter(ones()),
    "reduce_scatter_v": lambda c: c.reduce_scatter_v(ones(), [12, *[0] * (c.size - 1)]),
    "broadcast": lambda c: c.broadcast(ones()),
    "all_gather": lambda c: c.all_gather(ones()),
    "all_gather_v": lambda c: c.all_gather_v(ones()),
    "gather": lambda c: c.gather(ones()),
    "gather_v": lambda c: c.gather_v(ones()),
    "scatter": lambda c: c.scatter(ones(), out=ones(12 // c.size)),
    "scatter_v": lambda c: c.scatter_v(ones(), [12 // c.size] * c.size, out=ones(12 // c.size)),
    "all_to_all": lambda c: c.all_to_all(ones()),
    "all_to_all_v": lambda c: c.all_to_all_v(ones(), [12 // c.size] * c.size),
    "barrier": lambda c: c.barrier(),
    "send": lambda c: c.send(ones(), 0),
    "recv": lambda c: c.recv(ones(), 0),
    "sendrecv": lambda c: c.sendrecv(ones(), 0, ones(), 0),
    "group": lambda c: c.group(),
    "split": lambda c: c.split(0),
    "duplicate": lambda c: c.duplicate(),
    "empty": lambda c: c.empty(3),
}


@pytest.mark.parametrize("n", [1, 2])
def test_every_call_on_a_closed_communicator(n):
    def body(comm):
        wrong = {}
        with comm as same:
            assert same is comm
            comm.all_reduce(ones())
        comm.close()  # once more does no harm
        for name, call in CALLS.items():
            try:
                call(comm)
            except cc.ClosedError as error:
                assert "closed" in str(error)
            except Exception as error:
                wrong[name] = repr(error)
            else:
                wrong[name] = "nothing raised"
        assert "closed" in repr(comm)
        return wrong

    assert cc.run_threads(n, body, timeout=20) == [{}] * n


def test_parts_outlive_the_whole():
    def body(comm):
        part = comm.split(0)
        twin = part.duplicate()
        comm.close()
        cases.check(part, Case("all_reduce"))
        part.close()
        cases.check(twin, Case("all_gather", count=30))
        twin.close()

    assert cc.run_threads(3, body, timeout=20) == [None] * 3


def test_an_exception_in_the_context_closes():
    def body(comm):
        with pytest.raises(KeyError), comm:
            raise KeyError("inside")
        with pytest.raises(cc.ClosedError):
            comm.barrier()

    assert cc.run_threads(2, body, timeout=20) == [None, None]


# ---- no memory, handlers, arrays that are lent ---------------------------------------------------


def test_a_call_that_is_refused_is_never_made():
    output = launch.run(2, "short.py", "thread").expect(status=0).output
    assert "refused RuntimeError" in output
    assert "rank 0 has 11 to 11, and -1" in output
    assert "rank 1 has 11 to 11, and 1" in output


def test_no_memory_for_a_factor_is_told():
    output = launch.run(2, "short.py", "factor").expect(status=0).output
    assert "rank 0 MemoryError" in output
    assert "rank 1 AbortedError rank 0 gave up: std::bad_alloc" in output


def test_no_memory_for_a_message_is_told():
    output = launch.run(2, "short.py", "message").expect(status=0).output
    for rank in range(2):
        assert f"rank {rank} AbortedError rank 0 gave up: std::bad_alloc" in output


def test_no_message_comes_after_a_handler_has_raised():
    output = launch.run(2, "short.py", "handler").expect(status=0).output
    assert "nothing came later" in output


def test_arrays_that_mpi_still_sends_from_stay():
    output = launch.run(
        2, "short.py", "stopped", launcher="openmpi", env={
            "COLLECTIVES_TRANSPORT": "mpi", "OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "tcp,self",
        }
    ).output  # fmt: skip
    assert "rank 0 DeadlineError, lends True" in output
    assert "rank 0 lives" in output


def test_a_call_behind_a_queue_that_goes_on_has_no_deadline_of_its_own():
    def body(comm):
        works = [comm.all_reduce(ones(), async_op=True) for _ in range(6) if comm.rank == 0]
        for _ in range(6):
            if comm.rank == 1:
                time.sleep(0.3)
                comm.all_reduce(ones())
        comm.all_reduce(ones())
        return len(works)

    assert cc.run_threads(2, body, timeout=1) == [6, 0]


@pytest.mark.parametrize("how", ["wait", "await", "done"])
def test_a_message_from_a_rank_that_gave_up(how):
    async def awaited(work):
        await work

    def body(comm):
        if comm.rank == 1:
            comm.abort("enough")
            return
        work = comm.recv(ones(), 1, async_op=True)
        began = time.monotonic()
        with pytest.raises(cc.AbortedError, match="enough"):
            if how == "wait":
                work.wait(20)
            elif how == "await":
                asyncio.run(awaited(work))
            else:
                wait_until(work.done)
                work.wait()
        assert time.monotonic() - began < SOON

    cc.run_threads(2, body, timeout=60)
