"""Any sequence of calls: hypothesis draws worlds, nodes, parts and calls, runs them on ranks that
are threads, and compares every result with reference.py. The same are drawn in each run.
"""

from __future__ import annotations

import cases
import reference
from cases import Case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import collectives as cc
from collectives.config import COLLECTIVES

bounded = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
# Small counts, those around the limits of the ways to move data, and any.
counts = st.one_of(
    st.integers(0, 20),
    st.sampled_from([63, 64, 65, 143, 144, 145, 287, 288, 289, 8191, 8193, 32769, 131_073]),
    st.integers(0, 20_000),
)


@st.composite
def call_on(draw, n, nodes):
    """One call that n ranks on these nodes can make."""
    collective = draw(st.sampled_from(COLLECTIVES))
    names = [name for name, c in cases.registry(n, nodes) if c == collective]
    algorithm = draw(st.sampled_from([None, *names]))
    if collective == "barrier":
        return Case(collective, how=draw(st.sampled_from(["blocking", "async"])))
    dtype, op = draw(st.sampled_from(reference.PAIRS))
    reduces = collective in reference.REDUCING
    order = draw(st.sampled_from([None, "rank"])) if reduces else None
    return Case(
        collective,
        algorithm,
        dtype,
        op if reduces else "sum",
        count=draw(counts),
        root=draw(st.integers(0, n - 1)) if collective in cases.ROOTED else 0,
        order=order,
        place=draw(st.sampled_from(["in", "out", "new"])),
        how=draw(st.sampled_from(["blocking", "blocking", "async", "group"])),
        v=collective in cases.VARIANTS
        and draw(st.booleans())
        and not cases.forwards(algorithm, collective, n),
        seed=draw(st.integers(0, 1000)),
        data="random" if order == "rank" else "exact",
    )


@st.composite
def programs(draw):
    """A world, how it is split, and what the whole and each part do in turn."""
    n = draw(st.integers(1, 6))
    nodes = sorted(draw(st.lists(st.integers(0, 2), min_size=n, max_size=n)))
    nodes = [sorted(set(nodes)).index(node) for node in nodes]
    colors = draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))
    keys = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    whole = draw(st.lists(call_on(n, nodes), min_size=1, max_size=6))
    parts = {}
    for color in set(colors):
        members = sorted((r for r in range(n) if colors[r] == color), key=lambda r: (keys[r], r))
        inner = [nodes[r] for r in members]
        inner = [list(dict.fromkeys(inner)).index(node) for node in inner]
        calls = draw(st.lists(call_on(len(members), inner), min_size=1, max_size=3))
        parts[color] = members, inner, calls
    return n, nodes, colors, keys, whole, parts


@bounded
@given(programs())
def test_any_sequence_of_calls(program):
    n, nodes, colors, keys, whole, parts = program

    def body(comm):
        color = colors[comm.rank]
        members, inner, calls = parts[color]
        part = comm.split(color, keys[comm.rank])
        assert (part.rank, part.size) == (members.index(comm.rank), len(members))
        assert part.nodes == inner
        for i in range(max(len(whole), len(calls))):
            cases.run_cases(comm, whole[i : i + 1])
            cases.run_cases(part, calls[i : i + 1])
        part.close()
        return True

    assert all(cc.run_threads(n, body, nodes=nodes, timeout=60))


@st.composite
def queues(draw):
    n = draw(st.integers(2, 4))
    calls = draw(st.lists(call_on(n, [0] * n), min_size=2, max_size=12))
    sums = [c._replace(collective="all_reduce", algorithm=None, v=False, root=0) for c in calls]
    return n, [c for c in sums if c.op != "premul_sum"], draw(st.randoms(use_true_random=False))


@bounded
@given(queues())
def test_queued_calls_waited_for_in_any_order(drawn):
    n, calls, random = drawn
    order = list(range(len(calls)))
    random.shuffle(order)

    def body(comm):
        works = []
        for case in calls:
            x = cases.make_input(case, comm.rank, n)
            works.append(comm.all_reduce(x, case.op, order=case.order, async_op=True))
        for i in order:
            got, wanted = works[i].wait(30), cases.expected(calls[i], n)[comm.rank]
            if calls[i].op == "prod" and got.dtype.kind == "c":
                got, wanted = got + 0, wanted + 0
            assert not cases.difference(got, wanted), calls[i]
        return True

    assert all(cc.run_threads(n, body, timeout=60))


@st.composite
def mailboxes(draw):
    """Messages (source, destination, tag, count), and an order of receiving for each rank."""
    n = draw(st.integers(1, 4))
    message = st.tuples(
        st.integers(0, n - 1), st.integers(0, n - 1), st.integers(0, 2), st.integers(0, 90_000)
    )
    messages = draw(st.lists(message, max_size=12))
    return n, messages, draw(st.permutations(range(len(messages))))


@bounded
@given(mailboxes())
def test_messages_arrive_once_and_in_order(drawn):
    """Of equal source and tag in the order of sending, else in the order of asking."""
    n, messages, order = drawn

    def body(comm):
        me = comm.rank
        sent = [
            comm.send(cases.any_bytes(i, count, "uint8", 0), d, tag, async_op=True)
            for i, (s, d, tag, count) in enumerate(messages)
            if s == me
        ]
        # The k-th receive from a source with a tag gets the k-th message sent so.
        lines = {}
        for i, (s, d, tag, _) in enumerate(messages):
            if d == me:
                lines.setdefault((s, tag), []).append(i)
        received = []
        for j in order:
            s, d, tag, _ = messages[j]
            if d == me:
                i = lines[s, tag].pop(0)
                out = cases.Guarded(messages[i][3], reference.DTYPES["uint8"], j)
                received.append((i, out, comm.recv(out.array, s, tag, async_op=True)))
        for i, out, work in reversed(received):
            work.wait(30)
            assert not cases.difference(
                out.array, cases.any_bytes(i, messages[i][3], "uint8", 0)
            ), messages[i]
            assert out.is_intact()
        for work in sent:
            work.wait(30)
        return True

    assert all(cc.run_threads(n, body, timeout=60))
