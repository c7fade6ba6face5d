"""The measured table: tune writes it, ranks find it, explain shows it; and what is refused."""

from __future__ import annotations

import json

import launch
import numpy as np
import pytest

import collectives as cc
from collectives import cli, hardware, run_threads
from collectives.config import parse_rules
from collectives.tuning import (
    ANY_SIZE,
    Choice,
    Tuner,
    model,
    tables,
    work,
)
from collectives.tuning.explain import explain
from collectives.tuning.model import Measurement

HARDWARE = {"cpu": "a", "cores": "2", "network": "Ethernet 10", "mpi": ""}


def measured(**times):
    """Times of all_reduce at 1 KiB, 16 KiB, 256 KiB."""
    sizes = (1 << 10, 16 << 10, 256 << 10)
    return [
        Measurement(name, "all_reduce", size, seconds)
        for name, found in times.items()
        for size, seconds in zip(sizes, found, strict=True)
    ]


def layout(rows, **changes):
    figures = model.fit(rows, [0, 0], "threads")
    made = tables.entry(
        tables.choices_of(rows), figures, rows, date="2026-01-02T03:04:05", version="1"
    )
    return {**made, **changes}


# ---- what is made of times -----------------------------------------------------------------------


def test_the_fastest_is_chosen_and_changes_where_lines_cross():
    rows = measured(ring=(8e-6, 9e-6, 20e-6), direct_one_shot=(1e-6, 9e-6, 90e-6))
    choices = tables.choices_of(rows)["all_reduce"]
    assert [c.algorithm for c in choices] == ["direct_one_shot", "ring"]
    assert 12 << 10 < choices[0].limit < 256 << 10  # equal at 16 KiB
    assert choices[-1].limit == ANY_SIZE


def test_noise_does_not_change_the_choice():
    rows = measured(ring=(5e-6, 5.1e-6, 5e-6), direct_two_shot=(5.1e-6, 5e-6, 5.1e-6))
    assert tables.choices_of(rows)["all_reduce"] == [Choice(ANY_SIZE, "ring")]


def test_uneven_pairs_always_go_directly():
    rows = [Measurement("bruck", "all_to_all", 64, 1e-6)]
    choices = tables.choices_of(rows)["all_to_all"]
    tuner = Tuner([0, 1], False, (), tables.Table({"all_to_all": choices}, {}, rows))
    assert tuner.choose("all_to_all", 256) == "bruck"
    assert tuner.choose("all_to_all", 1 << 62) == "direct_two_shot"


def test_a_table_decides_near_the_sizes_that_were_measured():
    """1 KiB to 256 KiB: from 256 B to 1 MiB; what is built in serves the rest, and explain says
    so.
    """
    rows = measured(ring=(1e-6, 2e-6, 3e-6), direct_two_shot=(2e-6, 3e-6, 4e-6))
    tuner = Tuner([0] * 4, True, (), tables.parse(layout(rows), "table.json"))
    plain = Tuner([0] * 4, True)
    for nbytes in (0, 255, (1 << 20) + 1, 64 << 20, ANY_SIZE):
        assert tuner.choose("all_reduce", nbytes) == plain.choose("all_reduce", nbytes)
        reason = tuner.reason("all_reduce", nbytes)
        assert "share memory" in reason and "1 KiB to 256 KiB was measured, which is far" in reason
        assert "fastest as measured" not in reason
    for nbytes in (256, 1 << 10, 256 << 10, 1 << 20):
        assert tuner.choose("all_reduce", nbytes) == "ring"
        reason = tuner.reason("all_reduce", nbytes)
        assert "as measured on these ranks" in reason
        assert ("which is near" in reason) == (nbytes in (256, 1 << 20))
    text = explain("all_reduce", 64 << 20, [0] * 4, one_region=True, tuner=tuner)
    assert "runs     direct_two_shot" in text and "fastest as measured" not in text
    assert "by size  direct_one_shot up to 255 B, ring up to 1 MiB, direct_two_shot above" in text


