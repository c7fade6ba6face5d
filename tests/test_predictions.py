"""What the cost model says of algorithms on hosts where nothing was measured."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from collectives.tuning import BY_NODE, Tuner, host_tuning, model, work

RESULTS = Path(__file__).resolve().parents[1] / "bench/results"


@pytest.mark.parametrize(
    ("nodes", "transport", "near", "far"),
    [
        ((0, 0, 1, 1, 2), "shm+mpi", 2, 2),
        ((0, 1), "shm+mpi", 0, 1),
        ((0, 1, 2, 3, 4), "mpi", 3, 0),
        ((0, 0), "mpi", 1, 0),
        ((0, 0, 0), "shm", 0, 0),
    ],
)
def test_calls_that_do_not_travel_with_the_agreement_are_behind_it(nodes, transport, near, far):
    """Its steps are those of a small call; figures that were fitted have it in their entry."""
    nbytes = 1 << 20
    found = model.LINKS["shm" if transport == "shm+mpi" else transport]["steps"]
    between = model.LINKS["mpi"]["steps"]
    figures = {"steps": model.Figures(found, between)}
    seconds = [
        model.predict("ring", "all_reduce", nbytes, nodes, transport, figures=f)
        for f in (None, figures)
    ]
    assert seconds[0] - seconds[1] == pytest.approx(
        near * found.alpha_s + far * between.alpha_s, rel=1e-6, abs=1e-12
    )
    kind, todo = work.work_of("direct_one_shot", "all_reduce", 8, nodes, transport)
    if kind == "assembled":
        assert (todo.near_steps, todo.far_steps) == (near, far)


@pytest.mark.parametrize("name", ["tune-nodes-10gbit", "tune-nodes-1gbit", "tune-mpi-2"])
def test_what_is_predicted_to_be_the_fastest_is_nearly_so(name):
    """Without a measured table, against one: half of what is advised is the fastest, and hardly
    anything takes 1.3 times as long.
    """
    (layout, kept), *_ = json.loads((RESULTS / f"{name}.json").read_text())["layouts"].items()
    transport, _, words = layout.partition(" ")
    nodes = [int(node) for node in words.split(",")]
    times = {}
    for collective, algorithm, nbytes, seconds in kept["rows"]:
        times.setdefault((collective, nbytes), {})[algorithm] = seconds
    slower = []
    for (collective, nbytes), measured in times.items():
        predicted = {
            name: model.predict(name, collective, nbytes, nodes, transport, cores=2)
            for name in measured
        }
        advised = min(predicted, key=predicted.get)
        slower.append(measured[advised] / min(measured.values()))
    assert len(slower) == 54
    assert np.median(slower) < 1.05 and np.quantile(slower, 0.8) < 1.3 and np.mean(slower) < 1.3


def test_two_ranks_on_two_nodes_hand_nothing_on():
    """Vectors travel with the agreement for longer, and messages are longer, than with more."""
    for nodes, assembled, segment, lanes in (
        ([0, 1], 128 << 10, 512 << 10, 2),
        ([0, 1, 2], 16 << 10, 128 << 10, 4),
        ([0, 0, 1, 1], 16 << 10, 128 << 10, 4),
    ):
        tuning = host_tuning(nodes.count(0), 8, messages=True, nodes=nodes)
        assert (tuning.segment_bytes, tuning.lanes) == (segment, lanes), nodes
        assert tuning.assembled_max == assembled, nodes
    limit = 64 << 10
    by_node = [Tuner([0, 0, 1, 1], False).choose("all_reduce", n) for n in (limit, limit + 4)]
    assert by_node[0] == BY_NODE != by_node[1]
    limits = {"all_gather": 128 << 10, "all_to_all": 128 << 10, "broadcast": 64 << 10}
    for collective, limit in limits.items():
        two = [Tuner([0, 1], False).choose(collective, n) for n in (limit, limit + 4)]
        assert two[0].startswith("direct"), collective
        for nbytes, kind in ((limit, "assembled"), (limit + 4, "steps")):
            assert work.work_of(two[0], collective, nbytes, [0, 1], "mpi")[0] == kind, collective
    assert host_tuning(2, 8, messages=True, nodes=[0, 0]).assembled_max == 16 << 10
