"""Memory, limits, processors and namespaces of this machine, as far as this process sees them."""

from __future__ import annotations

import contextlib
import os
import resource
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from .. import _core
from .findings import Finding

# Names that crashed jobs leave in /dev/shm. This package leaves none: its segments have no name.
_KNOWN = {
    "collectives": "collectives",
    "vader_segment": "Open MPI",
    "sm_segment": "Open MPI",
    "btl_": "Open MPI",
    "mpich_shar_tmp": "MPICH",
    "Intel_MPI": "Intel MPI",
    "nccl-": "NCCL",
    "torch_": "torch",
    "gloo": "Gloo",
    "psm2_shm": "PSM2",
    "ucx_shm": "UCX",
}
_SMALL_SHM = 1 << 30  # bytes; the default of containers is 64 MiB, and torch and MPI want more
_OLD = 60.0  # seconds after which a segment that nobody has open counts as left over
# The namespaces that the kernel begins with, those of the host: their numbers are fixed
# (PROC_PID_INIT_INO and PROC_IPC_INIT_INO in its linux/proc_ns.h).
_FIRST = {"pid": "pid:[4026531836]", "ipc": "ipc:[4026531839]"}
_FILES = 1024
_WANTED_FILES = 65536


class Place(NamedTuple):
    """Where the examination looks; tests give it others."""

    shm: Path = Path("/dev/shm")
    proc: Path = Path("/proc")
    sys: Path = Path("/sys")


def examine(place: Place | None = None) -> Iterator[Finding]:
    """All findings about the system."""
    place = place or Place()
    yield from shared_memory(place)
    yield from leftovers(place)
    yield from between_processes(place)
    yield from namespaces(place)
    yield from limits()
    yield from processors(place)


