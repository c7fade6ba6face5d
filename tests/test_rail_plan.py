"""What ranks do in calls along rails, played with numbers: the parts of all ranks, each in memory
of its own, give what the call is to give, whatever the placement, the blocks and the windows' size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from collectives.config import Settings
from collectives.rail_plan import (
    Part,
    Pieces,
    Place,
    Whole,
    blocks_of,
    place_of,
    scratch_bytes,
    windows,
)
from collectives.tuning import Tuner
from collectives.tuning.explain import explain
from collectives.tuning.rails import (
    NEAR,
    RAILS_FROM,
    Between,
    Straight,
    parts_of,
    why_not_placed,
    why_staged,
    window_bytes,
)

ITEM = 8
PLACEMENTS = [
    [0, 0, 1, 1],
    [0, 1, 0, 1],
    [0, 1, 1, 0],
    [0, 0, 0, 1, 1, 1],
    [0, 1, 2, 2, 1, 0],
    [1, 0, 0, 0, 1, 1, 1, 0],
]
# With blocks of any length; all_to_all has equal ones.
BLOCKED = ("reduce_scatter", "all_gather")
Memory = np.ndarray[Any, Any]


def pieces(spec: Any, n: int) -> Pieces:
    """Blocks as the core reads them."""
    if isinstance(spec, tuple) and len(spec) == 2:
        return Pieces(*spec)
    return blocks_of(spec, n)


def play(parts: list[Part], memories: list[Memory]) -> None:
    """One call of a level, made by the ranks that have these memories."""
    n, first = len(parts), parts[0]
    assert {(p.collective, p.elements, p.root, p.nbytes) for p in parts} == {
        (first.collective, first.elements, first.root, first.nbytes)
    }
    ins = [pieces(p.in_blocks, n) for p in parts if p.in_blocks is not None]
    outs = [pieces(p.out_blocks, n) for p in parts if p.out_blocks is not None]
    # What the ranks agree on: the lengths; and what a call of such a size is to be.
    for blocks in (*ins, *outs):
        assert blocks.lengths == (ins or outs)[0].lengths
        assert sum(blocks.lengths) * ITEM == first.nbytes
    assert first.elements * ITEM in (0, first.nbytes)

    def read(r: int, offset: int, length: int) -> Memory:
        at = parts[r].source // ITEM + offset
        return memories[r][at : at + length].copy()

    def write(r: int, offset: int, values: Memory) -> None:
        at = parts[r].target // ITEM + offset
        memories[r][at : at + len(values)] = values

    if first.collective in ("all_reduce", "broadcast"):
        given = [read(r, 0, first.elements) for r in range(n)]
        got = sum(given) if first.collective == "all_reduce" else given[first.root]
        for r in range(n):
            write(r, 0, np.asarray(got))
    elif first.collective == "reduce_scatter":
        for r in range(n):
            given = [read(q, ins[q].offsets[r], ins[q].lengths[r]) for q in range(n)]
            write(r, 0, np.asarray(sum(given)))
    elif first.collective == "all_gather":
        given = [read(q, 0, outs[q].lengths[q]) for q in range(n)]
        for r in range(n):
            for q in range(n):
                write(r, outs[r].offsets[q], given[q])
    else:
        moved = [
            [read(q, ins[q].offsets[r], ins[q].lengths[r]) for r in range(n)] for q in range(n)
        ]
        for r in range(n):
            for q in range(n):
                write(r, outs[r].offsets[q], moved[q][r])


def play_all(
    calls: list[Whole], places: list[Place], slot: int, scratch: int, memories: Any
) -> int:
    """The call of all ranks, window by window; how many windows there were."""
    planned = [list(windows(c, p, slot, scratch)) for c, p in zip(calls, places, strict=True)]
    nodes = [list(members) for members in places[0].members]
    rails = [list(ranks) for ranks in zip(*nodes, strict=True)]
    assert len({len(of_rank) for of_rank in planned}) == 1
    for i in range(len(planned[0])):
        for groups, level in ((nodes, 0), (rails, 1), (nodes, 2)):
            for group in groups:
                for parts in zip(*(planned[r][i][level] for r in group), strict=True):
                    play(list(parts), [memories[r] for r in group])
    return len(planned[0])


def lengths_for(kind: str, count: int, n: int) -> tuple[Any, list[int]]:
    """How a rank passes blocks, and their lengths."""
    if kind == "uneven":
        rng = np.random.default_rng(count)
        cuts = np.sort(rng.integers(0, count + 1, n - 1))
        lengths = [int(c) for c in np.diff([0, *cuts, count])]
        return lengths, lengths
    if kind == "split":
        return (count,), blocks_of((count,), n).lengths
    return -(-count // n), [-(-count // n)] * n


@pytest.mark.parametrize("nodes", PLACEMENTS, ids=str)
@pytest.mark.parametrize("collective", list(NEAR))
def test_calls_along_rails(collective: str, nodes: list[int]) -> None:
    n = len(nodes)
    places = [place_of(nodes, r) for r in range(n)]
    most = 0
    kinds = ("equal", "split", "uneven") if collective in BLOCKED else ("equal",)
    for slot, count in ((64, 1), (64, 2), (64, 17), (256, 1001), (1 << 20, 1001)):
        for kind in kinds:
            for in_place in (False, True):
                most = max(most, one(collective, places, slot, count, kind, in_place))
    assert most > 3  # several windows take turns in the scratch memory


def one(
    collective: str, places: list[Place], slot: int, count: int, kind: str, in_place: bool
) -> int:
    n = len(places)
    spec, lengths = lengths_for(kind, count, n)
    whole = sum(lengths)
    starts = [sum(lengths[:r]) for r in range(n)]
    vector = collective in ("all_reduce", "broadcast")
    x_size = [count] * n if vector else lengths if collective == "all_gather" else [whole] * n
    out_size = [count] * n if vector else lengths if collective == "reduce_scatter" else [whole] * n
    scratch = 4 * (whole + count) + 64
    rng = np.random.default_rng([count, n])
    memories, calls, given = [], [], []
    for r in range(n):
        memory = np.full(scratch + scratch_bytes(slot, n, ITEM) // ITEM, -1, np.int64)
        x, out = 8, 8 + 2 * whole + count + 8
        if in_place:  # this rank's block of the longer array, or the same
            out = x + starts[r] if collective == "reduce_scatter" else x
            x = x + starts[r] if collective == "all_gather" else x
        memory[x : x + x_size[r]] = rng.integers(0, 1 << 30, x_size[r])
        given.append(memory[x : x + x_size[r]].copy())
        memories.append(memory)
        root = n - 1
        calls.append(Whole(collective, x * ITEM, out * ITEM, count, spec, root, ITEM))
    before = [memory.copy() for memory in memories]
    found = play_all(calls, places, slot, scratch * ITEM, memories)
    total = sum(given) if collective in ("all_reduce", "reduce_scatter") else np.zeros(0)
    for r in range(n):
        if collective == "all_reduce":
            wanted = total
        elif collective == "broadcast":
            wanted = given[n - 1]
        elif collective == "reduce_scatter":
            wanted = total[starts[r] : starts[r] + lengths[r]]
        elif collective == "all_gather":
            wanted = np.concatenate(given)
        else:
            wanted = np.concatenate([g[starts[r] : starts[r] + lengths[r]] for g in given])
        out = calls[r].target // ITEM
        words = f"{collective} {places[r]} {slot} {count} {kind} {in_place}"
        assert (memories[r][out : out + out_size[r]] == wanted).all(), words
        # Nothing else has changed, but scratch memory.
        before[r][out : out + out_size[r]] = wanted
        assert (memories[r][:scratch] == before[r][:scratch]).all(), words
    return found


def test_what_goes_along_rails() -> None:
    assert why_staged("all_reduce", 64 << 20, None, None) == ""
    assert why_staged("all_reduce", RAILS_FROM - 1, None, None)
    assert why_staged("all_reduce", 4, "hierarchical(ring, ring)", None) == ""
    assert "composition" in why_staged("all_reduce", 64 << 20, "ring", None)
    assert "rank" in why_staged("all_reduce", 64 << 20, None, "rank")
    assert "gather does not" in why_staged("gather", 64 << 20, None, None)
    assert why_staged("all_to_all", 64 << 20, "hierarchical(direct_two_shot, ring)", None) == ""
    assert "not by ring" in why_staged("all_to_all", 64 << 20, "hierarchical(ring, ring)", None)
    assert why_staged("all_to_all", 1 << 62, None, None) and why_staged("all_reduce", 0, None, None)
    assert parts_of("hierarchical(ring, pat)") == ("ring", "pat")
    assert parts_of("hierarchical( ring,pat )") == ("ring", "pat")
    assert parts_of("hierarchical") == (None, None) and parts_of("ring") is None
    for nodes, words in (
        ([0, 0, 0, 1, 1, 2], "different numbers"),
        ([0, 1, 2], "node of its own"),
        ([0, 0], "one node"),
        ([0, 1, 0, 1], ""),
    ):
        assert (words in why_not_placed(nodes)) and bool(words) == bool(why_not_placed(nodes))


@pytest.mark.parametrize(
    ("nodes", "nbytes", "rules", "words"),
    [
        ([0, 0, 1, 1], 1 << 20, "", "along rails: direct_one_shot from GPU to GPU within nodes"),
        ([0, 0, 1, 1], 1 << 20, "all_reduce:ring", "ring is no composition"),
        ([0, 0, 1, 1], 64, "all_reduce:hierarchical(ring, ring)", "along rails: ring from GPU"),
        ([0, 0, 1, 1], 64, "", "calls below 128 KiB"),
        ([0, 0, 0, 1], 1 << 20, "", "different numbers of ranks"),
        ([0, 1], 1 << 20, "", "each rank is on a node of its own"),
    ],
)
def test_explain_says_how_arrays_on_gpus_go(
    nodes: list[int], nbytes: int, rules: str, words: str
) -> None:
    settings = Settings({"COLLECTIVES_ALGORITHM": rules})
    tuner = Tuner(nodes, one_region=False, rules=settings.algorithm)
    told = explain("all_reduce", nbytes, nodes, one_region=False, tuner=tuner)
    (line,) = [line for line in told.splitlines() if line.startswith("on GPUs")]
    assert words in line


@pytest.mark.parametrize(
    ("straight", "nbytes", "words"),
    [
        (None, 1 << 20, "through memory of the host, or straight to an MPI that is CUDA-aware"),
        (Straight(""), 1 << 20, "by MPI, out of memory of the GPUs and into it"),
        (Straight(""), 1000, "(calls below 32 KiB take less time so)"),
        (Straight("", 1 << 20), (2 << 20) - 1, {2: "by MPI", 4: "through memory of the host"}),
        (Straight("", 0), 1000, "by MPI, out of memory of the GPUs and into it"),
        (Straight("of this"), 1 << 20, "through memory of the host (of this)"),
    ],
)
@pytest.mark.parametrize("nodes", [[0, 1], [0, 0, 1, 1]], ids=str)
def test_explain_says_whether_mpi_takes_arrays_on_gpus(
    nodes: list[int], straight: Straight | None, nbytes: int, words: str | dict[int, str]
) -> None:
    """Along rails the part of one counts."""
    words = words[len(nodes)] if isinstance(words, dict) else words
    tuner = Tuner(nodes, one_region=False)
    between = None if straight is None else Between("", straight)
    told = explain("all_reduce", nbytes, nodes, one_region=False, tuner=tuner, between=between)
    (line,) = [line for line in told.splitlines() if line.startswith("on GPUs")]
    assert words in line


def test_windows_are_bounded() -> None:
    assert window_bytes(1 << 40, 8 << 20) == 32 << 20
    assert window_bytes(1 << 20, 8 << 20) == 8 << 20
    assert window_bytes(64 << 20, 8 << 20) == 16 << 20
