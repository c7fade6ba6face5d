"""Why an algorithm runs for a call, what else could, and what each is expected to take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..config import DEFAULT_STAGING, checked_bytes, format_size
from ..errors import ScheduleError, UnsupportedError
from ..schedule import algorithms, schedule
from ..words import counted, size_words
from . import ANY_SIZE, Tuner, model
from .device import BY_COPIES, WAYS, device_algorithm, device_launch
from .rails import NEAR, Between, parts_of, why_not_placed, why_staged

# Schedules are worked out message by message, and all_to_all has one for each pair of ranks: 5 s
# and 0.6 GB for 512 ranks, 31 s and 4.4 GB for 1024.
MOST_RANKS = 512


class Candidate(NamedTuple):
    """An algorithm that could serve a call; times in seconds, None where not known.

    sent is the most that a rank sends, between the most that a node sends to others, in bytes; way
    names how the algorithm goes about it, where it has several.
    """

    algorithm: str
    predicted: float | None
    measured: float | None
    steps: int
    sent: float
    between: float
    way: str = ""


def candidates(
    collective: str,
    nbytes: int,
    nodes: Sequence[int],
    transport: str,
    *,
    tuner: Tuner,
    root: int = 0,
    cores: int | None = None,
    measured: Mapping[str, float] | None = None,
) -> tuple[list[Candidate], dict[str, ScheduleError]]:
    """All algorithms that can serve the call, the fastest first: as measured, else as predicted.
    And why each that is broken cannot.
    """
    n = len(nodes)
    found: list[Candidate] = []
    broken: dict[str, ScheduleError] = {}
    node = list(nodes) if len(set(nodes)) > 1 else []
    for name in tuner.candidates(collective, root):
        try:
            cost = schedule(name, collective, n, root=root, node=node).cost()
        except ScheduleError as error:
            broken[name] = error
            continue
        predicted = model.predict(
            name,
            collective,
            nbytes,
            nodes,
            transport,
            root=root,
            cores=cores,
            figures=tuner.measured.figures if tuner.measured is not None else None,
        )
        found.append(
            Candidate(
                name,
                predicted,
                (measured or {}).get(name),
                int(cost["steps"]),
                cost["sent_max"] * nbytes,
                cost["internode_sent_max"] * nbytes,
                tuner.way(name, collective, nbytes),
            )
        )
    unknown = float("inf")
    found.sort(
        key=lambda c: (
            c.measured if c.measured is not None else unknown,
            c.predicted if c.predicted is not None else unknown,
        )
    )
    return found, broken


_BARRIER = (
    "runs     no algorithm",
    "why      the check that all ranks have entered the same call is a barrier already",
)
_OTHERS = "What others take, where algorithm= asks for them:"


def explain(
    collective: str,
    nbytes: int,
    nodes: Sequence[int],
    *,
    one_region: bool,
    tuner: Tuner,
    transport: str | None = None,
    cores: int | None = None,
    dtype: str | None = None,
    measured: Mapping[str, float] | None = None,
    without: Mapping[str, str] | None = None,
    between: Between | None = None,
) -> str:
    """What would run for a call of `nbytes`, why, and what it and the others are expected to take.

    nodes       node of each rank
    one_region  True if all ranks share memory
    tuner       what chooses
    transport   "threads", "shm", "mpi" or "shm+mpi"; found from `nodes` and `one_region` otherwise;
                "cuda" for arrays on GPUs
    cores       that the ranks of a node share; None: each has one of its own
    dtype       of the elements, to be named
    measured    seconds by algorithm, to be shown beside; otherwise those of the measured table
    without     algorithms that were not measured, and why
    between     how arrays on GPUs go between nodes, where that is known
    """
    n = len(nodes)
    if not isinstance(collective, str):
        raise TypeError(f"collective must be a name such as 'all_reduce', not {collective!r}")
    algorithms(collective)  # raises ValueError where there is no such collective
    nbytes = checked_bytes(nbytes, "nbytes") if collective != "barrier" else 0
    if nbytes > ANY_SIZE:
        raise ValueError(f"nbytes is {nbytes}, more than any call can have (2^64 - 1)")
    if transport is None:
        alone = len(set(nodes)) == n
        transport = "self" if n == 1 else "shm" if one_region else "mpi" if alone else "shm+mpi"
    if measured is None and tuner.measured is not None:
        measured = tuner.measured.times(collective, nbytes) or None
    forced = tuner.rule(collective, nbytes) is not None
    choice = tuner.choose(collective, nbytes)
    elements = f" of {dtype}" if dtype and collective != "barrier" else ""
    lines = [
        f"{collective} of {size_words(nbytes)}{elements}, {_ranks(nodes)}, over {transport}",
        "",
    ]
    if n == 1:
        return "\n".join([*lines, "One rank: nothing is sent."])
    found: list[Candidate] = []
    broken: dict[str, ScheduleError] = {}
    if n <= MOST_RANKS:
        found, broken = candidates(
            collective, nbytes, nodes, transport, tuner=tuner, cores=cores, measured=measured
        )
    if choice in broken:
        raise broken[choice]
    left_out = {**broken, **(without or {})}
    notes = [f"note: without {name}: {why}" for name, why in left_out.items()]
    if collective == "barrier" and not forced:
        others = ["", _OTHERS, "", *_ranking(found, "", measured is not None)] if found else []
        others += notes
        return "\n".join([*lines, *_BARRIER, *others])
    mine = next((c for c in found if c.algorithm == choice), None)
    if mine is None and n <= MOST_RANKS:
        raise UnsupportedError(f"{choice} cannot do {collective} with these {n} ranks")
    about = {a.name: a for a in algorithms()}
    info = about.get(choice.partition("(")[0])
    lines.append(f"runs     {choice}")
    lines.append(f"why      {tuner.reason(collective, nbytes)}")
    if info is not None:
        lines.append(f"how      {info.summary}")
    if mine is not None and mine.way:
        lines.append(f"way      {mine.way}: {WAYS[mine.way]}")
        if device_launch(choice, collective, nbytes, n, beside=True).copies:
            lines.append(f"beside   a stream that computes: {BY_COPIES}")
    if mine is not None:
        lines.append(f"costs    {_cost(mine)}")
    lines.append(f"by size  {_table(tuner, collective)}")
    if len(set(nodes)) > 1:
        lines.append(f"on GPUs  {_on_gpus(collective, nbytes, nodes, tuner, between)}")
    if mine is None:
        sized = "" if collective == "barrier" else f" --bytes {format_size(max(1, nbytes))}"
        return "\n".join(
            [
                *lines,
                "",
                f"Costs and times are worked out for up to {MOST_RANKS} ranks. What larger "
                "machines take, by the links that they have:",
                f"python -m collectives simulate {collective} --topology dgx-h100 --nodes "
                f"{-(-n // 8)}{sized}",
            ]
        )
    lines += ["", *_ranking(found, choice, measured is not None), *notes]
    fastest = found[0]
    known = fastest.measured if measured else fastest.predicted
    own = mine.measured if measured else mine.predicted
    if fastest.algorithm != choice and known and own and own > 1.1 * known:
        where = "at another size" if tuner.is_measured(collective, nbytes) else "elsewhere"
        origin = "is forced" if forced else f"was measured {where}"
        how = "as measured" if measured else f"as predicted; what is chosen {origin}"
        lines += [
            "",
            f"{fastest.algorithm} is {own / known:.1f}x faster here ({how}). To force it:",
            f"COLLECTIVES_ALGORITHM='{collective}:{fastest.algorithm}', or algorithm= in the call.",
        ]
    return "\n".join(lines)


def _on_gpus(
    collective: str, nbytes: int, nodes: Sequence[int], tuner: Tuner, between: Between | None
) -> str:
    """How a call on arrays on GPUs goes between nodes."""
    no_rails = between.why_no_rails if between is not None else ""
    rule = tuner.rule(collective, nbytes)
    asked = rule.algorithm if rule is not None else None
    why = no_rails or why_not_placed(nodes) or why_staged(collective, nbytes, asked, None)
    if why:
        return f"whole arrays {_through(nbytes, between)}, by the same algorithm: {why}"
    parts = parts_of(asked or "hierarchical")
    assert parts is not None, "all others are staged"
    nnodes = len(set(nodes))
    size = len(nodes) // nnodes
    near = parts.near or device_algorithm(NEAR[collective][0], nbytes, size)
    rail = parts.rail or Tuner(list(range(nnodes)), one_region=False).choose(
        collective, min(nbytes // size, DEFAULT_STAGING)
    )
    return (
        f"along rails: {near} from GPU to GPU within nodes, {rail} between them "
        f"{_through(nbytes // size, between)}"
    )


def _through(nbytes: int, between: Between | None) -> str:
    if between is None:
        return "through memory of the host, or straight to an MPI that is CUDA-aware"
    straight = between.straight
    if not straight.why_not and nbytes >= straight.from_bytes:
        return "by MPI, out of memory of the GPUs and into it"
    why = straight.why_not or f"calls below {size_words(straight.from_bytes)} take less time so"
    return f"through memory of the host ({why})"


def _ranking(found: Sequence[Candidate], choice: str, with_measured: bool) -> list[str]:
    between = any(c.between for c in found)
    ways = any(c.way for c in found)
    titles = ["algorithm", "way", "predicted", "measured"]
    titles += ["steps", "sent per rank", "between nodes"]
    shown = [True, ways, True, with_measured, True, True, between]
    rows = [titles]
    for c in found:
        rows.append(
            [
                c.algorithm,
                c.way,
                _time(c.predicted),
                _time(c.measured),
                str(c.steps),
                _amount(c.sent),
                _amount(c.between),
            ]
        )
    rows = [[cell for cell, use in zip(row, shown, strict=True) if use] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        first = f"{row[0]:{widths[0]}}"
        rest = "".join(f"  {cell:>{w}}" for cell, w in zip(row[1:], widths[1:], strict=True))
        lines.append(f"{'>' if row[0] == choice else ' '} {first}{rest}")
    return lines


def _cost(c: Candidate) -> str:
    words = f"{counted(c.steps, 'step')}, {_amount(c.sent)} sent by a rank"
    if c.between:
        words += f", {_amount(c.between)} by a node to others"
    if c.predicted is not None:
        words += f"; {_time(c.predicted)} predicted"
    return words


def _table(tuner: Tuner, collective: str) -> str:
    table = tuner.table(collective)
    if len(table) == 1:
        return f"{table[0].algorithm} at every size"
    parts = []
    for choice in table:
        if choice.limit >= ANY_SIZE:
            parts.append(f"{choice.algorithm} above")
        else:
            parts.append(f"{choice.algorithm} up to {size_words(choice.limit)}")
    return ", ".join(parts)


def _ranks(nodes: Sequence[int]) -> str:
    counts = list(Counter(nodes).values())
    words = f"{counted(len(nodes), 'rank')} on {counted(len(counts), 'node')}"
    if len(counts) > 1:
        each = f"{counts[0]} each" if len(set(counts)) == 1 else " + ".join(map(str, counts))
        words += f" ({each})"
    return words


def _amount(nbytes: float) -> str:
    nbytes = round(nbytes, 3)  # 1 MiB, not 1024 KiB, where thirds of it are added up
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            break
        nbytes /= 1024
    return (
        f"{nbytes:.0f} {unit}" if nbytes >= 100 or nbytes == int(nbytes) else f"{nbytes:.1f} {unit}"
    )


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for factor, unit in ((1e6, "us"), (1e3, "ms"), (1.0, "s")):
        value = seconds * factor
        if value < 1000 or unit == "s":
            break
    return f"{value:.2f} {unit}" if value < 10 else f"{value:.1f} {unit}"
