"""The bucketing scheduler: what it reduces, in which order, what it refuses, what it tells."""

from __future__ import annotations

import contextlib
import json
import sys
import time
import types

import numpy as np
import pytest
from worlds import outcomes

import collectives as cc
from collectives.bucket_trace import NvtxRange
from collectives.bucketing import Bucketer, make_buckets

SHAPES = {"a": (3, 5), "b": (40,), "c": (), "d": (0, 4), "e": (700,), "f": (17, 2)}


def parameters(dtype="float32"):
    return {name: np.zeros(shape, dtype) for name, shape in SHAPES.items()}


def gradient(name, rank, step=0, dtype="float32"):
    """Integer-valued, so that sums are exact."""
    number = list(SHAPES).index(name)
    count = int(np.prod(SHAPES[name]))
    values = (np.arange(count) * (number + 2) + 5 * rank + step) % 13
    return values.reshape(SHAPES[name]).astype(dtype)


def total(name, n, step=0, dtype="float32", ranks=None):
    return sum(gradient(name, r, step, "float64") for r in (ranks or range(n))).astype(dtype)


def run_pass(bucketer, rank, step=0, names=None, **more):
    for name in names or reversed(SHAPES):
        bucketer.ready(name, gradient(name, rank, step), **more)
    return bucketer.finish()


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("bucket_bytes", [1, 300, 1 << 20])
def test_every_gradient_is_the_sum_in_every_step(n, bucket_bytes):
    def body(comm):
        bucketer = Bucketer(
            comm, parameters(), bucket_bytes=bucket_bytes, first_bucket_bytes=bucket_bytes
        )
        for step in range(4):
            # Another order of readiness on every rank and in every step.
            names = list(np.random.default_rng([comm.rank, step]).permutation(list(SHAPES)))
            run_pass(bucketer, comm.rank, step, names)
            for name in SHAPES:
                assert np.array_equal(bucketer.view(name), total(name, n, step)), (step, name)
        assert bucketer.statistics.steps == 4
        return len(bucketer.buckets)

    counts = cc.run_threads(n, body, timeout=20)
    assert counts == [{1: 6, 300: 3}.get(bucket_bytes, 1)] * n or bucket_bytes == 300


def test_buckets_are_filled_in_reverse_with_a_small_first_one():
    def body(comm):
        given = {f"p{i}": np.zeros(256, np.float32) for i in range(7)}
        given["q"] = np.zeros(256, np.float64)
        bucketer = Bucketer(comm, given, first_bucket_bytes=1024, bucket_bytes=3 * 1024)
        return [(b.dtype, [s.name for s in b.slots]) for b in bucketer.buckets]

    wanted = [
        ("float64", ["q"]),
        ("float32", ["p6"]),
        ("float32", ["p5", "p4", "p3"]),
        ("float32", ["p2", "p1", "p0"]),
    ]
    assert cc.run_threads(2, body) == [wanted] * 2


def test_usual_sizes():
    def body(comm):
        given = {f"p{i}": np.zeros(1 << 18, np.float32) for i in range(60)}  # 1 MiB each
        return [b.nbytes >> 20 for b in Bucketer(comm, given).buckets]

    assert cc.run_threads(1, body) == [[1, 25, 25, 9]]


def test_a_full_bucket_is_launched_at_once_and_in_order():
    def body(comm):
        bucketer = Bucketer(comm, parameters(), bucket_bytes=1, first_bucket_bytes=1, rebuild=False)
        order = list(reversed(SHAPES))
        bucketer.ready(order[1], gradient(order[1], comm.rank))
        assert all(b.work is None for b in bucketer.buckets)  # the first one is not full
        bucketer.ready(order[0], gradient(order[0], comm.rank))
        for bucket in bucketer.buckets[:2]:  # done before the others are even full
            bucket.work.wait(20)
        assert np.array_equal(bucketer.view(order[1]), total(order[1], comm.size))
        for name in order[2:]:
            bucketer.ready(name, gradient(name, comm.rank))
        bucketer.finish()

    cc.run_threads(3, body, timeout=20)


