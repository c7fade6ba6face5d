"""The cost model on GPUs: what a call has to do there, and what the kept times of two say of it."""

from __future__ import annotations

import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import run

from collectives import ConfigError, algorithm, schedule
from collectives.config import parse_rules
from collectives.schedule import Transfer, unregister
from collectives.tuning import ANY_SIZE, Choice, model, tables
from collectives.tuning.device import WAYS, DeviceTuner, device_launch, device_way
from collectives.tuning.model import Figures, LinkModel, Measurement
from collectives.tuning.work import GPU, GPU_SYMMETRIC, work_of

pytestmark = pytest.mark.usefixtures("no_launcher")

ROOT = Path(__file__).resolve().parents[1]
KI, MI = 1 << 10, 1 << 20
FEW = [0, 0]


def script() -> Any:
    spec = spec_from_file_location("predict_gpu", ROOT / "bench" / "predict_gpu.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- what a call has to do -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "collective", "nbytes", "ranks", "way", "steps", "sent", "combined"),
    [
        # Packets carry 8 bytes of 16, to each of n - 1 peers.
        ("direct_one_shot", "all_reduce", 3 * KI, 2, "packets", 1, 2 * 3 * KI, 3 * KI),
        ("direct_one_shot", "all_reduce", 3 * KI, 4, "packets", 1, 2 * 9 * KI, 9 * KI),
        # Lines carry 120 bytes of 128.
        ("direct_one_shot", "all_reduce", 3 * MI, 2, "lines", 1, 3 * MI * 128 / 120, 3 * MI),
        ("direct_one_shot", "all_gather", 3 * MI, 4, "lines", 1, 9 / 4 * MI * 128 / 120, 0),
        # The root receives from all, which no rank sends.
        ("direct_one_shot", "reduce", 300 * KI, 4, "lines", 1, 900 * KI * 128 / 120, 900 * KI),
        ("direct_one_shot", "gather", 40 * KI, 4, "packets", 1, 2 * 30 * KI, 0),
        # Above what the buffers hold it is interpreted.
        ("direct_one_shot", "all_reduce", 5 * MI, 2, "steps", 1, 5 * MI, 5 * MI),
        # Three and more ranks: two steps, in lines at first.
        ("direct_two_shot", "all_reduce", 4 * MI, 4, "lines", 2, 6 * MI * 128 / 120, 3 * MI),
        ("direct_two_shot", "all_reduce", 4 * MI, 2, "fifos", 2, 4 * MI, 2 * MI),
        ("direct_two_shot", "all_reduce", 40 * MI, 4, "fifos", 2, 60 * MI, 30 * MI),
        # The root has no share.
        ("direct_two_shot", "broadcast", 6 * MI, 4, "fifos", 2, 6 * MI, 0),
        ("direct_two_shot", "reduce", 6 * MI, 4, "fifos", 2, 6 * MI, 6 * MI),
        ("direct_two_shot", "reduce_scatter", 4 * MI, 4, "fifos", 1, 3 * MI, 3 * MI),
        ("direct_two_shot", "all_to_all", 4 * KI, 4, "packets", 1, 2 * 3 * KI, 0),
        ("direct_two_shot", "all_to_all", 64 * MI, 4, "fifos", 1, 48 * MI, 0),
        ("ring", "all_reduce", 4 * KI, 4, "steps", 6, 6 * KI, 3 * KI),
        ("ring", "broadcast", 4 * KI, 4, "steps", 3, 4 * KI, 0),
    ],
)
def test_what_kernels_send(
    name: str,
    collective: str,
    nbytes: int,
    ranks: int,
    way: str,
    steps: int,
    sent: float,
    combined: float,
) -> None:
    kind, todo = work_of(name, collective, nbytes, [0] * ranks, GPU)
    assert (kind, todo.near_steps) == (way, steps)
    assert todo.near_sent == pytest.approx(sent)
    assert todo.near_reduced == pytest.approx(combined)
    assert (todo.slices, todo.far_steps, todo.far_sent) == (0, 0, 0)


