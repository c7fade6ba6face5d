"""`simulate`, `compare --topology` and its page, end to end."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from commands import run

from collectives import simulate
from collectives.errors import ConfigError
from collectives.simulate import comparing, traffic

pytest.importorskip("yaml", reason="topology files need PyYAML")

RACKS = Path(__file__).resolve().parents[1] / "examples/topologies/two-racks.yaml"
RESULTS = Path(__file__).resolve().parents[1] / "bench/results"


# ---- simulate ------------------------------------------------------------------------------------


def test_simulate_prints_all_algorithms_the_fastest_first(capsys):
    status, out, err = run(
        capsys, "simulate", "all_reduce", "--topology", "dgx-h100", "--nodes", "1,2", "--bytes",
        "1M", "--links",
    )  # fmt: skip
    assert status == 0, err
    first, second = out.split("# all_reduce on ")[1:]
    assert first.startswith("1 x DGX H100, 8 ranks") and second.startswith("2 x DGX H100, 16 ranks")
    rows = [line.split() for line in first.splitlines() if re.match(r"\s+\w+\s+1048576", line)]
    assert {row[0] for row in rows} == set(
        simulate.candidates("all_reduce", simulate.load("dgx-h100", 1))
    )
    busbw = [float(row[5]) for row in rows]
    assert busbw == sorted(busbw, reverse=True)
    assert "nvlink of gpu" in first and "ndr of nic" in second
    assert "of the time" in first


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--nodes", "0"), "no whole number"),
        (("--nodes", "4..2"), "goes down"),
        (("--bytes", "0"), "rising range"),
        (("--bytes", "1M:1K"), "rising range"),
        (("--bytes", "1MB"), "1000 or 1024"),
        (("--algorithm", "rong"), "did you mean 'ring'"),
        (("--root", "1"), "--root goes with broadcast"),
        (("--algorithm", "bruck"), "bruck cannot do all_reduce"),
        (("--algorithm", "auto"), "auto chooses by size; name an algorithm"),
        (("--algorithm", "binomial_tree", "--symmetric"), "cannot do all_reduce"),
    ],
)
def test_simulate_says_what_is_wrong(capsys, arguments, message):
    status, _, err = run(capsys, "simulate", "all_reduce", "--topology", "dgx-h100", *arguments)
    assert status == 2
    assert message in err


def test_a_simulated_root_is_one_of_the_ranks(capsys):
    broadcast = ("simulate", "broadcast", "--topology", "dgx-h100", "--root")
    assert run(capsys, *broadcast, "7")[0] == 0
    status, _, err = run(capsys, *broadcast, "9")
    assert status == 2 and "root 9 is out of range" in err


def test_a_simulated_barrier_has_no_sizes(capsys):
    assert run(capsys, "simulate", "barrier", "--topology", "dgx-h100")[0] == 0
    status, _, err = run(capsys, "simulate", "barrier", "--topology", "dgx-h100", "--bytes", "1K")
    assert status == 2 and "leave --bytes out" in err


def test_simulate_needs_a_topology_that_there_is(capsys, tmp_path):
    assert run(capsys, "simulate", "all_reduce")[0] == 2
    bad = tmp_path / "bad.yaml"
    bad.write_text("gpus: 8\n\nlinks: []\n", encoding="utf-8")
    status, _, err = run(capsys, "simulate", "all_reduce", "--topology", bad)
    assert status == 2 and "bad.yaml, line 1: the topology has no devices" in err


def test_simulate_leaves_out_what_is_too_large(capsys, monkeypatch):
    """The others are shown; one that was asked for by name is refused."""
    monkeypatch.setattr(traffic, "_MOST_TRANSFERS", 60)
    arguments = ("simulate", "all_reduce", "--topology", "dgx-h100", "--bytes", "1M")
    status, out, err = run(capsys, *arguments)
    assert status == 0, err
    assert " double_binary_tree" in out and not re.search(r"^ +ring ", out, re.M)
    assert re.search(r"^# left out: too large to follow .*ring over 8 ranks", out, re.M)
    status, out, err = run(capsys, *arguments, "-a", "ring")
    assert (status, out) == (2, "") and "too large to follow rank by rank, and ring" in err


def test_fewer_nodes_than_have_faults(capsys):
    """The example's faults are on nodes 2 and 5."""
    arguments = ("all_reduce", "--topology", RACKS, "--bytes", "1M")
    for command in ("simulate", "compare"):
        status, out, err = run(capsys, command, *arguments, "--nodes", "1")
        assert status == 0, err
        assert "4 ranks" in out and ", without the faults of line 20, 21" in out
        status, out, err = run(capsys, command, *arguments, "--nodes", "4")
        assert status == 0 and ", without the faults of line 21" in out
    status, out, err = run(
        capsys, "simulate", "training", "--topology", RACKS, "--params", "1e8", "--sharding", "ddp",
        "--ranks", "4,16,32",
    )  # fmt: skip
    assert status == 0, err
    assert re.findall("# (.*), without the faults of line (.*)", out) == [
        ("4 ranks", "20, 21"), ("16 ranks", "21"),
    ]  # fmt: skip


