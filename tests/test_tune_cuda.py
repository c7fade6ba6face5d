"""tune and explain on GPUs, on machines without one: see fake_cupy.py. tests/gpu/test_tuned.py has
the kernels as well.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_cupy
import numpy as np
import pytest
from commands import run
from fake_cupy import CALL_NS, NODE_NS

from collectives import UnsupportedError, array
from collectives.bench import cuda
from collectives.bench.timing import Sample
from collectives.cli import tune
from collectives.tuning import model

TINY = ("-b", "256", "-e", "4K", "-f", "16", "--seconds", "0.001")

pytestmark = pytest.mark.usefixtures("no_launcher")


def command(capsys: Any, path: Path, *arguments: Any) -> tuple[int, str, str]:
    """tune --device cuda, into a file."""
    found = run(capsys, "tune", "--device", "cuda", "-o", path, *TINY, *arguments)
    status, out, err = found
    return status, out, err


def test_the_table_names_the_gpus(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_cupy.install(monkeypatch)
    path = tmp_path / "table.json"
    status, out, err = command(capsys, path, "--threads", 2, "--collective", "all_reduce,reduce")
    assert status == 0, err
    assert "# 2 ranks on 1 node, cuda" in out
    assert "# 2 x Fake H100; ordinary arrays, calls on a stream" in out
    assert f"written to {path}" in out
    ((key, layout),) = json.loads(path.read_text())["layouts"].items()
    assert (key, layout["gpus"]) == ("cuda 0,0", ["Fake H100", "Fake H100"])
    assert set(layout["choices"]) == {"all_reduce", "reduce"}
    assert set(layout["figures"]) == {"packets", "fifos", "steps"}
    node = NODE_NS / cuda.graph_calls(256)
    assert {row[2] for row in layout["rows"]} == {256, 4096}
    for _, _, _, seconds in layout["rows"]:  # in graphs
        assert seconds == pytest.approx((CALL_NS + node) * 1e-9)


def test_dry_runs_and_rows(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_cupy.install(monkeypatch)
    path = tmp_path / "table.json"
    words = ("--threads", 2, "--collective", "broadcast", "--dry-run", "--rows")
    status, out, err = command(capsys, path, *words)
    assert status == 0, err
    assert not path.exists() and "written" not in out
    assert out.count(" broadcast ") == 2 * 6  # sizes, algorithms


def test_ranks_that_share_a_gpu_get_no_table(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_cupy.install(monkeypatch)
    path = tmp_path / "table.json"
    status, out, err = command(capsys, path, "--threads", 3, "--collective", "reduce")
    assert status == 0, err
    assert "# note: there will be no table: ranks share a GPU" in out
    assert "nothing is written: ranks share a GPU" in out
    assert not path.exists()


def test_wrong_elements_end_it(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_cupy.install(monkeypatch)
    right = cuda.DeviceMemory.reading

    def broken(self: Any, x: Any) -> Any:
        values = right(self, x)
        values[-1:] += 1
        return values

    monkeypatch.setattr(cuda.DeviceMemory, "reading", broken)
    path = tmp_path / "table.json"
    status, out, _ = command(capsys, path, "--threads", 2, "--collective", "all_reduce")
    assert status == 1
    assert "all_reduce of 256 B: 2 wrong elements" in out and "nothing is written" in out
    assert not path.exists()


def test_what_the_engine_refuses_is_left_out(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_cupy.install(monkeypatch)
    right = cuda.Cuda.call

    def refusing(self: Any, bound: Any) -> None:
        if bound.kwargs.get("algorithm") == "double_binary_tree":
            raise UnsupportedError("double_binary_tree uses 2 channels, of 1")
        right(self, bound)

    monkeypatch.setattr(cuda.Cuda, "call", refusing)
    path = tmp_path / "table.json"
    words = ("--threads", 2, "--collective", "all_reduce")
    status, out, err = command(capsys, path, *words)
    assert status == 0, err
    assert "double_binary_tree uses 2 channels" in out
    rows = json.loads(path.read_text())["layouts"]["cuda 0,0"]["rows"]
    assert "ring" in {row[1] for row in rows}
    assert "double_binary_tree" not in {row[1] for row in rows}
    words = ("explain", "all_reduce", "--device", "cuda", "--threads", 2, "--measure")
    status, out, err = run(capsys, *words, "--bytes", "1K")
    assert status == 0, err
    assert "without double_binary_tree: double_binary_tree uses 2 channels, of 1" in out
    assert "measured" in out and "way      packets" in out


@pytest.mark.parametrize("limit", [256, 1024])
def test_what_is_slow_at_small_sizes_is_still_timed_at_large_ones(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: int
) -> None:
    """The last algorithm takes a hundred times as long as others; it is judged by that from `limit`
    bytes on.
    """
    fake_cupy.install(monkeypatch)
    usual = tune.DEFAULTS["cuda"]
    monkeypatch.setitem(tune.DEFAULTS, "cuda", usual._replace(judged_from=limit))

    def take_turns(clock: Any, runners: Any, effort: Any) -> list[Sample]:
        times = [1e-6] * (len(runners) - 1) + [1e-4]
        return [Sample(np.array([t]), np.array([0, 0])) for t in times]

    monkeypatch.setattr(tune, "take_turns", take_turns)
    path = tmp_path / "table.json"
    words = ("--threads", 2, "--collective", "all_to_all", "-b", "128", "-e", "512", "-f", 2)
    status, _, err = command(capsys, path, *words)
    assert status == 0, err
    rows = json.loads(path.read_text())["layouts"]["cuda 0,0"]["rows"]
    counts = [len({row[1] for row in rows if row[2] == size}) for size in (128, 256, 512)]
    assert counts[0] == counts[1] == counts[2] + (limit == 256)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--threads", 2, "--nodes", 2), "GPUs of several nodes go by way of the hosts"),
        (("--threads", 1), "one rank moves nothing"),
        (("--threads", 2, "--collective", "barrier"), "leave it out"),
        (("--threads", 2, "-b", "8K"), "below the smallest"),
        (("--threads", 2, "--device", "gpu"), "did you mean"),
    ],
)
def test_bad_input_in_words(
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: tuple[Any, ...],
    expected: str,
) -> None:
    fake_cupy.install(monkeypatch)
    status, _, err = command(capsys, tmp_path / "table.json", *arguments)
    assert status == 2
    assert expected in err


def test_without_gpus(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_cupy.install(monkeypatch, gpus=0)
    status, _, err = command(capsys, tmp_path / "table.json", "--threads", 2)
    assert (status, err.count("no GPU was found")) == (2, 1)


def test_gpus_have_sizes_of_their_own() -> None:
    def found(*words: str) -> list[int]:
        parser = tune.argparse.ArgumentParser()
        tune.add_arguments(parser)
        return tune._sizes(parser.parse_args(list(words)))

    assert found() == [64 << 2 * k for k in range(10)]
    assert found("--device", "cuda") == [256 << 3 * k for k in range(7)]
    assert found("--device", "cuda", "-b", "0", "-e", "1") == [0, 1]


def test_rows_of_a_benchmark_carry_what_is_predicted(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_cupy.install(monkeypatch)
    file = tmp_path / "result.json"
    words = ("-b", "1K", "-e", "1K", "-n", 2, "-a", "ring", "--json", file)
    status, _, err = run(capsys, "bench", "--device", "cuda", "--threads", 2, *words)
    assert status == 0, err
    seconds = model.predict("ring", "all_reduce", 1024, [0, 0], "cuda")
    assert seconds is not None
    for row in json.loads(file.read_text())["rows"]:
        assert row["predicted_us"] == pytest.approx(seconds * 1e6, rel=1e-5)


# ---- what libraries tell of GPUs -----------------------------------------------------------------


def loaded(monkeypatch: pytest.MonkeyPatch, **modules: Any) -> None:
    for name in ("cupy", "torch", "jax"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


def torch_with(**properties: Any) -> Any:
    asked = SimpleNamespace(name="H200", **properties)
    return SimpleNamespace(
        cuda=SimpleNamespace(is_available=lambda: True, get_device_properties=lambda n: asked)
    )


def test_names_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded(monkeypatch)
    assert array.gpu_facts(0) == ("", "")
    host = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False))
    devices = [SimpleNamespace(device_kind="H200", local_hardware_id=n) for n in (1, 0)]
    jax = SimpleNamespace(default_backend=lambda: "gpu", local_devices=lambda: devices)
    loaded(monkeypatch, torch=host, jax=jax)
    assert array.gpu_facts(1) == ("H200", "")
    assert array.gpu_facts(2) == ("", "")
    loaded(monkeypatch, torch=host, jax=SimpleNamespace(default_backend=lambda: "cpu"))
    assert array.gpu_facts(0) == ("", "")
    loaded(monkeypatch, torch=torch_with(), jax=jax)
    assert array.gpu_facts(0) == ("H200", "")
    known = torch_with(pci_domain_id=0, pci_bus_id=0x1A, pci_device_id=0)
    loaded(monkeypatch, torch=known)
    assert array.gpu_facts(0) == ("H200", "0000:1a:00.0")
    fake_cupy.install(monkeypatch)
    assert array.gpu_facts(1) == ("Fake H100", "0000:19:00.0")
