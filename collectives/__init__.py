"""Collective communication for numpy, torch, jax and cupy arrays.

import collectives as cc, numpy as np

# Under mpirun, torchrun, `python -m collectives run -n 4`, or alone.
comm = cc.init()
x = np.ones(1 << 20, np.float32)
comm.all_reduce(x)  # in place
"""

from .communicator import Communicator
from .errors import (
    AbortedError,
    ArrayError,
    ArrayTypeError,
    BootstrapError,
    ClosedError,
    CollectiveError,
    ConfigError,
    DeadlineError,
    MismatchError,
    PeerDiedError,
    ScheduleError,
    TopologyError,
    UnsupportedError,
)
from .flight_recorder import dump_on_signal
from .registration import Registration
from .schedule import Schedule, Transfer, algorithm, algorithms, schedule, unregister
from .starting import from_mpi, init, run_threads
from .work import Work


def __getattr__(name: str) -> str:
    # Looking up the version reads all installed metadata: 80 ms that most programs never need.
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("collectives")
        except PackageNotFoundError:  # a source tree that is not installed
            return "0+unknown"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "AbortedError",
    "ArrayError",
    "ArrayTypeError",
    "BootstrapError",
    "ClosedError",
    "CollectiveError",
    "Communicator",
    "ConfigError",
    "DeadlineError",
    "MismatchError",
    "PeerDiedError",
    "Registration",
    "Schedule",
    "ScheduleError",
    "TopologyError",
    "Transfer",
    "UnsupportedError",
    "Work",
    "algorithm",
    "algorithms",
    "dump_on_signal",
    "from_mpi",
    "init",
    "run_threads",
    "schedule",
    "unregister",
]
