"""Calls out of callbacks of futures, which run at other times and in another order on each rank."""

from __future__ import annotations

import random
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from common import check, run_all, same


def start_call(value: float) -> Any:
    return dist.all_reduce(torch.full((50,), value), async_op=True).get_future()


@check
def chains_of_callbacks_that_wait() -> None:
    """Each chain makes three calls and waits for each, while the program goes on with others."""
    n, rank = dist.get_world_size(), dist.get_rank()
    chances = random.Random(rank)
    threads: list[str] = []

    def next_call(future: Any) -> Any:
        threads.append(threading.current_thread().name)
        time.sleep(chances.random() * 0.003)
        return start_call(future.value()[0][0].item()).wait()

    ends = []
    for i in range(24):
        future = start_call(float(i))
        if chances.random() < 0.5:
            time.sleep(chances.random() * 0.004)  # on some ranks the call is over by now
        ends.append(future.then(next_call).then(next_call))
        x = torch.ones(3)
        dist.all_reduce(x)
        same(x, [float(n)] * 3)
    for i, end in enumerate(ends):
        same(end.wait()[0], torch.full((50,), float(i) * n**3))
    assert len(threads) == 48


@check
def callbacks_of_sparse_calls() -> None:
    n = dist.get_world_size()

    def after(i: int) -> Any:
        future = dist.all_reduce(torch.eye(2).to_sparse(), async_op=True).get_future()
        return future.then(lambda f: start_call(f.value()[0].to_dense()[0, 0].item() + i).wait()[0])

    for i, end in enumerate([after(i) for i in range(4)]):
        same(end.wait(), torch.full((50,), float((n + i) * n)))


@check
def callbacks_in_another_order_than_calls() -> None:
    """What comes first on one rank comes last on another; a callback waits for all of them."""
    n, rank = dist.get_world_size(), dist.get_rank()
    calls = [start_call(float(i)) for i in range(6)]
    order = list(range(6)) if rank % 2 else list(range(5, -1, -1))
    ends: dict[int, Any] = {}
    for i in order:
        if rank == 0:
            calls[i].wait()
        ends[i] = calls[i].then(lambda f: start_call(f.value()[0][0].item() + 1).wait()[0])
    for i in range(6):
        same(ends[i].wait(), torch.full((50,), float((i * n + 1) * n)))


@check
def a_callback_makes_several_calls_of_several_kinds() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()

    def several(future: Any) -> Any:
        gathered = [torch.empty(1) for _ in range(n)]
        first = dist.all_gather(gathered, torch.tensor([float(rank)]), async_op=True)
        total = torch.ones(2)
        dist.all_reduce(total)  # this one waits by itself
        dist.broadcast(total, src=1)
        first.wait()
        return torch.cat(gathered), total

    for end in [start_call(1.0).then(several) for _ in range(8)]:
        gathered, total = end.wait()
        same(gathered, torch.arange(float(n)))
        same(total, [float(n)] * 2)


@check
def callbacks_on_two_groups() -> None:
    n = dist.get_world_size()
    other = dist.new_group()

    def on_the_other(future: Any) -> Any:
        x = torch.ones(4)
        dist.all_reduce(x, group=other)
        return x

    ends = []
    for _ in range(10):
        ends.append(start_call(1.0).then(on_the_other))
        future = dist.all_reduce(torch.ones(4), group=other, async_op=True).get_future()
        ends.append(future.then(lambda f: start_call(2.0).wait()[0][:4] / 2))
    for end in ends:
        same(end.wait(), [float(n)] * 4)


@check
def callbacks_that_call_on_a_group_of_some_ranks() -> None:
    """Before they call on all: those outside of it have made one call less."""
    n, rank = dist.get_world_size(), dist.get_rank()
    some = dist.new_group(range(n - 1))

    def both(future: Any) -> Any:
        if rank < n - 1:
            dist.all_reduce(torch.ones(1), group=some)
        dist.all_reduce(x := torch.ones(4))
        return x

    for end in [start_call(1.0).then(both) for _ in range(5)]:
        same(end.wait(), [float(n)] * 4)


@check
def callbacks_of_calls_on_two_groups_in_one_callback() -> None:
    """They follow from the first call on either, and are not each other's."""
    n, rank = dist.get_world_size(), dist.get_rank()
    other = dist.new_group()

    def call(value: float, group: Any = None) -> Any:
        x = torch.full((4,), value)
        return dist.all_reduce(x, group=group, async_op=True).get_future()

    def later(value: float, first: bool) -> Any:
        def next_call(future: Any) -> Any:
            time.sleep(0.01 * (first == (rank == 0)))
            return call(value).wait()[0]

        return next_call

    def both(future: Any) -> Any:
        ends = call(1.0).then(later(1.0, True)), call(1.0, other).then(later(100.0, False))
        return [end.wait() for end in ends]

    for one, hundred in [start_call(1.0).then(both).wait() for _ in range(3)]:
        same(one, [float(n)] * 4)
        same(hundred, [100.0 * n] * 4)


