"""Whether `collectives.bench` computes times and figures right, on clocks of its own."""

from __future__ import annotations

import numpy as np
import pytest

import collectives
from collectives import run_threads
from collectives.bench import report, timing


def _fixed_runner(rank, begins, durations):
    """A runner with a clock of its own: call i begins at begins[rank] + 1000·i ns."""

    def runner(warmup, iterations):
        begin = begins[rank] + 1000.0 * np.arange(iterations)
        return np.stack([begin, begin + durations[rank]], axis=1)

    return runner


def test_a_call_lasts_from_the_latest_begin_to_the_latest_end():
    def body(comm):
        clock = timing.Clock(comm)
        runner = _fixed_runner(comm.rank, (0.0, 40.0), (100.0, 300.0))
        effort = timing.Effort(iterations=7)
        ours, none = timing.take_turns(clock, [runner, None], effort)
        assert none is None
        clock.shared = False
        apart, _ = timing.take_turns(clock, [runner, None], effort)
        return ours.median, apart.median, ours.p99, len(ours.times), list(ours.last)

    for median, apart, p99, calls, last in run_threads(2, body):
        assert median == pytest.approx(300e-9)  # from 40 to 340 ns
        assert apart == pytest.approx(300e-9)
        assert p99 == pytest.approx(300e-9)
        assert calls == 7
        assert last == [0, calls]


def test_iterations_grow_until_they_mean_something_and_blocks_alternate():
    order = []

    def body(comm):
        clock = timing.Clock(comm)

        def runner_of(name, nanoseconds):
            def runner(warmup, iterations):
                if comm.rank == 0:
                    order.append((name, iterations))
                begin = nanoseconds * np.arange(iterations, dtype=float)
                return np.stack([begin, begin + nanoseconds], axis=1)

            return runner

        runners = [runner_of("fast", 1e3), runner_of("slow", 1e8)]
        return timing.take_turns(clock, runners, timing.Effort(seconds=0.1))

    fast, slow = run_threads(2, body)[0]
    assert fast.median == pytest.approx(1e-6)
    assert slow.median == pytest.approx(0.1)
    assert len(fast.times) * 1e-6 == pytest.approx(0.1, rel=0.01)
    assert len(slow.times) == 3
    turns = [name for name, _ in order]
    tail = turns[-8:]
    assert tail == ["fast", "slow"] * 3 + ["fast"] * 2


@pytest.mark.parametrize(("nanoseconds", "warmup"), [(1e8, 0), (1e6, 2)])
def test_all_ranks_rest_before_each_block(monkeypatch, nanoseconds, warmup):
    """A block of one long call is not warmed up, since that would be a second one."""
    naps, calls = [], []
    monkeypatch.setattr(timing.time, "sleep", naps.append)

    def body(comm):
        def runner(warm, iterations):
            if comm.rank == 0:
                calls.append((warm, iterations))
            begin = nanoseconds * np.arange(iterations, dtype=float)
            return np.stack([begin, begin + nanoseconds], axis=1)

        effort = timing.Effort(seconds=0.1, rest=0.25)
        (sample,) = timing.take_turns(timing.Clock(comm), [runner], effort)
        return len(sample.times)

    timed = run_threads(2, body)[0]
    blocks = naps.count(0.25) // 2  # of two ranks
    assert blocks >= 3 and len(naps) == 2 * blocks
    assert [warm for warm, _ in calls[-blocks:]] == [warmup] * blocks
    assert sum(n for _, n in calls[-blocks:]) == timed


@pytest.mark.parametrize("iterations", [1, 3, 5, 11, 14])
def test_as_many_calls_as_were_asked_for(iterations):
    blocks = []

    def body(comm):
        def runner(warmup, calls):
            blocks.append(calls)
            begin = 1000.0 * np.arange(calls)
            return np.stack([begin, begin + 5.0], axis=1)

        (sample,) = timing.take_turns(
            timing.Clock(comm), [runner], timing.Effort(iterations=iterations)
        )
        return len(sample.times)

    assert run_threads(1, body) == [iterations]
    assert len(blocks[1:]) == min(5, iterations) and min(blocks) > 0


def test_what_a_peer_lacks_has_no_figure():
    def body(comm):
        def lacking(warmup, iterations):
            raise collectives.UnsupportedError("not in this library")

        runner = _fixed_runner(comm.rank, (0, 0), (5, 5))
        found = timing.take_turns(timing.Clock(comm), [runner, lacking], timing.Effort())
        return [sample is None for sample in found]

    assert run_threads(2, body) == [[False, True]] * 2


def test_bus_factors():
    assert report.bus_factor("all_reduce", 4) == 1.5
    assert report.bus_factor("all_gather", 4) == 0.75
    assert report.bus_factor("broadcast", 4) == 1.0
    assert report.bandwidth(10**9, 0.5) == pytest.approx(2.0)


def test_numbers_have_three_or_four_digits():
    values = (0.0123, 0.4567, 1.234, 12.34, 123.4, 1234.5, 123456.0)
    shown = [report.microseconds(v) for v in values]
    assert shown == ["0.012", "0.457", "1.234", "12.34", "123.4", "1234", "123456"]
    assert report.microseconds(None) == "-"