def test_a_table_of_the_smallest_calls_decides_for_smaller_ones():
    rows = [Measurement("ring", "all_reduce", 64, 1e-6)]
    tuner = Tuner([0, 0], True, (), tables.parse(layout(rows), "table.json"))
    assert [tuner.choose("all_reduce", nbytes) for nbytes in (0, 4, 256)] == ["ring"] * 3
    assert tuner.choose("all_reduce", 257) == "direct_one_shot"


def test_a_prediction_says_where_what_is_chosen_was_measured():
    """By the figures the ring, which was the fastest, is not for four times the size."""
    fast, none = model.LinkModel(1e-9, 1e-15, 1e-15), model.LinkModel(0, 0)
    slow = model.LinkModel(1e-3, 1e-9, 1e-9)
    figures = {"direct": model.Figures(fast, none), "steps": model.Figures(slow, none)}
    rows = measured(ring=(1e-6, 2e-6, 3e-6))
    table = tables.Table(tables.choices_of(rows), figures, rows)
    tuner = Tuner([0] * 4, True, (), table)
    text = explain("all_reduce", 1 << 20, [0] * 4, one_region=True, tuner=tuner)
    assert "as predicted; what is chosen was measured at another size" in text
    text = explain("all_reduce", 64 << 20, [0] * 4, one_region=True, tuner=tuner)
    assert "measured at another size" not in text


def test_a_prediction_does_not_say_of_what_is_forced_that_it_was_measured():
    tuner = Tuner([0] * 4, True, parse_rules("all_reduce:ring"))
    text = explain("all_reduce", 4, [0] * 4, one_region=True, tuner=tuner)
    assert "as predicted; what is chosen is forced" in text


def test_a_table_of_the_largest_calls_decides_up_to_the_largest_size():
    found = [Measurement("ring", "all_reduce", size, 1.0) for size in (1 << 62, ANY_SIZE)]
    table = tables.Table(tables.choices_of(found), {}, found)
    assert Tuner([0, 0], True, (), table).choose("all_reduce", ANY_SIZE) == "ring"


def test_times_between_measured_sizes():
    table = tables.Table({}, {}, measured(ring=(1e-6, 4e-6, 16e-6)))
    assert table.times("all_reduce", 1 << 10)["ring"] == pytest.approx(1e-6)
    assert table.times("all_reduce", 4 << 10)["ring"] == pytest.approx(2e-6)
    assert table.times("all_reduce", 1 << 30) == {}
    assert table.times("broadcast", 1 << 10) == {}


def test_forced_choices_lie_over_the_table():
    table = tables.Table({"all_reduce": [Choice(ANY_SIZE, "ring")]}, {}, [])
    rules = parse_rules("all_reduce:4K-=recursive_doubling")
    tuner = Tuner([0, 0], True, rules, table)
    assert tuner.choose("all_reduce", 4) == "ring"
    assert tuner.choose("all_reduce", 4096) == "recursive_doubling"
    assert "as measured" in tuner.reason("all_reduce", 4)
    assert "forced" in tuner.reason("all_reduce", 4096)
    assert tuner.choose("broadcast", 4) == Tuner([0, 0], True).choose("broadcast", 4)


def test_a_table_with_algorithms_that_are_not_here_is_passed_over():
    table = tables.Table({"all_reduce": [Choice(ANY_SIZE, "somebodys_own")]}, {}, [])
    assert Tuner([0, 0], True, (), table).choose("all_reduce", 4) == "direct_one_shot"


