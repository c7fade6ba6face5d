"""Ranks that share a key-value store use it once, to agree on a port and a secret."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Mapping
from typing import Any, Protocol

from ..config import DEFAULT_TIMEOUT
from ..errors import BootstrapError
from .addresses import is_loopback, listen
from .client import Tcp
from .groups import name_ranks
from .hosting import Hosted
from .nodes import host_key
from .wire import GRACE


class Store(Protocol):
    """What is needed of a key-value store; that of torch.distributed is one."""

    def set(self, key: str, value: Any) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


def through_store(
    store: Store,
    rank: int,
    size: int,
    *,
    timeout: float = DEFAULT_TIMEOUT,
    name: str = "collectives",
) -> Tcp:
    """Joins the ranks that share a key-value store, such as a torch TCPStore, FileStore or
    HashStore.

    Rank 0 listens on a free port, and publishes it with a fresh secret: who reads the store can
    join. If all ranks are on one host the port is on loopback, else on COLLECTIVES_ADDR,
    MASTER_ADDR or the address of the host's name.

    `name` must be used once in the lifetime of the store. Raises BootstrapError that names the
    ranks that are missing.
    """
    deadline = time.monotonic() + timeout
    store.set(f"{name}/host/{rank}", host_key())
    where = f"{name}/rendezvous"
    if rank == 0:
        try:
            keys = {r: f"{name}/host/{r}" for r in range(size)}
            missing = _wait_for_keys(store, keys, deadline)
            if missing:
                came = set(range(size)) - set(missing)
                raise BootstrapError(
                    f"not all ranks came within {timeout:g} s: {name_ranks(came)} of {size} came, "
                    f"{name_ranks(missing)} {'is' if len(missing) == 1 else 'are'} missing",
                    rank=0,
                    peer=missing[0],
                )
            one_host = len({bytes(store.get(key)) for key in keys.values()}) == 1
            host = "127.0.0.1" if one_host else _public_address()
            secret = secrets.token_bytes(32)
            hosted = Hosted.open(host, 0, size=size, secret=secret, job="")
        except BootstrapError as error:
            store.set(where, json.dumps({"error": str(error), "peer": error.peer}))
            raise
        address = (host, hosted.server.address[1])
        store.set(where, json.dumps({"host": host, "port": address[1], "secret": secret.hex()}))
    else:
        hosted = None
        # Rank 0 speaks at its own deadline of who is missing, so it gets a little longer.
        if _wait_for_keys(store, {0: where}, deadline + GRACE):
            raise BootstrapError(
                f"rank {rank} heard nothing from rank 0 within {timeout:g} s", rank=rank, peer=0
            )
        said = json.loads(bytes(store.get(where)))
        if "error" in said:
            raise BootstrapError(said["error"], rank=rank, peer=said["peer"])
        address, secret = (said["host"], int(said["port"])), bytes.fromhex(said["secret"])
    left = max(1.0, deadline - time.monotonic())
    met = Tcp(address, rank=rank, size=size, secret=secret, timeout=left, hosted=hosted)
    met.timeout = timeout
    return met


def _wait_for_keys(store: Store, keys: Mapping[int, str], deadline: float) -> list[int]:
    """The ranks whose key is still not there at the deadline."""
    missing = dict(keys)
    pause = 0.002
    while True:
        missing = {rank: key for rank, key in missing.items() if not store.check([key])}
        if not missing or time.monotonic() >= deadline:
            return list(missing)
        time.sleep(pause)
        pause = min(0.1, pause * 1.5)


def _public_address() -> str:
    """An address of this host at which other hosts reach it."""
    named = os.environ.get("COLLECTIVES_ADDR")
    if named:
        return named
    for name in (os.environ.get("MASTER_ADDR"), socket.getfqdn(), socket.gethostname()):
        if not name or is_loopback(name):
            continue
        try:
            listen(name).close()
        except BootstrapError:
            continue
        return name
    raise BootstrapError(
        "ranks are on several hosts, and rank 0 finds no address of its own that others reach; set "
        "COLLECTIVES_ADDR"
    )
