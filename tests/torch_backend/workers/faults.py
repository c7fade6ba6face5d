"""What goes wrong is an error on every rank, in works and futures too. The argument is a part."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from common import start

import collectives as cc


def raises(kind: type[Exception], do: Callable[[], object], *words: str) -> None:
    try:
        do()
    except kind as error:
        for word in words:
            assert word in str(error), (word, str(error))
    else:
        raise AssertionError(f"{kind.__name__} was expected")


def disagreement() -> None:
    """Both sides are told; the group stays usable."""
    rank, size = start()
    count = 4 if rank else 5
    raises(cc.MismatchError, lambda: dist.all_reduce(torch.ones(count)), "4", "5")
    work = dist.all_reduce(torch.ones(count), async_op=True)
    raises(cc.MismatchError, work.wait, "4", "5")
    assert work.is_completed() and not work.is_success()
    assert isinstance(work.exception(), cc.MismatchError)
    raises(RuntimeError, work.get_future().wait, "4", "5")
    chained = dist.all_reduce(torch.ones(count), async_op=True).get_future().then(
        lambda f: f.value()
    )  # fmt: skip
    raises(RuntimeError, chained.wait, "4", "5")
    x = torch.ones(4)
    dist.all_reduce(x)
    assert x[0] == size
    # Out of callbacks too.
    future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
    end = future.then(lambda f: dist.all_reduce(torch.ones(count)))
    raises(RuntimeError, end.wait, "4", "5")
    future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
    future.then(lambda f: dist.all_reduce(x)).wait()
    assert x[0] == size * size


def wrong_arguments() -> None:
    _rank, size = start()
    out = torch.empty(3)
    raises(ValueError, lambda: dist.group.WORLD.all_gather_single(out, torch.ones(4)), "3", "12")
    raises(ValueError, lambda: dist.group.WORLD.reduce_scatter_single(out, torch.ones(4)), "4", "9")
    raises(ValueError, lambda: dist.group.WORLD.send([out], size, 0), "out of range")
    raises(ValueError, lambda: dist.group.WORLD.broadcast(out, size), "root 3 is out of range")
    raises(ValueError, lambda: dist.group.WORLD.gather([], [out], root_options(size)), "root 3")
    odd = torch.ones(3).to(torch.float8_e8m0fnu)
    raises(TypeError, lambda: dist.all_reduce(odd), "float8_e8m0fnu")
    raises(RuntimeError, lambda: dist.all_reduce(torch.ones(2, 2).to_sparse_csr()), "CSR")
    sparse = torch.eye(3).to_sparse()
    raises(TypeError, lambda: dist.broadcast(sparse, 0), "sparse_coo", "to_dense")
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x[0] == size


def tensors_without_memory() -> None:
    """Those of torch that stand for others, or for nothing."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.tensor import DTensor, Shard

    rank, size = start()
    mesh = dist.init_device_mesh("cpu", (size,))
    sharded = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
    with FakeTensorMode():
        fake = torch.ones(3)
    freed = torch.ones(3)[1:]
    freed.untyped_storage().resize_(0)
    for x, kind in ((sharded, "DTensor"), (fake, "FakeTensor"), (freed, "Tensor")):
        peer, outs = (rank + 1) % size, list(torch.empty(size, x.numel()))
        for do in (
            lambda x=x: dist.all_reduce(x, async_op=True),
            lambda x=x: dist.broadcast(x, 0),
            lambda x=x, outs=outs: dist.all_gather(outs, x),
            lambda x=x, outs=outs: dist.gather(x, outs if rank == 0 else None),
            lambda x=x, peer=peer: dist.isend(x, peer),
            lambda x=x, peer=peer: dist.irecv(x, peer),
        ):
            raises(TypeError, do, f"a {kind} without memory of its own")
    raises(TypeError, lambda: dist.all_reduce(sharded), "to_local()")
    raises(TypeError, lambda: dist.all_reduce(fake), "FakeTensor")


def outputs_of_another_size() -> None:
    """Nothing is read behind the end of the input."""
    rank, size = start()
    group, mine = dist.group.WORLD, torch.ones(2)

    def outs(count: int = 6) -> list[torch.Tensor]:
        return [torch.zeros(count) for _ in range(size)]

    def gather(outputs: list[list[torch.Tensor]]) -> Callable[[], object]:
        return lambda: group.allgather_coalesced(outputs, [mine])

    raises(ValueError, gather([[x] for x in outs()]), "6 elements, needed are 2")
    raises(ValueError, gather([[x.short()] for x in outs(2)]), "int16")
    raises(ValueError, gather([[torch.zeros(2)]] * (size + 1)), f"{size + 1} elements")
    long = torch.zeros(2, dtype=torch.float64)
    for blocks in ([mine] * size, [long] * (size - 1) + [mine]):
        raises(ValueError, lambda b=blocks: group.reduce_scatter([long], [b]), "float32", "float64")
        raises(ValueError, lambda b=blocks: group.alltoall([long] * size, b), "float32", "float64")
    if size > 1:
        splits = [3, -1] + [0] * (size - 2)
        split_call = (torch.zeros(2), mine, splits, splits)
        raises(ValueError, lambda: dist.all_to_all_single(*split_call), "negative")
    if rank == 0:  # the others have no outputs
        raises(ValueError, lambda: dist.gather(mine, outs()), "6 elements, needed are 2")
    if size == 1:  # where there are others, they say what they expect
        out = torch.zeros(6)
        raises(ValueError, lambda: dist.all_to_all([out], [mine]), "2 elements, needed are 6")
        split = [mine, [6], [2]]
        raises(ValueError, lambda: dist.all_to_all_single(out, *split), "2 elements, needed are 6")


