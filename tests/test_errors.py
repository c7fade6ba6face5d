"""Bad input: each line of it is an exception in words, on every rank that it concerns, before
anything is written; and the communicator goes on working where ranks merely disagreed.

Faults of ranks (death, deadlines, closing) are in test_faults.py.
"""

from __future__ import annotations

import re

import cases
import disagreements
import launch
import numpy as np
import pytest
import reference
from cases import Case
from worlds import outcomes

import collectives as cc
from collectives.config import COLLECTIVES

F32 = np.float32


def ones(count=12):
    return np.ones(count, F32)


# ---- ranks that disagree ------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("one", disagreements.DISAGREEMENTS, ids=lambda one: one.name)
def test_every_rank_hears_of_a_disagreement(one, n):
    def body(comm):
        for deviant in range(comm.size):
            disagreements.check(comm, one, deviant)
        return True

    assert cc.run_threads(n, body, timeout=20) == [True] * n


def test_disagreements_of_processes():
    launch.run(3, "disagreeing.py").expect(status=0)


@pytest.mark.mpi
@pytest.mark.parametrize("launcher", ["openmpi", "mpich"])
@pytest.mark.parametrize("nodes", ["0,1,2", "0,0,1"])
def test_disagreements_between_nodes(launcher, nodes):
    launch.run(3, "disagreeing.py", "--nodes", nodes, launcher=launcher).expect(status=0)


def test_three_opinions_are_all_shown():
    def body(comm):
        comm.all_reduce(ones(10 + comm.rank % 3))

    for error in outcomes(4, body):
        assert isinstance(error, cc.MismatchError)
        assert "ranks 0, 3: all_reduce(count=10" in str(error)
        assert "rank 1: all_reduce(count=11" in str(error)
        assert "rank 2: all_reduce(count=12" in str(error)


def test_the_queue_goes_on_after_a_disagreement():
    def body(comm):
        first = comm.all_reduce(ones(5 + comm.rank), async_op=True)
        second = comm.all_reduce(ones(), async_op=True)
        assert isinstance(first.exception(20), cc.MismatchError)
        with pytest.raises(cc.MismatchError):
            first.wait(20)
        return second.wait(20).tolist()

    assert cc.run_threads(2, body, timeout=20) == [[2.0] * 12] * 2


def test_sizes_of_symmetric_arrays_differ():
    def body(comm):
        with pytest.raises(cc.CollectiveError, match=r"rank 0: 40 bytes.*rank 1: 44 bytes"):
            comm.empty(10 + comm.rank, "float32")
        comm.all_reduce(comm.empty(10, "float32"))

    assert cc.run_threads(2, body, timeout=20) == [None, None]


def test_uneven_pairs_by_an_algorithm_that_forwards():
    """A rank that hands on others' blocks cannot know their lengths: refused, not tried."""
    counts = [[1, 0, 2, 0], [0, 3, 0, 1], [1, 1, 1, 1], [0, 0, 0, 2]]
    names = [name for name, c in cases.registry(4) if cases.forwards(name, c, 4)]
    assert names

    def body(comm):
        for name in names:
            with pytest.raises(cc.UnsupportedError, match=f"{name}.*all_to_all"):
                comm.all_to_all_v(
                    np.arange(sum(counts[comm.rank])), counts[comm.rank], algorithm=name
                )
        cases.check(comm, Case("all_to_all", v=True))

    assert cc.run_threads(4, body, timeout=20) == [None] * 4


