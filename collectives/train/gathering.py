"""Parameters on demand, for stage 3: gathered when a bucket is needed, the next one fetched ahead,
released after use.

All ranks must launch the same gathers in the same order. In the first pass they compare before each
one. Later passes follow the order of the first; a rank that departs from it compares again, which
the others, if they do not depart too, answer with a MismatchError instead of other parameters. In a
step in which some rank has no data all compare: that rank cannot know what the others depart from.

Where ranks may lack gradients (`find_unused`) they may differ in what they need, or in its order:
they compare in every pass, and who needs something else first takes part for the others.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from ..array import empty
from ..errors import DeadlineError, MismatchError, described
from ..side_stream import SideStreams
from ..tuning.device import BLOCKS_BESIDE
from .sharding import Shard, Store

if TYPE_CHECKING:
    from ..bucketing import Bucketer
    from ..communicator import Communicator
    from ..work import Work

_IDLE = 2  # buckets that stay without being pinned: the current one and the one before
_END = 1 << 40
_APART = (
    "under sharding=3 with find_unused=True a call in forward that all ranks wait in, such as that "
    "of SyncBatchNorm, never ends behind parameters that only some ranks use: use them on all "
    "ranks, times zero where they do not count, or train with sharding=2"
)
KEPT = "kept"  # pins what stays to the end of the pass, whoever uses it
_T = TypeVar("_T")


class Memory(Protocol):
    """Where gathered parameters lie."""

    def take(self, shard: Shard) -> Any:
        """Memory for a bucket, as the array that an all_gather writes."""

    def give(self, shard: Shard) -> None:
        """It is needed no more."""

    def stream(self) -> AbstractContextManager[None]:
        """In this block what cupy does is ordered with what uses the memory."""


def ranks_of_gathers(comm: Communicator, devices: set[str]) -> Communicator:
    """A communicator of the same ranks for gathers onto these devices. Collective."""
    # All its calls on GPUs are beside a stream that computes: more thread blocks, and the memory
    # of more, would lie idle.
    most = min(comm.max_blocks or BLOCKS_BESIDE, BLOCKS_BESIDE)
    gathers = comm.duplicate(max_blocks=most)
    # The first call on a GPU allocates, which may wait for kernels that wait for this rank.
    for device in devices - {"cpu"}:
        gathers.all_reduce(empty((1,), "float32", device))
    return gathers


class Gatherer:
    """Buckets of parameters that come and go. One pass is a forward and a backward.

    comm      of the ranks that share; for gathers alone, beside the reductions of gradients
    bucketer  of the gradients of what is gathered
    """

    def __init__(
        self, comm: Communicator, store: Store, memory: Memory, bucketer: Bucketer
    ) -> None:
        self._comm = comm
        self._bucketer = bucketer
        self._store = store
        self._memory = memory
        self._side = SideStreams()
        self._works: dict[int, Work] = {}  # under way
        self._resident: OrderedDict[int, None] = OrderedDict()  # the latest used last
        # What must not be released, and for whom.
        self.pins: defaultdict[int, set[Any]] = defaultdict(set)
        self._record: list[int] | None = None  # the launches of a pass, agreed by all ranks
        self._recorded = store.shards  # of which they are
        self._launched: list[int] = []
        self._latest = -1  # that was needed last in this pass
        self._blocks = 0  # in which everything is gathered, one inside of the other
        self._varies = bucketer.usage.varies  # ranks may need different buckets
        self._compares = self._varies  # in this step, also where passes are as before
        self.peak = 0  # most bytes of gathered parameters at a time

    def need(self, index: int) -> Any:
        """All parameters of a bucket, gathered by now, or on a GPU, for what comes next on the
        current stream.
        """
        if self._blocks or (index == self._latest and index not in self._works):
            return self._store.shards[index].full
        with self._memory.stream():
            return self._need(index)

    def there(self, index: int) -> bool:
        """True if a bucket is gathered: because it was needed, not only fetched ahead, which ranks
        do in later passes alone.
        """
        return self._blocks > 0 or (index in self._resident and index not in self._works)

    def keep(self, index: int) -> bool:
        """Keeps a bucket to the end of the pass, if it is `there`."""
        if not self.there(index):
            return False
        if not self._blocks:
            self.pins[index].add(KEPT)
        return True

    def begin_step(self, *, absent: bool) -> None:
        """absent: some rank has no data, in some pass of the step."""
        self._compares = absent or self._varies
        if self._recorded is not self._store.shards:  # a checkpoint had other buckets
            self._record, self._recorded = None, self._store.shards

    def _need(self, index: int) -> Any:
        self._latest = index
        self._evict(index)  # always: what stays must not depend on what was fetched ahead
        if index not in self._resident:
            self._launch(index)
        self._resident.move_to_end(index)
        work = self._works.pop(index, None)
        if work is not None:
            work.wait()
        # Where ranks differ, one that fetched ahead would wait for another that need not come.
        ahead = None if self._varies else self._expected()
        if ahead is not None and ahead not in self._resident and not self._works:
            self._evict(index)
            self._launch(ahead)
            self._resident.move_to_end(index)
        return self._store.shards[index].full

    def end_pass(self) -> None:
        """Releases everything; the next pass is expected to be like this one."""
        self._bucketer.check_pass()  # others are not to wait here for a rank that raises
        if self._record is None or self._compares or len(self._launched) < len(self._record):
            self._await(_END)
            self._record = list(self._launched)
        self.discard()

    def discard(self) -> None:
        """Releases everything, also after a pass that did not come to its end on any rank."""
        self._launched = []
        self._latest = -1
        self.pins.clear()
        while self._resident:
            self._release(next(iter(self._resident)))

    def explain(self, error: BaseException) -> None:
        """Tells in an error of a step what a wait that ran out of time may have been."""
        if self._varies and isinstance(error, DeadlineError):
            error.args = (f"{error}; {_APART}",)

    def follow_pass(self, meanwhile: Callable[[], _T], give_up: Callable[[str], None]) -> _T:
        """A pass of a rank without data of its own, which takes part in the gathers of the others.
        They reduce gradients in between, and may wait for this rank there before they gather more:
        so the gathers are made in a thread, and on a GPU behind a stream of their own, while this
        one does `meanwhile`, the rank's part in the reductions. Returns its result.

        give_up  tells the ranks of the reductions that this one takes no more part in them
        """
        follower = _Follower(self._follower_of(), give_up)
        follower.start()
        try:
            result = meanwhile()
        except BaseException as error:
            if follower.error is not None:
                raise follower.error from error
            self._comm.abort(described(error))
            raise
        finally:
            follower.join()
        if follower.error is not None:
            raise follower.error
        return result

    def _follower_of(self) -> Callable[[], None]:
        """What follows a pass, in a thread: nobody uses what is gathered, so it all goes to one
        place.
        """
        most: dict[tuple[str, str], int] = {}
        for shard in self._store.shards:
            kind = shard.dtype, shard.bucket.device
            most[kind] = max(most.get(kind, 0), shard.bucket.count)
        places = {kind: empty((count,), *kind) for kind, count in most.items()}

        def follow() -> None:
            record = []
            while (index := self._compare(None)) != _END:
                shard = self._store.shards[index]
                place = places[shard.dtype, shard.bucket.device][: shard.bucket.count]
                self._take_part(shard, place)
                record.append(index)
            self._record = record

        device = next((device for _, device in most if device != "cpu"), None)
        return follow if device is None else self._side.of(device).beside(follow)

    @contextlib.contextmanager
    def everything(self) -> Iterator[None]:
        """All buckets are gathered in this block; between passes."""
        with self._memory.stream():
            self.gather_everything()
        try:
            yield
        finally:
            self._release_everything()

    @property
    def in_block(self) -> bool:
        """True in a block of `everything`."""
        return self._blocks > 0

    def gather_everything(self) -> None:
        """All buckets at once, for good."""
        self._blocks += 1
        if self._blocks > 1:
            return
        works = []
        for shard in self._store.shards:
            shard.full = self._memory.take(shard)
            works.append(self._store.gather(self._comm, self._side, shard, shard.full))
        for work in works:
            work.wait()

    def _release_everything(self) -> None:
        self._blocks -= 1
        if self._blocks:
            return
        for shard in self._store.shards:
            self._memory.give(shard)
            shard.full = None

    def _expected(self) -> int | None:
        """What the record says to launch next."""
        done = len(self._launched)
        if self._record is None or done >= len(self._record):
            return None
        return self._record[done]

    def _launch(self, index: int) -> None:
        if self._expected() != index:
            self._record = None  # this pass departs from it
        if self._record is None or self._compares:
            self._await(index)
        self._start(index)

    def _start(self, index: int) -> None:
        shard = self._store.shards[index]
        shard.full = self._memory.take(shard)
        self._launched.append(index)
        self._resident[index] = None
        held = sum(self._store.shards[i].full.nbytes for i in self._resident)
        self.peak = max(self.peak, held)
        self._works[index] = self._store.gather(self._comm, self._side, shard, shard.full)

    def _await(self, index: int) -> None:
        """Until all ranks are at a bucket's gather, or this is the next that one of them needs;
        and until all have come to the end of the pass.
        """
        while (turn := self._compare(index)) != index:
            shard = self._store.shards[turn]
            self._take_part(shard, empty((shard.bucket.count,), shard.dtype, shard.bucket.device))

    def _take_part(self, shard: Shard, place: Any) -> None:
        """In a gather of what other ranks need, into memory that nobody uses."""
        self._store.gather(self._comm, self._side, shard, place).wait()

    def _compare(self, index: int | None) -> int:
        """Makes sure that all ranks are at the same place, and returns it; None: wherever the
        others are. Where ranks may differ, it is the first that one of them needs.
        """
        mine = [-2 * _END, -2 * _END] if index is None else [index, -index]
        asked = np.array(mine, np.int64)
        self._comm.all_reduce(asked, "max")
        most, least = int(asked[0]), -int(asked[1])
        if most == -2 * _END:  # no rank has data: the pass is empty
            return _END
        if most != least and not self._varies:
            names = [
                "the end of the pass" if i == _END else f"the bucket of {self._first(i)!r}"
                for i in (least, most)
            ]
            raise MismatchError(
                f"sharding=3: the ranks use parameters in different orders: one needs {names[0]}, "
                f"another {names[1]}, rank {self._comm.rank} "
                + ("nothing" if index is None else "one of them")
                + f"; {self._bucketer.usage.lets_differ}",
                rank=self._comm.rank,
            )
        return least

    def _first(self, index: int) -> str:
        return self._store.shards[index].bucket.slots[0].name

    def _evict(self, keep: int) -> None:
        """Makes room for one more bucket."""
        idle = [i for i in self._resident if not self.pins.get(i) and i != keep]
        idle = [i for i in idle if i not in self._works]
        for index in idle[: max(0, len(idle) - _IDLE + 1)]:
            self._release(index)

    def _release(self, index: int) -> None:
        work = self._works.pop(index, None)
        if work is not None:
            work.wait()
        del self._resident[index]
        shard = self._store.shards[index]
        self._memory.give(shard)
        shard.full = None


class _Follower(threading.Thread):
    """Does `follow`; `error`: what it raised, after which it has told `give_up` why."""

    def __init__(self, follow: Callable[[], None], give_up: Callable[[str], None]) -> None:
        super().__init__(name="collectives: gathers of a rank without data", daemon=True)
        self._follow = follow
        self._give_up = give_up
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._follow()
        except BaseException as error:
            self.error = error
            self._give_up(described(error))
