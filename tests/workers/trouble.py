"""Ranks in an environment that is in their way, or that are disturbed; they write what they see.

    trouble.py SCENARIO [ARGUMENT]

forbid NAME     the system call is refused (seccomp), as in a container with a strict profile
limit NAME      a resource limit (RLIMIT_NAME) is too low for a shared segment
plain [CORES]   nothing, but for few cores: a few calls of every size
fork            children that are forked after init use the communicator, close it, exit, crash
interrupt HOW   Ctrl-C while rank 0 waits
orphan          rank 1 dies, and a child of it lives on
alarms HOW      a handler runs again and again while rank 0 waits, and raises nothing
threads         two threads of each rank use one communicator at once
unfinished      ranks exit while an asynchronous call is under way, which completes
abandoned       rank 0 exits while an asynchronous call waits for a rank that never calls
daemon          ranks exit while daemon threads are in calls
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import multiprocessing
import os
import platform
import resource
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import collectives as cc

CALLS = {  # numbers of system calls
    "x86_64": {"memfd_create": 319, "pidfd_open": 434, "process_vm_readv": 310},
    "aarch64": {"memfd_create": 279, "pidfd_open": 434, "process_vm_readv": 270},
}


def tell(text: str) -> None:
    os.write(1, f"{text}\n".encode())  # one line at once, so that ranks do not mix theirs


def ones(count: int = 12) -> Any:
    return np.ones(count, np.float32)


def raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except cc.CollectiveError as error:
        return f"{type(error).__name__}: {error}"
    except KeyboardInterrupt:
        return "KeyboardInterrupt"
    return "nothing raised"


def forbid(name: str) -> None:
    """No process that descends from this one may make the call: it fails with EPERM."""
    number = CALLS[platform.machine()][name]
    load, equal, give_back = 0x20, 0x15, 0x06
    refuse, allow = 0x00050001, 0x7FFF0000  # SECCOMP_RET_ERRNO | EPERM, SECCOMP_RET_ALLOW
    program = struct.pack("HBBI", load, 0, 0, 0)  # the number of the call
    program += struct.pack("HBBI", equal, 0, 1, number)
    program += struct.pack("HBBI", give_back, 0, 0, refuse)
    program += struct.pack("HBBI", give_back, 0, 0, allow)
    code = ctypes.create_string_buffer(program)

    class Filter(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))

    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_seccomp, mode_filter = 38, 22, 2
    assert libc.prctl(no_new_privileges, 1, 0, 0, 0) == 0
    filtering = Filter(4, ctypes.addressof(code))
    assert libc.prctl(set_seccomp, mode_filter, ctypes.byref(filtering), 0, 0) == 0


def few_calls(comm: cc.Communicator) -> None:
    n = comm.size
    for count in (3, 3000, 300_000):
        assert (comm.all_reduce(ones(count)) == n).all()
        assert comm.all_gather(ones(count)).size == n * count
        assert (comm.all_reduce(ones(count), "max", algorithm="ring") == 1).all()
    x = comm.empty(70_000, "float32")
    x[:] = 1
    assert (comm.all_reduce(x) == n).all()


def start(*cores: str) -> None:
    """init() and a few calls, and what it says."""
    if cores:
        os.sched_setaffinity(0, map(int, cores))
    try:
        comm = cc.init(timeout=20)
    except cc.CollectiveError as error:
        return tell(f"{type(error).__name__}: {error}")
    few_calls(comm)
    tell(f"rank {comm.rank} of {comm.size}: right over {comm.transports} {comm.fallback}")
    comm.close()
    return None


def forbidden(name: str) -> None:
    forbid(name)
    if name != "pidfd_open":
        return start()
    comm = cc.init(timeout=20)
    few_calls(comm)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    comm.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    words = raised(lambda: comm.all_reduce(ones()))
    tell(f"{words} (after {time.monotonic() - began:.0f} s)")
    return None


def limited(name: str) -> None:
    importlib.import_module("collectives.bootstrap.hosting")  # later it would need room too
    used = {
        # The rendezvous needs one more, and then comes the segment.
        "NOFILE": len(os.listdir("/proc/self/fd")),
        "FSIZE": 1 << 16,
        "AS": (int(Path("/proc/self/statm").read_text().split()[0]) << 12) + (6 << 20),
    }[name]
    "".encode("idna")
    kind = getattr(resource, f"RLIMIT_{name}")
    resource.setrlimit(kind, (used, resource.getrlimit(kind)[1]))
    start()


# ---- fork ---------------------------------------------------------------------------------------


def child_exits(comm: cc.Communicator, how: str) -> int:
    """Forks; the child does `how` and its status is returned."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            if how == "uses":
                calls: list[Callable[[], Any]] = [
                    lambda: comm.all_reduce(ones()),
                    lambda: comm.all_reduce(ones(100_000), algorithm="ring"),
                    lambda: comm.all_reduce(ones(), async_op=True),
                    lambda: comm.send(ones(), 0),
                    comm.barrier,
                    comm.duplicate,
                    lambda: comm.empty(10),
                    comm.abort,
                ]
                wrong = [w for w in map(raised, calls) if "forked" not in w or "spawn" not in w]
                status = 0 if not wrong else 2
                if wrong:
                    tell(f"in a child: {wrong}")
            elif how == "closes":
                comm.close()
                status = 0
            elif how == "exits":
                sys.exit(0)  # with everything that Python does at its end
            elif how == "drops":
                del comm
                gc.collect()
                status = 0
            elif how == "crashes":
                os.kill(os.getpid(), signal.SIGKILL)
        except SystemExit:
            raise
        except BaseException as error:
            tell(f"in a child that {how}: {error!r}")
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def square(x: int) -> int:
    return x * x


