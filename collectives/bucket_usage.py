"""Which parameters have a gradient: on no rank at all, or on this rank in every step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from .gradients import listed

if TYPE_CHECKING:
    from .communicator import Communicator


class Usage:
    """What a bucketer knows of gradients that may be missing.

    find_unused   they may be
    static_graph  the same are missing in every step: those of the first in which all ranks had data
    varies        others may be missing in every step, and on every rank
    alike         the same are missing on all ranks: so without either, and with a static graph that
                  is known and such
    usual         with a static graph, what becomes ready on this rank; None until it is known
    """

    def __init__(
        self, comm: Communicator, names: Sequence[str], find_unused: bool, static_graph: bool
    ) -> None:
        self.find_unused = find_unused
        self.varies = find_unused and not static_graph
        self.alike = not find_unused
        self.usual: frozenset[str] | None = None
        self._comm = comm
        self._names = names
        self._static_graph = static_graph
        self._nowhere: frozenset[str] = frozenset()

    @property
    def lets_differ(self) -> str:
        """What lets ranks use other parameters than one another, in words."""
        words = "find_unused=True lets them"
        return words + (" where static_graph=True is left out" if self._static_graph else "")

    def lacks(
        self, names: Iterable[str], touched: Collection[str], seen: Collection[str], absent: bool
    ) -> str:
        """Which gradients this rank must have and has not, in words; "" if there are none. With
        arguments as of `nowhere`.
        """
        if absent:
            return ""
        if self.usual is not None:
            lost = sorted(self.usual - set(seen))
            return f"{listed(lost)}, and had one in the first step (static_graph)" if lost else ""
        lost = [n for n in names if n not in seen and n not in touched]
        if self.find_unused or not lost:
            return ""
        return (
            f"{listed(lost)}: not ready at the end of the pass; pass find_unused=True if "
            "parameters may go unused"
        )

    def nowhere(
        self, touched: Collection[str], seen: Collection[str], absent: bool
    ) -> frozenset[str]:
        """The names that have a gradient on no rank: one reduction of a bitmap, or none where the
        graph is static and known. Collective.

        touched  have a gradient here since the last reduction
        seen     those of them that became ready in this pass
        absent   this rank has no data
        """
        if self.find_unused and self.usual is None:
            used = np.array([*(name in touched for name in self._names), absent], np.int32)
            self._comm.all_reduce(used)
            *ranks, away = used.tolist()
            self._nowhere = frozenset(n for n, r in zip(self._names, ranks, strict=True) if not r)
            if self._static_graph and not away:  # all ranks learn it, or none
                self.usual = frozenset(seen)
                self.alike = set(ranks) <= {0, self._comm.size}
        return self._nowhere