def test_symmetric_buffers_go_other_ways() -> None:
    def way(collective: str, nbytes: int) -> str:
        return work_of("direct_two_shot", collective, nbytes, FEW, GPU_SYMMETRIC)[0]

    assert way("all_reduce", 4 * MI) == "pulled"
    assert way("all_reduce", 64 * MI) == "written"
    assert way("all_gather", 4 * MI) == "written"
    assert way("reduce_scatter", 4 * MI) == "pulled"
    assert way("reduce_scatter", 64 * MI) == "fifos"  # its results are nobody else's
    assert way("all_to_all", 64 * MI) == "fifos"
    assert work_of("direct_one_shot", "all_reduce", 64, FEW, GPU_SYMMETRIC)[0] == "packets"


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
def test_small_calls_go_as_they_are_launched(ranks: int) -> None:
    """What is chosen to go in one step fits the kernels' buffers, in what `device_launch` says."""
    tuner = DeviceTuner(ranks)
    for collective in ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "gather"):
        for nbytes in (ranks * 4**k for k in range(13)):
            chosen = tuner.choose(collective, nbytes)
            if chosen == "direct_one_shot" and collective != "gather":
                lines = device_launch(chosen, collective, nbytes, ranks).lines
                assert tuner.way(chosen, collective, nbytes) == ("lines" if lines else "packets")
    assert device_way("direct_one_shot", "all_reduce", 0, ranks) == "steps"
    assert device_way("direct_one_shot", "barrier", 0, ranks) == "steps"


def test_figures_multiply_the_work() -> None:
    """Exact times of a toy machine."""
    figures = {
        "packets": Figures(LinkModel(1.0, 0.5), LinkModel(0, 0), entry_s=10.0),
        "steps": Figures(LinkModel(2.0, 0.25, 0.125), LinkModel(0, 0), entry_s=20.0),
    }

    def seconds(name: str, collective: str, nbytes: int, links: str = GPU) -> float | None:
        return model.predict(name, collective, nbytes, [0] * 4, links, figures=figures)

    assert seconds("direct_one_shot", "all_reduce", 8) == 10 + 1 + 0.5 * 2 * 3 * 8
    assert seconds("ring", "all_reduce", 8) == 20 + 6 * 2 + 0.25 * 12 + 0.125 * 6
    # A kind without figures takes those of the kind that is most like it.
    lines = seconds("direct_one_shot", "all_gather", 4 * MI)
    assert lines == pytest.approx(10 + 1 + 0.5 * 3 * MI * 128 / 120)
    assert seconds("direct_two_shot", "all_gather", 64) == 20 + 2 + 0.25 * 48
    assert seconds("direct_two_shot", "all_gather", 64, GPU_SYMMETRIC) == 20 + 2 + 0.25 * 48
    # Between nodes there is nothing to judge by.
    assert model.predict("ring", "all_reduce", 8, [0, 1], GPU, figures=figures) is None
    assert model.predict("", "barrier", 0, FEW, GPU) is None


def test_every_way_has_default_figures() -> None:
    found = set()
    for links in (GPU, GPU_SYMMETRIC):
        for name in ("direct_one_shot", "direct_two_shot", "ring"):
            for nbytes in (64, MI, 4 * MI, 64 * MI):
                found.add(work_of(name, "all_reduce", nbytes, FEW, links)[0])
                seconds = model.predict(name, "all_reduce", nbytes, FEW, links)
                assert seconds is not None and 1e-6 < seconds < 1e-3
    assert found == set(WAYS)


def test_an_algorithm_in_python_is_judged_by_its_rounds() -> None:
    @algorithm("broadcast", name="star_of_the_test")
    def star(n: int) -> Any:
        """the root sends to each"""
        yield [Transfer(0, r, 0) for r in range(1, n)]

    try:
        kind, todo = work_of("star_of_the_test", "broadcast", 1000, [0] * 4, GPU)
        assert (kind, todo.near_sent) == ("steps", 3000)
    finally:
        unregister("star_of_the_test")


# ---- fitting -------------------------------------------------------------------------------------


def test_the_fit_predicts_more_ranks_where_steps_can_be_told() -> None:
    """Times of two made-up GPUs, of calls with one step and with two, give those of four."""
    link = LinkModel(5e-6, 3e-12, 1e-12)
    made = {kind: Figures(link, LinkModel(0, 0), entry_s=9e-6) for kind in WAYS}

    def times(ranks: int) -> list[Measurement]:
        tuner, nodes, found = DeviceTuner(ranks), [0] * ranks, []
        for collective in ("all_reduce", "all_gather", "broadcast", "reduce"):
            for name in tuner.candidates(collective):
                for nbytes in (4**k for k in range(4, 15)):
                    seconds = model.predict(name, collective, nbytes, nodes, GPU, figures=made)
                    assert seconds is not None
                    found.append(Measurement(name, collective, nbytes, seconds))
        return found

    figures = model.fit(times(2), FEW, GPU)
    # Two ranks make no call of two steps in lines.
    wanted = [
        m for m in times(4) if (m.algorithm, m.collective) != ("direct_two_shot", "all_reduce")
    ]
    off = model.errors(wanted, [0] * 4, GPU, figures)
    assert len(off) > 150
    assert np.max(off) < 0.1