def test_one_rebuild_by_the_order_of_rank_0():
    def body(comm):
        bucketer = Bucketer(comm, parameters(), bucket_bytes=1, first_bucket_bytes=1)
        layouts = []
        orders = [list(SHAPES), list(reversed(SHAPES))]
        for step in range(3):
            names = orders[(step + comm.rank) % 2]
            run_pass(bucketer, comm.rank, step, names)
            for name in SHAPES:
                assert np.array_equal(bucketer.view(name), total(name, comm.size, step))
            layouts.append("".join(bucketer.layout))
        return layouts, bucketer.rebuilt

    assert cc.run_threads(3, body, timeout=20) == [(["abcdef"] * 3, True)] * 3


def test_views_take_gradients_without_a_copy():
    def body(comm):
        bucketer = Bucketer(comm, parameters(), rebuild=False)
        for step in range(2):
            for name in reversed(SHAPES):
                view = bucketer.view(name)
                view[...] = gradient(name, comm.rank, step)
                if step:
                    bucketer.ready(name)
                else:
                    bucketer.ready(name, view)  # it is its own place
            bucketer.finish()
            for name in SHAPES:
                assert np.array_equal(bucketer.view(name), total(name, comm.size, step))
        bases = {b.buffer.ctypes.data for b in bucketer.buckets}
        assert bucketer.view(list(SHAPES)[-1]).ctypes.data in bases

    cc.run_threads(2, body, timeout=20)


