"""The measured table of a communicator's GPUs: whether there is one that is theirs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from .array import gpu_facts
from .bootstrap import ask, host_key
from .config import Rule
from .errors import ConfigError
from .tuning import tables
from .tuning.device import DeviceTuner

if TYPE_CHECKING:
    from .bootstrap import Bootstrap
    from .device import DeviceEngine
    from .tuning.tables import Table


class Gpus(NamedTuple):
    """The GPUs of all ranks: the name of each, "" where no library tells; and whether ranks share
    one, as far as that is told.
    """

    names: list[str]
    shared: bool


def gpus_of(bootstrap: Bootstrap, ordinal: int) -> Gpus:
    """What the ranks say of their GPUs. Collective; `ordinal` is this rank's."""
    facts = gpu_facts(ordinal)
    place = f"{host_key()} {facts.bus or f'{os.getpid()} {ordinal}'}"
    answers = ask(bootstrap, [facts.name, place])
    return Gpus([name for name, _ in answers], len({place for _, place in answers}) < len(answers))


def why_no_table(engine: DeviceEngine, gpus: Gpus) -> str:
    """Why a table says nothing of calls of these ranks, in words; "" if it does. Equal on all
    ranks.
    """
    if engine.bound:
        return f"the communicator may take {engine.bound} thread blocks only (max_blocks)"
    if engine.path != "peer":
        return "the GPUs do not reach each other, and calls go through memory of the host"
    if gpus.shared:
        return "ranks share a GPU, where times say nothing"
    return ""


def tuner_of(
    engine: DeviceEngine, bootstrap: Bootstrap, rules: Iterable[Rule], table: Table | None
) -> DeviceTuner:
    """What chooses for arrays on the ranks' GPUs. Collective where there is a table.

    table  what was measured on so many GPUs, whichever they were; None if nothing was
    """
    if table is None:
        return DeviceTuner(bootstrap.size, rules)
    gpus = gpus_of(bootstrap, engine.device)
    if why := why_no_table(engine, gpus):
        return DeviceTuner(bootstrap.size, rules, passed_over=why)
    try:
        tables.refuse_gpus(table, gpus.names)
    except ConfigError as error:
        return DeviceTuner(bootstrap.size, rules, refused=str(error))
    return DeviceTuner(bootstrap.size, rules, table)
