"""Device arrays between nodes: which calls go along rails, in windows of which size.

None of these sizes was measured between real nodes: they follow from what the parts were measured
to take.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

# What each level does, within the node and on the rail; what a collective is not here for is
# staged whole.
NEAR = {
    "all_reduce": ("reduce_scatter", "all_gather"),
    "reduce_scatter": ("reduce_scatter",),
    "all_gather": ("all_gather",),
    "broadcast": ("all_gather",),
    "all_to_all": ("all_to_all",),
}

# Smaller calls are staged whole, in one turn of the communicator's thread. Along rails there are
# two, some 30 us each, and kernels before and behind. (64 KiB staged: 75 us, of which copies to the
# host and back take about 10.)
RAILS_FROM = 128 << 10

# Calls of this many bytes and more are made on arrays on GPUs as they are, where MPI takes pointers
# to them.
STRAIGHT_FROM = 32 << 10

# Slots of fewer bytes are not worth that: the messages of many ranks would be smaller than slices
# through memory of the host are.
LEAST_STRAIGHT_SLOT = 64 << 10


class Straight(NamedTuple):
    """Whether MPI is given pointers to memory of GPUs.

    why_not     in words; "" if it is
    from_bytes  of the calls that go so
    """

    why_not: str
    from_bytes: int = STRAIGHT_FROM


class Between(NamedTuple):
    """How device arrays go between the nodes of some ranks."""

    why_no_rails: str
    straight: Straight


# A call's windows: while one is on the network, the next is combined within the nodes. A window is
# a staged call of its own, whose first and last slices have nothing to overlap with: so few
# windows, of a slot at least, and of four at most, for which scratch memory is there.
WINDOWS = 4
MOST_SLOTS = 4


def window_bytes(share: int, slot: int) -> int:
    """Bytes of a rank's rail that go in one window.

    share  of the whole call, on that rail
    slot   COLLECTIVES_STAGING, as all ranks have it
    """
    return min(max(slot, -(-share // WINDOWS)), MOST_SLOTS * slot)


class Parts(NamedTuple):
    """The algorithms of the two levels; None: chosen by size."""

    near: str | None
    rail: str | None


def parts_of(algorithm: str) -> Parts | None:
    """Those of a composition's name; None if it is none of two plain names."""
    if algorithm == "hierarchical":
        return Parts(None, None)
    found = re.fullmatch(r"hierarchical\( *(\w+) *, *(\w+) *\)", algorithm)
    return None if found is None else Parts(*found.groups())


def why_not_placed(nodes: Sequence[int]) -> str:
    """Why ranks on these nodes have no rails, in words; "" if they have."""
    counts = set(Counter(nodes).values())
    if len(set(nodes)) == 1:
        return "the ranks are on one node"
    if counts == {1}:
        return "each rank is on a node of its own"
    if len(counts) > 1:
        return "the nodes have different numbers of ranks"
    return ""


def why_staged(collective: str, nbytes: int, algorithm: str | None, order: str | None) -> str:
    """Why a call is staged whole where there are rails, in words; "" if it goes along them.

    algorithm  what the call, or COLLECTIVES_ALGORITHM, asks for; None: nothing
    """
    if collective not in NEAR:
        return f"{collective} does not go along rails"
    if order == "rank":
        return "order='rank' combines in the order of all ranks"
    if nbytes >= 1 << 62:
        return "pairs have blocks of their own"
    if nbytes == 0:
        return "nothing is sent"
    if algorithm is None or algorithm == "auto":
        small = nbytes < RAILS_FROM
        return f"calls below {RAILS_FROM >> 10} KiB take fewer turns so" if small else ""
    parts = parts_of(algorithm)
    if parts is None:
        return f"{algorithm} is no composition"
    if collective == "all_to_all" and parts.near not in (None, "direct_two_shot"):
        return f"within a node, all_to_all goes by direct_two_shot on GPUs, not by {parts.near}"
    return ""
