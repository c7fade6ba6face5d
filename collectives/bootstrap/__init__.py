"""How the ranks of a job find each other, and exchange the few bytes that everything else is built
from.

    Solo      one rank, alone
    Threads   ranks are threads of one process
    Mpi       a communicator of mpi4py (mpirun, mpiexec, srun --mpi=...)
    Tcp       `python -m collectives run`, torchrun, or RANK, WORLD_SIZE, MASTER_ADDR and
              MASTER_PORT set by hand

`detect()` picks one. Each is a `Bootstrap`: all_gather, broadcast and barrier of bytes within a
deadline, and errors that say which ranks came and which are missing. This is the control plane,
made for set-up: a Tcp all_gather of d bytes sends n * n * d bytes through one process, so data
belong elsewhere.

The rendezvous of Tcp
---------------------
One process runs a `Server` that relays between all ranks: the launcher where there is one, else
rank 0.

- torchrun's agent listens at MASTER_PORT already. Its store (torch's TCPStore) is then used once,
  to publish a port of our own and a fresh secret; on one host, that port is bound to loopback only.
  Any other torch store works in the same way (`through_store`). torch is imported for this only
  where torchrun has started the process.
- A connection proves that it knows the secret (HMAC-SHA256 over fresh nonces of both sides) before
  anything that it sends is parsed, and the server proves the same to it. Every later frame carries
  a MAC with a key of that connection and a count. Frames are limited in length. Contents are not
  encrypted; they are no secrets.
- The secret is COLLECTIVES_SECRET, or is in COLLECTIVES_SECRET_FILE; launchers make it. Without
  one, ranks meet on loopback only; on any other address that is an error, because everybody who
  reaches the port could join the job.
- Strangers are dropped (10 s, 72 bytes, a limited number at a time) and the job goes on.
- A rank that disappears fails the pending and all later calls of all others, with an error that
  names it.

Node identity
-------------
Two ranks may share memory if `node_key()` is equal: boot id, and pid and ipc namespaces, since
containers of one host cannot reach each other's processes. Where MPI could carry the data instead,
it is also tried (reach.py). COLLECTIVES_NODE is added to that, so it can split a host into nodes,
to try several on one machine, and can never join two hosts by mistake.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .local import Solo, Threads
from .mpi import Mpi
from .nodes import host_key, host_parts, node_key, why_apart
from .protocol import Bootstrap, ask
from .sources import claimed, detect

if TYPE_CHECKING:
    from .addresses import is_loopback, listen, read_secret
    from .client import Tcp
    from .server import Server
    from .store import Store, through_store

# Sockets, selectors and HMACs take 10 ms to import, which only ranks that meet over TCP pay.
_ON_DEMAND = {
    "Server": "server",
    "Store": "store",
    "Tcp": "client",
    "is_loopback": "addresses",
    "listen": "addresses",
    "read_secret": "addresses",
    "through_store": "store",
}


def __getattr__(name: str) -> Any:
    if name not in _ON_DEMAND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_ON_DEMAND[name]}", __name__), name)
    return value


__all__ = [
    "Bootstrap",
    "Mpi",
    "Server",
    "Solo",
    "Store",
    "Tcp",
    "Threads",
    "ask",
    "claimed",
    "detect",
    "host_key",
    "host_parts",
    "is_loopback",
    "listen",
    "node_key",
    "read_secret",
    "through_store",
    "why_apart",
]
