"""Arrays on GPUs between nodes of several GPUs each: within a node from GPU to GPU, between nodes
along rails.

Rail k is the k-th rank of each node. A call is put on the caller's stream as kernels of the engine
within the node, and staged calls of the rail between them, which carry a rank's share only
(`rail_plan.py`). Before all that, in the turn of the whole communicator, all ranks agree that they
are in this very call: so a mismatch is told as anywhere, and nothing is written. If anything fails,
what is behind it on the stream does nothing (csrc/staging.hpp).

In windows: while one is on the network, on a stream of its own, the next is combined within the
node.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from . import _core
from .bootstrap import Bootstrap, ask, host_key
from .device import DeviceEngine
from .device_memory import NoSymmetricMemory
from .errors import AbortedError, CollectiveError, DeadlineError, MismatchError, PeerDiedError
from .rail_plan import Part, Place, Whole, Window, place_of, scratch_bytes, windows
from .schedule import is_written, schedule
from .straight import End
from .tuning.device import device_algorithm
from .tuning.rails import NEAR, Parts, why_not_placed

if TYPE_CHECKING:
    from ._core import Communicator as Core
    from .communicator import Communicator

# Makes the communicator of some ranks; collective over them.
MakePart = Callable[[Sequence[int], str], "Communicator"]

_NUMBER = {name: i for i, name in enumerate(_core.collectives)}
_SUM, _AVG, _PREMUL = (_core.ops.index(op) for op in ("sum", "avg", "premul_sum"))
_ITEMSIZES = [_core.itemsizes[name] for name in _core.dtypes]

# What ends the use of all ranks' communicator on GPUs, on whichever rank it is found.
_FATAL = (AbortedError, DeadlineError, MismatchError, PeerDiedError)


class Given(NamedTuple):
    """What rails are made of.

    bootstrap   of all ranks
    host        this rank's end on the host
    staging     its staged calls, in slices of `slot_bytes`
    device      ordinal of its GPU
    max_blocks  its bound for thread blocks
    path        COLLECTIVES_GPU_PATH
    """

    bootstrap: Bootstrap
    host: Core
    staging: _core.Staging
    slot_bytes: int
    device: int
    max_blocks: int
    path: str


def make_rails(given: Given, nodes: Sequence[int], part: MakePart) -> tuple[Rails | None, str]:
    """The rails of ranks on these nodes, or why they have none, alike on all ranks. Collective."""
    why = why_not_placed(nodes)
    if why:
        return None, why
    bootstrap = given.bootstrap
    mine = [host_key(), os.getpid(), given.device]
    about = {"where": mine, "bound": given.max_blocks, "path": given.path}
    infos = ask(bootstrap, about)
    if any(info["path"] == "host" for info in infos):
        return None, "COLLECTIVES_GPU_PATH=host keeps GPUs from reaching each other"
    bound = min((info["bound"] for info in infos if info["bound"]), default=0)
    place = place_of(nodes, bootstrap.rank)
    members = place.members[place.node]
    near_comm, rail_comm = part(members, "near"), part(place.rail, "rail")
    near, room = None, 0

    def make() -> None:
        nonlocal near, why
        try:
            near = DeviceEngine(
                near_comm._bootstrap,
                near_comm._core,
                [0] * len(members),
                given.device,
                bound,
                "direct",
                sharing=sum(info["where"] == mine for info in infos),
            )
        except CollectiveError as error:  # the others are told, rather than left to wait
            why = str(error)

    # What one node's ranks allocate would wait for another's kernels on the same GPU, which wait
    # for ranks that this holds up: nodes of one process, as threads make them, come in turn.
    processes = {tuple(info["where"][:2]) for info in infos}
    homes = {(*info["where"][:2], node) for info, node in zip(infos, nodes, strict=True)}
    turns = [place.node] if len(homes) == len(processes) else range(len(place.members))
    for node in turns:
        if node == place.node:
            make()
        ask(bootstrap, {})
    if near is not None:
        near_comm._device = near
        near.memory = NoSymmetricMemory()  # in no cycle: it is freed where this is dropped
        try:
            room = given.staging.make_scratch(scratch_bytes(given.slot_bytes, bootstrap.size))
        except CollectiveError as error:
            why = str(error)
    answers = ask(bootstrap, {"why": why})
    why = "; ".join(f"rank {r}: {a['why']}" for r, a in enumerate(answers) if a["why"])
    if near is None or why:
        near_comm.close()
        rail_comm.close()
        given.staging.make_scratch(0)
        return None, f"the GPUs of a node do not reach each other ({why})"
    given.staging.join(near.core, rail_comm._core, place.rail)
    return Rails(given, place, near, (near_comm, rail_comm), room), ""


class Rails:
    """What of a rank's calls goes along rails.

    near   its GPU's end within the node
    comms  of the ranks of its node, which only serves `near`, and of its rail
    room   address of scratch memory
    """

    def __init__(
        self,
        given: Given,
        place: Place,
        near: DeviceEngine,
        comms: tuple[Communicator, Communicator],
        room: int,
    ) -> None:
        self.near = near
        self.place = place
        self._given = given
        self._near_comm, self._rail_comm = comms
        self._room = room
        self._side = _core.SideStream(given.device)
        self._last: tuple[int, _core.Mark] | None = None  # the stream of the last call, its end

    def run(
        self,
        arguments: tuple[Any, ...],
        number: int,
        nbytes: int,
        parts: Parts,
        stream: int,
        *,
        beside: bool = False,
    ) -> None:
        """Puts a call of `nbytes` bytes, not in rank order, on a stream.

        arguments  as the core takes them
        number     the core's of the algorithm that all ranks agree on
        parts      the algorithms of the two levels

        Raises what an earlier call, or a peer, told; UnsupportedError while `stream` is captured.
        """
        self.check()
        given, collective = self._given, _core.collectives[arguments[0]]
        if self._last is not None and self._last[0] != stream:
            given.staging.refuse_capture(stream)
            self._last[1].hold(stream)  # calls of one rank follow each other
        agreed = (*arguments[:9], number, *arguments[10:])
        given.staging.run(given.host, agreed, stream, "agreement")
        call = Whole(
            collective,
            source=arguments[4],
            target=arguments[5],
            elements=arguments[6],
            blocks=arguments[7] if arguments[7] is not None else arguments[8],
            root=arguments[3],
            item=_ITEMSIZES[arguments[1]],
        )
        rail = parts.rail or self._rail_comm._tuner.choose(
            collective, min(nbytes // self.near_size, given.slot_bytes)
        )
        wanted = NEAR[collective]

        def combine(some: list[Part]) -> None:
            for one in some:
                if one.nbytes:
                    forced = parts.near if one.collective in wanted else None
                    self._put_near(one, arguments, forced, stream, beside)

        planned = list(windows(call, self.place, given.slot_bytes, self._room))
        before: tuple[Window, _core.Mark] | None = None
        for window in planned:
            combine(window.before)
            if len(planned) == 1:  # nothing to overlap with
                self._put_on_rail(window.rail, arguments, rail, stream)
                combine(window.after)
                break
            self._side.begin(stream)
            self._put_on_rail(window.rail, arguments, rail, self._side.handle)
            if before is not None:
                before[1].hold(stream)
                combine(before[0].after)
            before = window, self._side.end()
        if before is not None:
            before[1].hold(stream)
            combine(before[0].after)
        self._last = stream, self._side.mark(stream)

    @property
    def end(self) -> End:
        """This rank's end of its rail."""
        return End(self._rail_comm._bootstrap, self._rail_comm._core)

    @property
    def near_size(self) -> int:
        return len(self.place.members[0])

    def _put_near(
        self, one: Part, arguments: tuple[Any, ...], forced: str | None, stream: int, beside: bool
    ) -> None:
        """Sums of avg are divided on the rail, and factors multiply what each rank brings, here."""
        algorithm = forced or device_algorithm(one.collective, one.nbytes, self.near_size)
        if is_written(algorithm):
            written = schedule(algorithm, one.collective, self.near_size, root=one.root)
            self.near.define(algorithm, one.collective, one.root, written._core)
        op = _SUM if arguments[2] == _AVG else arguments[2]
        numbers = _numbers(one, arguments[1], op, 0, arguments[11:])
        try:
            self.near.run(numbers, algorithm, stream, one.nbytes, beside)
        except _FATAL as error:
            self._tell(error)

    def _put_on_rail(
        self, some: list[Part], arguments: tuple[Any, ...], algorithm: str, stream: int
    ) -> None:
        op = _SUM if arguments[2] == _PREMUL else arguments[2]
        for one in some:
            if one.nbytes:
                number = self._rail_comm._intern(algorithm, one.collective, one.root)
                numbers = _numbers(one, arguments[1], op, number, (1.0, 0.0))
                self._given.staging.run(self._given.host, numbers, stream, "rail")

    # ---- what goes wrong -------------------------------------------------------------------------

    def check(self) -> None:
        """Raises what the kernels within the node found, after telling all ranks."""
        try:
            self.near.core.check()
        except CollectiveError as error:
            self._tell(error)

    def idle(self) -> bool:
        """True when all kernels within the node have ended; raises as `check` does."""
        try:
            return self.near.core.idle()
        except CollectiveError as error:
            self._tell(error)

    def look_around(self) -> None:
        """Raises what other ranks told, or that one died, after ending the kernels that wait."""
        try:
            self._given.host.look_around()
        except CollectiveError as error:
            self.near.pass_on(error)
            raise

    def _tell(self, error: CollectiveError) -> NoReturn:
        """Raises what a call between the nodes found first, and is known of all ranks; else
        `error`, after telling them.
        """
        self.near.pass_on(error)
        self._given.staging.check()
        self._given.host.look_around()
        members = self.place.members[self.place.node]
        words = f"among ranks {' '.join(map(str, members))}, numbered from 0: {error}"
        self._given.host.abort(words)
        peer = None if error.peer is None else members[error.peer]
        raise type(error)(words, rank=self._given.bootstrap.rank, peer=peer) from error

    def abort(self, reason: str) -> None:
        """Ends the kernels that wait."""
        self.near.core.abort(reason)

    def close(self) -> None:
        """Ends this rank's part, once its kernels and staged calls have."""
        self._near_comm.close()
        self._rail_comm.close()


def _numbers(
    one: Part, dtype: int, op: int, algorithm: int, factor: tuple[Any, ...]
) -> tuple[Any, ...]:
    """A part as the core takes it."""
    return (
        _NUMBER[one.collective], dtype, op, one.root, one.source, one.target, one.elements,
        one.in_blocks, one.out_blocks, algorithm, 0, *factor,
    )  # fmt: skip
