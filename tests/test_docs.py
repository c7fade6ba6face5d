"""The documentation: its code runs, and what is generated is up to date.

Python blocks of README.md and docs/ run as they stand, each in a process of its own. Comments say
what they need:

    <!-- ranks: 4 -->     the next block runs on 4 ranks
    <!-- continue -->     the next block goes on where the one before ended
    <!-- no test -->      the next block does not run

Commands in indented blocks that begin with `python -m collectives` run as well; those for GPUs end,
where there is none, with the words for that.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from collectives import _core
from collectives.config import VARIABLES

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"((?:^<!-- [^>]* -->\n)*)^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^    (python -m collectives .*?)(?: {2,}.*)?$", re.MULTILINE)


class Block(NamedTuple):
    """Python code of a page, together with all that it continues."""

    page: str
    line: int
    code: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks() -> list[Block]:
    found: list[Block] = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in _BLOCK.finditer(text):
            comments, code = match.groups()
            if "<!-- no test -->" in comments:
                continue
            ranks = re.search(r"<!-- ranks: (\d+) -->", comments)
            line = text.count("\n", 0, match.start(2)) + 1
            block = Block(page.name, line, code, int(ranks[1]) if ranks else 1)
            if "<!-- continue -->" in comments:
                before = found.pop()
                block = before._replace(code=before.code + code)
            found.append(block)
    return found


def commands() -> list[str]:
    """Every command of the pages, once, without those that are only patterns."""
    found = [c for page in PAGES for c in _COMMAND.findall(page.read_text(encoding="utf-8"))]
    return sorted({command.strip() for command in found})


def start(command: list[str], folder: Path, seconds: float = 60) -> str:
    """Runs a command in `folder`; returns its output, and fails if it does."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("COLLECTIVES_")}
    environment.update(MPLBACKEND="Agg", PYTHONPATH=str(ROOT))
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def load(path: Path):
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # as for a script that is started
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


def test_there_is_code_to_run():
    pages = {block.page for block in blocks()}
    assert {"README.md", "quick-start.md", "writing-an-algorithm.md", "reliability.md"} <= pages


@pytest.mark.parametrize("block", blocks(), ids=str)
def test_python_block(block, tmp_path):
    script = tmp_path / "block.py"
    script.write_text(block.code, encoding="utf-8")
    launcher = ["-m", "collectives", "run", "-n", str(block.ranks)] if block.ranks > 1 else []
    start([sys.executable, *launcher, str(script)], tmp_path)


# Options that make a measuring command short enough for a test.
SHORT = {
    "bench": ["-e", "1K", "--seconds", "0.01"],
    "compare": ["-e", "4K", "-f", "32", "--seconds", "0.01"],
    "tune": ["-b", "16", "-e", "64", "--collective", "all_reduce", "--seconds", "0.01"],
}


@pytest.mark.parametrize("command", commands())
def test_command(command, tmp_path):
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "collectives"], command
    program = next((w for w in words if w.endswith(".py")), None)
    if program is not None:
        source = ROOT / program
        if not source.exists():  # the page's own example, which it tells to save under this name
            source = tmp_path / program
            source.write_text("import collectives as cc\ncc.init().close()\n", encoding="utf-8")
        words[words.index(program)] = str(source)
    short = [] if "--topology" in words else SHORT.get(words[3], [])
    whole = [sys.executable, *words[1:], *short]
    predicted = words[3] == "explain" and "--measure" not in words  # which needs no GPU
    if "--device cuda" in command and not predicted and not _core.device_count()[0]:
        # As far as it goes: its options are right, and it says what is missing.
        with pytest.raises(AssertionError, match="--device cuda: "):
            start(whole, tmp_path)
        return
    start(whole, tmp_path)


def test_algorithms_page_is_up_to_date():
    generator = load(ROOT / "docs" / "generate_algorithms.py")
    assert generator.outdated() == [], "run python docs/generate_algorithms.py"


def test_figures_are_up_to_date(capsys):
    status = load(ROOT / "bench" / "table.py").main(["--check"])
    assert status == 0, capsys.readouterr().out


