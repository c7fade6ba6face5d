"""Ranks that are threads, when what each of them gets or raises is to be looked at."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import collectives as cc


def outcomes(
    n: int,
    body: Callable[[cc.Communicator], Any],
    *,
    nodes: Sequence[int] | None = None,
    timeout: float = 20,
) -> list[Any]:
    """What body(comm) returned on each rank, or the exception that it raised there."""

    def guarded(comm: cc.Communicator) -> Any:
        try:
            return body(comm)
        except Exception as error:
            return error

    return cc.run_threads(n, guarded, nodes=nodes, timeout=timeout)


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.002)
