"""Set-up: who shares memory with whom, what carries data, and the core's end of it all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from weakref import WeakValueDictionary

from . import _core, hardware
from .bootstrap import Bootstrap, Mpi, ask, host_key, host_parts, node_key, why_apart
from .bootstrap.groups import name_ranks
from .bootstrap.mailboxes import Mailboxes
from .config import Settings
from .errors import BootstrapError, CollectiveError, ConfigError, UnsupportedError
from .reach import try_sharing
from .tuning import MPI_DEPTH, MPI_SLOT, host_tuning, region_sizes, tables
from .tuning.work import GPU

if TYPE_CHECKING:
    from ._core import Communicator as Core
    from ._core import GpuSlots, HostTuning, MpiTransport, Region
    from .tuning.tables import Table

# Regions of thread ranks, by the job of their bootstrap: the creator puts it here, the others find
# it. It is here as long as the creator sets its communicator up.
_thread_regions: WeakValueDictionary[str, Region] = WeakValueDictionary()


class Connection(NamedTuple):
    """What a communicator is made of.

    core        the core's end
    bootstrap   the way to meet from now on
    nodes       node of every rank
    tuning      sizes for the host engine
    fallback    why MPI is used between ranks of one machine, "" if it is not
    transports  what carries data between any of the ranks: equal on all of them
    hardware    what measured times depend on, as all ranks tell it
    table       what was measured on such ranks, None if nothing was
    gpu_table   the same of arrays on their GPUs, whichever those were
    """

    core: Core
    bootstrap: Bootstrap
    nodes: list[int]
    tuning: HostTuning
    fallback: str
    transports: str
    hardware: dict[str, str]
    table: Table | None
    gpu_table: Table | None


class _Reach(NamedTuple):
    """Which ranks could share memory, before they have tried.

    group     of each rank, by number
    together  the ranks of this one's group
    """

    group: list[int]
    together: list[int]

    @property
    def sizes(self) -> list[int]:
        """Ranks of each group."""
        return [self.group.count(number) for number in dict.fromkeys(self.group)]


def connect(
    bootstrap: Bootstrap, settings: Settings, nodes: Sequence[int] | None = None
) -> Connection:
    """Joins the ranks of a bootstrap. Collective over it.

    nodes  node of each rank; found out unless given

    Raises BootstrapError where ranks cannot share memory and nothing else carries data,
    UnsupportedError for a forced transport that these ranks do not have.
    """
    rank, size = bootstrap.rank, bootstrap.size
    threads, has_mpi = bootstrap.kind == "threads", bootstrap.kind == "mpi"
    infos = _introduce(bootstrap, settings)
    transport = _agreed_transport(bootstrap, infos)
    fallback = ""
    if nodes is not None:
        nodes = list(nodes)
    elif has_mpi and transport != "mpi":
        nodes, words = try_sharing(bootstrap, [i["node"] for i in infos])
        if words:
            fallback = f"ranks of one host count as nodes of their own, joined by MPI: {words}"
    else:
        order = {key: i for i, key in enumerate(dict.fromkeys(i["node"] for i in infos))}
        nodes = [order[i["node"]] for i in infos]
    if len(nodes) != size:
        raise ValueError(f"nodes= names {len(nodes)} ranks, there are {size}")
    reach = _reach(bootstrap, transport, infos, nodes)
    groups, together = reach.sizes, reach.together
    cpus = {cpu for r in together for cpu in infos[r]["cpus"]}
    tuning = host_tuning(len(together), len(cpus), messages=len(groups) > 1, nodes=nodes)

    region, failure = _share_region(bootstrap, together)
    pull = not threads and all(
        _core.can_read_process(infos[r]["pid"], *infos[r]["probe"]) for r in together
    )
    alike = tables.hardware_of(infos)
    layouts, refused = _measured_layouts(settings, alike) if rank == 0 else ({}, "")
    verdicts = ask(bootstrap, [failure, pull, layouts, refused])
    words = "; ".join(f"rank {r}: {v[0]}" for r, v in enumerate(verdicts) if v[0])
    layouts, refused = verdicts[0][2:]
    if refused:
        raise ConfigError(refused)
    apart = _apart(rank, infos)
    if apart and has_mpi and not fallback:
        fallback = f"MPI is used between ranks {apart}"
    if words:
        if not has_mpi or transport == "shm":
            raise BootstrapError(f"the ranks cannot share memory: {words}", rank=rank)
        reach = _Reach(list(range(size)), [rank])
        region, together = None, reach.together
        fallback = f"MPI is used within nodes too, because the ranks cannot share memory: {words}"
    mpi = None
    if has_mpi and len(together) < size:
        mpi = mpi_transport(cast(Mpi, bootstrap))
    elif len(groups) > 1 and not has_mpi:
        others = name_ranks(set(range(size)) - set(together))
        where = (
            f"ranks {apart}; let the containers share them (docker run --pid=host --ipc=host)"
            if apart
            else f"{others} {'is' if others.startswith('rank ') else 'are'} on other hosts than "
            f"rank {rank}"
        )
        raise UnsupportedError(
            f"{where}, and the ranks met through {bootstrap.kind}: between hosts data go through "
            "MPI, so start the job with mpirun"
        )
    # Programs are cut to the smallest slot that any rank has, so that all cut alike.
    slots = [region_sizes(n).fifo_slot for n in reach.sizes if n > 1]
    if mpi is not None:
        slots.append(MPI_SLOT)
    shares = together if region is not None else []
    core = _core.Communicator(
        name=bootstrap.job,
        rank=rank,
        nranks=size,
        node=nodes,
        local_of=[shares.index(r) if r in shares else -1 for r in range(size)],
        group=reach.group,
        region=region,
        mpi=mpi,
        threads=threads,
        tuning=tuning,
        can_pull=all(v[1] for v in verdicts),
        slot_bytes=min(slots, default=1 << 20),
        timeout=bootstrap.timeout,
    )
    if isinstance(bootstrap, Mailboxes):
        # From the memory of another communicator into that of this one.
        assert core.council is not None
        bootstrap = bootstrap.moved_to(core.council)
    bootstrap.barrier()
    core.watch_peers()
    if region is not None and not threads:
        region.close_handle()
    transports = core.transports
    if mpi is not None:  # a rank that is alone on its node has no use for shared memory itself
        transports = "shm+mpi" if max(reach.sizes) > 1 else "mpi"

    def measured(carrier: str) -> Table | None:
        key = tables.layout_key(carrier, nodes)
        return tables.parse(layouts[key], layouts["path"]) if key in layouts else None

    return Connection(
        core,
        bootstrap,
        nodes,
        tuning,
        fallback,
        transports,
        alike,
        measured(transports),
        measured(GPU),
    )


def _measured_layouts(settings: Settings, alike: dict[str, str]) -> tuple[dict[str, Any], str]:
    """The layouts in the table's file, and its path; or why the file is refused."""
    if settings.table == "off":
        return {}, ""
    try:
        path, found = tables.find(alike, settings.table)
    except ConfigError as error:
        return {}, str(error)
    return ({**found, "path": path} if found else {}), ""