@check
def callbacks_of_groups_of_one_rank() -> None:
    """Their calls match by the call that they follow from, whichever comes first."""
    n, rank = dist.get_world_size(), dist.get_rank()
    alone = [dist.new_group([r]) for r in range(n)][rank]
    for round in range(3):

        def later(i: int, round: int = round) -> Any:
            def call(future: Any) -> Any:
                time.sleep(0.003 * ((i + rank + round) % 4))
                dist.all_reduce(x := torch.full((4,), 10.0**i))
                return x

            future = dist.all_reduce(torch.ones(1), group=alone, async_op=True).get_future()
            return future.then(call)

        for i, end in enumerate([later(i) for i in range(4)]):
            same(end.wait(), [n * 10.0**i] * 4)


@check
def callbacks_that_call_on_their_own_group_of_one_rank() -> None:
    """Which counts what the program calls, however many calls its callbacks have made by then, and
    whether or not a call has to go through scratch.
    """
    n, rank = dist.get_world_size(), dist.get_rank()
    alone = [dist.new_group([r]) for r in range(n)][rank]

    def own(value: float, async_op: bool = True) -> Any:
        x = torch.full((2, 2), value)
        x = x.t() if rank % 2 else x
        return dist.all_reduce(x[:, :1] if rank == 0 else x, group=alone, async_op=async_op)

    def later(i: int) -> Any:
        def call(future: Any) -> Any:
            time.sleep(0.003 * ((i + rank) % 4))
            own(1.0, async_op=False)
            after = own(2.0).get_future().then(lambda f: start_call(100.0 + i).wait()[0])
            own(3.0)
            return start_call(float(i)).wait()[0], after.wait()

        return own(0.0).get_future().then(call)

    ends = []
    for i in range(12):
        ends.append(later(i))
        own(4.0, async_op=False)
        time.sleep(0.002 * ((i + rank) % 3))
    for i, end in enumerate(ends):
        first, second = end.wait()
        same(first, torch.full((50,), float(i * n)))
        same(second, torch.full((50,), (100.0 + i) * n))


@check
def callbacks_of_calls_that_were_over_when_they_returned() -> None:
    """They follow from their own call, and see what that has made, whichever is asked for first.
    Those of dense tensors are asked for at once, and see nothing: torch drops their works. Some
    ranks have called on another group as well.
    """
    n, rank = dist.get_world_size(), dist.get_rank()
    alone, some = [dist.new_group([r]) for r in range(n)][rank], dist.new_group([0, 1])
    options, timed = dist.AllreduceOptions(), dist.BarrierOptions()
    options.asyncOp = timed.asyncOp = False
    timed.timeout = timedelta(seconds=50)
    if rank < 2:
        some.allreduce([torch.ones(1)], options).get_future().then(lambda f: None).wait()
    works, totals = [], []
    for group, size in ((dist.group.WORLD, n), (alone, 1)):
        for _ in range(2):
            for x in (torch.ones(1, 4)[:, ::2], torch.eye(2).to_sparse()):
                works.append(group.allreduce([x], options))
                totals.append(2.0 * size)
        works.append(group.barrier(timed))
        totals.append(0.0)

    def call(i: int) -> Any:
        def run(future: Any) -> Any:
            time.sleep(0.003 * ((i + rank) % 4))
            total = sum(x.to_dense().sum().item() for x in future.value())
            return total, start_call(float(i)).wait()[0]

        return run

    order = range(len(works)) if rank % 2 else range(len(works) - 1, -1, -1)
    ends = {i: works[i].get_future().then(call(i)) for i in order}
    for group in (dist.group.WORLD, alone) * 3:
        x = torch.ones(1, 4)[:, ::2] if rank == 0 else torch.ones(2)
        future = group.allreduce([x], options).get_future()
        ends[len(totals)] = future.then(call(len(totals)))
        totals.append(2.0 * group.size() if rank == 0 else 0.0)
    for i, wanted in enumerate(totals):
        total, x = ends[i].wait()
        assert total == wanted, (i, total, wanted)
        same(x, torch.full((50,), float(i * n)))


@check
def a_callback_that_ends_its_thread() -> None:
    """Who waits for what follows from it is told."""

    def leave(future: Any) -> None:
        raise SystemExit(3)

    end = start_call(1.0).then(leave).then(lambda f: f.value())
    try:
        end.wait()
    except RuntimeError as error:
        assert "SystemExit(3)" in str(error), error
    else:
        raise AssertionError("the callback's error is lost")


@check
def futures_of_several_calls() -> None:
    n = dist.get_world_size()
    both = torch.futures.collect_all([start_call(1.0), start_call(2.0)])
    first, second = (f.value()[0] for f in both.wait())
    same(first + second, torch.full((50,), 3.0 * n))


if __name__ == "__main__":
    run_all()
