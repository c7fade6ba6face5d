"""Every kind of array in real calls, and the shapes of what every collective returns."""

from __future__ import annotations

import array
import ctypes
import mmap

import ml_dtypes
import numpy as np
import pytest

import collectives as cc


def on(n, body):
    """body(comm) on n ranks; all must return None."""
    assert cc.run_threads(n, body, timeout=30) == [None] * n


# ---- shapes -------------------------------------------------------------------------------------


def shapes_of_results(make, shape_of):
    """Shapes and values of every collective on arrays made by `make(numpy array)`."""

    def body(comm):
        n, rank = comm.size, comm.rank

        def holds(got, shape, values):
            assert type(got) is type(make(np.zeros(1, np.float32)))
            assert shape_of(got) == shape
            assert (np.asarray(got, np.float64) == np.broadcast_to(values, shape)).all()

        x = np.arange(2 * n * 15, dtype=np.float32).reshape(2 * n, 3, 5) + rank
        total = sum(np.arange(2 * n * 15.0).reshape(2 * n, 3, 5) + r for r in range(n))
        holds(comm.all_reduce(make(x)), (2 * n, 3, 5), total)
        mine = slice(2 * rank, 2 * rank + 2)
        holds(comm.reduce_scatter(make(x)), (2, 3, 5), total[mine])
        if n == 3:  # 7 rows among 3 ranks: flat, and split like numpy.array_split
            odd = np.ones((7, 2), np.float32)
            holds(comm.reduce_scatter(make(odd)), (5 if rank < 2 else 4,), 3.0)
        counts = [1, *[0] * (n - 2), 2 * n * 15 - 1]
        begin = sum(counts[:rank])
        holds(
            comm.reduce_scatter_v(make(x), counts),
            (counts[rank],),
            total.reshape(-1)[begin : begin + counts[rank]],
        )
        reduced = comm.reduce(make(x), n - 1)
        if rank == n - 1:
            holds(reduced, (2 * n, 3, 5), total)
        else:
            assert reduced is None
        holds(comm.broadcast(make(x), 1), (2 * n, 3, 5), x - rank + 1)
        block = np.full((2, 3), float(rank), np.float32)
        joined = np.repeat(np.arange(n), 2)[:, None] * np.ones((1, 3))
        holds(comm.all_gather(make(block)), (2 * n, 3), joined)
        holds(comm.all_gather(make(np.zeros((0, 3), np.float32))), (0, 3), np.zeros((0, 3)))
        uneven = np.full((rank, 3), float(rank), np.float32)
        stairs = np.repeat(np.arange(n), np.arange(n))[:, None] * np.ones((1, 3))
        rows = n * (n - 1) // 2
        holds(comm.all_gather_v(make(uneven)), (rows, 3), stairs)
        holds(comm.all_gather_v(make(uneven), list(range(n))), (rows, 3), stairs)
        for got, shape, values in (
            (comm.gather(make(block), 1), (2 * n, 3), joined),
            (comm.gather_v(make(uneven), 1), (rows, 3), stairs),
        ):
            if rank == 1:
                holds(got, shape, values)
            else:
                assert got is None
        out = None if rank == 0 else make(np.zeros((2, 3, 5), np.float32))
        got = comm.scatter(make(x) if rank == 0 else None, out=out)
        holds(got, (2, 3, 5), (x - rank)[mine])
        out = None if rank == 0 else make(np.zeros((rank, 3), np.float32))
        got = comm.scatter_v(make(stairs.astype(np.float32)), list(range(n)), out=out)
        holds(got, (rank, 3), uneven)
        to = np.arange(2 * n, dtype=np.float32).repeat(2).reshape(2 * n, 2)
        came = np.tile([2.0 * rank, 2.0 * rank + 1], n).repeat(2).reshape(2 * n, 2)
        holds(comm.all_to_all(make(to)), (2 * n, 2), came)
        sends = [rank + d for d in range(n)]  # to rank d
        source = np.full((sum(sends), 2), float(rank), np.float32)
        came = np.repeat(np.arange(n), [s + rank for s in range(n)])[:, None] * np.ones((1, 2))
        holds(comm.all_to_all_v(make(source), sends), came.shape, came)
        holds(comm.all_to_all_v(make(source), sends, sends), came.shape, came)
        # 0-d
        one = np.array(rank + 1.0, np.float32)
        holds(comm.all_reduce(make(one)), (), n * (n + 1) / 2)
        holds(comm.all_gather(make(one)), (n,), np.arange(n) + 1.0)
        holds(comm.broadcast(make(one), 1), (), 2.0)

    return body


@pytest.mark.parametrize("n", [2, 3, 5])
def test_shapes_of_numpy_results(n):
    on(n, shapes_of_results(np.array, lambda x: x.shape))


@pytest.mark.torch
def test_shapes_of_torch_results():
    torch = pytest.importorskip("torch")
    on(3, shapes_of_results(lambda x: torch.from_numpy(np.array(x)), lambda x: tuple(x.shape)))


