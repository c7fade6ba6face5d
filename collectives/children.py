"""Processes that this one starts and that must not outlive it."""

from __future__ import annotations

import ctypes
import os
import signal

_prctl = ctypes.CDLL(None).prctl  # looked up before any fork
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def die_with_parent(parent: int) -> None:
    """Called in a child after the fork: the kernel kills it when `parent`, which made it, ends."""
    _prctl(_SET_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it died before the call above
        os.kill(os.getpid(), signal.SIGKILL)
