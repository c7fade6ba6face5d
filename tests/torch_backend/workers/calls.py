"""Every call of torch.distributed on tensors whose results are known."""

from __future__ import annotations

import itertools
import time
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from common import check, run_all, same
from torch.distributed import ReduceOp

from collectives.torch.work import TransferHandle

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
COMPLEX = (torch.complex64, torch.complex128)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
OTHER = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.complex32, torch.bool)
COUNTS = (0, 1, 7, 1000, 100_003)


def me() -> int:
    return dist.get_rank()


def n() -> int:
    return dist.get_world_size()


def values(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small integers that differ from rank to rank."""
    return ((torch.arange(count) * (rank + 1)) % 5 + rank).to(dtype)


def all_values(count: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [values(r, count, dtype) for r in range(n())]


def total(count: int) -> torch.Tensor:
    return torch.stack(all_values(count, torch.int64)).sum(0)


def slow_peer(handle: TransferHandle) -> int:
    time.sleep(0.3)
    return handle._core.transfer_peer(handle.posted)


def bits(x: torch.Tensor) -> bytes:
    return bytes(x.contiguous().untyped_storage())


@check
def all_reduce_of_every_dtype() -> None:
    for dtype, count in itertools.product((*FLOATS, *INTEGERS, *UNSIGNED, *COMPLEX), COUNTS):
        x = values(me(), count, dtype)
        dist.all_reduce(x)
        same(x, total(count).to(dtype))
    for dtype in FLOAT8:
        x = torch.ones(9).to(dtype)
        dist.all_reduce(x)
        assert x.float().tolist() == [float(n())] * 9


@check
def all_reduce_with_every_op() -> None:
    stacked = torch.stack(all_values(50, torch.int64))
    wanted = {
        ReduceOp.SUM: stacked.sum(0),
        ReduceOp.PRODUCT: stacked.prod(0),
        ReduceOp.MIN: stacked.amin(0),
        ReduceOp.MAX: stacked.amax(0),
        ReduceOp.AVG: stacked.sum(0) // n(),
        ReduceOp.BAND: stacked[0],
        ReduceOp.BOR: stacked[0],
        ReduceOp.BXOR: stacked[0],
    }
    for row in stacked[1:]:
        wanted[ReduceOp.BAND] = wanted[ReduceOp.BAND] & row
        wanted[ReduceOp.BOR] = wanted[ReduceOp.BOR] | row
        wanted[ReduceOp.BXOR] = wanted[ReduceOp.BXOR] ^ row
    for (op, expected), async_op in itertools.product(wanted.items(), (False, True)):
        x = values(me(), 50, torch.int64)
        work = dist.all_reduce(x, op=op, async_op=async_op)
        if async_op:
            work.wait()
        same(x, expected)
    x = torch.full((5,), float(me()))
    dist.all_reduce(x, op=ReduceOp.AVG)
    assert torch.allclose(x, torch.full((5,), (n() - 1) / 2))
    for factor in (0.5, torch.tensor(0.5)):
        x = torch.full((5,), float(me() + 1))
        dist.all_reduce(x, op=dist._make_nccl_premul_sum(factor))
        same(x, torch.full((5,), n() * (n() + 1) / 4))
    flags = torch.tensor([me() == 0, True, False])
    for op, expected in (
        (ReduceOp.SUM, [True, True, False]),
        (ReduceOp.MAX, [True, True, False]),
        (ReduceOp.BOR, [True, True, False]),
        (ReduceOp.MIN, [n() == 1, True, False]),
        (ReduceOp.PRODUCT, [n() == 1, True, False]),
    ):
        x = flags.clone()
        dist.all_reduce(x, op=op)
        same(x, expected)


@check
def averages_of_integers() -> None:
    """Sums as the dtype holds them, cut towards zero; of values over half of an unsigned range."""
    for dtype, async_op in itertools.product((*INTEGERS, *UNSIGNED), (False, True)):
        least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        each = [(most // n() - r, least // n() + r, r, 7) for r in range(n())]
        sums = [sum(column) for column in zip(*each, strict=True)]
        assert least <= min(sums) <= max(sums) <= most
        wanted = [abs(v) // n() * (-1 if v < 0 else 1) for v in sums]
        mine = torch.tensor(each[me()], dtype=dtype)

        def averaged(call: Any, *tensors: Any, async_op: bool = async_op, **options: Any) -> None:
            work = call(*tensors, op=ReduceOp.AVG, async_op=async_op, **options)
            if async_op:
                work.wait()

        averaged(dist.all_reduce, x := mine.clone())
        assert x.tolist() == wanted, (dtype, x, wanted)
        averaged(dist.all_reduce, x := mine.repeat(2).view(2, 4).t())  # through scratch
        assert x.tolist() == [[v, v] for v in wanted]
        averaged(dist.all_reduce_coalesced, pair := [mine.clone(), mine[:2].clone()])
        assert pair[0].tolist() == wanted and pair[1].tolist() == wanted[:2]
        averaged(dist.all_reduce_coalesced, rows := [*mine.repeat(2, 1)])  # behind each other
        assert [row.tolist() for row in rows] == [wanted, wanted]
        averaged(dist.reduce, x := mine.clone(), dst=n() - 1)
        assert x.tolist() == (wanted if me() == n() - 1 else mine.tolist())
        averaged(dist.reduce_scatter_tensor, x := torch.empty_like(mine), mine.repeat(n()))
        assert x.tolist() == wanted
        averaged(dist.reduce_scatter, x := torch.empty_like(mine), [mine] * n())
        assert x.tolist() == wanted


@check
def ops_that_a_dtype_lacks_raise_before_anything_is_sent() -> None:
    for dtype, op in (
        (torch.float32, ReduceOp.BAND),
        (torch.bool, ReduceOp.AVG),
        (torch.int32, dist._make_nccl_premul_sum(2.0)),
    ):
        try:
            dist.all_reduce(torch.ones(3).to(dtype), op=op)
        except RuntimeError as error:
            assert str(dtype).removeprefix("torch.")[:4] in str(error), error
        else:
            raise AssertionError(f"{op} on {dtype} should raise")


@check
def strides() -> None:
    """Tensors that are not contiguous, on all ranks or on some."""
    for transposed in ((True,) * n(), tuple(r % 2 == 0 for r in range(n()))):
        for async_op in (False, True):
            base = torch.arange(12.0).reshape(3, 4) * (me() + 1)
            x = base.t().contiguous().t() if transposed[me()] else base
            assert x.is_contiguous() != transposed[me()]
            work = dist.all_reduce(x, async_op=async_op)
            if async_op:
                work.wait()
            same(x, torch.arange(12.0).reshape(3, 4) * (n() * (n() + 1) // 2))
    x = torch.zeros(10)
    every_second = x[::2]
    every_second.fill_(me())
    dist.broadcast(every_second, src=1)
    same(x, [1.0, 0.0] * 5)
    gathered = torch.zeros(4, n())
    dist.all_gather([*gathered.t()], torch.full((4,), float(me())))
    same(gathered, torch.arange(float(n())).repeat(4, 1))
    z = torch.tensor([1 + 2j]).conj()
    assert z.is_conj()
    dist.group.WORLD.allreduce([z]).wait()
    same(z.resolve_conj(), torch.tensor([(1 - 2j) * n()]))


@check
def tensors_of_inference_mode() -> None:
    """Waited for outside of it, or by the thread of a future."""
    for wait in (lambda work: work.wait(), lambda work: work.get_future().wait()):
        with torch.inference_mode():
            x = torch.ones(2, 3).t()
            work = dist.all_reduce(x, async_op=True)
        wait(work)
        same(x, torch.full((3, 2), float(n())))
    x = torch.ones(2, 3).t()
    before = x._version
    dist.all_reduce(x)
    assert x._version > before and not x.is_inference()


@check
def broadcast_and_reduce() -> None:
    for dtype, root, count in itertools.product(
        (*FLOATS, *INTEGERS, *COMPLEX, *FLOAT8, *OTHER), range(n()), (0, 1, 1001)
    ):
        x = values(me(), count).to(dtype)
        dist.broadcast(x, src=root)
        wanted = values(root, count).to(dtype)
        assert bits(x) == bits(wanted), (dtype, root, count)
    for root, count in itertools.product(range(n()), COUNTS):
        x = values(me(), count)
        dist.reduce(x, dst=root)
        same(x, total(count) if me() == root else values(me(), count))


@check
def gathers() -> None:
    for dtype, count in itertools.product((torch.float32, torch.bfloat16, torch.bool), COUNTS):
        mine = values(me(), count).to(dtype)
        wanted = [values(r, count).to(dtype) for r in range(n())]
        out = [torch.empty_like(mine) for _ in range(n())]
        dist.all_gather(out, mine)
        for got, expected in zip(out, wanted, strict=True):
            same(got, expected)
        flat = torch.empty(n() * count, dtype=dtype)
        dist.all_gather_into_tensor(flat, mine)
        same(flat, torch.cat(wanted))
        rows = torch.empty(n(), count, dtype=dtype)
        dist.all_gather_into_tensor(rows, mine)
        same(rows, torch.stack(wanted))
        last = n() - 1
        got = [torch.empty_like(mine) for _ in range(n())] if me() == last else None
        dist.gather(mine, got, dst=last)
        for a, b in zip(got or [], wanted, strict=False):
            same(a, b)
        taken = torch.empty_like(mine)
        dist.scatter(taken, wanted if me() == last else None, src=last)
        same(taken, mine)
    uneven = [torch.empty(r + 1, 2) for r in range(n())]
    dist.all_gather(uneven, torch.full((me() + 1, 2), float(me())))
    for r, got in enumerate(uneven):
        same(got, torch.full((r + 1, 2), float(r)))
    lists = [[torch.empty(2), torch.empty(3)] for _ in range(n())]
    dist.all_gather_coalesced(lists, [torch.full((2,), float(me())), torch.full((3,), -1.0)])
    for r, (a, b) in enumerate(lists):
        same(a, torch.full((2,), float(r)))
        same(b, torch.full((3,), -1.0))


@check
def a_list_that_the_caller_changes_while_the_call_goes_on() -> None:
    outs = [torch.zeros(3) for _ in range(n())] if me() == 0 else None
    taken = list(outs or [])
    work = dist.gather(torch.full((3,), me() + 1.0), outs, async_op=True)
    if outs:
        outs[0] = torch.zeros(3)
    work.wait()
    for rank, out in enumerate(taken):
        same(out, [rank + 1.0] * 3)


@check
def gather_into_one_tensor() -> None:
    """`gather_single` and its older name, from torch 2.14 on; the group has it for every torch."""
    group = dist.distributed_c10d._get_default_group()
    x = values(me(), 6).view(2, 3)
    out = torch.empty(2 * n(), 3) if me() == n() - 1 else torch.empty(0)
    options = dist.GatherOptions()
    options.rootRank = n() - 1
    group.gather_single(out, x, options).wait()
    if hasattr(dist, "gather_single"):
        again = torch.empty_like(out)
        dist.gather_single(x, again if me() == n() - 1 else None, dst=n() - 1)
        same(again, out) if me() == n() - 1 else None
    if me() == n() - 1:
        same(out, torch.cat([v.view(2, 3) for v in all_values(6)]))


@check
def reduce_scatters() -> None:
    for dtype, count in itertools.product((torch.float32, torch.int64, torch.bfloat16), COUNTS):
        blocks = [values(me() + d, count).to(dtype) for d in range(n())]
        wanted = torch.stack([values(r + me(), count).to(dtype) for r in range(n())]).sum(0)
        out = torch.empty(count, dtype=dtype)
        dist.reduce_scatter(out, blocks)
        same(out, wanted)
        out = torch.empty(count, dtype=dtype)
        dist.reduce_scatter_tensor(out, torch.cat(blocks))
        same(out, wanted)
    out = torch.empty(me() + 1)
    dist.reduce_scatter(out, [torch.full((d + 1,), float(d)) for d in range(n())])
    same(out, torch.full((me() + 1,), float(me() * n())))
    out = torch.empty(3)
    dist.reduce_scatter_tensor(out, torch.full((3 * n(),), me() + 1.0), op=ReduceOp.AVG)
    assert torch.allclose(out, torch.full((3,), (n() + 1) / 2))


@check
def all_to_alls() -> None:
    for count in (0, 1, 5, 40_000):
        mine = torch.cat([torch.full((count,), 10.0 * me() + d) for d in range(n())])
        out = torch.empty_like(mine)
        dist.all_to_all_single(out, mine)
        same(out, torch.cat([torch.full((count,), 10.0 * s + me()) for s in range(n())]))
        dist.all_to_all_single(mine, mine)  # in place
        same(mine, out)
    sends = [(me() + d) % 3 for d in range(n())]
    receives = [(s + me()) % 3 for s in range(n())]
    mine = torch.cat([torch.full((k, 2), 10.0 * me() + d) for d, k in enumerate(sends)])
    out = torch.empty(sum(receives), 2)
    dist.all_to_all_single(out, mine, receives, sends)
    same(out, torch.cat([torch.full((k, 2), 10.0 * s + me()) for s, k in enumerate(receives)]))
    outs = [torch.empty(k) for k in receives]
    dist.all_to_all(outs, [torch.full((k,), 10.0 * me() + d) for d, k in enumerate(sends)])
    for s, got in enumerate(outs):
        same(got, torch.full((receives[s],), 10.0 * s + me()))
    z = torch.arange(n()) * (1 + 1j) * me()
    out = torch.empty_like(z)
    dist.all_to_all_single(out, z)
    same(out, torch.arange(n()) * (1 + 1j) * me())


@check
def sends_and_receives() -> None:
    right, left = (me() + 1) % n(), (me() - 1) % n()
    for count in (0, 1, 300_000):
        x, y = torch.full((count,), float(me())), torch.empty(count)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, y, left)]
        )
        for work in works:
            work.wait()
        same(y, torch.full((count,), float(left)))
    # Tags, in the other order than they were sent in.
    first, second = torch.empty(3), torch.empty(3)
    sent = [dist.isend(torch.full((3,), 1.0 * t), right, tag=t) for t in (5, 6)]
    dist.recv(second, left, tag=6)
    dist.recv(first, left, tag=5)
    for work in sent:
        work.wait()
    same(first, [5.0] * 3)
    same(second, [6.0] * 3)
    # Strided on both sides.
    grid = torch.zeros(4, 4)
    work = dist.isend((torch.arange(16.0).reshape(4, 4) + me()).t(), right)
    dist.recv(grid.t(), left)
    work.wait()
    same(grid, torch.arange(16.0).reshape(4, 4) + left)
    # From any rank, each once.
    if me() == 0:
        came = []
        for _ in range(2 * (n() - 1)):
            x = torch.empty(100_000)
            source = dist.recv(x, tag=9)
            same(x, torch.full((100_000,), float(source)))
            came.append(source)
        assert sorted(came) == sorted([*range(1, n())] * 2), came
    else:
        for _ in range(2):
            dist.send(torch.full((100_000,), float(me())), 0, tag=9)
    # A transfer that is under way goes on while all ranks are in a collective.
    x, y = torch.full((1 << 20,), float(me())), torch.empty(1 << 20)
    send, receive = dist.isend(x, right), dist.irecv(y, left)
    if me() == 0:
        receive.wait()
    reduced = dist.all_reduce(torch.ones(1), async_op=True)
    if me() != 0:
        receive.wait()
    reduced.wait()
    send.wait()
    same(y[:2], [float(left)] * 2)
    assert receive.get_future().wait()[0] is y or torch.equal(receive.get_future().value()[0], y)


@check
def the_source_is_known_when_a_recv_has_ended() -> None:
    """Also where the thread of its future is the one that sees the end."""
    peer, TransferHandle.peer = TransferHandle.peer, slow_peer
    try:
        work = dist.irecv(torch.empty(1))
        work.get_future()
        dist.send(torch.ones(1), (me() + 1) % n())
        while not work.is_completed():
            time.sleep(0.001)
        assert work.source_rank() == (me() - 1) % n(), work.source_rank()
    finally:
        TransferHandle.peer = peer


@check
def works() -> None:
    x = torch.ones(1000)
    work = dist.all_reduce(x, async_op=True)
    assert work.wait(timedelta(seconds=30)) is True
    assert work.is_completed() and work.is_success() and work.exception() is None
    same(work.result()[0], torch.full((1000,), float(n())))
    future = work.get_future()
    assert isinstance(future.value(), list) and future.value()[0].shape == (1000,)
    assert work.get_future() is future
    assert future.then(lambda f: f.value()[0][0].item() * 2).wait() == 2 * n()
    lists = dist.all_gather([torch.empty(1) for _ in range(n())], torch.ones(1), async_op=True)
    assert lists.get_future().wait()[0].shape == (n(), 1)
    several = [torch.empty(r + 1) for r in range(n())]
    lists = dist.all_gather(several, torch.ones(me() + 1), async_op=True)
    assert [len(x) for x in lists.get_future().wait()[0]] == list(range(1, n() + 1))
    late = dist.barrier(async_op=True)
    late.wait()
    try:
        failing = dist.all_reduce(torch.ones(1), async_op=True).get_future().then(lambda f: 1 / 0)
        failing.wait()
    except Exception as error:
        assert "ZeroDivisionError" in repr(error), error
    else:
        raise AssertionError("the callback's error is lost")


@check
def ranges_of_the_profiler() -> None:
    to, source = (me() + 1) % n(), (me() - 1) % n()
    x, blocks = torch.ones(n()), torch.ones(n(), n())
    dist.all_reduce(x)  # no range: the profiler is off
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        dist.all_reduce(x)
        dist.all_reduce(x, async_op=True).wait()
        dist.broadcast(x, 0)
        dist.all_gather(list(blocks), x)
        dist.all_gather_into_tensor(blocks, x)
        dist.reduce_scatter_tensor(x, blocks)
        dist.barrier()
        if n() > 1:
            sent = dist.isend(x, to)
            dist.recv(torch.empty(n()), source)
            sent.wait()
    ranges = {
        event.key.removeprefix("collectives:"): event.count
        for event in profiler.key_averages()
        if event.key.startswith("collectives:")
    }
    once = ["broadcast", "all_gather", "_all_gather_base", "_reduce_scatter_base", "barrier"]
    once += ["send", "recv"] if n() > 1 else []
    assert ranges == {"all_reduce": 2, **dict.fromkeys(once, 1)}, ranges


@check
def works_that_nobody_holds() -> None:
    """Memory lives until a call has ended, also if the work and the tensor are dropped."""
    for _ in range(30):
        dist.all_reduce(torch.ones(50_000), async_op=True)
        dist.isend(torch.ones(50_000), (me() + 1) % n())
    for _ in range(30):
        x = torch.empty(50_000)
        dist.recv(x, (me() - 1) % n())
        same(x[::10_000], torch.ones(5))


@check
def memory_of_calls_that_have_ended() -> None:
    """It goes without a further asynchronous call, and without anybody who holds the work."""

    def reduced(x: torch.Tensor) -> None:
        dist.all_reduce(x, async_op=True)

    def with_callback(x: torch.Tensor) -> None:
        dist.all_reduce(x, async_op=True).get_future().then(lambda f: None)

    def with_call_in_callback(x: torch.Tensor) -> None:
        future = dist.all_reduce(x, async_op=True).get_future()
        future.then(lambda f: dist.all_reduce(f.value()[0], async_op=True).get_future().wait())

    def sent(x: torch.Tensor) -> None:
        dist.isend(x, (me() + 1) % n())

    def received(x: torch.Tensor) -> None:
        dist.irecv(x, (me() - 1) % n())

    def of(shape: str) -> torch.Tensor:
        return torch.ones(100, 50).t() if shape == "strided" else torch.ones(100, 50)

    for shape, kinds in itertools.product(
        ("dense", "strided"),
        ((reduced,), (with_callback,), (with_call_in_callback,), (sent, received)),
    ):
        alive = []
        for kind in kinds * 20:
            kind(x := of(shape))
            alive.append(weakref.ref(x))
            del x
        left, end = torch.ones(1), time.monotonic() + 20
        while left[0]:
            assert time.monotonic() < end, (shape, kinds, sum(one() is not None for one in alive))
            time.sleep(0.01)
            left[0] = sum(one() is not None for one in alive)
            dist.all_reduce(left)  # so all ranks go on together; it frees what has ended


@check
def coalesced() -> None:
    with dist._coalescing_manager() as manager:
        tensors = [torch.full((k,), me() + 1.0) for k in (1, 5, 1000)]
        for x in tensors:
            dist.all_reduce(x)
    for x in tensors:
        same(x, torch.full(x.shape, n() * (n() + 1) / 2))
    with dist._coalescing_manager(async_ops=True) as manager:
        outs = [torch.empty(k * n()) for k in (1, 5)]
        for k, out in zip((1, 5), outs, strict=True):
            dist.all_gather_into_tensor(out, torch.full((k,), float(me())))
    manager.wait()
    for k, out in zip((1, 5), outs, strict=True):
        same(out, torch.arange(float(n())).repeat_interleave(k))
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        y = torch.full((3,), float(me()))
        dist.broadcast(y, src=0)
    manager.wait()
    same(y, torch.zeros(3))


@check
def objects() -> None:
    everything = [None] * n()
    dist.all_gather_object(everything, {"rank": me(), "text": "x" * me()})
    assert [o["rank"] for o in everything] == list(range(n()))
    box = [{"from": me()}]
    dist.broadcast_object_list(box, src=n() - 1)
    assert box == [{"from": n() - 1}]
    got = [None] * n() if me() == 0 else None
    dist.gather_object(me() ** 2, got, dst=0)
    assert got is None or got == [r * r for r in range(n())]
    mine = [None]
    dist.scatter_object_list(mine, [f"for {r}" for r in range(n())] if me() == 0 else None, src=0)
    assert mine == [f"for {me()}"]
    if n() == 1:
        return
    if me() == 0:
        dist.send_object_list(["hello", 3], dst=1)
    elif me() == 1:
        words = [None, None]
        dist.recv_object_list(words, src=0)
        assert words == ["hello", 3]


@check
def sparse() -> None:
    for count in (0, 3):
        index = torch.arange(count if me() else count + 1).unsqueeze(0) * (me() + 1) % 7
        x = torch.sparse_coo_tensor(index, torch.ones(index.shape[1]), (7,))
        wanted = torch.zeros(7)
        for r in range(n()):
            for i in range(count if r else count + 1):
                wanted[i * (r + 1) % 7] += 1
        dist.all_reduce(x)
        same(x.to_dense(), wanted)


@check
def groups() -> None:
    pair = dist.new_group([0, n() - 1], group_desc="ends")
    if me() in (0, n() - 1):
        assert pair.group_desc == "ends" and pair.size() == 2
        x = torch.ones(3)
        dist.all_reduce(x, group=pair)
        same(x, [2.0] * 3)
        dist.broadcast(x.fill_(me()), src=n() - 1, group=pair)
        same(x, [float(n() - 1)] * 3)
    alone = dist.new_group([me()], use_local_synchronization=True)
    dist.all_reduce(x := torch.ones(2), group=alone)
    same(x, [1.0, 1.0])
    same_again = dist.new_group([0, n() - 1])
    if me() in (0, n() - 1):
        dist.barrier(group=same_again)
        dist.destroy_process_group(same_again)
    native = dist.new_group(backend="gloo")
    dist.all_reduce(x := torch.ones(2), group=native)
    same(x, [float(n())] * 2)
    world = dist.group.WORLD
    assert dist.get_backend() == "collectives" and world.name() == "collectives"
    assert world.group_desc == "default_pg" and repr(world).startswith("<CollectivesGroup")
    dist.distributed_c10d._get_default_group().set_timeout(timedelta(seconds=50))
    assert dist.is_initialized() and dist.get_process_group_ranks(world) == list(range(n()))


@check
def monitored_barriers() -> None:
    dist.monitored_barrier()
    if me() == 1:
        return
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=0.5), wait_all_ranks=True)
    except RuntimeError as error:
        assert "rank 1 did not come within 0.5 s" in str(error), error
    else:
        raise AssertionError("a rank is missing, and the barrier did not say so")


if __name__ == "__main__":
    run_all()
