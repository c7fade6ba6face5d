"""Calls in which one rank deviates, and the check that all ranks hear of it: for ranks that are
threads, processes of a node, and processes of several nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import cases
import numpy as np
from cases import Case

import collectives as cc

BY_NODE = "hierarchical(direct_two_shot, direct_one_shot)"


class Disagreement(NamedTuple):
    """call(comm, deviates, x, out): x and out hold 2·size rows of float64, more than is needed.

    says    what the error shows of the ranks that agree, and of the one that does not
    """

    name: str
    call: Callable[[cc.Communicator, bool, Any, Any], Any]
    says: tuple[str, str]


def _other_root(comm: cc.Communicator, deviates: bool) -> int:
    return 1 if deviates else 0


DISAGREEMENTS = [
    Disagreement(
        "count",
        lambda c, d, x, out: c.all_reduce(x[:11] if d else x[:10]),
        ("count=10,", "count=11,"),
    ),
    Disagreement(
        "count that travels in another way",
        lambda c, d, x, out: c.all_reduce(x[:145] if d else x[:144]),
        ("count=144,", "count=145,"),
    ),
    Disagreement(
        "count of a large array",
        lambda c, d, x, out: c.all_reduce(x[:19_999] if d else x[:20_000]),
        ("count=20000,", "count=19999,"),
    ),
    Disagreement(
        "nothing and something",
        lambda c, d, x, out: c.all_reduce(x[:0] if d else x[:3]),
        ("count=3,", "count=0,"),
    ),
    Disagreement(
        "count in a forced algorithm",
        lambda c, d, x, out: c.all_reduce(x[:101] if d else x[:100], algorithm="ring"),
        ("count=100,", "count=101,"),
    ),
    Disagreement(
        "count where ranks combine by node",
        lambda c, d, x, out: c.all_reduce(x[:101] if d else x[:100], algorithm=BY_NODE),
        ("count=100,", "count=101,"),
    ),
    Disagreement(
        "count where ranks combine by node, in several messages",
        lambda c, d, x, out: c.all_reduce(x[:5001] if d else x[:5000], algorithm=BY_NODE),
        ("count=5000,", "count=5001,"),
    ),
    Disagreement(
        "one message and several",
        lambda c, d, x, out: c.all_reduce(x[:100] if d else x[:5000], algorithm=BY_NODE),
        ("count=5000,", "count=100,"),
    ),
    Disagreement(
        "dtype",
        lambda c, d, x, out: c.all_reduce(x[:9].view(np.int64) if d else x[:9]),
        ("dtype=float64", "dtype=int64"),
    ),
    Disagreement(
        "op",
        lambda c, d, x, out: c.all_reduce(x[:9], "max" if d else "sum"),
        ("op=sum", "op=max"),
    ),
    Disagreement(
        "op in a large reduce_scatter",
        lambda c, d, x, out: c.reduce_scatter(x[:9000], "min" if d else "prod"),
        ("op=prod", "op=min"),
    ),
    Disagreement(
        "order",
        lambda c, d, x, out: c.all_reduce(x[:9], algorithm="ring", order="rank" if d else None),
        ("algorithm=ring)", "order=rank"),
    ),
    Disagreement(
        "root of a broadcast",
        lambda c, d, x, out: c.broadcast(x[:9], _other_root(c, d)),
        ("root=0", "root=1"),
    ),
    Disagreement(
        "root of a large reduce",
        lambda c, d, x, out: c.reduce(x[:9000], _other_root(c, d), out=out[:9000]),
        ("root=0", "root=1"),
    ),
    Disagreement(
        "root of a gather",
        lambda c, d, x, out: c.gather(x[:5], _other_root(c, d)),
        ("root=0", "root=1"),
    ),
    Disagreement(
        "root of a scatter",
        lambda c, d, x, out: c.scatter(x[: 2 * c.size], _other_root(c, d), out=out[:2]),
        ("root=0", "root=1"),
    ),
    Disagreement(
        "algorithm",
        lambda c, d, x, out: c.all_reduce(x[:99], algorithm="ring" if d else "double_binary_tree"),
        ("algorithm=double_binary_tree", "algorithm=ring"),
    ),
    Disagreement(
        "forced and chosen algorithm",
        lambda c, d, x, out: c.all_gather(x[:9], algorithm="ring" if d else "direct_two_shot"),
        ("algorithm=direct_two_shot", "algorithm=ring"),
    ),
    Disagreement(
        "collective",
        lambda c, d, x, out: c.broadcast(x[:9]) if d else c.all_reduce(x[:9]),
        ("all_reduce(", "broadcast("),
    ),
    Disagreement(
        "barrier and all_to_all",
        lambda c, d, x, out: c.barrier() if d else c.all_to_all(x[: 2 * c.size]),
        ("all_to_all(", "barrier"),
    ),
    Disagreement(
        "counts of reduce_scatter_v",
        lambda c, d, x, out: c.reduce_scatter_v(
            x[:6], [*([3, 3] if d else [2, 4]), *[0] * (c.size - 2)]
        ),
        ("count=6, ", ", counts="),
    ),
    Disagreement(
        "counts of all_gather_v",
        lambda c, d, x, out: c.all_gather_v(
            x[:4], [4] * (c.size - 1) + [4] if not d else [4 + (r != c.rank) for r in range(c.size)]
        ),
        ("all_gather(count=", ", counts="),
    ),
    Disagreement(
        "blocks of all_gather",
        lambda c, d, x, out: c.all_gather(x[:200] if d else x[:100]),
        ("all_gather(count=", "all_gather(count="),
    ),
    Disagreement(
        "queued calls",
        lambda c, d, x, out: c.all_reduce(x[:10], "max" if d else "sum", async_op=True).wait(20),
        ("op=sum", "op=max"),
    ),
    Disagreement(
        "calls in a group",
        lambda c, d, x, out: _grouped(c, x[:31] if d else x[:30]),
        ("count=30", "count=31"),
    ),
]


def _grouped(comm: cc.Communicator, x: Any) -> None:
    with comm.group():
        comm.all_reduce(x[: x.size // 2])
        comm.all_reduce(x[x.size // 2 :])


def check(comm: cc.Communicator, one: Disagreement, deviant: int) -> None:
    """All ranks raise MismatchError that shows both sides; nothing is written; later calls work."""
    x = np.full(20_000, comm.rank + 1.0)
    out = np.full(20_000, -7.0)
    try:
        one.call(comm, comm.rank == deviant, x, out)
    except cc.MismatchError as error:
        text = str(error)
        missing = [words for words in one.says if words not in text]
        assert not missing, f"{one.name}: the error does not say {missing}: {text}"
        assert f"rank {deviant}: " in text, f"{one.name}: who deviates is not said: {text}"
        assert "rank" in text.replace(f"rank {deviant}: ", "", 1), text
    else:
        raise AssertionError(f"{one.name}: no MismatchError on rank {comm.rank}")
    assert (x == comm.rank + 1.0).all(), f"{one.name}: the input was written"
    assert (out == -7.0).all(), f"{one.name}: the output was written"
    for count in (3, 3000):
        cases.check(comm, Case("all_reduce", count=count))


def check_all(comm: cc.Communicator) -> int:
    """Every disagreement, with one deviating rank after the other; returns how many."""
    for i, one in enumerate(DISAGREEMENTS):
        check(comm, one, i % comm.size)
    return len(DISAGREEMENTS)