# ---- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda c: c.all_reduce(ones(), "summ"), "unknown op 'summ'.*'sum'"),
        (lambda c: c.reduce_scatter(ones(), "maximum"), "unknown op 'maximum'.*max"),
        (lambda c: c.all_reduce(ones(), algorithm="rnig"), "unknown algorithm 'rnig'.*'ring'"),
        (lambda c: c.broadcast(ones(), algorithm="binomial"), "'binomial'.*'binomial_tree'"),
        (
            lambda c: c.all_reduce(ones(), algorithm="hierarchical(ring, rnig)"),
            "unknown algorithm 'rnig'.*'ring'",
        ),
        (lambda c: c.all_reduce(ones(), order="ranks"), "order.*'rank'"),
        (lambda c: c.empty(3, "flaot32"), "unknown dtype 'flaot32'.*'float32'"),
        (lambda c: c.empty(3, kind="nunpy"), "'nunpy'.*'numpy'"),
        (lambda c: c.split(by="nodes"), "'nodes'.*'node'"),
        (lambda c: c.explain("all_redcue", nbytes=4), "'all_redcue'.*'all_reduce'"),
        (lambda c: cc.schedule("ring", "all_redcue", 3), "'all_redcue'.*'all_reduce'"),
        (lambda c: cc.schedule("rnig", "all_reduce", 3), "'rnig'.*'ring'"),
        (lambda c: cc.algorithm("all_redcue"), "'all_redcue'.*'all_reduce'"),
        (lambda c: cc.unregister("no such"), "'no such'"),
    ],
)
def test_unknown_names_offer_the_nearest_right_one(call, says):
    def body(comm):
        with pytest.raises(ValueError, match=says):
            call(comm)
        cases.check(comm, Case("all_reduce"))

    assert cc.run_threads(2, body, timeout=20) == [None, None]


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda c: c.all_reduce(ones(), None), "op"),
        (lambda c: c.all_reduce(ones(), 3), "op"),
        (lambda c: c.all_reduce(ones(), np.add), "op"),
        (lambda c: c.all_reduce(ones(), algorithm=3), "algorithm"),
        (lambda c: c.all_reduce(ones(), algorithm=""), "algorithm"),
        (lambda c: c.all_reduce(ones(), order=1), "order"),
        (lambda c: c.all_reduce(ones(), "premul_sum", factor="x"), "factor"),
        (lambda c: c.broadcast(ones(), None), "root"),
        (lambda c: c.broadcast(ones(), "0"), "root"),
        (lambda c: c.broadcast(ones(), 0.5), "root"),
        (lambda c: c.send(ones(), None), "rank"),
        (lambda c: c.send(ones(), 1, "tag"), "tag"),
        (lambda c: c.empty(-3), "shape"),
        (lambda c: c.empty((2, "a")), "shape"),
        (lambda c: c.empty(3, None), "dtype"),
        (lambda c: c.all_gather_v(ones(), "ab"), "counts"),
        (lambda c: c.reduce_scatter_v(ones(), None), "counts"),
        (lambda c: c.all_reduce(None), "all_reduce: x"),
        (lambda c: c.all_reduce(ones(), out=[1.0] * 12), "all_reduce: out"),
        (lambda c: c.all_reduce([1.0, 2.0]), "all_reduce: x"),
        (lambda c: c.all_gather("text"), "all_gather: x"),
        (lambda c: c.all_reduce(3.0), r"all_reduce: x.*numpy.array\(3.0"),
        (lambda c: c.all_reduce(np.array([object()])), "all_reduce: x.*object"),
        (lambda c: c.all_reduce(np.array(["a"])), "all_reduce: x.*<U1"),
        (lambda c: c.all_reduce(ones().astype(">f4")), "all_reduce: x.*byte order"),
        (
            lambda c: c.all_reduce(ones().astype(np.longdouble)),
            "all_reduce: x.*longdouble|float128",
        ),
    ],
)
def test_arguments_of_the_wrong_kind(call, argument):
    """ValueError or TypeError that names the argument; nothing that only the core understands."""

    def body(comm):
        with pytest.raises((ValueError, TypeError, cc.UnsupportedError), match=argument) as caught:
            call(comm)
        assert "pybind" not in str(caught.value)
        assert "_core" not in str(caught.value)
        assert "incompatible function arguments" not in str(caught.value)
        cases.check(comm, Case("all_reduce"))

    for outcome in outcomes(2, body):
        if outcome is not None:
            raise outcome


# ---- arrays -------------------------------------------------------------------------------------


def strided():
    return np.ones((8, 6), F32)[:, ::2]


def readonly():
    x = ones()
    x.flags.writeable = False
    return x


@pytest.mark.parametrize("collective", [c for c in COLLECTIVES if c != "barrier"])
def test_strides_are_named(collective):
    def body(comm):
        with pytest.raises(cc.ArrayError, match=rf"{collective}: x.*\(24, 8\).*ascontiguousarray"):
            getattr(comm, collective)(strided())
        if collective not in ("broadcast", "reduce_scatter"):
            with pytest.raises(cc.ArrayError, match=rf"{collective}: out.*\(24, 8\)"):
                getattr(comm, collective)(np.ones((8, 3), F32), out=strided())
        with pytest.raises(cc.ArrayError, match="Fortran"):
            getattr(comm, collective)(np.ones((4, 6), F32, order="F"))
        cases.check(comm, Case("all_reduce"))

    assert cc.run_threads(1, body) == [None]
    if collective not in ("gather", "reduce", "scatter"):  # there, out is for the root alone
        assert cc.run_threads(2, body, timeout=20) == [None, None]