@pytest.mark.parametrize(("argument", "status"), [("--help", 0), ("--chek", 2), ("README.md", 2)])
def test_no_other_argument_writes_figures(capsys, monkeypatch, argument, status):
    table = load(ROOT / "bench" / "table.py")
    monkeypatch.setattr(table, "filled", lambda *_: pytest.fail("it would write"))
    with pytest.raises(SystemExit) as end:
        table.main([argument])
    assert end.value.code == status
    assert "--check" in "".join(capsys.readouterr())


def test_every_variable_is_in_the_api_page():
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert [v.name for v in VARIABLES if f"`{v.name}`" not in text] == []


def test_links_lead_somewhere():
    missing = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(
            r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        ):
            if "://" in target or target.startswith("#"):
                continue
            path, _, anchor = target.partition("#")
            file = page.parent / path
            if not file.exists():
                missing.append(f"{page.name}: {target}")
            elif anchor and not has_anchor(file, anchor):
                missing.append(f"{page.name}: {target}, no such anchor")
    assert missing == []


def has_anchor(page: Path, anchor: str) -> bool:
    text = page.read_text(encoding="utf-8")
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w]+", "-", title.lower()).strip("-") for title in titles}
    return anchor in slugs or f'id="{anchor}"' in text


def test_readme_shows_the_two_commands():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.search(r"^    make demo\n    make test$", text, re.MULTILINE)


def row(**fields):
    usual = {
        "collective": "all_reduce",
        "algorithm": "ring",
        "bytes": 4096,
        "count": 1024,
        "dtype": "float32",
        "op": "sum",
        "root": None,
        "order": "any",
        "ranks": 2,
        "nodes": 1,
        "transport": "shm",
        "device": "cpu",
        "mode": "host",
        "symmetric": False,
        "in_place": True,
        "time_us": 1.5,
        "p99_us": 2.5,
        "algbw_gbs": 2.73,
        "busbw_gbs": 2.73,
        "wrong": 0,
        "predicted_us": None,
        "peers": [{"name": "mpi", "version": "Open MPI v5.0.1", "time_us": 4.5, "ratio": 3.0}],
    }
    return {**usual, **fields}


@pytest.fixture
def results(tmp_path):
    """A function that writes a run, and the script that makes tables."""
    script = load(ROOT / "bench" / "table.py")

    def write(name, rows, command="python -m collectives bench", kind="host", **more):
        header = {
            **more,
            "machine": {
                "cpu": "CPU",
                "cores": 2,
                "exchange_ns": 57.0,
                "huge_pages": {"ordinary": "always", "shared": "never"},
                **more.get("machine", {}),
            },
            "versions": {"python": "3.11", "numpy": "2"},
            "commit": "abc",
            "command": command,
            "date": "2000-01-01T00:00:00+00:00",
        }
        (tmp_path / f"{kind}-{name}.json").write_text(json.dumps({"header": header, "rows": rows}))
        return script.load(tmp_path, kind)

    return script, write


def test_tables_of_results(results):
    script, write = results
    gloo = {"name": "gloo", "version": "torch 2.1.0+cpu", "time_us": 30.0, "ratio": 20.0}
    write("one", [row(), row(bytes=4 << 20, time_us=1234.0, peers=[gloo])])
    runs = write("two", [row(symmetric=True, time_us=0.5)])
    runs = write("forced", [row(time_us=99.0)], "python -m collectives bench --algorithm=ring")
    for choice in ({"COLLECTIVES_TRANSPORT": "mpi"}, {"table": "t.json, 2026-01-02"}):
        runs = write("also " + next(iter(choice)), [row(time_us=98.0)], choices=choice)
    text = "\n".join(script.summary(runs))
    assert "Open MPI 5.0.1 ÷ ours, any array" in text and "Gloo of torch 2.1.0 ÷ ours" in text
    assert "| 4 KiB | 1.50 |  | 3.0 | 0.50 | 3.0 |" in text
    assert "| 4 MiB | 1,234 | 20.0 |  |  |  |" in text
    assert "99" not in text and "98" not in text and "exchange 57 ns" in text
    everything = "\n".join(script.everything(runs))
    assert "| 4 KiB | ring | 99.0 | 2.50 | 2.73 |  | 4.50 | 3.00 |" in everything
    assert "`COLLECTIVES_TRANSPORT=mpi`" in everything and "`table=t.json" in everything