def test_a_root_that_some_nodes_have_not_is_told_before_the_first_table(capsys):
    arguments = ("broadcast", "--topology", "dgx-h100", "--bytes", "1M", "--nodes", "2,1")
    for command in ("simulate", "compare"):
        status, out, err = run(capsys, command, *arguments, "--root", "9")
        assert (status, out) == (2, "")
        assert err.endswith(": root 9 is out of range: ranks are 0 to 7\n")


# ---- compare -------------------------------------------------------------------------------------


def test_compare_says_who_wins_where(capsys, tmp_path):
    out_file = tmp_path / "c.json"
    status, out, err = run(
        capsys, "compare", "--topology", "dgx-h100", "--nodes", "1,2", "--bytes", "1K:16M",
        "--json", out_file,
    )  # fmt: skip
    assert status == 0, err
    one, two = out.split("\nfastest, or within 2 % of it\n")[1].splitlines()[:2]
    # A node's ranks are one hop apart; nodes of several ranks combine within before they cross.
    assert one.startswith("  1 node, 8 ranks: direct_one_shot (1 KiB")
    assert two.startswith("  2 nodes, 16 ranks:") and "hierarchical(" in two.rsplit("), ", 1)[1]
    rows = json.loads(out_file.read_text())["rows"]
    assert all(row["root"] is None and row["extrapolated"] is False for row in rows)
    for nodes, nbytes in ((1, 1024), (2, 1 << 24)):
        mine = [r for r in rows if (r["nodes"], r["bytes"]) == (nodes, nbytes)]
        best = min(mine, key=lambda r: r["simulated_us"])["algorithm"]
        assert best in (one if nodes == 1 else two)
    assert len(out.splitlines()) > 20


