"""Which ranks share memory, and which count as one node."""

from __future__ import annotations

import os

from ..config import Settings


def host_parts() -> dict[str, str]:
    """What must be equal on two ranks that share memory: the kernel, namespaces, /dev/shm."""
    parts = {"host name": os.uname().nodename}
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            parts["boot"] = file.read().strip()
    except OSError:
        parts["boot"] = ""  # not Linux: the host name decides
    for kind in ("pid", "ipc"):
        try:
            parts[f"{kind.upper()} namespace"] = os.readlink(f"/proc/self/ns/{kind}")
        except OSError:
            parts[f"{kind.upper()} namespace"] = ""
    try:
        parts["/dev/shm"] = str(os.stat("/dev/shm").st_dev)
    except OSError:
        parts["/dev/shm"] = ""
    return parts


def host_key() -> str:
    """Equal on two ranks if they can share memory: a digest of `host_parts`."""
    from hashlib import sha256  # here: it loads OpenSSL

    parts = list(host_parts().values())
    return f"{parts[0]}-{sha256('|'.join(parts).encode()).hexdigest()[:16]}"


def why_apart(mine: dict[str, str], theirs: dict[str, str]) -> str:
    """What keeps two ranks of one machine from sharing memory, in words; "" if nothing does, or if
    they are on different machines.
    """
    if not mine["boot"] or mine["boot"] != theirs["boot"]:
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