@pytest.mark.parametrize("transient", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_no_sync_adds_up(transient, scale):
    def body(comm):
        got = {}

        def reduce(bucket):
            out = got[bucket.index] = np.empty(bucket.count, np.float32)
            return comm.all_reduce(bucket.buffer, out=out, async_op=True)

        bucketer = Bucketer(
            comm,
            parameters(),
            bucket_bytes=200,
            first_bucket_bytes=1,
            transient=transient,
            rebuild=False,
            reduce=reduce,
        )
        for _ in range(2):
            for step in range(2):
                with bucketer.no_sync():
                    for name in SHAPES:
                        bucketer.ready(name, gradient(name, comm.rank, step), scale)
            run_pass(bucketer, comm.rank, 2, list(SHAPES), scale=scale)
            for bucket in bucketer.buckets:
                for slot in bucket.slots:
                    part = got[bucket.index][slot.start : slot.start + slot.length]
                    wanted = sum(total(slot.name, comm.size, s) for s in range(3)) * scale
                    assert np.array_equal(part, wanted.ravel()), slot.name
        return len(bucketer.buckets)

    assert min(cc.run_threads(3, body, timeout=20)) > 3


def test_no_sync_within_no_sync():
    """The inner block does not end the outer one."""

    def body(comm):
        bucketer = Bucketer(comm, {"w": np.zeros(2)})
        with bucketer.no_sync():
            with bucketer.no_sync():
                bucketer.ready("w", np.ones(2))
            bucketer.ready("w", np.ones(2))
        bucketer.ready("w", np.ones(2))
        bucketer.finish()
        return bucketer.view("w").tolist()

    assert cc.run_threads(2, body, timeout=20) == [[6.0, 6.0]] * 2


def test_transient_buckets_that_are_filled_in_another_order_have_enough_memory():
    """A layout with a larger bucket than those of the first."""
    sizes = {"a": 3, "b": 3, "c": 2}

    def body(comm):
        given = {name: np.zeros(size) for name, size in sizes.items()}
        found = {}

        def reduce(bucket):
            work = comm.all_reduce(bucket.buffer, async_op=True)
            work.wait()
            for slot in bucket.slots:
                found[slot.name] = bucket.buffer[slot.start : slot.start + slot.length].copy()
            return work

        bucketer = Bucketer(
            comm, given, bucket_bytes=6 * 8, first_bucket_bytes=6 * 8, layout=["a", "c", "b"],
            transient=True, reduce=reduce,
        )  # fmt: skip
        assert [b.count for b in bucketer.buckets] == [5, 3]
        for layout, counts in (("acb", [5, 3]), ("abc", [6, 2]), ("cba", [5, 3])):
            bucketer.fill_as(list(layout))
            assert [b.count for b in bucketer.buckets] == counts
            for name, size in sizes.items():
                bucketer.ready(name, np.full(size, float(comm.rank + size)))
            bucketer.finish()
            for name, size in sizes.items():
                assert found.pop(name).tolist() == [2.0 * size + 1] * size

    cc.run_threads(2, body, timeout=20)


def test_transient_buckets_share_memory():
    def body(comm):
        given = {f"p{i}": np.zeros(1000, np.float32) for i in range(12)}
        sums = {}

        def reduce(bucket):
            out = sums[bucket.slots[0].name] = np.empty(bucket.count, np.float32)
            return comm.all_reduce(bucket.buffer, out=out, async_op=True)

        bucketer = Bucketer(
            comm, given, bucket_bytes=4000, first_bucket_bytes=4000, transient=True, reduce=reduce
        )
        order = np.random.default_rng(comm.rank).permutation(list(given))
        for step in range(2):
            for name in order:
                bucketer.ready(name, np.full(1000, int(name[1:]) + comm.rank + step, np.float32))
            bucketer.finish()
            for name in given:
                wanted = comm.size * (int(name[1:]) + step) + sum(range(comm.size))
                assert (sums[name] == wanted).all()
        assert not bucketer._pool.held
        with pytest.raises(cc.UnsupportedError, match="no lasting views"):
            bucketer.view("p1")
        (pieces,) = bucketer._pool._pieces.values()
        return len(pieces.arrays), len(bucketer.buckets)

    assert cc.run_threads(2, body, timeout=20) == [(3, 12)] * 2


def test_gradients_without_use():
    """c is used on rank 1 alone, e nowhere."""

    def body(comm):
        bucketer = Bucketer(comm, parameters(), bucket_bytes=200, find_unused=True)
        for step in range(3):
            bucketer.view("e")[...] = 77
            used = [n for n in reversed(SHAPES) if n != "e" and (n != "c" or comm.rank == 1)]
            assert run_pass(bucketer, comm.rank, step, used) == {"e"}
            for name in SHAPES:
                wanted = total(name, comm.size, step, ranks=[1] if name == "c" else None)
                wanted = 77 if name == "e" else wanted
                assert np.array_equal(bucketer.view(name), np.broadcast_to(wanted, SHAPES[name]))

    cc.run_threads(3, body, timeout=20)


def test_a_static_graph_is_looked_at_once():
    def body(comm):
        bucketer = Bucketer(comm, parameters(), static_graph=True)
        used = [n for n in reversed(SHAPES) if n not in ("e", "b")] + ["b"] * (comm.rank == 0)
        before = None
        for step in range(3):
            calls = comm._core.calls
            assert run_pass(bucketer, comm.rank, step, used) == {"e"}
            before, spent = spent_calls(before, comm._core.calls - calls)
            assert np.array_equal(bucketer.view("b"), gradient("b", 0, step))
        assert spent == len(bucketer.buckets)  # no bitmap any more
        with pytest.raises(cc.CollectiveError, match="static_graph"):
            run_pass(bucketer, comm.rank, 3, [n for n in used if n != "a"])

    def spent_calls(before, now):
        return now, now

    ended = outcomes(2, body)
    assert all(e is None or isinstance(e, cc.CollectiveError) for e in ended), ended


def test_a_static_graph_is_fixed_in_the_first_step_in_which_all_have_data():
    """A rank without data would take it that nothing is ever used there, or go on alone."""

    def body(comm):
        bucketer = Bucketer(comm, parameters(), static_graph=True)
        used = [n for n in reversed(SHAPES) if n != "e"]
        for step in range(5):
            if step == 0 and comm.rank == 1:
                assert bucketer.finish(absent=True) == {"e"}
            else:
                assert run_pass(bucketer, comm.rank, step, used) == {"e"}
            ranks = [0] if step == 0 else range(2)
            wanted = total("b", 2, step, ranks=ranks)
            assert np.array_equal(bucketer.view("b"), wanted), step

    cc.run_threads(2, body, timeout=20)


# ---- what is refused ----------------------------------------------------------------------------


def refusal(n, body):
    """What the ranks raised: all of them something, at once."""
    began = time.monotonic()
    ended = outcomes(n, body, timeout=100)
    assert time.monotonic() - began < 50
    assert all(isinstance(e, cc.CollectiveError) for e in ended), ended
    return "\n".join(map(str, ended))


def test_a_gradient_that_never_comes():
    def body(comm):
        bucketer = Bucketer(comm, parameters())
        run_pass(bucketer, comm.rank)
        run_pass(bucketer, comm.rank, 1, [n for n in SHAPES if comm.rank != 1 or n not in "be"])

    assert "rank 1 has no gradient of 'e', 'b'" in refusal(3, body).replace("'b', 'e'", "'e', 'b'")


def test_a_gradient_that_comes_twice():
    def body(comm):
        bucketer = Bucketer(comm, parameters())
        names = ["a", "a"] if comm.rank == 0 else list(SHAPES)
        run_pass(bucketer, comm.rank, 0, names)

    assert "the gradient of 'a' became ready twice in one pass on rank 0" in refusal(2, body)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (np.zeros((5, 3), np.float32), r"rank 1: the gradient of 'a' has shape (5, 3)"),
        (np.zeros((3, 5), np.float64), r"rank 1: the gradient of 'a' has dtype float64"),
        ("text", "gradient of 'a': a str is not an array"),
    ],
)
def test_a_gradient_of_another_kind(wrong, words):
    def body(comm):
        bucketer = Bucketer(comm, parameters())
        for name in SHAPES:
            grad = wrong if (name, comm.rank) == ("a", 1) else gradient(name, comm.rank)
            bucketer.ready(name, grad)
        bucketer.finish()

    assert words in refusal(2, body)


