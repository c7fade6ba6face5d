"""Tables measured on GPUs: tune writes one, calls go by it, and it is refused on other GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gpus import GPUS, MARK, cupy
from on_device import OnDevice, run_on

import collectives as cc
from collectives import cli, hardware
from collectives.array import gpu_facts
from collectives.tuning import ANY_SIZE, Choice, model, tables
from collectives.tuning.model import Measurement
from collectives.tuning.work import GPU

# (Continuous integration has two emulated GPUs. What `tune` says where ranks share one is tested in
# tests/test_tune_cuda.py.)
pytestmark = [MARK, pytest.mark.skipif(GPUS < 2, reason="ranks that share a GPU have no table")]

TINY = ["--threads", "2", "-b", "256", "-e", "4K", "-f", "16", "--seconds", "0.002"]
COUNT = 1000
# What no limits would choose.
CHOICES = {"all_reduce": "ring", "all_gather": "bruck", "all_to_all": "bruck"}


def write(path: Path, gpus: list[str]) -> None:
    rows = [
        Measurement(name, collective, size, 1e-5)
        for collective, name in CHOICES.items()
        for size in (256, 4096)
    ]
    entry = tables.entry(
        {collective: [Choice(ANY_SIZE, name)] for collective, name in CHOICES.items()},
        model.fit(rows, [0, 0], GPU), rows, date="2026-01-02", version="1", gpus=gpus,
    )  # fmt: skip
    here = tables.hardware_of([{**hardware.summary(), "mpi": ""}])
    tables.save(path, here, "cuda 0,0", entry)


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a table of these two GPUs, which ranks find."""
    path = tmp_path / "table.json"
    monkeypatch.setenv("COLLECTIVES_TABLE", str(path))
    write(path, [gpu_facts(ordinal).name for ordinal in (0, 1)])
    return path


def arrays(comm: OnDevice) -> list[Any]:
    with comm.stream:
        return [
            cupy.ndarray((n,), cupy.float32, cupy.cuda.MemoryPointer(comm.memory.mem, i << 20))
            for i, n in enumerate((COUNT, 2 * COUNT, 2 * COUNT))
        ]


def algorithms(comm: OnDevice, calls: Any) -> list[str]:
    """The algorithms of the calls on the GPU that `calls` makes."""
    before = len(comm.comm.dump()["gpu_calls"])
    with comm.stream:
        calls()
    comm.finish()
    return [call["algorithm"] for call in comm.comm.dump()["gpu_calls"][before:]]


def test_calls_go_by_the_table(table: Path) -> None:
    def body(comm: OnDevice) -> None:
        one, two, three = arrays(comm)

        def calls() -> None:
            comm.comm.all_reduce(one)
            comm.comm.all_reduce(one, "max")
            comm.comm.all_gather(one, out=two)
            comm.comm.broadcast(one)
            comm.comm.all_reduce(one, algorithm="direct_two_shot")
            comm.comm.all_to_all(two, out=three)
            comm.comm.all_to_all(two, out=two)  # which bruck cannot

        found = algorithms(comm, calls)
        assert found[:3] == ["ring", "ring", "bruck"]
        assert found[3] == "direct_one_shot"  # not in the table
        assert found[4:] == ["direct_two_shot", "bruck", "direct_two_shot"]
        tuner = comm.comm._gpu_tuner
        assert f"as measured on these ranks ({table}" in tuner.reason("all_reduce", 4 * COUNT)

    run_on(2, [0, 1], body, timeout=30)


