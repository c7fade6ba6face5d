"""Closing a communicator while something of it is under way: nothing writes to memory that may be
gone, and nobody waits for long.
"""

from __future__ import annotations

import asyncio
import gc
import math
import signal
import subprocess
import sys
import threading
import time
import weakref

import launch
import numpy as np
import pytest

import collectives as cc


@pytest.mark.parametrize("how", ["close", "del"])
def test_what_was_posted_does_not_arrive_any_more(how):
    """The arrays of a Work that was dropped may be gone once the communicator is."""
    gone, sent = threading.Event(), threading.Event()

    def receiver(comm):
        large, small = np.zeros(8 << 20, np.uint8), np.zeros(4, np.uint8)
        works = [comm.recv(large, 1, tag=1, async_op=True)]
        other = comm.recv(small, 1, tag=2, async_op=True)
        comm.barrier()
        comm.close()
        works.clear()
        gone.set()
        assert sent.wait(20)
        with pytest.raises(cc.ClosedError, match="closed while a transfer was under way"):
            other.wait(10)
        assert other.done() and not large.any() and not small.any()

    def body(comm):
        if comm.rank == 0:
            return receiver(comm)
        comm.barrier()
        assert gone.wait(20)
        with pytest.raises(cc.ClosedError):
            comm.send(np.ones(8 << 20, np.uint8), 0, tag=1)
        sent.set()

    def dropping(comm):
        small = np.zeros(4, np.uint8)
        mine = comm.duplicate()
        if comm.rank == 1:
            comm.barrier()
            assert gone.wait(20)
            mine.send(np.ones(4, np.uint8), 0, tag=2, async_op=True)
            sent.set()
            return
        work = mine.recv(small, 1, tag=2, async_op=True)
        comm.barrier()
        del mine
        gc.collect()
        gone.set()
        assert sent.wait(20)
        with pytest.raises(cc.ClosedError, match="closed while a transfer was under way"):
            work.wait(10)
        assert not small.any()

    cc.run_threads(2, body if how == "close" else dropping, timeout=20)


CLOSES = """
import sys, threading, time
import numpy as np
import collectives as cc

def calls(comm, ended):
    try:
        while True:
            comm.all_reduce(np.ones(1 << 20, np.float32), algorithm=sys.argv[1])
    except cc.CollectiveError as error:
        ended.append(error)

comm, ended = cc.init(), []
thread = threading.Thread(target=calls, args=(comm, ended))
thread.start()
time.sleep(0.4)
comm.close()
thread.join(20)
assert ended and not thread.is_alive()
print("ended", flush=True)
"""


@pytest.mark.faults
@pytest.mark.parametrize("algorithm", ["ring", "double_binary_tree", "direct_two_shot"])
def test_close_while_another_thread_is_in_a_call(tmp_path, algorithm):
    """A right result or an error."""
    script = tmp_path / "closes.py"
    script.write_text(CLOSES)
    got = launch.run(2, script, algorithm, timeout=60)
    assert (got.status, got.output.count("ended")) == (0, 2), got


INTERRUPTED = """
import signal, time
import numpy as np
import collectives as cc

comm = cc.init(timeout=60)
comm.barrier()
if comm.rank == 1:
    print("asleep", flush=True)
    try:
        time.sleep(3)
        comm.all_reduce(np.ones(4))
    except cc.AbortedError as error:
        print("told:", error, flush=True)
else:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    began = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        with comm:
            comm.all_reduce(np.ones(4), async_op=True).wait()
    except KeyboardInterrupt:
        print("left" if time.monotonic() - began < 2 else "late", flush=True)
"""


@pytest.mark.faults
def test_ctrl_c_leaves_a_block_at_once(tmp_path):
    script = tmp_path / "interrupted.py"
    script.write_text(INTERRUPTED)
    got = launch.run(2, script, timeout=40)
    assert got.status == 0 and "left" in got.output and "told:" in got.output, got


def test_ctrl_c_in_close(tmp_path):
    """It waits for what is queued, and may be interrupted."""
    code = INTERRUPTED.replace("with comm:", "if True:").replace(
        "async_op=True).wait()", "async_op=True); comm.close()"
    )
    script = tmp_path / "closing.py"
    script.write_text(code)
    got = launch.run(2, script, timeout=40)
    assert got.status == 0 and "left" in got.output and "told:" in got.output, got


