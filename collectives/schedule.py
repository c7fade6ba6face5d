"""Schedules: what all ranks do in one collective, round by round. To look at, to verify, to cost,
to draw, and to write.

An algorithm written in Python is a generator of rounds:

    @collectives.algorithm("all_reduce")
    def my_ring(n):
        for i in range(n - 1):
            yield [Transfer(r, (r + 1) % n, chunk=(r - i) % n, reduce=True) for r in range(n)]
        for i in range(n - 1):
            yield [Transfer(r, (r + 1) % n, chunk=(r + 1 - i) % n) for r in range(n)]

It is verified on first use, and then runs on every engine like those written in C++.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from operator import index
from typing import Any, NamedTuple

from . import _core
from .errors import ScheduleError, UnsupportedError, did_you_mean


class Transfer(NamedTuple):
    """In one round `src` sends `chunk` to `dst`, which stores it, or with `reduce` combines it with
    its own.

    All transfers of a round read what their ranks held when the round began. Transfers of one round
    with equal src, dst and channel travel as one message. A chunk belongs to one channel.
    """

    src: int
    dst: int
    chunk: int
    reduce: bool = False
    channel: int = 0


class AlgorithmInfo(NamedTuple):
    """An algorithm: its name, how it works, when to use it, where it comes from (a line each)."""

    name: str
    summary: str
    when: str
    source: str


class _Written(NamedTuple):
    info: AlgorithmInfo
    collective: str
    rounds: Callable[..., Iterable[Iterable[Transfer]]]
    chunks: Callable[[int], int] | None
    supports: Callable[[int], bool | str]


_LONGEST = 64  # bytes of a name: signatures hold it and what tells schedules apart
# What signatures and COLLECTIVES_ALGORITHM put between names.
_FORBIDDEN = re.compile(r"[(),\s#:;=]")
LARGEST = (1 << 31) - 1  # the core's numbers of ranks, nodes, chunks and channels
_written: dict[str, dict[str, _Written]] = {}  # name -> collective -> algorithm


def algorithm(
    collective: str,
    *,
    name: str | None = None,
    chunks: Callable[[int], int] | None = None,
    supports: Callable[[int], bool | str] = lambda n: True,
    when: str = "",
    source: str = "",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the decorated generator of rounds as an algorithm for `collective`, under its own
    name unless `name` is given.

    The generator is called with the number of ranks, and with `root=` too if it has such a
    parameter and the collective a root.
    chunks      number of chunks for n ranks; otherwise what the transfers mention (at least n for
                collectives with blocks). An all_to_all has one for each pair of ranks
    supports    True or False for n ranks, or the reason why not, as text
    Its docstring's first line is the summary. What has the name already is replaced, but
    communicators that ran it keep their copy. It must yield the same on all ranks (no random
    choices, no order of a set): ranks with different schedules raise MismatchError when they call
    it. Raises ValueError for an unknown collective, a name that C++ has, or that is none.
    """
    if callable(collective):
        raise TypeError('an algorithm is for a collective: write @algorithm("all_reduce"), say')
    _check_collective(collective)
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name must be a name of your algorithm, not {name!r}")
    for argument, given in (("chunks", chunks), ("supports", supports)):
        if not callable(given) and (given is not None or argument == "supports"):
            raise TypeError(f"{argument} must be a function of the number of ranks, not {given!r}")

    def register(rounds: Callable[..., Any]) -> Callable[..., Any]:
        if not callable(rounds):
            raise TypeError(f"an algorithm is a function that yields rounds, not {rounds!r}")
        own = name or str(getattr(rounds, "__name__", "algorithm"))
        fits = own.isprintable() and len(own.encode()) <= _LONGEST
        begins = own[:1].isalpha() or own[:1] == "_"
        if own == "auto" or not fits or not begins or _FORBIDDEN.search(own):
            raise ValueError(
                f"an algorithm cannot be called {own!r}: 'auto' means the best one, and a name has "
                f"up to {_LONGEST} bytes, the first a letter or _, without blanks, "
                "control characters, brackets and , : ; = #"
            )
        if any(a["name"] == own for a in _core.algorithms()):
            raise ValueError(
                f"there is an algorithm {own!r} in the core already; give yours another name="
            )
        summary = (inspect.getdoc(rounds) or "written in Python").splitlines()[0]
        info = AlgorithmInfo(own, summary, when, source)
        _written.setdefault(own, {})[collective] = _Written(
            info, collective, rounds, chunks, supports
        )
        return rounds

    return register


def unregister(name: str) -> None:
    """Takes back what `algorithm` registered under `name`. Communicators that ran it keep their
    copy.
    """
    _check_name(name)
    if _written.pop(name, None) is None:
        raise ValueError(f"no algorithm {name!r} written in Python; {did_you_mean(name, _written)}")


