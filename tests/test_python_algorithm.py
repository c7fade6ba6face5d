"""Algorithms written in Python: registered, they run on every engine like those of the core."""

from __future__ import annotations

import cases
import launch
import numpy as np
import pytest

import collectives as cc
from collectives import Transfer


@pytest.fixture
def register():
    """collectives.algorithm whose registrations end with the test."""
    names = []

    def start(collective, **more):
        def keep(rounds):
            cc.algorithm(collective, **more)(rounds)
            names.append(more.get("name") or rounds.__name__)
            return rounds

        return keep

    yield start
    for name in set(names):
        cc.unregister(name)


def my_ring(n):
    """A ring: reduce-scatter, then all-gather."""
    for i in range(n - 1):
        yield [Transfer(r, (r + 1) % n, chunk=(r - i) % n, reduce=True) for r in range(n)]
    for i in range(n - 1):
        yield [Transfer(r, (r + 1) % n, chunk=(r + 1 - i) % n) for r in range(n)]


def my_neighbours(n):
    """Neighbours exchange a chunk, in a circle; then the others bring theirs, and get it back.

    Each receives last from the one whose message it sends from where it receives first.
    """
    if n == 1:
        return
    around = [(r, (r + 1) % n) for r in range(n)]
    yield [Transfer(t, s, chunk=s, reduce=True) for s, t in around] + [
        Transfer(s, t, chunk=s, reduce=True) for s, t in around
    ]
    for d in range(2, n):
        yield [Transfer((r + d) % n, r, chunk=r, reduce=True) for r in range(n)]
    if n > 2:
        yield [Transfer(r, (r + d) % n, chunk=r) for d in range(1, n) for r in range(n)]


def my_tree(n, root=0):
    """A binomial tree from the root."""
    reached = 1
    while reached < n:
        yield [
            Transfer((r + root) % n, (r + reached + root) % n, 0)
            for r in range(min(reached, n - reached))
        ]
        reached *= 2


def my_tree_from_zero(n):
    """The same, written for root 0 only."""
    yield from my_tree(n)


def my_pairwise(n):
    """Each block goes straight to its rank."""
    for d in range(1, n):
        yield [Transfer(r, (r + d) % n, chunk=r * n + (r + d) % n) for r in range(n)]


def my_funnel(n):
    """Everything to the root at once."""
    yield [Transfer(r, 0, chunk=r) for r in range(1, n)]


def my_halves(n):
    """The same, each block in two chunks."""
    yield [Transfer(r, 0, chunk=2 * r + half) for r in range(1, n) for half in range(2)]


def my_halves_back(n):
    """And back."""
    yield [Transfer(0, r, chunk=2 * r + half) for r in range(1, n) for half in range(2)]


WRITTEN = [
    (my_ring, "all_reduce"),
    (my_neighbours, "all_reduce"),
    (my_tree, "broadcast"),
    (my_tree_from_zero, "broadcast"),
    (my_pairwise, "all_to_all"),
    (my_funnel, "gather"),
]


@pytest.mark.parametrize("n", [2, 3, 4, 7, 16])
@pytest.mark.parametrize(("rounds", "collective"), WRITTEN, ids=lambda p: getattr(p, "__name__", p))
def test_it_runs_on_threads(register, rounds, collective, n):
    register(collective)(rounds)
    name = rounds.__name__
    assert (name, collective) in cases.registry(n)  # so all tests of the registry run it
    counts = (0, 1, 5, 65, 289, 4099, 70_000)
    cases.on_threads(n, cases.sweep(n, [(name, collective)], counts))


def test_it_runs_on_every_root_and_node(register):
    register("broadcast")(my_tree_from_zero)
    register("broadcast", name="tree")(my_tree)
    for n, nodes in ((3, (0, 0, 1)), (5, None)):
        cases.on_threads(
            n,
            [
                cases.Case("broadcast", name, count=400, root=root, seed=root)
                for name in ("tree", "my_tree_from_zero")
                for root in range(n)
            ],
            nodes,
        )
    register("gather")(my_halves)
    register("scatter")(my_halves_back)
    halves = (("gather", "my_halves"), ("scatter", "my_halves_back"))
    cases.on_threads(
        3, [cases.Case(c, name, count=400, root=r, seed=r) for c, name in halves for r in range(3)]
    )


def test_it_is_no_part_of_a_composition(register):
    register("all_reduce")(my_ring)
    for name in ("hierarchical(ring, my_ring)", "hierarchical(my_ring,ring)"):
        with pytest.raises(cc.UnsupportedError, match="my_ring is written in Python"):
            cc.schedule(name, "all_reduce", 4, node=[0, 0, 1, 1])