def test_tables_of_results_on_gpus_between_nodes(tmp_path):
    script = load(ROOT / "bench" / "table.py")
    assert "No results yet" in script.between_nodes(tmp_path)[0]
    us = {"gpu": 50.0, "gpu 1M": 55.0, "waited": 60.0, "host": 45.0, "mpi": 42.0, "wire": 20.0}
    times = {name: {"us": value, "p90_us": value} for name, value in us.items()}
    rows = [{"collective": "all_reduce", "bytes": 1 << 20, "wrong": 0, "times": times}]
    header = {
        "machine": {"gpus": [{"name": "H200", "bus": "18"}, {"name": "H200", "bus": "19"}]},
        "versions": {"cuda driver": "13.0", "mpi": "Open MPI v4.1.2"},
        "commit": "abc",
        "date": "2000-01-01T00:00:00+00:00",
    }
    file = tmp_path / "nodes-gpu-2.json"
    file.write_text(json.dumps({"header": header, "rows": rows, "left_out": []}))
    text = "\n".join(script.between_nodes(tmp_path))
    assert "| all_reduce, 2 nodes | GPU arrays (µs) |" in text
    assert "| 1 MiB | 50.0 | 60.0 | 45.0 | 42.0 | 20.0 | 0.84 |" in text
    assert "- nodes-gpu-2: Open MPI v4.1.2; 2 x H200; cuda driver 13.0; commit abc" in text
    file.write_text(json.dumps({"header": header, "rows": [{**rows[0], "wrong": 1}]}))
    with pytest.raises(ValueError, match="is wrong"):
        script.between_nodes(tmp_path)


def test_the_table_of_sends_and_receives_on_gpus(tmp_path):
    script = load(ROOT / "bench" / "table.py")
    assert "No results yet" in script.transfers(tmp_path)[0]
    rows = [
        {"bytes": nbytes, "what": what, "name": name, "us": us, "p99_us": us}
        for nbytes in (8, 1 << 20)
        for what in ("both", "one way")
        for name, us in (("collectives", 4.0), ("nccl", 5.0))
        if (nbytes, what, name) != (8, "one way", "nccl")
    ]
    gpu = {"name": "H200", "nvidia driver": "580.1", "cuda driver": "13.0"}
    header = {"gpu": gpu, "commit": "abc", "date": "2000-01-01T00:00:00+00:00"}
    file = tmp_path / "transfers-gpu-2.json"
    file.write_text(json.dumps({"header": header, "rows": rows}))
    text = "\n".join(script.transfers(tmp_path))
    assert "| 2 ranks | both (µs) | NCCL ÷ ours | one way (µs) | NCCL ÷ ours |" in text
    assert "| 8 B | 4.00 | 1.25 | 4.00 |  |" in text
    assert "| 1 MiB | 4.00 | 1.25 | 4.00 | 1.25 |" in text
    assert "- transfers-gpu-2: 2 x H200; nvidia driver 580.1, cuda driver 13.0; commit abc" in text


def test_tables_of_results_on_gpus(results):
    """Graphs and out of place in the summary; what is on the host, forced or bounded is not."""
    script, write = results
    peers = [{"name": "nccl", "version": "NCCL 2.28.9", "time_us": 6.0, "ratio": 1.714}]
    usual = {"transport": "cuda_ipc", "device": "cuda", "peers": peers}
    gpu = {
        "kind": "gpu",
        "machine": {"gpus": [{"name": "H100", "bus": "18"}, {"name": "H100", "bus": "19"}]},
        "settings": {"NCCL_NVLS_ENABLE": "0"},
    }
    write("host", [row(time_us=77.0)])
    write("forced", [row(**usual, time_us=99.0)], "python -m collectives bench -a ring", **gpu)
    write(
        "bounded", [row(**usual, time_us=88.0)], "python -m collectives bench --max-blocks=8", **gpu
    )
    rows = [
        row(**usual, mode="graph", in_place=False, time_us=3.5),
        row(**usual, mode="graph", in_place=False, symmetric=True, time_us=2.5),
        row(**usual, mode="graph", in_place=True, time_us=66.0),
        row(**usual, mode="stream", in_place=False, time_us=55.0),
    ]
    runs = write("all", rows, "python -m collectives bench --device cuda", **gpu)
    text = "\n".join(script.summary(runs, script.GPU))
    assert "NCCL 2.28.9 ÷ ours, any array" in text
    assert "| 4 KiB | 3.50 | 1.71 | 2.50 | 1.71 |" in text
    assert "2 x H100; NCCL_NVLS_ENABLE=0; commit abc" in text
    assert not any(number in text for number in ("99", "88", "77", "66", "55"))
    everything = "\n".join(script.everything(runs))
    assert "cuda_ipc, float32, sum, out of place, in a CUDA graph**" in everything
    assert "cuda_ipc, float32, sum, out of place, one by one**" in everything
    assert "| 4 KiB | ring | 55.0 | 2.50 | 2.73 |  | 6.00 | 1.71 |" in everything
    assert script.summary(script.load(Path("/nowhere"), "gpu"), script.GPU) == [script.GPU.none]


