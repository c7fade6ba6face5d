"""Calls on cupy arrays like ones before, which go a short way: known_calls.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gpus import MARK, cupy
from on_device import OnDevice, run_on

import collectives as cc
from collectives import known_calls
from collectives.array import Stream
from collectives.array.device import Cupy
from collectives.array.kind import Kind
from collectives.array.recognising import KINDS
from collectives.array.views import View

pytestmark = MARK


def at(comm: OnDevice, offset: int, values: Any) -> Any:
    """A cupy array at some bytes into the rank's memory."""
    pointer = cupy.cuda.MemoryPointer(comm.memory.mem, offset)
    comm.copy(pointer.ptr, values.ctypes.data, values.nbytes, 1)
    with comm.stream:
        return cupy.ndarray(values.shape, values.dtype, pointer)


def back(comm: OnDevice, x: Any) -> Any:
    host = np.empty(x.shape, x.dtype)
    comm.copy(host.ctypes.data, x.data.ptr, host.nbytes, 2)
    return host


def set_up(comm: OnDevice) -> None:
    """The call that makes the engine is not kept."""
    with comm.stream:
        comm.comm.all_reduce(at(comm, 0, np.ones(1, np.float32)))
    comm.finish()


def by_the_short_way(
    comm: OnDevice, x: Any, out: Any = None, how: tuple[Any, ...] = ("all_reduce", "sum", None)
) -> bool:
    """Does the call go there?"""
    comm.comm.barrier()
    with comm.stream:
        done = comm.comm._known.call(x, out, None, how)
    comm.finish()
    return done == ()


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "complex64"])
@pytest.mark.parametrize("count", [1, 1000, 50_001])
def test_sums(dtype: str, count: int) -> None:
    def body(comm: OnDevice) -> None:
        set_up(comm)
        mine = (np.arange(count) % 7 + comm.rank).astype(dtype)
        total = (3 * (np.arange(count) % 7) + 3).astype(dtype)
        x, out = at(comm, 0, mine), at(comm, 1 << 20, np.zeros(count, dtype))
        comm.comm.barrier()
        with comm.stream:
            assert comm.comm.all_reduce(x, out=out) is out
            comm.finish()
            assert (back(comm, out) == total).all() and (back(comm, x) == mine).all()
            assert comm.comm.all_reduce(x) is x
        comm.finish()
        assert (back(comm, x) == total).all()
        x = at(comm, 0, mine)
        assert by_the_short_way(comm, x)
        assert (back(comm, x) == total).all()

    run_on(3, [0], body, timeout=20)


def test_leaves_the_rest_to_the_general_path() -> None:
    def body(comm: OnDevice) -> None:
        set_up(comm)
        x, y = at(comm, 0, np.ones(64, np.float32)), at(comm, 4096, np.ones(64, np.float32))
        with comm.stream:
            comm.comm.all_reduce(x)
        comm.finish()
        wide, short = at(comm, 8192, np.ones(64)), at(comm, 8192, np.ones(63, np.float32))
        shifted = cupy.ndarray((64,), np.float32, cupy.cuda.MemoryPointer(comm.memory.mem, 4))
        assert not by_the_short_way(comm, np.ones(64, np.float32))
        assert not by_the_short_way(comm, x[::2])
        for out in (wide, short, shifted, np.ones(64, np.float32)):
            assert not by_the_short_way(comm, x, out)
            with pytest.raises((cc.ArrayError, cc.ArrayTypeError)), comm.stream:
                comm.comm.all_reduce(x, out=out)
        with comm.stream:
            comm.comm.all_reduce(x, out=y)
        comm.finish()
        assert by_the_short_way(comm, x, y) and (back(comm, y) == comm.comm.size * 2).all()
        comm.comm.close()
        with pytest.raises(cc.ClosedError), comm.stream:
            comm.comm.all_reduce(x)

    run_on(2, [0], body, timeout=20)


SPLIT = [0, 700, 45]  # of 745 elements


