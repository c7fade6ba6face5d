"""Pointers to memory of GPUs straight to MPI, between nodes: found out, not assumed.

An MPI library that is CUDA-aware sends from memory of a GPU and receives there, by way of the
network's adapter alone where both can. Whether the one that is loaded does is asked of it first
(`MPIX_Query_cuda_support`), for another one would read the pointer as one of the host's; then it is
tried, with words and with a message that fills a slot, between ranks 1, 2, 4 ... apart, while a
kernel waits as it does during calls, and a copy to the host behind it, as where a program looks at
a result at once: an MPI that copies by way of memory that is not pinned could wait for that one,
which waits for the call. All ranks must find it to work, along their rails too.

Calls that go so are those of the engine for host arrays, by the same schedules; what they combine,
a kernel does (csrc/straight.hpp).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from . import _core
from .bootstrap import Bootstrap, Mpi, ask
from .connect import mpi_transport
from .errors import CollectiveError, UnsupportedError
from .tuning.rails import LEAST_STRAIGHT_SLOT, STRAIGHT_FROM, Straight

if TYPE_CHECKING:
    from ._core import Communicator as Core

NOT_APART = (
    "what is put on one stream of this process can stand behind what waits on another: set "
    "CUDA_DEVICE_MAX_CONNECTIONS=32 before anything uses CUDA, and make fewer streams than that"
)

# Seconds for the messages by which it is tried.
_PATIENCE = 5.0


class End(NamedTuple):
    """A rank's end of a communicator whose staged calls may go straight.

    bootstrap  of its ranks
    host       the rank's end on the host
    """

    bootstrap: Bootstrap
    host: Core


class _Tried(NamedTuple):
    why: str
    mpi: _core.MpiTransport | None = None
    slots: _core.GpuSlots | None = None


def go_straight(
    everyone: Bootstrap, staging: _core.Staging, wanted: str, ends: Sequence[End]
) -> Straight:
    """Makes staged calls go straight where they can, on all `ends` or on none. Collective over
    `everyone`.

    wanted  COLLECTIVES_GPU_MPI; "on": calls of any size, else of STRAIGHT_FROM bytes and more, and
            nothing is asked, nor is a copy to the host put behind the kernel
    ends    of this rank: of all ranks, and of its rail if there are rails

    The result is alike on all ranks. Raises UnsupportedError on all of them if one wants them to
    ("on"), and they cannot.
    """
    answers = ask(everyone, {"wanted": wanted, "why": _why_not(everyone, wanted)})
    forced = any(a["wanted"] == "on" for a in answers)
    why, tried = _words(answers), []
    if not why:
        apart = "" if staging.streams_apart() else NOT_APART
        why = _words(ask(everyone, {"why": apart}))
    if not why:
        tried = [_try(end.bootstrap, staging, forced) for end in ends]
        mine = next((one.why for one in tried if one.why), "")
        why = _words(ask(everyone, {"why": mine}))
    if why and forced:
        raise UnsupportedError(
            f"COLLECTIVES_GPU_MPI=on, and MPI cannot be given pointers to memory of GPUs: {why}",
            rank=everyone.rank,
        )
    if why:
        return Straight(why)
    made = Straight("", 0 if forced else STRAIGHT_FROM)
    for end, (_, mpi, slots) in zip(ends, tried, strict=True):
        assert mpi is not None and slots is not None, "what failed has said why"
        staging.go_straight(end.host, mpi, slots, made.from_bytes)
    return made


def _try(bootstrap: Bootstrap, staging: _core.Staging, forced: bool) -> _Tried:
    """Whether MPI takes pointers between these ranks. Collective over the bootstrap; one rank may
    say why not when others find nothing wrong.
    """
    why, slots = "", None
    try:
        slots = staging.make_slots(bootstrap.size)
        if slots.slot_bytes < (1 if forced else LEAST_STRAIGHT_SLOT):
            why = (
                f"messages of {bootstrap.size} ranks would have {slots.slot_bytes} bytes at most: "
                "raise COLLECTIVES_STAGING"
            )
    except CollectiveError as error:
        why = str(error)
    if why := _words(ask(bootstrap, {"why": why})):
        return _Tried(why)
    assert slots is not None, "what failed has said why"
    try:
        mpi = mpi_transport(cast(Mpi, bootstrap), slots.slot_bytes, slots)
        why = staging.probe(slots, mpi, min(_PATIENCE, bootstrap.timeout), not forced)
    except CollectiveError as error:
        return _Tried(str(error))
    return _Tried(why, mpi, slots)


def _why_not(bootstrap: Bootstrap, wanted: str) -> str:
    if wanted == "off":
        return "COLLECTIVES_GPU_MPI=off"
    if bootstrap.kind != "mpi":
        return f"the ranks met through {bootstrap.kind}, not MPI"
    if wanted == "on":
        return ""
    said = _core.loaded_mpi().get("cuda", "does not tell")
    return {
        "yes": "",
        "no": "MPI says that it is not CUDA-aware",
    }.get(said, "MPI does not tell whether it is CUDA-aware; COLLECTIVES_GPU_MPI=on tries it")


def _words(answers: list[Any]) -> str:
    """What ranks say, each thing once."""
    said: dict[str, list[int]] = {}
    for rank, answer in enumerate(answers):
        if answer["why"]:
            said.setdefault(answer["why"], []).append(rank)
    if len(said) == 1 and len(said[why := next(iter(said))]) == len(answers):
        return why
    return "; ".join(f"rank {ranks[0]}: {why}" for why, ranks in said.items())
