"""The simulator against what can be worked out by hand: the cost model, sharing, pipelines,
symmetry.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from collectives import _core, schedule, simulate
from collectives.errors import ScheduleError, UnsupportedError
from collectives.schedule import why_unsupported
from collectives.simulate import simulator, traffic
from collectives.simulate.topology import Device, Engine, Fault, Link, Topology
from collectives.tuning import Tuner

GB = 1e9
ALPHA, BETA, GAMMA = 2e-6, 1 / (10 * GB), 1 / (40 * GB)
WHOLE = Engine(slice_bytes=1e18, lanes=1, slots=4)  # one segment


def flat(ranks, *, engine=WHOLE, combine=0.0, faults=(), latency=ALPHA / 2, message=0.0):
    """One GPU a node, all on one switch: each has a link of 1 / BETA."""
    return Topology(
        "flat",
        ranks,
        (1,),
        (Device("gpu"), Device("switch", "all")),
        (Link("wire", "gpu", "switch", 1 / BETA, latency, message),),
        combine,
        engine=engine,
        faults=tuple(faults),
        file="flat.yaml",
    )


def nodes_of(nodes, gpus, *, spread=0.0, engine=None):
    """Nodes on switches, a NIC for each GPU, all in one fabric; `spread`: a tier of pairs."""
    links = [
        Link("inside", "gpu", "switch", 100 * GB, 5e-7, 1e-8),
        Link("cable", "gpu", "fabric", 10 * GB, 1e-6, 5e-8),
    ]
    devices = [Device("gpu"), Device("switch", "node"), Device("fabric", "all")]
    if spread:
        devices.insert(2, Device("leaf", "node", 2))
        links[1] = Link("cable", "gpu", "leaf", 10 * GB, 1e-6, 5e-8)
        links.append(Link("uplink", "leaf", "fabric", 0, 2e-7, 0, spread))
    return Topology(
        "nodes",
        nodes,
        (gpus,),
        tuple(devices),
        tuple(links),
        200 * GB,
        engine=engine or Engine(64 << 10, 2, 4),
        file="nodes.yaml",
    )


# ---- against the cost model ----------------------------------------------------------------------

SYMMETRIC = ("ring", "direct_one_shot", "direct_two_shot")
# For others the ranks do not all do alike, or a rank's program has a message wait that needs not.
POWERS = ("halving_doubling", "recursive_doubling", "bruck", "pat")


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_gather", "all_to_all"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8, 16])
def test_equals_the_cost_model_where_ranks_do_alike(collective, ranks):
    """steps · alpha + sent · beta + combined · gamma, to the last digit."""
    names = SYMMETRIC + (POWERS if ranks in (2, 4, 8, 16) else ())
    checked = 0
    for name in names:
        if why_unsupported(name, collective, ranks):
            continue
        cost = schedule(name, collective, ranks).cost()
        nbytes = 1 << 20
        expected = (
            cost["steps"] * ALPHA
            + cost["sent_max"] * nbytes * BETA
            + cost["reduced_max"] * nbytes * GAMMA
        )
        outcome = simulate.simulate(name, collective, nbytes, flat(ranks, combine=1 / GAMMA))
        assert outcome.steps == cost["steps"], name
        assert outcome.seconds == pytest.approx(expected, rel=1e-9), name
        checked += 1
    assert checked >= 1


@pytest.mark.parametrize("ranks", [2, 3, 5, 6, 8, 9])
def test_counts_the_steps_that_the_cost_model_counts(ranks):
    checked = 0
    for name in {a["name"] for a in _core.algorithms()} - {"hierarchical"}:
        for collective in _core.collectives:
            if why_unsupported(name, collective, ranks):
                continue
            steps = schedule(name, collective, ranks).cost()["steps"]
            assert simulate.simulate(name, collective, 1024, flat(ranks)).steps == steps, name
            checked += 1
    assert checked >= 10


@pytest.mark.parametrize("ranks", [2, 5, 8, 13])
def test_broadcast_down_a_chain_pipelines(ranks):
    """K segments over n - 1 hops: the last one leaves after K turns and passes n - 2 more hops."""
    segments, nbytes = 6, 6_000_000
    engine = Engine(nbytes / segments, 1, 4)
    outcome = simulate.simulate("ring", "broadcast", nbytes, flat(ranks, engine=engine))
    hop = nbytes / segments * BETA
    assert outcome.segments == segments
    assert outcome.seconds == pytest.approx((segments + ranks - 2) * hop + (ranks - 1) * ALPHA)


def test_one_slot_stops_the_sender():
    """With one slot the next segment leaves only after the one before was taken out."""
    nbytes, segments = 4_000_000, 4
    hop = nbytes / segments * BETA
    slow = simulate.simulate(
        "ring", "broadcast", nbytes, flat(2, engine=Engine(nbytes / segments, 1, 1))
    )
    assert slow.seconds == pytest.approx(segments * (hop + ALPHA))
    fast = simulate.simulate(
        "ring", "broadcast", nbytes, flat(2, engine=Engine(nbytes / segments, 1, 2))
    )
    assert fast.seconds == pytest.approx(segments * hop + ALPHA)


def test_a_message_occupies_its_link():
    """n - 1 messages of nothing much take n - 1 times `message`."""
    outcome = simulate.simulate("direct_one_shot", "all_reduce", 1, flat(9, message=1e-6))
    assert outcome.seconds == pytest.approx(ALPHA + 8 * (1e-6 + BETA))


def test_barrier_costs_its_steps():
    outcome = simulate.simulate("recursive_doubling", "barrier", 0, flat(8))
    assert outcome.seconds == pytest.approx(3 * ALPHA)
    assert outcome.bottleneck == "-"


def test_a_late_rank_delays_all():
    late = Fault("", 2, 0, late_s=1e-3)
    outcome = simulate.simulate("recursive_doubling", "all_reduce", 8, flat(4, faults=[late]))
    assert outcome.seconds == pytest.approx(1e-3 + 2 * (ALPHA + 8 * BETA))


def test_a_slow_link_sets_the_pace_of_a_ring():
    ranks, nbytes = 6, 60_000_000
    slow = Fault("wire", 3, 0, slower=4)
    outcome = simulate.simulate("ring", "all_reduce", nbytes, flat(ranks, faults=[slow], latency=0))
    assert outcome.seconds == pytest.approx(2 * (ranks - 1) * nbytes / ranks * BETA * 4)
    assert outcome.bottleneck.startswith("wire of gpu 3")


def test_a_slow_gpu_combines_slowly():
    ranks, nbytes = 4, 4_000_000
    slow = Fault("", 0, 0, slower=8)
    outcome = simulate.simulate(
        "direct_two_shot", "reduce_scatter", nbytes, flat(ranks, combine=1 / GAMMA, faults=[slow])
    )
    share = (ranks - 1) / ranks * nbytes
    assert outcome.seconds == pytest.approx(ALPHA + share * BETA + 8 * share * GAMMA)


def test_a_slow_gpu_sends_its_messages_slowly():
    """Eight of them, each three times 1 us; those of others come sooner."""
    slow = Fault("", 0, 0, slower=3)
    topology = flat(9, message=1e-6, faults=[slow])
    outcome = simulate.simulate("direct_one_shot", "all_reduce", 1, topology)
    assert outcome.seconds == pytest.approx(ALPHA + 8 * (3e-6 + BETA), rel=1e-3)


@pytest.mark.parametrize("slow", [0, 1])
def test_a_slow_link_is_slow_both_ways(slow):
    """Up from the root, down to the other."""
    topology = flat(2, faults=[Fault("wire", slow, 0, slower=4)])
    outcome = simulate.simulate("ring", "broadcast", 1_000_000, topology)
    assert outcome.seconds == pytest.approx(ALPHA + 4 * 1_000_000 * BETA)


# ---- the core ------------------------------------------------------------------------------------


def core(messages, amounts, routes, capacity, ranks, **options):
    begin = np.cumsum([0, *(len(r) for r in routes)]).astype(np.int32)
    links = np.array([link for route in routes for link in route], np.int32)
    settings = {"segments": 1, "lanes": 1, "slots": 4, **options}
    return _core.simulate(
        messages=np.array(messages, np.int32).T,
        amounts=np.array(amounts, float).T,
        routes=(begin, links, np.zeros(len(routes))),
        capacity=np.array(capacity, float),
        combine_s_byte=np.zeros(ranks),
        late_s=np.zeros(ranks),
        **settings,
    )


def test_links_are_shared_max_min_fairly():
    """Link 0 of 10 and link 1 of 4 bytes a second; flows over 0, over both, over 1. The second and
    third get 2 each, the first what is left of link 0: 8. When the third is through, the second
    gets 4 and the first 6.
    """
    messages = [(0, 0, 1, 0, 0), (0, 2, 3, 0, 1), (0, 4, 5, 0, 2)]
    seconds, finish, _, _ = core(
        messages, [(20, 0, 1), (12, 0, 1), (4, 0, 1)], [[0], [0, 1], [1]], [10, 4], 6
    )
    third = 4 / 2
    second = third + (12 - 2 * third) / 4
    first = third + (20 - 8 * third) / 6
    assert finish[5] == pytest.approx(third)
    assert finish[3] == pytest.approx(second)
    assert finish[1] == pytest.approx(first)
    assert seconds == pytest.approx(max(first, second, third))


def test_a_weighted_message_stands_for_so_many():
    """Three equal messages and one of weight 3 leave a fourth sender the same share."""
    many = [(0, s, 4, 0, 0) for s in range(4)]
    _, finish, _, _ = core(many, [(6, 0, 1)] * 3 + [(4, 0, 1)], [[0]], [8], 5)
    few = [(0, 0, 2, 0, 0), (0, 1, 3, 0, 0)]
    _, again, _, _ = core(few, [(18, 0, 3), (4, 0, 1)], [[0]], [8], 4)
    assert max(finish) == pytest.approx(max(again)) == pytest.approx(22 / 8)
    assert again[3] == pytest.approx(4 / 2)


def test_waiting_for_ever_is_told():
    """Two ranks that each receive first: here, a message whose slot is never freed."""
    messages = [(0, 0, 1, 0, 0), (1, 0, 1, 0, 0), (1, 1, 0, 0, 0), (2, 1, 0, 0, 0)]
    core(messages, [(1, 0, 1)] * 4, [[0]], [1], 2, slots=1)
    backwards = [(0, 0, 1, 0, 0), (0, 1, 0, 0, 0), (0, 0, 1, 0, 0), (0, 1, 0, 0, 0)]
    with pytest.raises(ScheduleError, match=r"rank 0 waits for ever in round 0 for a slot.*0 -> 1"):
        core(backwards, [(1, 0, 1)] * 4, [[0]], [1], 2, slots=1)


@pytest.mark.parametrize(
    ("messages", "routes", "capacity"),
    [
        ([(0, 0, 9, 0, 0)], [[0]], [1]),
        ([(0, 0, 1, 0, 5)], [[0]], [1]),
        ([(0, 0, 1, 0, 0)], [[]], [1]),
        ([(0, 0, 1, 0, 0)], [[0]], [0]),
        ([(0, 0, 1, 0, 0)], [[7]], [1]),
        ([(1, 0, 1, 0, 0), (0, 0, 1, 0, 0)], [[0]], [1]),
    ],
)
def test_the_core_refuses_what_is_out_of_range(messages, routes, capacity):
    with pytest.raises(ValueError):
        core(messages, [(1, 0, 1)] * len(messages), routes, capacity, 2)


def test_every_algorithm_ends_on_every_layout():
    """Odd numbers of ranks, uneven nodes, every collective: each takes at least its bytes' time."""
    uneven = Topology(
        "uneven",
        3,
        (3, 2, 1),
        nodes_of(2, 2).devices,
        nodes_of(2, 2).links,
        file="uneven.yaml",
    )
    for topology in (uneven, nodes_of(1, 5), nodes_of(3, 2, spread=2.0), nodes_of(5, 1)):
        for collective in _core.collectives:
            names = simulate.candidates(collective, topology)
            assert names
            for name in names:
                outcome = simulate.simulate(name, collective, 300_001, topology)
                least = outcome.links[0].seconds if outcome.links else 0.0
                assert outcome.seconds >= least * (1 - 1e-9), (collective, name)
                assert 0 < outcome.seconds < 1


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 4), (2, 4), (3, 3), (5, 1)])
def test_what_is_chosen_there_is_compared(nodes, gpus):
    topology = nodes_of(nodes, gpus)
    tuner = Tuner(topology.nodes_of_ranks, one_region=nodes == 1)
    for collective in set(_core.collectives) - {"barrier"}:
        chosen = {choice.algorithm for choice in tuner.built_in(collective)}
        assert chosen <= set(simulate.candidates(collective, topology)), collective