def test_read_only_arrays_are_not_written():
    def body(comm):
        for call in (
            lambda: comm.all_reduce(readonly()),
            lambda: comm.all_reduce(ones(), out=readonly()),
            lambda: comm.all_gather(ones(4), out=readonly()),
            lambda: comm.reduce_scatter(ones(36), out=readonly()),
            lambda: comm.all_to_all(ones(), out=readonly()),
            lambda: comm.recv(readonly(), 0),
            lambda: comm.recv(b"bytes", 0),
            lambda: comm.all_reduce(ones(1), out=np.float32(0)),
        ):
            with pytest.raises(cc.ArrayError, match=r"read-only|immutable"):
                call()
        # What is only read may be read-only.
        comm.broadcast(readonly() if comm.rank == 1 else ones(), 1)
        comm.reduce(ones() if comm.rank == 2 else readonly(), 2)
        assert comm.all_reduce(readonly(), out=ones()).sum() == 36
        return True

    assert cc.run_threads(3, body, timeout=20) == [True] * 3


def test_arrays_that_overlap_in_part():
    def body(comm):
        whole = np.ones(100, F32)
        before = whole.copy()
        for call in (
            lambda: comm.all_reduce(whole[:60], out=whole[20:80]),
            lambda: comm.reduce_scatter(whole[:60], out=whole[31:61]),
            lambda: comm.reduce_scatter_v(
                whole[:60], [20, 40], out=whole[1:21] if comm.rank == 0 else whole[:40]
            ),
            lambda: comm.all_gather(whole[5:15], out=whole[:20]),
            lambda: comm.all_gather_v(whole[:10], [10, 10], out=whole[5:25]),
            lambda: comm.gather(whole[5:15], comm.rank, out=whole[:20]),
            lambda: comm.all_to_all(whole[:20], out=whole[1:21]),
            lambda: comm.all_to_all_v(whole[:20], [10, 10], [10, 10], out=whole[:20]),
            lambda: comm.sendrecv(whole[:20], 1 - comm.rank, whole[10:30], 1 - comm.rank),
        ):
            with pytest.raises(cc.ArrayError, match=r"overlap|share"):
                call()
        if comm.rank == 1:
            for call in (
                lambda: comm.scatter(whole[:20], 1, out=whole[5:15]),
                lambda: comm.scatter_v(whole[:20], [5, 15], 1, out=whole[:15]),
            ):
                with pytest.raises(cc.ArrayError, match=r"overlap|share"):
                    call()
        assert (whole == before).all()
        cases.check(comm, Case("all_reduce"))

    assert cc.run_threads(2, body, timeout=20) == [None, None]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda c: c.all_reduce(ones(12), out=ones(11)), "11.*12"),
        (lambda c: c.all_reduce(ones(12), out=np.ones(12)), "float32.*float64"),
        (lambda c: c.all_gather(ones(3), out=ones(12)), "3 elements.*12"),
        (lambda c: c.all_gather_v(ones(3), [4, 4, 4]), "3 rows.*4"),
        (lambda c: c.all_gather_v(ones(3), [3, 3]), "2 entries.*3 ranks"),
        (lambda c: c.all_gather_v(ones(3), [3, 3, -3]), "negative"),
        (lambda c: c.reduce_scatter(ones(12), out=ones(3)), "3.*4"),
        (lambda c: c.reduce_scatter_v(ones(12), [4, 4, 5]), "12.*13"),
        (lambda c: c.gather_v(ones(3), 0, [4, 4, 4]), "3 rows.*4"),
        (lambda c: c.scatter(ones(10), c.rank), "10.*3 ranks.*scatter_v"),
        (lambda c: c.scatter_v(ones(10), [4, 4, 4], c.rank), "10.*12"),
        (lambda c: c.scatter(None, (c.rank + 1) % 3), "not the root.*out="),
        (lambda c: c.all_to_all(ones(10)), "10.*3 ranks.*all_to_all_v"),
        (lambda c: c.all_to_all_v(ones(10), [4, 4, 4], [4, 4, 4]), "10.*12"),
    ],
)
def test_lengths_that_do_not_fit(call, says):
    def body(comm):
        with pytest.raises(ValueError, match=says):
            call(comm)
        cases.check(comm, Case("all_reduce"))

    assert cc.run_threads(3, body, timeout=20) == [None] * 3


