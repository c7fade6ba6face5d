"""Calls by copy engines, beside a stream that computes: right in every way that they go, among
calls of other ways, and over within bounds where a peer fails.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
import reference
from cases import Case, check
from gpus import GPUS, MARK, cupy
from on_device import EMULATED, OnDevice, back, filled, run_on, some

import collectives as cc
from collectives import _core
from collectives import device as engines
from collectives.array import Stream
from collectives.tuning.device import Launch, device_launch

pytestmark = MARK

PLACE = list(range(GPUS))
COPIES = Launch(copies=True)
COUNTS = (1, 3, 17, 257, 4099, 20011)
SHARED = ("all_reduce", "reduce_scatter", "all_gather")


@pytest.fixture(autouse=True)
def by_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "device_launch", lambda *_: COPIES)


def exchanges(comm: OnDevice) -> int:
    """Of copies so far."""
    return int(comm.comm._engine(f"cuda:{comm.device}").core.exchanges)


def cases(n: int) -> list[Case]:
    """Every dtype and op, and blocks of equal and of unequal lengths, some of them empty."""
    found = []
    for i, (dtype, op) in enumerate(reference.PAIRS):
        count, place = COUNTS[(i + n) % len(COUNTS)], ("in", "out")[i % 2]
        order = "rank" if i % 3 == 0 else None
        one = Case("all_reduce", "direct_two_shot", dtype, op, count, place=place, seed=i,
                   order=order)  # fmt: skip
        found += [one, one._replace(collective="reduce_scatter", v=i // 2 % 2 == 1)]
        if i % 4 == 0:
            found.append(
                one._replace(collective="all_gather", op="sum", order=None, v=i // 4 % 2 == 1)
            )
    return found


@pytest.mark.parametrize("n", [2, 3, 5, 8, 16])
def test_every_call(n: int) -> None:
    wanted = some(cases(n))

    def body(comm: OnDevice) -> bool:
        for case in wanted:
            before = exchanges(comm)
            check(comm, case)
            went = exchanges(comm) - before
            queues = n <= 8 * len(PLACE)  # with more ranks on a GPU calls go by kernels
            steps = 2 if case.collective == "all_reduce" else 1
            assert went == steps * queues, (case, went)
        return True

    assert run_on(n, PLACE, body, timeout=30) == [True] * n


@pytest.mark.parametrize("collective", SHARED)
@pytest.mark.parametrize("n", [2, 3])
def test_more_than_goes_at_a_time(monkeypatch: pytest.MonkeyPatch, n: int, collective: str) -> None:
    """Several chunks of each share, the last of them of a few elements; an odd number of them, so
    that landings change their turn from call to call.
    """
    monkeypatch.setattr(engines, "device_launch", lambda *_: COPIES._replace(chunk=4096))

    def body(comm: OnDevice) -> bool:
        for place in ("in", "out"):
            before = exchanges(comm)
            case = Case(collective, "direct_two_shot", count=n * 4096 + 5 * n, place=place, seed=n)
            check(comm, case)
            assert exchanges(comm) - before == (10 if collective == "all_reduce" else 5)
        return True

    assert run_on(n, PLACE, body, timeout=60) == [True] * n


def test_bits_are_those_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares are combined in the same order, whatever brings them."""
    n, count = 5, 30_001

    def body(comm: OnDevice) -> bytes:
        x = np.random.default_rng(comm.rank).standard_normal(count).astype("float32")
        return bytes(comm.all_reduce(x, out=np.empty_like(x), algorithm="direct_two_shot").data)

    copied = run_on(n, PLACE, body)
    monkeypatch.setattr(engines, "device_launch", lambda *_: Launch())
    assert copied == run_on(n, PLACE, body) and len(set(copied)) == 1


WAYS: dict[str, tuple[str, Launch]] = {
    "copies": ("direct_two_shot", COPIES),
    "fifos": ("direct_two_shot", Launch(chunk=4096)),
    "packets": ("direct_one_shot", Launch()),
    "ring": ("ring", Launch()),
}