def test_results_in_place_are_the_array_itself():
    def body(comm):
        x = np.ones((2, 3), np.float32)
        assert comm.all_reduce(x) is x
        assert comm.all_reduce(x, "max") is x
        assert comm.broadcast(x, 1) is x
        assert comm.all_reduce(x, order="rank") is x
        out = np.zeros(6, np.float32)
        assert comm.all_reduce(x, out=out) is out  # equal counts are enough
        assert comm.all_to_all(x, out=x) is x

    on(2, body)


def test_all_gather_undoes_reduce_scatter():
    def body(comm):
        for shape in ((8, 3), (7,), (2, 5), (0,), (1,), ()):
            x = np.ones(shape)
            part = comm.reduce_scatter(x)
            whole = comm.all_gather(part, out=np.empty(shape))
            assert whole.shape == shape
            assert (whole == comm.size).all()

    for n in (1, 2, 4):
        on(n, body)


# ---- kinds --------------------------------------------------------------------------------------


def test_buffers():
    def body(comm):
        n, rank = comm.size, comm.rank
        typed = array.array("i", [rank, 2, 3])
        assert comm.all_reduce(typed) is typed
        assert typed.tolist() == [n * (n - 1) // 2, 2 * n, 3 * n]
        raw = bytearray([rank, 1, 2])
        assert comm.all_reduce(raw) is raw
        assert list(raw) == [n * (n - 1) // 2, n, 2 * n]
        below = np.ones((2, 4), np.float64)
        seen = memoryview(below)
        comm.all_reduce(seen)
        assert (below == n).all()
        wide = comm.all_gather(memoryview(np.full((1, 2), float(rank))))
        assert np.asarray(wide).shape == (n, 2)
        mapped = mmap.mmap(-1, 16)
        mapped[:] = bytes([1] * 16)
        comm.all_reduce(mapped)
        assert mapped[:] == bytes([n] * 16)
        ints = (ctypes.c_int64 * 3)(1, 2, rank)
        comm.broadcast(ints, 1)
        assert list(ints) == [1, 2, 1]
        assert comm.all_reduce(bytes([1, rank])) == bytes([n, n * (n - 1) // 2])
        assert comm.all_gather(bytes([rank, 9])) == b"".join(bytes([r, 9]) for r in range(n))
        got = comm.broadcast(bytes([rank]), 2)
        assert got == b"\x02"
        out = bytearray(2)
        comm.send(b"xy", (rank + 1) % n)
        assert comm.recv(out, (rank - 1) % n) == b"xy"

    on(3, body)


def test_kinds_may_differ_between_ranks():
    """What counts is dtype and count."""

    def body(comm):
        x = [np.ones(4, np.int32), array.array("i", [1] * 4), memoryview(np.ones((2, 2), np.int32))]
        assert np.asarray(comm.all_reduce(x[comm.rank])).reshape(-1).tolist() == [3] * 4

    on(3, body)


def test_numpy_scalars_and_memory_at_odd_addresses():
    def body(comm):
        n = comm.size
        got = comm.all_reduce(np.float64(1.5))
        assert isinstance(got, np.float64)
        assert got == 1.5 * n
        assert comm.all_gather(np.int16(comm.rank)).tolist() == list(range(n))
        raw = np.zeros(4 * 1000 + 3, np.uint8)
        odd = raw[3:].view(np.float32)
        for algorithm in (None, "ring"):
            odd[:] = comm.rank
            comm.all_reduce(odd, algorithm=algorithm)
            assert (odd == n * (n - 1) / 2).all()
        assert (raw[:3] == 0).all()

    on(3, body)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_ml_dtypes(name):
    def body(comm):
        x = np.ones((3, 5), getattr(ml_dtypes, name))
        got = comm.all_reduce(x)
        assert got.dtype == x.dtype
        assert (got.astype(np.float32) == comm.size).all()
        assert comm.all_gather(x).dtype == x.dtype

    on(2, body)


@pytest.mark.torch
def test_torch_tensors():
    torch = pytest.importorskip("torch")

    def body(comm):
        n, rank = comm.size, comm.rank
        for dtype in (
            torch.bfloat16,
            torch.float16,
            torch.float8_e4m3fn,
            torch.float8_e5m2,
            torch.complex64,
            torch.int64,
            torch.uint8,
        ):
            x = torch.ones(7, 11).to(dtype)
            assert comm.all_reduce(x) is x
            assert (x.to(torch.complex64) == n).all()
            whole = comm.all_gather(torch.full((2, 3), rank).to(dtype))
            assert whole.dtype == dtype
            assert whole.shape == (2 * n, 3)
            assert whole.to(torch.complex64)[-1, 0] == n - 1
        truth = torch.tensor([rank == 0, False])
        assert comm.all_reduce(truth, "bor").tolist() == [True, False]
        leaf = torch.ones(3, requires_grad=True)
        with pytest.raises(cc.ArrayError, match="requires grad"):
            comm.all_reduce(leaf)
        assert comm.all_reduce(leaf, out=torch.empty(3)).tolist() == [n] * 3
        with torch.no_grad():
            comm.all_reduce(leaf)
        assert leaf.tolist() == [n] * 3
        with pytest.raises(cc.ArrayError, match=r"strides.*x\.contiguous"):
            comm.all_reduce(torch.ones(4, 5).t())
        below = torch.zeros(10)
        comm.all_reduce(below[2:5].add_(1))
        assert below.sum() == 3 * n
        mixed = comm.all_reduce(np.ones(3, np.float32), out=torch.empty(3))
        assert mixed.tolist() == [n] * 3

    on(2, body)


@pytest.mark.jax
@pytest.mark.parametrize("n", [2, 3])
def test_shapes_of_jax_results(n):
    jnp = pytest.importorskip("jax").numpy
    on(n, shapes_of_results(jnp.asarray, lambda x: x.shape))


@pytest.mark.jax
@pytest.mark.parametrize("root", [0, 1])
def test_blocks_that_are_scattered_to_jax_arrays(root):
    """An out= says what comes, on the root too."""
    jax = pytest.importorskip("jax")
    jnp = jax.numpy

    def body(comm):
        n, rank = comm.size, comm.rank
        x = jnp.arange(2 * n, dtype=jnp.float32) if rank == root else None
        out, wanted = jnp.zeros((2, 1), jnp.float32), [[2.0 * rank], [2.0 * rank + 1]]
        got = comm.scatter(x, root, out=out)
        assert isinstance(got, jax.Array) and got.tolist() == wanted
        work = comm.scatter_v(x, [2] * n, root, out=out, async_op=True)
        with comm.group():
            noted = comm.scatter(x, root, out=out)
        assert work.wait(20).tolist() == noted.wait().tolist() == wanted
        assert out.tolist() == [[0], [0]]
        if rank == root:
            with pytest.raises(cc.ArrayError, match="x is float32, out is int32"):
                comm.scatter(x, root, out=jnp.zeros(2, jnp.int32))
        with pytest.raises(cc.ArrayError, match="read-only"):
            comm.scatter(x, root, out=b"12345678")

    on(2, body)


@pytest.mark.jax
def test_jax_arrays_are_never_written():
    jax = pytest.importorskip("jax")
    jnp = jax.numpy

    def body(comm):
        n, rank = comm.size, comm.rank
        for algorithm in (None, "ring"):
            x = jnp.arange(12, dtype=jnp.float32).reshape(3, 4) + rank
            got = comm.all_reduce(x, algorithm=algorithm)
            assert isinstance(got, jax.Array)
            assert got is not x
            assert got.shape == (3, 4)
            assert (np.asarray(x) == np.arange(12).reshape(3, 4) + rank).all()
            assert (np.asarray(got) == n * np.arange(12).reshape(3, 4) + n * (n - 1) / 2).all()
        half = jnp.ones((n * 2, 3), jnp.bfloat16)
        part = comm.reduce_scatter(half)
        assert (part.shape, part.dtype) == ((2, 3), jnp.bfloat16)
        assert (part == n).all()
        x = jnp.full((2,), rank)
        got = comm.broadcast(x, 1)
        assert isinstance(got, jax.Array)
        assert got.tolist() == [1, 1]
        assert x.tolist() == [rank] * 2
        assert comm.all_gather(x).tolist() == np.repeat(np.arange(n), 2).tolist()
        assert comm.all_to_all(jnp.arange(2 * n)).shape == (2 * n,)
        reduced = comm.reduce(x, 0)
        assert reduced is None if rank else reduced.tolist() == [n * (n - 1) // 2] * 2
        work = comm.all_reduce(x, async_op=True)
        assert work.wait(20).tolist() == [n * (n - 1) // 2] * 2
        assert comm.all_reduce(jnp.float32(1)).shape == ()
        with pytest.raises(cc.ArrayError, match="immutable"):
            comm.all_reduce(np.ones(2, np.int32), out=x)

    on(2, body)


class Exporter:
    """An array that only DLPack can read."""

    def __init__(self, x):
        self._x = x

    def __dlpack__(self, **more):
        return self._x.__dlpack__(**more)

    def __dlpack_device__(self):
        return self._x.__dlpack_device__()


def test_dlpack_objects():
    def body(comm):
        n = comm.size
        below = np.ones((3, 5), np.float32)
        x = Exporter(below)
        assert comm.all_reduce(x) is x
        assert (below == n).all()
        got = comm.all_gather(x)
        assert np.asarray(got).shape == (3 * n, 5)
        out = np.zeros_like(below)
        comm.all_reduce(x, out=Exporter(out))
        assert (out == n * n).all()
        with pytest.raises(cc.ArrayError, match="strides"):
            comm.all_reduce(Exporter(below[:, ::2]))

    on(2, body)
