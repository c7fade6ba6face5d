"""What ranks that wait for their GPUs are told by other ranks, and tell them."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest

import collectives as cc
from collectives import device


class _Kernels:
    """The core of an engine whose kernels wait for a peer."""

    def __init__(self):
        self.reason = self.kind = ""
        self.captured = False

    def idle(self):
        if self.reason:
            raise cc.AbortedError(self.reason)
        return False

    def abort(self, reason, kind="aborted", about=-1):
        self.reason, self.kind, self.about = reason, kind, about


class _Unmarked:
    """Marks that the GPU does not come to."""

    def mark(self, stream):
        return self

    def done(self):
        return False


@pytest.mark.parametrize("how", ["synchronize", "wait", "done"])
def test_waiting_for_the_gpu_hears_what_ranks_tell_on_the_host(how):
    """`synchronize`, `Work.wait` and `Work.done` end kernels that wait, and raise the reason."""

    def body(comm):
        engine = device.DeviceEngine.__new__(device.DeviceEngine)
        engine.core, engine.host = _Kernels(), comm._core
        engine.marks = _Unmarked()
        work = device.DeviceWork(engine, lambda: "a result", None, 0)
        with pytest.raises(cc.MismatchError, match="same side"):
            if comm.rank == 1:
                comm._core.enter_device_call()
                if how == "synchronize":
                    device.wait_for(engine, 60)
                while how == "done" and not work.done():
                    threading.Event().wait(0.001)
                work.wait(60)
            else:
                comm.all_reduce(np.ones(4))
        return engine.core.kind, engine.core.reason

    on_host, on_gpu = cc.run_threads(2, body, timeout=100)
    assert on_host == ("", "")
    assert on_gpu[0] == "mismatch" and "same side" in on_gpu[1]


def test_an_abort_that_a_kernel_saw_is_told_with_its_reason():
    """The kernel knows that a peer has aborted, and that peer's host why."""

    class Left(_Kernels):
        def idle(self):
            raise cc.AbortedError("rank 0 gave up: it was aborted")

    def body(comm):
        engine = device.DeviceEngine.__new__(device.DeviceEngine)
        engine.core, engine.host = Left(), comm._core
        if comm.rank == 0:
            with pytest.raises(cc.AbortedError, match="it was aborted"):
                engine.idle()  # of which no host has said anything
        comm.barrier()
        if comm.rank == 0:
            comm.abort("out of coffee")
        else:
            while not comm._core.broken:
                with contextlib.suppress(cc.AbortedError):
                    comm._core.look()
            with pytest.raises(cc.AbortedError, match="out of coffee"):
                engine.idle()

    cc.run_threads(2, body, timeout=100)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (cc.PeerDiedError("rank 3 died", peer=3), ("peer_died", 3)),
        (cc.PeerDiedError("somebody died"), ("peer_died", -1)),
        (cc.AbortedError("enough", peer=3), ("aborted", -1)),
    ],
)
def test_who_died_is_passed_on(error, told):
    engine = device.DeviceEngine.__new__(device.DeviceEngine)
    engine.core = _Kernels()
    engine.pass_on(error)
    assert (engine.core.kind, engine.core.about) == told
