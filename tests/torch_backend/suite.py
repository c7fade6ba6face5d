"""torch's own suite for backends, on this backend and on a peer in the same way.

    python tests/torch_backend/suite.py                    # all cases, on this one and on Gloo
    python tests/torch_backend/suite.py --device cuda      # CUDA tensors, 2 GPUs, beside NCCL
    python tests/torch_backend/suite.py --device pretended # NCCL's cases on the host, beside Gloo
    python tests/torch_backend/suite.py --cases 'broadcast|reduce' --backends collectives

The cases are those of torch/testing/_internal/distributed/distributed_test.py, which ships with
torch. Every case that is run on the peer is run on this backend too, and takes the same way (see
suite_cases.py). Cases take turns on the backends, so a run that is cut off (--limit-seconds) has
compared what it has; `--json FILE --resume` runs the rest, and once more what failed.

Without --keep each case runs in processes of its own, --jobs cases at a time. They are forked from
one that has imported torch, and in which nothing of it has run, instead of torch's `spawn`:
importing torch takes longer than most cases. Where forked processes cannot use CUDA the ranks are
spawned, and this program says so. With --keep, as is usual with CUDA tensors, ranks are started
once and run many cases, one after the other; one that fails there runs again in new ranks (see
suite_running.py).

The exit status is 1 if a case that the peer passes, and that is not in EXCEPTIONS, does not pass on
this backend.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import json
import os
import re
import signal
import sys
import tempfile
import time
import unittest
import warnings
from pathlib import Path
from typing import Any

import suite_running
from suite_kept import Keep
from suite_running import Outcome, Task

OURS = "collectives"
PEERS = {"cpu": "gloo", "cuda": "nccl", "pretended": "gloo"}
CASES_OF = {"cpu": "gloo", "cuda": "nccl", "pretended": "nccl"}  # the backend that decides on skips

# Cases that the peer passes and this backend need not, with the reason.
_WORDS = (
    "compares the words of Gloo's error; this backend raises DeadlineError, in words of its own"
)
_EVENTS = "looks for asynchronous events of the profiler, which torch lets only C++ record"
EXCEPTIONS = {
    "cpu": {
        "test_barrier_timeout_full_group": _WORDS,
        "test_barrier_timeout_global": _WORDS,
        "test_monitored_barrier_gloo": _WORDS,
        "test_monitored_barrier_gloo_rank_0_timeout": _WORDS,
        "test_monitored_barrier_gloo_subgroup": _WORDS,
    },
    "cuda": {
        "test_ddp_profiling_execution_trace": "asserts that the backend's name is nccl",
    },
    "pretended": {},
}

# Cases that are left out.
LEFT_OUT = {"pretended": ("test_ddp_uneven_inputs",)}  # large convolutions: minutes on the host

# Cases that take longest start first, so that none is alone at the end.
_LONG = ("test_ddp_uneven_inputs", "test_ddp_hook_parity_powerSGD", "test_post_localSGD_optimizer")

Results = dict[str, dict[str, Outcome]]  # of backend and case


def set_up(device: str, world: int) -> None:
    """The environment in which torch's suite is imported."""
    os.environ.update(
        BACKEND=CASES_OF[device],
        INIT_METHOD="file://",  # some cases are for this only; each gets a file of its own
        WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        OMP_NUM_THREADS="1",
        PYTHONWARNINGS="ignore",
        TEMP_DIR=tempfile.gettempdir(),
    )
    if device == "cuda":
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast stays off
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asks without starting CUDA
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    warnings.simplefilter("ignore")


def load_cases(device: str) -> Any:
    """The module suite_cases, once the environment is set up."""
    if device == "pretended":
        import suite_pretended

        suite_pretended.before_the_cases()
    import suite_cases

    suite_cases.prepare()
    if device == "pretended":
        suite_pretended.believe(suite_cases)
    return suite_cases


