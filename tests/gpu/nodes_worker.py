"""Ranks on several nodes, whose arrays are on GPUs: `nodes_worker.py WHAT NODE,NODE,...`.

COLLECTIVES_NODE makes several nodes of one machine.
"""

import os
import signal
import sys
import time
from functools import partial
from typing import Any

import cupy
import numpy as np
from cases import Case, check, compositions, registry, sweep
from mpi4py import MPI
from on_device import EMULATED, OnDevice, some

import collectives as cc
from collectives import _core, straight
from collectives.schedule import why_unsupported
from collectives.tuning.rails import STRAIGHT_FROM

WORLD = MPI.COMM_WORLD
NODES = [int(node) for node in sys.argv[2].split(",")]


def device_array(proxy: OnDevice, count: int, at: int = 0) -> Any:
    memory = cupy.cuda.MemoryPointer(proxy.memory.mem, at)
    return cupy.ndarray((count,), cupy.float32, memory)


def every_case(proxy: OnDevice) -> int:
    """Every collective by every algorithm and by itself, whole and in slices, then one by one
    what reductions there are."""
    n = proxy.size
    pairs = [*registry(n, NODES), *compositions(n, NODES)[::9]]
    pairs += [(None, collective) for collective in cc.config.COLLECTIVES]
    wanted = some(list(sweep(n, pairs, (0, 1, 17, 1000, 4099), NODES, how="blocking")))
    wanted += [
        Case(collective, None, dtype, count=count, place=place, root=n - 1, v=v)
        for i, (collective, v) in enumerate(
            [
                ("all_reduce", False),
                ("reduce", False),
                ("broadcast", False),
                *((c, v) for c in BLOCKED for v in (False, True)),
            ]
        )
        for dtype, count in (("float32", 20_011), ("complex128", 3001), ("uint8", 7), ("int16", 0))
        for place in (("in", "out")[i % 2],)
    ]
    for case in wanted:
        if case.place == "new":
            case = case._replace(place="out")
        check(proxy, case)
    return len(wanted)


BLOCKED = ("reduce_scatter", "all_gather", "gather", "scatter", "all_to_all")


def large(proxy: OnDevice) -> int:
    """Calls of a few MiB, which go in slices of less than a slot."""
    wanted = [
        Case(collective, None, "float32", count=1_300_003, place=place, root=0, v=v)
        for collective, v in (
            ("all_reduce", False),
            ("broadcast", False),
            *((c, v) for c in BLOCKED for v in (False, True)),
        )
        for place in ("in", "out")
    ]
    for case in wanted:
        check(proxy, case)
    return len(wanted)


def pinned(count: int) -> np.ndarray[Any, Any]:
    """Memory of the host that the GPU copies to by itself: for the emulated runtime it all is."""
    if EMULATED:
        return np.empty(count, np.float32)
    return np.frombuffer(cupy.cuda.alloc_pinned_memory(4 * count), np.float32, count)


def order(proxy: OnDevice) -> None:
    """Calls are put on the stream, which orders them; the host waits for nothing."""
    comm, n = proxy.comm, proxy.size
    count = 5000
    x = device_array(proxy, count)
    host, got = np.full(count, comm.rank + 1, np.float32), pinned(count)
    with proxy.stream:
        proxy.copy(x.data.ptr, host.ctypes.data, host.nbytes, 1)
        if comm.rank == 0:
            comm.all_reduce(x)
            assert comm._device is not None
            assert not comm._device.idle()  # the others have not called
            WORLD.Barrier()
        else:
            WORLD.Barrier()  # rank 0's call has returned
            comm.all_reduce(x)
        for _ in range(3):
            comm.all_reduce(x, op="avg")
        comm.all_reduce(x, op="max")
        cupy.cuda.runtime.memcpyAsync(got.ctypes.data, x.data.ptr, got.nbytes, 2, proxy.stream.ptr)
    proxy.stream.synchronize()
    assert (got == n * (n + 1) / 2).all(), got
    # What the stream does before a call is waited for: here the call of another communicator, which
    # cannot end before this call was put on the stream.
    twin = comm.duplicate()
    late = device_array(proxy, count, 1 << 20)
    proxy.copy(late.data.ptr, host.ctypes.data, host.nbytes, 1)
    hundreds = device_array(proxy, count, 2 << 20)
    host[:] = 100
    proxy.copy(hundreds.data.ptr, host.ctypes.data, host.nbytes, 1)
    with cupy.cuda.Stream(non_blocking=True):
        twin.all_reduce(x, op="min")  # sets up
        twin.synchronize()
    ahead = cupy.cuda.Stream(non_blocking=True)
    if comm.rank == 0:
        with ahead:
            twin.all_reduce(late)
            comm.all_reduce(late, op="max")
        WORLD.Barrier()
    else:
        with proxy.stream:
            comm.all_reduce(hundreds, op="max")
        WORLD.Barrier()
        time.sleep(0.2)  # time for a call that does not wait to go wrong
        with ahead:
            twin.all_reduce(late)
    comm.synchronize()
    twin.synchronize()
    if comm.rank == 0:
        proxy.copy(got.ctypes.data, late.data.ptr, got.nbytes, 2)
        assert (got == 100).all(), got
    twin.close()
    # Between two streams, and between calls on host arrays, queued ones too.
    other = cupy.cuda.Stream(non_blocking=True)
    mine = np.ones(10, np.float32)
    for i in range(8):
        with (proxy.stream, other)[i % 2]:
            comm.all_reduce(x, op="avg")
        if i % 3 == 0:
            work = comm.all_reduce(mine, async_op=True)
        if i % 3 == 1:
            assert work.wait(30)[0] == n
            mine[:] = 1
            comm.broadcast(mine)
    with other:
        work = comm.all_reduce(x, op="max", async_op=True)
    assert work.wait(30) is x
    assert work.done()
    comm.barrier(stream=other)
    comm.synchronize()
    proxy.copy(got.ctypes.data, x.data.ptr, got.nbytes, 2)
    assert (got == n * (n + 1) / 2).all(), got