def test_a_world_of_one_takes_no_time():
    assert simulate.simulate("ring", "all_reduce", 1 << 20, flat(1)).seconds == 0


# ---- shared links between nodes ------------------------------------------------------------------


def test_oversubscription_slows_what_crosses():
    """Four nodes of one GPU in pairs under leaves; all_to_all between pairs meets at the uplink."""
    free = nodes_of(4, 1, spread=1.0, engine=WHOLE)
    tight = nodes_of(4, 1, spread=4.0, engine=WHOLE)
    nbytes = 400_000_000
    fast = simulate.simulate("direct_two_shot", "all_to_all", nbytes, free)
    slow = simulate.simulate("direct_two_shot", "all_to_all", nbytes, tight)
    # Each sends nbytes / 4 to three others; four messages cross each uplink of 20 / 4 GB/s.
    assert fast.seconds == pytest.approx(3 * nbytes / 4 / (10 * GB), rel=1e-3)
    assert slow.seconds == pytest.approx(4 * nbytes / 4 / (5 * GB), rel=1e-3)
    assert "uplink" in slow.bottleneck


# ---- symmetry ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 8), (2, 4), (4, 2), (3, 3), (5, 1), (4, 8)])
def test_symmetry_equals_rank_by_rank(nodes, gpus):
    """Exactly, but for direct algorithms that combine over several nodes: within 5 %."""
    topology = nodes_of(nodes, gpus)
    checked = set()
    for collective in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all"):
        for name in simulate.candidates(collective, topology):
            for nbytes in (2048, 3_000_000):
                try:
                    one = simulate.simulate(name, collective, nbytes, topology, symmetric=True)
                except UnsupportedError:
                    continue
                all_ = simulate.simulate(name, collective, nbytes, topology, symmetric=False)
                exact = one.method == simulator.SYMMETRIC
                assert exact or "direct_" in name.rpartition(",")[2], name
                assert one.seconds == pytest.approx(all_.seconds, rel=1e-9 if exact else 0.05), (
                    name,
                    collective,
                    nbytes,
                )
                assert one.steps == all_.steps
                checked.add(name)
    assert {"ring", "direct_two_shot", "bruck"} <= checked