# ---- predictions ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "transport"), [((0, 0), "shm"), ((0, 0, 1, 1), "shm+mpi"), ((0, 0, 0, 1), "shm+mpi")]
)
def test_the_fit_finds_figures_for_links_of_both_kinds(nodes, transport):
    """Times made with some figures are predicted, also those of sizes that were not measured."""
    steps = model.Figures(
        model.LinkModel(1e-6, 1e-10, 5e-11), model.LinkModel(2e-5, 1e-9), 3e-6, 5e-6
    )
    direct = model.Figures(model.LinkModel(2e-7, 9e-11, 3e-11), model.LinkModel(0, 0), 1e-7)
    small = model.Figures(model.LinkModel(2e-6, 1e-10, 5e-11), model.LinkModel(1e-5, 1e-9), 1e-6)
    made = {"steps": steps, "direct": direct, "assembled": small}
    tuner = Tuner(list(nodes), transport == "shm")

    def times(sizes):
        for collective in ("all_reduce", "all_gather", "broadcast"):
            for name in tuner.candidates(collective):
                for nbytes in sizes:
                    seconds = model.predict(
                        name, collective, nbytes, nodes, transport, figures=made
                    )
                    yield Measurement(name, collective, nbytes, seconds)

    found = model.fit(times([4**k for k in range(2, 13)]), nodes, transport)
    off = model.errors(times([3 * 4**k for k in range(2, 12)]), nodes, transport, found)
    assert len(off) > 100
    assert np.max(off) < 0.05


def test_small_calls_between_nodes_have_figures_of_their_own():
    nodes = (0, 0, 1, 1)
    kind, todo = work.work_of("direct_one_shot", "all_reduce", 1024, nodes, "shm+mpi")
    assert (kind, todo.far_steps, todo.far_sent) == ("assembled", 1, 2048)
    kind, todo = work.work_of("direct_one_shot", "all_reduce", 1 << 20, nodes, "shm+mpi")
    assert kind == "steps"
    assert todo.slices > 0
    assert work.work_of("direct_one_shot", "all_reduce", 1024, (0, 0), "shm")[0] == "direct"


def test_what_leaves_a_node_counts_once_for_its_link():
    """Four ranks of a node share its link, so a flat algorithm pays for all of them."""
    nodes = (0, 0, 0, 0, 1, 1, 1, 1)
    far = model.Figures(model.LinkModel(0, 0), model.LinkModel(0, 1.0))
    nbytes = 1 << 20

    def bytes_of(name):
        return model.predict(name, "all_reduce", nbytes, nodes, "shm+mpi", figures={"steps": far})

    assert bytes_of("hierarchical(direct_two_shot, ring)") == nbytes
    assert bytes_of("recursive_doubling") == 4 * nbytes


def test_what_leaves_a_node_is_not_sent_within_it():
    """Each of a node's two ranks sends half a vector within it, twice, and a quarter to the other
    node, twice. Nothing is near where each rank is a node.
    """
    near, far = work.shares("hierarchical(direct_two_shot, ring)", "all_reduce", (0, 0, 1, 1))
    assert (near.sent, far.sent) == (1.0, 1.0)
    near, _ = work.shares("ring", "all_gather", (0, 1, 2))
    assert near.sent == 0.0
    _, over_mpi = work.work_of("ring", "all_gather", 3 << 20, (0, 1, 2), "mpi")
    assert over_mpi.near_sent == 2 << 20


# ---- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [[0] * 8, list(range(8)), [0, 0, 0, 1, 1, 2, 2, 2]])
def test_gather_takes_as_long_as_what_the_root_receives(nodes):
    """One shot sends an eighth of what the root receives, whose link is the same for all ways."""
    transport = "mpi" if len(set(nodes)) in (1, 8) else "shm+mpi"
    names = ("direct_one_shot", "binomial_tree")
    times = [model.predict(name, "gather", 1 << 30, nodes, transport) for name in names]
    assert max(times) < 1.5 * min(times)


def test_files_hold_layouts_side_by_side(tmp_path):
    path = tmp_path / "deep" / "table.json"
    rows = measured(ring=(1e-6, 2e-6, 3e-6))
    tables.save(path, HARDWARE, "threads 0,0", layout(rows))
    tables.save(path, HARDWARE, "threads 0,0,0", layout(rows))
    other = [Measurement("ring", "broadcast", 64, 1e-6)]
    tables.save(path, HARDWARE, "threads 0,0", layout(other))
    found = tables.load(path, HARDWARE)
    assert set(found) == {"threads 0,0", "threads 0,0,0"}
    table = tables.parse(found["threads 0,0"], path)
    assert set(table.choices) == {"all_reduce", "broadcast"}  # what was measured before is kept
    assert [m.collective for m in table.rows] == ["all_reduce"] * 3 + ["broadcast"]
    assert [p.name for p in path.parent.iterdir()] == ["table.json"]


