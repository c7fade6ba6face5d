"""send, recv and sendrecv on device arrays: sizes, dtypes and addresses, what waits for what,
groups, graphs, and what goes wrong.

No rank copies between its GPU and the host while a kernel of another rank may wait: the ranks meet
on the host before.
"""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import launch
import numpy as np
import pytest
from gpus import GPUS, MARK, cupy
from messages import Box, message, same
from on_device import OnDevice, run_on, some

import collectives as cc
from collectives import _core

pytestmark = MARK

ALL = list(range(GPUS))
# Elements; the largest do not fit in the FIFO between two ranks, and go in many messages.
COUNTS = (0, 1, 3, 17, 1000, 4099, 70_001, 400_001)
# Bytes that no FIFO between two ranks holds: 64 blocks x 8 slots of up to 32 KiB.
MORE_THAN_FITS = (16 << 20) + (1 << 20)


def shift_ranks(comm: OnDevice, counts: list[int], distance: int) -> None:
    """Each rank sends to the one `distance` further and receives from the one as far before."""
    n, rank = comm.size, comm.rank
    to, source = (rank + distance) % n, (rank - distance) % n
    box = Box(comm)
    dtypes = list(_core.dtypes)
    moved = []
    for i, count in enumerate(counts):
        dtype = dtypes[(i + distance) % len(dtypes)]
        sent, wanted = message(rank, to, count, dtype, i), message(source, rank, count, dtype, i)
        size = sent.itemsize  # elements need not be aligned
        moved.append((box.put(sent, i % 3), box.empty(wanted, (i * size) % 17), wanted, i))
    comm.comm.barrier()
    for x, out, _, i in moved:
        got = comm.comm.sendrecv(x, to, out, source, send_tag=i, recv_tag=i)
        assert got is out
    comm.finish()
    for _, out, wanted, i in moved:
        assert same(box.get(out), wanted), (n, distance, i)
    box.check_guards()


