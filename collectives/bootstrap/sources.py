"""How this process meets the others: what `detect` finds in arguments and environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..config import Settings
from ..errors import BootstrapError, did_you_mean
from .local import Solo
from .mpi import Mpi, import_mpi
from .protocol import Bootstrap


class MpiLauncher(NamedTuple):
    name: str
    library: str  # what an MPI library that belongs to it calls itself
    rank: str
    size: str


# Hydra starts ranks of MPICH, Intel MPI and MVAPICH alike; srun may speak either of the last two.
_MPI_LAUNCHERS = (
    MpiLauncher("Open MPI's mpirun", "Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    MpiLauncher("MVAPICH's mpirun", "MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    MpiLauncher(
        "mpiexec of MPICH or Intel MPI (PMI)", "MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE"
    ),
    MpiLauncher("a PMIx launcher", "an MPI with PMIx", "PMIX_RANK", "SLURM_STEP_NUM_TASKS"),
)

_SOURCES = ("solo", "mpi", "tcp", "torchrun")


def detect(
    source: Any = None, *, timeout: float | None = None, environ: Mapping[str, str] | None = None
) -> Bootstrap:
    """How this process meets the others, and meets them. The first of these that applies:

    1. `source`: a Bootstrap, an mpi4py communicator, or "solo", "mpi", "tcp" or "torchrun"
    2. COLLECTIVES_RANK and COLLECTIVES_WORLD_SIZE, set by `python -m collectives run` or by hand
    3. torchrun (TORCHELASTIC_RUN_ID), because it may itself run under mpirun, and never the other
       way round
    4. mpirun, mpiexec or srun with PMI or PMIx: mpi4py, whose world must be as large as the
       launcher says
    5. RANK and WORLD_SIZE, with MASTER_ADDR and MASTER_PORT
    6. mpi4py, if the program has imported it already and its world has more than one rank
    7. alone

    `timeout` is in seconds, else COLLECTIVES_TIMEOUT, else 300. Raises BootstrapError; never goes
    on alone where something says that there are others.
    """
    environ = os.environ if environ is None else environ
    settings = Settings(environ)
    timeout = settings.timeout if timeout is None else timeout
    if source is None:
        return _detect(environ, settings, timeout)
    if isinstance(source, str):
        if source == "solo":
            return Solo(timeout)
        if source == "mpi":
            return _from_mpi(mpi_launcher(environ), environ, timeout)
        if source == "tcp":
            return _from_tcp(environ, settings, timeout)
        if source == "torchrun":
            return _from_torchrun(environ, settings, timeout)
        raise BootstrapError(
            f"unknown way to find ranks {source!r}; {did_you_mean(source, _SOURCES)}"
        )
    # First: to ask a null communicator for its `rank`, which a Bootstrap has, is an error of MPI.
    if hasattr(source, "Get_rank") and hasattr(source, "Idup"):
        return Mpi(source, timeout)
    # So it is to ask a null group, and anything of MPI lacks this one.
    if hasattr(source, "subgroup") and isinstance(source, Bootstrap):
        return source
    raise BootstrapError(
        f"a {type(source).__name__} is no way to find ranks; pass an mpi4py communicator, a "
        f"Bootstrap, or one of {', '.join(_SOURCES)}"
    )


def _detect(environ: Mapping[str, str], settings: Settings, timeout: float) -> Bootstrap:
    if settings.rank is not None or settings.world_size is not None:
        return _from_tcp(environ, settings, timeout)
    if "TORCHELASTIC_RUN_ID" in environ:
        return _from_torchrun(environ, settings, timeout)
    launcher = mpi_launcher(environ)
    if launcher is not None:
        return _from_mpi(launcher, environ, timeout)
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _from_tcp(environ, settings, timeout)
    MPI = sys.modules.get("mpi4py.MPI")
    if MPI is not None and MPI.Is_initialized() and MPI.COMM_WORLD.Get_size() > 1:
        return Mpi(None, timeout)
    if _integer(environ, "SLURM_STEP_NUM_TASKS", 1) > 1:
        raise BootstrapError(
            f"srun started {environ['SLURM_STEP_NUM_TASKS']} tasks, but nothing says how they "
            "meet: start them with srun --mpi=pmix (or pmi2) and mpi4py, or set RANK, WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT"
        )
    return Solo(timeout)


def _integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "")
    if not text.strip():
        if default is None:
            raise BootstrapError(
                f"the environment variable {name} is not set, and is needed to find the other ranks"
            )
        return default
    if not text.strip().isdecimal():
        raise BootstrapError(
            f"the environment variable {name} is {text!r}, which is no whole number >= 0"
        )
    return int(text)


def _master_port(environ: Mapping[str, str]) -> int:
    port = _integer(environ, "MASTER_PORT")
    if not 0 < port < 65536:  # getaddrinfo would take 70000 for 4464
        raise BootstrapError(
            f"the environment variable MASTER_PORT is {port}, which is no port that ranks could "
            "meet at; ports are 1 to 65535"
        )
    return port


def claimed(environ: Mapping[str, str], settings: Settings) -> tuple[int | None, int | None]:
    """The rank that the environment says this process is, and of how many; None where it does not
    say, or says no number.
    """
    launcher = mpi_launcher(environ)
    names = ("RANK", "WORLD_SIZE")
    if launcher is not None and "RANK" not in environ:
        names = (launcher.rank, launcher.size)

    def number(name: str) -> int | None:
        text = environ.get(name, "").strip()
        return int(text) if text.isdecimal() else None

    if settings.rank is not None or settings.world_size is not None:
        return settings.rank, settings.world_size
    return number(names[0]), number(names[1])


def mpi_launcher(environ: Mapping[str, str]) -> MpiLauncher | None:
    return next((launcher for launcher in _MPI_LAUNCHERS if launcher.rank in environ), None)


def _from_mpi(
    launcher: MpiLauncher | None, environ: Mapping[str, str], timeout: float
) -> Bootstrap:
    if launcher is None:
        return Mpi(None, timeout)
    rank = _integer(environ, launcher.rank)
    # 0: the launcher does not say (PMIx without Slurm), so only the rank can be compared.
    size = _integer(environ, launcher.size, 0)
    try:
        MPI = import_mpi()
    except BootstrapError:
        if size == 1:
            return Solo(timeout)
        raise
    seen_rank, seen_size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    if (size and size != seen_size) or rank != seen_rank:
        vendor, version = MPI.get_vendor()
        library = f"{vendor} {'.'.join(map(str, version))}"
        raise BootstrapError(
            f"{launcher.name} started this process as rank {rank} of {size or 'several'}, but "
            f"mpi4py, which uses {library}, sees rank {seen_rank} of {seen_size}: launcher and "
            "library belong to different MPIs, so every rank would be alone. Start with the "
            f"launcher of {library}, or install mpi4py for {launcher.library}",
            rank=rank,
        )
    return Mpi(None, timeout)


def _from_tcp(environ: Mapping[str, str], settings: Settings, timeout: float) -> Bootstrap:
    ours = settings.rank is not None or settings.world_size is not None
    names = ("COLLECTIVES_RANK", "COLLECTIVES_WORLD_SIZE") if ours else ("RANK", "WORLD_SIZE")
    rank, size = (_integer(environ, name) for name in names)
    if not rank < size:
        raise BootstrapError(
            f"{names[0]} is {rank} and {names[1]} is {size}; ranks are 0 to {names[1]} - 1"
        )
    launched = ours and settings.rendezvous == "launcher"
    if size == 1 and not launched:
        return Solo(timeout)
    host = settings.addr or environ.get("MASTER_ADDR", "").strip()
    if not host:
        raise BootstrapError(
            f"{names[1]} is {size}, but neither COLLECTIVES_ADDR nor MASTER_ADDR says where to meet"
        )
    if not launched and _torch_has_a_store(environ, host):
        return _from_torch_store(rank, size, timeout)
    from .addresses import read_secret
    from .hosting import meet

    port = settings.port or _master_port(environ)
    return meet(
        host,
        port,
        rank=rank,
        size=size,
        secret=read_secret(settings),
        job=settings.job,
        timeout=timeout,
        hosts=rank == 0 and not launched,
        heartbeat=settings.heartbeat,
    )


def _torch_has_a_store(environ: Mapping[str, str], host: str) -> bool:
    """True if the program has begun torch.distributed, whose store then listens at MASTER_PORT."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or host != environ.get("MASTER_ADDR", "").strip():
        return False
    return bool(distributed.is_available() and distributed.is_initialized())