def test_order_rank_holds_for_it_too(register):
    register("all_reduce")(my_ring)
    found = [
        cases.Case("all_reduce", "my_ring", dtype, count=999, order="rank", data="random", seed=n)
        for n, dtype in enumerate(["float32", "bfloat16", "float64"])
    ]
    cases.on_threads(5, found)


def none_at_all(n):
    """Has no yield."""


def a_transfer_without_a_round(n):
    """Where a list is meant."""
    yield [Transfer(0, 1, 0, True)]
    yield Transfer(1, 0, 0)


def names_for_ranks(n):
    """Where numbers are meant."""
    yield [Transfer("0", "1", 0)]


def a_huge_chunk(n):
    """Larger than the core's numbers."""
    yield [Transfer(0, 1, -(1 << 40))]


@pytest.mark.parametrize(
    ("collective", "chunks", "words"),
    [
        ("all_gather", 2.5, "chunks= says 2.5, which is no number of chunks"),
        ("all_gather", None, "chunks= says None, which is no number of chunks"),
        ("all_gather", 0, "there must be at least one chunk"),
        ("all_gather", 1 << 40, "1099511627776 is too large"),
        ("all_to_all", 9, "chunks= says 9, and there are 4, one for each pair of ranks"),
        ("all_to_all", 2.5, "chunks= says 2.5, which is no number of chunks"),
    ],
)
def test_a_wrong_number_of_chunks_is_told(register, collective, chunks, words):
    def exchange(n):
        yield [Transfer(0, 1, 1), Transfer(1, 0, 2)]

    register(collective, chunks=lambda n: chunks)(exchange)
    with pytest.raises(cc.ScheduleError, match=words):
        cc.schedule("exchange", collective, 2)


@pytest.mark.parametrize(
    ("rounds", "words"),
    [
        (a_huge_chunk, "1099511627776 is too large for a rank or a chunk"),
        (none_at_all, "it returned None, and must yield rounds.*is there a yield in it"),
        (
            a_transfer_without_a_round,
            r"yielded Transfer\(src=1.*as round 1, which is no list of Tr",
        ),
        (names_for_ranks, "as round 0, which is no list of Transfer.* with integers"),
    ],
)
def test_what_is_no_round_is_told_with_the_name(register, rounds, words):
    register("all_reduce")(rounds)

    def body(comm):
        with pytest.raises(cc.ScheduleError, match=f"{rounds.__name__}, all_reduce.*{words}"):
            comm.all_reduce(np.ones(4), algorithm=rounds.__name__)
        return comm.all_reduce(np.ones(1))[0]

    assert cc.run_threads(2, body, timeout=20) == [2, 2]


def test_it_runs_in_processes():
    launch.run(3, "written.py", timeout=60).expect(status=0)


@pytest.mark.mpi
@pytest.mark.parametrize("launcher", ["openmpi", "mpich"])
def test_it_runs_over_mpi(launcher):
    env = {"COLLECTIVES_TRANSPORT": "mpi"}
    launch.run(3, "written.py", launcher=launcher, env=env, timeout=60).expect(status=0)


def test_it_is_listed_until_it_is_taken_back(register):
    before = {info.name for info in cc.algorithms()}
    cc.algorithm("all_reduce", when="for tests", source="this file")(my_ring)
    try:
        info = next(info for info in cc.algorithms() if info.name == "my_ring")
        assert info.summary == "A ring: reduce-scatter, then all-gather."
        assert (info.when, info.source) == ("for tests", "this file")
        assert "my_ring" in [i.name for i in cc.algorithms("all_reduce")]
        assert "my_ring" not in [i.name for i in cc.algorithms("broadcast")]
        plan = cc.schedule("my_ring", "all_reduce", 4)
        assert (plan.nranks, plan.nchunks, len(plan.rounds)) == (4, 4, 6)
        assert plan.cost()["sent_max"] == pytest.approx(2 * 3 / 4)
        assert plan.draw()
    finally:
        cc.unregister("my_ring")
    assert {info.name for info in cc.algorithms()} == before

    def body(comm):
        with pytest.raises(ValueError, match="unknown algorithm 'my_ring'"):
            comm.all_reduce(np.ones(3), algorithm="my_ring")

    cc.run_threads(2, body, timeout=20)
    with pytest.raises(ValueError, match="my_ring"):
        cc.unregister("my_ring")


def broken_ring(n):
    """One transfer of the last round goes to the wrong chunk."""
    *right, last = my_ring(n)
    yield from right
    yield [last[0]._replace(chunk=(last[0].chunk + 1) % n), *last[1:]]


def twice(n):
    """Reduces a contribution into a chunk that has it already."""
    yield [Transfer(1, 0, 0, reduce=True)]
    yield [Transfer(1, 0, 0, reduce=True)]


