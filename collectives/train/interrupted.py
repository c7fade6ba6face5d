"""What ranks do after a step that raised: before it had reduced anything they may meet and go on,
while parameters are written it ends them all.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..errors import AbortedError, CollectiveError, described

if TYPE_CHECKING:
    from ..communicator import Communicator


class Cause(NamedTuple):
    """Why a step was given up. Not the exception: its traceback keeps arrays.

    here  it lies on this rank; other ranks have not told of it
    """

    words: str
    here: bool

    @classmethod
    def of(cls, error: BaseException) -> Cause:
        return cls(described(error), not isinstance(error, CollectiveError))


def end(comms: Sequence[Communicator], error: BaseException, step: int) -> None:
    """Aborts all ranks after what raised on this one alone, where the others may step: they would
    have other parameters. (A CollectiveError has ended the others' calls, or all have raised it.)
    """
    if not isinstance(error, CollectiveError):
        rank = comms[0].rank
        words = f"rank {rank}: step {step} raised {described(error)} where parameters are written"
        for comm in comms:
            comm.abort(f"{words}, which other ranks may have done, so none can go on")


def meet(comms: Sequence[Communicator], cause: Cause, step: int) -> None:
    """Makes sure that all ranks have given up a step: then they all come here, and may go on. A
    rank that has not waits for this one in another call, on one of the communicators.

    Raises CollectiveError if some rank did not, in words that give the cause. If it lies here, the
    communicators are aborted with them; else some other rank knows better.
    """
    try:
        works = [comm.all_reduce(np.zeros(1, np.uint8), async_op=True) for comm in comms]
        pause = 2e-5
        while works:  # whichever fails first
            ended = [work for work in works if work.done()]
            works = [work for work in works if work not in ended]
            for work in ended:
                work.wait()
            if not ended:
                time.sleep(pause)
                pause = min(1e-3, 2 * pause)
    except AbortedError as error:  # it says why
        for comm in comms:  # some may be of other ranks than the one that was aborted
            comm.abort(str(error))
        raise
    except CollectiveError as error:
        rank = comms[0].rank
        words = (
            f"rank {rank}: step {step} raised {cause.words}; other ranks did not give it up, "
            "so none can go on"
        )
        if cause.here:
            for comm in comms:
                comm.abort(words)
        raise CollectiveError(words, rank=rank) from error