def forks() -> None:
    comm = cc.init(timeout=20)
    few_calls(comm)
    pending = comm.all_reduce(ones(), async_op=True)  # so that there is a thread of the queue
    pending.wait()
    got = {how: child_exits(comm, how) for how in ("uses", "closes", "exits", "drops", "crashes")}
    tell(f"rank {comm.rank}: children ended with {got}")
    few_calls(comm)
    with multiprocessing.get_context("fork").Pool(2) as pool:  # as a data loader does
        work = pool.map_async(square, range(20))
        few_calls(comm)
        assert work.get(20) == [x * x for x in range(20)]
    few_calls(comm)
    comm.duplicate().barrier()
    tell(f"rank {comm.rank}: goes on")
    comm.close()


def orphan() -> None:
    """Rank 1 dies; a child that it has forked lives on, with a copy of all that was open."""
    comm = cc.init(timeout=30)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher's, once rank 1 has died
    comm.barrier()
    if comm.rank == 1:
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    words = raised(lambda: comm.duplicate())  # which goes through the rendezvous
    tell(f"rank {comm.rank}: {words} (after {time.monotonic() - began:.0f} s)")


# ---- signals ------------------------------------------------------------------------------------

WAITS: dict[str, Callable[[cc.Communicator], Any]] = {
    "small": lambda c: c.all_reduce(ones()),
    "large": lambda c: c.all_reduce(ones(1_000_000)),
    "ring": lambda c: c.all_reduce(ones(1_000_000), algorithm="ring"),
    "barrier": lambda c: c.barrier(),
    "queued": lambda c: c.all_reduce(ones(), async_op=True).wait(),
    "behind": lambda c: (c.all_reduce(ones(), async_op=True), c.all_reduce(ones(70_000)))[1],
    "recv": lambda c: c.recv(ones(1_000_000), 1),
    "send": lambda c: c.send(ones(5_000_000), 1),
    "split": lambda c: c.split(0),
}