def test_figures_are_of_all_that_is_kept(tmp_path):
    """all_gather combines nothing, so it cannot say what combining costs."""
    path = tmp_path / "table.json"
    shape = model.Figures(model.LinkModel(1e-6, 1e-10, 5e-11), model.LinkModel(0, 0), 1e-6)
    figures = {"direct": shape, "steps": shape}

    def rows(collective):
        names = ("direct_one_shot", "direct_two_shot", "ring")
        return [
            Measurement(name, collective, size, seconds)
            for name in names
            for size in (64, 4096, 1 << 20)
            if (seconds := model.predict(name, collective, size, [0] * 3, "shm", figures=figures))
        ]

    before, key = layout(rows("all_reduce")), "shm 0,0,0"
    before["rows"].append(["all_reduce", "not registered here", 64, 1e-3])
    for found in (before, layout(rows("all_gather"))):
        tables.save(path, HARDWARE, key, found)
    table = tables.parse(tables.load(path, HARDWARE)[key], path)
    off = model.errors(rows("all_reduce"), [0] * 3, "shm", table.figures)
    assert off.max() < 0.05
    assert table.figures["direct"].near.gamma_s_per_byte == pytest.approx(5e-11, rel=0.05)


def test_tables_of_other_hardware_are_refused(tmp_path):
    path = tmp_path / "table.json"
    tables.save(path, HARDWARE, "threads 0,0", layout(measured(ring=(1e-6, 2e-6, 3e-6))))
    with pytest.raises(cc.ConfigError) as error:
        tables.load(path, {**HARDWARE, "network": "InfiniBand 400"})
    words = str(error.value)
    assert "network: measured on 'Ethernet 10', this is 'InfiniBand 400'" in words
    assert "cpu" not in words
    assert "tune" in words


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("[]", "no table of this version"),
        ('{"format": 99}', "no table of this version"),
    ],
)
def test_files_that_are_no_tables(tmp_path, content, expected):
    path = tmp_path / "table.json"
    path.write_text(content)
    with pytest.raises(cc.ConfigError, match=expected):
        tables.load(path, HARDWARE)


@pytest.mark.parametrize("missing", ["choices", "figures", "rows", "date"])
def test_damaged_layouts(missing):
    found = layout(measured(ring=(1e-6, 2e-6, 3e-6)))
    del found[missing]
    with pytest.raises(cc.ConfigError, match=f"damaged.*{missing}"):
        tables.parse(found, "table.json")


@pytest.mark.parametrize(
    "change",
    [
        {"choices": {"all_reduce": []}},
        {"choices": {"all_reduce": [[1024, "ring"]]}},
        {"choices": {"all_reduce": [[ANY_SIZE, "ring"], [1024, "ring"], [ANY_SIZE, "ring"]]}},
        {"choices": 5},
        {"rows": [["all_reduce", "ring", 1024, -1e-6]]},
        {"rows": [["all_reduce", "ring", 1024, float("nan")]]},
        {"rows": [["all_reduce", "ring", -4, 1e-6]]},
        {"rows": [["all_reduce", "ring", 1 << 70, 1e-6]]},
        {"rows": [["all_reduce", "ring", 1024, 1e-6], ["all_reduce", "ring", 1024, 2e-6]]},
        {"figures": {"direct": {"near": 5}}},
        {"date": 5},
    ],
)
def test_layouts_with_what_cannot_be(change):
    found = {**layout(measured(ring=(1e-6, 2e-6, 3e-6))), **change}
    with pytest.raises(cc.ConfigError, match=r"table.json is damaged \("):
        tables.parse(found, "table.json")