def test_awaiting_a_transfer_has_an_end():
    async def awaited(work):
        return await work

    def body(comm):
        if comm.rank == 0:
            usual, comm._core.timeout = comm._core.timeout, 0.5
            began = time.monotonic()
            with pytest.raises(cc.DeadlineError, match=r"not done after 0\.5 s; it goes on"):
                asyncio.run(awaited(comm.recv(np.ones(2), 1, async_op=True)))
            assert 0.4 < time.monotonic() - began < 5
            comm._core.timeout = usual
        comm.barrier()

    cc.run_threads(2, body, timeout=20)


def test_a_posted_transfer_sees_that_its_peer_has_closed():
    """It ends, and nothing else does: others may not even know that peer."""

    def body(comm):
        if comm.rank == 1:
            comm.barrier()
            comm.close()
            return
        works = []
        if comm.rank == 0:
            works = [comm.recv(np.ones(2), 1, async_op=True)]
            works += [comm.send(np.ones(1 << 24), 1, tag=1, async_op=True) for _ in range(2)]
            dropped = comm.recv(np.ones(2), 1, tag=2, async_op=True)
            del dropped
        comm.barrier()
        end, x = time.monotonic() + 10, np.ones(2)
        while not all(w.done() for w in works[:1]) and time.monotonic() < end:
            time.sleep(0.01)
        for _ in range(60):  # while those that nobody waits for are sorted out
            other = 2 - comm.rank
            work = comm.recv(x, other, async_op=True)
            comm.send(x, other)
            work.wait()
            time.sleep(0.002)
        if comm.rank == 0:
            for work in works[::2]:  # (of the second a part is under way)
                with pytest.raises(cc.ClosedError, match="rank 1 has closed"):
                    work.wait()

    cc.run_threads(3, body, timeout=20)


def test_awaiting_in_a_group_is_refused():
    async def awaited(comm):
        with comm.group():
            work = comm.all_reduce(np.ones(2))
            with pytest.raises(cc.CollectiveError, match="runs when its group"):
                await work

    cc.run_threads(1, lambda comm: asyncio.run(awaited(comm)), timeout=20)


def test_a_wait_of_no_length():
    def body(comm):
        work = comm.all_reduce(np.ones(2), async_op=True)
        with pytest.raises(ValueError, match="timeout must be"):
            work.wait(math.nan)
        assert work.wait(20)[0] == 2

    cc.run_threads(2, body, timeout=20)


def test_a_forked_child_does_not_shrink(tmp_path):
    code = """
import os
import collectives as cc
comm = cc.init(timeout=20)
if comm.rank == 0:
    child = os.fork()
    if child == 0:
        try:
            comm.shrink()
        except cc.ClosedError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
print(comm.shrink(), flush=True)
"""
    script = tmp_path / "forks.py"
    script.write_text(code)
    got = launch.run(2, script, timeout=40)
    assert got.status == 0 and got.output.count("of 2, 1 node") == 2, got


def test_names_that_are_nested_deeply():
    code = """
import collectives as cc
cc.schedule("hierarchical(" * 10000 + "ring" + ", ring)" * 10000, "all_reduce", 4)
"""
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert got.returncode != -signal.SIGSEGV and "are read" in got.stderr, got.stderr[-300:]


@pytest.mark.parametrize("name", ["all_reduce", "send", "recv"])
def test_a_call_that_could_not_begin_keeps_no_arrays(name: str) -> None:
    class Watched(np.ndarray):
        """An array that can be watched."""

    def body(comm: cc.Communicator) -> int:
        comm.abort("for a reason")
        alive = []
        for _ in range(5):
            x = np.zeros(8).view(Watched)
            alive.append(weakref.ref(x))
            more = () if name == "all_reduce" else (1 - comm.rank,)
            with pytest.raises(cc.AbortedError):
                getattr(comm, name)(x, *more, async_op=True)
            del x
        gc.collect()
        return sum(one() is not None for one in alive)

    assert cc.run_threads(2, body, timeout=20) == [0, 0]