def test_symmetry_is_an_upper_bound_where_ways_differ():
    topology = nodes_of(4, 4, spread=1.0)
    name = "hierarchical(direct_two_shot, ring)"
    one = simulate.simulate(name, "all_reduce", 100_000, topology, symmetric=True)
    all_ = simulate.simulate(name, "all_reduce", 100_000, topology, symmetric=False)
    assert one.method == simulator.APPROXIMATE
    assert all_.seconds <= one.seconds <= all_.seconds * 1.2


def test_symmetry_takes_the_longest_way_wherever_it_leads():
    """Here the nearest other node is the farthest: over a leaf of 20 us, to others it is 2 us."""
    base = nodes_of(4, 2)
    devices = (*base.devices[:2], Device("leaf", "node", 2), base.devices[2])
    slow = Link("near", "gpu", "leaf", 10 * GB, 1e-5, 5e-8)
    topology = replace(base, devices=devices, links=(base.links[0], slow, base.links[1]))
    one = simulate.simulate("ring", "all_gather", 8, topology, symmetric=True)
    all_ = simulate.simulate("ring", "all_gather", 8, topology, symmetric=False)
    assert one.method == simulator.APPROXIMATE
    assert all_.seconds <= one.seconds


def test_symmetry_is_refused_where_there_is_none():
    tight = nodes_of(4, 2, spread=4.0)
    faulty = Topology(**{**vars(nodes_of(4, 2)), "faults": (Fault("cable", 1, 0, slower=2),)})
    for topology, why in ((tight, "never full"), (faulty, "faults")):
        with pytest.raises(UnsupportedError, match=why):
            simulate.simulate("ring", "all_reduce", 1 << 20, topology, symmetric=True)
    with pytest.raises(UnsupportedError, match=r"^binomial_tree .* does not do the same"):
        simulate.simulate("binomial_tree", "broadcast", 1, nodes_of(4, 2), symmetric=True)


