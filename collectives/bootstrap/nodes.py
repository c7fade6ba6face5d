"""Which ranks share memory, and which count as one node."""

from __future__ import annotations

import os

from ..config import Settings


def host_parts() -> dict[str, str]:
    """What is equal on two ranks that may share memory: the boot of the kernel, and the process and
    IPC namespaces. Host names do not count: two hosts may have the same one.
    """
    parts = {}
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            parts["boot"] = file.read().strip()
    except OSError:
        parts["boot"] = os.uname().nodename  # not Linux, or hidden: the host name has to decide
    for kind in ("pid", "ipc"):
        try:
            parts[f"{kind.upper()} namespace"] = os.readlink(f"/proc/self/ns/{kind}")
        except OSError:
            parts[f"{kind.upper()} namespace"] = ""
    return parts


def host_key() -> str:
    """Equal on two ranks if they may share memory: a digest of `host_parts`."""
    from hashlib import sha256  # here: it loads OpenSSL

    return sha256("|".join(host_parts().values()).encode()).hexdigest()[:16]


def why_apart(mine: dict[str, str], theirs: dict[str, str]) -> str:
    """What keeps two ranks of one machine from sharing memory, in words; "" if nothing does, or if
    they are on different machines.
    """
    if mine["boot"] != theirs["boot"]:
        return ""
    different = [name for name in mine if mine[name] != theirs.get(name)]
    if not different:
        return ""
    return f"on one machine, but with different {' and '.join(different)} (containers?)"


def node_key(settings: Settings | None = None) -> str:
    """Equal on two ranks if they are to be treated as ranks of one node: `host_key`, and
    COLLECTIVES_NODE if set.
    """
    node = (settings or Settings()).node
    return f"{host_key()}/{node}" if node else host_key()