def algorithms(collective: str | None = None, nranks: int | None = None) -> list[AlgorithmInfo]:
    """All registered algorithms, or those that can do `collective` (with `nranks` ranks on one
    node).
    """
    infos = [
        AlgorithmInfo(a["name"], a["summary"], a["when"], a["source"]) for a in _core.algorithms()
    ]
    infos += [next(iter(by.values())).info for by in _written.values()]
    if collective is None:
        return infos
    _check_collective(collective)
    ranks = 4 if nranks is None else _whole(nranks, "nranks")
    if ranks < 1:
        return []
    return [i for i in infos if not why_unsupported(i.name, collective, ranks)]


def is_written(name: str) -> bool:
    """True for an algorithm that was registered from Python."""
    return name in _written


def why_unsupported(
    name: str, collective: str, nranks: int, *, root: int = 0, node: Iterable[int] = ()
) -> str:
    """Why algorithm `name` cannot do `collective` with these ranks; "" if it can."""
    by_collective = _written.get(name)
    if by_collective is None:
        for part in re.split(r"[(),\s]+", name)[1:]:
            if part in _written:
                return f"{part} is written in Python, and parts of compositions are in C++"
        return str(_core.why_unsupported(name, collective, nranks, root, list(node)))
    written = by_collective.get(collective)
    if written is None:
        return f"{name} does {', '.join(by_collective)}, not {collective}"
    answer = written.supports(nranks)
    if isinstance(answer, str):
        return answer
    return "" if answer else f"{name} does not support {nranks} ranks"


def schedule(
    name: str, collective: str, nranks: int, *, root: int = 0, node: Iterable[int] = ()
) -> Schedule:
    """The schedule of an algorithm.

    name        a registered algorithm, or a composition such as "hierarchical(direct_two_shot,
                ring)"
    collective  "all_reduce", ...
    nranks      number of ranks
    root        for broadcast, reduce, gather, scatter
    node        node of each rank; one node unless given

    Raises TypeError for what is no whole number, ValueError for unknown names and for numbers above
    2^31 - 1, UnsupportedError if the algorithm cannot do this, ScheduleError if one written in
    Python is broken.
    """
    nranks, root = _whole(nranks, "nranks"), _whole(root, "root")
    if not isinstance(node, Iterable):
        raise TypeError(f"node must be a list of the node of each rank, not {node!r}")
    nodes = [_whole(number, "node") for number in node]
    _check_name(name)
    _check_collective(collective)
    if name in _written or nranks < 1:
        why = (
            why_unsupported(name, collective, nranks, root=root, node=nodes)
            if nranks >= 1
            else "there are no ranks"
        )
        if why:
            raise UnsupportedError(f"{name} cannot do {collective} with {nranks} ranks: {why}")
    if name in _written:
        built = _build(_written[name][collective], nranks, root, nodes)
        built.verify()
        return built
    known = [a.name for a in algorithms()]
    if not name.startswith("hierarchical(") and name not in known:
        raise ValueError(f"unknown algorithm {name!r}; {did_you_mean(name, known)}")
    why = why_unsupported(name, collective, nranks, root=root, node=nodes)
    if why:
        raise UnsupportedError(f"{name} cannot do {collective} with {nranks} ranks: {why}")
    return Schedule(_core.build_schedule(name, collective, nranks, root, nodes))


def _check_name(name: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"an algorithm must be a name such as 'ring', not {name!r}")


def _check_collective(collective: Any) -> None:
    if not isinstance(collective, str):
        raise TypeError(f"collective must be a name such as 'all_reduce', not {collective!r}")
    if collective not in _core.collectives:
        raise ValueError(
            f"unknown collective {collective!r}; {did_you_mean(collective, _core.collectives)}"
        )


def _whole(value: Any, name: str) -> int:
    """`value`, an argument, as a number that the core takes."""
    try:
        number = index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {value!r}") from None
    if abs(number) > LARGEST:
        raise ValueError(f"{name} is {number}, and must not be more than {LARGEST}")
    return number


def _rounds(generated: Any, what: str) -> list[list[Transfer]]:
    """The rounds that an algorithm has given; raises ScheduleError, in words, for anything else."""
    if not isinstance(generated, Iterable):
        raise ScheduleError(
            f"{what}: it returned {generated!r}, and must yield rounds, each a list of Transfer; "
            "is there a yield in it?"
        )
    rounds = []
    for i, transfers in enumerate(generated):
        try:
            found = [Transfer(*t) for t in transfers]
            rounds.append(
                [
                    Transfer(index(src), index(dst), index(chunk), bool(reduce), index(channel))
                    for src, dst, chunk, reduce, channel in found
                ]
            )
        except TypeError as error:
            raise ScheduleError(
                f"{what}: it yielded {transfers!r} as round {i}, which is no list of Transfer(src, "
                f"dst, chunk) with integers ({error})"
            ) from error
    return rounds