def test_where_nothing_tells_entry_from_steps_each_gets_half() -> None:
    rows = [Measurement("ring", "all_reduce", 4**k, 2e-5 + 4**k * 1e-11) for k in range(4, 12)]
    found = model.fit(rows, FEW, GPU)["steps"]
    assert found.entry_s == pytest.approx(1e-5, rel=0.02)
    assert found.near.alpha_s == pytest.approx(1e-5 / 2, rel=0.02)


def test_the_kept_times_of_two_gpus_are_predicted() -> None:
    predict_gpu = script()
    times = predict_gpu.read(predict_gpu.KEPT)
    assert {(t.ranks, t.links) for t in times} == {(2, GPU), (2, GPU_SYMMETRIC)}
    figures = predict_gpu.fit(times)
    off = predict_gpu.errors(times, figures)
    assert sum(map(len, off.values())) == 100
    for kind, values in off.items():
        assert np.median(values) <= 0.25, kind
    assert np.median([v for values in off.values() for v in values]) <= 0.1
    # The built-in figures are these.
    assert set(figures) == set(model.GPU_LINKS)
    for kind, found in figures.items():
        expected = model.GPU_LINKS[kind]
        assert found.entry_s == pytest.approx(expected.entry_s, rel=0.01), kind
        for name in ("alpha_s", "beta_s_per_byte", "gamma_s_per_byte"):
            mine, theirs = getattr(found.near, name), getattr(expected.near, name)
            assert mine == pytest.approx(theirs, rel=0.01, abs=1e-15), (kind, name)
    # Times that were not fitted to, of another dtype.
    other = predict_gpu.read([predict_gpu.RESULTS / "gpu-nccl-bfloat16-2.json"])
    assert max(predict_gpu.errors(other, figures)["packets"]) < 0.25


# ---- predictions ---------------------------------------------------------------------------------


def test_predictions_beside_times_of_more_ranks(capsys: Any, tmp_path: Path) -> None:
    predict_gpu = script()
    row = {
        "collective": "all_reduce", "algorithm": "ring", "bytes": 1 << 20, "ranks": 4,
        "device": "cuda", "mode": "graph", "symmetric": False,
    }  # fmt: skip
    figures = predict_gpu.fit(predict_gpu.read(predict_gpu.KEPT))
    seconds = model.predict("ring", "all_reduce", 1 << 20, [0] * 4, GPU, figures=figures)
    assert seconds is not None
    rows = [{**row, "time_us": seconds * 1e6 / 1.5}, {**row, "mode": "stream", "time_us": 1.0}]
    file = tmp_path / "four.json"
    file.write_text(json.dumps({"header": {}, "rows": rows}))
    assert predict_gpu.main(["--measured", str(file)]) == 0
    out = capsys.readouterr().out
    assert "# 4 ranks, cuda, in us" in out
    assert "+50%  ring" in out
    assert "steps       1 times: off by 50% in the median" in out
    assert "1 times: off by 50% in the median, by 50% at most" in out.splitlines()[-1]


def test_predictions_are_written(tmp_path: Path, capsys: Any) -> None:
    """What is written is what the model says; and the kept files say what they come from."""
    predict_gpu = script()
    assert predict_gpu.main(["--write", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count(".json written") == 2
    figures = predict_gpu.fit(predict_gpu.read(predict_gpu.KEPT))
    for ranks in (4, 8):
        name = f"predicted-gpu-{ranks}.json"
        new = json.loads((tmp_path / name).read_text())
        kept = json.loads((predict_gpu.RESULTS / name).read_text())
        for content in (new, kept):
            assert content["header"]["fitted_to"] == [path.name for path in predict_gpu.KEPT]
            assert content["header"]["ranks"] == ranks
            assert content["header"]["date"] and content["header"]["commit"]
            assert {r["way"] for r in content["rows"]} == set(WAYS)
        for r in new["rows"]:
            links = GPU_SYMMETRIC if r["symmetric"] else GPU
            call = (r["algorithm"], r["collective"], r["bytes"], [0] * ranks, links)
            seconds = model.predict(*call, figures=figures)
            assert seconds is not None
            assert r["predicted_us"] == pytest.approx(seconds * 1e6, rel=1e-5)


def test_predictions_from_a_table_of_tune(tmp_path: Path, capsys: Any) -> None:
    rows = [
        Measurement(name, "all_reduce", 4**k, seconds + 4**k * 1e-11)
        for name, seconds in (("direct_one_shot", 2e-6), ("ring", 2e-5), ("direct_two_shot", 1e-5))
        for k in range(4, 8)
    ]
    path = tmp_path / "table.json"
    entry = tables.entry(
        tables.choices_of(rows), model.fit(rows, FEW, GPU), rows, date="2026-01-02", version="1",
        gpus=["A", "A"],
    )  # fmt: skip
    tables.save(path, {"cpu": "a"}, "threads 0,0", {**entry, "rows": []})
    predict_gpu = script()
    assert predict_gpu.main(["--fit", str(path)]) == 2
    assert "no times of calls on GPUs" in capsys.readouterr().err
    tables.save(path, {"cpu": "a"}, "cuda 0,0", entry)
    assert predict_gpu.main(["--fit", str(path), "--ranks", "3"]) == 0
    out = capsys.readouterr().out
    assert "# fitted to table.json (2 ranks)" in out
    assert "# 3 ranks, predicted" in out and "recursive_doubling" in out


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"header": {}}, "neither a result of bench --json nor a table"),
        ({"rows": []}, "no times of calls on GPUs"),
    ],
)
def test_files_that_hold_no_times(
    tmp_path: Path, capsys: Any, content: dict[str, Any], expected: str
) -> None:
    file = tmp_path / "file.json"
    file.write_text(json.dumps(content))
    assert script().main(["--fit", str(file)]) == 2
    assert expected in capsys.readouterr().err