@pytest.mark.parametrize(
    ("own", "carried"),
    [("float64", "int32"), ("float32", "bool"), ("complex64", "float32"), ("complex64", "int64")],
)
def test_dtypes_that_cannot_hold_gradients(own, carried):
    words = f"parameter 'w' is {own}, and dtype={carried} cannot hold its gradient"
    with pytest.raises(cc.ArrayTypeError, match=words):
        cc.run_threads(1, lambda comm: Bucketer(comm, {"w": np.zeros(3, own)}, dtype=carried))


def test_an_unknown_name():
    def body(comm):
        Bucketer(comm, {"weight": np.zeros(3)}).ready("wieght", np.zeros(3))

    assert "did you mean 'weight'?" in refusal(1, body)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"a": np.zeros((5, 3), np.float32)}, "parameter 'a' is"),
        ({"a": np.zeros((3, 5), np.float16)}, '[[3, 5], "float16"] on rank 2'),
        ({"new": np.zeros(3, np.float32)}, "parameter 'new' is missing on ranks 0, 1"),
    ],
)
def test_other_parameters_on_another_rank(change, words):
    def body(comm):
        Bucketer(comm, parameters() | (change if comm.rank == 2 else {}))

    assert words in refusal(3, body)


def test_other_settings_on_another_rank():
    def body(comm):
        Bucketer(comm, parameters(), bucket_bytes=100 + comm.rank)

    assert "setting 'bucket_bytes' is 100 on rank 0; 101 on rank 1" in refusal(2, body)
    with pytest.raises(cc.ArrayError, match="gradients need a float dtype"):
        cc.run_threads(1, lambda comm: Bucketer(comm, {"n": np.zeros(3, np.int32)}))


# ---- what is told -------------------------------------------------------------------------------


