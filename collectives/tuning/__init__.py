"""Choosing: which algorithm serves a call, and the sizes at which ways change. No other file holds
a size threshold.

`Tuner.choose` answers for one communicator and arrays on hosts (`device.DeviceTuner` for arrays on
GPUs): a forced rule (COLLECTIVES_ALGORITHM) first, then what
`python -m collectives tune` measured on these ranks (`tables.py`), for sizes near the measured
ones, then the table below. Its entries come from `python -m collectives compare` on hosts with
shared memory and with MPI between them; the model in `model.py` predicts times for `explain` and
for sizes between.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from .. import _core
from ..config import Rule
from ..errors import TopologyError, did_you_mean
from ..schedule import algorithms, why_unsupported
from ..words import size_words

if TYPE_CHECKING:
    from .tables import Table

# The largest size, as an open end.
ANY_SIZE = (1 << 64) - 1

# Array bytes up to which group() packs all_reduce calls into one.
PACK_BELOW = 256 << 10

# Slots of a pair of ranks that exchange messages of MPI: bytes of each, and how many.
MPI_SLOT = 1 << 20
MPI_DEPTH = 4


# Calls over MPI whose data, of all ranks together, are at most this travel with the agreement that
# the ranks enter a call (csrc/assembly.hpp); where ranks combine by node first, the vectors of all
# nodes together. 2 nodes of 2 ranks, 4 KiB at 1 Gbit/s: 42 us, the best of others 99; 16 KiB: 530
# and 102.
ASSEMBLED = 16 << 10
ASSEMBLED_BY_NODE = 128 << 10
# The same of two ranks that are a node each, which send each other no more than what is needed:
# half of it either way at most. 10 Gbit/s, all_to_all of 64 KiB: 38 us, and 65 with a round of its
# own for the agreement; of 128 KiB: 58 and 97; all_gather of 128 KiB: 69 and 75.
ASSEMBLED_BY_TWO = 128 << 10
# Collectives of a vector, not of blocks: all of it is sent.
WHOLE = ("all_reduce", "reduce", "broadcast")
# The composition that does so.
BY_NODE = "hierarchical(direct_two_shot, direct_one_shot)"


class Choice(NamedTuple):
    """`algorithm` serves calls of up to `limit` bytes."""

    limit: int
    algorithm: str


def _shared_memory(collective: str, nranks: int) -> list[Choice]:
    """All ranks share memory: one hop reaches everybody, so the direct algorithms win, but where
    one rank would have to combine much.
    """
    if collective == "all_reduce":
        # Two ranks: one shot moves as many bytes as two and needs one hop less. More: two-shot
        # divides the reductions. 16 cores, a rank each, in us, one-shot and two-shot: 3 ranks 16
        # KiB 5.7 and 6.4; 4 ranks 4 KiB 2.7 and 2.9, 8 KiB 5.4 and 4.1; 8 ranks 2 KiB 3.7 and 3.3,
        # 16 KiB 22.7 and 8.4; 16 ranks 2 KiB 7.3 and 4.1, 16 KiB 44.6 and 11.6.
        if nranks == 2:
            return [Choice(ANY_SIZE, "direct_one_shot")]
        limit = 24 << 10 if nranks == 3 else (8 << 10) // (nranks - 2)
        return [Choice(limit, "direct_one_shot"), Choice(ANY_SIZE, "direct_two_shot")]
    if collective == "reduce" and nranks > 2:
        # There, direct, tree and ring: 4 ranks 256 KiB 44, 45 and 48, 4 MiB 839, 654 and 663; 8
        # ranks 64 KiB 32, 26 and 54, 4 MiB 1903, 827 and 753; 16 ranks 16 KiB 19, 15 and 46, 4 MiB
        # 4304, 959 and 965.
        return [
            Choice((2 << 20) // nranks**2, "direct_one_shot"),
            Choice(1 << 20, "double_binary_tree"),
            Choice(ANY_SIZE, "ring"),
        ]
    if collective in ("reduce_scatter", "all_gather", "all_to_all"):
        return [Choice(ANY_SIZE, "direct_two_shot")]
    return [Choice(ANY_SIZE, "direct_one_shot")]


def _assembled(collective: str, nranks: int, *, apart: bool = True) -> list[Choice]:
    """The direct algorithms up to the sizes at which they travel with the agreement that ranks
    enter a call, where not all share memory. `apart`: they are on different nodes.
    """
    everybody_sends_all = ("all_reduce", "reduce", "reduce_scatter", "all_to_all")
    limit = ASSEMBLED // (nranks if collective in everybody_sends_all else 1)
    if nranks == 2 and apart:
        limit = ASSEMBLED_BY_TWO // (2 if collective in WHOLE else 1)
    two_shot = collective in ("reduce_scatter", "all_to_all")
    return [Choice(limit, "direct_two_shot" if two_shot else "direct_one_shot")]


def _one_node_by_messages(collective: str, nranks: int) -> list[Choice]:
    """Ranks of one node that share no memory: every pair is equally near, so few hops win. Measured
    with 2 and 4 ranks over Open MPI; all_reduce of 1 MiB with 4: direct_two_shot 845 us,
    halving_doubling 1368.
    """
    few = nranks <= 4
    table = {
        "all_reduce": [
            Choice((16 << 10) * nranks, "direct_one_shot" if nranks == 2 else "recursive_doubling"),
            Choice(ANY_SIZE, "direct_two_shot"),
        ],
        "reduce_scatter": [
            Choice((24 << 10) * nranks, "direct_two_shot" if nranks == 2 else "halving_doubling"),
            Choice(ANY_SIZE, "direct_two_shot"),
        ],
        "all_gather": [Choice(ANY_SIZE, "direct_two_shot")],
    }
    if few:
        table |= {
            "broadcast": [Choice(ANY_SIZE, "direct_one_shot")],
            "reduce": [Choice(ANY_SIZE, "direct_one_shot")],
        }
    found = table.get(collective)
    if found is None:
        return _one_rank_a_node(collective, nranks, apart=False)
    return _joined(_assembled(collective, nranks, apart=False), found)


def _one_rank_a_node(collective: str, nranks: int, *, apart: bool = True) -> list[Choice]:
    """Every hop crosses a network: few messages while latency counts, few bytes after."""
    # Two ranks: one hop of all bytes is as many bytes as two hops of half.
    table = {
        "all_reduce": [Choice(ANY_SIZE, "direct_one_shot" if nranks == 2 else "halving_doubling")],
        "reduce_scatter": [
            Choice(ANY_SIZE, "direct_two_shot" if nranks == 2 else "halving_doubling")
        ],
        "all_gather": [Choice(64 << 10, "bruck"), Choice(ANY_SIZE, "ring")],
        "broadcast": [Choice(64 << 10, "binomial_tree"), Choice(ANY_SIZE, "double_binary_tree")],
        "reduce": [Choice(64 << 10, "binomial_tree"), Choice(ANY_SIZE, "double_binary_tree")],
        "gather": [Choice(ANY_SIZE, "binomial_tree")],
        "scatter": [Choice(ANY_SIZE, "binomial_tree")],
        "all_to_all": [Choice(ANY_SIZE, "direct_two_shot")],
        "barrier": [Choice(ANY_SIZE, "recursive_doubling")],
    }[collective]
    small = [] if collective == "barrier" else _assembled(collective, nranks, apart=apart)
    return _joined(small, table)


def _several_nodes(collective: str, nranks: int, nnodes: int) -> list[Choice]:
    """Nodes of several ranks: what crosses the network is reduced within the node first."""
    table = {
        "all_reduce": [
            Choice(ASSEMBLED_BY_NODE // nnodes, BY_NODE),
            Choice(ANY_SIZE, "hierarchical(direct_two_shot, halving_doubling)"),
        ],
        "reduce_scatter": [Choice(ANY_SIZE, "hierarchical(direct_two_shot, halving_doubling)")],
        "all_gather": [Choice(ANY_SIZE, "hierarchical(direct_two_shot, ring)")],
        "broadcast": [
            Choice(128 << 10, "hierarchical(direct_two_shot, binomial_tree)"),
            Choice(ANY_SIZE, "hierarchical(direct_two_shot, double_binary_tree)"),
        ],
        "all_to_all": [
            Choice(256 << 10, "hierarchical(direct_two_shot, direct_two_shot)"),
            Choice(ANY_SIZE, "direct_two_shot"),
        ],
    }.get(collective)
    if table is None:
        return _one_rank_a_node(collective, nranks)
    return _joined([] if collective == "all_reduce" else _assembled(collective, nranks), table)


def _joined(*parts: list[Choice]) -> list[Choice]:
    """Tables one after the other; of neighbours with the same algorithm the last stays."""
    found: list[Choice] = []
    for choice in (c for part in parts for c in part):
        if found and found[-1].algorithm == choice.algorithm:
            found.pop()
        if not found or choice.limit > found[-1].limit:
            found.append(choice)
    return found


class Tuner:
    """Chooses algorithms for one communicator.

    node          node of each rank
    one_region    True if all ranks share memory
    rules         forced choices, from COLLECTIVES_ALGORITHM
    measured      what was measured on these ranks, None if nothing was
    """

    def __init__(
        self,
        node: list[int],
        one_region: bool,
        rules: Iterable[Rule] = (),
        measured: Table | None = None,
    ) -> None:
        self.node = node
        self.nranks = len(node)
        self.one_region = one_region
        self.measured = measured
        self.rules = tuple(rule for rule in rules if rule.algorithm != "auto")
        self._tables: dict[str, list[Choice]] = {}

    def table(self, collective: str) -> list[Choice]:
        """The choices for a collective, by rising size."""
        table = self._tables.get(collective)
        if table is None:
            table = self._tables[collective] = self._merge(collective)
        return table

    def choose(self, collective: str, nbytes: int) -> str:
        """The algorithm for a call of `nbytes`: the whole vector, or all blocks of one rank."""
        return next(c.algorithm for c in self.table(collective) if nbytes <= c.limit)

    def rule(self, collective: str, nbytes: int) -> Rule | None:
        """The rule that forces the algorithm of a call, if there is one."""
        for rule in self.rules:
            if (
                rule.collective == collective
                and rule.low <= nbytes
                and (rule.high is None or nbytes < rule.high)
            ):
                return rule
        return None

    def reason(self, collective: str, nbytes: int) -> str:
        """Why `choose` answers as it does, in words."""
        rule = self.rule(collective, nbytes)
        if rule is not None:
            return f"forced by COLLECTIVES_ALGORITHM ({rule})"
        sizes = self.sizes_measured(collective)
        if self._from_measured(collective) is None or self.measured is None:
            return self.why_built_in(collective, nbytes)
        if self.is_measured(collective, nbytes):
            where = f"the fastest as measured on these ranks ({self.measured.origin})"
            if not sizes or sizes[0] <= nbytes <= sizes[-1]:
                return where
            near = sizes[0] if nbytes < sizes[0] else sizes[-1]
            return f"{where}, with {size_words(near)}, which is near"
        span = " to ".join(size_words(size) for size in dict.fromkeys((sizes[0], sizes[-1])))
        return (
            f"{self.why_built_in(collective, nbytes)}; on these ranks {span} was measured, which "
            f"is far from this ({self.measured.origin})"
        )

    def sizes_measured(self, collective: str) -> list[int]:
        """The sizes that were measured on these ranks, rising."""
        return self.measured.sizes(collective) if self.measured is not None else []

    def is_measured(self, collective: str, nbytes: int) -> bool:
        """True if what was measured on these ranks decides for a call, where nothing is forced."""
        if self.measured is None or self._from_measured(collective) is None:
            return False
        low, high = self.measured.reach(collective)
        return low <= nbytes <= high

    def way(self, algorithm: str, collective: str, nbytes: int) -> str:
        """How an algorithm goes about a call, by name, where it has several ways; "" on hosts."""
        return ""

    def why_built_in(self, collective: str, nbytes: int) -> str:
        """Why `built_in` answers as it does, in words."""
        if self.one_region:
            return "all ranks share memory, so one hop reaches everybody"
        if len(set(self.node)) == 1:
            return "the ranks of this node share no memory, so every hop is a message of MPI"
        if len(set(self.node)) == self.nranks:
            return "each rank is on a node of its own, so every hop crosses the network"
        return (
            "several nodes of several ranks: data are combined within a node before they cross the "
            "network"
        )

    def candidates(self, collective: str, root: int = 0) -> list[str]:
        """Every algorithm that can do `collective` on these ranks, and, on several nodes of several
        ranks, compositions with every algorithm between the nodes.
        """
        names = [a.name for a in algorithms()]
        if len(set(self.node)) not in (1, self.nranks):
            names.remove("hierarchical")
            names += [f"hierarchical(direct_two_shot, {name})" for name in names]
        names += [c.algorithm for c in self.table(collective) if c.algorithm not in names]
        return [
            name
            for name in names
            if not why_unsupported(name, collective, self.nranks, root=root, node=self.node)
        ]

    def _from_measured(self, collective: str) -> list[Choice] | None:
        """What was measured, where all of it can run here: a table may name algorithms that a
        program has registered.
        """
        choices = self.measured.choices.get(collective) if self.measured is not None else None
        if choices is None:
            return None
        names = {choice.algorithm for choice in choices}
        if any(why_unsupported(n, collective, self.nranks, node=self.node) for n in names):
            return None
        return list(choices)

    def built_in(self, collective: str) -> list[Choice]:
        """What is chosen where nothing was measured, by rising size."""
        if self.one_region:
            return _shared_memory(collective, self.nranks)
        if len(set(self.node)) == 1:  # and yet its ranks share no memory
            return _one_node_by_messages(collective, self.nranks)
        if len(set(self.node)) == self.nranks:
            return _one_rank_a_node(collective, self.nranks)
        return _several_nodes(collective, self.nranks, len(set(self.node)))

    def _merge(self, collective: str) -> list[Choice]:
        found, table = self._from_measured(collective), self.built_in(collective)
        if found is not None:
            assert self.measured is not None
            table = _laid_over(table, found, *self.measured.reach(collective))
        for rule in self.rules:
            if rule.collective != collective:
                continue
            why = why_unsupported(rule.algorithm, collective, self.nranks, node=self.node)
            if why:
                raise TopologyError(
                    f"COLLECTIVES_ALGORITHM asks for {rule.algorithm} as {collective}, but {why}"
                )
            table = _override(table, rule)
        return table


def _laid_over(table: list[Choice], found: list[Choice], low: int, high: int) -> list[Choice]:
    """`table`, with `found` for sizes from `low` to `high`."""

    def at(choices: list[Choice], nbytes: int) -> str:
        return next(c.algorithm for c in choices if nbytes <= c.limit)

    before = [c for c in table if c.limit < low]
    if low:
        before.append(Choice(low - 1, at(table, low - 1)))
    inside = [c for c in found if low <= c.limit < high]
    return _joined(
        before,
        [*inside, Choice(high, at(found, high))],
        [c for c in table if c.limit > high],
    )


def _override(table: list[Choice], rule: Rule) -> list[Choice]:
    """`table` with `rule` laid over it."""
    edges = sorted(
        {c.limit for c in table}
        | {rule.low - 1}
        | ({rule.high - 1} if rule.high is not None else set())
    )
    merged: list[Choice] = []
    for edge in edges:
        if edge < 0:
            continue
        inside = edge >= rule.low and (rule.high is None or edge < rule.high)
        algorithm = (
            rule.algorithm if inside else next(c.algorithm for c in table if edge <= c.limit)
        )
        if merged and merged[-1].algorithm == algorithm:
            merged[-1] = Choice(edge, algorithm)
        else:
            merged.append(Choice(edge, algorithm))
    return merged


def host_tuning(
    nranks: int, ncpus: int, *, messages: bool, nodes: Sequence[int] = ()
) -> _core.HostTuning:
    """Sizes for the host engine with `nranks` ranks on a node that may run on `ncpus` CPUs.

    messages  True if some ranks are reached through MPI only
    nodes     the node of each rank of the communicator

    csrc/direct_host.hpp says what each means. `lanes` and `segment_bytes` must be equal on all
    ranks.
    """
    tuning = _core.HostTuning()
    # In lines each rank writes to all. 16 cores, a rank each, all_reduce of 1 KiB: 4 ranks 3.8 us,
    # staged 2.7; 8 ranks 7.2 and 4.1; 16 ranks 13.6 and 7.7; of 64 B 2.0 and 2.3, 2.8 and 3.1, 4.4
    # and 4.2. 2 ranks: alike at 384 B.
    tuning.lines_max = 384 if nranks == 2 else max(64, 512 // max(1, nranks))
    tuning.chunk_bytes = 64 << 10
    tuning.nontemporal_min = 8 << 20
    tuning.symmetric_min = 8 << 10
    # Reading a peer's memory costs a system call and 0.1 us a page: two ranks, broadcast of 1 MiB
    # 87 us, staged 62; of 16 MiB 1263 and 1369; all_to_all of 256 KiB 14.9 and 17.4. Several that
    # read the same pages hold each other up: broadcast of 4 MiB 882 us with 4 ranks, staged 546;
    # with 8 ranks 1870 and 786, with 16 4084 and 755.
    tuning.pull_shared_min = 2 << 20 if nranks == 2 else 1 << 62
    tuning.pull_split_min = 256 << 10
    # With fewer CPUs than ranks a rank that spins keeps the one it waits for from running.
    tuning.crowded = ncpus < nranks
    # A poll of MPI costs as much as ten others, and what it waits for crosses a network: the core
    # goes to others early. 2 hosts x 2 ranks on two cores, 4 B: 28 us, with 2000 polls 104.
    tuning.spins = 1 if tuning.crowded else 20 if messages else 2000
    two = len(nodes) == len(set(nodes)) == 2
    tuning.assembled_max = ASSEMBLED_BY_TWO if two else ASSEMBLED
    tuning.assembled_by_node_max = ASSEMBLED_BY_NODE
    # Several nodes: one slice is on the network while others are within the nodes. 2 hosts x 2
    # ranks at 10 Gbit/s, 8 MiB: 11.6 ms, with one lane of 256 KiB 18. Within a host a message of
    # MPI costs a hand-shake, so there they are few (2 ranks, 4 MiB over Open MPI: 670 us with one
    # lane of 256 KiB, 1100 with two of 64 KiB).
    # Two ranks on two nodes have only the reduction to overlap with.
    if messages:
        tuning.lanes = 1 if len(set(nodes)) <= 1 else 2 if len(nodes) == 2 else 4
    else:
        tuning.lanes = 2
    tuning.segment_bytes = segment_bytes(messages=messages, nodes=nodes)
    return tuning


def segment_bytes(*, messages: bool, nodes: Sequence[int]) -> int:
    """The longest slice of a chunk that the host engine moves at once."""
    if not messages:
        return 64 << 10
    if len(set(nodes)) <= 1:
        return 256 << 10
    # Nothing is handed on between two ranks, so slices need not be short, and each costs a
    # hand-shake. 2 hosts x 1 rank at 10 Gbit/s, 4 MiB: 3.60 ms, with 4 lanes of 128 KiB 4.41.
    if len(nodes) == 2:
        return 512 << 10
    # More bytes on the way than a switch can hold (4 lanes of 256 KiB, two ranks, at 1 Gbit/s) are
    # lost, and sent again 200 ms later.
    return 128 << 10


class RegionSizes(NamedTuple):
    """Slots of a node's shared segment, in bytes. Pages are taken when a slot is first used."""

    fifo_slot: int
    fifo_depth: int
    stage_slot: int
    stage_depth: int


def region_sizes(nranks: int) -> RegionSizes:
    """Slots for a node of `nranks` ranks: large for few ranks, and at most about 1 GiB in all for
    many.
    """
    pairs = max(1, nranks * (nranks - 1))
    fifo_slot = 256 << 10
    while fifo_slot > 16 << 10 and fifo_slot * 4 * 10 * pairs > 1 << 30:
        fifo_slot //= 2
    stage_slot = min(1 << 20, max(256 << 10, nranks * (128 << 10)))
    # Two ranks: twice two slots of a chunk stay in a core's second-level cache; more are slower (1
    # MiB: 86 instead of 79 us).
    return RegionSizes(fifo_slot, 4, stage_slot, 2 if nranks == 2 else 4)


def known_algorithm(name: str, known: Iterable[str]) -> None:
    """Raises ValueError for a name that is not registered, nor composed of registered ones."""
    names = list(known)
    for part in name.replace("(", ",").replace(")", "").split(","):
        if part.strip() and part.strip() not in names:
            raise ValueError(
                f"unknown algorithm {part.strip()!r}; {did_you_mean(part.strip(), names)}"
            )
