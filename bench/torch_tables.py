"""Tables of docs/torch.md and docs/training.md, for bench/table.py: steps beside a peer, and
torch's own suite.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import turns

NO_STEPS = (
    "No results yet: `torchrun --nproc-per-node 2 bench/torch_gpu.py --json "
    "bench/results/torch-gpu-2.json`, then `python bench/table.py`."
)
NO_SUITE = (
    "No results yet: `make test-torch-suite SUITE_ARGS='--json "
    "bench/results/torch-suite-cpu-3.json'`, then `python bench/table.py`."
)
NO_TRAINING = (
    "No results yet: `python -m collectives run -n 2 bench/train_gpu.py --json "
    "bench/results/train-gpu-2.json`, then `python bench/table.py`."
)
NO_BESIDE = (
    "No results yet: `python -m collectives run -n 2 bench/beside_gpu.py --json "
    "bench/results/beside-gpu-2.json`, then `python bench/table.py`."
)
BESIDE = {
    "nccl": "NCCL",
    "fifos": "kernel of 32 blocks, ordinary array",
    "straight": "kernel of 16 blocks, symmetric buffer",
    "copies": "copy engines, any array",
}
NO_WAITING = (
    "No results yet: `python bench/waiting_gpu.py --json bench/results/waiting-gpu.json`, then "
    "`python bench/table.py`."
)
WAITING = {
    "nothing": "nothing",
    "event": "an event of the same process",
    "through": "an event of a stream that does nothing but wait for a word in memory",
    "kernel": "a kernel of one thread that looks at a word",
    "word": "a word in memory",
    "interprocess": "an event that other processes may use",
}
_NAMES = {"nccl": "NCCL", "gloo": "Gloo", "collectives": "this backend"}
_KINDS = {"ddp": "DDP", "fsdp2": "FSDP2"}


def _rows(head: list[str], body: list[list[str]]) -> list[str]:
    marks = "|---|" + "--:|" * (len(head) - 1)
    return [f"| {' | '.join(cells)} |" for cells in [head]] + [marks] + [
        f"| {' | '.join(cells)} |" for cells in body
    ]  # fmt: skip


def _range(spread: list[float], digits: int) -> str:
    return f"{spread[0]:.{digits}f} to {spread[1]:.{digits}f}"


def beside(folder: Path) -> list[str]:
    """A table for each run of bench/beside_gpu.py."""
    lines: list[str] = []
    for path in sorted(folder.glob("beside-gpu-*.json")):
        run: dict[str, Any] = json.loads(path.read_text())
        ways = run["ways"]
        lines += [
            f"{run['ranks']} {run['device']}, torch {run['torch']}, NCCL {run['nccl']}; "
            f"{run['layers']} all_reduces of {run['bytes'] / 2**20:.0f} MiB beside matrices that "
            f"take {ways['none']['computing']:.1f} ms; the median of {run['rounds']} rounds, in "
            f"milliseconds; commit {run['header']['commit'][:12]}, {run['header']['date'][:10]}.",
            "",
        ]
        head = ["", "computing takes longer by", "all takes longer by", "all_reduces alone take"]
        body = [
            [
                words,
                *(f"{ways[name][what]:.2f}" for what in ("computing_more", "all_more", "alone")),
            ]
            for name, words in BESIDE.items()
            if name in ways
        ]
        lines += [*_rows(head, body), ""]
    return lines[:-1] or [NO_BESIDE]


def waiting(folder: Path) -> list[str]:
    """The table of bench/waiting_gpu.py."""
    path = folder / "waiting-gpu.json"
    if not path.exists():
        return [NO_WAITING]
    run: dict[str, Any] = json.loads(path.read_text())
    header = run["header"]
    about = (
        f"{run['device']}, CUDA {run['driver'] // 1000}.{run['driver'] % 1000 // 10}; chains of "
        f"{run['kernels']} empty kernels, the median of {run['rounds']} rounds; commit "
        f"{header['commit'][:12]}, {header['date'][:10]}."
    )
    body = [[words, f"{run['us'][name]:.2f} µs"] for name, words in WAITING.items()]
    return [about, "", *_rows(["the other stream waits for", "a kernel takes"], body)]


def steps(folder: Path) -> list[str]:
    """A table for each run of bench/torch_gpu.py on GPUs."""
    lines: list[str] = []
    for path in sorted(folder.glob("torch-gpu-*.json")):
        run: dict[str, Any] = json.loads(path.read_text())
        peer, versions = run["peer"], run["header"]["versions"]
        windows = len(run["windows_ms"]["alone"])
        lines += [
            f"{run['ranks']} {run['device']}, torch {versions['torch']}, {_NAMES[peer]} "
            f"{run['peer_version']}; {run['parameters'] / 1e6:.0f} million parameters "
            f"({run['model']}), bfloat16, {run['batch']} x {run['length']} tokens a rank; "
            f"{windows} windows of {run['steps_of_a_window']} steps each; commit "
            f"{run['header']['commit'][:12]}, {run['header']['date'][:10]}. In "
            "milliseconds: the median of the windows, and their least and greatest; a ratio is of "
            "windows side by side.",
            "",
        ]
        head = ["", "this backend", "spread", _NAMES[peer], "spread", "this ÷ it", "spread"]
        body = []
        for kind, name in _KINDS.items():
            pair = [f"{kind} collectives", f"{kind} {peer}"]
            for what, key, spread in (
                ("step", "step_ms", "spread_ms"),
                ("exposed", "exposed_ms", "exposed_spread_ms"),
            ):
                cells = [f"{name}, {what}" if what == "step" else f"{name}, exposed communication"]
                for variant in pair:
                    cells += [f"{run[key][variant]:.1f}", _range(run[spread][variant], 1)]
                ratio = run["of_peer"][kind][what]
                if ratio["median"] is None:
                    cells += ["", ""]
                else:
                    cells += [f"{ratio['median']:.2f}", _range(ratio["spread"], 2)]
                body.append(cells)
        alone = _range(run["spread_ms"]["alone"], 1)
        body.append(["without synchronisation", f"{run['step_ms']['alone']:.1f}", alone, *[""] * 4])
        lines += [*_rows(head, body), ""]
    return lines[:-1] or [NO_STEPS]


def training(folder: Path) -> list[str]:
    """A table for each run of bench/train_gpu.py: steps of each way, by batch."""
    lines: list[str] = []
    for path in sorted(folder.glob("train-gpu-*.json")):
        run: dict[str, Any] = json.loads(path.read_text())
        header, rows = run["header"], run["rows"]
        batches = list(dict.fromkeys(row["batch"] for row in rows))
        found = {(row["name"], row["batch"]): row for row in rows}
        steps = sorted({row["steps"] for row in rows})
        counted = f"{steps[0]}" if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
        lines += [
            f"{header['ranks']} {header['gpu']}, torch {header['versions']['torch']}, NCCL "
            f"{header['nccl']}; a decoder of {header['parameters'] / 1e6:.0f} million parameters "
            f"in bfloat16, AdamW; {counted} steps of each way in one run "
            f"(`{header['command']}`, commit {header['commit'][:12]}, {header['date'][:10]}). "
            "Batches are sequences x tokens a rank; a ratio is of turns side by side: the median, "
            "the least and the greatest.",
            "",
        ]
        for batch in batches:
            head = [batch, "step", "90th percentile", "÷ torch's", "exposed", "scaling", "memory"]
            body = []
            for name in dict.fromkeys(row["name"] for row in rows if row["batch"] == batch):
                shown = name.replace("collectives alone", "this trainer alone")
                beside = found.get((_BESIDE.get(name, ""), batch))
                cells = _cells_of_training(found[name, batch], beside)
                body.append([shown.removeprefix("collectives "), *cells])
            lines += [*_rows(head, body), ""]
    return lines[:-1] or [NO_TRAINING]


# What the ways of the trainer are compared with.
_BESIDE = {
    "collectives alone": "torch alone",
    **{f"collectives ZeRO-{stage}": "torch DDP" for stage in (0, 1, 2)},
    "collectives ZeRO-3": "torch FSDP2",
}


def _cells_of_training(row: dict[str, Any], beside: dict[str, Any] | None) -> list[str]:
    alone = "alone" in row["name"]
    ratio = None if beside is None else turns.ratios(row["turns_ms"], beside["turns_ms"])
    memory = row["device_peak_bytes"]  # None where all ways are set up
    return [
        f"{row['median_ms']:.1f} ms",
        f"{row['p90_ms']:.1f} ms",
        "" if ratio is None else f"{ratio['median']:.2f} ({_range(ratio['spread'], 2)})",
        "" if alone else f"{row['exposed_ms']:.1f} ms",
        "" if alone else f"{row['scaling_efficiency']:.2f}",
        "" if memory is None else f"{memory / (1 << 30):.1f} GiB",
    ]


_WHERE = {
    "cpu": "CPU tensors",
    "cuda": "CUDA tensors",
    "pretended": "cases for GPUs, on CPU tensors",
}


def suite(folder: Path) -> list[str]:
    """What came of torch's own suite, and which cases fail on this backend alone."""
    body: list[list[str]] = []
    notes: list[str] = []
    for path in sorted(folder.glob("torch-suite-*.json")):
        run: dict[str, Any] = json.loads(path.read_text())
        of, results = run["about"]["of"], run["results"]
        peer, where = run["about"]["peer"], _WHERE[of["device"]]
        what = f"{where}, {of['world']} ranks, torch {of['torch']}, {run['about']['date'][:10]}"
        for backend in sorted(results):
            said = [one["outcome"] for one in results[backend].values()]
            counts = [str(said.count(o)) for o in ("passed", "failed", "skipped")]
            left = sum(task[1] == backend for task in run["not_run"])
            body.append([what, _NAMES[backend], *counts, str(left)])
        both = 0
        for case, one in sorted(results.get("collectives", {}).items()):
            theirs = results.get(peer, {}).get(case, {}).get("outcome", "not run")
            if one["outcome"] == "failed" and theirs == "failed":
                both += 1
            elif one["outcome"] == "failed":
                why = run["about"]["exceptions"].get(case)
                reason = f"excepted: {why}" if why else f"{_NAMES[peer]}: {theirs}"
                notes.append(f"- `{case}` ({where}) fails here; {reason}")
        if both:
            cases = "1 case fails" if both == 1 else f"{both} cases fail"
            notes.append(f"- {where}: {cases} on this backend and on {_NAMES[peer]}")
    if not body:
        return [NO_SUITE]
    return [*_rows(["", "", "passed", "failed", "skipped", "not run"], body), "", *notes]
