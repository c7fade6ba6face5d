"""`simulate training`: a step of training, against what can be worked out by hand."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from commands import run

from collectives import simulate
from collectives.errors import ConfigError, UnsupportedError
from collectives.simulate import traffic, training
from collectives.simulate.topology import Device, Engine, Fault, Link, Topology

pytest.importorskip("yaml", reason="topology files need PyYAML")

GB = 1e9


def lone(ranks, gbit, *, flops=1e15):
    """One GPU a node, with a NIC of so many Gb/s."""
    return Topology(
        "lone",
        ranks,
        (1,),
        (Device("gpu"), Device("fabric", "all")),
        (Link("nic", "gpu", "fabric", gbit * 1e9 / 8, 1e-6),),
        flops=flops,
        engine=Engine(4 << 20, 4, 4),
        file="lone.yaml",
    )


@pytest.mark.parametrize(("gbit", "seconds"), [(200, 1.1), (400, 0.56)])
def test_published_all_reduce_of_14_gb(gbit, seconds):
    """Gradients of 7e9 parameters in 16 bits over a ring of many nodes."""
    outcome = simulate.simulate("ring", "all_reduce", 14_000_000_000, lone(64, gbit))
    assert outcome.seconds == pytest.approx(seconds, rel=0.03)


def test_published_efficiency_of_one_node():
    """95-99 % on 8 GPUs on NVLink, with the slowest of them 2 % behind."""
    job = training.Job(params=7e9, jitter=0.01)
    step = training.step(job, simulate.load("dgx-h100"), 8, "ddp")
    assert 0.95 <= step.efficiency <= 0.99


def test_published_efficiency_of_a_thousand():
    """70-90 % at 1,000 GPUs: with ranks that vary by 5 %, and with shards to gather."""
    topology = simulate.load("dgx-h100")
    ddp = training.step(training.Job(params=7e9, jitter=0.05), topology, 1024, "ddp")
    assert 0.70 <= ddp.efficiency <= 0.90
    zero = training.step(training.Job(params=7e9, jitter=0.01), topology, 1024, "zero-1")
    assert 0.70 <= zero.efficiency <= 0.90


def test_one_bucket_is_exposed_in_full():
    """A single bucket is full when backward ends; n - 1 rounds twice over the wire."""
    job = training.Job(params=1e9, bucket_bytes=1e12, algorithm="ring")
    topology = lone(4, 400)
    step = training.step(job, topology, 4, "ddp")
    wire = 2 * 3 / 4 * 2e9 / (50 * GB)
    assert step.compute_s == pytest.approx(6 * 1e9 * 4096 / (1e15 * 0.5))
    assert step.exposed_s == pytest.approx(wire, rel=1e-3)
    assert step.seconds == pytest.approx(step.compute_s + step.exposed_s)


def test_buckets_hide_communication_and_what_cannot_be_hidden_stays():
    topology = lone(8, 400)
    job = training.Job(params=1e9)
    hidden = training.step(job, topology, 8, "ddp")
    after = training.step(training.Job(params=1e9, overlap=False), topology, 8, "ddp")
    assert after.exposed_s == pytest.approx(after.communication_s)
    assert hidden.exposed_s < after.exposed_s
    # Computing so short that the network is the limit: all but the first bucket's wait is exposed.
    tiny = training.Job(params=1e9, tokens=1)
    limited = training.step(tiny, topology, 8, "ddp")
    assert limited.exposed_s == pytest.approx(limited.communication_s, rel=0.02)


def test_shardings_send_what_they_should():
    """ZeRO-1 and 2 as much as DDP, ZeRO-3 1.5 times that (Rajbhandari et al., section 7)."""
    topology = lone(8, 100)
    job = training.Job(params=4e9, algorithm="ring", bucket_bytes=4e9 * 2 / 32)
    sent = {
        s: training.step(job, topology, 8, s).communication_s
        for s in ("ddp", "zero-1", "zero-2", "zero-3")
    }
    assert sent["zero-1"] == pytest.approx(sent["ddp"], rel=0.01)
    assert sent["zero-3"] == pytest.approx(1.5 * sent["ddp"], rel=0.01)
    more = training.Job(params=4e9, algorithm="ring", bucket_bytes=4e9 * 2 / 32, accumulate=4)
    for sharding in ("ddp", "zero-2"):  # once a step
        once = training.step(more, topology, 8, sharding)
        assert once.communication_s == pytest.approx(sent[sharding])
    two = training.step(replace(more, reduce_every="micro-batch"), topology, 8, "zero-2")
    assert two.communication_s == pytest.approx(sent["ddp"] * (4 + 1) / 2, rel=0.01)


def test_hybrid_keeps_gathering_within_the_node():
    topology = simulate.load("pcie-100gbe")
    job = training.Job(params=7e9)
    hybrid, zero = (training.step(job, topology, 64, s) for s in ("hybrid", "zero-3"))
    assert hybrid.exposed_s < zero.exposed_s * 0.7
    alone = training.step(job, topology, 8, "hybrid")
    assert alone.communication_s == pytest.approx(
        training.step(job, topology, 8, "zero-3").communication_s
    )


def test_a_straggler_holds_up_the_step():
    topology = lone(4, 400)
    slow = Topology(**{**vars(topology), "faults": (Fault("", 1, 0, slower=1.5),)})
    step = training.step(training.Job(params=1e9), slow, 4, "ddp")
    assert step.waiting_s == pytest.approx(0.5 * step.compute_s)


def test_one_gpu_is_all_efficient():
    for sharding in training.SHARDINGS:
        step = training.step(training.Job(params=1e9, jitter=0.1), lone(1, 400), 1, sharding)
        assert step.efficiency == pytest.approx(1)


def test_what_sums_are_off_by_is_not_exposed():
    topology = simulate.load("dgx-h100")
    for params in (7e9, 1.3e9, 7e10):
        for sharding in training.SHARDINGS[:4]:
            step = training.step(training.Job(params=params), topology, 1, sharding)
            assert step.exposed_s == 0.0, (params, sharding)


def test_training_command(capsys):
    status, out, err = run(
        capsys, "simulate", "training", "--params", "7e9", "--ranks", "8..64", "--sharding", "ddp",
        "--sharding", "hybrid",
    )  # fmt: skip
    assert status == 0, err
    rows = [line.split() for line in out.splitlines() if not line.startswith("#")]
    assert [(r[0], r[1]) for r in rows] == [
        (s, n) for s in ("ddp", "hybrid") for n in ("8", "16", "32", "64")
    ]
    shares = re.findall(r" (\d+\.\d) +[a-z_]{4}", out)
    assert len(shares) == len(rows) and all(0 < float(share) <= 100 for share in shares)
    assert "hierarchical(direct_two_shot, direct_two_shot)" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--params", "many"), "no positive number such as 7e9"),
        (("--params", "-1"), "no positive number"),
        (("--ranks", "12"), "12 ranks do not fill nodes of 8 GPUs"),
        (("--sharding", "zero-4"), "did you mean 'zero-"),
        (("--mfu", "0"), "mfu is 0.0"),
        (("--mfu", "2"), "not between 0 and 1"),
        (("--bucket", "25"), "has no unit"),
        (("--algorithm", "binomial_tree"), "nothing can do all_reduce"),
        (("--layers", "4", "--sharding", "ddp"), "--layers goes with zero-3 and hybrid"),
        (("--bucket", "1 MB", "--sharding", "zero-3"), "--bucket goes with ddp, zero-1 and zero-2"),
    ],
)
def test_training_says_what_is_wrong(capsys, arguments, message):
    status, _, err = run(capsys, "simulate", "training", *arguments)
    assert status == 2
    assert message in err


def test_training_needs_the_speed_of_gpus():
    with pytest.raises(ConfigError, match="does not say how fast its GPUs are"):
        training.step(training.Job(params=1e9), lone(2, 100, flops=0), 2, "ddp")


# ---- by hand -------------------------------------------------------------------------------------


def pair(*, layer_s, params=4e8, layers=4, **job):
    """Two ranks, and a job whose layers take `layer_s` forward, twice that backward. A layer of 200
    MB is gathered, or reduced and scattered, in 10 ms: half of it over 10 GB/s.
    """
    topology = replace(lone(2, 80), links=(Link("nic", "gpu", "fabric", 10 * GB),))
    tokens = 3 * layer_s * layers * topology.flops * 0.5 / (6 * params)
    return topology, training.Job(params, tokens, layers=layers, algorithm="ring", **job)


MOVED = 0.010


@pytest.mark.parametrize(("accumulate", "every"), [(1, "step"), (3, "step"), (3, "micro-batch")])
def test_layers_are_gathered_one_ahead(accumulate, every):
    """Computing dominates: only the first gathering and the last reduction are seen."""
    topology, job = pair(layer_s=0.1, accumulate=accumulate, reduce_every=every)
    reductions = accumulate if every == "micro-batch" else 1
    step = training.step(job, topology, 2, "zero-3")
    assert step.compute_s == pytest.approx(accumulate * 4 * 0.3)
    assert step.communication_s == pytest.approx(4 * (2 * accumulate + reductions) * MOVED)
    assert step.exposed_s == pytest.approx(2 * MOVED)
    assert step.algorithms == ("all_gather: ring", "reduce_scatter: ring")


def test_where_the_network_is_the_limit_it_never_rests():
    """Twelve calls of 10 ms, while layers take 4 and 8."""
    topology, job = pair(layer_s=0.004)
    step = training.step(job, topology, 2, "zero-3")
    assert step.communication_s == pytest.approx(12 * MOVED)
    assert step.seconds == pytest.approx(12 * MOVED)


@pytest.mark.parametrize("sharding", training.SHARDINGS)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_without_overlap_all_communication_is_exposed(sharding, accumulate):
    topology = replace(shared_nic(), nodes=2)
    job = training.Job(1e9, overlap=False, accumulate=accumulate)
    step = training.step(job, topology, 4, sharding)
    assert step.exposed_s == pytest.approx(step.communication_s)


@pytest.mark.parametrize(("ranks", "largest"), [(8, 1.4236), (64, 2.3437), (1000, 3.2414)])
def test_waiting_is_for_the_expected_largest_of_n(ranks, largest):
    """Against tables of the expected largest of n normal deviations (Harter 1961)."""
    topology, job = pair(layer_s=0.1, jitter=0.02)
    step = training.step(job, replace(topology, nodes=ranks), ranks, "ddp")
    assert step.waiting_s == pytest.approx(0.02 * largest * step.compute_s, rel=0.01)


def shared_nic(faults=()):
    """Two GPUs a node, joined by 100 GB/s, that share one NIC of 10 GB/s."""
    return Topology(
        "shared",
        2,
        (2,),
        (Device("gpu"), Device("switch", "node"), Device("nic", "node"), Device("fabric", "all")),
        (
            Link("inside", "gpu", "switch", 100 * GB),
            Link("pcie", "gpu", "nic", 1000 * GB),
            Link("cable", "nic", "fabric", 10 * GB),
        ),
        flops=1e15,
        engine=Engine(1e18, 1, 4),
        faults=tuple(faults),
        file="shared.yaml",
    )


@pytest.mark.parametrize(("accumulate", "every"), [(1, "step"), (3, "step"), (3, "micro-batch")])
def test_hybrid_reduces_between_nodes_over_a_shared_nic(accumulate, every):
    """One layer of 2 GB: halves of it move within a node; each of two GPUs has 5 GB/s of the NIC
    for an all_reduce of its half. That begins when all is computed and reduced within the node.
    """
    job = training.Job(
        1e9, 1e6, layers=1, accumulate=accumulate, reduce_every=every, algorithm="ring"
    )
    times = accumulate if every == "micro-batch" else 1
    step = training.step(job, shared_nic(), 4, "hybrid")
    moved, between = 1e9 / (100 * GB), 1e9 / (5 * GB)
    assert step.communication_s == pytest.approx(2 * accumulate * moved + times * (moved + between))
    assert step.exposed_s == pytest.approx(2 * moved + between)


@pytest.mark.parametrize(("sharding", "each"), [("ddp", 3), ("zero-1", 2), ("zero-2", 2)])
def test_gradients_are_reduced_in_the_last_micro_batch_alone(capsys, sharding, each):
    """Or in each, where that is asked for: under ZeRO what is gathered after the step is half."""
    topology, job = lone(4, 400), training.Job(1e9, algorithm="ring")
    one, more, every = (
        training.step(replace(job, **how), topology, 4, sharding).communication_s
        for how in ({}, {"accumulate": 3}, {"accumulate": 3, "reduce_every": "micro-batch"})
    )
    assert more == pytest.approx(one)
    assert every == pytest.approx(each * one, rel=1e-3)
    said = []
    for how in ((), ("--reduce-every", "micro-batch")):
        status, out, _ = run(
            capsys, "simulate", "training", "--params", "1e8", "--sharding", sharding,
            "--accumulate", "3", *how,
        )  # fmt: skip
        assert status == 0
        said.append(out)
    assert said[0] != said[1]


def test_training_refuses_an_unknown_time_to_reduce(capsys):
    with pytest.raises(ConfigError, match="known: 'step', 'micro-batch'"):
        training.step(training.Job(1e9, reduce_every="batch"), lone(2, 100), 2, "ddp")
    status, _, err = run(capsys, "simulate", "training", "--reduce-every", "micro-bath")
    assert status == 2
    assert "did you mean 'micro-batch'" in err


# ---- what a topology has -------------------------------------------------------------------------


def test_hybrid_goes_by_the_slowest_node():
    """A fault on any node: the same as on the first. Twelve calls of 2.5 ms take 10."""
    job = training.Job(1e9, layers=4)
    good, first, second = (
        training.step(job, shared_nic(faults), 4, "hybrid")
        for faults in ([], [Fault("inside", 0, 1, slower=4)], [Fault("inside", 1, 0, slower=4)])
    )
    assert second.communication_s == pytest.approx(first.communication_s)
    assert second.communication_s == pytest.approx(good.communication_s + 3 * 12 * 0.0025)


def railed(*faults):
    """Two GPUs a node, joined by 100 GB/s, each with a NIC of 10 GB/s."""
    devices = (Device("gpu"), Device("switch", "node"), Device("nic"), Device("fabric", "all"))
    return replace(shared_nic(faults), devices=devices)


@pytest.mark.parametrize(
    ("faults", "slower"),
    [
        ([Fault("cable", 1, 1, slower=4)], 4),
        ([Fault("cable", 0, 0, broken=True)], 2),  # both GPUs' halves go over the other NIC
        ([Fault("inside", 0, 0, slower=4)], 1),
    ],
)
def test_hybrid_goes_by_the_slowest_rail(faults, slower):
    """One layer of 2 GB: each rail reduces its half over NICs of 10 GB/s."""
    job = training.Job(1e9, 1e6, layers=1, algorithm="ring")
    step = training.step(job, railed(*faults), 4, "hybrid")
    moved = 1e9 / (100 * GB) * (4 if faults[0].link == "inside" else 1)
    assert step.communication_s == pytest.approx(3 * moved + slower * 1e9 / (10 * GB))


def test_the_only_nic_of_a_node_cannot_be_gone_round():
    broken = shared_nic([Fault("cable", 1, 0, broken=True)])
    with pytest.raises(UnsupportedError, match="no way is left"):
        training.step(training.Job(1e9, layers=1), broken, 4, "hybrid")


def test_nodes_may_be_listed():
    """As many GPUs on each: the same as one number."""
    job = training.Job(1e9, layers=4)
    one, listed = replace(shared_nic(), nodes=2), replace(shared_nic(), gpus=(2, 2))
    steps = [training.step(job, topology, 4, "hybrid") for topology in (one, listed)]
    assert steps[0] == steps[1]


UNEVEN = """\
name: uneven
gpus: [3, 2, 1]
flops: 1 TFLOP/s
devices: {switch: {per: all}}
links:
  - {name: wire, from: gpu, to: switch, bandwidth: 10 GB/s, latency: 1 us}