def test_table_of_torchs_suite(tmp_path):
    tables = load(ROOT / "bench" / "torch_tables.py")
    assert tables.suite(tmp_path) == [tables.NO_SUITE]
    outcomes = {
        "collectives": {"a": "passed", "b": "failed", "c": "failed", "d": "skipped", "f": "failed"},
        "gloo": {"a": "passed", "b": "passed", "c": "passed", "d": "skipped", "f": "failed"},
    }
    suite = {
        "about": {
            "of": {"torch": "2.13.0", "device": "cpu", "world": 3},
            "date": "2000-01-01T00:00:00+00:00",
            "peer": "gloo",
            "exceptions": {"b": "a reason"},
        },
        "results": {
            backend: {case: {"outcome": outcome} for case, outcome in cases.items()}
            for backend, cases in outcomes.items()
        },
        "not_run": [["e", "gloo"]],
    }
    (tmp_path / "torch-suite-cpu.json").write_text(json.dumps(suite))
    text = "\n".join(tables.suite(tmp_path))
    where = "CPU tensors, 3 ranks, torch 2.13.0, 2000-01-01"
    assert f"| {where} | this backend | 1 | 3 | 1 | 0 |" in text
    assert f"| {where} | Gloo | 3 | 1 | 1 | 1 |" in text
    assert "- `b` (CPU tensors) fails here; excepted: a reason" in text
    assert "- `c` (CPU tensors) fails here; Gloo: passed" in text
    assert "- CPU tensors: 1 case fails on this backend and on Gloo" in text and "`f`" not in text


def test_table_of_training(tmp_path):
    tables = load(ROOT / "bench" / "torch_tables.py")
    assert tables.training(tmp_path) == [tables.NO_TRAINING]
    row = {"median_ms": 10.0, "p90_ms": 12.0, "exposed_ms": 2.0, "scaling_efficiency": 0.8}
    row |= {"device_peak_bytes": 3 << 30, "steps": 7, "turns_ms": [10.0, 12.0, 9.0]}
    rows = [
        {**row, "name": "torch alone", "batch": "4x8"},
        {**row, "name": "torch DDP", "batch": "4x8", "turns_ms": [20.0, 10.0, 10.0]},
        {**row, "name": "collectives ZeRO-1", "batch": "4x8"},
        {**row, "name": "collectives ZeRO-1", "batch": "1x2", "steps": 9},
        {**row, "name": "torch DDP", "batch": "1x2", "device_peak_bytes": None},
    ]
    header = {"versions": {"torch": "2.11"}, "commit": "abc", "date": "2000-01-01", "ranks": 2}
    header |= {"gpu": "NVIDIA H100", "nccl": "2.28", "parameters": 355e6, "command": "x.py"}
    (tmp_path / "train-gpu-2.json").write_text(json.dumps({"header": header, "rows": rows}))
    text = "\n".join(tables.training(tmp_path))
    large, small = text[text.index("| 4x8 |") :].split("\n\n")
    assert "| torch alone | 10.0 ms | 12.0 ms |  |  |  | 3.0 GiB |" in large
    ratio = "0.90 (0.50 to 1.20)"  # of turns side by side
    assert f"| ZeRO-1 | 10.0 ms | 12.0 ms | {ratio} | 2.0 ms | 0.80 | 3.0 GiB |" in large
    assert small.startswith("| 1x2 |") and "torch alone" not in small
    assert "| torch DDP | 10.0 ms | 12.0 ms |  | 2.0 ms | 0.80 |  |" in small  # memory not measured
    assert "355 million parameters" in text and "7 to 9 steps" in text