@pytest.mark.parametrize("what", ["reduce_scatter", "reduce_scatter_v"])
@pytest.mark.parametrize("own", [False, True], ids=["apart", "in x"])
def test_scattered_sums(what: str, own: bool) -> None:
    """At other addresses each time; what overlaps in another way than before is looked at anew."""

    def body(comm: OnDevice) -> None:
        set_up(comm)
        rank, count = comm.rank, sum(SPLIT)
        counts = SPLIT if what == "reduce_scatter_v" else [249, 248, 248]
        begin, mine = sum(counts[:rank]), counts[rank]
        values = (np.arange(count) % 11 + rank).astype(np.float32)
        total = (3 * (np.arange(count) % 11) + 3).astype(np.float32)[begin : begin + mine]
        how: tuple[Any, ...] = ("max", "rank")
        extra = (counts,) if what == "reduce_scatter_v" else ()
        if what == "reduce_scatter":
            total = (np.arange(count) % 11 + 2).astype(np.float32)[begin : begin + mine]
        else:
            how = ("sum", "rank", *counts)
        for turn in range(3):
            x = at(comm, 8192 * turn, values)
            out = x[begin : begin + mine]
            if not own:
                out = at(comm, 65536 + 8192 * turn, np.zeros(mine, np.float32))
            if turn:
                assert by_the_short_way(comm, x, out, (what, *how))
            else:
                comm.comm.barrier()
                with comm.stream:
                    call = getattr(comm.comm, what)
                    assert call(x, *extra, how[0], out=out, order="rank") is out
                comm.finish()
            assert (back(comm, out) == total).all()
        x = at(comm, 0, values)
        if mine:  # what overlaps, but is not the rank's own block
            partly = x[1 : 1 + mine] if begin != 1 else x[2 : 2 + mine]
            with pytest.raises(cc.ArrayError), comm.stream:
                getattr(comm.comm, what)(x, *extra, how[0], out=partly, order="rank")

    run_on(3, [0], body, timeout=20)


@pytest.mark.parametrize("what", ["all_gather", "all_gather_v"])
def test_gathered(what: str) -> None:
    def body(comm: OnDevice) -> None:
        set_up(comm)
        rank = comm.rank
        counts = SPLIT if what == "all_gather_v" else [300] * 3
        begin, mine = sum(counts[:rank]), counts[rank]
        wanted = np.concatenate([np.full(c, r, np.float32) for r, c in enumerate(counts)])
        how = counts if what == "all_gather_v" else []
        for turn in range(3):
            out = at(comm, 8192 * turn, np.zeros(sum(counts), np.float32))
            values = np.full(mine, rank, np.float32)
            x = at(comm, 65536, values)
            if turn == 2:  # x in out, which the calls before had apart
                x = out[begin : begin + mine]
                comm.copy(x.data.ptr, values.ctypes.data, values.nbytes, 1)
            if turn == 1:
                assert by_the_short_way(comm, x, out, (what, *how))
            else:
                comm.comm.barrier()
                with comm.stream:
                    extra = {"counts": counts} if what == "all_gather_v" else {}
                    assert getattr(comm.comm, what)(x, out=out, **extra) is out
                comm.finish()
            assert (back(comm, out) == wanted).all()

    run_on(3, [0], body, timeout=20)


@pytest.mark.parametrize("root", [0, 2])
def test_broadcast(root: int) -> None:
    def body(comm: OnDevice) -> None:
        set_up(comm)
        for turn in range(3):
            values = np.full(500, 10 * turn + comm.rank, np.float32)
            x = at(comm, 4096 * turn, values)
            if turn:
                assert by_the_short_way(comm, x, None, ("broadcast", root))
                assert not by_the_short_way(comm, x, None, ("broadcast", 1))
            else:
                comm.comm.barrier()
                with comm.stream:
                    assert comm.comm.broadcast(x, root) is x
                comm.finish()
            assert (back(comm, x) == 10 * turn + root).all()
        with pytest.raises(ValueError, match="root 3"), comm.stream:
            comm.comm.broadcast(x, 3)

    run_on(3, [0], body, timeout=20)


def test_all_to_all() -> None:
    """Apart and in place, which are different calls; what has another first axis is looked at."""

    def body(comm: OnDevice) -> None:
        set_up(comm)
        rank = comm.rank
        wanted = np.repeat(np.arange(3) * 3 + rank, 40).astype(np.float32)
        for turn in range(4):
            x = at(comm, 4096 * turn, np.repeat(rank * 3 + np.arange(3), 40).astype(np.float32))
            out = x if turn % 2 else at(comm, 32768, np.zeros(120, np.float32))
            if turn >= 2:
                assert by_the_short_way(comm, x, out, ("all_to_all", x.shape, x is out))
            else:
                comm.comm.barrier()
                with comm.stream:
                    assert comm.comm.all_to_all(x, out=out) is out
                comm.finish()
            assert (back(comm, out) == wanted).all()
        odd = at(comm, 4096, np.zeros((4, 30), np.float32))
        with pytest.raises(cc.ArrayError, match="first axis"), comm.stream:
            comm.comm.all_to_all(odd, out=at(comm, 8192, np.zeros((4, 30), np.float32)))

    run_on(3, [0], body, timeout=20)


