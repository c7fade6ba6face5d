"""Which ranks really share memory. Host names, boot ids and namespaces say which could; here it is
tried, since containers, users and security modules may still keep processes apart.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from . import _core
from .bootstrap import Bootstrap, ask
from .errors import CollectiveError

# The smallest region there is: a page or so.
_PROBE = {"fifo_slot": 64, "fifo_depth": 1, "stage_slot": 64, "stage_depth": 1}


class Sharing(NamedTuple):
    """Ranks with equal numbers in `group` share memory, each with each.

    words  why ranks that could share memory do not, "" if all do that could
    """

    group: list[int]
    words: str


def try_sharing(bootstrap: Bootstrap, keys: Sequence[Hashable]) -> Sharing:
    """Tries it among ranks with equal keys: each opens memory that each other one has made, through
    its process, as a communicator's own memory is opened. Collective over the bootstrap.
    """
    rank, size = bootstrap.rank, bootstrap.size
    near = [r for r in range(size) if keys[r] == keys[rank] and r != rank]
    region, handle = None, ""
    failures: dict[int, str] = {}
    if near:
        try:
            region = _core.make_region(True, 1, **_PROBE)
            handle = region.handle()
        except CollectiveError as error:
            failures = dict.fromkeys(near, str(error))
    handles = [b.decode() for b in bootstrap.all_gather(handle.encode())]
    for other in near:
        if other in failures:
            continue
        try:
            if not handles[other]:
                raise CollectiveError(f"rank {other} cannot make memory that others open")
            _core.open_region(handles[other], 1, **_PROBE)
        except CollectiveError as error:
            failures[other] = str(error)
    reports = ask(bootstrap, failures)
    if region is not None:
        region.close_handle()
    return sharing_of(keys, reports)


def sharing_of(keys: Sequence[Hashable], reports: Sequence[dict[str, str]]) -> Sharing:
    """The groups that follow from what each rank could not open, by the other's number as text: a
    rank joins the first group of its key in which it reaches all, and all reach it.
    """
    groups: list[list[int]] = []

    def apart(a: int, b: int) -> bool:
        return str(b) in reports[a] or str(a) in reports[b]

    for rank, key in enumerate(keys):
        for members in groups:
            if keys[members[0]] == key and not any(apart(rank, other) for other in members):
                members.append(rank)
                break
        else:
            groups.append([rank])
    group = [next(i for i, members in enumerate(groups) if r in members) for r in range(len(keys))]
    words = "; ".join(
        f"rank {r} cannot share memory with rank {other}: {why}"
        for r, found in enumerate(reports)
        for other, why in found.items()
    )
    return Sharing(group, words)