def unheld(n):
    """Sends a chunk that its rank does not have."""
    yield [Transfer(1, 2, 0)]


def lost(n):
    """Never reaches the last rank."""
    yield [Transfer(0, r, 0) for r in range(1, n - 1)]


def outside(n):
    """Names a rank that does not exist."""
    yield [Transfer(0, n, 0)]


@pytest.mark.parametrize(
    ("rounds", "collective", "says"),
    [
        (broken_ring, "all_reduce", "round 5|rank 1.*chunk"),
        (twice, "all_reduce", "round 1.*1 -> 0|round 1.*rank 1.*rank 0|round 1.*from 1 to 0"),
        (unheld, "broadcast", "round 0.*1 -> 2|round 0.*rank 1.*rank 2|round 0.*rank 1"),
        (lost, "broadcast", "rank 3"),
        (outside, "broadcast", "round 0.*4"),
    ],
    ids=lambda p: getattr(p, "__name__", ""),
)
def test_a_broken_one_is_refused(register, rounds, collective, says):
    """With the round and the transfer, on every rank, before anything is sent."""
    register(collective)(rounds)
    with pytest.raises(cc.ScheduleError, match=says):
        cc.schedule(rounds.__name__, collective, 4).verify()

    def body(comm):
        x = np.full(9, comm.rank)
        with pytest.raises(cc.ScheduleError, match=says):
            getattr(comm, collective)(x, algorithm=rounds.__name__)
        assert (x == comm.rank).all()
        cases.check(comm, cases.Case("all_reduce"))

    assert cc.run_threads(4, body, timeout=20) == [None] * 4


def test_what_it_supports_is_asked(register):
    register("all_reduce", supports=lambda n: n % 2 == 0 or "an even number of ranks, please")(
        my_ring
    )

    def body(comm):
        if comm.size == 2:
            return comm.all_reduce(np.ones(3), algorithm="my_ring").sum()
        with pytest.raises(cc.UnsupportedError, match="an even number of ranks, please"):
            comm.all_reduce(np.ones(3), algorithm="my_ring")
        return None

    assert cc.run_threads(2, body, timeout=20) == [6.0, 6.0]
    assert cc.run_threads(3, body, timeout=20) == [None] * 3
    assert ("my_ring", "all_reduce") not in cases.registry(3)


def test_names_of_the_core_are_taken():
    with pytest.raises(ValueError, match="'ring' in the core already; give yours another name="):
        cc.algorithm("all_reduce", name="ring")(my_ring)


def test_an_algorithm_for_several_collectives(register):
    register("all_reduce", name="mine")(my_ring)
    register("broadcast", name="mine")(my_tree)
    assert [c for name, c in cases.registry(4) if name == "mine"] == ["all_reduce", "broadcast"]
    cases.on_threads(4, cases.sweep(4, [("mine", "all_reduce"), ("mine", "broadcast")], (300,)))


def test_the_example_of_the_design():
    """A second definition under a name replaces the first, also in communicators that ran it."""

    def backwards(n):
        for i in range(n - 1):
            yield [Transfer(r, (r - 1) % n, chunk=(r + i) % n, reduce=True) for r in range(n)]
        for i in range(n - 1):
            yield [Transfer(r, (r - 1) % n, chunk=(r + i - 1) % n) for r in range(n)]

    try:
        for rounds in (my_ring, backwards):
            cc.algorithm("all_reduce", name="turning")(rounds)
            cases.on_threads(4, cases.sweep(4, [("turning", "all_reduce")], (300,)))
    finally:
        cc.unregister("turning")


def test_ranks_with_different_schedules_of_one_name(register):
    """One that depends on the process is found by the first call, before anything is written."""
    turn = iter(range(100))

    def shuffled(n):
        k = next(turn) % 2
        yield [Transfer(0, r, k) for r in range(1, n)]
        yield [Transfer(0, r, 1 - k) for r in range(1, n)]

    register("broadcast", chunks=lambda n: 2)(shuffled)

    def body(comm):
        for rank in range(2):  # each makes its own, in turn
            if comm.rank == rank:
                cc.schedule("shuffled", "broadcast", 2)
            comm.barrier()
        x = np.full(4, comm.rank)
        with pytest.raises(cc.MismatchError, match=r"algorithm=shuffled#\w{8}.*shuffled#\w{8}"):
            comm.broadcast(x, algorithm="shuffled")
        assert (x == comm.rank).all()
        assert comm.all_reduce(np.ones(1))[0] == 2

    cc.run_threads(2, body, timeout=20)


@pytest.mark.parametrize(
    "name",
    [
        "auto",
        "a,b",
        "a(b)",
        "a b",
        "a#b",
        "2a",
        "-a",
        "ä" * 33,
        *(f"a{letter}b" for letter in ":;=\0\x1b"),
    ],
)
def test_names_that_none_could_call(name):
    with pytest.raises(ValueError, match="cannot be called"):
        cc.algorithm("broadcast", name=name)(lambda n: [])