class Thing:
    """An array of a library that the core does not read by itself."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner


class ThingKind(Kind):
    def __init__(self) -> None:
        self.written: list[Any] = []
        self.told = True

    def view(self, x: Any, writable: bool, what: str, gpu: bool) -> View:
        return Cupy(cupy).view(x.inner, writable, what, gpu)

    def glance(self, x: Any) -> tuple[int, int, Any, int] | None:
        data = x.inner.data
        return (data.ptr, x.inner.size, x.inner.dtype, data.device_id) if self.told else None

    def current_stream(self, ordinal: int) -> int:
        return cupy.cuda.get_current_stream().ptr

    def has_written(self, x: Any) -> None:
        self.written.append(x)


def test_arrays_that_their_kind_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kind is asked, and hears of what was written."""

    def body(comm: OnDevice) -> None:
        set_up(comm)
        kind = KINDS[Thing]
        assert isinstance(kind, ThingKind)
        x, out = (Thing(at(comm, i << 12, np.ones(50, np.float32))) for i in range(2))
        with comm.stream:
            comm.comm.all_reduce(x)
            comm.comm.all_reduce(x, out=out)
        comm.finish()
        assert by_the_short_way(comm, x) and by_the_short_way(comm, x, out)
        assert (back(comm, x.inner) == 4).all() and (back(comm, out.inner) == 8).all()
        assert [thing for thing in kind.written if thing in (x, out)] == [x, out]
        comm.comm.barrier()
        if comm.rank == 0:
            kind.told = False
        comm.comm.barrier()
        assert not by_the_short_way(comm, x)
        assert not by_the_short_way(comm, x, object())

    monkeypatch.setitem(KINDS, Thing, ThingKind())
    run_on(2, [0], body, timeout=20)


def test_a_kind_that_raises_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(ThingKind):
        def glance(self, x: Any) -> Any:
            raise KeyError("glance")

    def body(comm: OnDevice) -> None:
        set_up(comm)
        with pytest.raises(KeyError, match="glance"):
            by_the_short_way(comm, Thing(at(comm, 0, np.ones(5, np.float32))))

    monkeypatch.setitem(KINDS, Thing, Wrong())
    run_on(2, [0], body, timeout=20)


def test_only_so_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_calls, "_MOST", 3)

    def body(comm: OnDevice) -> None:
        set_up(comm)
        x = at(comm, 0, np.ones(64, np.float32))
        for count in range(1, 9):
            comm.comm.barrier()
            with comm.stream:
                comm.comm.all_reduce(x[:count])
            comm.finish()
            assert comm.comm._known.kept() == (count - 1) % 3 + 1
        assert (back(comm, x)[:8] == 2.0 ** np.arange(8, 0, -1)).all()

    run_on(2, [0], body, timeout=20)


def test_what_is_wrong_is_told_by_the_general_path() -> None:
    def body(comm: OnDevice) -> None:
        x, out = at(comm, 0, np.ones(64, np.float32)), at(comm, 4096, np.ones(64, np.float32))
        with comm.stream:
            comm.comm.all_reduce(x, out=out)
            comm.finish()
            with pytest.raises(TypeError, match="op must be a name"):
                comm.comm.all_reduce(x, ["sum"], out=out)
            with pytest.raises(ValueError, match="unknown op"):
                comm.comm.all_reduce(x, "sums", out=out)
            with pytest.raises(ValueError, match="order="):
                comm.comm.all_reduce(x, out=out, order="ranks")
            for counts, error in ((3, TypeError), ([[1], [2]], TypeError), ([64], ValueError)):
                with pytest.raises(error, match="counts"):
                    comm.comm.reduce_scatter_v(x, counts, out=out)
                with pytest.raises(error, match="counts"):
                    comm.comm.all_gather_v(x, counts, out=out)

    run_on(2, [0], body, timeout=20)


def test_counts_that_differ_raise() -> None:
    def body(comm: OnDevice) -> bool:
        x = at(comm, 0, np.ones(64, np.float32))
        with comm.stream:
            comm.comm.all_reduce(x)
            comm.finish()
            try:
                comm.comm.all_reduce(x[: 60 + comm.rank])
                comm.comm.synchronize()
            except cc.MismatchError:
                return True
        return False

    assert run_on(2, [0], body, timeout=20) == [True, True]


class AtItsEnd:
    """Runs `do` when nobody has it any more."""

    def __init__(self, do: Callable[[], object]) -> None:
        self.do = do

    def __del__(self) -> None:
        self.do()


def test_an_argument_that_calls_when_it_is_dropped() -> None:
    """What is kept is dropped at once where there is too much; a call meanwhile may keep more."""

    def body(comm: OnDevice) -> None:
        set_up(comm)
        engine: Any = comm.comm._device
        most = 2
        call, learn, kept = engine.core.known_calls(engine.host, comm.device, KINDS, Stream, most)
        x = at(comm, 0, np.ones(8, np.float32))
        options = engine.options("ring", "all_reduce", 32)
        arguments = (0, 0, 0, 0, x.data.ptr, x.data.ptr, 8, None, None, 0, 0, 1.0, 0.0)

        def keep(*how: Any) -> None:
            with comm.stream:
                learn(call(x, None, None, how), options, arguments, (32, 32))

        keep("first")
        keep(AtItsEnd(lambda: keep("in the middle")))
        assert kept() == most
        keep("third")
        assert kept() == 2

    run_on(1, [0], body, timeout=20)