def test_table_of_what_computing_takes_beside_calls(tmp_path):
    tables = load(ROOT / "bench" / "torch_tables.py")
    assert tables.beside(tmp_path) == [tables.NO_BESIDE]
    one = {"computing_more": 2.5, "all_more": 3.0, "alone": 4.0}
    run = {
        "header": {"commit": "abc", "date": "2000-01-01T00:00"},
        "ranks": 2,
        "device": "NVIDIA H100",
        "torch": "2.11",
        "nccl": "2.28",
        "layers": 24,
        "bytes": 26 << 20,
        "rounds": 9,
        "ways": {"none": {"computing": 30.0}, "copies": one | {"all_more": 0.5}, "nccl": one},
    }
    (tmp_path / "beside-gpu-2.json").write_text(json.dumps(run))
    text = "\n".join(tables.beside(tmp_path))
    assert "24 all_reduces of 26 MiB beside matrices that take 30.0 ms" in text
    assert "| NCCL | 2.50 | 3.00 | 4.00 |\n| copy engines, any array | 2.50 | 0.50 | 4.00 |" in text


def test_table_of_what_a_stream_that_waits_costs(tmp_path):
    tables = load(ROOT / "bench" / "torch_tables.py")
    assert tables.waiting(tmp_path) == [tables.NO_WAITING]
    run = {
        "header": {"commit": "abc", "date": "2000-01-01T00:00"},
        "device": "NVIDIA H100",
        "driver": 12080,
        "rounds": 9,
        "kernels": 200,
        "us": dict.fromkeys(tables.WAITING, 1.5) | {"word": 3.0},
    }
    (tmp_path / "waiting-gpu.json").write_text(json.dumps(run))
    text = "\n".join(tables.waiting(tmp_path))
    assert "CUDA 12.8; chains of 200 empty kernels" in text
    assert "| nothing | 1.50 µs |" in text and "| a word in memory | 3.00 µs |" in text


def test_table_of_steps_beside_nccl(tmp_path):
    pytest.importorskip("torch")
    tables = load(ROOT / "bench" / "torch_tables.py")
    assert tables.steps(tmp_path) == [tables.NO_STEPS]
    windows = {name: [10.0, 12.0] for name in ("ddp nccl", "fsdp2 nccl")}
    windows |= {"ddp collectives": [9.0, 10.0], "fsdp2 collectives": [20.0, 22.0]}
    windows["alone"] = [8.0, 8.0]
    figures = load(ROOT / "bench" / "torch_gpu.py").figures(windows, "nccl")
    run = {
        "header": {"versions": {"torch": "2.11"}, "commit": "abc", "date": "2000-01-01T00:00"},
        "ranks": 2,
        "device": "NVIDIA H100",
        "peer": "nccl",
        "peer_version": "2.28",
        "model": "24 layers",
        "parameters": 355e6,
        "batch": 4,
        "length": 1024,
        "steps_of_a_window": 10,
        "windows_ms": windows,
        **figures,
    }
    (tmp_path / "torch-gpu-2.json").write_text(json.dumps(run))
    text = "\n".join(tables.steps(tmp_path))
    assert "| DDP, step | 9.5 | 9.0 to 10.0 | 11.0 | 10.0 to 12.0 | 0.87 | 0.83 to 0.90 |" in text
    exposed = "| 1.5 | 1.0 to 2.0 | 3.0 | 2.0 to 4.0 | 0.50 | 0.50 to 0.50 |"
    assert f"| DDP, exposed communication {exposed}" in text
    assert "| FSDP2, step | 21.0 |" in text and "355 million" in text and "2 windows of 10" in text
    assert "| without synchronisation | 8.0 | 8.0 to 8.0 |" in text


def test_wrong_results_are_refused(results, tmp_path):
    script, write = results
    (tmp_path / "gpu-else.json").write_text('{"rows": [{"bytes": 4, "us": {}}]}')
    with pytest.raises(ValueError, match=r"gpu-else\.json is not from `collectives bench --json`"):
        script.load(tmp_path, "gpu")
    write("barrier", [row(collective="barrier", wrong=None)])
    with pytest.raises(ValueError, match=r"bad\.json: all_reduce of 4096 bytes"):
        write("bad", [row(wrong=3)])
