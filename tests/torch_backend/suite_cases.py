"""The cases of torch's suite for backends, as a class that runs them on any backend.

Imported by suite.py once the environment is set, since torch's file reads it: BACKEND is the peer
whose cases are run, WORLD_SIZE the number of ranks. What decides whether a case is skipped is
computed then, from the peer's name. Later the cases ask once more, which backend they run on, and
are given a name that equals the peer's too: so a backend from outside takes the peer's way in every
case that the peer runs.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import unittest
from collections.abc import Callable
from typing import Any

import suite_state
import torch
from torch.testing._internal import common_distributed
from torch.testing._internal.distributed import distributed_test

import collectives.torch

State = suite_state.State  # of a process, which kept ranks bring back after each case

PEER = os.environ["BACKEND"]
ON_TEST = "BACKEND_ON_TEST"  # the environment's name for what `use` was told

# What a rank exits with if its case passed, or was skipped there.
FINE = {0, *(skip.exit_code for skip in common_distributed.TEST_SKIPS.values())}


class AsPeer(str):
    """A backend's name, for code that asks whether it is the peer's."""

    def __eq__(self, other: object) -> bool:
        return other == PEER or str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def use(backend: str, seconds: int, port: int) -> None:
    """From now on this process, and what it starts, runs cases on `backend`; a case may take
    `seconds`. Cases that need a port of their own take the one after `port`.
    """
    os.environ[ON_TEST] = f"{backend} {seconds} {port}"
    for features in common_distributed.DistTestCases.backend_feature.values():
        if PEER in features:
            features.add(backend)
    for lacks in common_distributed.DistTestCases.skip_collective.values():
        if PEER in lacks:
            lacks.add(backend)
    common_distributed.TIMEOUT_DEFAULT = seconds
    common_distributed.TIMEOUT_OVERRIDE.clear()
    distributed_test.BACKEND = AsPeer(backend)
    distributed_test.MASTER_PORT = port
    distributed_test.Barrier.barrier_id = 0


class Cases(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """torch's cases, whose ranks are started by `start_method`, or are those that a lane has kept
    (suite_kept.Ranks).
    """

    start_method = "fork"
    kept: Any = None

    def setUp(self) -> None:
        super().setUp()
        new = multiprocessing.get_context(self.start_method).Process
        self._start_processes(new if self.kept is None else self.kept.process)

    @classmethod
    def _run(cls, *args: Any, **kwargs: Any) -> None:
        # A rank that was not forked has not been told yet.
        backend, seconds, port = os.environ[ON_TEST].split()
        use(backend, int(seconds), int(port))
        collectives.torch.register()
        distributed_test.INIT_METHOD = os.environ["INIT_METHOD"]
        super()._run(*args, **kwargs)


def prepare() -> None:
    """Imports what the ranks would import each for itself."""
    torch.set_num_threads(1)
    collectives.torch.register()  # where the package is not installed, torch has not found it
    importlib.import_module("collectives.torch.group")


def _status_of(do: Callable[[], Any]) -> int:
    """0 if it raises nothing in a process forked from this one."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            do()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


def forked_ranks_have_gpus() -> bool:
    """Can ranks forked from a case's process use CUDA? They cannot if that process, or this one,
    has asked CUDA for anything, as what a case does before it starts its ranks may do.
    """

    def be_a_case() -> None:
        names = unittest.TestLoader().getTestCaseNames(Cases)
        super(Cases, Cases(names[0])).setUp()
        if _status_of(lambda: torch.zeros(1, device="cuda")) != 0:
            raise RuntimeError("its ranks cannot use CUDA")

    return _status_of(be_a_case) == 0