def rails(proxy: OnDevice) -> int:
    """Calls that go along rails where nodes are alike, by what serves them and by compositions."""
    engine: Any = proxy.comm._device
    alike = len({NODES.count(node) for node in NODES}) == 1
    assert (engine.rails is not None) == alike, engine.why_no_rails
    wanted = [
        Case(collective, algorithm, dtype, op, count, root=proxy.size - 1, place=place, seed=count)
        for collective in ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
        for algorithm, dtype, op, count, place in (
            (None, "float32", "avg" if "reduce" in collective else "sum", 100_002, "out"),
            ("hierarchical(direct_two_shot, direct_two_shot)", "int16", "sum", 5001, "in"),
            ("hierarchical(direct_two_shot, ring)", "bfloat16", "sum", 1, "out"),
        )
        if not why_unsupported(algorithm or "hierarchical", collective, proxy.size, node=NODES)
    ]
    for case in wanted:
        check(proxy, case)
    return len(wanted)


# What an MPI is told by that copies as programs do, and cannot be given arrays by itself.
UNPINNED = "MPI copies by way of memory that is not pinned"


def sizes(proxy: OnDevice) -> int:
    """Calls by the one way and by the other in turns, as MPI says that it is CUDA-aware: those of
    less than STRAIGHT_FROM bytes are staged, and all_to_all that is in place on one rank alone.
    """
    comm, n = proxy.comm, proxy.size
    engine: Any = comm._device
    if UNPINNED in engine.straight.why_not:
        return 0  # the test says so
    assert not engine.straight.why_not, engine.straight
    core, done = engine.core, 0
    for turn, count in enumerate((100, 9000, 8191, 8192, 1, 400_000)):
        for collective in ("all_reduce", "broadcast", "all_gather"):
            before = core.straight_calls
            total = count // n * n if collective == "all_gather" else count
            check(proxy, Case(collective, None, count=total, place="in", root=n - 1, seed=turn))
            assert core.straight_calls - before == (4 * total >= STRAIGHT_FROM), (collective, count)
            done += 1
    rows = 20_000
    for in_place in (set(), {0}, set(range(n)), {n - 1}):
        x = device_array(proxy, n * rows)
        out = x if comm.rank in in_place else device_array(proxy, n * rows, 8 << 20)
        values = np.repeat(100 * comm.rank + np.arange(n), rows).astype(np.float32)
        got = np.empty_like(values)
        before = core.straight_calls
        comm.barrier()
        with proxy.stream:
            proxy.copy(x.data.ptr, values.ctypes.data, values.nbytes, 1)
            comm.all_to_all(x, out=out)
        comm.synchronize()
        proxy.copy(got.ctypes.data, out.data.ptr, got.nbytes, 2)
        assert (got == np.repeat(100 * np.arange(n) + comm.rank, rows)).all()
        assert core.straight_calls - before == (not in_place), in_place
        done += 1
    return done


def one_rail(proxy: OnDevice) -> int:
    """What one rail cannot do no rank does: all say why."""
    engine: Any = proxy.comm._device
    if UNPINNED in engine.straight.why_not:
        return 0
    assert engine.straight.why_not == "rank 1: made up", engine.straight
    assert "(rank 1: made up)" in proxy.comm.explain("all_reduce", nbytes=1 << 20)
    return rails(proxy)


def one_rail_fails() -> None:
    """MPI takes pointers between all ranks, and along one of two rails it does not."""
    real = straight._try

    def trying(bootstrap: Any, staging: Any, forced: bool) -> Any:
        tried = real(bootstrap, staging, forced)
        rail_1 = bootstrap.size == 2 and WORLD.rank in (1, 3)
        return straight._Tried("made up") if rail_1 and bootstrap.rank == 0 else tried

    straight._try = trying


def says_cuda_aware() -> None:
    real = _core.loaded_mpi
    _core.loaded_mpi = lambda: {**real(), "cuda": "yes"}