def test_further_segments_are_extrapolated(monkeypatch):
    """What is left out after the pipeline has filled is as all segments give it."""
    topology = nodes_of(2, 4)
    for name in ("ring", "double_binary_tree", "hierarchical(direct_two_shot, ring)"):
        full = simulate.simulate(name, "all_reduce", 64 << 20, topology)
        assert not full.extrapolated and full.segments >= 64
        messages = simulate.Simulator(name, "all_reduce", topology).traffic.table.shape[1]
        monkeypatch.setattr(simulator, "MOST_MESSAGES", messages * 16)
        short = simulate.simulate(name, "all_reduce", 64 << 20, topology)
        monkeypatch.undo()
        assert short.extrapolated
        assert short.seconds == pytest.approx(full.seconds, rel=0.03), name


# ---- how large a schedule is ---------------------------------------------------------------------


@pytest.mark.parametrize(("nodes", "gpus"), [(60, 8), (13, 3), (100, 1), (6, 20)])
@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "broadcast"])
def test_sizes_of_schedules_are_foretold(nodes, gpus, collective):
    """Within a third, but for wide nodes, where the transfers may be fewer."""
    counts = [gpus] * nodes
    node = [rank // gpus for rank in range(nodes * gpus)]
    for name in simulate.candidates(collective, nodes_of(nodes, gpus)):
        core = schedule(name, collective, nodes * gpus, node=node)._core
        found = traffic.size_of(name, collective, counts)
        assert found.messages == pytest.approx(core.messages().shape[1], rel=0.35), name
        if gpus <= 8:
            assert found.transfers == pytest.approx(sum(map(len, core.rounds)), rel=0.35), name


def test_compositions_are_followed_above_two_thousand_ranks():
    """Their messages are few: 75,312 for 2,456 ranks."""
    counts = [8] * 307
    for name in ("halving_doubling", "double_binary_tree", "recursive_doubling"):
        composed = f"hierarchical(direct_two_shot, {name})"
        assert traffic.can_follow(composed, "all_reduce", counts), name
        assert traffic.size_of(composed, "all_reduce", counts).messages < 100_000
    assert not traffic.can_follow("ring", "all_reduce", counts)
    assert not traffic.can_follow("halving_doubling", "all_reduce", [8] * 12_500)


# ---- large worlds --------------------------------------------------------------------------------


def test_a_thousand_ranks_rank_by_rank():
    topology = simulate.load("dgx-h100", 128)
    for name in ("double_binary_tree", "recursive_doubling", "hierarchical(direct_two_shot, ring)"):
        outcome = simulate.simulate(name, "all_reduce", 1 << 20, topology)
        assert outcome.ranks == 1024 and outcome.method == simulator.SIMULATED


def test_a_hundred_thousand_ranks():
    topology = simulate.load("dgx-h100", 12_500)
    ring = simulate.simulate("ring", "all_reduce", 1 << 30, topology)
    assert ring.ranks == 100_000 and ring.method == simulator.SYMMETRIC
    # Of 2 (n - 1) steps each eighth crosses the network, which takes longest: 0.2 us for the
    # message, 2.7 us of latency.
    assert 199_998 / 8 * 2.9e-6 < ring.seconds < 1
    assert simulate.simulate("direct_two_shot", "all_reduce", 1 << 30, topology).steps == 2
    tree = simulate.simulate("double_binary_tree", "broadcast", 1 << 20, topology)
    assert tree.method == simulator.SIMULATED
    assert tree.steps <= 2 * math.ceil(math.log2(100_000))
    with pytest.raises(UnsupportedError, match="too large to follow rank by rank"):
        simulate.simulate("halving_doubling", "all_reduce", 1 << 20, topology)


@pytest.mark.parametrize(
    ("nbytes", "kind"), [(-5, ValueError), (1.5, TypeError), ("1M", TypeError)]
)
def test_sizes_that_are_none(nbytes, kind):
    with pytest.raises(kind, match=f"nbytes must be .* bytes, not {nbytes!r}"):
        simulate.simulate("ring", "all_reduce", nbytes, simulate.load("dgx-h100"))