def shared_memory(place: Place) -> Iterator[Finding]:
    try:
        descriptor = os.memfd_create("collectives-doctor")
        os.close(descriptor)
        yield Finding("ok", "segments", "memfd_create works: ranks can share memory without names")
    except (OSError, AttributeError) as error:
        yield Finding(
            "problem",
            "segments",
            f"memfd_create fails ({error}): ranks of this host cannot share memory",
            "allow it in the seccomp profile of the container, or use Linux 3.17 or newer",
        )
    try:
        room = os.statvfs(place.shm)
    except OSError as error:
        yield Finding(
            "advice",
            "/dev/shm",
            f"{place.shm} cannot be used ({error.strerror}); this package does not need it, MPI "
            "and torch do",
            "mount a tmpfs there: mount -t tmpfs tmpfs /dev/shm",
        )
        return
    size, free = room.f_frsize * room.f_blocks, room.f_frsize * room.f_bavail
    words = f"{free >> 20} MiB of {size >> 20} MiB are free"
    if not os.access(place.shm, os.W_OK):
        yield Finding(
            "advice",
            "/dev/shm",
            f"{place.shm} is not writable; MPI and torch need it",
            "chmod 1777 /dev/shm, or mount it read-write into the container",
        )
    elif free < min(_SMALL_SHM, size // 10) or size < _SMALL_SHM:
        yield Finding(
            "advice",
            "/dev/shm",
            f"{words}: little for MPI and torch (this package's segments are not in it)",
            "start the container with --shm-size=8g, or remount: mount -o remount,size=8g /dev/shm",
        )
    else:
        yield Finding("ok", "/dev/shm", words)


def leftovers(place: Place) -> Iterator[Finding]:
    """Segments of this user that nobody has open."""
    used = _open_files(place)
    found: list[tuple[str, str, int]] = []
    with contextlib.suppress(OSError):
        for entry in sorted(place.shm.iterdir()):
            owner = next((who for name, who in _KNOWN.items() if entry.name.startswith(name)), "")
            with contextlib.suppress(OSError):
                status = entry.lstat()
                old = time.time() - max(status.st_mtime, status.st_ctime) > _OLD
                mine = status.st_uid == os.getuid() and stat.S_ISREG(status.st_mode)
                if owner and mine and old and (status.st_dev, status.st_ino) not in used:
                    found.append((str(entry), owner, status.st_size))
    if not found:
        yield Finding("ok", "leftovers", f"no segments of crashed jobs in {place.shm}")
        return
    total = sum(size for _, _, size in found)
    owners = ", ".join(sorted({owner for _, owner, _ in found}))
    names = " ".join(name for name, _, _ in found[:8]) + (" ..." if len(found) > 8 else "")
    yield Finding(
        "advice",
        "leftovers",
        f"{len(found)} segments ({total >> 20} MiB) of crashed jobs, open nowhere: {owners}",
        f"rm {names}",
    )


def _open_files(place: Place) -> set[tuple[int, int]]:
    """(device, inode) of what some process has mapped or open, as far as this user may see."""
    found: set[tuple[int, int]] = set()
    for process in place.proc.iterdir():
        if not process.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            for line in (process / "maps").read_text().splitlines():
                _, _, _, device, inode, *_ = line.split(maxsplit=5)
                major, _, minor = device.partition(":")
                found.add((os.makedev(int(major, 16), int(minor, 16)), int(inode)))
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    status = descriptor.stat()
                    found.add((status.st_dev, status.st_ino))
    return found


def between_processes(place: Place) -> Iterator[Finding]:
    """What ranks of one host do with each other, tried between two processes."""
    try:
        os.close(os.pidfd_open(os.getpid()))
        yield Finding("ok", "pidfd", "the end of a process is seen at once")
    except (OSError, AttributeError) as error:
        yield Finding(
            "problem",
            "pidfd",
            f"pidfd_open fails ({error}): a rank that died is noticed only when its parent has "
            "waited for it",
            "use Linux 5.3 or newer, or allow pidfd_open in the seccomp profile",
        )
    try:
        descriptor = os.memfd_create("collectives-doctor")
    except (OSError, AttributeError):
        return  # `shared_memory` tells of it
    address, value = _core.pull_probe()
    peer = _child(lambda: time.sleep(60))
    try:
        opened = _try(lambda: os.close(os.open(f"/proc/{peer}/fd/{descriptor}", os.O_RDWR)))
        pulled = _try(lambda: _require(_core.can_read_process(peer, address, value)))
    finally:
        os.kill(peer, 9)
        os.waitpid(peer, 0)
        os.close(descriptor)
    scope = _read(place.proc / "sys/kernel/yama/ptrace_scope")
    ptrace = f"kernel.yama.ptrace_scope is {scope}" if scope else "no Yama"
    relax = (
        "sysctl kernel.yama.ptrace_scope=0; in a container, --cap-add=SYS_PTRACE; and start all "
        "ranks as one user"
    )
    if opened:
        yield Finding("ok", "sharing", "a process can open the segments of another")
    else:
        yield Finding(
            "problem",
            "sharing",
            f"a process cannot open the segments of another through /proc ({ptrace}): ranks of "
            "this host cannot share memory",
            relax,
        )
    if pulled:
        yield Finding("ok", "reading peers", f"process_vm_readv works ({ptrace})")
    else:
        yield Finding(
            "advice",
            "reading peers",
            f"process_vm_readv is refused ({ptrace}): large broadcasts, gathers and all_to_alls "
            "take one copy more",
            relax,
        )


def _require(condition: bool) -> None:
    if not condition:
        raise OSError("it did not work")


def _child(body: Callable[[], None]) -> int:
    """A process of its own that runs `body`; _exits with 0, or 1 if that raised."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            body()
            status = 0
        finally:
            os._exit(status)
    return pid


def _try(body: Callable[[], None]) -> bool:
    """True if `body` works in a process that is neither parent nor child of the others."""
    return os.waitpid(_child(body), 0)[1] == 0


def in_container() -> bool:
    """Does this process see the marks of a container?"""
    return any(Path(f).exists() for f in ("/.dockerenv", "/run/.containerenv"))


def namespaces(place: Place) -> Iterator[Finding]:
    own, others = {}, {}
    for name in ("pid", "ipc"):
        with contextlib.suppress(OSError):
            own[name] = os.readlink(place.proc / "self/ns" / name)
            others[name] = os.readlink(place.proc / "1/ns" / name)
    apart = [name for name in own if others.get(name, own[name]) != own[name]]
    contained = in_container()
    words = ", ".join(f"{name} {link.partition(':')[2].strip('[]')}" for name, link in own.items())
    if contained and own == _FIRST:
        words = f"in a container, but in the host's pid and ipc namespaces ({words})"
        yield Finding("ok", "namespaces", words)
    elif apart or contained:
        yield Finding(
            "advice",
            "namespaces",
            f"this process is in a container ({words}): ranks in different ones share no memory, "
            "and count as different nodes",
            "one container for all ranks of a host, or --pid=host and --ipc=host for each",
        )
    else:
        yield Finding("ok", "namespaces", words)


def limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _FILES:
        able = min(hard, _WANTED_FILES) if hard >= 0 else _WANTED_FILES
        yield Finding(
            "advice",
            "open files",
            f"at most {soft}: each communicator and each symmetric array takes one or more",
            f"ulimit -n {able}"
            if able >= _FILES
            else f"raise the hard limit, which is {hard}: nofile in /etc/security/limits.conf, or "
            f"--ulimit nofile={_WANTED_FILES} where a container is started",
        )
    else:
        yield Finding("ok", "open files", f"at most {_limit(soft)}")
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if 0 <= locked < 1 << 30:
        yield Finding(
            "advice",
            "locked memory",
            f"at most {locked >> 10} KiB: MPI over InfiniBand needs more, and GPUs like it",
            "ulimit -l unlimited (memlock in /etc/security/limits.conf; --ulimit memlock=-1)",
        )
    else:
        yield Finding("ok", "locked memory", f"at most {_limit(locked)} bytes")
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if 0 <= processes < 1024:
        yield Finding(
            "advice",
            "processes",
            f"at most {processes} for this user, threads included",
            "ulimit -u 65536",
        )
    else:
        yield Finding("ok", "processes", f"at most {_limit(processes)}")


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def processors(place: Place) -> Iterator[Finding]:
    allowed, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    quota = _quota(place)
    cores = min(allowed, quota) if quota else allowed
    words = f"{allowed} of {present} processors"
    if quota and quota < allowed:
        yield Finding(
            "advice",
            "processors",
            f"{words}, but a quota of {quota:g}: a rank that used up its share stops for the rest "
            "of a period, and all wait for it",
            "give whole processors (--cpuset-cpus) instead of a quota (--cpus)",
        )
    elif allowed < present:
        yield Finding(
            "advice",
            "processors",
            f"{words}: the affinity of this process leaves the others out",
            "mpirun --bind-to none, or a cpuset that covers what the job may use",
        )
    else:
        yield Finding("ok", "processors", words)
    load = os.getloadavg()[0]
    if load > cores:
        yield Finding(
            "advice",
            "load",
            f"{load:.1f} processes want to run on {cores:g} processors: ranks wait for them too",
            "end what else runs, and start no more ranks than processors",
        )
    else:
        yield Finding("ok", "load", f"{load:.1f} on {cores:g} processors")
    shared = _chosen(_read(place.sys / "kernel/mm/transparent_hugepage/shmem_enabled"))
    if shared in ("never", "deny"):
        yield Finding(
            "advice",
            "huge pages",
            f"shared memory gets none (shmem_enabled is {shared}): calls of many MiB are slower",
            "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
        )
    elif shared:
        yield Finding("ok", "huge pages", f"for shared memory: {shared}")


def _quota(place: Place) -> float:
    """Processors that the control groups allow, of this process's and those around it the least; 0
    for no limit.
    """
    limits = []
    for line in _read(place.proc / "self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        root = place.sys / "fs/cgroup"
        if number != "0":  # of the first version, which has a hierarchy for each controller
            if "cpu" not in controllers.split(","):
                continue
            root /= controllers
        folder = root / path.lstrip("/")
        inside = folder.parts[len(root.parts) :]
        for group in [root] if ".." in inside else [folder, *folder.parents[: len(inside)]]:
            quota, period = _share(group)
            if quota.isdecimal() and period.isdecimal() and int(period):
                limits.append(int(quota) / int(period))
    return min(limits, default=0.0)


def _share(group: Path) -> tuple[str, str]:
    """Microseconds of processors that a control group has in a period, "max" or -1 for no limit."""
    quota, _, period = _read(group / "cpu.max").partition(" ")
    if quota:
        return quota, period
    return _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")


def _chosen(text: str) -> str:
    """The word in brackets: "always [madvise] never" says madvise."""
    return text.partition("[")[2].partition("]")[0]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