def test_times_of_several_worlds_are_not_fitted_together() -> None:
    predict_gpu = script()
    rows = [Measurement("ring", "all_reduce", 64, 1e-5)]
    with pytest.raises(ValueError, match=r"of \[2, 4\] ranks"):
        predict_gpu.fit([predict_gpu.Times(2, GPU, rows), predict_gpu.Times(4, GPU, rows)])
    with pytest.raises(SystemExit):
        predict_gpu.main(["--ranks", "17"])


# ---- choosing, and explaining --------------------------------------------------------------------


def table(**changes: Any) -> tables.Table:
    rows = [
        Measurement(name, "all_reduce", size, seconds)
        for name, seconds in (("ring", 1e-6), ("direct_one_shot", 3e-6))
        for size in (64, 4096)
    ]
    entry = tables.entry(
        tables.choices_of(rows), model.fit(rows, FEW, GPU), rows, date="2026-01-02", version="1",
        gpus=["A", "B"],
    )  # fmt: skip
    return tables.parse({**entry, **changes}, "table.json")


def test_the_table_comes_before_the_limits_and_behind_rules() -> None:
    rules = parse_rules("all_reduce:4K-=recursive_doubling")
    tuner = DeviceTuner(2, rules, table())
    assert tuner.choose("all_reduce", 64) == "ring"
    assert tuner.choose("all_reduce", 4096) == "recursive_doubling"
    assert tuner.choose("broadcast", 64) == "direct_one_shot"
    assert tuner.choose("barrier", 0) == ""
    assert tuner.reason("all_reduce", 64).startswith("the fastest as measured on these ranks")
    assert DeviceTuner(2).choose("all_reduce", 64) == "direct_one_shot"


def test_a_table_of_other_gpus_is_refused_in_words() -> None:
    found = table()
    assert found.gpus == ["A", "B"]
    tables.refuse_gpus(found, ["A", "B"])
    with pytest.raises(ConfigError) as error:
        tables.refuse_gpus(found, ["A", ""])
    words = str(error.value)
    assert "table.json, 2026-01-02 was measured on other hardware" in words
    assert "GPUs: measured on '1 x A, 1 x B', this is '1 x A, 1 x unknown'" in words
    assert "tune --device cuda" in words
    tuner = DeviceTuner(2, parse_rules("all_reduce:ring"), refused=words)
    assert tuner.choose("all_reduce", 64) == "ring"
    with pytest.raises(ConfigError, match="other hardware"):
        tuner.choose("broadcast", 64)