def exceptions_for(device: str, torch_version: str) -> dict[str, str]:
    from collectives.torch import extension

    in_cpp = device == "cuda" and extension.load(torch_version) is not None
    events = {} if device == "cpu" or in_cpp else {"test_ddp_profiling_torch_profiler": _EVENTS}
    return {**EXCEPTIONS[device], **events}


def tasks(device: str, cases: str, backends: list[str], done: Results) -> list[Task]:
    """What is to be run, each case on all backends in turn."""
    import suite_cases

    names = unittest.TestLoader().getTestCaseNames(suite_cases.Cases)
    names = [n for n in names if re.search(cases, n) and n not in LEFT_OUT.get(device, ())]
    wanted = sorted(names, key=lambda n: n not in _LONG)
    return [
        Task(name, backend)
        for name in wanted
        for backend in backends
        if done.get(backend, {}).get(name, {}).get("outcome", "failed") == "failed"
    ]


def first_line(why: str) -> str:
    """What of a failure goes into a table: the last line of the first rank's traceback."""
    lines = [line.strip() for line in why.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Failure)\b", line)]
    return (errors or lines or [""])[0][:300]


def table(results: Results, exceptions: dict[str, str]) -> str:
    rows = []
    for backend, outcomes in sorted(results.items()):
        count = dict.fromkeys(("passed", "failed", "skipped"), 0)
        for said in outcomes.values():
            count[said["outcome"]] += 1
        seconds = sum(said["seconds"] for said in outcomes.values())
        rows.append(
            f"{backend:12} {count['passed']:4} passed {count['failed']:4} failed "
            f"{count['skipped']:4} skipped {seconds:7.0f} s"
        )
    for backend, outcomes in results.items():
        for case, said in sorted(outcomes.items()):
            if said["outcome"] == "failed":
                rows.append(f"{backend}: {case}: {said['why']}")
    for case, reason in exceptions.items():
        rows.append(f"excepted: {case}: {reason}")
    return "\n".join(rows)


def missing(results: Results, peer: str, exceptions: dict[str, str]) -> list[str]:
    """Cases that this backend does not pass though the peer does, and those that fail here and do
    not on the peer.
    """
    theirs = {case: said["outcome"] for case, said in results.get(peer, {}).items()}
    return sorted(
        case
        for case, said in results.get(OURS, {}).items()
        if case not in exceptions
        and (
            (said["outcome"] == "failed" and theirs.get(case) != "failed")
            or (said["outcome"] == "skipped" and theirs.get(case) == "passed")
        )
    )