def test_who_wins_by_less_than_the_band_is_called_so(monkeypatch):
    """A star says who is the fastest; the stretches, the picture and the page say what they say."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("plotly")
    from matplotlib.figure import Figure

    from collectives.cli import _simulated
    from collectives.simulate.page import page
    from collectives.simulate.picture import picture

    result = comparing.compare(simulate.load("dgx-h100"), "all_reduce", [1], [1 << 10, 1 << 20])
    words = "fastest, or within 2 % of it"
    assert words in _simulated.tables(result)
    assert words in page(result) and f"<h2>F{words[1:]}</h2>" in page(result)
    titles = []
    monkeypatch.setattr(Figure, "suptitle", lambda self, title, **_: titles.append(title))
    monkeypatch.setattr(Figure, "savefig", lambda *_, **__: None)
    result.topology = dataclasses.replace(result.topology, name="a $x^^ b$")
    picture(result, "none.png")
    assert r"a \$x^^ b\$" in titles[0]
    assert titles[0].endswith(f"band: {words}")


@pytest.mark.parametrize("name", ["c.png", "c", "c.of"])
def test_compare_draws(capsys, tmp_path, name):
    """Into the file that was named, whatever its ending."""
    pytest.importorskip("matplotlib")
    picture = tmp_path / name
    status, _, err = run(
        capsys, "compare", "all_gather", "--topology", "pcie-100gbe", "--nodes", "1,2", "--bytes",
        "1K,1M", "--png", picture,
    )  # fmt: skip
    assert status == 0, err
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--html", "x.html"), "--html goes with --topology"),
        (("--bytes", "1K"), "--bytes goes with --topology"),
        (("--threads", "2", "--nodes", "1,2"), "only --topology can do"),
        (("barrier", "--topology", "dgx-h100"), "a barrier has none"),
        (("--topology", "dgx-h100", "--only", "rong"), "did you mean 'ring'"),
        (("--topology", "dgx-h100", "--only", "auto"), "auto chooses by size"),
        (("--topology", "dgx-h100", "--fit"), "--fit goes without --topology"),
        (("--topology", "dgx-h100", "--peer", "nccl"), "--peer goes without --topology"),
        (("--topology", "dgx-h100", "--device", "cuda"), "--device goes without --topology"),
        (("--topology", "dgx-h100", "--ranks", "16"), "--ranks goes without --topology"),
        (("--topology", "dgx-h100", "-f", "2"), "--stepfactor goes without --topology"),
        (("--topology", "dgx-h100", "--symmetric"), "--symmetric goes without --topology"),
        (("--topology", "dgx-h100", "-b", "1K", "--bytes", "1K"), "both give sizes"),
        (("--topology", "dgx-h100", "-b", "1M", "-e", "1K"), "1024, is below the smallest"),
        (("--topology", "dgx-h100", "-e", "0"), "the largest size, 0, is below the smallest, 4"),
        (("--topology", "dgx-h100", "--json", "/proc/x"), "/proc/x cannot be written: No such"),
        (
            ("--topology", "dgx-h100", "--json", "same", "--html", "./same"),
            "would hold two results",
        ),
        (("--threads", "2", "--json", "same", "--png", "same"), "would hold two results"),
        (("--topology", "dgx-h100", "--measured", "/none"), "--measured goes with --html"),
        (("--topology", "dgx-h100", "--root", "1"), "--root goes with broadcast"),
        (("broadcast", "--topology", "dgx-h100", "--root", "9"), "root 9 is out of range"),
        (("--topology", "dgx-h100", "--only", "bruck"), "nothing can do all_reduce with 1 nodes"),
    ],
)
def test_compare_says_what_is_wrong(capsys, arguments, message):
    status, _, err = run(capsys, "compare", *arguments)
    assert status == 2
    assert message in err


def test_compare_still_takes_nodes_for_ranks_of_its_own(capsys):
    status, out, err = run(
        capsys, "compare", "--threads", "2", "--nodes", "2", "-e", "64", "-n", "2", "--only", "ring"
    )
    assert status == 0, err
    assert "2 ranks on 2 nodes" in out


def test_measured_files(tmp_path):
    curves = comparing.read_measured([RESULTS], "all_reduce")
    assert any("Open MPI" in m.label for m in curves)
    assert all(m.times and min(m.times.values()) > 0 for m in curves)
    assert all(list(m.times) == sorted(m.times) for m in curves)
    for text, message in (("[", "as JSON"), ("[]", "no file of"), ('{"rows": [{}]}', "lacks")):
        file = tmp_path / "m.json"
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=message):
            comparing.read_measured([file], "all_reduce")
        assert comparing.read_measured([tmp_path], "all_reduce") == []


def _row(**fields):
    usual = {
        "collective": "all_reduce", "algorithm": "ring", "bytes": 64, "dtype": "float32",
        "op": "sum", "root": None, "order": "any", "ranks": 2, "nodes": 1, "transport": "shm",
        "device": "cpu", "mode": "host", "symmetric": False, "in_place": True, "time_us": 2.0,
        "peers": [{"name": "mpi", "version": "MPI 5", "time_us": 4.0, "ratio": 2.0}],
    }  # fmt: skip
    return {**usual, **fields}


@pytest.mark.parametrize(
    ("fields", "label", "peer"),
    [
        ({"symmetric": True}, ", symmetric", ""),
        ({"order": "rank"}, ", in rank order", ""),
        ({"dtype": "int8"}, ", int8", ", int8"),
        ({"op": "max"}, ", max", ", max"),
        ({"root": 1}, ", root 1", ", root 1"),
        ({"mode": "graph"}, ", graph", ", graph"),
    ],
)
def test_calls_of_other_kinds_have_curves_of_their_own(tmp_path, fields, label, peer):
    file = tmp_path / "m.json"
    other = _row(**fields, time_us=1.0)
    file.write_text(json.dumps({"rows": [_row(), other, _row(in_place=False, time_us=3.0)]}))
    found = {m.label: m.times[64] for m in comparing.read_measured([file], "all_reduce")}
    where = "shm, 2 ranks, cpu"
    assert found == {
        f"ring ({where})": pytest.approx(2e-6),
        f"ring ({where}{label})": pytest.approx(1e-6),
        f"mpi MPI 5 ({where})": pytest.approx(4e-6),
        f"mpi MPI 5 ({where}{peer})": pytest.approx(4e-6),
    }


@pytest.mark.parametrize(
    "fields",
    [
        {"time_us": None},
        {"bytes": "64"},
        {"peers": 3},
        {"peers": [{"name": "mpi"}]},
        {"peers": [{"name": "mpi", "version": "5", "time_us": "4"}]},
        {"peers": [{"name": "mpi", "version": "5", "time_us": -4.0}]},
        {"ranks": 0},
        {"nodes": 0},
        {"bytes": -64},
        {"time_us": -1.0},
        {"time_us": float("nan")},
        {"bytes": float("inf")},
        {"bytes": 10**400},
        {"ranks": True},
    ],
    ids=lambda fields: str(fields)[:40],
)
def test_rows_that_are_no_measurements_are_refused(tmp_path, fields):
    file = tmp_path / "m.json"
    file.write_text(json.dumps({"rows": [_row(**fields)]}))
    with pytest.raises(ConfigError, match=r"m\.json: .* is no"):
        comparing.read_measured([file], "all_reduce")
    (tmp_path / "n.json").write_text(json.dumps({"rows": [_row()]}))
    assert len(comparing.read_measured([tmp_path], "all_reduce")) == 2  # ring and mpi


# ---- the page ------------------------------------------------------------------------------------


class _Tags(HTMLParser):
    """Attributes that make a browser load something, and ids."""

    def __init__(self):
        super().__init__()
        self.loaded, self.ids = [], set()

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name in ("src", "href", "data", "action") and not value.startswith("data:"):
                self.loaded.append((tag, value))
            if name == "id":
                self.ids.add(value)


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    pytest.importorskip("plotly", reason="the page needs plotly")
    from collectives.simulate.page import write_page

    result = comparing.compare(
        simulate.load("dgx-h100"), "all_reduce", [1, 2], [1 << 10, 1 << 16, 1 << 22, 1 << 28]
    )
    result.measured = comparing.read_measured([RESULTS], "all_reduce")
    path = tmp_path_factory.mktemp("page") / "page.html"
    write_page(result, path)
    return path


def test_the_page_loads_nothing(page_file):
    tags = _Tags()
    text = page_file.read_text(encoding="utf-8")
    tags.feed(text)
    assert tags.loaded == []
    assert {"winners", "nodes-1", "nodes-2", "measured"} <= tags.ids
    assert text.count("plotly.js v") == 1


def _chromium():
    for name in ("chromium", "chromium-browser", "google-chrome"):
        found = shutil.which(name)
        if found:
            return found
    return None


@pytest.mark.skipif(_chromium() is None, reason="no chromium on PATH: apt-get install chromium")
def test_the_page_draws_in_a_browser(page_file, tmp_path):
    """Without a network; what the scripts have made of the page is looked at."""
    done = subprocess.run(
        [
            _chromium(),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--virtual-time-budget=20000",
            "--dump-dom",
            page_file.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=100,
    )
    dom = done.stdout
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Uncaught" not in done.stderr
    assert dom.count('class="main-svg"') >= 4  # plotly draws each plot into some of them
    body = dom[dom.rindex("<h1>") :]
    assert len(re.findall(r'<path class="js-line"', dom)) >= 2 * (6 + 10)
    for name in ("hierarchical(direct_two_shot, ring)", "double_binary_tree", "Open MPI"):
        assert f">{name}" in body or name in body
    assert re.search(r'class="legendtext"[^>]*>direct_one_shot<', dom)