@pytest.mark.parametrize("other", WAYS)
def test_hurried(monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    """Copies and other calls in turn, each on new data in the same array, while ranks come late in
    turn: a rank's memory of FIFOs is free of one call when the next writes there.
    """
    n, calls, count = 3, 24, 30_001
    algorithm, how = WAYS[other]
    monkeypatch.setattr(
        engines, "device_launch", lambda name, collective, nbytes, *_: COPIES if nbytes > 4000 * 4
        else how,
    )  # fmt: skip

    def body(comm: OnDevice) -> bool:
        rng = np.random.default_rng(comm.rank)
        sizes = [count if i % 3 != 1 else 3000 if other != "copies" else count - 1
                 for i in range(calls)]  # fmt: skip
        pattern = np.arange(count) % 97
        x, inputs, outputs = (
            cupy.ndarray(
                (lines * count,), cupy.float32, cupy.cuda.MemoryPointer(comm.memory.mem, at)
            )
            for lines, at in ((1, 0), (calls, 1 << 20), (calls, 16 << 20))
        )
        host = np.concatenate([pattern * (i + 1) + comm.rank for i in range(calls)])
        host = host.astype(np.float32)
        comm.copy(inputs.data.ptr, host.ctypes.data, host.nbytes, 1)
        comm.comm.barrier()
        row, copy = count * 4, cupy.cuda.runtime.memcpyAsync
        with comm.stream:
            for i, size in enumerate(sizes):
                if rng.random() < 0.2:
                    time.sleep(0.005)
                copy(x.data.ptr, inputs.data.ptr + i * row, row, 3, comm.stream.ptr)
                name = "direct_two_shot" if size > 4000 else algorithm
                comm.comm.all_reduce(x[:size], algorithm=name)
                copy(outputs.data.ptr + i * row, x.data.ptr, row, 3, comm.stream.ptr)
        comm.finish()
        comm.copy(host.ctypes.data, outputs.data.ptr, host.nbytes, 2)
        for i, (size, got) in enumerate(zip(sizes, host.reshape(calls, count), strict=True)):
            assert (got[:size] == (pattern * (i + 1) * n + n * (n - 1) // 2)[:size]).all(), i
        return True

    assert run_on(n, PLACE, body, timeout=20) == [True] * n


@pytest.mark.parametrize("n", [2, 3])
def test_new_streams_at_the_same_moment(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """Ranks that share a GPU, each on a stream that never copied before: those get queues of their
    own, so no copy stands behind one that waits for it.
    """
    monkeypatch.setenv("EMULATED_COPY_QUEUES", "1")  # which a GPU has anyway
    rounds, count = (5 if EMULATED else 200), 20_000
    together = threading.Barrier(n)

    def body(comm: OnDevice) -> bool:
        x = filled(comm, count, 1)
        for _ in range(rounds):
            stream = cupy.cuda.Stream(non_blocking=True)
            together.wait()
            with stream:
                comm.comm.all_reduce(x, algorithm="direct_two_shot", op="max")
            stream.synchronize()
        assert exchanges(comm) >= 2 * rounds
        return bool((back(comm, x) == 1).all())

    assert run_on(n, PLACE[:1], body, timeout=10) == [True] * n


def test_not_in_graphs() -> None:
    """What is captured goes by kernels, in turns with calls by copies, and is replayed."""
    n, count = 3, 30_001

    def body(comm: OnDevice) -> bool:
        x = filled(comm, count, 1)
        with comm.stream:
            comm.comm.all_reduce(x, algorithm="direct_two_shot")
        comm.finish()
        before = exchanges(comm)
        comm.stream.begin_capture()
        with comm.stream:
            comm.comm.all_reduce(x, algorithm="direct_two_shot")
        graph = comm.stream.end_capture()
        assert exchanges(comm) == before
        comm.meet()
        for _ in range(2):
            graph.launch(comm.stream)
            with comm.stream:
                comm.comm.all_reduce(x, algorithm="direct_two_shot")
        comm.finish()
        assert exchanges(comm) == before + 4
        return bool((back(comm, x) == n**5).all())

    assert run_on(n, PLACE, body, timeout=20) == [True] * n


def test_where_streams_write_no_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one rank: all go by kernels."""
    drivers = iter((False, True))
    monkeypatch.setattr(_core.DeviceCommunicator, "writes_words", lambda _: next(drivers))

    def body(comm: OnDevice) -> bool:
        check(comm, Case("all_reduce", "direct_two_shot", count=20_000))
        return exchanges(comm) == 1

    assert run_on(2, PLACE, body, timeout=20) == [True] * 2


def raised(comm: OnDevice, x: Any, **more: Any) -> cc.CollectiveError | None:
    """What a call raises, or the wait for it."""
    try:
        with comm.stream:
            comm.comm.all_reduce(x, algorithm="direct_two_shot", **more)
        comm.stream.synchronize()
        comm.comm.synchronize()
    except cc.CollectiveError as error:
        comm.stream.synchronize()  # it goes on all the same
        return error
    return None


@pytest.mark.parametrize("other", ["count", "barrier", "kernel"])
@pytest.mark.parametrize("n", [2, 3])
def test_a_peer_in_another_call(monkeypatch: pytest.MonkeyPatch, n: int, other: str) -> None:
    """By copies too, or not: all hear of it, long before the deadline, and nothing is written."""
    monkeypatch.setattr(
        engines, "device_launch",
        lambda name, collective, nbytes, *_: Launch() if nbytes == 80_004 else COPIES,
    )  # fmt: skip

    def body(comm: OnDevice) -> float:
        x, y = filled(comm, 20_000, 1), filled(comm, 20_001, 1, 1 << 20)
        assert raised(comm, x) is None
        comm.meet()
        began = time.monotonic()
        if comm.rank != n - 1:
            error = raised(comm, x)
        elif other == "barrier":
            with pytest.raises(cc.MismatchError) as caught:
                comm.comm.barrier(stream=comm.stream)
                comm.stream.synchronize()
                comm.comm.synchronize()
            error = caught.value
        else:
            error = raised(comm, x[:-1] if other == "count" else y)
        assert isinstance(error, cc.MismatchError), error
        assert (back(comm, x) == n).all() and (back(comm, y) == 1).all()
        assert isinstance(raised(comm, x), cc.MismatchError)  # and ever after
        return time.monotonic() - began

    assert max(run_on(n, PLACE, body, timeout=60)) < 20


def test_a_peer_that_does_not_come() -> None:
    over = threading.Event()

    def body(comm: OnDevice) -> str:
        x = filled(comm, 20_000, 1)
        assert raised(comm, x) is None
        if comm.rank == 1:
            assert over.wait(20)
            return ""
        began = time.monotonic()
        error = raised(comm, x)
        assert isinstance(error, cc.DeadlineError), error
        assert 1.9 < time.monotonic() - began < 10
        assert (back(comm, x) == 2).all()
        over.set()
        return str(error)

    words = run_on(2, PLACE, body, timeout=2)[0]
    assert "for rank 1 to enter the call" in words, words


def test_an_abort_ends_the_wait() -> None:
    def body(comm: OnDevice) -> float:
        x = filled(comm, 20_000, 1)
        assert raised(comm, x) is None
        comm.meet()
        if comm.rank == 1:
            time.sleep(0.3)
            comm.comm.abort("enough")
            return 0.0
        began = time.monotonic()
        error = raised(comm, x)
        assert isinstance(error, cc.AbortedError), error
        return time.monotonic() - began

    assert run_on(2, PLACE, body, timeout=60)[0] < 20


def test_what_goes_by_copies() -> None:
    """Large calls beside a stream that computes, without a root."""
    for collective in SHARED:
        large = device_launch("direct_two_shot", collective, 64 << 20, 2, True)
        assert large.copies and not large._replace(copies=False).copies
        assert not device_launch("direct_two_shot", collective, 64 << 20, 2).copies
        assert not device_launch("direct_two_shot", collective, 1 << 20, 2, True).copies
    for collective in ("broadcast", "reduce", "all_to_all"):
        assert not device_launch("direct_two_shot", collective, 64 << 20, 2, True).copies


def test_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a program comes to it: a large call on a stream that is beside another."""
    monkeypatch.setattr(engines, "device_launch", device_launch)

    def body(comm: OnDevice) -> bool:
        x = filled(comm, 3 << 19, comm.rank + 1)
        before = exchanges(comm)
        comm.comm.all_reduce(x, stream=comm.stream)
        assert exchanges(comm) == before
        comm.comm.all_reduce(x, stream=Stream(comm.stream.ptr, comm.device, beside=True))
        comm.finish()
        assert exchanges(comm) > before
        return bool((back(comm, x) == 6).all())

    assert run_on(2, PLACE, body, timeout=20) == [True] * 2