# ---- ops, roots, algorithms ---------------------------------------------------------------------


def test_every_op_that_a_dtype_lacks():
    lacking = [
        (dtype, op)
        for dtype in reference.DTYPES
        for op in reference.OPS
        if not reference.is_defined(op, dtype)
    ]
    assert len(lacking) + len(reference.PAIRS) == 17 * 9

    def body(comm):
        for dtype, op in lacking:
            x = np.ones(6, reference.DTYPES[dtype])
            more = {"factor": 2} if op == "premul_sum" else {}
            for call in (comm.all_reduce, comm.reduce_scatter, comm.reduce):
                says = rf"{op} is not defined on {dtype}: .*(use|reduce|convert)"
                with pytest.raises(cc.UnsupportedError, match=says):
                    call(x, op=op, **more)
            assert (x == np.ones(6, reference.DTYPES[dtype])).all()
        cases.check(comm, Case("all_reduce"))

    assert cc.run_threads(2, body, timeout=20) == [None, None]


@pytest.mark.parametrize("root", [3, -1, 100])
def test_a_root_out_of_range(root):
    def body(comm):
        for call in (comm.broadcast, comm.reduce, comm.gather, comm.scatter, comm.gather_v):
            with pytest.raises(ValueError, match=rf"root {root} .*0 to 2"):
                call(ones(), root)
        for call in (comm.send, lambda x, peer: comm.recv(x, peer)):
            with pytest.raises(ValueError, match=rf"rank {root} .*0 to 2"):
                call(ones(), root)
        cases.check(comm, Case("all_reduce"))

    assert cc.run_threads(3, body, timeout=20) == [None] * 3


def test_every_algorithm_that_cannot_run_is_refused():
    """A forced choice is honoured or raises."""

    def body(comm):
        refused = 0
        for info in cc.algorithms():
            for collective in COLLECTIVES:
                if collective == "barrier":
                    continue
                why = cases.why_unsupported(info.name, collective, comm.size)
                if why:
                    with pytest.raises(cc.UnsupportedError, match=re.escape(why)):
                        root = {"root": comm.rank} if collective in cases.ROOTED else {}
                        getattr(comm, collective)(ones(), algorithm=info.name, **root)
                    refused += 1
        with pytest.raises(cc.UnsupportedError, match="hierarchical"):
            comm.all_reduce(ones(), algorithm="hierarchical(ring)")
        with pytest.raises(cc.UnsupportedError, match="reduce_scatter"):
            comm.all_reduce(ones(), algorithm="hierarchical(bruck, ring)")
        cases.check(comm, Case("all_reduce"))
        return refused

    assert min(cc.run_threads(2, body, timeout=20)) > 20


def test_factor_belongs_to_premul_sum():
    def body(comm):
        with pytest.raises(ValueError, match="factor="):
            comm.all_reduce(ones(), "premul_sum")
        with pytest.raises(ValueError, match="factor= belongs to"):
            comm.all_reduce(ones(), "sum", factor=2)
        with pytest.raises(ValueError, match="complex"):
            comm.all_reduce(ones(), "premul_sum", factor=1j)
        cases.check(comm, Case("all_reduce"))

    assert cc.run_threads(2, body, timeout=20) == [None, None]