def raises(kind: type[Exception], words: str, call: Any) -> str:
    try:
        call()
    except kind as error:
        assert words in str(error), error
        return str(error)
    raise AssertionError(f"no {kind.__name__} with {words!r}")


def errors(proxy: OnDevice) -> None:
    """What cannot be done is said, and harms nothing; ranks in different calls raise everywhere."""
    comm = proxy.comm
    x = device_array(proxy, 5000)
    with proxy.stream:
        proxy.stream.begin_capture()
        raises(cc.UnsupportedError, "cannot be captured", lambda: comm.all_reduce(x))
        proxy.stream.end_capture()
        raises(cc.UnsupportedError, "band", lambda: comm.all_reduce(x, op="band"))
        raises(cc.UnsupportedError, "several nodes", lambda: comm.empty(8, device="cuda"))
        raises(cc.UnsupportedError, "", lambda: comm.all_reduce(x, algorithm="bruck"))
        raises(cc.UnsupportedError, "works within a node", lambda: comm.send(x, 0))
        comm.all_reduce(x)
        comm.synchronize()
        before = np.full(5000, 7, np.float32)
        proxy.copy(x.data.ptr, before.ctypes.data, before.nbytes, 1)
        # More than a slice: no part of it is written before the ranks find that they differ.
        comm.all_reduce(x[: 4990 + comm.rank])
        text = raises(cc.MismatchError, "count=4991", comm.synchronize)
        assert "on arrays on the GPU" in text, text
        raises(cc.MismatchError, "count=4990", lambda: comm.all_reduce(x))
        after = np.empty_like(before)
        proxy.copy(after.ctypes.data, x.data.ptr, after.nbytes, 2)
        assert (after == before).all()
    # Calls on host arrays go on, and so does the GPU in another communicator.
    assert comm.all_reduce(np.ones(3))[0] == comm.size
    twin = OnDevice(comm.duplicate(), proxy.device)
    check(twin, Case("all_reduce", None, count=3000, place="in"))
    # One rank is on the host, the others are on their GPUs.
    y = device_array(twin, 100)
    mixed: Any = np.ones(100, np.float32) if comm.rank == 0 else y

    def call() -> None:
        with twin.stream:
            twin.comm.all_reduce(mixed)
            twin.comm.synchronize()

    raises(cc.MismatchError, "on arrays on the GPU", call)
    twin.comm.close()


def die_behind(proxy: OnDevice) -> None:
    """Ends the process once all that is on the stream has been done."""
    proxy.stream.synchronize()
    os.kill(os.getpid(), signal.SIGKILL)


def death(proxy: OnDevice, within: bool = False) -> None:
    """The last rank is killed: the others raise PeerDiedError or what its node tells; their GPUs
    work on.

    within  in a call along rails, when all have agreed on it and its node has combined its share
    """
    comm = proxy.comm
    x = device_array(proxy, 20_000)
    host = np.ones(20_000, np.float32)
    if comm.rank == comm.size - 1:
        if within:
            engine: Any = comm._device
            engine.rails._put_on_rail = lambda *_: die_behind(proxy)
            with proxy.stream:
                comm.all_reduce(x, algorithm="hierarchical")
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    words = f"rank {comm.rank}: nothing raised\n"
    try:
        with proxy.stream:
            comm.all_reduce(x, algorithm="hierarchical" if within else None)
        comm.synchronize()
    except cc.CollectiveError as error:
        seconds = time.monotonic() - began
        words = f"rank {comm.rank}: {type(error).__name__} after {seconds:.1f} s: {error}\n"
    proxy.copy(proxy.memory.ptr, host.ctypes.data, host.nbytes, 1)  # behind the call's kernel
    try:
        comm.all_reduce(x)
    except cc.CollectiveError as error:
        words += f"rank {comm.rank}: again {type(error).__name__}\n"
    os.write(1, words.encode())
    time.sleep(2)  # the launcher may end all others with the first that ends
    os._exit(1)


def main() -> None:
    os.environ["COLLECTIVES_NODE"] = f"node{NODES[WORLD.rank]}"
    what = sys.argv[1]
    dies = what.startswith("death")
    if dies:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher's, when it sees the death
    if what in ("sizes", "one rail"):
        says_cuda_aware()
    if what == "one rail":
        one_rail_fails()
    comm = cc.init(timeout=60 if dies else 30)
    assert comm.nodes == NODES, comm.nodes
    proxy = OnDevice(comm, comm.rank % _core.device_count()[0])
    check(proxy, Case("all_reduce", None, count=100, place="out"))
    parts: dict[str, Any] = {
        "cases": every_case,
        "large": large,
        "order": order,
        "errors": errors,
        "death": death,
        "death within": partial(death, within=True),
        "rails": rails,
        "one rail": one_rail,
        "sizes": sizes,
    }
    done = parts[what](proxy)
    engine: Any = comm._device
    straight = engine.core.straight_calls
    assert (straight > 0) == (not engine.straight.why_not), engine.straight
    comm.close()
    os.write(1, f"rank {comm.rank}: all right, {done} cases, {straight} straight\n".encode())


main()
