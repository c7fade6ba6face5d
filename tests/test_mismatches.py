"""Every pair of calls that differ raises on all ranks, with both signatures; differences that are
legal never do; and the communicator works on.

tests/disagreements.py has single cases, also for processes and nodes; here is the matrix.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import cases
import launch
import numpy as np
import pytest
from cases import Case
from worlds import outcomes

import collectives as cc
from collectives import _core
from collectives.array import ITEM_SIZES
from collectives.config import COLLECTIVES
from collectives.schedule import why_unsupported

N = 3
SIZES = (12, 60_000)  # elements: in flag lines, and staged


class Call(NamedTuple):
    """One way to call; `says` is what its signature shows, as a regular expression."""

    collective: str
    count: int = 12
    dtype: str = "float32"
    op: str = "sum"
    root: int = 0
    algorithm: str | None = None
    order: str | None = None

    @property
    def says(self) -> str:
        if self.collective == "barrier":
            return r"\bbarrier\b"
        words = rf"{self.collective}\(count=\d+, dtype={self.dtype}"
        if self.collective in ("all_reduce", "reduce", "reduce_scatter"):
            words += f", op={self.op}"
        if self.collective in cases.ROOTED:
            words += f", root={self.root}"
        words += rf".*algorithm={self.algorithm}\b" if self.algorithm else ""
        return words + (".*, order=rank" if self.order else "")

    def make(self, comm: cc.Communicator) -> Any:
        x = cases.any_bytes(0, self.count, self.dtype, 1)
        how: dict[str, Any] = {"algorithm": self.algorithm}
        if self.collective in ("all_reduce", "reduce", "reduce_scatter"):
            how |= {"op": self.op, "order": self.order}
        if self.collective in cases.ROOTED:
            how["root"] = self.root
        if self.collective == "barrier":
            return comm.barrier()
        if self.collective == "scatter":
            how["out"] = x[: self.count // comm.size].copy()
        return getattr(comm, self.collective)(x, **how)


def disagree(comm: cc.Communicator, usual: Call, other: Call, deviant: int) -> str:
    """What is wrong with the way in which two calls meet on this rank; "" if nothing is."""
    try:
        (other if comm.rank == deviant else usual).make(comm)
    except cc.MismatchError as error:
        text = str(error)
        sides = re.split(r"; (?=ranks? \d)", text.partition("communicator: ")[2])
        mine = [s for s in sides if re.match(rf"ranks? .*\b{deviant}\b.*?: ", s)]
        wrong = "" if len(sides) == 2 and len(mine) == 1 else "not two sides"
        for call, where in ((other, mine), (usual, [s for s in sides if s not in mine])):
            if not any(re.search(call.says, side) for side in where):
                wrong = wrong or f"{call.says} is not said"
        return f"{wrong}: {text}" if wrong else ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def matrix(pairs: list[tuple[Call, Call]]) -> None:
    """Every pair, with one deviating rank after the other."""

    def body(comm: cc.Communicator) -> list[str]:
        wrong = []
        for i, (usual, other) in enumerate(pairs):
            words = disagree(comm, usual, other, i % comm.size)
            if words:
                wrong.append(f"{usual} and {other}: {words}")
            if len(wrong) > 5:
                break
        cases.check(comm, Case("all_reduce", count=3000))
        return wrong

    assert pairs
    assert outcomes(N, body, timeout=60) == [[]] * N


def both_ways(calls: list[Call]) -> list[tuple[Call, Call]]:
    return list(itertools.permutations(calls, 2))


# ---- the matrix ---------------------------------------------------------------------------------


@pytest.mark.parametrize("count", SIZES)
def test_every_pair_of_collectives(count):
    matrix(both_ways([Call(c, count) for c in COLLECTIVES]))


@pytest.mark.parametrize("collective", [c for c in COLLECTIVES if c != "barrier"])
def test_every_argument_of_every_collective(collective):
    """One argument at a time, small and large, and across the sizes at which ways change."""
    pairs = []
    for count in SIZES:
        usual = Call(collective, count)
        others = [usual._replace(count=count + N), usual._replace(dtype="int32")]
        if collective in ("all_reduce", "reduce", "reduce_scatter"):
            others += [usual._replace(op="max"), usual._replace(order="rank")]
        if collective in cases.ROOTED:
            others += [usual._replace(root=1), usual._replace(root=2)]
        pairs += [pair for other in others for pair in both_ways([usual, other])]
    pairs += both_ways([Call(collective, count) for count in SIZES])
    matrix(pairs)


def test_every_pair_of_dtypes():
    """Also those of one size, whose bytes could not tell."""
    matrix(both_ways([Call("all_gather", dtype=d) for d in ITEM_SIZES]))


def test_every_pair_of_ops():
    known = [op for op in _core.ops if op not in ("avg", "premul_sum")]
    matrix(both_ways([Call("all_reduce", dtype="int32", op=op) for op in known]))
    floats = [op for op in _core.ops if not _core.why_op_unsupported(op, "float32")]
    floats = [op for op in floats if op != "premul_sum"]
    matrix(both_ways([Call("all_reduce", count=9000, op=op) for op in floats]))


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_pair_of_algorithms(collective):
    names = [a.name for a in cc.algorithms()]
    able = [a for a in names if not why_unsupported(a, collective, N, node=[0] * N)]
    pairs = both_ways([Call(collective, 300, algorithm=a) for a in able])
    if collective == "barrier":  # its signature shows no more than its name
        assert pairs == [] or able
        return
    matrix(pairs)


def test_the_order_of_calls():
    """Two calls that are made in another order are two disagreements, and then all is well."""

    def body(comm):
        calls: list[Callable[[], Any]] = [
            lambda: comm.all_reduce(np.zeros(5)),
            lambda: comm.broadcast(np.zeros(5)),
        ]
        heard = []
        for call in reversed(calls) if comm.rank == 1 else calls:
            with pytest.raises(cc.MismatchError, match=r"all_reduce\(.*broadcast\(|broad.*all_re"):
                call()
            heard.append(comm.rank)
        cases.check(comm, Case("all_gather"))
        return len(heard)

    assert outcomes(N, body) == [2] * N


# ---- what is no collective ----------------------------------------------------------------------


def test_split_and_empty():
    """Calls of the control plane differ in name; after that the group is broken, and says so."""

    def body(comm):
        call = (lambda: comm.empty(5)) if comm.rank == 1 else (lambda: comm.split(0))
        with pytest.raises(cc.MismatchError, match=r"split on rank \d, but empty on rank|empty on"):
            call()
        with pytest.raises(cc.MismatchError):
            comm.duplicate()
        cases.check(comm, Case("all_reduce"))  # calls on data work on

    assert outcomes(N, body) == [None] * N


def test_the_size_of_symmetric_arrays():
    def body(comm):
        with pytest.raises(cc.ArrayError, match="rank 0: 20 bytes, rank 1: 24 bytes"):
            comm.empty(5 + (comm.rank == 1))
        assert comm.empty(5).shape == (5,)

    assert outcomes(2, body) == [None] * 2


@pytest.mark.parametrize("count", SIZES)
def test_send_and_recv_that_differ(count):
    """The receiver knows both sides, and raises; the message is dropped, the next one arrives."""

    def body(comm):
        if comm.rank == 0:
            comm.send(np.zeros(count, np.float32), 1, tag=7)
            comm.send(np.zeros(count, np.int32), 1, tag=7)
            comm.send(np.full(count, 5, np.float32), 1, tag=8)
            comm.send(np.full(count, 3, np.float32), 1, tag=7)
            return None
        says = rf"rank 0 with tag 7 expects {count + 1} x float32 .* sent {count} x float32"
        with pytest.raises(cc.MismatchError, match=says):
            comm.recv(np.zeros(count + 1, np.float32), 0, tag=7)
        says = rf"expects {count} x float32 .* sent {count} x int32"
        with pytest.raises(cc.MismatchError, match=says):
            comm.recv(np.zeros(count, np.float32), 0, tag=7)
        # Another tag is another message, and no mismatch.
        last, other = np.zeros(count, np.float32), np.zeros(count, np.float32)
        comm.recv(last, 0, tag=7)
        comm.recv(other, 0, tag=8)
        return last[0], other[0]

    assert outcomes(2, body) == [None, (3.0, 5.0)]


# ---- no false alarm -----------------------------------------------------------------------------


def test_differences_that_are_legal():
    """In place or not, blocking or not, in a group or not, of which kind and where the array is."""

    def body(comm):
        rank, n = comm.rank, comm.size
        x = np.full(600, rank + 1.0, np.float32)
        total = n * (n + 1) / 2
        for _ in range(3):
            if rank == 0:
                got = comm.all_reduce(x.copy())
            elif rank == 1:
                got = comm.all_reduce(x, out=np.empty_like(x), async_op=True).wait()
            else:
                with comm.group():
                    work = comm.all_reduce(np.concatenate([x, x])[1:601])
                got = work.wait()
            assert (got == total).all()
            # Only the root has a place for what comes.
            root = comm.reduce(x, root=1, out=np.empty_like(x) if rank == 1 else None)
            assert rank != 1 or (root == total).all()
            # Blocks of lengths that only two ranks know.
            counts = [(rank + 1) * (q + 1) for q in range(n)]
            sent = np.concatenate([np.full(c, rank, np.float32) for c in counts])
            back = [(q + 1) * (rank + 1) for q in range(n)]
            got = comm.all_to_all_v(sent, counts, back)
            assert got.tolist() == [float(q) for q in range(n) for _ in range(back[q])]
            # The default algorithm by its name, and order="any", say what is so already.
            comm.all_reduce(x.copy(), order="any" if rank else None)
            comm.barrier()
        factor = comm.all_reduce(np.ones(3), "premul_sum", factor=float(rank))
        assert factor.tolist() == [n * (n - 1) / 2] * 3

    assert outcomes(N, body) == [None] * N


@pytest.mark.torch
def test_kinds_of_arrays_may_differ():
    torch = pytest.importorskip("torch")

    def body(comm):
        x = torch.ones(5) if comm.rank else np.ones(5, np.float32)
        return comm.all_reduce(x).tolist()

    assert outcomes(2, body) == [[2.0] * 5] * 2


@pytest.mark.parametrize("count", [1, 40_000])
@pytest.mark.parametrize("deviates", [0, 2])
def test_pairs_that_expect_other_lengths(count, deviates):
    """All ranks say which, whatever they send themselves, and nothing is written."""

    def body(comm):
        for more in (-1, 3, 0):
            counts = [count] * N
            expected = [count] * N
            if comm.rank == deviates:
                expected[1] += more
            x = np.full(sum(counts), comm.rank, np.float32)
            out = np.full(sum(expected), 7, np.float32)
            if more == 0:
                comm.all_to_all_v(x, counts, expected, out=out)
                assert out.tolist() == [float(q) for q in range(N) for _ in range(count)]
                continue
            with pytest.raises(cc.MismatchError) as caught:
                comm.all_to_all_v(x, counts, expected, out=out)
            assert (out == 7).all()
            says = f"rank 1 sends {count} elements to rank {deviates}, which expects {count + more}"
            assert says in str(caught.value)

    assert outcomes(N, body, timeout=60) == [None] * N


@pytest.mark.parametrize("nodes", [None, [0, 1]])
def test_nothing_beside_pairs_with_lengths_of_their_own(nodes):
    """An all_to_all of nothing is no all_to_all_v."""

    def body(comm):
        with pytest.raises(cc.MismatchError, match=r"all_to_all\(count=0.*all_to_all_v\(count=0"):
            if comm.rank == 0:
                comm.all_to_all(np.empty(0, np.float32))
            else:
                comm.all_to_all_v(np.ones(1, np.float32), [0, 1], [0, 1])
        return float(comm.all_reduce(np.ones(1))[0])

    assert outcomes(2, body, nodes=nodes) == [2.0] * 2


def test_a_call_that_one_rank_alone_is_refused():
    """It has sent nothing, so it meets the others in the next one."""

    def body(comm):
        if comm.rank == 0:
            for _ in range(2):
                with pytest.raises(cc.UnsupportedError, match="do not know their lengths"):
                    comm.all_to_all_v(np.ones(4), [1] * 4, [1] * 4, algorithm="bruck")
        x = np.ones(1000, np.float32)
        for _ in range(2):
            comm.all_reduce(x, algorithm="ring")
        return x.tolist() == [16.0] * 1000

    assert outcomes(4, body) == [True] * 4


BETWEEN_NODES = """
import os
os.environ["COLLECTIVES_NODE"] = os.environ["OMPI_COMM_WORLD_RANK"]
import numpy as np
import collectives as cc
comm = cc.init(timeout=20)
for sent, expected in ((2046, 2048), (2048, 2046), (8192 + 2046, 8192 + 2048), (2000, 2100)):
    out = np.zeros(expected)
    x = np.full(sent, 7.0) if comm.rank == 0 else np.empty(0)
    counts = ([0, sent], [0, 0]) if comm.rank == 0 else ([0, 0], [expected, 0])
    part = comm.duplicate()
    try:
        part.all_to_all_v(x, *counts, out=out if comm.rank else None)
        print("done", comm.rank, flush=True)
    except cc.CollectiveError as error:
        print("raised", type(error).__name__, comm.rank, flush=True)
    assert set(out.tolist()) <= {0.0, 7.0}, out
    comm.barrier()
"""


@pytest.mark.mpi
def test_pairs_that_expect_other_lengths_between_nodes(tmp_path):
    """About where messages travel without what describes them."""
    script = tmp_path / "between.py"
    script.write_text(BETWEEN_NODES)
    got = launch.run(2, script, launcher="openmpi", timeout=100)
    assert got.status == 0 and got.output.count("raised MismatchError 1") == 4, got
