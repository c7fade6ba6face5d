"""An all_reduce of your own: written once, then proved, drawn, costed, run and compared.

    python examples/my_algorithm.py
    python -m collectives run -n 4 examples/my_algorithm.py      the last part, between processes

The algorithm is a two-level star. Every rank hands its vector to the lower rank of its pair, the
lower ranks of the pairs hand theirs to rank 0, and the sum goes back the same way. The last part
times it beside two that come with the package.
"""

import time

import numpy as np

import collectives as cc
from collectives import Transfer


@cc.algorithm("all_reduce", when="never: it is here to be read")
def stars(n):
    """pairs of ranks, then a star of the pairs, and back"""
    pairs = [(r, r - 1) for r in range(1, n, 2)]
    heads = [(r, 0) for r in range(2, n, 2)]
    for star in (pairs, heads):
        yield [Transfer(src, dst, chunk=0, reduce=True) for src, dst in star]
    for star in (heads, pairs):
        yield [Transfer(dst, src, chunk=0) for src, dst in star]


@cc.algorithm("all_reduce")
def forgetful(n):
    """the same, but the pairs are forgotten on the way back"""
    yield from list(stars(n))[:-1]


def look() -> None:
    """What can be known without running anything."""
    plan = cc.schedule("stars", "all_reduce", 6)  # verified here: every contribution, exactly once
    print(plan.draw())
    for name in ("stars", "ring", "direct_two_shot"):
        cost = cc.schedule(name, "all_reduce", 6).cost()
        print(
            f"{name:16} {cost['steps']:2.0f} steps, at most {cost['sent_max']:.2f} vectors a rank"
        )
    try:
        cc.schedule("forgetful", "all_reduce", 6)
    except cc.ScheduleError as error:
        print(f"forgetful is refused: {error}")


def run(comm: cc.Communicator) -> None:
    """The results are those of any other algorithm; the times are not."""
    for name in ("stars", "ring", "direct_two_shot"):
        x = np.full(100_003, comm.rank + 1.0, np.float32)
        comm.all_reduce(x, algorithm=name)
        assert (x == comm.size * (comm.size + 1) / 2).all()
        comm.barrier()
        start = time.perf_counter()
        for _ in range(20):
            comm.all_reduce(x, op="max", algorithm=name)
        took = (time.perf_counter() - start) / 20
        if comm.rank == 0:
            print(f"{name:16} {took * 1e6:8.0f} us for {x.nbytes} bytes, {comm.size} ranks")


if __name__ == "__main__":
    with cc.init() as world:
        if world.size > 1:
            run(world)
        else:
            look()
            cc.run_threads(4, run)