class Record:
    """All that is known, on disk as it comes, and on the screen: what failed, or each outcome. In
    `about` come cases that were run again, and after which ranks were not kept, with the reason.
    """

    def __init__(
        self, path: Path | None, about: dict[str, Any], resume: bool, progress: bool = False
    ) -> None:
        self._path, self._about, self._progress = path, about, progress
        self._began = time.monotonic()
        self.results: Results = {}
        if resume and path is not None and path.exists():
            held = json.loads(path.read_text())
            if held["about"]["of"] != about["of"]:
                raise SystemExit(
                    f"{path} has results of {held['about']['of']}, this run is of {about['of']}: "
                    "name another file, or leave out --resume"
                )
            self.results = held["results"]

    def note(self, said: Outcome) -> None:
        kept = {key: said[key] for key in ("outcome", "why", "seconds")}
        if said["outcome"] == "failed":
            kept["why"] = first_line(said["why"])  # the log has all
        self.results.setdefault(said["backend"], {})[said["case"]] = kept
        notes = {name: first_line(said[name]) for name in ("again", "unfit") if said.get(name)}
        for name, why in notes.items():
            self._about.setdefault(name, []).append([said["case"], said["backend"], why])
        self.write([])
        if said["outcome"] == "failed" or self._progress or sys.stderr.isatty():
            count, passed = sum(map(len, self.results.values())), time.monotonic() - self._began
            more = "".join(f"; {name}: {why}" for name, why in notes.items())
            print(
                f"{passed:7.1f} s, {count}: {said['backend']} {said['case']}: {said['outcome']} "
                f"in {said['seconds']} s{more}",
                file=sys.stderr, flush=True,
            )  # fmt: skip

    def write(self, not_run: list[Task]) -> None:
        if self._path is None:
            return
        content = {
            "about": self._about,
            "results": self.results,
            "not_run": [list(task) for task in not_run],
        }
        part = self._path.with_name(self._path.name + ".part")
        part.write_text(json.dumps(content, indent=1) + "\n")
        part.replace(self._path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=PEERS, default="cpu", help="cuda: beside NCCL")
    parser.add_argument("--backends", nargs="+", help="collectives, and its peer")
    parser.add_argument("--cases", default="", help="a regular expression that names contain")
    parser.add_argument("--world", type=int, help="ranks (3, with GPUs 2)")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    parser.add_argument("--spawn", action="store_true", help="ranks are not forked, but started")
    parser.add_argument("--keep", action=argparse.BooleanOptionalAction,
                        help="ranks run many cases: usual with GPUs")  # fmt: skip
    parser.add_argument("--seconds", type=int, default=300, help="the limit of a case")
    parser.add_argument("--limit-seconds", type=float, help="no case starts later than that")
    parser.add_argument("--grace", type=float, default=20, help="what runs then has these seconds")
    parser.add_argument("--json", type=Path, help="where outcomes go, each as it is there")
    parser.add_argument("--resume", action="store_true", help="run what did not pass there")
    parser.add_argument("--log", type=Path, help="where a case's output goes, if it fails")
    parser.add_argument("--progress", action="store_true", help="say when each case is over")
    options = parser.parse_args()

    world = options.world or (3 if options.device == "cpu" else 2)
    peer = PEERS[options.device]
    set_up(options.device, world)
    suite_cases = load_cases(options.device)
    import torch

    exceptions = exceptions_for(options.device, torch.__version__)
    on_gpus = options.device == "cuda"
    kept = on_gpus if options.keep is None else options.keep
    about = {
        "of": {"torch": torch.__version__, "device": options.device, "world": world},
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "jobs": options.jobs,
        "peer": peer,
        "exceptions": exceptions,
    }
    if on_gpus and torch.cuda.device_count() < world:
        parser.error(f"{world} ranks need as many GPUs; torch sees {torch.cuda.device_count()}")
    if on_gpus and kept:
        options.spawn = True
    if on_gpus and not options.spawn and not suite_cases.forked_ranks_have_gpus():
        options.spawn = True
        print("forked processes cannot use CUDA here: ranks are spawned", flush=True)
    method = "spawn" if options.spawn else "fork"
    about["start_method"] = f"kept, {method}" if kept else method
    suite_cases.Cases.start_method = method
    keep = Keep(method, functools.partial(load_cases, options.device)) if kept else None
    record = Record(options.json, about, options.resume, options.progress)
    wanted = tasks(options.device, options.cases, options.backends or [OURS, peer], record.results)

    signal.signal(signal.SIGTERM, suite_running.stop)
    with contextlib.ExitStack() as stack:
        logs = options.log or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        logs.mkdir(parents=True, exist_ok=True)

        def note(said: Outcome) -> None:
            record.note(said)
            if said["outcome"] != "failed":
                (logs / f"{said['backend']}-{said['case']}.log").unlink(missing_ok=True)

        not_run = suite_running.run(
            wanted, note, jobs=options.jobs, seconds=options.seconds, logs=logs, keep=keep,
            limit=options.limit_seconds, grace=options.grace,
        )  # fmt: skip
    record.write(not_run)
    print(table(record.results, exceptions))
    if not_run:
        print("not run:", ", ".join(f"{task.case} ({task.backend})" for task in not_run))
    lacking = missing(record.results, peer, exceptions)
    if lacking:
        print("not passed here:", ", ".join(lacking))
    return 1 if lacking else 0


if __name__ == "__main__":
    sys.exit(main())
