"""The commands compare and explain, and the cost model behind them."""

from __future__ import annotations

import importlib.util
import itertools
import json

import pytest
from commands import TINY, check_rows, run, start

import collectives
from collectives import _core, run_threads
from collectives.bench import measuring
from collectives.bench.cases import Case
from collectives.cli import compare
from collectives.tuning import Tuner, model, work
from collectives.tuning.explain import explain

pytestmark = pytest.mark.usefixtures("no_launcher")

# ---- compare -------------------------------------------------------------------------------------

MY_RING = '''
import collectives
from collectives import Transfer

@collectives.algorithm("all_reduce", name="ring_of_the_test")
def rounds(n):
    """chunks travel around"""
    for i in range(n - 1):
        yield [Transfer(r, (r + 1) % n, chunk=(r - i) % n, reduce=True) for r in range(n)]
    for i in range(n - 1):
        yield [Transfer(r, (r + 1) % n, chunk=(r + 1 - i) % n) for r in range(n)]
'''


def test_compare_with_an_algorithm_from_a_file(tmp_path):
    source = tmp_path / "rings.py"
    source.write_text(MY_RING)
    file, png = tmp_path / "result.json", tmp_path / "result.png"
    drawing_ = importlib.util.find_spec("matplotlib") is not None
    status, out, err = start(
        "compare", "--ranks", 2, *TINY, "--import", source, "--json", file, "--fit",
        *(["--png", png] if drawing_ else []),
    )  # fmt: skip
    assert status == 0, err
    rows = json.loads(file.read_text())["rows"]
    check_rows(rows, wrong=0)
    names = {r["algorithm"] for r in rows}
    assert {"ring", "direct_one_shot", "ring_of_the_test"} <= names
    assert out.count("*") >= 2
    assert "fastest" in out
    assert "direct: entry" in out and "predictions are off by" in out
    if drawing_:
        assert png.read_bytes().startswith(b"\x89PNG")


