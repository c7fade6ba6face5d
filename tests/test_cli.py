"""The commands info, bench, compare, explain and draw, end to end on small sizes.

Ranks are threads of this process where that is enough, and processes where the way they start
matters. Nothing here looks at how fast anything is, but at whether times are computed right.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import itertools
import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import launch
import numpy as np
import pytest

import collectives
from collectives import Communicator, _core, cli, drawing, run_threads
from collectives.bench import cases, measuring, report, timing
from collectives.bench.backends import Host
from collectives.bench.cases import Case, places
from collectives.cli import _common, _progress, _ranks, compare
from collectives.schedule import why_unsupported
from collectives.tuning import Tuner, model
from collectives.tuning.explain import explain

COMMANDS = ("info", "bench", "compare", "explain", "draw", "tune")
TINY = ("-b", "4", "-e", "64", "-f", "16", "-n", "3")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "COLLECTIVES_RANK", "COLLECTIVES_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def run(capsys, *arguments):
    """Exit status, output and errors of a command in this process."""
    try:
        status = cli.main([str(a) for a in arguments])
    except SystemExit as end:
        status = end.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def start(*arguments, timeout=60):
    """The same in a process of its own."""
    _, environment = launch.command("run", 1)
    command = [sys.executable, "-m", "collectives", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
    return done.returncode, done.stdout, done.stderr


# ---- help and errors -----------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples(capsys, command):
    status, out, _ = run(capsys, command, "--help")
    assert status == 0
    assert "examples:" in out
    assert f"python -m collectives {command}" in out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("bench", "--collective", "all_redcue"), "did you mean 'all_reduce'?"),
        (("bench", "--collective", "all_reduce,brodcast"), "did you mean 'broadcast'?"),
        (("bench", "-a", "rnig"), "did you mean 'ring'?"),
        (("bench", "-a", "hierarchical(rnig, ring)"), "did you mean 'ring'?"),
        (("bench", "-d", "flaot32"), "did you mean 'float32'?"),
        (("bench", "-o", "summ"), "did you mean 'sum'?"),
        (("bench", "--peer", "glo"), "did you mean 'gloo'?"),
        (("bench", "-b", "4KB"), "KB may mean 1000 or 1024"),
        (("bench", "-b", "8", "-e", "4"), "below the smallest"),
        (("bench", "-f", "1"), "never end"),
        (("bench", "-n", "0"), "no whole number >= 1"),
        (("bench", "--ranks", "2", "--threads", "2"), "give one of them"),
        (("bench", "--nodes", "2"), "give --ranks or --threads"),
        (("bench", "--threads", "2", "--nodes", "3"), "cannot be divided"),
        (("bench", "--threads", "2", "-r", "2", "--collective", "reduce"), "out of range"),
        (("bench", "--threads", "2", "-o", "avg", "-d", "int32"), "use sum and divide"),
        (("bench", "--threads", "2", "-a", "bruck"), "bruck cannot do all_reduce"),
        (("bench", "--threads", "2", "--peer", "mpi"), "start them with mpirun"),
        (("bench", "--threads", "2", "--peer", "gloo"), "--ranks instead of --threads"),
        (("bench", "--in-place", "--out-of-place"), "leave nothing"),
        (("bench", "--json", "/no/such/folder/file.json"), "/no/such/folder"),
        (("bench", "--import", "no_such_module"), "no_such_module"),
        (("bench", "--import", "no_such_file.py"), "no such file"),
        (("compare", "scater"), "did you mean 'scatter'?"),
        (("compare", "--only", "rign"), "did you mean 'ring'?"),
        (("compare", "barrier", "--png", "x.png"), "a barrier has none"),
        (("explain", "all_reduce", "--ranks", "2", "--nodes", "3"), "cannot be divided"),
        (("explain", "all_reduce", "--transport", "smh"), "did you mean 'shm'?"),
        (("explain", "all_reduce", "--node", "0,x"), "no list with the node of each rank"),
        (("explain", "all_reduce", "--node", "0,1", "--ranks", "3"), "names 2 ranks"),
        (("explain", "all_reduce", "--transport", "shm", "--node", "0,1"), "of one node"),
        (("draw", "rign", "all_reduce"), "did you mean 'ring'?"),
        (("draw", "ring", "all_reduc"), "did you mean 'all_reduce'?"),
        (("draw", "bruck", "all_reduce"), "bruck cannot do all_reduce"),
        (("draw", "auto", "all_reduce"), "name an algorithm"),
        (("draw", "ring", "broadcast", "--root", "4"), "out of range"),
        (("draw", "ring", "all_reduce", "--format", "sgv"), "did you mean 'svg'?"),
        (("info", "--rank", "2"), "unrecognized arguments"),
    ],
)
def test_errors_are_words_and_status_2(capsys, arguments, expected):
    status, _, err = run(capsys, *arguments)
    assert status == 2
    assert expected in err
    assert "Traceback" not in err


def test_ranks_are_not_started_by_a_rank(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    status, _, err = run(capsys, "info", "--ranks", "2")
    assert status == 2
    assert "rank of a launcher already" in err


def test_what_every_rank_finds_is_told_once():
    status, _, err = start("bench", "--ranks", 2, "-o", "band")
    assert status == 2
    assert err.count("band is not defined on float32") == 1
    assert "Traceback" not in err


# ---- info ----------------------------------------------------------------------------------------


def test_info(capsys):
    status, out, _ = run(capsys, "info", "--threads", 2)
    assert status == 0
    for word in ("ranks        2", "threads", _core.simd_level(), "MPI", "numpy", "avg"):
        assert word in out


def test_info_of_processes_as_json():
    status, out, err = start("info", "--ranks", 2, "--nodes", 2, "--json")
    assert status == 0, err
    facts = json.loads(out)
    assert (facts["ranks"], facts["nodes"], facts["node_of_rank"]) == (2, 2, [0, 1])
    assert facts["met_through"] == "tcp"
    assert facts["cpu"]["cores"] >= 1
    assert facts["versions"]["numpy"] == np.__version__
    assert facts["limits"]["timeout_s"] > 0
    assert "missing" in facts["mpi"] or {"path", "version", "threads"} <= set(facts["mpi"])


def test_info_without_any_mpi(capsys, monkeypatch):
    from collectives.bench import machine

    monkeypatch.setattr(machine, "_ASK_MPI", "raise RuntimeError('cannot load MPI library')")
    status, out, _ = run(capsys, "info")
    assert status == 0
    assert "cannot load MPI library" in out or "mpi4py is not installed" in out


# ---- bench ---------------------------------------------------------------------------------------


def check_rows(rows, **expected):
    assert rows
    for row in rows:
        assert tuple(row) == report.FIELDS
        assert row["time_us"] > 0
        assert row["p99_us"] >= row["time_us"]
        for name, value in expected.items():
            assert row[name] == value, (name, row)


def test_bench_of_processes(tmp_path):
    file = tmp_path / "result.json"
    status, out, err = start("bench", "--ranks", 2, *TINY, "--json", file)
    assert status == 0, err
    found = json.loads(file.read_text())
    header = found["header"]
    assert set(header) == {"machine", "versions", "commit", "command", "date"}
    assert set(header["machine"]) == {
        "cpu",
        "cores",
        "memory_bytes",
        "page_bytes",
        "huge_pages",
        "exchange_ns",
    }
    assert header["machine"]["exchange_ns"] > 0
    check_rows(found["rows"], ranks=2, nodes=1, transport="shm", wrong=0, peers=[], op="sum")
    assert [(r["bytes"], r["in_place"]) for r in found["rows"]] == [
        (4, False),
        (4, True),
        (64, False),
        (64, True),
    ]
    assert found["rows"][0]["predicted_us"] > 0
    # The table: titles and numbers end in the same columns, and come after the header.
    lines = out.splitlines()
    titles = next(line for line in lines if " bytes " in line and line.startswith("#"))
    rows = [line for line in lines if line.strip()[:1].isdigit()]
    assert len(rows) == 2
    assert titles.endswith("#wrong") and {len(titles)} == {len(row) for row in rows}
    assert lines.index(titles) > lines.index(next(x for x in lines if "cache line" in x))
    assert "# wrong elements: 0 OK" in out


@pytest.mark.parametrize("python", [False, True], ids=["core", "python"])
def test_bench_of_every_collective(capsys, tmp_path, python):
    file = tmp_path / "result.json"
    options = ["--python"] if python else []
    status, _, err = run(
        capsys, "bench", "--threads", 3, "--collective", "all", *TINY, "--json", file, *options
    )
    assert status == 0, err
    rows = json.loads(file.read_text())["rows"]
    assert {r["collective"] for r in rows} == set(_core.collectives)
    check_rows([r for r in rows if r["collective"] != "barrier"], wrong=0, transport="threads")
    for collective, group in itertools.groupby(rows, key=lambda r: r["collective"]):
        ways = {r["in_place"] for r in group}
        assert ways == set(places(collective))


@pytest.mark.parametrize(
    "options",
    [
        ("--symmetric",),
        ("--order", "rank"),
        ("-a", "ring", "-a", "hierarchical(direct_two_shot, ring)"),
        ("-d", "bfloat16", "-o", "avg"),
        ("-d", "complex64", "-o", "prod"),
        ("-d", "uint8", "-o", "bxor"),
        ("--collective", "broadcast,reduce", "-r", "1"),
        ("-i", "20"),
        ("-c", "0"),
        ("--nodes", "2"),
    ],
    ids=" ".join,
)
def test_bench_options(capsys, tmp_path, options):
    file = tmp_path / "result.json"
    status, _, err = run(capsys, "bench", "--threads", 2, *TINY, "--json", file, *options)
    assert status == 0, err
    rows = json.loads(file.read_text())["rows"]
    check_rows(rows, wrong=None if "-c" in options else 0, symmetric="--symmetric" in options)
    if "-a" in options:
        assert {r["algorithm"] for r in rows} == {options[1], options[3]}
    if "-i" in options:
        assert {r["bytes"] for r in rows} == {4, 24, 44, 64}


def test_bench_alone(capsys):
    status, out, _ = run(capsys, "bench", *TINY)
    assert status == 0
    assert "one rank moves nothing" in out


def test_a_broken_reduction_is_found(capsys, monkeypatch, tmp_path):
    """The negative control: one wrong element on one rank, and the command fails."""
    right = Communicator.all_reduce

    def broken(self, x, *args, **kwargs):
        result = right(self, x, *args, **kwargs)
        if self.rank == 1 and np.size(result) > 1 and not kwargs.get("async_op"):
            result[-1] += 1
        return result

    monkeypatch.setattr(Communicator, "all_reduce", broken)
    file = tmp_path / "result.json"
    status, out, _ = run(capsys, "bench", "--threads", 2, *TINY, "--json", file)
    assert status == 1
    assert "# wrong elements: 2 FAILED" in out
    wrong = {(r["bytes"], r["in_place"]): r["wrong"] for r in json.loads(file.read_text())["rows"]}
    assert wrong == {(4, False): 0, (4, True): 0, (64, False): 1, (64, True): 1}
    status, out, _ = run(capsys, "compare", "--threads", 2, *TINY, "--only", "ring")
    assert status == 1
    assert "WRONG" in out


def _verify_all(comm, case, elements):
    """Wrong elements of each way: as it is, and with one element changed on every rank."""
    bench = measuring.Bench(Host(comm), elements * case.itemsize, timing.Effort(iterations=1))
    found = []
    for in_place in places(case.collective):
        bound = bench.bound(case, "auto", elements, in_place)
        clean = bench.verify(bound)
        has_output = bool(len(bound.out)) and not (
            case.collective == "reduce" and comm.rank != case.root
        )
        if has_output:
            raw = bound.out[len(bound.out) // 2 :][:1].view(np.uint8)
            raw[0] ^= 1 if case.dtype == "bool" else 0x41
        found.append((clean, bound.wrong(), has_output))
    return found


@pytest.mark.parametrize("collective", [c for c in _core.collectives if c != "barrier"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "float8_e5m2", "int8", "bool"])
def test_verification_sees_one_wrong_element(collective, dtype):
    case = Case(collective, 3, dtype)
    # More than one period of the data, and blocks that end at odd places.
    for elements in (3, 3 * 50021):
        for per_rank in run_threads(3, _verify_all, case, elements):
            for clean, changed, has_output in per_rank:
                assert clean == 0
                assert changed == (1 if has_output else 0)


@pytest.mark.parametrize("size", [1, 9, 40])
def test_data_are_exact_in_every_dtype(size):
    small = ("float16", "float8_e4m3", "float8_e5m2", "int8")
    for dtype, op in itertools.product(small if size == 40 else _core.dtypes, _core.ops):
        if _core.why_op_unsupported(op, dtype):
            continue
        case = Case("all_reduce", size, dtype, op)
        total = cases.combined(case)
        if op == "avg":
            continue
        contributions = [cases.contribution(case, r) for r in range(size)]
        assert all(c.dtype == total.dtype and len(c) == cases.PERIOD for c in contributions)
        if op == "sum" and dtype != "bool":  # backwards, rounding after every step
            backwards = contributions[-1]
            for c in contributions[-2::-1]:
                backwards = (backwards + c).astype(total.dtype)
            assert (backwards == total).all()
            assert len(np.unique(total)) > 1


# ---- timing --------------------------------------------------------------------------------------


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
        assert calls >= 7
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


def test_arguments_survive_the_way_to_the_ranks():
    from collectives.cli import bench

    def parse(words):
        parser = argparse.ArgumentParser()
        bench.add_arguments(parser)
        return parser.parse_args(words)

    words = ["-b", "1K", "-a", "ring", "-a", "hierarchical(ring, ring)", "--python", "--seconds=1"]
    first = parse([*words, "--ranks", "3"])
    again = parse(_ranks.arguments_of(first, without=("ranks",)))
    assert again.ranks is None
    for name in ("minbytes", "algorithm", "python", "seconds", "maxbytes", "collective"):
        assert getattr(first, name) == getattr(again, name)


# ---- peers ---------------------------------------------------------------------------------------


@pytest.mark.mpi
@pytest.mark.parametrize("python", [False, True], ids=["core", "python"])
def test_bench_beside_mpi(tmp_path, python):
    command, environment = launch.command("openmpi", 2)
    file = tmp_path / "result.json"
    options = ["--python"] if python else []
    bench = ["-m", "collectives", "bench", "--collective", "all", "--peer", "mpi"]
    done = subprocess.run(
        [*command, *bench, *TINY, "--json", str(file), *options],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())["rows"]
    assert "mpi/ours" in done.stdout
    for row in rows:
        if row["collective"] in ("gather", "scatter") and not python:
            assert row["peers"] == []
            continue
        (peer,) = row["peers"]
        assert peer["name"] == "mpi"
        assert peer["version"].startswith("Open MPI")
        assert peer["time_us"] > 0
        assert peer["ratio"] == pytest.approx(peer["time_us"] / row["time_us"], rel=1e-3)


@pytest.mark.torch
def test_bench_beside_gloo(tmp_path):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    file = tmp_path / "result.json"
    names = "all_reduce,all_gather,broadcast,barrier"
    status, _, err = start(
        "bench", "--ranks", 2, "--collective", names, *TINY, "--peer", "gloo", "--json", file
    )
    assert status == 0, err
    rows = json.loads(file.read_text())["rows"]
    for row in rows:
        expected = 0 if row["collective"] == "all_reduce" and not row["in_place"] else 1
        assert len(row["peers"]) == expected, row


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
    monkeypatch.setattr(compare.importlib.util, "find_spec", lambda name: None)
    status, _, err = run(capsys, "compare", "--threads", 2, "--png", tmp_path / "x.png")
    assert status == 2
    assert "pip install collectives[plot]" in err


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


# ---- explain and the model -----------------------------------------------------------------------


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


def test_a_forced_choice_is_explained(capsys, monkeypatch):
    monkeypatch.setenv("COLLECTIVES_ALGORITHM", "all_reduce:ring")
    status, out, _ = run(capsys, "explain", "all_reduce", "--ranks", 4)
    assert status == 0
    assert "runs     ring" in out
    assert "forced by COLLECTIVES_ALGORITHM" in out


def test_a_communicator_explains_itself():
    (text, _) = run_threads(2, lambda comm: comm.explain("broadcast", nbytes=4096))
    assert text.startswith("broadcast of 4 KiB, 2 ranks on 1 node")


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
    near, far = model.shares("hierarchical", "all_reduce", (0, 0, 1, 1))
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


# ---- draw ----------------------------------------------------------------------------------------


def test_draw_a_ring(capsys):
    status, out, _ = run(capsys, "draw", "ring", "all_reduce", "-n", 3)
    assert status == 0
    assert out.splitlines()[2:5] == [
        "         rank 0     rank 1     rank 2",
        "round 0  ├── 0+ ───▶│          │",
        "         │          ├── 1+ ───▶│",
    ]
    assert "2+: chunk 2 is combined" in out


def _all_schedules(ranks):
    for info, collective in itertools.product(collectives.algorithms(), _core.collectives):
        for n in ranks:
            if not why_unsupported(info.name, collective, n):
                yield collectives.schedule(info.name, collective, n)


def test_every_schedule_can_be_drawn_as_text():
    for schedule in _all_schedules((1, 2, 5, 8, 20)):
        text = schedule.draw()
        assert schedule.algorithm in text
        assert max(map(len, text.splitlines())) <= 200
        if 1 < schedule.nranks <= 5:  # each chunk of each transfer is on an arrow or in a list
            arrows = text.count("▶") + text.count("◀") + text.count("→")
            assert arrows >= min(8, sum(len(drawing.messages(r)) for r in schedule.rounds))


def test_every_schedule_can_be_drawn_as_svg():
    for schedule in _all_schedules((2, 5, 40)):
        root = ElementTree.fromstring(schedule.draw("svg"))
        width, height = float(root.get("width")), float(root.get("height"))
        arrows = 0
        for element in root.iter():
            kind = element.tag.rpartition("}")[2]
            assert all("nan" not in value for value in element.attrib.values())
            if kind == "g":
                arrows += 1
            if kind == "text" and element.get("x"):
                assert 0 <= float(element.get("x")) <= width
                assert 0 <= float(element.get("y")) <= height
        if schedule.nranks == 5:
            assert arrows == sum(len(drawing.messages(r)) for r in schedule.rounds)


def test_draw_svg_into_a_file(capsys, tmp_path):
    file = tmp_path / "picture.svg"
    name = "hierarchical(direct_two_shot, ring)"
    status, out, err = run(capsys, "draw", name, "all_reduce", "--node", "0,0,1,1", "-o", file)
    assert (status, out) == (0, ""), err
    text = file.read_text()
    assert "node 1" in text and "stroke-dasharray" in text
    assert ElementTree.fromstring(text).tag.endswith("svg")


def test_unknown_format_of_a_drawing():
    with pytest.raises(ValueError, match="did you mean 'svg'"):
        collectives.schedule("ring", "all_reduce", 2).draw("swg")


# ---- parts ---------------------------------------------------------------------------------------


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_shows_after_two_seconds_and_only_on_terminals(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(_progress.time, "monotonic", lambda: now[0])
    terminal, pipe = _Terminal(), io.StringIO()
    shown = _progress.Progress(4, stream=terminal)
    hidden = _progress.Progress(4, stream=pipe)
    for moment in (1.0, 3.0):
        now[0] = moment
        shown.step("all_reduce")
        hidden.step("all_reduce")
        if moment == 1.0:
            assert terminal.getvalue() == ""
    assert "50%" in terminal.getvalue() and "3 s left" in terminal.getvalue()
    shown.clear()
    assert terminal.getvalue().endswith("\r")
    assert pipe.getvalue() == ""


def test_sizes():
    assert measuring.sizes(4, 64, 4, None) == [4, 16, 64]
    assert measuring.sizes(0, 2, 2, None) == [0, 1, 2]
    assert measuring.sizes(4, 10, 2, 3) == [4, 7, 10]
    blocked = Case("all_gather", 3)
    assert measuring.elements_of(blocked, [4, 8, 16, 32]) == [3, 6]
    assert _common.size("64K") == 65536
