"""Pointers to memory of GPUs straight to MPI, between nodes: found out, not assumed.

An MPI library that is CUDA-aware sends from memory of a GPU and receives there, by way of the
network's adapter alone where both can. Whether the one that is loaded does is asked of it first
(`MPIX_Query_cuda_support`), for another one would read the pointer as one of the host's; then it is
tried, with words and with a large message between ranks 1, 2, 4 ... apart. All ranks must find it
to work.

Calls that go so are those of the engine for host arrays, by the same schedules; what they combine,
a kernel does (csrc/straight.hpp).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, cast

from . import _core
from .bootstrap import Bootstrap, Mpi
from .connect import mpi_transport
from .errors import CollectiveError, UnsupportedError
from .tuning.rails import STRAIGHT_FROM, Straight

if TYPE_CHECKING:
    from ._core import Communicator as Core

NOT_APART = (
    "what is put on one stream of this process can stand behind what waits on another: set "
    "CUDA_DEVICE_MAX_CONNECTIONS=32 before anything uses CUDA"
)

# Seconds for the messages by which it is tried.
_PATIENCE = 30.0


def go_straight(bootstrap: Bootstrap, host: Core, staging: _core.Staging, wanted: str) -> Straight:
    """Makes staged calls of these ranks go straight where they can. Collective over the bootstrap.

    host    this rank's end on the host of the communicator of these ranks
    wanted  COLLECTIVES_GPU_MPI; "on": calls of any size, else of STRAIGHT_FROM bytes and more

    The result is alike on all ranks. Raises UnsupportedError on all of them if one wants them to
    ("on"), and they cannot.
    """
    why, slots = _why_not(bootstrap, wanted), None
    if not why and not staging.streams_apart:
        why = NOT_APART
    if not why:
        try:
            slots = staging.make_slots(bootstrap.size)
            if slots.slot_bytes == 0:
                why = f"COLLECTIVES_STAGING has no room for messages of {bootstrap.size} ranks"
        except CollectiveError as error:
            why = str(error)
    answers = _ask(bootstrap, {"wanted": wanted, "why": why})
    forced = any(a["wanted"] == "on" for a in answers)
    why = _words(answers)
    if not why:
        assert slots is not None
        mpi = mpi_transport(cast(Mpi, bootstrap), slots.slot_bytes, slots)
        try:
            why = staging.probe(slots, mpi, min(_PATIENCE, bootstrap.timeout))
        except CollectiveError as error:
            why = str(error)
        why = _words(_ask(bootstrap, {"why": why}))
        if not why:
            made = Straight("", 0 if forced else STRAIGHT_FROM)
            staging.go_straight(host, mpi, slots, made.from_bytes)
            return made
    if forced:
        raise UnsupportedError(
            f"COLLECTIVES_GPU_MPI=on, and MPI cannot be given pointers to memory of GPUs: {why}",
            rank=bootstrap.rank,
        )
    return Straight(why)


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


def _words(answers: list[dict[str, Any]]) -> str:
    """What ranks say, each thing once."""
    said: dict[str, list[int]] = {}
    for rank, answer in enumerate(answers):
        if answer["why"]:
            said.setdefault(answer["why"], []).append(rank)
    if len(said) == 1 and len(said[why := next(iter(said))]) == len(answers):
        return why
    return "; ".join(f"rank {ranks[0]}: {why}" for why, ranks in said.items())


def _ask(bootstrap: Bootstrap, mine: dict[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(b) for b in bootstrap.all_gather(json.dumps(mine).encode())]