def test_layouts_of_gpus_lie_beside_those_of_hosts(tmp_path: Path) -> None:
    path, hardware = tmp_path / "table.json", {"cpu": "a"}
    rows = [Measurement("ring", "all_reduce", 64, 1e-6)]
    other = [Measurement("ring", "broadcast", 64, 1e-6)]

    def entry(measured: list[Measurement], *gpus: str) -> dict[str, Any]:
        choices = tables.choices_of(measured)
        return tables.entry(choices, {}, measured, date="2026-01-02", version="1", gpus=gpus)

    key = tables.layout_key(GPU, [3, 3])
    assert key == "cuda 0,0"
    tables.save(path, hardware, "shm 0,0", entry(rows))
    tables.save(path, hardware, key, entry(rows, "A", "A"))
    tables.save(path, hardware, key, entry(other, "A", "A"))
    found = tables.parse(tables.load(path, hardware)[key], path)
    assert found.gpus == ["A", "A"]
    assert found.choices == {
        "all_reduce": [Choice(ANY_SIZE, "ring")],
        "broadcast": [Choice(ANY_SIZE, "ring")],
    }
    assert tables.parse(tables.load(path, hardware)["shm 0,0"], path).gpus == []
    # What was measured on other GPUs goes.
    tables.save(path, hardware, key, entry(other, "B", "B"))
    assert set(tables.parse(tables.load(path, hardware)[key], path).choices) == {"broadcast"}


def test_explain_without_gpus(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLECTIVES_TABLE", "off")
    words = ("explain", "all_reduce", "--device", "cuda", "--ranks", 4)
    status, out, err = run(capsys, *words, "--bytes", "1K")
    assert status == 0, err
    assert out.startswith("all_reduce of 1 KiB, 4 ranks on 1 node, over cuda")
    assert "runs     direct_one_shot" in out
    assert "one message to each peer, without a hand-shake" in out
    assert "way      packets: in packets of 16 bytes" in out
    assert "by size  direct_one_shot up to 384 KiB, direct_two_shot above" in out
    ring = schedule("ring", "all_reduce", 4).cost()
    (line,) = (line for line in out.splitlines() if line.split()[:1] == ["ring"])
    seconds = model.predict("ring", "all_reduce", 1024, [0] * 4, GPU)
    assert seconds is not None
    assert line.split()[1:5] == ["steps", f"{seconds * 1e6:.1f}", "us", str(int(ring["steps"]))]
    status, out, err = run(capsys, *words, "--bytes", "64M")
    assert status == 0, err
    assert "runs     direct_two_shot" in out and "way      fifos" in out
    assert "beside   a stream that computes: by copy engines" in out
    monkeypatch.setenv("COLLECTIVES_ALGORITHM", "all_reduce:ring")
    status, out, err = run(capsys, *words)
    assert "runs     ring" in out and "forced by COLLECTIVES_ALGORITHM" in out


@pytest.mark.parametrize(
    "collective", ["reduce_scatter", "broadcast", "gather", "all_to_all", "barrier"]
)
@pytest.mark.parametrize("nbytes", ["0", "1K", "64M"])
def test_explain_any_call_on_gpus(capsys: Any, collective: str, nbytes: str) -> None:
    size = () if collective == "barrier" else ("--bytes", nbytes)
    words = ("explain", collective, "--device", "cuda", "--ranks", 3, *size)
    status, out, err = run(capsys, *words)
    assert status == 0, err
    assert ("predicted" in out) == (collective != "barrier")
    assert "why " in out


def test_explain_shows_what_the_table_has(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from collectives import hardware

    path = tmp_path / "table.json"
    here = tables.hardware_of([{**hardware.summary(), "mpi": ""}])
    rows = [Measurement("ring", "all_reduce", 1024, 7.5e-5)]
    entry = tables.entry(
        tables.choices_of(rows), model.fit(rows, FEW, GPU), rows, date="2026-01-02", version="1",
        gpus=["A", "A"],
    )  # fmt: skip
    tables.save(path, here, "cuda 0,0", entry)
    monkeypatch.setenv("COLLECTIVES_TABLE", str(path))
    words = ("explain", "all_reduce", "--device", "cuda", "--bytes", "1K")
    status, out, err = run(capsys, *words, "--ranks", 2)
    assert status == 0, err
    assert "runs     ring" in out and "75.0 us" in out and "measured" in out
    status, out, err = run(capsys, *words, "--ranks", 4)
    assert "runs     direct_one_shot" in out and "measured " not in out.splitlines()[-8]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--ranks", "4", "--nodes", "2"), "GPUs of several nodes"),
        (("--node", "0,1"), "GPUs of several nodes"),
        (("--ranks", "17"), "up to 16 ranks"),
        (("--transport", "shm"), "leave it or --device out"),
        (("--device", "cuad"), "did you mean 'cuda'"),
        (("--threads", "2", "--measure"), "--device cuda: no GPU"),
    ],
)
def test_explain_on_gpus_in_words(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], expected: str
) -> None:
    from collectives import _core

    monkeypatch.setattr(_core, "device_count", lambda: (0, "no GPU"))
    status, _, err = run(capsys, "explain", "all_reduce", "--device", "cuda", *arguments)
    assert status == 2
    assert expected in err
