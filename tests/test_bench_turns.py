"""The turns that benchmarks of training take."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "bench" / "turns.py"


@pytest.fixture
def turns():
    spec = importlib.util.spec_from_file_location("turns", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rounds_go_forth_and_back_in_one_order_after_the_other(turns):
    order, told = [], []

    def measure(name):
        order.append(name)
        return len(order)

    found = turns.in_turns("abc", measure, lambda all_: told.append(dict(all_)), rounds=20)
    rounds = ["".join(order[i : i + 3]) for i in range(0, 60, 3)]
    assert all("".join(sorted(each)) == "abc" for each in rounds)
    assert all(back == forth[::-1] for forth, back in zip(rounds[::2], rounds[1::2], strict=True))
    assert len(set(rounds)) > 3
    assert found == {n: [i + 1 for i, name in enumerate(order) if name == n] for n in "abc"}
    assert len(told) == 60

    again = []
    turns.in_turns("abc", again.append, lambda _: None, rounds=20)
    assert again == order  # as on another rank


def test_two_rounds_at_least_and_no_more_when_time_is_up(turns):
    found = turns.in_turns("ab", len, lambda _: None, rounds=9, until=time.monotonic() - 1)
    assert found == {"a": [1, 1], "b": [1, 1]}


def test_as_many_rounds_as_fit(turns):
    wishes = []

    def agree(wish):
        wishes.append(wish)
        return len(wishes) < 5  # as rank 0 says, whatever this rank thinks

    until = time.monotonic() + 3600
    found = turns.in_turns("a", len, lambda _: None, rounds=1, until=until, agree=agree)
    assert found == {"a": [1] * 4} and wishes == [True] * 5
    found = turns.in_turns("a", len, lambda _: None, rounds=1, until=time.monotonic() + 0.2)
    assert len(found["a"]) > 2


def test_figures(turns, tmp_path):
    assert turns.spread([2.0, 1.0, 4.0]) == [1.0, 4.0]
    assert turns.ratios([2, 3, 8], [1, 2, 0]) == {"median": 1.75, "spread": [1.5, 2.0]}
    assert turns.ratios([1], [0]) == {"median": None, "spread": None}
    turns.write(tmp_path / "a.json", {"x": 1})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
    turns.write(None, {})
