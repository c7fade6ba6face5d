"""The command bench, end to end on small sizes, its verification, and its measurement beside peers.

Ranks are threads of this process where that is enough, and processes where the way they start
matters. Nothing here looks at how fast anything is.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import subprocess

import launch
import numpy as np
import pytest
from commands import TINY, check_rows, run, start

from collectives import Communicator, _core, run_threads
from collectives.bench import cases, machine, measuring, timing
from collectives.bench.backends import Host
from collectives.bench.cases import REDUCING, Case, places
from collectives.bench.report import Column, Table, describe

pytestmark = pytest.mark.usefixtures("no_launcher")


def test_bench_of_processes(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # without a table that was measured
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


def test_a_barrier_has_no_bandwidth(capsys):
    status, out, _ = run(capsys, "bench", "--threads", 2, "--collective", "barrier", *TINY)
    assert status == 0
    assert "average bus bandwidth" not in out


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
    assert {r["root"] for r in rows} == ({1} if "-r" in options else {None})
    orders = {"any", None} if "-r" in options else {"rank"} if "--order" in options else {"any"}
    assert {r["order"] for r in rows} == orders
    if "-a" in options:
        assert {r["algorithm"] for r in rows} == {options[1], options[3]}
    if "-i" in options:
        assert {r["bytes"] for r in rows} == {4, 24, 44, 64}


def test_what_is_not_verified_is_called_so(capsys):
    for command in ("bench", "compare"):
        assert "not" not in run(capsys, command, "--threads", 2, *TINY)[1].split("#\n")[-1]
        _, out, _ = run(capsys, command, "--threads", 2, *TINY, "-c", "0")
        assert "# nothing was verified (-c 0)" in out, command


def test_results_say_what_else_decided(capsys, monkeypatch, tmp_path):
    """Variables that are set, and the measured table without its folder."""
    file, table = tmp_path / "result.json", tmp_path / "table.json"
    tune = ("tune", "--threads", 2, "--collective", "all_reduce", "-b", 64, "-e", 64)
    status, _, err = run(capsys, *tune, "--seconds", "0.001", "-o", table)
    assert status == 0, err
    monkeypatch.setenv("COLLECTIVES_TABLE", str(table))
    monkeypatch.setenv("COLLECTIVES_ALGORITHM", "all_reduce:ring")
    monkeypatch.setenv("COLLECTIVES_SIMD", "")
    for command in ("bench", "compare"):
        status, out, err = run(capsys, command, "--threads", 2, *TINY, "--json", file)
        assert status == 0, err
        choices = json.loads(file.read_text())["header"]["choices"]
        assert list(choices) == ["COLLECTIVES_ALGORITHM", "table"]
        assert choices["COLLECTIVES_ALGORITHM"] == "all_reduce:ring"
        assert choices["table"].startswith("table.json, 20")
        assert (
            "# choices decided by: COLLECTIVES_ALGORITHM=all_reduce:ring, table=table.json" in out
        )


def test_nodes_that_the_command_line_divides_are_no_choice_of_a_variable(monkeypatch):
    """--nodes sets COLLECTIVES_NODE for the ranks; one that the user has set is told."""
    with_threads = run_threads(1, lambda comm: machine.header(comm, "bench"))[0]
    header = {**with_threads, "choices": {"COLLECTIVES_NODE": "0", "COLLECTIVES_SIMD": "avx2"}}
    monkeypatch.delenv("COLLECTIVES_RENDEZVOUS", raising=False)
    assert "choices decided by: COLLECTIVES_NODE=0, COLLECTIVES_SIMD=avx2" in describe(header)
    monkeypatch.setenv("COLLECTIVES_RENDEZVOUS", "launcher")  # as `run` and --ranks do
    assert "choices decided by: COLLECTIVES_SIMD=avx2" in describe(header)
    only = {**header, "choices": {"COLLECTIVES_NODE": "0"}}
    assert not any("choices" in line for line in describe(only))


def test_columns_at_the_right_and_at_the_left():
    table = Table([Column("n", "", 4), Column("name", "us", 8, left=True), Column("x", "", 3)])
    assert table.header() == "#   n name       x\n#     us"
    assert table.row(["1", "ring", "2"]) == "    1 ring       2"


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
    divided = collective in REDUCING and not _core.why_op_unsupported("avg", dtype)
    # More than one period of the data, and blocks that end at odd places.
    for elements, op in itertools.product((3, 3 * 50021), ["sum", "avg"][: 1 + divided]):
        case = Case(collective, 3, dtype, op)
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


# ---- peers ---------------------------------------------------------------------------------------


def under_mpi(tmp_path, *program):
    """Two ranks under Open MPI run `bench TINY`; `program`: what Python is to run, and options."""
    command, environment = launch.command("openmpi", 2)
    return subprocess.run(
        [*command, *program, *TINY],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
        cwd=tmp_path,
    )


def need_torch():
    """Torch is an extra, which `make test` does without; CI has it."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")


@pytest.mark.mpi
@pytest.mark.parametrize("python", [False, True], ids=["core", "python"])
def test_bench_beside_mpi(tmp_path, python):
    file = tmp_path / "result.json"
    options = ["--python"] if python else []
    bench = ["-m", "collectives", "bench", "--collective", "all", "--peer", "mpi"]
    done = under_mpi(tmp_path, *bench, "--json", str(file), *options)
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
    need_torch()
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


# What makes a peer move nothing.
_BROKEN = {
    "mpi": """
from collectives import _core
_core.time_mpi = lambda core, handle, warmup, iterations, *arguments: [(0, 1)] * iterations
""",
    "gloo": """
import torch.distributed as dist
dist.broadcast = lambda *arguments: None
""",
}


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("peer", "version"),
    [("mpi", "Open MPI"), pytest.param("gloo", "torch", marks=pytest.mark.torch)],
)
def test_a_peer_that_is_wrong_is_not_timed(tmp_path, peer, version):
    if peer == "gloo":
        need_torch()
    program = tmp_path / "program.py"
    run = "import sys\nfrom collectives import cli\nsys.exit(cli.main(sys.argv[1:]))\n"
    program.write_text(_BROKEN[peer] + run, encoding="utf-8")
    done = under_mpi(tmp_path, str(program), "bench", "--collective", "broadcast", "--peer", peer)
    assert done.returncode == 2, done.stderr
    assert version in done.stderr
    assert "1 wrong elements in broadcast of 4 bytes" in done.stderr


@pytest.mark.mpi
def test_a_sum_that_mpi_lacks_has_no_figure(tmp_path):
    bench = ["-m", "collectives", "bench", "--peer", "mpi", "--python", "-d", "bool"]
    file = tmp_path / "result.json"
    done = under_mpi(tmp_path, *bench, "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert all(row["peers"] == [] for row in json.loads(file.read_text())["rows"])
