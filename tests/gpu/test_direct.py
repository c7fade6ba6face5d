"""The kernels made by hand (packets, lines, two-shot; on symmetric buffers too) against the same
references as the interpreter, in every way in which they can go about a call.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import numpy as np
import pytest
import reference
from cases import Case, any_bytes, check, difference, random_values
from gpus import GPUS, MARK, cupy
from on_device import OnDevice, run_on, some

import collectives as cc
from collectives import device as engines
from collectives.tuning.device import Launch

pytestmark = MARK

PLACE = list(range(GPUS))
ONE_SHOT = {"packets": Launch(), "lines": Launch(lines=True), "few": Launch(lines=True, blocks=1)}
TWO_SHOT = {
    "push": Launch(chunk=4096),
    "pull": Launch(pull=True),
    "few": Launch(pull=True, blocks=1),
    "bulk": Launch(pull=True, bulk=True),
    "few in bulk": Launch(pull=True, blocks=1, bulk=True),
    "two if straight": Launch(pull=True, straight_blocks=2, bulk=True),
    "lines": Launch(lines=True),
    "lines of few": Launch(lines=True, blocks=1),
}
COUNTS = (1, 3, 14, 15, 16, 17, 30, 31, 257, 1000, 4099, 20011)


def run_all(cases: list[Case], n: int, symmetric: bool = False) -> None:
    wanted = some(cases)

    def body(comm: OnDevice) -> int:
        for case in wanted:
            check(comm, case)
        return len(wanted)

    assert run_on(n, PLACE, body, symmetric, timeout=20) == [len(wanted)] * n


@pytest.mark.parametrize("n", [2, 3, 5, 8])
@pytest.mark.parametrize("how", ONE_SHOT)
def test_one_shot(monkeypatch: pytest.MonkeyPatch, how: str, n: int) -> None:
    """Every dtype and op, at counts around the borders of units and lines, at odd addresses."""
    monkeypatch.setattr(engines, "device_launch", lambda *_: ONE_SHOT[how])
    wanted = [
        Case(
            "all_reduce", "direct_one_shot", dtype, op, COUNTS[(i + n) % len(COUNTS)],
            place=("in", "out")[i % 2], seed=i,
        )
        for i, (dtype, op) in enumerate(reference.PAIRS)
    ]  # fmt: skip
    run_all(wanted, n)


def block_cases(n: int) -> list[Case]:
    """reduce_scatter with every dtype and op, the others in turn; blocks of equal and of unequal
    lengths, some of them empty."""
    found = []
    others = ("all_gather", "broadcast", "gather", "scatter", "reduce")
    for i, (dtype, op) in enumerate(reference.PAIRS):
        count, place = COUNTS[(i + n) % len(COUNTS)], ("in", "out")[i % 2]
        v, root = i // 2 % 2 == 1, i % n
        order = "rank" if i % 3 == 0 else None
        found.append(
            Case("reduce_scatter", "direct_one_shot", dtype, op, count, place=place, v=v, seed=i,
                 order=order)
        )  # fmt: skip
        other = others[i % len(others)]
        v = v and other in ("all_gather", "gather", "scatter")
        found.append(
            Case(other, "direct_one_shot", dtype, op if other == "reduce" else "sum", count,
                 root=0 if other == "all_gather" else root, place=place, v=v, seed=i)
        )  # fmt: skip
    return found


@pytest.mark.parametrize("n", [2, 3, 5, 8, 16])
@pytest.mark.parametrize("how", ONE_SHOT)
def test_one_shot_blocks(monkeypatch: pytest.MonkeyPatch, how: str, n: int) -> None:
    """What is not all_reduce: each pair of ranks exchanges something of its own, or nothing."""
    monkeypatch.setattr(engines, "device_launch", lambda *_: ONE_SHOT[how])
    run_all(block_cases(n), n)


@pytest.mark.parametrize("how", ["packets", "lines"])
def test_blocks_have_the_bits_of_the_host(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(engines, "device_launch", lambda *_: ONE_SHOT[how])
    n, count = 5, 301

    def body(comm: OnDevice) -> list[str]:
        wrong = []
        for seed, (dtype, op) in some(list(enumerate(reference.PAIRS))):
            x = any_bytes(comm.rank, n * count, dtype, seed)
            more: dict[str, Any] = {"op": op, "order": "rank"}
            if op == "premul_sum":
                more["factor"] = 0.5
            host = np.zeros_like(x[:count])
            got = np.zeros_like(host)
            comm.comm.reduce_scatter(x.copy(), out=host, **more)
            comm.reduce_scatter(x.copy(), out=got, algorithm="direct_one_shot", **more)
            words = difference(got, host)
            if words:
                wrong.append(f"{dtype} {op}: {words}")
        return wrong

    with np.errstate(all="ignore"):
        for wrong in run_on(n, PLACE, body, timeout=20):
            assert not wrong, wrong


LENGTHS = ([700, 0, 300], [0, 0, 901], [1, 1, 1])


@pytest.mark.parametrize("how", ["packets", "lines"])
def test_hurried_blocks(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Calls one behind the other while ranks come late in turn. Ranks that send or get nothing are
    waited for too: nobody writes over what another has not taken yet."""
    monkeypatch.setattr(engines, "device_launch", lambda *_: ONE_SHOT[how])
    n, calls, room = 3, 30, 1024

    def body(comm: OnDevice) -> int:
        rng = np.random.default_rng(comm.rank)
        inputs, outputs = (
            cupy.ndarray(
                (calls * room,), cupy.float32, cupy.cuda.MemoryPointer(comm.memory.mem, at)
            )
            for at in (0, 16 << 20)
        )
        pattern = np.arange(room) % 97
        host = np.concatenate([pattern * (i + 1) + comm.rank for i in range(calls)])
        host = host.astype(np.float32)
        comm.copy(inputs.data.ptr, host.ctypes.data, host.nbytes, 1)
        comm.comm.barrier()
        with comm.stream:
            for i in range(calls):
                if rng.random() < 0.3:
                    time.sleep(0.005)
                counts = LENGTHS[i // 2 % len(LENGTHS)]
                mine, whole = counts[comm.rank], sum(counts)
                x, out = (a[i * room : (i + 1) * room] for a in (inputs, outputs))
                if i % 2:
                    comm.comm.all_gather_v(
                        x[:mine], counts, out=out[:whole], algorithm="direct_one_shot"
                    )
                else:
                    comm.comm.reduce_scatter_v(
                        x[:whole], counts, out=out[:mine], algorithm="direct_one_shot"
                    )
        comm.finish()
        comm.copy(host.ctypes.data, outputs.data.ptr, host.nbytes, 2)
        for i, got in enumerate(host.reshape(calls, room)):
            counts = LENGTHS[i // 2 % len(LENGTHS)]
            mine, begin = counts[comm.rank], sum(counts[: comm.rank])
            data = pattern * (i + 1)
            if i % 2:
                wanted = np.concatenate([data[:c] + q for q, c in enumerate(counts)])
            else:
                wanted = data[begin : begin + mine] * n + n * (n - 1) // 2
            assert (got[: wanted.size] == wanted).all(), i
        return 1

    assert run_on(n, PLACE, body, timeout=20) == [1] * n


@pytest.mark.parametrize("how", ["packets", "lines"])
def test_results_wait_for_all(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """A rank in another call: all raise, and nobody has written what the others did send."""
    monkeypatch.setattr(engines, "device_launch", lambda *_: ONE_SHOT[how])

    def body(comm: OnDevice) -> tuple[str, bool]:
        counts = [500, 700, 0 if comm.rank < 2 else 5]
        host = np.full(2000, 7, np.float32)
        comm.copy(comm.memory.ptr, host.ctypes.data, host.nbytes, 1)
        x, out = (
            cupy.ndarray((size,), cupy.float32, cupy.cuda.MemoryPointer(comm.memory.mem, at))
            for size, at in ((counts[comm.rank], 0), (sum(counts), 1 << 20))
        )
        host[:] = 3
        comm.copy(out.data.ptr, host.ctypes.data, host.nbytes, 1)
        comm.comm.barrier()
        words = ""
        try:
            with comm.stream:
                comm.comm.all_gather_v(x, counts, out=out, algorithm="direct_one_shot")
            comm.comm.synchronize()
        except cc.MismatchError as error:
            words = str(error)
        comm.copy(host.ctypes.data, out.data.ptr, host.nbytes, 2)
        return words, bool((host == 3).all())

    found = run_on(3, PLACE, body, timeout=20)
    assert all(words and untouched for words, untouched in found), found


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(
    "collective", ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce"]
)
def test_two_shot_that_ends_early(collective: str, n: int) -> None:
    """Ranks that have nothing to take, or one message only, leave a call that cannot be, too."""

    def body(comm: OnDevice) -> str:
        x = np.ones(12 + 12 * (comm.rank == n - 1), np.float32)
        more: dict[str, Any] = {"algorithm": "direct_two_shot"}
        if collective == "all_gather":
            more["out"] = np.zeros(x.size * n, np.float32)
        elif collective == "reduce_scatter":
            more["out"] = np.zeros(x.size // n, np.float32)
        try:
            getattr(comm, collective)(x, **more)
        except cc.MismatchError as error:
            return str(error)
        return ""

    words = run_on(n, PLACE, body, timeout=20)
    assert all(words), words


def two_shot_cases(n: int) -> list[Case]:
    pairs = reference.PAIRS
    found = []
    for i, (dtype, op) in enumerate(pairs):
        count = COUNTS[(i + n) % len(COUNTS)]
        place = ("in", "out")[i % 2]
        found.append(
            Case("all_reduce", "direct_two_shot", dtype, op, count, place=place, seed=i,
                 order="rank" if i % 3 == 0 else None)
        )  # fmt: skip
        if i % 2:
            found.append(
                Case("reduce_scatter", "direct_two_shot", dtype, op, count, seed=i,
                     place=("in", "out")[i // 2 % 2], v=i % 5 == 0)
            )  # fmt: skip
        if i % 3 == 0:
            found.append(
                Case("all_gather", "direct_two_shot", dtype, count=count, seed=i,
                     place=("in", "out")[i // 3 % 2], v=i % 5 == 0)
            )  # fmt: skip
        place = ("in", "out")[i // 4 % 2]
        found.append(
            Case("reduce", "direct_two_shot", dtype, op, count, root=i % n, place=place, seed=i)
        )
        if i % 4 == 1:
            found.append(
                Case("broadcast", "direct_two_shot", dtype, count=count, root=i % n, seed=i)
            )  # fmt: skip
    for collective in ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce"):
        found.append(Case(collective, "direct_two_shot", count=300_001, place="out", seed=7))
        found.append(Case(collective, "direct_two_shot", count=200_000, place="in", seed=8))
    return found


@pytest.mark.parametrize("n", [2, 3, 5, 8])
@pytest.mark.parametrize(
    ("how", "symmetric"),
    [
        pytest.param(how, symmetric, id=f"{how}-{'symmetric' if symmetric else 'any'}")
        for how in TWO_SHOT
        for symmetric in (False, True)
        # Only in symmetric buffers is there something to pull from.
        if symmetric or how == "few" or not TWO_SHOT[how].pull
    ],
)
def test_two_shot(monkeypatch: pytest.MonkeyPatch, how: str, symmetric: bool, n: int) -> None:
    """Shares through FIFOs, pulled and written, on ordinary arrays and in symmetric buffers."""
    monkeypatch.setattr(engines, "device_launch", lambda *_: TWO_SHOT[how])
    run_all(two_shot_cases(n), n, symmetric)


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_exchange(n: int) -> None:
    """all_to_all: blocks of equal and of unequal lengths, in place too."""
    run_all(
        [
            Case("all_to_all", "direct_two_shot", dtype, count=count, place=place, v=v, seed=i)
            for i, (dtype, count) in enumerate(
                [("uint8", 8), ("float32", 1000), ("int16", 33_333), ("complex128", 7),
                 ("float64", 100_000), ("uint8", 600_001)]
            )
            for place, v in (("in", False), ("out", False), ("out", True))
        ],
        n,
    )  # fmt: skip


def test_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that sends much and gets nothing is held back by its receiver alone."""
    monkeypatch.setattr(engines, "device_launch", lambda *_: Launch(blocks=1))
    count = 3 << 20

    def body(comm: OnDevice) -> int:
        sends = [0, count] if comm.rank == 0 else [0, 0]
        receives = [count, 0] if comm.rank == 1 else [0, 0]
        x = (np.arange(sum(sends)) % 251).astype(np.uint8)
        out = np.zeros(sum(receives), np.uint8)
        for _ in range(3):
            out[:] = 0
            comm.all_to_all_v(x, sends, receives, out=out)
            assert (out == np.arange(out.size) % 251).all()
        return 1

    assert run_on(2, PLACE, body, timeout=20) == [1, 1]


def test_pairs_that_disagree() -> None:
    """Each rank of an all_to_all_v knows its own lengths only; all raise if one pair disagrees."""

    def body(comm: OnDevice) -> str:
        sends = [4, 5, 6]
        receives = [sends[comm.rank]] * 3
        if comm.rank == 1:
            receives[2] += 1
        x = np.ones(sum(sends), np.float32)
        out = np.zeros(sum(receives), np.float32)
        try:
            comm.all_to_all_v(x, sends, receives, out=out)
        except cc.MismatchError as error:
            return str(error)
        return ""

    words = run_on(3, PLACE, body, timeout=20)
    assert all(words), words


@pytest.mark.parametrize(
    ("algorithm", "how"),
    [("one_shot", "lines"), ("two_shot", "pull"), ("two_shot", "push"), ("two_shot", "lines")],
)
def test_bits_are_those_of_the_host(
    monkeypatch: pytest.MonkeyPatch, algorithm: str, how: str
) -> None:
    """Any bit patterns and any numbers give the bits that the host gives: they combine in rank
    order and round once."""
    n, count = 5, 3001
    launch = (ONE_SHOT if algorithm == "one_shot" else TWO_SHOT)[how]
    monkeypatch.setattr(engines, "device_launch", lambda *_: launch)

    def body(comm: OnDevice) -> list[str]:
        wrong = []
        for seed, (dtype, op) in some(list(enumerate(reference.PAIRS))):
            make = random_values if seed % 2 and dtype in reference.FLOATS else any_bytes
            x = make(comm.rank, count, dtype, seed)
            more: dict[str, Any] = {"op": op, "order": "rank"}
            if op == "premul_sum":
                more["factor"] = 0.5
            host = comm.comm.all_reduce(x.copy(), algorithm="direct_one_shot", **more)
            got = comm.all_reduce(x.copy(), algorithm=f"direct_{algorithm}", **more)
            words = difference(got, host)
            if words:
                wrong.append(f"{dtype} {op}: {words}")
        return wrong

    with np.errstate(all="ignore"):
        for wrong in run_on(n, PLACE, body, symmetric=how == "pull", timeout=20):
            assert not wrong, wrong


HURRIED = {
    "one_shot-packets": ("direct_one_shot", Launch(), False),
    "one_shot-lines": ("direct_one_shot", Launch(lines=True), False),
    "two_shot": ("direct_two_shot", Launch(blocks=1), False),
    "two_shot-lines": ("direct_two_shot", Launch(lines=True), False),
    "symmetric-pull": ("direct_two_shot", Launch(pull=True), True),
    "symmetric-push": ("direct_two_shot", Launch(), True),
}


@pytest.mark.parametrize("how", HURRIED)
def test_hurried(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Calls one behind the other, each on new data in the same array, while ranks come late in
    turn: nobody writes over what another has not taken yet."""
    n, calls, count = 3, 30, 30_001
    algorithm, launch, symmetric = HURRIED[how]
    monkeypatch.setattr(engines, "device_launch", lambda *_: launch)

    def body(comm: OnDevice) -> int:
        rng = np.random.default_rng(comm.rank)
        size = 900 if algorithm == "direct_one_shot" else count
        pattern = np.arange(size) % 97
        # All on the GPU before the first call: a copy from the host could wait for other ranks.
        x, inputs, outputs = (
            cupy.ndarray(
                (lines * size,), cupy.float32, cupy.cuda.MemoryPointer(comm.memory.mem, at)
            )
            for lines, at in ((1, 0), (calls, 1 << 20), (calls, 16 << 20))
        )
        data = [(pattern * (i + 1) + comm.rank).astype(np.float32) for i in range(calls)]
        host = np.concatenate(data)
        comm.copy(inputs.data.ptr, host.ctypes.data, host.nbytes, 1)
        comm.comm.barrier()
        nbytes, copy = size * 4, cupy.cuda.runtime.memcpyAsync
        with comm.stream:
            for i in range(calls):
                if rng.random() < 0.2:
                    time.sleep(0.005)
                copy(x.data.ptr, inputs.data.ptr + i * nbytes, nbytes, 3, comm.stream.ptr)
                comm.comm.all_reduce(x, algorithm=algorithm)
                copy(outputs.data.ptr + i * nbytes, x.data.ptr, nbytes, 3, comm.stream.ptr)
        comm.finish()
        comm.copy(host.ctypes.data, outputs.data.ptr, host.nbytes, 2)
        for i, got in enumerate(host.reshape(calls, size)):
            assert (got == pattern * (i + 1) * n + n * (n - 1) // 2).all(), i
        return 1

    assert run_on(n, PLACE, body, symmetric, timeout=20) == [1] * n


def test_paths_take_turns() -> None:
    """Packets, lines, FIFOs and symmetric buffers in one sequence, also in a graph: what one call
    leaves behind does not disturb the next."""
    n, count = 3, 6000

    def body(comm: OnDevice) -> int:
        x = comm.comm.empty(count, "float32", f"cuda:{comm.device}", kind="cupy")
        host = np.empty(count, np.float32)
        algorithms = ("direct_one_shot", "direct_two_shot", "ring")
        comm.comm.barrier()

        def calls() -> None:
            with comm.stream:
                for i in range(12):
                    comm.comm.all_reduce(x, op="avg", algorithm=algorithms[i % 3])

        calls()
        comm.finish()
        comm.stream.begin_capture()
        calls()
        graph = comm.stream.end_capture()
        for turn in range(6):
            host[:] = np.arange(count) % 97 + comm.rank * 3 + turn
            comm.copy(x.data.ptr, host.ctypes.data, host.nbytes, 1)
            comm.comm.barrier()
            if turn % 2:
                calls()
            graph.launch(comm.stream)
            comm.finish()
            comm.copy(host.ctypes.data, x.data.ptr, host.nbytes, 2)
            assert (host == np.arange(count) % 97 + 3 + turn).all()
        return 1

    assert run_on(n, PLACE, body, timeout=20) == [1] * n


def test_graphs_of_calls_of_many_sizes() -> None:
    """Two graphs, each of calls of several sizes by what is chosen for them, in turns with calls of
    others that are not captured; and a graph that is launched twice without a wait.
    """
    n, most = 3, 300_000
    sizes = [[1, 6000, 150_000, 7], [300_000, 64, 20_000], [513, most, 2, 40_000]]

    def body(comm: OnDevice) -> int:
        x = comm.comm.empty(most, "int32", f"cuda:{comm.device}", kind="cupy")
        host = np.empty(most, np.int32)
        comm.comm.barrier()

        def calls(kind: int) -> None:
            with comm.stream:
                for size in sizes[kind]:
                    comm.comm.all_reduce(x[:size])

        graphs = []
        for kind in (0, 1):
            calls(kind)
            comm.finish()
            comm.stream.begin_capture()
            calls(kind)
            graphs.append(comm.stream.end_capture())
            comm.finish()
        for turn in range(4):
            host[:] = np.arange(most) % 13 + comm.rank
            comm.copy(x.data.ptr, host.ctypes.data, host.nbytes, 1)
            comm.comm.barrier()
            order = [(0, 2, 1), (1, 1), (2, 0), (0, 1, 2, 0)][turn]
            for kind in order:
                if kind < 2:
                    graphs[kind].launch(comm.stream)
                else:
                    calls(kind)
            comm.finish()
            comm.copy(host.ctypes.data, x.data.ptr, host.nbytes, 2)
            times = sum(
                (np.arange(most) < size).astype(np.int32) for k in order for size in sizes[k]
            )
            # The first sums what ranks have, each later one equal values.
            wanted = (np.arange(most) % 13 * 3 + 3) * 3 ** np.maximum(times - 1, 0)
            assert (host == np.where(times > 0, wanted, np.arange(most) % 13 + comm.rank)).all()
        return 1

    assert run_on(n, PLACE, body, timeout=20) == [1] * n


def test_symmetric_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are made, dropped and made again; parts of them work; where ranks reach into each
    other's, all must pass the same.
    """
    monkeypatch.setattr(engines, "device_launch", lambda *_: TWO_SHOT["pull"])

    def body(comm: OnDevice) -> str:
        c, device = comm.comm, f"cuda:{comm.device}"
        for i in range(4):
            x = c.empty((100, 3 + i), "float32", device, kind="cupy")
            assert x.shape == (100, 3 + i) and x.dtype == np.float32
            del x
        with pytest.raises(cc.ArrayError, match="different sizes"):
            c.empty(10 + c.rank, "int32", device, kind="cupy")
        with pytest.raises(ValueError, match="negative"):
            c.empty(-1, "int32", device, kind="cupy")
        with pytest.raises(cc.ArrayTypeError, match="unknown kind"):
            c.empty(1, "int32", device, kind="numpy")
        assert c.empty(0, "int32", device, kind="cupy").size == 0
        x = c.empty(1000, "float32", device, kind="cupy")
        host = np.arange(1000, dtype=np.float32)
        comm.copy(x.data.ptr, host.ctypes.data, host.nbytes, 1)
        c.barrier()
        with comm.stream:
            c.all_reduce(x[100:900], algorithm="direct_two_shot")
        comm.finish()
        comm.copy(host.ctypes.data, x.data.ptr, host.nbytes, 2)
        wanted = np.arange(1000) * np.where(
            (np.arange(1000) < 100) | (np.arange(1000) >= 900), 1, 3
        )
        assert (host == wanted).all()
        c.barrier()
        try:
            with comm.stream:
                c.all_reduce(x[c.rank : 500 + c.rank], algorithm="direct_two_shot")
            comm.finish()
        except cc.MismatchError as error:
            return str(error)
        return ""

    words = run_on(3, PLACE, body, timeout=20)
    assert all(words), words
    assert any("in another call" in w for w in words)


def test_a_buffer_dropped_while_a_kernel_waits() -> None:
    """The memory of a communicator that is gone goes when its last array does, which Python's
    collector decides. Freeing it there would wait for kernels that wait for this very thread.
    """
    kept = run_on(2, [0], lambda comm: comm.comm.empty(1 << 20, "uint8", "cuda:0", kind="cupy"))

    def body(comm: OnDevice) -> bool:
        comm.comm.barrier(stream=comm.stream)
        comm.finish()
        if comm.rank == 1:
            time.sleep(0.1)  # the other rank's kernel waits by now, or the test shows less
            kept.clear()
            gc.collect()
        comm.comm.barrier(stream=comm.stream)
        comm.finish()
        return True

    assert run_on(2, [0], body, timeout=20) == [True] * 2