def root_options(root: int) -> dist.GatherOptions:
    options = dist.GatherOptions()
    options.rootRank = root
    return options


def lateness() -> None:
    """A wait ends at the timeout of torch, whichever it is."""
    rank, _ = start(seconds=60)
    if rank == 0:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        began = time.monotonic()
        raises(cc.DeadlineError, lambda: work.wait(timedelta(seconds=0.3)), "0.3 s")
        assert 0.3 <= time.monotonic() - began < 20
        for passed in (work, dist.irecv(torch.empty(1), 1)):
            raises(cc.DeadlineError, lambda w=passed: w.wait(timedelta(seconds=-1)), "-1 s")
        assert not work.is_completed()
        dist.monitored_barrier()
        work.wait()
    else:
        dist.monitored_barrier()
        dist.all_reduce(torch.ones(1))
    if rank == 1:
        dist.send(torch.ones(1), 0)
    short = dist.new_group(timeout=timedelta(seconds=1))
    if rank == 0:
        raises(cc.DeadlineError, lambda: dist.barrier(group=short), "gave up after 1.")
    dist.barrier()
    changed = dist.new_group()
    changed.set_timeout(timedelta(seconds=1))
    if rank == 0:
        raises(cc.DeadlineError, lambda: dist.barrier(group=changed), "gave up after 1.")
        raises(cc.AbortedError, lambda: dist.barrier(group=changed))
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        limit = timedelta(seconds=0.5)
        raises(cc.DeadlineError, lambda: dist.group.WORLD.barrier(timeout=limit).wait(limit))
        store.set("done", b"")
    else:
        store.wait(["done"])


def timeouts_set_later() -> None:
    """It holds for what waits in the store too, and for communicators that come later."""
    rank, size = start(seconds=60)
    store = dist.distributed_c10d._get_default_store()
    group, beside = dist.new_group(), dist.new_group()
    for one in (group, beside):
        one.set_timeout(timedelta(seconds=1))
    future = dist.all_reduce(torch.ones(1), group=group, async_op=True).get_future()
    if rank == 0:
        raises(cc.DeadlineError, lambda: dist.monitored_barrier(group), "within 1 s")
        call = future.then(lambda f: dist.all_reduce(torch.ones(1), group=group))
        raises(RuntimeError, call.wait, "within 1 s", "are missing")
        total, parts = torch.empty(1), torch.ones(size)
        begin = beside.begin_reduce_scatter
        raises(cc.BootstrapError, lambda: begin(total, parts, dist.ReduceOp.SUM), "within 1 s")
        store.set("waited", b"")
    else:
        store.wait(["waited"])
    dist.barrier()


def calls_out_of_callbacks_of_closed_groups() -> None:
    """They raise; also one that waits for the other ranks while the group is closed."""
    rank, _ = start(seconds=60)
    group = dist.new_group()
    gate = threading.Event()

    def call(_: object) -> None:
        if rank:
            gate.wait()
        group.allreduce([torch.ones(1)]).wait()

    future = dist.all_reduce(torch.ones(1), group=group, async_op=True).get_future()
    called = future.then(call)
    future.wait()
    dist.barrier()
    if rank:
        threading.Timer(0.5, gate.set).start()
    began = time.monotonic()
    dist.destroy_process_group(group)
    assert time.monotonic() - began < 30
    raises(RuntimeError, called.wait, "closed")


def abort() -> None:
    rank, _ = start()
    group = dist.new_group()
    if rank == 1:
        dist.barrier()
        group.abort()
    else:
        pending = dist.all_reduce(torch.ones(1), group=group, async_op=True)
        dist.barrier()
        raises(cc.AbortedError, pending.wait, "aborted")
    raises(cc.AbortedError, lambda: dist.barrier(group=group), "aborted")
    x = torch.ones(1)
    dist.all_reduce(x)  # other groups work on
    assert x[0] == dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()


def death() -> None:
    """A rank is killed: the others raise, in calls, in works and in callbacks."""
    rank, size = start()
    dist.barrier()
    if rank == size - 1:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    work = dist.all_reduce(torch.ones(1), async_op=True)
    raises(cc.PeerDiedError, work.wait, f"rank {size - 1}")
    raises(RuntimeError, lambda: dist.all_reduce(torch.ones(1)))
    raises(RuntimeError, work.get_future().wait)
    print(f"rank {rank} saw it", flush=True)


def leaving() -> None:
    """A program may end without destroying its groups, also while a call is under way."""
    rank, _ = start()
    dist.barrier()
    future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
    future.then(lambda f: f.value()).wait()
    if rank == 0:
        dist.all_reduce(torch.ones(1), async_op=True).get_future()


def again() -> None:
    """Groups of the same names, on the same store."""
    for _ in range(3):
        start()
        dist.all_reduce(torch.ones(1))
        half = dist.new_group([0, 1])
        if dist.get_rank() < 2:
            dist.barrier(group=half)
        dist.destroy_process_group()
    start()


if __name__ == "__main__":
    for number, part in enumerate(sys.argv[1:]):
        if number:
            dist.destroy_process_group()
        globals()[part]()
