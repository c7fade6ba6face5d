"""Several hosts on one machine, for what crosses a network: Linux namespaces, joined by virtual
Ethernet whose rate is limited.

    with VirtualHosts(2, rate="1gbit") as hosts:
        launch.run(4, "battery.py", launcher="openmpi", hosts=hosts.place([2, 2]))

Each host has a network, host name, IPC and mount namespace of its own, with its own boot id and
/dev/shm, and one port, eth0, on a switch that is a namespace too. Nothing is made outside of these,
so nothing has a name that could be taken, and all of it is gone with the processes inside: close()
kills those, and the kernel does where this process dies.

Needs root, iproute2 and util-linux; tests are skipped with the reason where that cannot be had.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

_NETWORK = "10.99.0"
_PR_SET_PDEATHSIG = 1
# Bytes that may leave at once above the rate: what a segmentation offload hands over, and more.
_BURST = {"1gbit": "256kb", "10gbit": "1mb"}

_HOST_SET_UP = """
set -e
mount --make-rprivate /
mount --bind {folder}/hosts /etc/hosts
cat /proc/sys/kernel/random/uuid > {folder}/boot_id.{name}
mount --bind {folder}/boot_id.{name} /proc/sys/kernel/random/boot_id
mount -t tmpfs -o size=2g tmpfs /dev/shm
"""

# What a launcher calls in the place of ssh: AGENT [options] HOST COMMAND...
_AGENT = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do
  case $1 in -l|-p|-o|-i|-F) shift 2 ;; *) shift ;; esac
done
case $1 in
{cases}
*) echo "no virtual host $1" >&2; exit 1 ;;
esac
shift
exec nsenter -t "$process" -n -u -i -m -- /bin/sh -c "$*"
"""


@functools.cache
def why_not() -> str:
    """Why there can be no virtual hosts here; "" if there can."""
    if os.geteuid() != 0:
        return "virtual hosts need root"
    missing = [name for name in ("ip", "tc", "nsenter", "unshare") if shutil.which(name) is None]
    if missing:
        return f"virtual hosts need {', '.join(missing)}: apt-get install iproute2 util-linux"
    try:
        VirtualHosts(2, rate="1gbit", check=False).close()
    except (OSError, RuntimeError) as error:
        return f"virtual hosts cannot be made here: {error}"
    return ""


class Placement(NamedTuple):
    """Ranks on virtual hosts; `round_robin` gives neighbouring ranks to different hosts."""

    hosts: VirtualHosts
    ranks: tuple[int, ...]
    round_robin: bool = False

    @property
    def nodes(self) -> list[int]:
        """The host of each rank."""
        left, order = list(self.ranks), []
        if not self.round_robin:
            return [host for host, count in enumerate(self.ranks) for _ in range(count)]
        while any(left):
            for host, count in enumerate(left):
                if count:
                    order.append(host)
                    left[host] -= 1
        return order

    def command(self, start: Sequence[str], launcher: str) -> list[str]:
        """`start`, what a launcher's ranks are started with here, for ranks on these hosts."""
        program, rest = start[0], list(start[1:])
        agent = str(self.hosts.agent)
        if launcher == "openmpi":
            # As many slots as ranks. Quiet waits yield: each host believes that it has all cores.
            names = ",".join(f"{self.hosts.name(i)}:{count}" for i, count in enumerate(self.ranks))
            by = "node" if self.round_robin else "slot"
            options = ["--host", names, "--map-by", f"{by}:NOOVERSUBSCRIBE", "--bind-to", "none"]
            options += ["--prtemca", "plm_ssh_agent", agent, "--prtemca", "prte_if_include", "eth0"]
            options += ["--pmixmca", "ptl_tcp_if_include", "lo,eth0", "--mca", "pml", "ob1"]
            options += ["--mca", "btl", "self,sm,tcp", "--mca", "btl_tcp_if_include", "eth0"]
            options += ["--mca", "mpi_yield_when_idle", "1"]
        elif launcher == "mpich":
            names = ",".join(
                f"{self.hosts.name(i)}:{1 if self.round_robin else count}"
                for i, count in enumerate(self.ranks)
            )
            options = ["-launcher", "ssh", "-launcher-exec", agent, "-iface", "eth0"]
            options += ["-hosts", names]
        else:
            raise ValueError(f"launcher {launcher!r} starts no ranks on other hosts")
        return [*self.hosts.enter(0), program, *options, *rest]