def test_statistics_and_trace(tmp_path):
    """Buckets that are reduced while gradients are still made are hidden; the last is not."""

    def body(comm):
        given = {f"p{i}": np.zeros(50_000, np.float32) for i in range(4)}
        bucketer = Bucketer(
            comm, given, bucket_bytes=1, first_bucket_bytes=1, rebuild=False, trace=True
        )
        for _ in range(3):
            for i in (3, 2, 1, 0):
                bucketer.ready(f"p{i}", np.ones(50_000, np.float32))
                if i:
                    bucketer.buckets[3 - i].work.wait(20)  # backward takes longer than the wire
            bucketer.finish()
        bucketer.write_trace(tmp_path / "trace.json")
        return bucketer.statistics

    for statistics in cc.run_threads(2, body, timeout=20):
        assert (statistics.steps, statistics.buckets) == (3, 12)
        assert statistics.nbytes == 12 * 200_000
        assert 0 < statistics.exposed < statistics.busy
        assert 0 < statistics.overlap < 100
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {e["pid"] for e in events} == {0, 1}
    for rank in (0, 1):
        mine = [e for e in events if e["pid"] == rank and e["ph"] == "X"]
        reduced = [e for e in mine if e["cat"] == "wire"]
        assert len(reduced) == 12
        assert {e["args"]["step"] for e in reduced} == {0, 1, 2}
        assert [e["args"]["parameters"] for e in reduced[:4]] == [["p3"], ["p2"], ["p1"], ["p0"]]
        assert all(e["dur"] >= 0 for e in mine)
        # Of each step the last bucket alone is exposed.
        assert all(
            e["args"]["exposed_us"] == 0 for e in reduced if e["args"]["parameters"] != ["p0"]
        )
        filled = {
            (e["args"]["step"], e["name"].split()[1]): e for e in mine if "filled" in e["name"]
        }
        for e in reduced:
            before = filled[e["args"]["step"], e["name"].split()[1]]
            assert before["ts"] + before["dur"] <= e["ts"]


def test_reduced_dtype_and_order():
    """bfloat16 gradients that are added up in float32: the sum of what the ranks have, not
    rounded."""

    def body(comm):
        given = {"w": np.zeros(9000, np.float32).astype("bfloat16")}
        bucketer = Bucketer(comm, given, dtype="float32", order="rank")
        random = np.random.default_rng(comm.rank)
        grad = random.normal(size=9000).astype(np.float32).astype(given["w"].dtype)
        bucketer.ready("w", grad, 1 / 3)
        bucketer.finish()
        return grad.astype(np.float32) * np.float32(1 / 3), bucketer.view("w").copy()

    pytest.importorskip("ml_dtypes")
    results = cc.run_threads(3, body, timeout=20)
    wanted = (results[0][0] + results[1][0]) + results[2][0]
    for _, got in results:
        assert np.array_equal(got, wanted)


def test_a_parameter_larger_than_a_bucket_has_its_own():
    from collectives.bucketing import Spec

    specs = {
        n: Spec((c,), "float32", "cpu", "float32") for n, c in zip("abc", (1, 99, 1), strict=True)
    }
    made = make_buckets(specs, list("abc"), 8, 8)
    assert [[s.name for s in b.slots] for b in made] == [["a"], ["b"], ["c"]]


@pytest.mark.torch
def test_torch_tensors():
    torch = pytest.importorskip("torch")

    def body(comm):
        given = {"w": torch.zeros(4, 5), "b": torch.zeros(5, dtype=torch.bfloat16)}
        bucketer = Bucketer(comm, given)
        bucketer.ready("b", torch.full((5,), 2.0, dtype=torch.bfloat16))
        bucketer.ready("w", torch.full((4, 5), 1.0 + comm.rank))
        bucketer.finish()
        return bucketer.view("w").sum(), float(bucketer.view("b")[0]), len(bucketer.buckets)

    assert cc.run_threads(2, body, timeout=20) == [(60.0, 4.0, 2)] * 2