def interrupt(how: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    comm = cc.init(timeout=60)
    side = comm.duplicate()
    few_calls(comm)
    if comm.rank == 1:
        side.barrier()  # rank 0 has left its call
        words = raised(lambda: comm.all_reduce(ones()))
        tell(f"rank 1: {words}")
        return
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    began = time.monotonic()
    words = raised(lambda: WAITS[how](comm))
    tell(f"rank 0: {words} after {time.monotonic() - began:.1f} s")
    side.barrier()
    again = raised(lambda: comm.all_reduce(ones()))
    tell(f"rank 0, again: {again}")
    os._exit(0)


def alarms(how: str) -> None:
    comm = cc.init(timeout=60)
    rung = []
    if comm.rank == 0:
        signal.signal(signal.SIGALRM, lambda number, frame: rung.append(number))
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    else:
        time.sleep(0.5)
    if how == "recv" and comm.rank == 1:
        comm.send(ones(1_000_000), 0)
    elif how == "send" and comm.rank == 1:
        comm.recv(ones(5_000_000), 0)
    else:
        WAITS[how](comm)
    signal.setitimer(signal.ITIMER_REAL, 0)
    if comm.rank == 0:
        tell(f"rank 0: {'several alarms' if len(rung) >= 3 else rung}")
    comm.close()


# ---- threads ------------------------------------------------------------------------------------


def two_threads() -> None:
    """Each call is right, or an error in words; whichever of the ranks' threads meet."""
    comm = cc.init(timeout=5)
    seen = {"right": 0, "refused": 0, "other": 0}
    lock = threading.Lock()

    def hammer(count: int) -> None:
        for _ in range(200):
            x = ones(count)
            try:
                comm.all_reduce(x)
                word = "right" if (x == comm.size).all() else "WRONG"
            except cc.MismatchError:
                word = "other"  # this thread met the other one's peer, and is told so
            except cc.CollectiveError as error:
                word = "refused" if "two threads" in str(error) else "other"
                if comm._core.broken:
                    word = "other"
            with lock:
                seen[word] = seen.get(word, 0) + 1
            if comm._core.broken:
                return

    counts = [60_000, 60_001] if comm.rank == 0 else [60_001, 60_000]
    threads = [threading.Thread(target=hammer, args=(count,)) for count in counts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tell(f"rank {comm.rank}: {'WRONG' if 'WRONG' in seen else 'never wrong'} {seen}")


# ---- the end ------------------------------------------------------------------------------------


def unfinished() -> None:
    comm = cc.init(timeout=20)
    comm.barrier()
    if comm.rank == 1:
        time.sleep(0.5)  # rank 0 is at its end by then
    kept.append(comm.all_reduce(ones(500_000), async_op=True))
    tell(f"rank {comm.rank} exits")


def abandoned() -> None:
    comm = cc.init(timeout=1.5)
    comm.barrier()
    if comm.rank == 0:
        kept.append(comm.all_reduce(ones(500_000), async_op=True))
        tell("rank 0 exits")
        return
    time.sleep(4)
    tell(f"rank 1: {raised(lambda: comm.all_reduce(ones()))}")


def daemon() -> None:
    comm = cc.init(timeout=20)
    part = comm.duplicate()
    comm.barrier()

    def forever(one: cc.Communicator) -> None:
        while True:
            one.all_reduce(ones(50_000), algorithm="ring")

    for one in (comm, part):
        threading.Thread(target=forever, args=(one,), daemon=True).start()
    time.sleep(0.5)
    tell(f"rank {comm.rank} exits")


kept: list[Any] = []
SCENARIOS: dict[str, Callable[..., None]] = {
    "forbid": forbidden,
    "limit": limited,
    "plain": start,
    "fork": forks,
    "orphan": orphan,
    "interrupt": interrupt,
    "alarms": alarms,
    "threads": two_threads,
    "unfinished": unfinished,
    "abandoned": abandoned,
    "daemon": daemon,
}

if __name__ == "__main__":
    SCENARIOS[sys.argv[1]](*sys.argv[2:])
