"""`simulate`, `simulate training`, `compare --topology` and its page, end to end."""

from __future__ import annotations

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
from collectives.simulate import comparing, training
from collectives.simulate.topology import Device, Engine, Fault, Link, Topology

pytest.importorskip("yaml", reason="topology files need PyYAML")

RESULTS = Path(__file__).resolve().parents[1] / "bench/results"
GB = 1e9


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
        (("--root", "9"), "root 9 is out of range"),
        (("--algorithm", "bruck"), "bruck cannot do all_reduce"),
        (("--algorithm", "binomial_tree", "--symmetric"), "cannot do all_reduce"),
    ],
)
def test_simulate_says_what_is_wrong(capsys, arguments, message):
    status, _, err = run(capsys, "simulate", "all_reduce", "--topology", "dgx-h100", *arguments)
    assert status == 2
    assert message in err


def test_simulate_needs_a_topology_that_there_is(capsys, tmp_path):
    assert run(capsys, "simulate", "all_reduce")[0] == 2
    bad = tmp_path / "bad.yaml"
    bad.write_text("gpus: 8\n\nlinks: []\n", encoding="utf-8")
    status, _, err = run(capsys, "simulate", "all_reduce", "--topology", bad)
    assert status == 2 and "bad.yaml, line 1: the topology has no devices" in err


# ---- compare -------------------------------------------------------------------------------------


def test_compare_says_who_wins_where(capsys, tmp_path):
    out_file = tmp_path / "c.json"
    status, out, err = run(
        capsys, "compare", "--topology", "dgx-h100", "--nodes", "1,2", "--bytes", "1K:16M",
        "--json", out_file,
    )  # fmt: skip
    assert status == 0, err
    one, two = out.split("\nfastest\n")[1].splitlines()[:2]
    # A node's ranks are one hop apart; nodes of several ranks combine within before they cross.
    assert one.startswith("  1 node, 8 ranks: direct_one_shot (1 KiB")
    assert two.startswith("  2 nodes, 16 ranks:") and "hierarchical(" in two.rsplit("), ", 1)[1]
    rows = json.loads(out_file.read_text())["rows"]
    for nodes, nbytes in ((1, 1024), (2, 1 << 24)):
        mine = [r for r in rows if (r["nodes"], r["bytes"]) == (nodes, nbytes)]
        best = min(mine, key=lambda r: r["simulated_us"])["algorithm"]
        assert best in (one if nodes == 1 else two)
    assert len(out.splitlines()) > 20


def test_compare_draws(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "c.png"
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
        (("--topology", "dgx-h100", "--json", "/proc/x"), "/proc/x cannot be written: No such"),
        (("--topology", "dgx-h100", "--measured", "/none"), "/none: it cannot be read: No such"),
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


# ---- training ------------------------------------------------------------------------------------


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
    ddp, two = (training.step(more, topology, 8, s) for s in ("ddp", "zero-2"))
    assert ddp.communication_s == pytest.approx(sent["ddp"])  # once a step
    assert two.communication_s == pytest.approx(sent["ddp"] * (4 + 1) / 2, rel=0.01)


def test_hybrid_keeps_gathering_within_the_node():
    topology = simulate.load("dgx-h100")
    job = training.Job(params=7e9)
    hybrid, zero = (training.step(job, topology, 64, s) for s in ("hybrid", "zero-3"))
    assert hybrid.exposed_s < zero.exposed_s
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
    assert all(0 < float(r[-1]) <= 100 for r in rows)


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
    ],
)
def test_training_says_what_is_wrong(capsys, arguments, message):
    status, _, err = run(capsys, "simulate", "training", *arguments)
    assert status == 2
    assert message in err


def test_training_needs_the_speed_of_gpus():
    with pytest.raises(ConfigError, match="does not say how fast its GPUs are"):
        training.step(training.Job(params=1e9), lone(2, 100, flops=0), 2, "ddp")
