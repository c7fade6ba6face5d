"""Which kernel does which size on GPUs, and what a rank is warned of."""

from __future__ import annotations

import os

import pytest

from collectives import staging
from collectives.tuning.device import DeviceTuner, Launch, device_launch

KI, MI = 1 << 10, 1 << 20


@pytest.mark.parametrize("nranks", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter"])
def test_small_calls_go_in_one_shot_and_large_ones_in_two(collective: str, nranks: int) -> None:
    tuner = DeviceTuner(nranks)
    chosen = [tuner.choose(collective, 1 << k) for k in range(31)]
    assert chosen[0] == "direct_one_shot"
    assert chosen[-1] == "direct_two_shot"
    assert chosen == sorted(chosen)


def test_why_says_that_a_table_is_passed_over() -> None:
    words = "ranks share a GPU, where times say nothing"
    assert words not in DeviceTuner(2).why_built_in("all_reduce", 1024)
    passed = DeviceTuner(2, passed_over=words)
    assert passed.why_built_in("all_reduce", 1024).endswith(f"the table is passed over: {words}")
    assert passed.choose("all_reduce", 1024) == DeviceTuner(2).choose("all_reduce", 1024)


@pytest.mark.parametrize("nranks", [3, 4, 8])
def test_two_steps_go_in_lines_first(nranks: int) -> None:
    """Beside a stream that computes too, where they take less room: blocks do not count there."""
    ways = [device_launch("direct_two_shot", "all_reduce", MI << k, nranks) for k in range(8)]
    assert ways[0].lines
    assert not ways[-1].lines
    assert sorted((way.lines for way in ways), reverse=True) == [way.lines for way in ways]
    beside = device_launch("direct_two_shot", "all_reduce", MI, nranks, True)
    assert beside.lines and 0 < beside.blocks <= 32
    assert not device_launch("direct_two_shot", "all_reduce", MI, 2).lines


@pytest.mark.parametrize("nranks", [2, 4, 8])
def test_packets_then_lines(nranks: int) -> None:
    ways = [device_launch("direct_one_shot", "all_reduce", 1 << k, nranks) for k in range(23)]
    assert not ways[0].lines
    assert ways[-1].lines
    assert sorted(way.lines for way in ways) == [way.lines for way in ways]


def test_an_all_to_all_is_small_by_what_a_pair_exchanges() -> None:
    assert device_launch("direct_two_shot", "all_to_all", 8 * MI, 2).small
    assert not device_launch("direct_two_shot", "all_to_all", 16 * MI, 2).small
    assert device_launch("direct_two_shot", "all_to_all", 16 * KI, 8) == device_launch(
        "direct_one_shot", "all_to_all", 16 * KI, 8
    )


def test_few_blocks_read_in_bulk() -> None:
    """A communicator that may take few, and a call beside a stream that computes."""
    many = device_launch("direct_two_shot", "all_reduce", 64 * MI, 2)
    assert (many.blocks, many.pull, many.bulk) == (0, False, False)
    few = device_launch("direct_two_shot", "all_reduce", 64 * MI, 2, False, 8)
    assert few.pull
    assert few.bulk
    beside = device_launch("direct_two_shot", "all_reduce", 64 * MI, 2, True)
    assert (beside.blocks, beside.straight_blocks, beside.bulk) == (32, 16, True)
    assert device_launch("ring", "all_reduce", 64 * MI, 2, True, 8) == Launch()


@pytest.mark.parametrize(("processors", "bound"), [({3}, True), ({3, 4}, False)])
def test_a_rank_bound_to_one_processor_is_warned(
    monkeypatch: pytest.MonkeyPatch, processors: set[int], bound: bool
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: processors)
    if not bound:
        return staging.warn_if_bound(5)
    with pytest.warns(RuntimeWarning, match=r"^rank 5 is bound to one processor.*--bind-to none"):
        return staging.warn_if_bound(5)
