"""What a result depends on besides the code: processor, memory, pages, versions.

Packages are looked up, not imported; MPI is asked in a process of its own, so one that is broken
cannot take this one down.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import resource
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from .. import _core
from ..communicator import Communicator
from ..errors import CollectiveError
from ..hardware import cpu_model
from ..torch.extension import built_for
from ..tuning import Tuner

_EXCHANGE_ROUNDS = 200  # times 50 exchanges: 2 ms near, 12 ms far
_PACKAGES = ("torch", "jax", "cupy", "mpi4py", "ml_dtypes", "matplotlib")
_DECIDING = tuple(f"COLLECTIVES_{name}" for name in ("ALGORITHM", "TRANSPORT", "SIMD", "NODE"))

_ASK_MPI = """
import json, sys
from mpi4py import MPI
from collectives import _core
print(json.dumps(_core.loaded_mpi()))
"""


def cores(comm: Communicator) -> int:
    """Cores that the ranks of this node may use, all together: launchers may bind each to its own.
    Collective.
    """
    mine = json.dumps([comm.node, sorted(os.sched_getaffinity(0))]).encode()
    answers = [json.loads(b) for b in comm._bootstrap.all_gather(mine)]
    return len({core for node, found in answers if node == comm.node for core in found})


def memory_bytes() -> int:
    """Memory of this host."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def huge_pages() -> dict[str, str]:
    """When the kernel uses huge pages: for ordinary memory, and for shared memory."""
    folder = "/sys/kernel/mm/transparent_hugepage"
    modes = {}
    for name, file in (("ordinary", "enabled"), ("shared", "shmem_enabled")):
        text = " ".join(_lines(f"{folder}/{file}"))
        modes[name] = text.partition("[")[2].partition("]")[0] or "unknown"
    return modes


def page_bytes() -> int:
    """Size of an ordinary page."""
    return resource.getpagesize()


def exchange_ns(comm: Communicator) -> float | None:
    """Nanoseconds in which two ranks of a host exchange a cache line; None if no two share memory.
    Collective.
    """
    comm.barrier()
    mine = float(_core.cache_line_exchange(comm._core, _EXCHANGE_ROUNDS))
    slowest = float(np.max(comm.all_gather(np.array([mine], np.float64))))
    return round(slowest * 1e9, 1) or None


def package_version(name: str) -> str | None:
    """The installed version of a package, None if there is none. Nothing is imported."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    """This package, Python, numpy, and what else of interest is installed."""
    found = {
        "collectives": package_version("collectives") or "0+unknown",
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    for name in _PACKAGES:
        version = package_version(name)
        if version is not None:
            found[name] = version
    releases = built_for()
    if releases:
        found["extension for torch"] = ", ".join(releases)
    return found


def commit() -> str:
    """The commit that this was built from, or that is checked out where it is used in place;
    "-dirty" where files differ from it.
    """
    built = str(_core.commit)
    return built if built not in ("", "unknown") else checked_out()


def checked_out() -> str:
    """The commit of the checkout that the sources in Python are in; "unknown" where they are in
    none.
    """
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return "unknown"
    head = _git(folder, "rev-parse", "--short=12", "HEAD")
    if not head:
        return "unknown"
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return f"{head}-dirty" if changed else head


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def mpi(comm: Communicator) -> dict[str, str]:
    """The MPI library: path, version, abi, threads; or "missing", the reason why there is none."""
    if comm._bootstrap.kind == "mpi":
        return {name: str(value) for name, value in _core.loaded_mpi().items()}
    if package_version("mpi4py") is None:
        return {"missing": "mpi4py is not installed (pip install mpi4py)"}
    # A launcher's variables are about this process; without one they say how MPI is to work here.
    launched = any(k in os.environ for k in ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK"))
    hidden = ("COLLECTIVES_", *(("OMPI_", "PMIX_", "PMI_") if launched else ()))
    environment = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
    # A process that is alone has no peers; else Open MPI leaves a segment of 16 MiB in /dev/shm.
    environment["OMPI_MCA_btl"] = "self"
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK_MPI],
            capture_output=True,
            text=True,
            timeout=30,
            env=environment,
        )
        if done.returncode == 0:
            answer = json.loads(done.stdout.splitlines()[-1])
            return {name: str(value) for name, value in answer.items()}
        words = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError, CollectiveError) as error:
        words = str(error)
    return {"missing": f"mpi4py finds no MPI that works: {words}"}


def mpi_name(version: str) -> str:
    """Name and version of an MPI library, from what it tells of itself."""
    words = version.partition(",")[0].replace("Version:", " ").split()
    return " ".join(words)


def command_of_script() -> str:
    """How this script was called, for a header: without the file that it writes, and with no path
    of the machine.
    """
    words, left = [], iter(sys.argv[1:])
    for word in left:
        if word == "--json":
            next(left, None)
        elif not word.startswith("--json="):
            words.append(word)
    script = Path(sys.argv[0]).resolve()
    return shlex.join([f"{script.parent.name}/{script.name}", *words])


def header(
    comm: Communicator,
    command: str,
    facts: dict[str, dict[str, Any]] | None = None,
    tuner: Tuner | None = None,
) -> dict[str, Any]:
    """What stands above the results of a run. Collective.

    facts  additions to its parts by name; other parts are added
    tuner  what chooses algorithms, where it is not that for arrays on hosts
    """
    exchange = exchange_ns(comm)
    found: dict[str, Any] = {
        "machine": {
            "cpu": cpu_model(),
            "cores": cores(comm),
            "memory_bytes": memory_bytes(),
            "page_bytes": page_bytes(),
            "huge_pages": huge_pages(),
            "exchange_ns": exchange,
        },
        "versions": versions(),
        "commit": commit(),
        "command": command,
        "date": now(),
    }
    forced = choices(tuner or comm._tuner)
    for part, more in (*(facts or {}).items(), ("choices", forced)):
        if more:
            found[part] = {**found.get(part, {}), **more}
    return found


def choices(tuner: Tuner) -> dict[str, str]:
    """What beside the command line decides how calls are served: variables that are set, and the
    measured table. Without the table's folder, which is of the machine.
    """
    found = {name: os.environ[name] for name in _DECIDING if os.environ.get(name)}
    if tuner.measured is not None:
        found["table"] = Path(tuner.measured.origin).name
    return found


def now() -> str:
    """Date and time, as results carry it."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def warnings(comm: Communicator, cores: int) -> list[str]:
    """What makes the times of a run mean less than they seem to, in words."""
    found = []
    load = os.getloadavg()[0]
    if load > 0.75 * cores:
        found.append(
            f"the load of this host was {load:.1f} on {cores} cores before: others use it, and "
            "times may be many times too long"
        )
    if comm.local_size > cores:
        found.append(f"{comm.local_size} ranks of this node share {cores} cores")
    return found


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
