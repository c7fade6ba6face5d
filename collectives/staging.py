"""Arrays on GPUs between nodes: through pinned memory of the host, and the calls on host arrays.

Here whole arrays are staged. Where nodes have several GPUs each, most calls stage a share of it on
each rank, and the rest is done from GPU to GPU: `rails.py`.

A call is put on the caller's current stream and returns at once, as within a node. Behind it a
thread of the communicator copies a slice to the host, makes the call on it that serves host arrays
(any algorithm, hierarchical ones included), and copies the result back, while the next slice comes
and the one before goes. See csrc/staging.hpp. Where MPI takes pointers to memory of GPUs, larger
calls are made on the arrays as they are: `straight.py`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import _core
from .bootstrap import Bootstrap, host_key
from .config import Settings
from .device import DeviceEngine, why_no_gpu
from .device_memory import NoSymmetricMemory
from .errors import CollectiveError
from .rails import Given, MakePart, make_rails
from .straight import End, go_straight
from .tuning.rails import Between

if TYPE_CHECKING:
    from ._core import Communicator as Core

# Where a call's arguments to the core have its algorithm.
_ALGORITHM = 9


def _why_no_thread(bootstrap: Bootstrap) -> str:
    """Why no thread of the communicator may call MPI, in words; "" if one may."""
    if bootstrap.kind != "mpi":
        return ""
    threads = _core.loaded_mpi().get("threads", "")
    if threads not in ("MPI_THREAD_SINGLE", "MPI_THREAD_FUNNELED"):
        return ""
    return (
        f"MPI was initialised with {threads}, and a thread of the communicator must call it: "
        "initialise it with MPI_THREAD_SERIALIZED or MPI_THREAD_MULTIPLE (mpi4py does, unless "
        "mpi4py.rc says otherwise)"
    )


def warn_if_bound(rank: int) -> None:
    """Staged calls are made by a thread of their own, and a rank that waits for its GPU polls."""
    if len(os.sched_getaffinity(0)) == 1 and (os.cpu_count() or 1) > 1:
        warnings.warn(
            f"rank {rank} is bound to one processor, where the thread that carries device arrays "
            "between nodes takes turns with the program: it would take milliseconds a call. Give "
            "each rank several (mpirun --bind-to none, or --map-by numa --bind-to numa)",
            RuntimeWarning,
            stacklevel=2,
        )


class StagedEngine(DeviceEngine):
    """The GPU half of a rank whose communicator spans several nodes. Making one is collective over
    the bootstrap.

    host        the rank's end on the host, whose calls it makes
    device      ordinal of this rank's GPU; `place` names it as arrays do
    slot_bytes  of a slice: the smallest COLLECTIVES_STAGING of all ranks. 4 times that is pinned.
    max_blocks, path    as for `DeviceEngine`, within nodes
    part        makes a communicator of some of the ranks

    `rails` is None where calls cannot go along rails, and `why_no_rails` then says why.
    `straight` says whether MPI is given pointers to memory of GPUs.

    Raises UnsupportedError on all ranks, in words, where a GPU cannot be used.
    """

    moves = False

    def __init__(
        self,
        bootstrap: Bootstrap,
        host: Core,
        nodes: Sequence[int],
        device: int,
        max_blocks: int = 0,
        path: str = "auto",
        *,
        part: MakePart,
    ) -> None:
        self.host = host
        self.device = device
        self.place = f"cuda:{device}"
        self._bootstrap = bootstrap
        warn_if_bound(bootstrap.rank)
        why = why_no_gpu(device) or _why_no_thread(bootstrap)
        settings = Settings()
        mine = [host_key(), os.getpid()]
        answers = self._agree(
            "cannot stage arrays of a GPU", why, slot=settings.staging, process=mine
        )
        threads = sum(a["process"] == mine for a in answers)
        self.slot_bytes = min(int(a["slot"]) for a in answers)
        why, core = "", None
        try:
            core = _core.Staging(device=device, slot_bytes=self.slot_bytes, threads=threads)
        except CollectiveError as error:
            why = str(error)
        self._agree("cannot set up its GPU", why)
        assert core is not None
        self._staging = core
        self.core: Any = core
        self.memory = NoSymmetricMemory()
        given = Given(bootstrap, host, core, self.slot_bytes, device, max_blocks, path)
        self.rails, self.why_no_rails = make_rails(given, nodes, part)
        ends = [End(bootstrap, host)] + ([self.rails.end] if self.rails is not None else [])
        self.straight = go_straight(bootstrap, core, settings.gpu_mpi, ends)

    def run_staged(
        self, comm: Core, arguments: tuple[Any, ...], algorithm: int, stream: int
    ) -> None:
        """Puts a call on a stream; `algorithm` is the core's number. Raises what an earlier call,
        or a peer on the host, told.
        """
        whole = (*arguments[:_ALGORITHM], algorithm, *arguments[_ALGORITHM + 1 :])
        self._staging.run(comm, whole, stream)

    @property
    def between(self) -> Between:
        """How its calls go between nodes, for `explain`."""
        return Between(self.why_no_rails, self.straight)

    def mark(self, stream: int) -> _core.Mark:
        """The end of the last call, which was put on `stream`: such calls are not captured."""
        return self.marks.mark(stream)

    def idle(self) -> bool:
        """True when all calls so far have ended. Raises what went wrong in them."""
        staged = self._staging.idle()
        if self.rails is None:
            return staged
        if self.rails.idle() and staged:
            return True
        self.rails.look_around()
        return False

    def abort(self, reason: str) -> None:
        """Ends the kernels that wait; the communicator's own abort() ends what staged calls wait
        for.
        """
        if self.rails is not None:
            self.rails.abort(reason)

    def close(self) -> None:
        """Ends the rank's part, once its calls have."""
        self._staging.close()
        if self.rails is not None:
            self.rails.close()
