"""NCCL as a peer on GPUs, through cupy.cuda.nccl, on the stream and in the graphs that ours run in.

NVLink multicast stays off (NCCL_NVLS_ENABLE=0): ours does not use it either, and the header of a
run says so. gather, scatter and all_to_all are grouped sends and receives, as NCCL's documentation
makes them. A call that NCCL or this cupy lacks (a dtype, an op, a barrier) has no figure.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from ..communicator import Communicator
from ..errors import UnsupportedError
from .cases import REDUCING, Bound
from .cuda import Cuda, told_by
from .gpus import dotted
from .peers import refuse_wrong
from .timing import Runner

# Our name -> the name of the constant in cupy.cuda.nccl. cupy tells what it was built with.
_DTYPES = {
    "int8": "NCCL_INT8",
    "uint8": "NCCL_UINT8",
    "int32": "NCCL_INT32",
    "uint32": "NCCL_UINT32",
    "int64": "NCCL_INT64",
    "uint64": "NCCL_UINT64",
    "float16": "NCCL_FLOAT16",
    "float32": "NCCL_FLOAT32",
    "float64": "NCCL_FLOAT64",
    "bfloat16": "NCCL_BFLOAT16",
    "float8_e4m3": "NCCL_FLOAT8E4M3",
    "float8_e5m2": "NCCL_FLOAT8E5M2",
}
_OPS = {
    "sum": "NCCL_SUM",
    "prod": "NCCL_PROD",
    "min": "NCCL_MIN",
    "max": "NCCL_MAX",
    "avg": "NCCL_AVG",
}


def share_id(comm: Communicator, nccl: Any) -> Any:
    """The id of a new NCCL communicator: rank 0's, of the type that its cupy gives (a tuple of
    numbers, or bytes). Collective.
    """
    text = b""
    if comm.rank == 0:
        unique = nccl.get_unique_id()
        text = json.dumps([isinstance(unique, tuple), list(unique)]).encode()
    is_tuple, numbers = json.loads(comm._bootstrap.broadcast(text))
    return tuple(numbers) if is_tuple else bytes(numbers)


def in_one_process(comm: Communicator) -> bool:
    """True if the ranks are threads."""
    return comm._bootstrap.kind == "threads"


# Communicators of ranks that are threads, by the job of their bootstrap.
_ends_of_threads: dict[str, list[Any]] = {}


def join(comm: Communicator, nccl: Any, ordinal: int) -> Any:
    """This rank's NCCL communicator. Collective.

    Ranks that are threads get theirs from one of them: cupy holds Python's lock while NCCL waits
    for the other ranks to join, which then never could.
    """
    if not in_one_process(comm):
        return nccl.NcclCommunicator(comm.size, share_id(comm, nccl), comm.rank)
    job = comm._bootstrap.job
    ordinals = [int(b) for b in comm._bootstrap.all_gather(str(ordinal).encode())]
    if comm.rank == 0:
        _ends_of_threads[job] = nccl.NcclCommunicator.initAll(ordinals)
    comm.barrier()
    return _ends_of_threads[job][comm.rank]


def leave(comm: Communicator, end: Any) -> None:
    """Frees what `join` gave. Collective."""
    if not in_one_process(comm):
        end.destroy()
        return
    comm.barrier()
    if comm.rank == 0:
        for each in _ends_of_threads.pop(comm._bootstrap.job):
            each.destroy()


class NcclPeer:
    """The NCCL that cupy was built with. Collective to make.

    Raises UnsupportedError, on all ranks, without NCCL, or where ranks share a GPU.
    """

    name = "nccl"

    def __init__(self, comm: Communicator, backend: Cuda) -> None:
        shared = backend.shared_gpus()
        if shared:
            raise UnsupportedError(
                f"--peer nccl: NCCL takes one rank for each GPU, and ranks {shared[0]} share one; "
                "start as many ranks as there are GPUs, or leave the peer out"
            )
        os.environ["NCCL_NVLS_ENABLE"] = "0"
        try:
            from cupy.cuda import nccl
        except ImportError as error:
            nccl, why = None, str(error)
        else:
            found = getattr(nccl, "available", True)
            why = "" if found else "cupy is built without NCCL, or does not find it"
        words = told_by(comm, why)
        if words:
            raise UnsupportedError(f"--peer nccl: {words} (pip install nvidia-nccl-cu12, or cu13)")
        self._comm, self._backend, self._nccl = comm, backend, nccl
        self._end = join(comm, nccl, backend.gpu.ordinal)
        number = dotted(int(nccl.get_version()), 10000, 100)
        self.version = f"NCCL {number}"
        backend.nccl_version = number

    def runner(self, bound: Bound, mode: str) -> Runner | None:
        body = self.body(bound)
        if body is None:
            return None
        self.verify(bound, body)
        bound.clear()
        return self._backend.loop(body, bound.nbytes, mode)

    def verify(self, bound: Bound, body: Callable[[], Any]) -> None:
        """Raises CollectiveError, on all ranks, if the peer's result is wrong: its time would be
        that of another call.
        """
        bound.fill()
        self._backend.once(body)
        # NCCL's avg divides before it adds.
        refuse_wrong(self._comm, self.version, bound, rough=True)

    def body(self, bound: Bound) -> Callable[[], Any] | None:
        """Puts the call on the stream once; None if there is no such call."""
        case, end, nccl = bound.case, self._end, self._nccl
        dtype = getattr(nccl, _DTYPES.get(case.dtype, "_"), None)
        op = getattr(nccl, _OPS.get(case.op, "_"), None)
        if dtype is None or (op is None and case.collective in REDUCING):
            return None
        stream, root, n = self._backend.gpu.stream.ptr, case.root, case.size
        x, out, count = bound.x.pointer, bound.out.pointer, case.count(bound.elements)
        if case.collective == "all_reduce":
            return lambda: end.allReduce(x, out, count, dtype, op, stream)
        if case.collective == "reduce_scatter":
            return lambda: end.reduceScatter(x, out, count, dtype, op, stream)
        if case.collective == "all_gather":
            return lambda: end.allGather(x, out, count, dtype, stream)
        if case.collective == "reduce":
            return lambda: end.reduce(x, out, count, dtype, op, root, stream)
        if case.collective == "broadcast":
            return lambda: end.broadcast(x, x, count, dtype, root, stream)
        step = count * case.itemsize
        everybody, only_root = range(n), [root]
        at_root = bound.rank == root
        # In place the root's own block is where it belongs.
        apart = [r for r in everybody if r != root or not bound.in_place]
        if case.collective == "gather":
            sends = only_root if not at_root or not bound.in_place else []
            return self._grouped(
                [(x, r) for r in sends],
                [(out + r * step, r) for r in apart] if at_root else [],
                count,
                dtype,
            )
        if case.collective == "scatter":
            receives = only_root if not at_root or not bound.in_place else []
            return self._grouped(
                [(x + r * step, r) for r in apart] if at_root else [],
                [(out, r) for r in receives],
                count,
                dtype,
            )
        if case.collective == "all_to_all":
            return self._grouped(
                [(x + r * step, r) for r in everybody],
                [(out + r * step, r) for r in everybody],
                count,
                dtype,
            )
        return None

    def _grouped(
        self, sends: list[tuple[int, int]], receives: list[tuple[int, int]], count: int, dtype: int
    ) -> Callable[[], None]:
        """Sends and receives, (address, peer), that run together."""
        end, nccl, stream = self._end, self._nccl, self._backend.gpu.stream.ptr

        def body() -> None:
            nccl.groupStart()
            for address, peer in sends:
                end.send(address, count, dtype, peer, stream)
            for address, peer in receives:
                end.recv(address, count, dtype, peer, stream)
            nccl.groupEnd()

        return body

    def close(self) -> None:
        self._backend.finish()
        leave(self._comm, self._end)
