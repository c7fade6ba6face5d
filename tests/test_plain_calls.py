"""Calls on plain arrays of numpy take a short way, which gives what the general one gives and
leaves all else to it.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from worlds import outcomes

import collectives as cc
from collectives.calls import COLLECTIVES, OPS

DTYPES = ("float32", "int8", "uint64", "complex128", "float16")
ALGORITHMS = (None, "auto", "direct_two_shot", "ring")


def run(n, body, **options):
    """What body(comm) returned on n ranks; raises what one of them raised."""
    found = outcomes(n, body, **options)
    for one in found:
        if isinstance(one, Exception):
            raise one
    return found


class General:
    """Makes a communicator's calls by the general way while it is entered."""

    def __init__(self, comm):
        self.comm = comm

    def __enter__(self):
        self.kept = self.comm._plain, self.comm._fast_sum
        self.comm._plain = self.comm._fast_sum = lambda *arguments: False

    def __exit__(self, *raised):
        self.comm._plain, self.comm._fast_sum = self.kept


class Plain(General):
    """Fails a call by the general way while it is entered."""

    def __enter__(self):
        self.kept = self.comm._call

        def refuse(*arguments):
            raise AssertionError("this call went by the general way")

        self.comm._call = refuse

    def __exit__(self, *raised):
        self.comm._call = self.kept


def calls(comm, k, dtype, algorithm):
    """Every collective, in all places that its arrays may have: functions that make the call on new
    arrays, and give what is in these afterwards.
    """
    n, rank = comm.size, comm.rank
    root = n - 1
    values = (np.arange(n * k * 2) % 13 + rank + 1).astype(dtype).reshape(n * k, 2)
    own = slice(rank * k, (rank + 1) * k)
    how = {"algorithm": algorithm}

    def x():
        return values.copy()

    def out(shape):
        return np.full(shape, 7, dtype)

    def in_block(call):
        """This rank's block is a part of the whole array."""
        whole = x()
        got = call(whole, whole[own])
        return whole, got

    yield "all_reduce", lambda: (comm.all_reduce(x(), "prod", **how),)
    yield "all_reduce", lambda: (comm.all_reduce(x(), "prod", out=out((n * k, 2)), **how),)
    yield "all_reduce", lambda: (comm.all_reduce(x(), **how), comm.all_reduce(x()[:1], **how))
    yield "reduce", lambda: (comm.reduce(x(), root, "prod", **how),)
    yield "reduce", lambda: (comm.reduce(x(), root, out=out(values.shape), **how),)
    yield "reduce_scatter", lambda: (comm.reduce_scatter(x(), "prod", **how),)
    yield "reduce_scatter", lambda: (comm.reduce_scatter(x(), out=out((k, 2)), **how),)
    yield "reduce_scatter", lambda: in_block(lambda w, b: comm.reduce_scatter(w, out=b, **how))
    yield "all_gather", lambda: (comm.all_gather(x()[own], **how),)
    yield "all_gather", lambda: (comm.all_gather(x()[own], out=out(2 * n * k), **how),)
    yield "all_gather", lambda: in_block(lambda w, b: comm.all_gather(b, out=w, **how))
    yield "all_gather", lambda: (comm.all_gather(np.array(rank, dtype), **how),)
    yield "broadcast", lambda: (comm.broadcast(x(), root, **how),)
    if algorithm in (None, "auto"):  # few others can do these
        yield "gather", lambda: (comm.gather(x()[own], root),)
        yield "gather", lambda: (comm.gather(x()[own], root, out=out((n * k, 2))),)
        yield "gather", lambda: in_block(lambda w, b: comm.gather(b, root, out=w))
        yield "scatter", lambda: (comm.scatter(x(), root, out=out((k, 2))),)
        yield "scatter", lambda: in_block(lambda w, b: comm.scatter(w, root, out=b))
        yield "all_to_all", lambda: (comm.all_to_all(x()),)
        yield "all_to_all", lambda: (comm.all_to_all(x(), out=out((n * k, 2))),)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_both_ways_give_the_same(n, algorithm):
    def body(comm):
        compared = 0
        for k in (0, 1, 5, 2000):
            for dtype in DTYPES:
                for name, call in calls(comm, k, dtype, algorithm):
                    with General(comm):
                        expected = call()
                    with Plain(comm):
                        got = call()
                    for a, b in zip(got, expected, strict=True):
                        assert type(a) is type(b), name
                        if b is not None:
                            assert (a.shape, a.dtype) == (b.shape, b.dtype), name
                            assert a.tobytes() == b.tobytes(), (name, k, dtype)
                    compared += 1
        comm.barrier(algorithm=algorithm if algorithm == "auto" else None)
        with Plain(comm):
            comm.barrier()
        return compared

    least = 4 * len(DTYPES) * (20 if algorithm in (None, "auto") else 13)
    assert run(n, body) == [least] * n


def test_uneven_blocks():
    def body(comm):
        for count in (1, 4, 8):
            x = np.arange(count, dtype=np.float32)
            mine = len(np.array_split(x, 3)[comm.rank])
            for _ in range(2):  # the general way, then the short one
                block = comm.reduce_scatter(x, out=np.empty(mine, np.float32))
                assert (block == 3 * np.array_split(x, 3)[comm.rank]).all()
                whole = comm.all_gather(block, out=np.empty(count, np.float32))
                assert (whole == 3 * x).all()

    run(3, body)