def test_buckets_on_gpus_are_ranges_of_nvtx(monkeypatch):
    """One push and one pop for each, also around what fails; nothing on the host."""
    told = []
    nvtx = types.SimpleNamespace(RangePush=told.append, RangePop=lambda: told.append("pop"))
    cuda = types.SimpleNamespace(nvtx=nvtx)
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))
    with NvtxRange("cpu", "bucket 0"):
        pass
    assert told == []
    with pytest.raises(KeyError), NvtxRange("cuda:0", "bucket 1"):
        raise KeyError
    assert told == ["bucket 1", "pop"]


@pytest.mark.torch
def test_gradients_of_torch_that_wait_are_added_up_in_the_dtype_of_the_bucket():
    """As on the host: 1 + 2**-9 is none of bfloat16."""
    torch = pytest.importorskip("torch")
    from collectives.torch_gradients import Waiting

    parts = [torch.full((3,), x, dtype=torch.bfloat16) for x in (1.0, 2.0**-9)]
    for dtype, wanted in (("float32", 1 + 2.0**-9), ("bfloat16", 1.0)):
        waiting = Waiting(dtype)
        for part in parts:
            waiting.put("w", part.clone(), add=False)
        assert waiting._grads["w"].tolist() == [wanted] * 3
        assert waiting.nbytes == waiting._grads["w"].nbytes
        waiting.discard()
        assert not waiting._grads and not waiting.nbytes


class TorchMemory:
    """A bucket's memory that is a tensor, as far as gradients of torch look at it."""

    def __init__(self, tensor):
        self.tensor = tensor
        self.data = types.SimpleNamespace(ptr=tensor.data_ptr())

    def __dlpack__(self, **_):
        return self.tensor.__dlpack__()

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


@pytest.mark.torch
def test_all_gradients_of_a_bucket_at_once(monkeypatch):
    """The way of tensors on GPUs, on the host: no `ready` for each, first put and then added up."""
    torch = pytest.importorskip("torch")
    from collectives.torch_gradients import TorchGradients, Waiting

    monkeypatch.setattr(TorchGradients, "stream", lambda self: contextlib.nullcontext())

    def body(comm):
        given = {name: np.zeros(shape, np.float32) for name, shape in (("a", 3), ("b", (2, 2)))}

        def reduce(bucket):
            return comm.all_reduce(bucket.buffer.tensor.numpy(), async_op=True)

        bucketer = Bucketer(comm, given, rebuild=False, reduce=reduce)
        (bucket,) = bucketer.buckets
        bucket.buffer = TorchMemory(torch.full((bucket.count,), 99.0))
        bucket.waiting = Waiting("float32")
        bucketer._torch = TorchGradients(0, lasting=True)
        bucketer.ready = None  # nobody calls it

        def grads(x):
            return [torch.full(slot.shape, x + i) for i, slot in enumerate(bucket.slots)]

        with bucketer.no_sync():
            bucketer.ready_together(bucket, grads(1.0))
            waiting = {"x": torch.zeros(1)}
            assert bucketer._torch.put_all(bucket, waiting, again=False)  # it has been emptied
            assert not bucketer._torch.put_all(bucket, waiting, again=False)
            bucket.waiting.discard()
        bucketer.began(bucket)
        assert bucket.times.first > 0
        bucketer.ready_together(bucket, grads(10.0 + comm.rank))
        bucketer.finish()
        return bucket.buffer.tensor.split([slot.length for slot in bucket.slots])

    for first, second in cc.run_threads(2, body, timeout=20):
        assert first.tolist() == [2 * 11.0 + 1] * first.numel()
        assert second.tolist() == [2 * 13.0 + 1] * second.numel()


def test_a_trace_that_cannot_be_written_raises_on_all_ranks(tmp_path):
    def body(comm):
        bucketer = Bucketer(comm, parameters())
        run_pass(bucketer, comm.rank)
        bucketer.write_trace(tmp_path / "missing" / "trace.json")

    ended = outcomes(2, body)
    assert all(isinstance(e, OSError) and "rank 0 cannot write" in str(e) for e in ended), ended