def test_png_without_matplotlib_says_what_to_install(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    status, _, err = run(capsys, "compare", "--threads", 2, "--png", tmp_path / "x.png")
    assert status == 2
    assert "pip install matplotlib" in err


def _results(times):
    results = compare.Results(Case("all_reduce", 2), ["a", "b"])
    results.times = times
    return results


def test_crossovers_in_words():
    sizes = (1 << 10, 1 << 12, 1 << 14, 1 << 16)
    # a: 1 + x / 2^13, b: 2 + x / 2^15: they meet near 2^13 · 4/3.
    results = _results({x: {"a": 1 + x / 2**13, "b": 2 + x / 2**15} for x in sizes})
    lines = compare.in_words(results)
    assert len(lines) == 2
    assert lines[0].startswith("a is the fastest from 1 KiB to 4 KiB; b passes it near ")
    assert 8 <= int(lines[0].split("near ")[1].split(" KiB")[0]) <= 14
    assert lines[1] == "b is the fastest from 16 KiB to 64 KiB."
    same = _results({x: {"a": 1.0, "b": 1.02} for x in sizes})
    assert compare.in_words(same) == ["a is the fastest at every size (within 10%)."]


def test_a_time_of_wrong_elements_is_none(capsys, monkeypatch):
    """Nor the fastest, nor what the cost model is fitted to."""
    fitted, verify = [], measuring.Bench.verify

    def forged(bench, bound):
        bad = verify(bench, bound)
        return 7 if bound.kwargs.get("algorithm") == "direct_one_shot" else bad

    monkeypatch.setattr(measuring.Bench, "verify", forged)
    monkeypatch.setattr(model, "fit", lambda measured, *_: fitted.extend(measured) or {})
    words = ("all_reduce", "--threads", 2)
    only = ("--only", "ring", "--only", "direct_one_shot")
    status, out, err = run(capsys, "compare", *words, *TINY, *only, "--fit")
    assert status == 1, err
    assert "ring is the fastest at every size (within 10%)." in out
    assert out.count("WRONG") == 2 and "# wrong elements: 14 FAILED" in out
    assert {m.algorithm for m in fitted} == {"ring"}
    status, out, err = run(capsys, "explain", *words, "--bytes", "1K", "--measure")
    assert status == 1, err
    assert "note: without direct_one_shot: 7 wrong elements" in out
    (line,) = (line for line in out.splitlines() if line.startswith("> direct_one_shot"))
    assert " us         -  " in line


def test_sizes_where_all_is_wrong_are_passed_over():
    times = {4: {}, 16: {"a": 1.0}, 64: {"b": 1.0}, 256: {}}
    assert compare.in_words(_results(times)) == [
        "a is the fastest at 16 B; b passes it between 16 B and 64 B.",
        "b is the fastest at 64 B.",
    ]
    assert compare.in_words(_results({4: {}})) == []
    (line,) = _about({4: {}, 64: {"a": 1.0}}, "a")
    assert line.endswith("is the fastest at 1 size (within 10%); at 1 size it was not measured.")


BROKEN = """
import collectives
from collectives import Transfer

@collectives.algorithm("all_reduce")
def forgetful_of_the_test(n):
    yield [Transfer(r, 0, chunk=0, reduce=True) for r in range(1, n)]
"""


def test_a_broken_algorithm_does_not_end_what_is_said_of_others(capsys, tmp_path):
    source = tmp_path / "broken.py"
    source.write_text(BROKEN)
    broken = ("--import", source)
    try:
        for command in (
            ("compare", "--threads", 2, *TINY),
            ("explain", "all_reduce", "--ranks", 4),
            ("explain", "all_reduce", "--bytes", "1K", "--threads", 2, "--measure"),
        ):
            status, out, err = run(capsys, *command, *broken)
            assert status == 0, err
            assert out.count("note: without forgetful_of_the_test: ") == 1
        for command in (("bench", "-a"), ("compare", "--only")):
            words = ("--threads", 2, *TINY, *broken)
            status, out, err = run(capsys, *command, "forgetful_of_the_test", *words)
            assert (status, out) == (2, "") and "misses the contributions" in err
    finally:
        collectives.unregister("forgetful_of_the_test")


def _about(times, choose):
    class Bench:
        class backend:
            choose = staticmethod(lambda collective, nbytes: choose)

    return compare._about_auto(Bench, _results(times))


def test_what_is_chosen_is_told_of_sizes_where_it_was_measured():
    both = {4: {"a": 1.0, "b": 2.0}, 64: {"a": 1.0, "b": 2.0}}
    (line,) = _about(both, "c")
    assert line == "What is chosen by itself was not measured."
    (line,) = _about(both, "a")
    assert line == "What is chosen by itself is the fastest everywhere (within 10%)."
    (line,) = _about(both, "b")
    assert line == "What is chosen by itself is at most 2.00x slower than the fastest (b at 4 B)."
    (line,) = _about({**both, 1024: {"b": 1.0}}, "a")
    assert line.endswith("is the fastest at 2 sizes (within 10%); at 1 size it was not measured.")
    (line,) = _about({4: {"auto": 1.5, "b": 1.0}}, "c")
    assert "at most 1.50x slower than the fastest (auto at 4 B)" in line


def test_pictures_show_any_name(monkeypatch, tmp_path):
    """In the legend, and as it is; in the format that the file's ending says."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    from collectives.bench.plot import plot

    shown = []
    save = Figure.savefig

    def saved(figure, *args, **kwargs):
        shown.append([text.get_text() for text in figure.legends[0].get_texts()])
        save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", saved)
    names = ["_mine", "a$x^^b$"]
    results = compare.Results(Case("all_reduce", 2), names)
    results.times = {x: dict.fromkeys(names, 1e-6) for x in (4, 64)}
    results.peer_times = {x: {"mpi": 2e-6} for x in (4, 64)}
    plot(results, str(tmp_path / "u.svg"), "5 $ a^^piece$")
    plot(results, str(tmp_path / "u"))
    plot(results, str(tmp_path / "U.SVG"))
    assert shown == [["_mine", r"a\$x^^b\$", "mpi"]] * 3
    assert (tmp_path / "U.SVG").read_bytes().startswith(b"<?xml")
    assert (tmp_path / "u.svg").read_bytes().startswith(b"<?xml")
    assert (tmp_path / "u").read_bytes().startswith(b"\x89PNG")


# ---- explain and the model -----------------------------------------------------------------------


def test_more_than_any_call_can_have_is_told(capsys):
    status, out, err = run(capsys, "explain", "all_reduce", "--bytes", "99999999T", "--ranks", 4)
    assert (status, out) == (2, "") and "more than any call can have" in err


@pytest.mark.parametrize("ranks", range(2, 10))
def test_sums_of_parts_are_whole(ranks):
    text = explain("all_reduce", 1 << 20, [0] * (ranks - 1) + [1], one_region=False,
                   tuner=Tuner([0] * (ranks - 1) + [1], False))  # fmt: skip
    assert "1024 KiB" not in text and "1024 B" not in text


def test_explain_without_ranks(capsys):
    status, out, _ = run(
        capsys, "explain", "all_reduce", "--bytes", "64M", "--ranks", 8, "--nodes", 2
    )
    assert status == 0
    chosen = Tuner([0] * 4 + [1] * 4, False).choose("all_reduce", 64 << 20)
    assert f"runs     {chosen}" in out
    for word in ("8 ranks on 2 nodes (4 each)", "why", "predicted", "ring", "between nodes"):
        assert word in out


@pytest.mark.parametrize("collective", _core.collectives)
@pytest.mark.parametrize("transport", ["threads", "shm", "mpi"])
def test_explain_every_collective(capsys, collective, transport):
    status, out, err = run(capsys, "explain", collective, "--ranks", 4, "--transport", transport)
    assert status == 0, err
    assert "predicted" in out


def test_explain_measured(capsys):
    status, out, err = run(
        capsys, "explain", "all_gather", "--bytes", "1K", "--threads", 2, "--measure"
    )
    assert status == 0, err
    assert "measured" in out


def test_explain_names_the_dtype(capsys):
    words = ("explain", "all_reduce", "--bytes", "1K", "--datatype", "bfloat16")
    status, out, err = run(capsys, *words, "--ranks", 4)
    assert status == 0, err
    assert out.startswith("all_reduce of 1 KiB of bfloat16, 4 ranks on 1 node")
    status, out, err = run(capsys, *words, "--threads", 2, "--measure")
    assert status == 0, err
    assert "of bfloat16" in out and "measured" in out
    status, _, err = run(capsys, "explain", "all_reduce", "--bytes", 7, "--datatype", "float32")
    assert status == 2 and "--bytes 7 are no whole number of float32, of 4 bytes each" in err
    status, _, err = run(capsys, "explain", "all_reduce", "--datatype", "float33")
    assert status == 2 and "float33" in err


def test_a_forced_choice_is_explained(capsys, monkeypatch):
    monkeypatch.setenv("COLLECTIVES_ALGORITHM", "all_reduce:ring")
    status, out, _ = run(capsys, "explain", "all_reduce", "--ranks", 4)
    assert status == 0
    assert "runs     ring" in out
    assert "forced by COLLECTIVES_ALGORITHM" in out


def test_a_communicator_explains_itself():
    (text, _) = run_threads(2, lambda comm: comm.explain("broadcast", nbytes=4096))
    assert text.startswith("broadcast of 4 KiB, 2 ranks on 1 node")


def test_what_many_ranks_are_told_to_run_can_be_run(capsys):
    for size in ("0", "3M"):
        _, out, _ = run(capsys, "explain", "all_reduce", "--bytes", size, "--ranks", 520)
        words = out.splitlines()[-1].split()
        assert words[:3] == ["python", "-m", "collectives"]
        status, _, err = run(capsys, *words[3:], "--algorithm", "recursive_doubling")
        assert status == 0, err


def test_one_rank_explains_itself():
    with collectives.init() as comm:
        assert "1 rank on 1 node, over self\n" in comm.explain(nbytes=8)
        with pytest.raises(ValueError, match="unknown collective 'all_redoce'"):
            comm.explain("all_redoce", nbytes=8)
        with pytest.raises(TypeError, match=r"collective must be a name .* not None"):
            comm.explain(None, nbytes=8)


def test_node_numbers_that_are_too_large_are_told(capsys):
    for command in (("explain", "all_reduce"), ("draw", "ring", "all_reduce")):
        status, _, err = run(capsys, *command, "--node", "99999999999,0")
        assert status == 2 and "node 99999999999 is more than 2147483647" in err
        assert run(capsys, *command, "--node", "2147483647,0")[0] == 0


def test_predictions_follow_the_costs():
    nodes = [0] * 4
    link = model.LINKS["shm"]["steps"]
    cost = collectives.schedule("ring", "all_reduce", 4).cost()
    seconds = model.predict("ring", "all_reduce", 1 << 20, nodes, "shm")
    assert seconds is not None
    assert seconds == pytest.approx(
        cost["steps"] * link.alpha_s
        + cost["sent_max"] * (1 << 20) * link.beta_s_per_byte
        + cost["reduced_max"] * (1 << 20) * link.gamma_s_per_byte
    )
    crowded = model.predict("ring", "all_reduce", 1 << 20, nodes, "shm", cores=2)
    assert crowded > seconds
    near, far = work.shares("hierarchical", "all_reduce", (0, 0, 1, 1))
    assert near.steps > 0 and far.steps > 0
    assert far.sent == pytest.approx(
        collectives.schedule("hierarchical", "all_reduce", 4, node=(0, 0, 1, 1)).cost()[
            "internode_sent_max"
        ]
    )


def test_the_fit_finds_the_figures_that_made_the_times():
    made = model.Figures(
        model.LinkModel(2e-6, 3e-10, 1e-10), model.LinkModel(0, 0), entry_s=1e-6, slice_s=4e-7
    )
    nodes = [0] * 4
    measured = []
    names = ("ring", "recursive_doubling", "double_binary_tree", "halving_doubling")
    for name, exponent in itertools.product(names, range(2, 24, 3)):
        nbytes = 1 << exponent
        figures = {"steps": made}
        seconds = model.predict(name, "all_reduce", nbytes, nodes, "shm", figures=figures)
        measured.append(model.Measurement(name, "all_reduce", nbytes, seconds))
    # A few that were disturbed do not move what the others say.
    for i in (3, 11):
        measured[i] = measured[i]._replace(seconds=measured[i].seconds * 3)
    found = model.fit(measured, nodes, "shm")
    assert set(found) == {"steps"}
    assert found["steps"].near.alpha_s == pytest.approx(made.near.alpha_s, rel=0.05)
    assert found["steps"].near.beta_s_per_byte == pytest.approx(made.near.beta_s_per_byte, rel=0.05)
    assert found["steps"].near.gamma_s_per_byte == pytest.approx(
        made.near.gamma_s_per_byte, rel=0.05
    )
    assert found["steps"].entry_s == pytest.approx(made.entry_s, rel=0.05)
    assert found["steps"].slice_s == pytest.approx(made.slice_s, rel=0.1)


@pytest.mark.parametrize("factor", [40, 1 / 40, 1e-4])
def test_one_disturbed_time_does_not_outvote_the_others(factor):
    rows = [model.Measurement("ring", "all_reduce", 1024, 51e-6)] * 8
    rows.append(rows[0]._replace(seconds=51e-6 * factor))
    figures = model.fit(rows, [0, 0], "shm")
    assert model.errors(rows[:8], [0, 0], "shm", figures).max() < 0.01


def test_explain_says_when_another_is_faster():
    nodes = [0, 0]
    tuner = Tuner(nodes, True)
    chosen = tuner.choose("all_reduce", 1024)
    text = explain(
        "all_reduce",
        1024,
        nodes,
        one_region=True,
        tuner=tuner,
        measured={chosen: 2e-6, "ring": 1e-6},
    )
    assert "ring is 2.0x faster here (as measured)" in text
    assert "COLLECTIVES_ALGORITHM='all_reduce:ring'" in text
