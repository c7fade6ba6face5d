"""COLLECTIVES_ variables: what `init` would refuse, found without starting ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator

from .. import _core, hardware
from ..bootstrap.addresses import read_secret
from ..config import Settings
from ..errors import CollectiveError, ConfigError
from ..schedule import algorithms
from ..tuning import known_algorithm, tables
from .findings import Finding

_CURE = "set it right, or unset it"


def examine() -> Iterator[Finding]:
    """All findings about the environment."""
    try:
        settings = Settings()
    except ConfigError as error:
        yield Finding("problem", "settings", str(error), _CURE)
        return
    found = [*_algorithms(settings), *_files(settings)]
    if not found:
        yield Finding("ok", "settings", "all COLLECTIVES_ variables are understood")
    yield from found


def _algorithms(settings: Settings) -> Iterator[Finding]:
    names = [algorithm.name for algorithm in algorithms()]
    for rule in settings.algorithm:
        try:
            known_algorithm(rule.algorithm, [*names, "auto"])
        except ValueError as error:
            yield Finding(
                "advice",
                "settings",
                f"COLLECTIVES_ALGORITHM: {error}; init refuses it, unless the program has "
                "registered it by then",
                _CURE,
            )
    try:
        _core.simd_level()
    except (ValueError, RuntimeError) as error:
        yield Finding("problem", "settings", str(error), _CURE)


def _files(settings: Settings) -> Iterator[Finding]:
    """What the settings name, and a rank would read or write."""
    if settings.dump and not os.path.isdir(settings.dump):
        yield Finding(
            "problem",
            "settings",
            f"COLLECTIVES_DUMP {settings.dump!r} is no directory",
            f"mkdir -p {settings.dump}",
        )
    try:
        read_secret(settings)
    except CollectiveError as error:
        yield Finding("problem", "settings", str(error), _CURE)
    try:
        if words := tables.why_none(settings.table):
            yield Finding("advice", "settings", words, _CURE)
        elif settings.table != "off":
            _read_table(settings)
    except ConfigError as error:
        yield Finding("problem", "settings", str(error), _CURE)


def _read_table(settings: Settings) -> None:
    """Raises ConfigError where ranks of this host would refuse the table, whatever their MPI."""
    here = tables.hardware_of([{**hardware.summary(), "mpi": ""}])
    path, layouts = tables.find(here, settings.table, whatever=("mpi",))
    for layout in layouts.values():
        tables.parse(layout, path)