def test_a_transport_that_is_not_there(tmp_path):
    script = tmp_path / "script.py"
    # One write for each rank: the lines of two tracebacks would mix.
    script.write_text(
        "import collectives as cc, os\n"
        "try: cc.init()\n"
        "except cc.CollectiveError as error:\n"
        "    os.write(1, f'{type(error).__name__}: {error}\\n'.encode())\n"
        "    os._exit(1)\n"
    )
    got = launch.run(2, script, env={"COLLECTIVES_TRANSPORT": "mpi"})
    assert got.status not in (0, None), got
    assert "UnsupportedError: COLLECTIVES_TRANSPORT=mpi, but the ranks met through" in got.output
    got = launch.run(2, script, env={"COLLECTIVES_TRANSPORT": "threads"})
    assert got.status not in (0, None), got
    assert "UnsupportedError: COLLECTIVES_TRANSPORT=threads" in got.output
    got = launch.run(2, script, env={"COLLECTIVES_ALGORITHM": "all_reduce:bruck"})
    assert "TopologyError: COLLECTIVES_ALGORITHM asks for bruck as all_reduce" in got.output, got


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda c: c.all_to_all_v(ones(3), [1, 1]), "send_counts sum to 2"),
        (lambda c: c.all_to_all_v(ones(2), [1, 1], algorithm="ring"), "cannot do all_to_all"),
        (lambda c: c.all_to_all_v(ones(2), [1, 1], out=np.ones(2)), "float32, out is float64"),
        (lambda c: c.all_gather_v(ones(2), out=np.ones(4)), "float32, out is float64"),
        (lambda c: c.all_gather_v(ones(2), algorithm="binomial_tree"), "cannot do all_gather"),
        (lambda c: c.gather_v(ones(2), 5), "root 5 is out of range"),
    ],
)
def test_a_mistake_of_one_rank_where_lengths_are_found_out(call, words):
    """It raises before anything is sent, so the same rank's next call meets the others'."""

    def body(comm):
        if comm.rank == 1:
            with pytest.raises((ValueError, cc.CollectiveError), match=words):
                call(comm)
        assert len(comm.all_gather_v(ones(1 + comm.rank))) == 3
        assert len(comm.all_to_all_v(ones(2), [1, 1])) == 2
        return True

    assert cc.run_threads(2, body, timeout=20) == [True] * 2


@pytest.mark.parametrize("collective", ["all_gather_v", "gather_v"])
def test_room_that_lengths_which_are_found_out_do_not_fit(collective):
    """Of one rank; all raise, and go on."""

    def body(comm):
        out = np.ones(4 if comm.rank == 0 else 3, F32)
        with pytest.raises(cc.ArrayError, match="4 elements on rank 0, needed are 3"):
            getattr(comm, collective)(ones(1 + comm.rank), out=out)
        assert len(comm.all_gather_v(ones(1 + comm.rank), out=ones(3))) == 3
        return True

    assert cc.run_threads(2, body, timeout=20) == [True] * 2


@pytest.mark.parametrize("collective", ["all_gather_v", "gather_v"])
def test_an_overlap_where_lengths_are_found_out(collective):
    """Of one rank; all raise, and go on."""

    def body(comm):
        out = np.zeros(4)
        x = out[1:3] if comm.rank == 0 else np.ones(2)
        with pytest.raises(cc.ArrayError, match="x overlaps out on rank 0"):
            getattr(comm, collective)(x, out=out)
        own = out[2 * comm.rank : 2 * comm.rank + 2]
        own[...] = comm.rank
        assert comm.all_gather_v(own, out=out).tolist() == [0, 0, 1, 1]
        return True

    assert cc.run_threads(2, body, timeout=20) == [True] * 2


@pytest.mark.parametrize("collective", ["all_gather_v", "gather_v"])
def test_rows_that_differ_where_lengths_are_found_out(collective):
    """As where they are given: all hear of it, whoever has an out."""

    def body(comm):
        x = np.ones((2, 2 + comm.rank))
        out = {"out": np.ones((4, 2))} if comm.rank == 0 else {}
        with pytest.raises(cc.MismatchError, match="ranks disagree"):
            getattr(comm, collective)(x, **out)
        return True

    assert cc.run_threads(2, body, timeout=20) == [True] * 2


@pytest.mark.parametrize("counts", [[1 << 62, 2], [1 << 60, 2], [1 << 70, 1]])
def test_more_than_any_memory_holds(counts):
    def body(comm):
        for call in (
            lambda: comm.gather_v(np.ones((2, 8)), 0, counts),
            lambda: comm.gather_v(np.ones((2, 8)), 0, counts, algorithm="direct_one_shot"),
            lambda: comm.scatter_v(None, counts, 0, out=np.ones((2, 8))),
        ):
            if comm.rank == 1:
                with pytest.raises(ValueError, match="more than any memory holds"):
                    call()
        assert comm.all_reduce(np.ones(1))[0] == 2

    cc.run_threads(2, body, timeout=20)
