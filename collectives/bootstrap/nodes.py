"""Which ranks share memory, and which count as one node."""

from __future__ import annotations

import os

from ..config import Settings


def host_key() -> str:
    """Equal on two ranks if they may share memory: the same boot of the same kernel, and the same
    process and IPC namespaces. Host names do not count: two hosts may have the same one.
    """
    from hashlib import sha256  # here: it loads OpenSSL

    parts = []
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            parts.append(file.read().strip())
    except OSError:
        parts.append(os.uname().nodename)  # not Linux, or hidden: the host name has to decide
    for path in ("/proc/self/ns/pid", "/proc/self/ns/ipc"):
        try:
            parts.append(os.readlink(path))
        except OSError:
            parts.append("")
    return sha256("|".join(parts).encode()).hexdigest()[:16]


def node_key(settings: Settings | None = None) -> str:
    """Equal on two ranks if they are to be treated as ranks of one node: `host_key`, and
    COLLECTIVES_NODE if set.
    """
    node = (settings or Settings()).node
    return f"{host_key()}/{node}" if node else host_key()
