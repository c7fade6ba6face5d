"""torch's own suite for backends, on this backend and on Gloo in the same way.

    python tests/torch/suite.py                        # all cases, both backends: a table
    python tests/torch/suite.py --cases 'broadcast|reduce' --backends collectives

The cases are those of torch/testing/_internal/distributed/distributed_test.py, which ships with
torch. A backend from outside adds its name to the sets of `DistTestCases.backend_feature`. Many
cases also ask whether the backend is Gloo, so this one gives its name as one that equals Gloo's:
every case that is run on Gloo is run on this backend too, and takes the same way.

Each case runs in ranks of its own. They are forked from a process that has imported torch, and in
which nothing of it has run, instead of torch's `spawn`: importing torch takes longer than most
cases.

The exit status is 1 if a case that Gloo passes, and that is not in EXCEPTIONS, does not pass on
this backend.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any

# Cases that Gloo passes and this backend need not, with the reason.
_WORDS = (
    "compares the words of Gloo's error; this backend raises DeadlineError, in words of its own"
)
EXCEPTIONS = {
    "test_barrier_timeout_full_group": _WORDS,
    "test_monitored_barrier_gloo": _WORDS,
    "test_monitored_barrier_gloo_rank_0_timeout": _WORDS,
    "test_monitored_barrier_gloo_subgroup": _WORDS,
}

_FEATURES = ("gpu", "cuda", "ddp", "subgroup", "plugin")


class AsGloo(str):
    """A backend's name, for code that asks whether it is Gloo's."""

    def __eq__(self, other: object) -> bool:
        return other == "gloo" or str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def worker(backend: str, cases: str, seconds: int) -> None:
    """Runs the cases on one backend; prints a line of JSON for each."""
    from torch.testing._internal import common_distributed

    for feature in _FEATURES:
        common_distributed.DistTestCases.backend_feature[feature].add(backend)
    common_distributed.TIMEOUT_DEFAULT = seconds
    common_distributed.TIMEOUT_OVERRIDE.clear()
    import torch
    from torch.testing._internal.distributed import distributed_test

    torch.set_num_threads(1)
    distributed_test.BACKEND = AsGloo(backend)

    class Cases(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    class Result(unittest.TestResult):
        def startTest(self, test: unittest.TestCase) -> None:
            super().startTest(test)
            self.began = time.monotonic()

        def say(self, test: unittest.TestCase, outcome: str, why: str = "") -> None:
            line = {
                "case": test.id().rpartition(".")[2],
                "outcome": outcome,
                "why": why,
                "seconds": round(time.monotonic() - self.began, 1),
            }
            os.write(out, (json.dumps(line) + "\n").encode())

        def addSuccess(self, test: unittest.TestCase) -> None:
            self.say(test, "passed")

        def addSkip(self, test: unittest.TestCase, reason: str) -> None:
            if not hasattr(self, "began"):
                self.began = time.monotonic()
            self.say(test, "skipped", reason)

        def addFailure(self, test: unittest.TestCase, err: Any) -> None:
            self.say(test, "failed", str(err[1]))

        addError = addFailure

    # The results leave by a copy of stdout; what the cases print goes to stderr.
    out = os.dup(1)
    os.dup2(2, 1)
    wanted = re.compile(cases)
    suite = unittest.TestSuite(
        Cases(name) for name in unittest.TestLoader().getTestCaseNames(Cases) if wanted.search(name)
    )
    suite.run(Result())


def run(backend: str, cases: str, world: int, seconds: int, log: Path) -> dict[str, Any]:
    """Outcome of each case on a backend."""
    with tempfile.TemporaryDirectory() as scratch:
        environment = os.environ | {
            "BACKEND": "gloo",
            "WORLD_SIZE": str(world),
            "TEMP_DIR": scratch,
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        }
        with log.open("w") as stderr:
            process = subprocess.Popen(
                [
                    *(sys.executable, __file__, "--worker", backend),
                    *("--cases", cases, "--seconds", str(seconds)),
                ],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
            outcomes = {}
            assert process.stdout is not None
            for line in process.stdout:
                said = json.loads(line)
                outcomes[said.pop("case")] = said
                if sys.stderr.isatty():
                    print(f"{backend}: {len(outcomes)} cases", end="\r", file=sys.stderr)
            status = process.wait()
    if status:
        raise SystemExit(f"{backend}: the suite ended with status {status}; see {log}")
    return outcomes


def first_line(why: str) -> str:
    """What of a failure goes into a table: the last line of the first rank's traceback."""
    lines = [line.strip() for line in why.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Failure)\b", line)]
    return (errors or lines or [""])[0][:300]


def table(results: dict[str, dict[str, Any]]) -> str:
    rows = []
    for backend, outcomes in results.items():
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
                rows.append(f"{backend}: {case}: {first_line(said['why'])}")
    for case, reason in EXCEPTIONS.items():
        rows.append(f"excepted: {case}: {reason}")
    return "\n".join(rows)


def missing(results: dict[str, dict[str, Any]]) -> list[str]:
    """Cases that Gloo passes, and this backend does not."""
    ours, gloo = results.get("collectives", {}), results.get("gloo", {})
    return sorted(
        case
        for case, said in ours.items()
        if case not in EXCEPTIONS
        and (
            said["outcome"] == "failed"
            or (said["outcome"] == "skipped" and gloo.get(case, {}).get("outcome") == "passed")
        )
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", nargs="+", default=["collectives", "gloo"])
    parser.add_argument("--cases", default="", help="a regular expression that names contain")
    parser.add_argument("--world", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=300, help="the limit of a case")
    parser.add_argument("--json", type=Path, help="where all outcomes go")
    parser.add_argument("--log", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.cases, options.seconds)
        return 0
    results = {}
    for backend in options.backends:
        results[backend] = run(
            backend, options.cases, options.world, options.seconds,
            options.log / f"suite-{backend}.log",
        )  # fmt: skip
        if options.json:
            options.json.write_text(json.dumps(results, indent=1))
    print(table(results))
    lacking = missing(results)
    if lacking:
        print("not passed here:", ", ".join(lacking))
    return 1 if lacking else 0


if __name__ == "__main__":
    sys.exit(main())