def taken(comm, collective, x, out, op="sum", root=0):
    """Whether the core makes this call by the short way. No other rank comes, so it must not."""
    return comm._plain(COLLECTIVES[collective], x, out, OPS[op], root, None)


def test_what_is_left_to_the_general_way():
    comm = cc.run_threads(1, lambda comm: comm)[0]
    x, f = np.ones(6, np.float32), np.float32
    assert not taken(comm, "all_gather", x, np.empty(6, f)), "nobody asked what serves it"
    for name in COLLECTIVES:
        comm._table(name)
    frozen = np.ones(6, f)
    frozen.flags.writeable = False

    class Array(np.ndarray):
        pass

    for collective, a, out, *more in (
        ("all_reduce", x, np.empty(7, f)),  # another length
        ("all_reduce", x, np.empty(6, "float64")),  # another dtype
        ("all_reduce", x, frozen),
        ("all_reduce", frozen, None),
        ("all_reduce", np.ones(12, f)[:6], None, "bxor"),  # the dtype lacks the op
        ("all_reduce", x, None, "premul_sum"),
        ("all_reduce", x.view(Array), None),
        ("all_reduce", x.astype(">f4"), None),
        ("all_reduce", np.ones((3, 4), f).T, None),
        ("all_reduce", np.ones(12, f)[::2], None),
        ("all_reduce", x.astype(ml_dtypes.bfloat16), None),
        ("all_reduce", x.astype("longdouble"), None),
        ("all_reduce", np.array([None]), None),
        ("all_reduce", memoryview(x), None),
        ("all_reduce", [1.0], None),
        ("all_reduce", None, None),
        ("broadcast", x, None, "sum", 1),  # there is no such rank
        ("reduce_scatter", x, np.empty(5, f)),
        ("reduce_scatter", x, None),
        ("all_gather", x, np.empty(7, f)),
        ("all_gather", x, None),
        ("gather", x, None),
        ("scatter", x, None),
        ("scatter", None, x),
        ("all_to_all", x, x),  # is copied first
        ("all_to_all", x, np.empty(5, f)),
        ("barrier", x, None),
    ):
        assert not taken(comm, collective, a, out, *more), (collective, a, out)


def test_sends_and_receives():
    def body(comm):
        other, rank = 1 - comm.rank, comm.rank
        strided = np.zeros(6, np.int64)[::2]

        def refuse(*arguments):
            raise AssertionError("this message went by the general way")

        with pytest.raises(cc.ArrayError, match="contiguous"):
            comm.recv(strided, other)
        comm._core, core = type("Core", (), {"transfer": refuse})(), comm._core
        for k, dtype, tag in ((0, "int8", 0), (3, "float32", 7), (9000, "complex128", 1 << 31)):
            x, y = np.arange(k).astype(dtype) + rank, np.zeros(k, dtype)
            for sends in (rank == 0, rank == 1):
                if sends:
                    assert comm.send(x, other, tag) is None
                else:
                    assert comm.recv(y, other, tag) is y
            assert (y == x - rank + other).all()
        comm._core = core
        for a, dest, tag in (
            (x, 2, 0),
            (x, 0, 1 << 32),
            (x, 0, -1),
            (x.astype(">c16"), 0, 0),
            (memoryview(x), 0, 0),
            (strided, 0, 0),
        ):
            assert not comm._transfer(True, a, dest, tag)
        frozen = np.ones(3)
        frozen.flags.writeable = False
        assert not comm._transfer(False, frozen, other, 0)
        comm.barrier()
        if rank == 0:
            comm.send(np.ones(3, np.float32), 1)
        else:
            with pytest.raises(cc.MismatchError):
                comm.recv(np.ones(4, np.float32), 0)

    run(2, body)


def test_arrays_that_overlap_in_part_are_refused():
    def body(comm):
        x = np.zeros(8, np.float32)
        refused = 0
        for call in (
            lambda: comm.all_reduce(x[:4], "max", out=x[1:5]),
            lambda: comm.reduce_scatter(x[:6], out=x[3 - comm.rank : 6 - comm.rank]),
            lambda: comm.all_gather(x[1 - comm.rank : 3 - comm.rank], out=x[:4]),
            lambda: comm.all_to_all(x[:4], out=x[2:6]),
        ):
            for _ in range(2):
                with pytest.raises(cc.ArrayError, match="overlap"):
                    call()
                refused += 1
            with General(comm), pytest.raises(cc.ArrayError, match="overlap"):
                call()
        return refused

    for name in ("max", "sum"):
        run(2, lambda comm, op=name: comm.all_reduce(np.ones(4), op))
    assert run(2, body) == [8, 8]


def test_mismatches_and_closed_communicators_raise_as_ever():
    def body(comm):
        x = np.ones(6, np.float32)
        comm.all_gather(x)
        with pytest.raises(cc.MismatchError, match="all_gather"):
            comm.all_gather(x[: 3 + comm.rank])
        assert comm.all_gather(x).sum() == 12, "the communicator stays usable"
        with comm.group():
            gathered = comm.all_gather(x)  # is made at the end of the group
        assert gathered.wait().sum() == 12
        comm.close()
        for call in (lambda: comm.all_gather(x), lambda: comm.broadcast(x), comm.barrier):
            with pytest.raises(cc.ClosedError):
                call()

    run(2, body)