@pytest.mark.parametrize("value", ["1e-6", True, float("inf"), None, -1e-6, 10**400], ids=type)
def test_figures_that_are_no_numbers(value):
    found = layout(measured(ring=(1e-6, 2e-6, 3e-6)))
    figures = next(iter(found["figures"].values()))
    figures["near"]["alpha_s"] = value
    with pytest.raises(cc.ConfigError, match="damaged"):
        tables.parse(found, "table.json")


@pytest.mark.parametrize(
    "change", [{"hardware": []}, {"layouts": 5}, {"layouts": {"threads 0,0": 5}}]
)
def test_files_with_what_cannot_be(monkeypatch, tmp_path, change):
    """Also ranks say so that find such a file."""
    path = tmp_path / "table.json"
    tables.save(path, HARDWARE, "threads 0,0", layout(measured(ring=(1e-6, 2e-6, 3e-6))))
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(cc.ConfigError, match="damaged"):
        tables.load(path, HARDWARE)
    monkeypatch.setenv("COLLECTIVES_TABLE", str(path))
    with pytest.raises(cc.ConfigError, match="damaged"):
        run_threads(2, lambda comm: None)


def test_a_damaged_layout_is_not_merged(tmp_path):
    path = tmp_path / "table.json"
    good = layout(measured(ring=(1e-6, 2e-6, 3e-6)))
    tables.save(path, HARDWARE, "threads 0,0", {**good, "rows": 7})
    with pytest.raises(cc.ConfigError, match="damaged"):
        tables.save(path, HARDWARE, "threads 0,0", good)