@pytest.mark.parametrize("rank", [-1, 4, 1 << 20])
def test_programs_of_ranks_that_there_are_not(rank):
    with pytest.raises(ValueError, match=r"rank must be one of 0\.\.3"):
        cc.schedule("ring", "all_reduce", 4).lowered(rank)
    with pytest.raises(ValueError, match="order must be"):
        cc.schedule("ring", "all_reduce", 4).lowered(0, "any other")


@pytest.mark.parametrize("value", [4.0, "4", None])
@pytest.mark.parametrize("name", ["nranks", "root", "node"])
def test_schedules_are_of_whole_numbers(name, value):
    given = {"nranks": 2, "root": 0, "node": [0, 0]}
    given[name] = [value, 0] if name == "node" else value
    with pytest.raises(TypeError, match=f"{name} must be a whole number, not {value!r}"):
        cc.schedule("binomial_tree", "broadcast", **given)


@pytest.mark.parametrize("name", ["nranks", "root", "node"])
def test_schedules_are_of_numbers_that_the_core_has(name):
    given = {"nranks": 2, "root": 0, "node": [0, 0]}
    given[name] = [10**10, 0] if name == "node" else 10**10
    with pytest.raises(ValueError, match=f"{name} is 10000000000, and must not be more than"):
        cc.schedule("binomial_tree", "broadcast", **given)
    with pytest.raises(ValueError, match="nranks is 10000000000"):
        cc.algorithms("all_reduce", 10**10)


@pytest.mark.parametrize("collective", [None, 3])
def test_schedules_are_of_a_collective(collective):
    with pytest.raises(TypeError, match=f"collective must be a name .* not {collective!r}"):
        cc.schedule("ring", collective, 4)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: cc.algorithm(lambda n: []), r'write @algorithm\("all_reduce"\)'),
        (lambda: cc.algorithm(3), "collective must be a name"),
        (lambda: cc.algorithm("all_reduce", name=5), "name must be a name of your algorithm"),
        (lambda: cc.algorithm("all_reduce", chunks=3), "chunks must be a function"),
        (lambda: cc.algorithm("all_reduce", supports="all"), "supports must be a function"),
        (lambda: cc.algorithm("all_reduce", supports=None), "supports must be a function"),
        (lambda: cc.algorithm("all_reduce", name="x")(7), "is a function that yields rounds"),
        (lambda: cc.algorithms(3), "collective must be a name"),
        (lambda: cc.schedule(3, "all_reduce", 3), "an algorithm must be a name"),
        (lambda: cc.schedule("ring", "all_reduce", 3, node=3), "node must be a list of the node"),
        (lambda: cc.unregister(3), "an algorithm must be a name"),
        (lambda: cc.schedule("ring", "all_reduce", 3).draw(None), "format must be 'text' or 'svg'"),
        (lambda: cc.schedule("ring", "all_reduce", 3).lowered("x"), "rank must be a whole number"),
    ],
)
def test_arguments_of_other_types(call, words):
    with pytest.raises(TypeError, match=words):
        call()


def test_no_algorithm_serves_no_ranks():
    assert cc.algorithms("all_reduce", 0) == []
    with pytest.raises(ValueError, match="order must be 'any' or 'rank', not None"):
        cc.schedule("ring", "all_reduce", 3).lowered(0, order=None)


def test_a_negative_chunk_is_named(register):
    def one(n):
        yield [Transfer(0, 1, -1, True)]

    register("all_reduce", name="negative_chunk")(one)
    with pytest.raises(cc.ScheduleError, match=r"round 0.*chunk -1"):
        cc.schedule("negative_chunk", "all_reduce", 2)


@pytest.mark.parametrize(
    ("transfer", "words"),
    [
        (
            Transfer(-1, 0, 0),
            "transfer -1 -> 1 of chunk 1 is wrong: rank -1 is out of range 0 to 2",
        ),
        (Transfer(3, 0, 0), "transfer 3 -> 1 of chunk 1 is wrong: rank 3 is out of range 0 to 2"),
        (Transfer(1, 0, -1), "transfer 2 -> 1 of chunk -1 is wrong: chunk -1 is out of range 0"),
    ],
)
def test_what_is_out_of_range_is_so_for_every_root(register, transfer, words):
    def astray(n):
        yield [Transfer(r, 0, chunk=r) for r in range(1, n)]
        yield [transfer]

    register("gather")(astray)
    with pytest.raises(cc.ScheduleError, match=words):
        cc.schedule("astray", "gather", 3, root=1)