def test_a_rule_comes_before_the_table(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLECTIVES_ALGORITHM", "all_reduce:2K-=halving_doubling")

    def body(comm: OnDevice) -> list[str]:
        one, _, _ = arrays(comm)
        return algorithms(
            comm, lambda: (comm.comm.all_reduce(one), comm.comm.all_reduce(one[:100]))
        )

    assert run_on(2, [0, 1], body, timeout=30) == [["halving_doubling", "ring"]] * 2


@pytest.mark.parametrize("case", ["few blocks", "one GPU", "by the host", "off"])
def test_ranks_that_the_table_does_not_fit(
    table: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    if case == "off":
        monkeypatch.setenv("COLLECTIVES_TABLE", "off")
    if case == "by the host":
        monkeypatch.setenv("COLLECTIVES_GPU_PATH", "host")
    if case == "one GPU":
        write(table, [gpu_facts(0).name] * 2)
    devices = [0] if case == "one GPU" else [0, 1]
    more = {"max_blocks": 1} if case == "few blocks" else {}

    def body(comm: OnDevice) -> list[str]:
        one, _, _ = arrays(comm)
        return algorithms(comm, lambda: comm.comm.all_reduce(one))

    assert run_on(2, devices, body, timeout=30, **more) == [["direct_one_shot"]] * 2


def test_a_table_of_other_gpus_is_refused(table: Path) -> None:
    write(table, ["A", "A"])

    def body(comm: OnDevice) -> list[str]:
        one, _, _ = arrays(comm)

        def calls() -> None:
            comm.comm.all_reduce(one, algorithm="ring")  # what is forced asks no table
            for call in (comm.comm.all_reduce, comm.comm.broadcast):
                with pytest.raises(cc.ConfigError, match=r"GPUs: measured on '2 x A', this is"):
                    call(one)
            comm.comm.all_reduce(one, algorithm="ring")

        return algorithms(comm, calls)

    assert run_on(2, [0, 1], body, timeout=30) == [["ring", "ring"]] * 2


def test_what_tune_writes_is_what_runs(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tune also measures where a table of other GPUs lies, and replaces it."""
    path = tmp_path / "table.json"
    monkeypatch.setenv("COLLECTIVES_TABLE", str(path))
    write(path, ["A", "A"])
    names = "all_reduce,all_to_all"
    command = ["tune", "--device", "cuda", *TINY, "--collective", names, "--rows"]
    assert cli.main(command) == 0
    out = capsys.readouterr().out
    assert "ordinary arrays" in out and "# packets: entry" in out and f"written to {path}" in out
    layout = json.loads(path.read_text())["layouts"]["cuda 0,0"]
    assert layout["gpus"] == [gpu_facts(ordinal).name for ordinal in (0, 1)]
    assert set(layout["choices"]) == {"all_reduce", "all_to_all"}
    times = {(row[0], row[1], row[2]) for row in layout["rows"]}
    for name in ("direct_one_shot", "direct_two_shot", "ring", "recursive_doubling"):
        assert {("all_reduce", name, 256), ("all_reduce", name, 4096)} <= times

    def body(comm: OnDevice) -> bool:
        found = tables.parse(layout, path)
        tuner = comm.comm._gpu_tuner
        return all(
            tuner.choose(c, n) == next(x.algorithm for x in found.choices[c] if n <= x.limit)
            for c in found.choices
            for n in (64, 256, 1000, 4096)
        )

    assert run_on(2, [0, 1], body, timeout=30) == [True, True]


def test_tune_writes_no_table_of_ways_through_the_host(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table.json"
    monkeypatch.setenv("COLLECTIVES_GPU_PATH", "host")
    command = ["tune", "--device", "cuda", *TINY, "--collective", "broadcast", "-o", str(path)]
    assert cli.main(command) == 0
    out = capsys.readouterr().out
    assert "nothing is written: the GPUs do not reach each other" in out
    assert not path.exists()


def test_explain_measures_on_gpus(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLECTIVES_TABLE", "off")
    command = ["explain", "all_gather", "--device", "cuda", "--threads", "2", "--bytes", "4K"]
    assert cli.main([*command, "--measure"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("all_gather of 4 KiB of float32, 2 ranks on 1 node, over cuda")
    assert "runs     direct_one_shot" in out and "way      packets" in out
    rows = [line for line in out.splitlines() if " packets " in line or " steps " in line]
    assert len(rows) >= 5 and not any(" - " in line for line in rows)