def _build(written: _Written, n: int, root: int, node: list[int]) -> Schedule:
    takes_root = "root" in inspect.signature(written.rounds).parameters
    generated = written.rounds(n, root=root) if takes_root else written.rounds(n)
    what = f"{written.info.name}, {written.collective} with {n} ranks"
    rounds = _rounds(generated, what)
    mentioned = max((max(0, t.chunk) for ts in rounds for t in ts), default=0) + 1
    count = _chunks(written.chunks(n), what) if written.chunks else mentioned
    if written.chunks is None and written.collective in (
        "reduce_scatter",
        "all_gather",
        "gather",
        "scatter",
    ):
        count = -(-max(count, n) // n) * n
    if written.collective == "all_to_all":
        if written.chunks and count != n * n:
            raise ScheduleError(
                f"{what}: chunks= says {count}, and there are {n * n}, one for each pair of ranks; "
                "leave chunks= out"
            )
        count = n * n
    if root != 0 and not takes_root:
        # Written for root 0: the others take its place in a circle. What is out of range stays so.
        blocked = written.collective in ("gather", "scatter")

        def turn(r: int) -> int:
            return (r + root) % n if 0 <= r < n else r

        per = max(1, count // n)
        move = (lambda c: turn(c // per) * per + c % per) if blocked else (lambda c: c)
        rounds = [
            [Transfer(turn(s), turn(d), move(c), red, ch) for s, d, c, red, ch in ts]
            for ts in rounds
        ]
    numbers = (number for transfers in rounds for transfer in transfers for number in transfer)
    largest = max(map(abs, numbers), default=0)
    if max(largest, count) > LARGEST:
        raise ScheduleError(f"{what}: {max(largest, count)} is too large for a rank or a chunk")
    core = _core.Schedule(written.info.name, written.collective, n, count, rounds, root, node)
    return Schedule(core)


def _chunks(count: Any, what: str) -> int:
    try:
        return index(count)
    except TypeError:
        raise ScheduleError(
            f"{what}: chunks= says {count!r}, which is no number of chunks"
        ) from None


class Schedule:
    """All rounds of one collective. Make one with `collectives.schedule`."""

    def __init__(self, core: _core.Schedule) -> None:
        self._core = core

    @property
    def algorithm(self) -> str:
        """Name of the algorithm."""
        return str(self._core.algorithm)

    @property
    def collective(self) -> str:
        """Name of the collective."""
        return str(self._core.collective)

    @property
    def nranks(self) -> int:
        """Number of ranks."""
        return int(self._core.nranks)

    @property
    def nchunks(self) -> int:
        """Number of chunks of the vector, or of all blocks together."""
        return int(self._core.nchunks)

    @property
    def root(self) -> int:
        """The root of a broadcast, reduce, gather or scatter."""
        return int(self._core.root)

    @property
    def rounds(self) -> list[list[Transfer]]:
        """The transfers, round by round."""
        return [[Transfer(*t) for t in transfers] for transfers in self._core.rounds]

    def verify(self) -> None:
        """Follows every contribution; raises ScheduleError naming the round and the transfer that
        breaks the schedule.
        """
        self._core.verify()
        self._core.check_deadlock()

    def cost(self) -> dict[str, float]:
        """Steps, and what is sent and combined, in units of the whole vector.

        steps messages on the longest chain in which each waits for the one before it, as what a
        rank sends on a channel waits for what comes there in earlier rounds; sent_max most that a
        rank sends; sent_total all ranks together; reduced_max most that a rank combines;
        internode_sent_max most that a node sends to others; messages_max most messages of a rank.
        """
        return dict(self._core.cost())

    def lowered(self, rank: int, order: str = "any") -> list[list[dict[str, Any]]]:
        """The steps that `rank` runs, a list for each channel; order="rank" for the program that
        sums in rank order. Raises ValueError for another rank or order than there is.
        """
        if order not in ("any", "rank"):
            raise ValueError(f"order must be 'any' or 'rank', not {order!r}")
        return list(self._core.lowered(_whole(rank, "rank"), order))

    def draw(self, format: str = "text") -> str:
        """A step diagram: "text" (rounds by ranks) or "svg"."""
        from .drawing import draw

        if not isinstance(format, str):
            raise TypeError(f"format must be 'text' or 'svg', not {format!r}")
        return draw(self, format)

    def __repr__(self) -> str:
        what = f"{self.algorithm}: {self.collective} over {self.nranks} ranks"
        return f"<schedule {what}, {len(self.rounds)} rounds, {self.nchunks} chunks>"


__all__ = [
    "AlgorithmInfo",
    "Schedule",
    "ScheduleError",
    "Transfer",
    "algorithm",
    "algorithms",
    "schedule",
    "unregister",
    "why_unsupported",
]