def test_the_usual_place_is_named_after_the_hardware(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here = tables.path_for(HARDWARE)
    assert here.parent == tmp_path / "collectives"
    assert here != tables.path_for({**HARDWARE, "cores": "4"})
    assert str(tables.path_for(HARDWARE, "x.json")) == "x.json"


# ---- tune, and what follows ----------------------------------------------------------------------

TINY = ("-b", "64", "-e", "1K", "-f", "16", "--seconds", "0.002")


def tune(*arguments):
    return cli.main(["tune", *arguments])


def test_what_tune_writes_is_what_runs(capsys, monkeypatch, tmp_path):
    path = tmp_path / "table.json"
    monkeypatch.setenv("COLLECTIVES_TABLE", str(path))
    assert tune("--threads", "3", "--collective", "all_reduce,broadcast", "--rows", *TINY) == 0
    out = capsys.readouterr().out
    assert "measured" in out and "predicted" in out and "predictions are off by" in out
    assert f"written to {path}" in out
    content = json.loads(path.read_text())
    (key,) = content["layouts"]
    assert key == "threads 0,0,0"
    assert out.count("all_reduce") == sum(
        row[0] == "all_reduce" for row in content["layouts"][key]["rows"]
    )

    # Another answer than the built-in one shows that the file is what was asked.
    content["layouts"][key]["choices"]["all_reduce"] = [[ANY_SIZE, "ring"]]
    path.write_text(json.dumps(content))

    def body(comm):
        text = comm.explain("all_reduce", nbytes=512)
        total = comm.all_reduce(np.ones(100))
        return comm._tuner.choose("all_reduce", 512), text, float(total[0])

    for chosen, text, total in run_threads(3, body):
        assert chosen == "ring"
        assert total == 3
        assert "runs     ring" in text
        assert f"as measured on these ranks ({path}" in text
        assert any("predicted" in line and "measured" in line for line in text.splitlines())
    # Ranks that are placed otherwise were not measured.
    assert run_threads(2, body)[0][0] != "ring"
    monkeypatch.setenv("COLLECTIVES_TABLE", "off")
    assert run_threads(3, body)[0][0] != "ring"


def test_ranks_refuse_a_table_of_other_hardware(monkeypatch, tmp_path):
    path = tmp_path / "table.json"
    tables.save(path, HARDWARE, "threads 0,0", layout(measured(ring=(1e-6, 2e-6, 3e-6))))
    monkeypatch.setenv("COLLECTIVES_TABLE", str(path))
    with pytest.raises(cc.ConfigError, match=r"other hardware.*cpu: measured on 'a', this is"):
        run_threads(2, lambda comm: None)


@pytest.mark.parametrize("content", ["{", '{"format": 99}', '{"format": 1, "layouts": 5}', None])
def test_what_a_useless_table_asks_for_is_possible(capsys, monkeypatch, tmp_path, content):
    """`tune` cannot go on from such a file either; another one serves."""
    path = tmp_path / "table.json"
    if content is None:
        tables.save(path, HARDWARE, "threads 0,0", layout(measured(ring=(1e-6, 2e-6, 3e-6))))
    else:
        path.write_text(content)
    monkeypatch.setenv("COLLECTIVES_TABLE", str(path))
    words = ["tune", "--threads", "2", "--collective", "all_reduce", "-e", "64"]
    words += ["--seconds", "0.001"]
    assert cli.main(words) == 2
    wanted = "name another file, and measure into it with python -m collectives tune"
    assert wanted in capsys.readouterr().err
    monkeypatch.setenv("COLLECTIVES_TABLE", str(tmp_path / "another.json"))
    assert cli.main(words) == 0


def test_tune_refuses_to_write_where_no_table_is_asked(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLLECTIVES_TABLE", "off")
    monkeypatch.chdir(tmp_path)
    assert tune("--threads", "2", "--collective", "all_gather", *TINY) == 2
    assert "COLLECTIVES_TABLE is off" in capsys.readouterr().err
    assert tune("--threads", "2", "--collective", "all_gather", "--dry-run", *TINY) == 0
    assert list(tmp_path.iterdir()) == []


def test_tune_measures_a_collective_that_is_named_twice_once(capsys):
    twice = ("--collective", "all_gather,all_gather", "--dry-run", "--rows")
    assert tune("--threads", "2", *twice, *TINY) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line[0] != "#"]
    assert len({(row[1], row[5]) for row in rows}) == len(rows) > 0


def test_tune_writes_nothing_on_a_dry_run(capsys, tmp_path):
    path = tmp_path / "table.json"
    assert tune("--threads", "2", "--collective", "all_gather", "--dry-run",
                "--output", str(path), *TINY) == 0  # fmt: skip
    assert not path.exists()
    assert "written" not in capsys.readouterr().out


def test_tune_writes_nothing_where_an_algorithm_is_wrong(capsys, monkeypatch, tmp_path):
    from collectives.bench.measuring import Bench

    path = tmp_path / "table.json"
    good = Bench.verify
    monkeypatch.setattr(
        Bench, "verify", lambda self, bound: 5 if bound.nbytes == 1024 else good(self, bound)
    )
    assert tune("--threads", "2", "--collective", "all_reduce", "-o", str(path), *TINY) == 1
    assert not path.exists()
    assert "all_reduce of 1024 B: 5 wrong elements" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--threads", "1"), "one rank moves nothing"),
        (("--threads", "2", "--collective", "barrier"), "leave it out"),
        (("--threads", "2", "--collective", "brodcast"), "did you mean 'broadcast'"),
        (("--threads", "2", "-b", "2K", "-e", "1K"), "below the smallest"),
    ],
)
def test_tune_in_words(capsys, arguments, expected):
    assert tune(*arguments) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("place", ["a folder", "below a file", "other hardware"])
def test_tune_finds_out_before_it_measures_that_it_cannot_write(
    capsys, monkeypatch, tmp_path, place
):
    from collectives.cli import tune as command

    path = tmp_path / "table.json"
    if place == "a folder":
        path.mkdir()
    elif place == "below a file":
        path.touch()
        path /= "table.json"
    else:
        tables.save(path, {"cpu": "another"}, "mpi 0,1", {"choices": {}, "figures": {}, "rows": []})
    monkeypatch.setattr(command, "measure", lambda *_: pytest.fail("it measured"))
    assert tune("--threads", "2", "--collective", "all_gather", "-o", str(path), *TINY) == 2
    err = capsys.readouterr().err
    if place == "other hardware":
        assert "hardware" in err
    else:
        assert "cannot be" in err and str(path) in err and "Errno" not in err
    assert [p.name for p in tmp_path.iterdir()] == ["table.json"]