@pytest.mark.parametrize("path", ["auto", "host"])
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_every_size(n: int, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a neighbour, to one further away, and to oneself; through pinned memory too."""
    monkeypatch.setenv("COLLECTIVES_GPU_PATH", path)
    counts = [c for c in COUNTS if n < 5 or c < 100_000]

    def body(comm: OnDevice) -> bool:
        for distance in sorted({0, 1, n // 2}):
            shift_ranks(comm, counts, distance)
        return True

    assert run_on(n, ALL, body, timeout=30) == [True] * n


def test_every_dtype() -> None:
    def body(comm: OnDevice) -> bool:
        box, other = Box(comm), 1 - comm.rank
        moved = []
        for i, dtype in enumerate(_core.dtypes):
            for count in (5, 3001):
                wanted = message(other, comm.rank, count, dtype, i)
                x = box.put(message(comm.rank, other, count, dtype, i))
                moved.append((x, box.empty(wanted), wanted))
        comm.comm.barrier()
        for x, out, _ in moved:
            if comm.rank == 0:
                comm.comm.send(x, 1)
                comm.comm.recv(out, 1)
            else:
                comm.comm.recv(out, 0)
                comm.comm.send(x, 0)
        comm.finish()
        assert all(same(box.get(out), wanted) for _, out, wanted in moved)
        return True

    assert run_on(2, ALL, body, timeout=20) == [True] * 2


@pytest.mark.parametrize("bound", [1, 3, 0])
def test_larger_than_what_fits(bound: int) -> None:
    """In messages that follow each other through the FIFO, on few blocks as on many."""

    def body(comm: OnDevice) -> bool:
        box, count = Box(comm), MORE_THAN_FITS + 5
        sent, wanted = message(0, 1, count), message(1, 0, count, number=1)
        mine, theirs = (sent, wanted) if comm.rank == 0 else (wanted, sent)
        x, out = box.put(mine, 1), box.empty(theirs, 3)
        comm.comm.barrier()
        if comm.rank == 0:
            comm.comm.send(x, 1)
            comm.comm.recv(out, 1)
        else:
            comm.comm.recv(out, 0)
            comm.comm.send(x, 0)
        comm.comm.sendrecv(x, 1 - comm.rank, out, 1 - comm.rank)  # both ways at once
        comm.finish()
        engine = comm.comm._device
        assert engine is not None and (bound == 0 or engine.blocks <= bound)
        assert same(box.get(out), theirs)
        box.check_guards()
        return True

    assert run_on(2, ALL, body, timeout=40, max_blocks=bound) == [True] * 2


def test_what_fits_needs_no_receiver() -> None:
    """The sender's stream ends before the receiver has put its call anywhere; several messages wait
    in order, also to itself.
    """

    def body(comm: OnDevice) -> bool:
        box, counts = Box(comm), (1, 3000, 0, 50_000, 2, 9, 4099, 1)
        whose = [0, comm.rank]
        outs = [
            [box.empty(message(q, comm.rank, c, number=i)) for i, c in enumerate(counts)]
            for q in whose
        ]
        xs = [
            [box.put(message(comm.rank, q, c, number=i)) for i, c in enumerate(counts)]
            for q in (1, comm.rank)
        ]
        comm.comm.barrier()
        if comm.rank == 0:
            for x in xs[0]:
                comm.comm.send(x, 1)
        else:
            for x in xs[1]:
                comm.comm.send(x, 1)
        comm.finish()  # the sends are over
        if comm.rank == 1:
            for q, of_rank in zip(whose, outs, strict=True):
                for out in of_rank:
                    comm.comm.recv(out, q)
        comm.finish()
        if comm.rank == 1:
            for q, of_rank in zip(whose, outs, strict=True):
                for i, (out, count) in enumerate(zip(of_rank, counts, strict=True)):
                    assert same(box.get(out), message(q, 1, count, number=i)), (q, i)
        return True

    assert run_on(2, ALL, body, timeout=20) == [True] * 2


@pytest.mark.parametrize("count", [0, 5, 300_001])
def test_a_receive_may_come_first(count: int) -> None:
    """It waits on its stream, whatever the sender does before."""

    def body(comm: OnDevice) -> bool:
        box, n = Box(comm), comm.size
        xs = [message(0, q, count) for q in range(n)]
        arrays = [box.put(x) if comm.rank == 0 else box.empty(x) for x in xs]
        comm.comm.barrier()
        if comm.rank != 0:
            work = comm.comm.recv(arrays[comm.rank], 0, async_op=True)
        comm.comm.barrier()
        assert comm.rank == 0 or not work.done()
        comm.comm.barrier()
        if comm.rank == 0:
            for q in range(1, n):
                comm.comm.send(arrays[q], q)
        comm.finish()
        assert same(box.get(arrays[comm.rank]), xs[comm.rank])
        box.check_guards()
        return True

    assert run_on(3, ALL, body, timeout=20) == [True] * 3


def test_what_does_not_fit_waits_on_the_stream() -> None:
    def body(comm: OnDevice) -> bool:
        box = Box(comm)
        x = message(0, 1, MORE_THAN_FITS)
        on_gpu = box.put(x) if comm.rank == 0 else box.empty(x)
        comm.comm.barrier()
        work = comm.comm.send(on_gpu, 1, async_op=True) if comm.rank == 0 else None
        comm.comm.barrier()
        assert work is None or not work.done()
        comm.comm.barrier()
        if work is None:
            comm.comm.recv(on_gpu, 0, async_op=True).wait(30)
        else:
            work.wait(30)
        comm.finish()
        assert same(box.get(on_gpu), x)
        return True

    assert run_on(2, ALL, body, timeout=40) == [True] * 2


@pytest.mark.parametrize("n", [2, 3, 5])
def test_a_group_goes_on_together(n: int) -> None:
    """Everybody sends three messages to everybody, larger than what fits, and receives in another
    order of ranks: one by one that would be a deadlock. The last one is small, and there is room
    for it before the one in the middle is through. A collective in between has its turn.
    """
    large = MORE_THAN_FITS // 2 if n == 2 else 200_003
    counts = (7, large, 7)

    def body(comm: OnDevice) -> bool:
        box, rank = Box(comm), comm.rank
        ones = box.put(np.ones(100, np.float32))
        parts = [(q, i, c) for q in range(n) for i, c in enumerate(counts)]
        xs = [box.put(message(rank, q, c, number=i), i) for q, i, c in parts]
        backwards = [(q, i, c) for q in reversed(range(n)) for i, c in enumerate(counts)]
        outs = [box.empty(message(q, rank, c, number=i)) for q, i, c in backwards]
        last = [box.empty(message(q, 0, 7)) for q in range(n)]
        comm.comm.barrier()
        with comm.comm.group():
            sends = [comm.comm.send(x, q, i) for x, (q, i, _) in zip(xs, parts, strict=True)]
            got = [comm.comm.recv(o, q, i) for o, (q, i, _) in zip(outs, backwards, strict=True)]
            comm.comm.all_reduce(ones)
            comm.comm.send(xs[0], 0)
            if rank == 0:
                for q, out in enumerate(last):
                    comm.comm.recv(out, q)
        assert [w.wait() for w in sends] == [None] * len(sends)
        assert all(w.wait() is out for w, out in zip(got, outs, strict=True))
        comm.finish()
        assert (box.get(ones) == n).all()
        for out, (q, i, c) in zip(outs, backwards, strict=True):
            assert same(box.get(out), message(q, rank, c, number=i)), (q, i)
        for q, out in enumerate(last):
            assert rank != 0 or same(box.get(out), message(q, 0, 7)), q
        box.check_guards()
        return True

    assert run_on(n, ALL, body, timeout=40) == [True] * n


@pytest.mark.parametrize("n", [1, 2, 3])
def test_small_ones_between_large_ones(n: int) -> None:
    """Most blocks have nothing of those: there, too, the large ones follow each other."""
    counts = (300_001, 100, 300_001, 0, 1, 400_001)

    def body(comm: OnDevice) -> bool:
        box, rank = Box(comm), comm.rank
        to, source = (rank + 1) % n, (rank - 1) % n
        parts = [(c, 10 * k + i) for k in range(4) for i, c in enumerate(counts)]
        xs = [box.put(message(rank, to, c, number=i)) for c, i in parts]
        outs = [box.empty(message(source, rank, c, number=i)) for c, i in parts]
        comm.comm.barrier()
        for k in range(0, len(parts), len(counts)):
            with comm.comm.group():
                for x, out in zip(xs[k:], outs[k : k + len(counts)], strict=False):
                    comm.comm.send(x, to)
                    comm.comm.recv(out, source)
        comm.finish()
        for out, (c, i) in zip(outs, parts, strict=True):
            assert same(box.get(out), message(source, rank, c, number=i)), i
        box.check_guards()
        return True

    assert run_on(n, ALL, body, timeout=10) == [True] * n


def test_a_ring_of_streams() -> None:
    """A call on `stream=` follows the rank's call on another stream; pairs are apart."""

    def body(comm: OnDevice) -> bool:
        box, n = Box(comm), comm.size
        x = box.put(np.full(30_001, comm.rank, np.int32))
        out = box.empty(np.zeros(30_001, np.int32))
        with cupy.cuda.Device(comm.device):
            other = cupy.cuda.Stream(non_blocking=True)
        comm.comm.barrier()
        for i in range(n):  # x travels once around
            where = (comm.stream, other)[i % 2]
            to, source = (comm.rank + 1) % n, (comm.rank - 1) % n
            comm.comm.sendrecv(x, to, out, source, stream=where)
            x, out = out, x
        other.synchronize()
        comm.finish()
        return bool((box.get(x) == comm.rank).all())

    assert run_on(4, ALL, body, timeout=20) == [True] * 4


def test_graphs() -> None:
    """A graph of sends and receives is replayed with what its arrays then hold, beside collectives
    and transfers that are not captured.
    """

    def body(comm: OnDevice) -> bool:
        box, n, rank = Box(comm), comm.size, comm.rank
        count = 50_001
        x, out = box.put(np.zeros(count, np.int32)), box.empty(np.zeros(count, np.int32))
        own, total = box.put(np.zeros(9, np.int32)), box.empty(np.zeros(9, np.int32))
        to, source = (rank + 1) % n, (rank - 1) % n
        comm.comm.barrier()
        comm.stream.begin_capture()
        comm.comm.sendrecv(x, to, out, source, 7, 7)
        comm.comm.all_reduce(own, out=total)
        with comm.comm.group():
            comm.comm.send(out, to)
            comm.comm.recv(x, source)
        graph = comm.stream.end_capture()
        for turn in range(4):
            comm.meet()
            values = np.full(count, 100 * turn + rank, np.int32)
            comm.copy(x.__cuda_array_interface__["data"][0], values.ctypes.data, values.nbytes, 1)
            comm.copy(own.__cuda_array_interface__["data"][0], values.ctypes.data, 36, 1)
            comm.meet()
            graph.launch(comm.stream)
            comm.comm.sendrecv(own, to, total, source, 3, 3)
            comm.finish()
            assert (box.get(out) == 100 * turn + source).all()
            assert (box.get(x) == 100 * turn + (rank - 2) % n).all()
            assert (box.get(total) == 100 * turn + source).all()
        box.check_guards()
        return True

    assert run_on(3, ALL, body, timeout=20) == [True] * 3


# What the receiver expects of "10 x float32 with tag 3", and how it says so.
UNLIKE = {
    "tag": (np.zeros(10, np.float32), 4, r"10 x float32 with tag 4"),
    "count": (np.zeros(11, np.float32), 3, r"11 x float32 with tag 3"),
    "dtype": (np.zeros(10, np.int32), 3, r"10 x int32 with tag 3"),
    "length": (np.zeros(200_000, np.float32), 3, r"200000 x float32 with tag 3"),
}


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("differs", UNLIKE)
def test_mismatches_raise_on_both(n: int, differs: str) -> None:
    """Both say what was sent and what was expected, and nothing is written; so does a rank that is
    in neither call, in fewer words.
    """
    expected, tag, words = UNLIKE[differs]

    def body(comm: OnDevice) -> str:
        box = Box(comm)
        first = box.put(np.arange(5, dtype=np.int8))
        array = box.put(np.ones(10, np.float32)) if comm.rank == 0 else box.empty(expected)
        before = box.get(array)
        comm.comm.barrier()
        if comm.rank == 0:
            comm.comm.send(first, 1, 9)
            comm.comm.send(array, 1, 3)
        elif comm.rank == 1:
            comm.comm.recv(first, 0, 9)
            comm.comm.recv(array, 0, tag)
            with pytest.raises(cc.MismatchError) as caught:
                comm.comm.synchronize(20)
        comm.comm.barrier()
        if comm.rank != 1:  # learn of it in what they do next
            with pytest.raises(cc.MismatchError) as caught:
                comm.comm.send(first, 1)
                comm.comm.synchronize(20)
        comm.comm.barrier()
        assert same(box.get(array), before)
        box.check_guards()
        with pytest.raises(cc.MismatchError):
            comm.comm.send(array, 0)
        return str(caught.value)

    said = run_on(n, ALL, body, timeout=20)
    for text in said[:2]:
        both = rf"rank 0 sent rank 1 10 x float32 with tag 3 \(message no. 2 .*expected {words}"
        assert re.search(both, text), text
    assert "different calls" in said[-1] or n == 2, said


def test_a_mismatch_ends_a_send_that_waits() -> None:
    def body(comm: OnDevice) -> str:
        box = Box(comm)
        array = box.put(np.ones(MORE_THAN_FITS if comm.rank == 0 else 8, np.uint8))
        comm.comm.barrier()
        if comm.rank == 0:
            comm.comm.send(array, 1)
        else:
            comm.comm.recv(array, 0)
        with pytest.raises(cc.MismatchError) as caught:
            comm.comm.synchronize(20)
        comm.comm.barrier()
        return str(caught.value)

    for text in run_on(2, ALL, body, timeout=40):
        assert f"sent rank 1 {MORE_THAN_FITS} x uint8 with tag 0" in text, text
        assert "expected 8 x uint8 with tag 0" in text, text


def test_a_missing_rank_is_a_deadline() -> None:
    def body(comm: OnDevice) -> str:
        box = Box(comm)
        array = box.put(np.ones(8, np.uint8))
        comm.comm.barrier()
        if comm.rank == 0:
            comm.comm.recv(array, 1)
            with pytest.raises(cc.DeadlineError) as caught:
                comm.comm.synchronize()
            over.set()
            return str(caught.value)
        assert over.wait(60)
        return ""

    over = threading.Event()
    words = run_on(2, ALL, body, timeout=3)[0]
    assert "a message from rank 1" in words and "with comm.group()" in words, words


def test_an_abort_ends_a_receive() -> None:
    def body(comm: OnDevice) -> str:
        box = Box(comm)
        array = box.put(np.ones(8, np.uint8))
        comm.comm.barrier()
        with pytest.raises(cc.AbortedError) as caught:
            if comm.rank == 0:
                comm.comm.recv(array, 1)
                comm.comm.synchronize(20)
            else:
                comm.comm.abort("enough")
                comm.comm.recv(array, 0)
        return str(caught.value)

    said = run_on(2, ALL, body, timeout=40)  # a kernel knows no reasons
    assert "enough" in said[1] and re.search("enough|rank 1 gave up: it was aborted", said[0]), said


@pytest.mark.faults
def test_survivors_of_a_death() -> None:
    """A receive from a process that was killed raises on those that wait for it."""
    worker = Path(__file__).with_name("dying_worker.py")
    gpus = min(GPUS, 3)
    n = 3 if gpus > 1 else 2  # on one GPU, processes take turns
    path = os.pathsep.join([str(worker.parent), os.environ.get("PYTHONPATH", "")])
    got = launch.run(n, worker, gpus, "recv", env={"PYTHONPATH": path}, timeout=100)
    lines = re.findall(r"^rank (\d): (\w+) after (\d+\.\d) s: (.*)$", got.output, re.MULTILINE)
    assert sorted(line[0] for line in lines) == ["0", "1"][: n - 1], got
    for _, kind, seconds, _ in lines:
        assert kind == "PeerDiedError" and float(seconds) < 20, got  # a deadline would be 60
    assert len(re.findall(r"again PeerDiedError", got.output)) == n - 1, got


@pytest.mark.parametrize("path", ["auto", "host"])
def test_processes(path: str) -> None:
    """Through CUDA IPC, and through memory of the host that they share."""
    worker = Path(__file__).with_name("moving_worker.py")
    paths = os.pathsep.join([str(worker.parent), str(worker.parents[1])])
    env = {
        "PYTHONPATH": paths + os.pathsep + os.environ.get("PYTHONPATH", ""),
        "COLLECTIVES_GPU_PATH": path,
    }
    got = launch.run(2 if GPUS < 3 else 3, worker, GPUS, env=env, timeout=100)
    assert got.output.count("all right") == (2 if GPUS < 3 else 3), got


def test_the_flight_recorder_shows_them() -> None:
    def body(comm: OnDevice) -> bool:
        box, other = Box(comm), 1 - comm.rank
        x, out = box.put(np.ones(9, np.float32)), box.empty(np.ones(9, np.float32))
        comm.comm.barrier()
        comm.comm.sendrecv(x, other, out, other, 5, 5)
        comm.comm.all_reduce(x)
        comm.finish()
        comm.comm.recv(out, other, 6)
        dump = comm.comm.dump()
        assert [c["collective"] for c in dump["gpu_calls"]] == ["all_reduce"]
        received, sent, last = dump["gpu_transfers"]
        assert (received["collective"], received["state"], received["tag"]) == ("recv", "done", 5)
        assert (sent["collective"], sent["state"], sent["peer"]) == ("send", "done", other)
        assert (sent["count"], sent["dtype"]) == (9, "float32")
        assert (last["state"], last["sequence"]) == ("entered", 3)
        assert "gpu_transfers_waiting" not in dump
        with pytest.raises(cc.DeadlineError):
            comm.comm.synchronize(0.01)
        assert comm.comm.dump()["gpu_transfers_waiting"]["sequence"] == 3
        comm.comm.barrier()
        if comm.rank == 0:
            comm.comm.abort("enough")
        with pytest.raises(cc.AbortedError):
            comm.comm.synchronize(20)
            comm.comm.send(x, other)
        dump = comm.comm.dump()
        assert dump["gpu_calls"][-1]["state"] == "done"
        return True

    assert run_on(2, ALL, body, timeout=20) == [True] * 2


def test_errors_in_words() -> None:
    def body(comm: OnDevice) -> bool:
        box = Box(comm)
        x = box.put(np.ones(MORE_THAN_FITS, np.uint8))
        small = box.put(np.ones(8, np.uint8))
        c = comm.comm
        with pytest.raises(cc.UnsupportedError, match=r"sends itself .* use sendrecv"):
            c.send(x, c.rank)
        with pytest.raises(cc.ArrayError, match="both must be on the same"):
            c.sendrecv(small, 0, np.ones(8, np.uint8), 0)
        with pytest.raises(cc.ArrayError, match="share memory"):
            c.sendrecv(small, 0, small, 0)
        with pytest.raises(cc.ArrayError, match=r"stream= .* on the host"):
            c.send(np.ones(3), 0, stream=comm.stream)
        with pytest.raises(ValueError, match="out of range"):
            c.send(small, 2)
        with pytest.raises(ValueError, match="out of range"):
            c.recv(small, 0, -1)
        with pytest.raises(cc.UnsupportedError, match="up to 64 sends"), c.group():
            for _ in range(65):
                c.send(small, 0)
        c.barrier()
        return True

    assert run_on(2, ALL, body, timeout=20) == [True] * 2


def test_the_engine_must_be_set_up() -> None:
    def body(comm: cc.Communicator) -> bool:
        ends = comm.duplicate()
        with cupy.cuda.Device(0):
            x = cupy.empty(8, "float32")
        with pytest.raises(cc.UnsupportedError, match=r"collective call .* such as all_reduce"):
            ends.send(x, 1 - comm.rank)
        comm.barrier()
        return True

    assert cc.run_threads(2, body, timeout=20) == [True] * 2


def test_all_ranks_know_if_one_has_moved_by_host() -> None:
    """As torch's process groups do before the engine is set up: messages may still be under way."""

    def body(comm: OnDevice) -> list[bool]:
        x = Box(comm).put(np.ones(8, np.float32))
        found = []
        for who in (None, 1):
            ends = comm.comm.duplicate()
            ends._moved_by_host = comm.rank == who
            ends.all_reduce(x)
            comm.finish()
            assert ends._device is not None
            found.append(ends._device.moves)
        return found

    assert run_on(2, ALL, body, timeout=20) == [[True, False]] * 2


def test_hurried() -> None:
    """Many messages of random lengths and addresses, a few one way and a few the other: FIFOs wrap,
    senders wait for room and receivers for messages.
    """
    numbers = some(list(range(160)))

    def body(comm: OnDevice) -> bool:
        box, other = Box(comm), 1 - comm.rank
        rng = np.random.default_rng(5)
        spans = []
        for _ in numbers:
            begin = int(rng.integers(0, 60_000))
            spans.append(slice(begin, int(rng.integers(begin, 60_001))))
        sent, wanted = message(comm.rank, other, 60_000), message(other, comm.rank, 60_000)
        xs = [box.put(sent[s], i % 5) for i, s in enumerate(spans)]
        outs = [box.empty(wanted[s], i % 7) for i, s in enumerate(spans)]
        comm.comm.barrier()
        for i, (x, out) in enumerate(zip(xs, outs, strict=True)):
            if i // 4 % 2 == comm.rank:
                comm.comm.send(x, other, i)
            else:
                comm.comm.recv(out, other, i)
        comm.finish()
        for i, (out, s) in enumerate(zip(outs, spans, strict=True)):
            if i // 4 % 2 != comm.rank:
                assert same(box.get(out), wanted[s]), i
        box.check_guards()
        return True

    assert run_on(2, ALL, body, timeout=20) == [True] * 2
