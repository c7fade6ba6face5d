"""What a rank does in a call along rails: within its node, on its rail, within its node again.

    all_reduce       reduce_scatter       all_reduce       all_gather
    reduce_scatter   reduce_scatter (N)   reduce_scatter
    all_gather                            all_gather       all_gather (N)
    broadcast        broadcast (root's)   broadcast        all_gather (others)
    all_to_all       all_to_all (N)       all_to_all (L)

for N nodes of L ranks: (N) is one call for the ranks of each node, (L) one for each rank of this
one. A vector goes in windows, and so does each block. Vectors are worked on where the result goes,
so that all_reduce, all_gather and broadcast need no scratch memory; the others use two windows of
it, in turn.

Which rank is on which node does not matter: blocks are told by their places in the array.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from .tuning.rails import window_bytes

# How the core takes blocks: see parse_call in csrc/python_calls.hpp.
Spec = Any


class Place(NamedTuple):
    """Where a rank is: `members[g][k]` is local rank k of node g, and rail k has that of each g."""

    members: tuple[tuple[int, ...], ...]
    node: int
    local: int

    @property
    def rail(self) -> tuple[int, ...]:
        return tuple(ranks[self.local] for ranks in self.members)

    @property
    def size(self) -> int:
        return len(self.members) * len(self.members[0])

    def of(self, rank: int) -> tuple[int, int]:
        """Node and local rank of a rank."""
        return next((g, m.index(rank)) for g, m in enumerate(self.members) if rank in m)


def place_of(nodes: Sequence[int], rank: int) -> Place:
    """For nodes of as many ranks each."""
    numbers = list(dict.fromkeys(nodes))
    members = tuple(tuple(r for r, node in enumerate(nodes) if node == g) for g in numbers)
    node = numbers.index(nodes[rank])
    return Place(members, node, members[node].index(rank))


class Whole(NamedTuple):
    """A call of all ranks, as the core takes it, but for its algorithm and arithmetic.

    blocks  of reduce_scatter, all_gather, all_to_all: a Spec for all ranks
    item    bytes of an element
    """

    collective: str
    source: int
    target: int
    elements: int
    blocks: Spec
    root: int
    item: int


class Part(NamedTuple):
    """A call of one level; `nbytes` is its size as for any call. Blocks are of that level's
    ranks.
    """

    collective: str
    source: int
    target: int
    elements: int = 0
    in_blocks: Spec = None
    out_blocks: Spec = None
    root: int = 0
    nbytes: int = 0


class Window(NamedTuple):
    """A part of the call: calls within the node, on the rail, within the node."""

    before: list[Part]
    rail: list[Part]
    after: list[Part]


class Pieces(NamedTuple):
    """A part of each of some blocks, in elements."""

    lengths: list[int]
    offsets: list[int]

    def at(self, which: Sequence[int]) -> Pieces:
        return Pieces([self.lengths[q] for q in which], [self.offsets[q] for q in which])

    @property
    def total(self) -> int:
        return sum(self.lengths)

    def spec(self) -> tuple[int, Spec]:
        """The first element of all, and the blocks from there on."""
        first = min(self.offsets)
        offsets = [offset - first for offset in self.offsets]
        if offsets != [sum(self.lengths[:q]) for q in range(len(offsets))]:
            return first, (self.lengths, offsets)
        return first, self.lengths[0] if len(set(self.lengths)) == 1 else self.lengths


def blocks_of(spec: Spec, n: int) -> Pieces:
    """The blocks of n ranks."""
    if isinstance(spec, int):
        lengths = [spec] * n
    elif isinstance(spec, tuple):
        each, extra = divmod(spec[0], n)
        lengths = [each + (q < extra) for q in range(n)]
    else:
        lengths = list(spec)
    return Pieces(lengths, [sum(lengths[:q]) for q in range(n)])


def pieces_of(blocks: Pieces, begin: int, most: int) -> Pieces:
    """Of each block, at most `most` elements from `begin` on."""
    begins = [min(length, begin) for length in blocks.lengths]
    return Pieces(
        [min(length - b, most) for length, b in zip(blocks.lengths, begins, strict=True)],
        [offset + b for offset, b in zip(blocks.offsets, begins, strict=True)],
    )


def windows(call: Whole, place: Place, slot: int, scratch: int = 0) -> Iterator[Window]:
    """The windows of a call that `tuning.rails` sends along rails, in their order.

    slot     of the staging, in bytes
    scratch  address of two windows' memory
    """
    if call.collective in ("all_reduce", "broadcast"):
        yield from _of_vector(call, place, slot)
    else:
        yield from _of_blocks(call, place, slot, scratch)


def _of_vector(call: Whole, place: Place, slot: int) -> Iterator[Window]:
    local_size, item = len(place.members[0]), call.item
    share = -(-call.elements // local_size)
    # Shares of whole lines, but in the last window.
    line = max(1, 128 // item)
    each = -(-max(1, window_bytes(share * item, slot) // item) // line) * line
    step = each * local_size
    for begin in range(0, call.elements, step):
        length = min(step, call.elements - begin)
        source, target = call.source + begin * item, call.target + begin * item
        shares = blocks_of((length,), local_size)
        mine = shares.lengths[place.local]
        own = target + shares.offsets[place.local] * item
        blocks, nbytes = shares.spec()[1], length * item
        gathered = Part("all_gather", own, target, out_blocks=blocks, nbytes=nbytes)
        if call.collective == "all_reduce":
            yield Window(
                [Part("reduce_scatter", source, own, in_blocks=blocks, nbytes=nbytes)],
                [Part("all_reduce", own, own, mine, nbytes=mine * item)],
                [gathered],
            )
            continue
        node, local = place.of(call.root)
        at_root = node == place.node
        first = Part("broadcast", source, target, length, root=local, nbytes=nbytes)
        yield Window(
            [first] if at_root else [],
            [Part("broadcast", own, own, mine, root=node, nbytes=mine * item)],
            [] if at_root else [gathered],
        )


def _of_blocks(call: Whole, place: Place, slot: int, scratch: int) -> Iterator[Window]:
    blocks, item = blocks_of(call.blocks, place.size), call.item
    nnodes, longest = len(place.members), max(blocks.lengths)
    # What lies in a window on this rank's rail, of each block.
    width = (place.size if call.collective == "all_to_all" else nnodes) * item
    most = max(1, window_bytes(longest * width, slot) // width)
    own = place.members[place.node][place.local]
    for i, begin in enumerate(range(0, longest, most)):
        pieces = pieces_of(blocks, begin, most)
        skipped = (pieces.offsets[own] - blocks.offsets[own]) * item
        room = scratch + i % 2 * scratch_bytes(slot, place.size, item) // 2
        if call.collective == "reduce_scatter":
            yield _scatter(call, place, pieces, room, call.target + skipped)
        elif call.collective == "all_gather":
            yield _gather(call, place, pieces, call.source + skipped)
        else:
            yield _exchange(call, place, pieces, room)


def scratch_bytes(slot: int, nranks: int, item: int = 16) -> int:
    """Bytes of two windows: of one element of each block at least, and of whole lines."""
    each = max(window_bytes(1 << 62, slot), nranks * item)
    return 2 * (-(-each // 128) * 128)


def _scatter(call: Whole, place: Place, pieces: Pieces, room: int, target: int) -> Window:
    near, at = [], room
    for members in place.members:
        of_node = pieces.at(members)
        first, spec = of_node.spec()
        source = call.source + first * call.item
        nbytes = of_node.total * call.item
        near.append(Part("reduce_scatter", source, at, in_blocks=spec, nbytes=nbytes))
        at += of_node.lengths[place.local] * call.item
    mine = Pieces(pieces.at(place.rail).lengths, [])
    spec = _packed(mine.lengths)
    nbytes = mine.total * call.item
    return Window(near, [Part("reduce_scatter", room, target, in_blocks=spec, nbytes=nbytes)], [])


def _gather(call: Whole, place: Place, pieces: Pieces, source: int) -> Window:
    of_rail = pieces.at(place.rail)
    first, spec = of_rail.spec()
    target = call.target + first * call.item
    nbytes = of_rail.total * call.item
    rail = Part("all_gather", source, target, out_blocks=spec, nbytes=nbytes)
    near = []
    for members in place.members:
        of_node = pieces.at(members)
        first, spec = of_node.spec()
        own = call.target + of_node.offsets[place.local] * call.item
        target = call.target + first * call.item
        nbytes = of_node.total * call.item
        near.append(Part("all_gather", own, target, out_blocks=spec, nbytes=nbytes))
    return Window([], [rail], near)


def _exchange(call: Whole, place: Place, pieces: Pieces, room: int) -> Window:
    """Every block is as long. In `room`: what each rank of this node sends along this rail, by
    rank, and for each by node.
    """
    nnodes, local_size = len(place.members), len(place.members[0])
    length = pieces.lengths[0]
    nbytes = length * call.item
    near, rail = [], []
    for g, members in enumerate(place.members):
        first, spec = pieces.at(members).spec()
        into = Pieces([length] * local_size, [k * nnodes * length for k in range(local_size)])
        near.append(
            Part(
                "all_to_all",
                call.source + first * call.item,
                room + g * nbytes,
                in_blocks=spec,
                out_blocks=into.spec()[1],
                nbytes=local_size * nbytes,
            )
        )
    for k in range(local_size):
        first, spec = pieces.at([members[k] for members in place.members]).spec()
        rail.append(
            Part(
                "all_to_all",
                room + k * nnodes * nbytes,
                call.target + first * call.item,
                in_blocks=length,
                out_blocks=spec,
                nbytes=nnodes * nbytes,
            )
        )
    return Window(near, rail, [])


def _packed(lengths: list[int]) -> Spec:
    return lengths[0] if len(set(lengths)) == 1 else lengths