def _introduce(bootstrap: Bootstrap, settings: Settings) -> list[dict[str, Any]]:
    """What all ranks say of themselves."""
    mine = {
        "host": host_key(),
        "parts": host_parts(),
        "node": node_key(settings),
        **hardware.summary(),
        "mpi": str(_core.loaded_mpi()["version"]) if bootstrap.kind == "mpi" else "",
        "transport": settings.transport,
        "pid": os.getpid(),
        "probe": _core.pull_probe(),
        "cpus": sorted(os.sched_getaffinity(0)),
    }
    return ask(bootstrap, mine)


def _apart(rank: int, infos: list[dict[str, Any]]) -> str:
    """Which ranks are on this one's machine and cannot share its memory, and why."""
    why = {r: why_apart(infos[rank]["parts"], info["parts"]) for r, info in enumerate(infos)}
    first = next((words for words in why.values() if words), "")
    return first and f"{rank} and {', '.join(str(r) for r in why if why[r])}, {first}"


def _agreed_transport(bootstrap: Bootstrap, infos: list[dict[str, Any]]) -> str:
    transports = {i["transport"] for i in infos}
    if len(transports) > 1:
        raise BootstrapError(
            f"COLLECTIVES_TRANSPORT differs between ranks: {sorted(transports)}",
            rank=bootstrap.rank,
        )
    transport = str(transports.pop())
    if transport == "mpi" and bootstrap.kind != "mpi":
        raise UnsupportedError(
            f"COLLECTIVES_TRANSPORT=mpi, but the ranks met through {bootstrap.kind}, not MPI: "
            "start them with mpirun"
        )
    if transport == "threads" and bootstrap.kind != "threads":
        raise UnsupportedError(
            "COLLECTIVES_TRANSPORT=threads, but the ranks are processes: use run_threads"
        )
    return transport


def _reach(
    bootstrap: Bootstrap, transport: str, infos: list[dict[str, Any]], nodes: list[int]
) -> _Reach:
    """The ranks of a host share a segment. With MPI, nodes that COLLECTIVES_NODE sets apart really
    use it.
    """
    keys: list[Any] = nodes if bootstrap.kind == "mpi" else [i["host"] for i in infos]
    if transport == "mpi":
        keys = list(range(bootstrap.size))
    together = [r for r in range(bootstrap.size) if keys[r] == keys[bootstrap.rank]]
    numbers = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    return _Reach([numbers[key] for key in keys], together)


def _share_region(bootstrap: Bootstrap, together: list[int]) -> tuple[Region | None, str]:
    """The segment of the ranks in `together`, or why it cannot be shared. Collective."""
    threads = bootstrap.kind == "threads"
    sizes = region_sizes(len(together))._asdict()
    leader = bootstrap.rank == together[0]
    region, failure, handle = None, "", ""
    if leader and len(together) > 1:
        try:
            region = _core.make_region(not threads, len(together), **sizes)
            if threads:
                _thread_regions[bootstrap.job] = region
            else:
                handle = region.handle()
        except CollectiveError as error:
            failure = str(error)
    handles = bootstrap.all_gather(handle.encode())
    if not leader and threads:
        region = _thread_regions.get(bootstrap.job)
    elif not leader and handles[together[0]]:  # else the leader says what failed
        try:
            handle = handles[together[0]].decode()
            region = _core.open_region(handle, len(together), **sizes)
        except CollectiveError as error:
            failure = str(error)
    return region, failure


def mpi_transport(
    bootstrap: Mpi, slot_bytes: int = MPI_SLOT, slots: GpuSlots | None = None
) -> MpiTransport:
    """What carries messages between these ranks; `slots`: memory of a GPU for them, which arrays
    are in then too. Collective over the bootstrap.
    """
    from mpi4py import MPI

    return _core.MpiTransport(
        MPI._handleof(bootstrap.comm),
        slot_bytes=slot_bytes,
        depth=MPI_DEPTH,
        timeout=bootstrap.timeout,
        slots=slots,
    )
