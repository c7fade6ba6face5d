"""Where the arrays of a benchmark lie, and how calls on them are made and timed: what differs
between host and GPU, and nothing else does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from ..communicator import Communicator
from ..errors import ConfigError, UnsupportedError
from ..tuning import Tuner, model
from .cases import Areas, Bound, Buffers, as_user, call, prepare
from .machine import cores
from .timing import Clock, Runner, core_loop, python_loop

DEVICES = ("cpu", "cuda")


class Backend(ABC):
    """One kind of memory, with the engine that works on it. Collective to make.

    device     "cpu" or "cuda"
    modes      how calls are launched: "host"; "stream", "graph"
    transport  what carries data
    links      the same, as the cost model and the tables of `tune` call it
    tuner      what chooses algorithms
    clock      brings the ranks' times together
    loops      who makes the timed calls, for the header of a table
    """

    device: str
    modes: tuple[str, ...]
    transport: str
    links: str
    tuner: Tuner
    clock: Clock
    loops: str

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self._cores: int | None = None

    @abstractmethod
    def areas(self, nbytes: int, symmetric: bool) -> Areas:
        """Memory for the arrays of all sizes. Collective if `symmetric`."""

    @abstractmethod
    def call(self, bound: Bound) -> None:
        """Makes the call once, and waits until it has ended."""

    @abstractmethod
    def runner(self, bound: Bound, mode: str) -> Runner:
        """A timed loop over our call."""

    def choose(self, collective: str, nbytes: int) -> str:
        """The algorithm that serves a call by itself."""
        return self.tuner.choose(collective, nbytes)

    def predict(
        self, algorithm: str, collective: str, nbytes: int, root: int, *, symmetric: bool = False
    ) -> float | None:
        """Seconds that the cost model expects, None where it knows nothing."""
        table = self.tuner.measured
        return model.predict(
            algorithm,
            collective,
            nbytes,
            self.comm.nodes,
            self.links_of(symmetric),
            root=root,
            cores=self._cores,
            figures=table.figures if table is not None else None,
        )

    def links_of(self, symmetric: bool) -> str:
        """`links`, of ordinary or of symmetric arrays, where the cost model tells them apart."""
        return self.links

    def gpus(self) -> list[str]:
        """The names of the ranks' GPUs, none on hosts. Collective."""
        return []

    def why_no_table(self) -> str:
        """Why no table of these ranks would be asked, in words; "" if one would. Collective."""
        return ""

    def notes(self) -> dict[str, str]:
        """What the run showed beside its rows, by name."""
        return {}

    @abstractmethod
    def facts(self) -> dict[str, dict[str, Any]]:
        """What a header says beyond the host: additions to its parts by name. Collective."""


class Host(Backend):
    """numpy arrays, and loops in C++.

    python  loops in Python instead, through the methods that users call
    """

    device = "cpu"
    modes = ("host",)

    def __init__(self, comm: Communicator, *, python: bool = False) -> None:
        super().__init__(comm)
        self.python = python
        self.transport = comm.transports
        self.clock = Clock(comm)
        self.loops = "loops in Python" if python else "loops in C++"
        self.links = comm.transports
        self.tuner = comm._tuner
        self._cores = cores(comm)

    def areas(self, nbytes: int, symmetric: bool) -> Areas:
        return Buffers(self.comm, nbytes, symmetric=symmetric)

    def call(self, bound: Bound) -> None:
        call(self.comm, bound)

    def runner(self, bound: Bound, mode: str) -> Runner:
        if self.python:
            return python_loop(self.comm, bound, as_user(self.comm, bound))
        return core_loop(self.comm, prepare(self.comm, bound))

    def facts(self) -> dict[str, dict[str, Any]]:
        return {}


def check_options(device: str, mode: str | None, python: bool, peers: Sequence[str]) -> None:
    """Raises ConfigError for options of a benchmark that belong to the other kind of device."""
    if device == "cpu":
        if mode is not None:
            raise ConfigError(
                f"--mode {mode} says how calls are put on a GPU; add --device cuda, or leave it out"
            )
        if "nccl" in peers:
            raise ConfigError("--peer nccl works on GPU memory; add --device cuda")
        return
    if python:
        raise ConfigError(
            "--python is for the host; on GPUs --mode stream makes every call from Python"
        )
    wrong = [name for name in peers if name != "nccl"]
    if wrong:
        raise ConfigError(
            f"--peer {wrong[0]} works on host memory; with --device cuda the peer is nccl"
        )


def modes_of(mode: str | None) -> tuple[str, ...]:
    """The modes that `--mode` asks for on GPUs."""
    return ("stream", "graph") if mode == "both" else (mode or "graph",)


def connect(comm: Communicator, device: str, *, python: bool = False) -> Backend:
    """The backend for `device`. Collective. Raises UnsupportedError, on all ranks, where there is
    none.
    """
    if device == "cpu":
        return Host(comm, python=python)
    if device != "cuda":
        raise UnsupportedError(f"device {device!r}; known: {', '.join(DEVICES)}")
    from .cuda import connect as connect_cuda

    return connect_cuda(comm)