"""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--topology", "FILE", "--ranks", "6"), "hybrid shards alike on all nodes"),
        (("--ranks", "8..100"), "100 ranks do not fill nodes of 8"),
        (("-a", "recursive_doubling", "--ranks", "8,16"), "cannot do reduce_scatter"),
        (("--bucket", "1 B"), "take larger buckets"),
        (("--layers", "100000000"), "take fewer layers"),
    ],
)
def test_what_cannot_be_is_said_before_the_table(capsys, tmp_path, arguments, message):
    file = tmp_path / "u.yaml"
    file.write_text(UNEVEN, encoding="utf-8")
    words = [str(file) if a == "FILE" else a for a in arguments]
    status, out, err = run(capsys, "simulate", "training", *words)
    assert (status, out) == (2, "")
    assert message in err


def test_buckets_are_counted_where_there_are_some(capsys):
    """ZeRO-3 has none, however many parameters there are."""
    large = ("simulate", "training", "--params", "1e14", "--tokens", "1e9")
    assert run(capsys, *large, "--sharding", "zero-3")[0] == 0
    status, _, err = run(capsys, *large, "--sharding", "ddp")
    assert (status, "buckets: take larger buckets" in err) == (2, True)


def test_what_was_too_large_is_told_and_replaced(capsys, monkeypatch):
    """By what takes as few steps; the table names it."""
    training._network.cache_clear()
    monkeypatch.setattr(traffic, "_MOST_TRANSFERS", 900)
    arguments = ("simulate", "training", "--params", "1e8", "--sharding", "ddp")
    status, out, err = run(capsys, *arguments, "--ranks", "24")
    training._network.cache_clear()
    assert status == 0, err
    assert "hierarchical(direct_two_shot, double_binary_tree)\n" in out
    assert "# left out: all_reduce: too large to follow rank by rank, and hierarchical(" in out


def test_an_uneven_topology_without_hybrid(capsys, tmp_path):
    file = tmp_path / "u.yaml"
    file.write_text(UNEVEN, encoding="utf-8")
    status, out, err = run(
        capsys, "simulate", "training", "--topology", file, "--ranks", "6", "--sharding", "ddp",
        "--params", "1e8",
    )  # fmt: skip
    assert status == 0, err
    assert out.splitlines()[-1].split()[:2] == ["ddp", "6"]