class VirtualHosts:
    """`count` hosts, at 10.99.0.1 and so on. Their names differ from those of others that are made
    at the same time, since launchers name files of theirs after hosts.

    rate   of each port, as tc writes it ("1gbit"); None: as fast as the machine copies
    check  skips the running test where there can be none
    """

    def __init__(self, count: int, rate: str | None = None, *, check: bool = True) -> None:
        if check and why_not():
            pytest.skip(why_not())
        self.count = count
        self._prefix = f"v{os.urandom(3).hex()}h"
        self._folder = tempfile.TemporaryDirectory(prefix="virtual-hosts-")
        self.folder = Path(self._folder.name)
        self.agent = self.folder / "agent"
        self._holders: list[subprocess.Popen[bytes]] = []
        self._namespaces: set[str] = set()
        try:
            self._make(count)
            if rate is not None:
                self.shape(rate)
        except BaseException:
            self.close()
            raise

    def _make(self, count: int) -> None:
        lines = [f"{_NETWORK}.{i + 1} {self.name(i)}\n" for i in range(count)]
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))
        switch = self._hold("--net")
        _run("nsenter", "-t", switch, "-n", "sh", "-ec", "ip link set lo up; ip link add br0 type "
             "bridge; ip link set br0 up")  # fmt: skip
        cases = []
        for i in range(count):
            host = self._hold("--mount", "--uts", "--ipc", "--net")
            # Made in the switch's namespace and given away: it is never in that of the machine.
            _run("nsenter", "-t", switch, "-n", "sh", "-ec", f"ip link add port{i} type veth peer "
                 f"name eth0 netns {host}; ip link set port{i} master br0 up")  # fmt: skip
            _run("nsenter", "-t", host, "-n", "sh", "-ec", f"ip addr add {_NETWORK}.{i + 1}/24 dev "
                 "eth0; ip link set lo up; ip link set eth0 up")  # fmt: skip
            _run("nsenter", "-t", host, "-u", "hostname", self.name(i))
            script = _HOST_SET_UP.format(folder=self.folder, name=self.name(i))
            _run("nsenter", "-t", host, "-m", "sh", "-c", script)
            cases.append(f"{self.name(i)}|{_NETWORK}.{i + 1}) process={host} ;;")
        self.agent.write_text(_AGENT.format(cases="\n".join(cases)))
        self.agent.chmod(0o755)

    def _hold(self, *namespaces: str) -> int:
        """A process with new namespaces that does nothing; its id."""
        before = {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "mnt")}
        holder = subprocess.Popen(
            ["unshare", *namespaces, "sleep", "infinity"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            preexec_fn=_die_with_parent,
        )
        self._holders.append(holder)
        end = time.monotonic() + 20
        while Path(f"/proc/{holder.pid}/comm").read_text().strip() != "sleep":
            if holder.poll() is not None:
                assert holder.stderr is not None
                raise RuntimeError(holder.stderr.read().decode().strip() or "unshare failed")
            if time.monotonic() > end:
                raise RuntimeError("unshare does not come to an end")
            time.sleep(0.005)
        network = os.readlink(f"/proc/{holder.pid}/ns/net")
        assert network != before["net"]
        self._namespaces.add(network)
        return holder.pid

    def name(self, host: int) -> str:
        """The host's name."""
        return f"{self._prefix}{host}"

    def enter(self, host: int) -> list[str]:
        """The words before a command that make it run on a host."""
        return ["nsenter", "-t", str(self._process(host)), "-n", "-u", "-i", "-m", "--"]

    def place(self, ranks: Sequence[int], *, round_robin: bool = False) -> Placement:
        """So many ranks on each host, for `launch.run`."""
        assert len(ranks) <= self.count
        return Placement(self, tuple(ranks), round_robin)

    def shape(self, rate: str) -> None:
        """Limits what leaves each host."""
        for i in range(self.count):
            _run("nsenter", "-t", self._process(i), "-n", "tc", "qdisc", "replace", "dev", "eth0",
                 "root", "tbf", "rate", rate, "burst", _BURST.get(rate, "256kb"), "latency",
                 "50ms")  # fmt: skip

    def cut(self, host: int) -> None:
        """Takes a host's cable out: what is sent is lost, and nobody is told."""
        switch = self._holders[0].pid
        _run("nsenter", "-t", switch, "-n", "ip", "link", "set", f"port{host}", "nomaster")

    def _process(self, host: int) -> int:
        return self._holders[1 + host].pid

    def close(self) -> None:
        """Ends all that runs on the hosts, and the hosts."""
        end = time.monotonic() + 20
        while alive := list(self._members()):
            assert time.monotonic() < end, f"processes {alive} do not end"
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for holder in self._holders:
                holder.poll()
            time.sleep(0.01)
        for holder in self._holders:
            holder.kill()
            holder.wait()
            if holder.stderr is not None:
                holder.stderr.close()
        self._folder.cleanup()

    def _members(self) -> Iterator[int]:
        """Processes in our network namespaces, whoever started them."""
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal():
                continue
            with contextlib.suppress(OSError):
                if os.readlink(entry / "ns" / "net") in self._namespaces:
                    yield int(entry.name)

    def __enter__(self) -> VirtualHosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _run(*words: object) -> None:
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True, timeout=30)
    if done.returncode != 0:
        command = " ".join(map(str, words))
        raise RuntimeError(f"{command}: {done.stderr.strip() or done.stdout.strip()}")