@pytest.mark.mpi
def test_ranks_of_mpi_find_the_table(tmp_path):
    path = tmp_path / "table.json"
    result = launch.run(
        3, "tuned.py", launcher="openmpi", env={"COLLECTIVES_TABLE": str(path)}, timeout=60
    )
    result.expect(status=0)
    assert result.output.count("chooses ring") == 3, result


# ---- explain -------------------------------------------------------------------------------------


def test_explain_shows_measured_times_of_the_table():
    rows = measured(
        ring=(9e-6, 9e-6, 9e-6), direct_one_shot=(2e-6, 3e-6, 4e-6), direct_two_shot=(1e-6,) * 3
    )
    table = tables.parse(layout(rows), "table.json")
    tuner = Tuner([0, 0], True, (), table)
    text = explain("all_reduce", 16 << 10, [0, 0], one_region=True, tuner=tuner)
    assert "runs     direct_two_shot" in text
    assert "the fastest as measured on these ranks (table.json, 2026-01-02)" in text
    ranking = [line.split() for line in text.splitlines() if line.startswith(("  ", "> "))]
    names = [words[1] if words[0] == ">" else words[0] for words in ranking]
    assert names[1:4] == ["direct_two_shot", "direct_one_shot", "ring"]
    assert "9.00 us" in text


@pytest.mark.parametrize(("carrier", "ranks"), [("threads", "--threads"), ("shm", "--ranks")])
def test_explain_asks_the_table_of_this_host(capsys, monkeypatch, tmp_path, carrier, ranks):
    """For the ranks that are described; none of others, and none of other hardware."""
    path = tmp_path / "table.json"
    here = tables.hardware_of([{**hardware.summary(), "mpi": ""}])
    rows = measured(ring=(1e-6, 2e-6, 3e-6), direct_one_shot=(2e-6, 3e-6, 4e-6))
    tables.save(path, here, f"{carrier} 0,0,0", layout(rows))
    monkeypatch.setenv("COLLECTIVES_TABLE", str(path))
    words = ["explain", "all_reduce", "--bytes", "16K", ranks]
    assert cli.main([*words, "3"]) == 0
    out = capsys.readouterr().out
    assert "runs     ring" in out and "as measured on these ranks" in out and "2.00 us" in out
    assert cli.main([*words, "2"]) == 0
    assert "measured on these ranks" not in capsys.readouterr().out
    path.unlink()
    assert cli.main([*words, "3"]) == 0
    assert f"COLLECTIVES_TABLE names {path}, and there is no such file" in capsys.readouterr().out
    assert cli.main(["info"]) == 0
    assert f"COLLECTIVES_TABLE names {path}, and there is no such file" in capsys.readouterr().out
    tables.save(path, {**here, "cpu": "a"}, f"{carrier} 0,0,0", layout(rows))
    assert cli.main([*words, "3"]) == 2
    assert "was measured on other hardware (cpu: measured on 'a'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("nbytes", "kind"), [(-3, ValueError), (1.5, TypeError), ("1M", TypeError)]
)
def test_explain_refuses_what_is_no_size(nbytes, kind):
    def body(comm):
        with pytest.raises(kind, match=f"nbytes must be .* bytes, not {nbytes!r}"):
            comm.explain("all_reduce", nbytes=nbytes)

    run_threads(2, body)


def test_explain_a_barrier_names_no_algorithm_unless_forced():
    nodes = [0, 0, 1, 1]
    text = explain("barrier", 0, nodes, one_region=False, tuner=Tuner(nodes, False))
    assert "runs     no algorithm" in text
    assert ">" not in text
    rules = parse_rules("barrier:recursive_doubling")
    text = explain("barrier", 0, nodes, one_region=False, tuner=Tuner(nodes, False, rules))
    assert "runs     recursive_doubling" in text
    # What is forced for sizes that a barrier does not have changes nothing.
    rules = parse_rules("barrier:64K-=recursive_doubling")
    text = explain("barrier", 0, nodes, one_region=False, tuner=Tuner(nodes, False, rules))
    assert "runs     no algorithm" in text
