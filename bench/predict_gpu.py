"""Fits the cost model to what few GPUs took, and predicts what more of them will take.

    python bench/predict_gpu.py                         from the kept runs of two GPUs, for 4, 8
    python bench/predict_gpu.py --fit table.json        from a table of tune --device cuda
    python bench/predict_gpu.py --write bench/results   into predicted-gpu-4.json and -8.json
    python bench/predict_gpu.py --measured FILE         predicted beside measured, and the error

FILE is of `python -m collectives bench --device cuda --json`, on any number of GPUs, or a table;
rows in CUDA graphs count. Nothing is measured here. What is written says what it was fitted to,
when and at which commit, so that it can be compared with a later run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from collectives import _core
from collectives.bench import machine, report
from collectives.config import format_size
from collectives.tuning import model, tables
from collectives.tuning.device import MOST_RANKS, DeviceTuner
from collectives.tuning.model import Figures, Measurement
from collectives.tuning.work import GPU, GPU_SYMMETRIC, work_of

RESULTS = Path(__file__).resolve().parent / "results"
KEPT = tuple(
    RESULTS / f"gpu-nccl-{name}-2.json"
    for name in ("all_reduce", "collectives", "algorithms", "symmetric")
)
RANKS = (4, 8)
SIZES = tuple(256 << 2 * k for k in range(12))  # 256 B to 1 GiB
SYMMETRIC = ("all_reduce", "reduce_scatter", "all_gather")  # where symmetric buffers differ
NOTE = (
    "Predicted by bench/predict_gpu.py with figures that are fitted to the named files alone. "
    "Which way a call goes, and what is chosen, follow collectives/tuning/device.py, whose limits "
    "for four ranks were found on four GPUs."
)


class Times(NamedTuple):
    """Times of so many ranks, in seconds, of calls on ordinary arrays or on symmetric buffers."""

    ranks: int
    links: str
    measured: list[Measurement]


def read(paths: Iterable[Path]) -> list[Times]:
    """What results of `bench`, or tables of `tune`, hold, by ranks and kind of memory.

    Raises ValueError, in words, for a file that is neither, or has no times of GPUs.
    """
    found: dict[tuple[int, str], list[Measurement]] = {}
    for path in paths:
        rows = list(_rows(path))
        if not rows:
            raise ValueError(f"{path} has no times of calls on GPUs in CUDA graphs")
        for ranks, links, row in rows:
            found.setdefault((ranks, links), []).append(row)
    return [Times(*key, rows) for key, rows in found.items()]


def _rows(path: Path) -> Iterable[tuple[int, str, Measurement]]:
    content = json.loads(path.read_text(encoding="utf-8"))
    if "layouts" in content:
        for key, layout in content["layouts"].items():
            links, _, nodes = key.rpartition(" ")
            if links == GPU:
                ranks = nodes.count(",") + 1
                yield from ((ranks, GPU, row) for row in tables.parse(layout, path).rows)
    elif "rows" in content:
        for r in content["rows"]:
            if r["device"] == "cuda" and r["mode"] == "graph" and r["collective"] != "barrier":
                links = GPU_SYMMETRIC if r["symmetric"] else GPU
                row = Measurement(r["algorithm"], r["collective"], r["bytes"], r["time_us"] * 1e-6)
                yield r["ranks"], links, row
    else:
        raise ValueError(f"{path} is neither a result of bench --json nor a table of tune")


def fit(times: Sequence[Times]) -> dict[str, Figures]:
    """Figures by kind. Where both kinds of memory have a kind, ordinary arrays count.

    Raises ValueError for times of different numbers of ranks.
    """
    counts = {t.ranks for t in times}
    if len(counts) != 1:
        raise ValueError(f"the times to fit to are of {sorted(counts)} ranks; give those of one")
    figures: dict[str, Figures] = {}
    for part in sorted(times, key=lambda t: t.links == GPU):
        figures |= model.fit(part.measured, [0] * part.ranks, part.links)
    return figures


def errors(times: Sequence[Times], figures: Mapping[str, Figures]) -> dict[str, list[float]]:
    """How far predictions are off, as parts of the measured times, by kind."""
    found: dict[str, list[float]] = {}
    for part in times:
        nodes = [0] * part.ranks
        for m in part.measured:
            kind, _ = work_of(m.algorithm, m.collective, m.nbytes, nodes, part.links)
            off = model.errors([m], nodes, part.links, figures)
            found.setdefault(kind, []).extend(float(value) for value in off)
    return found


def in_words(off: Mapping[str, Sequence[float]]) -> list[str]:
    """Those errors, by kind and of all, in lines."""
    lines = []
    for kind, values in [*off.items(), ("all", [v for found in off.values() for v in found])]:
        lines.append(
            f"{kind:8} {len(values):4} times: off by {np.median(values):.0%} in the median, "
            f"by {np.max(values):.0%} at most"
        )
    return lines


def predictions(ranks: int, figures: Mapping[str, Figures]) -> list[dict[str, Any]]:
    """Every algorithm of every collective at every size, on ordinary arrays; on symmetric buffers
    what goes another way there.
    """
    tuner, nodes, rows = DeviceTuner(ranks), [0] * ranks, []
    for collective in _core.collectives:
        for algorithm in tuner.candidates(collective):
            for nbytes in SIZES:
                ways: dict[str, str] = {}
                for links in (GPU, GPU_SYMMETRIC) if collective in SYMMETRIC else (GPU,):
                    way, _ = work_of(algorithm, collective, nbytes, nodes, links)
                    seconds = model.predict(
                        algorithm, collective, nbytes, nodes, links, figures=figures
                    )
                    if way in ways.values() or seconds is None:
                        continue
                    ways[links] = way
                    rows.append(
                        {
                            "collective": collective,
                            "algorithm": algorithm,
                            "bytes": nbytes,
                            "symmetric": links == GPU_SYMMETRIC,
                            "way": way,
                            "chosen": algorithm == tuner.choose(collective, nbytes),
                            "predicted_us": float(f"{seconds * 1e6:.6g}"),
                        }
                    )
    return rows


def _print_predictions(ranks: int, rows: Sequence[Mapping[str, Any]]) -> None:
    columns = [("collective", 14), ("bytes", 7), ("predicted", 10), ("way", 8)]
    shown = report.Table([report.Column(title, "", width) for title, width in columns])
    print(f"# {ranks} ranks, predicted, in us; > what is chosen")
    print(f"{shown.header()}  algorithm")
    for r in sorted(rows, key=lambda r: (r["collective"], r["bytes"], r["predicted_us"])):
        cells = [
            r["collective"],
            format_size(r["bytes"]),
            report.microseconds(r["predicted_us"]),
            r["way"],
        ]
        memory = ", symmetric" if r["symmetric"] else ""
        print(f"{shown.row(cells)} {'>' if r['chosen'] else ' '}{r['algorithm']}{memory}")


def _print_beside(times: Sequence[Times], figures: Mapping[str, Figures]) -> None:
    columns = [("collective", 14), ("bytes", 7), ("measured", 10), ("predicted", 10), ("off", 6)]
    shown = report.Table([report.Column(title, "", width) for title, width in columns])
    for part in times:
        nodes = [0] * part.ranks
        print(f"# {part.ranks} ranks, {part.links}, in us\n{shown.header()}  algorithm")
        for m in part.measured:
            seconds = model.predict(
                m.algorithm, m.collective, m.nbytes, nodes, part.links, figures=figures
            )
            assert seconds is not None
            cells = [m.collective, format_size(m.nbytes), *report.beside(m.seconds, seconds)]
            print(f"{shown.row(cells)}  {m.algorithm}")
    for line in in_words(errors(times, figures)):
        print(f"# {line}")


def written(
    ranks: int,
    rows: Sequence[Mapping[str, Any]],
    figures: Mapping[str, Figures],
    fitted: Sequence[Path],
) -> dict[str, Any]:
    """What a file of predictions holds."""
    header = {
        "ranks": ranks,
        "date": machine.now(),
        "commit": machine.checked_out(),
        "fitted_to": [path.name for path in fitted],
        "figures": {kind: found.as_json() for kind, found in figures.items()},
        "note": NOTE,
    }
    return {"header": header, "rows": list(rows)}


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--fit", action="append", type=Path, metavar="FILE", help="times of few GPUs (the kept)")
    add("--ranks", action="append", type=int, metavar="N", help="predict for N ranks (4 and 8)")
    add("--measured", action="append", type=Path, metavar="FILE", help="times to show beside")
    add("--write", type=Path, metavar="FOLDER", help="write predicted-gpu-N.json there")
    args = parser.parse_args(words)
    for ranks in args.ranks or ():
        if not 2 <= ranks <= MOST_RANKS:
            parser.error(f"--ranks {ranks}: the kernels are for 2 to {MOST_RANKS} ranks")
    return args


def main(words: Sequence[str] | None = None) -> int:
    """Exit status 2, with words, where a file cannot be used."""
    args = _arguments(words)
    fitted = args.fit or list(KEPT)
    try:
        few = read(fitted)
        figures = fit(few)
        more = read(args.measured or ())
    except (ValueError, KeyError, OSError) as error:
        print(f"predict_gpu: {error}", file=sys.stderr)
        return 2
    print(f"# fitted to {', '.join(path.name for path in fitted)} ({few[0].ranks} ranks)")
    for kind, found in figures.items():
        print(f"# {kind}: {model.in_words(found)}")
    for line in in_words(errors(few, figures)):
        print(f"# {line}")
    for ranks in args.ranks or RANKS:
        rows = predictions(ranks, figures)
        if args.write:
            path = args.write / f"predicted-gpu-{ranks}.json"
            content = written(ranks, rows, figures, fitted)
            path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            print(f"{path} written")
        elif not more:
            _print_predictions(ranks, rows)
    if more:
        _print_beside(more, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