def _from_torch_store(rank: int, size: int, timeout: float) -> Bootstrap:
    from torch.distributed.distributed_c10d import _get_default_store  # type: ignore[import-not-found,unused-ignore]

    from .store import through_store

    return through_store(
        _get_default_store(), rank, size, timeout=timeout, name=_store_name("default")
    )


def _store_name(key: str) -> str:
    from .hosting import count_world, world_name

    name = f"collectives {world_name((key, 0))}"
    count_world((key, 0))  # a store keeps what was in it
    return name


def _from_torchrun(environ: Mapping[str, str], settings: Settings, timeout: float) -> Bootstrap:
    rank, size = _integer(environ, "RANK"), _integer(environ, "WORLD_SIZE")
    if size == 1:
        return Solo(timeout)
    if environ.get("TORCHELASTIC_USE_AGENT_STORE", "False") != "True":
        return _from_tcp(environ, settings, timeout)
    from datetime import timedelta

    from .store import through_store

    try:
        from torch.distributed import TCPStore
    except ImportError as error:
        raise BootstrapError(
            f"torchrun started this process, but torch does not load: {error}"
        ) from error
    host, port = environ.get("MASTER_ADDR", "").strip(), _master_port(environ)
    try:
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout))
    except RuntimeError as error:
        raise BootstrapError(
            f"the store of torchrun at {host}:{port} does not answer: {error}", rank=rank
        ) from error
    # torchrun keeps its store when it restarts ranks that failed, so every attempt has names of its
    # own.
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    name = f"{_store_name('torchrun')}/{environ['TORCHELASTIC_RUN_ID']}/{attempt}"
    return through_store(store, rank, size, timeout=timeout, name=name)
