"""Other libraries that do the same collectives, to be timed in the same run.

    mpi    the MPI that the ranks were started with. Loops in C++, or through mpi4py from Python
    gloo   torch.distributed's Gloo group. Loops in Python
    nccl   on GPUs: nccl.py

A peer that lacks a collective, a dtype or an op has no figure there. Gloo sums in place only. What
a peer makes of a call is verified before it is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Protocol

import numpy as np

from .. import _core
from ..communicator import Communicator
from ..errors import CollectiveError, UnsupportedError, did_you_mean
from .backends import Backend, Host
from .cases import Bound
from .machine import mpi_name
from .timing import Runner, python_loop

NAMES = ("mpi", "gloo", "nccl")


class Peer(Protocol):
    """A library to compare with."""

    name: str
    version: str

    def runner(self, bound: Bound, mode: str) -> Runner | None:
        """A timed loop over the same call; None if the library has none. Collective.

        Raises CollectiveError, on all ranks, if its result is wrong.
        """
        ...

    def close(self) -> None: ...


def connect(backend: Backend, names: Sequence[str], command: str = "bench") -> list[Peer]:
    """The peers with these names, on the memory of `backend`, for a command. Collective. Raises
    UnsupportedError if one cannot run here.
    """
    comm = backend.comm
    peers: list[Peer] = []
    for name in dict.fromkeys(names):
        if name == "mpi":
            if comm._bootstrap.kind != "mpi":
                raise UnsupportedError(
                    f"--peer mpi: these ranks met through {comm._bootstrap.kind}, not MPI; start "
                    f"them with mpirun: mpirun -n 2 python -m collectives {command} --peer mpi"
                )
            peers.append(MpiPeer(comm, python=isinstance(backend, Host) and backend.python))
        elif name == "gloo":
            peers.append(GlooPeer(comm))
        elif name == "nccl":
            from .cuda import Cuda
            from .nccl import NcclPeer

            if not isinstance(backend, Cuda):
                raise UnsupportedError("--peer nccl works on GPU memory; add --device cuda")
            peers.append(NcclPeer(comm, backend))
        else:
            raise ValueError(f"unknown peer {name!r}; {did_you_mean(name, NAMES)}")
    return peers


def refuse_wrong(comm: Communicator, version: str, bound: Bound, *, rough: bool = False) -> None:
    """Raises CollectiveError, on all ranks, if a peer's result is wrong: its time would be that of
    another call. Collective.
    """
    mine = np.array([bound.wrong(rough=rough)], np.int64)
    wrong = int(np.sum(comm.all_gather(mine)))
    if wrong:
        raise CollectiveError(
            f"{version}: {wrong} wrong elements in {bound.case.collective} of {bound.nbytes} bytes",
            rank=comm.rank,
        )


class MpiPeer:
    """The MPI library that started the ranks, which have met through it."""

    name = "mpi"

    def __init__(self, comm: Communicator, *, python: bool) -> None:
        from mpi4py import MPI

        self._comm = comm
        self._mpi = MPI
        self._python = python
        self.version = mpi_name(str(_core.loaded_mpi()["version"]))

    def runner(self, bound: Bound, mode: str) -> Runner | None:
        if bound.in_place and bound.case.collective == "reduce_scatter":
            # In place MPI wants the result at the beginning of the vector.
            bound = replace(bound, out=bound.x[: len(bound.out)])
        run = self._loop(bound)
        if run is None:
            return None
        bound.fill()
        try:  # what MPI lacks it says at once, on every rank alike
            run(0, 1)
        except (UnsupportedError, self._mpi.Exception):
            return None
        refuse_wrong(self._comm, self.version, bound)
        bound.clear()
        return run

    def _loop(self, bound: Bound) -> Runner | None:
        if self._python:
            body = self._body(bound)
            return None if body is None else python_loop(self._comm, bound, body)
        case = bound.case
        if case.collective in ("gather", "scatter"):
            return None
        arguments = (
            case.collective,
            _core.dtypes.index(case.dtype),
            _core.ops.index(case.op),
            case.root,
            bound.x.ctypes.data,
            bound.out.ctypes.data,
            case.count(bound.elements),
        )
        handle = self._mpi._handleof(self._comm._bootstrap.comm)  # type: ignore[attr-defined]

        def run(warmup: int, iterations: int) -> np.ndarray[Any, Any]:
            core = self._comm._core
            stamps = _core.time_mpi(core, handle, warmup, iterations, True, *arguments)
            return np.array(stamps, np.float64).reshape(-1, 2)

        return run

    def _body(self, bound: Bound) -> Callable[[], Any] | None:
        case, MPI = bound.case, self._mpi
        comm = self._comm._bootstrap.comm  # type: ignore[attr-defined]
        if bound.x.dtype.kind not in "biufc" or bound.x.dtype == np.float16:
            return None
        ops = {
            "sum": MPI.SUM,
            "prod": MPI.PROD,
            "min": MPI.MIN,
            "max": MPI.MAX,
            "band": MPI.BAND,
            "bor": MPI.BOR,
            "bxor": MPI.BXOR,
        }
        op = ops.get(case.op)
        x, out, root, place = bound.x, bound.out, case.root, MPI.IN_PLACE
        at_root = bound.rank == root
        source = place if bound.in_place else x
        if case.collective in ("all_reduce", "reduce_scatter", "reduce") and op is None:
            return None
        if case.collective == "all_reduce":
            return lambda: comm.Allreduce(source, out, op)
        if case.collective == "reduce_scatter":
            if bound.in_place:
                return lambda: comm.Reduce_scatter_block(place, x, op)
            return lambda: comm.Reduce_scatter_block(x, out, op)
        if case.collective == "reduce":
            mine = source if at_root else x
            return lambda: comm.Reduce(mine, out if at_root else None, op, root)
        if case.collective == "all_gather":
            return lambda: comm.Allgather(source, out)
        if case.collective == "broadcast":
            return lambda: comm.Bcast(x, root)
        if case.collective == "gather":
            mine = source if at_root else x
            return lambda: comm.Gather(mine, out if at_root else None, root)
        if case.collective == "scatter":
            mine = place if at_root and bound.in_place else out
            return lambda: comm.Scatter(x if at_root else None, mine, root)
        if case.collective == "all_to_all":
            return lambda: comm.Alltoall(x, out)
        barrier: Callable[[], Any] = comm.Barrier
        return barrier

    def close(self) -> None:
        pass


class GlooPeer:
    """Gloo, as torch.distributed has it. Collective to make: opens a store on a free port."""

    name = "gloo"

    def __init__(self, comm: Communicator) -> None:
        if comm._bootstrap.kind == "threads":
            raise UnsupportedError(
                "--peer gloo: torch.distributed has one rank in a process; use --ranks instead of "
                "--threads"
            )
        try:
            import torch
            import torch.distributed as dist
        except ImportError as error:
            raise UnsupportedError(
                f"--peer gloo needs torch, which does not load ({error}): pip install torch"
            ) from None
        if not dist.is_available() or not dist.is_gloo_available():
            raise UnsupportedError(f"--peer gloo: torch {torch.__version__} is built without Gloo")
        self._comm = comm
        self._torch, self._dist = torch, dist
        self.version = f"torch {torch.__version__}"
        timeout = timedelta(seconds=comm._bootstrap.timeout)
        bootstrap, store, port = comm._bootstrap, None, b""
        address = "127.0.0.1"
        if bootstrap.rank == 0:
            store = dist.TCPStore(
                address, 0, None, is_master=True, wait_for_workers=False, timeout=timeout
            )
            port = str(store.port).encode()
        port = bootstrap.broadcast(port)
        if store is None:
            store = dist.TCPStore(address, int(port), None, is_master=False, timeout=timeout)
        dist.init_process_group(
            "gloo", store=store, rank=comm.rank, world_size=comm.size, timeout=timeout
        )

    def runner(self, bound: Bound, mode: str) -> Runner | None:
        body = self._body(bound)
        if body is None:
            return None
        bound.fill()
        self._comm.barrier()
        try:  # what Gloo lacks it says at once, on every rank alike
            body()
        except (RuntimeError, ValueError, NotImplementedError):
            return None
        refuse_wrong(self._comm, self.version, bound)
        bound.clear()
        return python_loop(self._comm, bound, body)

    def _tensor(self, array: np.ndarray[Any, Any]) -> Any:
        names = {"float8_e4m3": "float8_e4m3fn"}
        name = _core_name(array)
        kind = getattr(self._torch, names.get(name, name), None)
        if kind is None:
            return None
        return self._torch.from_numpy(array.reshape(-1).view(np.uint8)).view(kind)

    def _body(self, bound: Bound) -> Callable[[], Any] | None:
        dist, case = self._dist, bound.case
        if case.collective == "barrier":
            return lambda: dist.barrier()
        ops = {
            "sum": dist.ReduceOp.SUM,
            "prod": dist.ReduceOp.PRODUCT,
            "min": dist.ReduceOp.MIN,
            "max": dist.ReduceOp.MAX,
            "band": dist.ReduceOp.BAND,
            "bor": dist.ReduceOp.BOR,
            "bxor": dist.ReduceOp.BXOR,
        }
        op, root, n = ops.get(case.op), case.root, case.size
        x, out = self._tensor(bound.x), self._tensor(bound.out)
        if x is None or (op is None and case.collective in ("all_reduce", "reduce")):
            return None
        at_root = bound.rank == root
        if case.collective == "all_reduce" and bound.in_place:
            return lambda: dist.all_reduce(x, op)
        if case.collective == "reduce" and bound.in_place:
            return lambda: dist.reduce(x, root, op)
        if case.collective == "reduce_scatter" and op is not None:
            single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            return lambda: single(out, x, op)
        if case.collective == "all_gather":
            single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            return lambda: single(out, x)
        if case.collective == "broadcast":
            return lambda: dist.broadcast(x, root)
        if case.collective == "all_to_all":
            return lambda: dist.all_to_all_single(out, x)
        if case.collective == "gather" and not bound.in_place:
            parts = list(out.chunk(n)) if at_root else None
            return lambda: dist.gather(x, parts, root)
        if case.collective == "scatter" and not bound.in_place:
            parts = list(x.chunk(n)) if at_root else None
            return lambda: dist.scatter(out, parts, root)
        return None

    def close(self) -> None:
        self._dist.destroy_process_group()


def _core_name(array: np.ndarray[Any, Any]) -> str:
    from ..array import dtype_name

    return dtype_name(array.dtype)
