"""What a rank does in a round; it runs in a process of its own, and reports as it goes.

Reports are JSON lines: {"what": ..., "at": seconds of CLOCK_MONOTONIC, ...}.

    ready    CUDA has started; the rank waits until it has on all (rounds on GPUs)
    begins   the rank calls init
    armed    a victim has come to its moment; the blow follows (from the stage, for signals)
    ends     a victim ends by itself now
    raised   a call, or init, raised: kind, text, peer, where; starved: seconds of that time in
             which the rank was ready to run and the machine had no processor for it
    again    a call on a shrunk communicator raised, so it is shrunk once more
    shrunk   size and rank of the new communicator
    done     the rank has come to its end
    wrong    something that must never happen, in words
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import CollectiveError, MismatchError
from ..starting import init
from . import verify
from .on_gpu import OnGpu
from .plan import STOPPED

if TYPE_CHECKING:
    from ..communicator import Communicator
    from .plan import Plan
    from .verify import Arrays

# Seconds that shrink waits for a rank that lives and does not come. Who asks a server that is
# stopped may raise so much later than who waits for a rank.
_PATIENCE = 1.0
_PATIENCE_WITH_SERVER = 12.0
_ATTEMPTS = 3
_STARTING = 25.0  # seconds for all ranks to come, where their coming is not what is tried


def seconds_starved() -> float:
    """Seconds that the threads of this process were ready to run and no processor was free; 0 where
    the kernel does not count them.
    """
    total = 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        for task in os.listdir("/proc/self/task"):
            total += int(Path(f"/proc/self/task/{task}/schedstat").read_text().split()[1])
    return total * 1e-9


class _Raised(Exception):
    """The fault of a victim that ends with an exception."""


class _Calm(Exception):
    """The calls of a round in which nothing may be raised have come to their end."""


class Rank:
    """One rank of a round.

    reports  a pipe that takes them
    gate     a pipe from which comes a byte for each rank when all are ready
    """

    def __init__(self, plan: Plan, rank: int, reports: int, gate: int) -> None:
        self.plan = plan
        self.rank = rank
        self._reports = reports
        self._gate = gate
        self._on: Arrays = verify.OnHost()
        self._victim = rank in plan.victims
        self._starved = 0.0  # what _starved said when the last phase began
        self._continued = False  # this victim was stopped, and goes on

    def report(self, what: str, **facts: Any) -> None:
        line = json.dumps({"what": what, "at": time.monotonic(), **facts})
        os.write(self._reports, line.encode() + b"\n")

    def run(self) -> None:
        """Raises what a victim of "raise" raises; returns otherwise."""
        plan = self.plan
        self._starved = seconds_starved()
        if self._victim and plan.kind in STOPPED:
            signal.signal(signal.SIGCONT, self._continue)
        try:
            if plan.device == "cuda":
                self._start_cuda()
            if plan.moment == "before init" and self._victim:
                self._blow(None)
            if plan.moment == "in init" and self._victim:
                self.report("armed")
            self.report("begins")
            comm = self._expect(self._init, "init")
            if comm is not None:
                self._live(comm)
            self._on.check_usable()
            self.report("done")
        except (_Raised, SystemExit):
            raise
        except BaseException as error:
            self.report("wrong", text=f"{type(error).__name__}: {error}")

    def _start_cuda(self) -> None:
        """What takes a second, and not alike on all ranks, is no part of what is tried."""
        self._on = OnGpu(self.rank)
        self.report("ready")
        os.read(self._gate, 1)
        self._starved = seconds_starved()

    def _init(self) -> Communicator:
        plan = self.plan
        if plan.moment in ("before init", "in init"):
            return init("tcp", timeout=plan.timeout)
        # What a busy machine needs to start a job has nothing to do with the fault.
        return init("tcp", timeout=_STARTING).duplicate(timeout=plan.timeout)

    def _live(self, comm: Communicator) -> None:
        plan = self.plan

        def works() -> bool:
            verify.everything(self._on, comm)
            return True

        if not self._expect(works):
            return self._go_on(comm)  # a victim of "in init" may die as late as here
        if plan.kind == "mismatch":
            return self._disagree(comm)
        if plan.moment == "at close":
            if self._victim:
                self._blow(comm)
            comm.close()
            return None
        moments: dict[str, Callable[[Communicator], None]] = {
            "between calls": self._stream,
            "in a call": self._stream,
            "queued calls": self._queue,
            "in a subgroup": self._subgroup,
            "in shrink": self._stream,
            "in init": self._stream,
            "before init": self._stream,
        }
        self._starved = seconds_starved()
        try:
            self._expect(lambda: moments[plan.moment](comm))
        except _Calm:
            verify.everything(self._on, comm)
            return comm.close()
        if self._victim and plan.kind == "sigcont":
            return comm.close()  # the others are not to wait for it
        return self._go_on(comm)

    # ---- moments ---------------------------------------------------------------------------------

    def _stream(self, comm: Communicator) -> None:
        """The plan's call, until it fails."""
        plan = self.plan
        prepared = self._on.prepare(comm, plan.call)
        if self._victim and plan.moment == "in a call":
            self._blow(comm, later=True)
        if plan.moment in ("between calls", "in shrink") and self.rank == plan.victims[0]:
            self._blow(comm)
        while True:
            prepared.start()
            prepared.finish(str(plan))
            self._look_for_the_end(comm)

    def _look_for_the_end(self, comm: Communicator) -> None:
        """Raises _Calm on all ranks once the pause of one is over."""
        if self.plan.kind == "pause":
            over = np.array([self._continued], np.int32)
            if comm.all_reduce(over, "max")[0]:
                raise _Calm

    def _queue(self, comm: Communicator) -> None:
        """Many calls at once; all of them must end, and those that end well with what they must."""
        call = self.plan.call._replace(async_op=True)
        prepared = [self._on.prepare(comm, call) for _ in range(8)]
        if self._victim:
            self._blow(comm, later=True)
        error: CollectiveError | None = None
        while error is None:
            started = []
            try:
                for one in prepared:
                    one.start()
                    started.append(one)
            except CollectiveError as raised:
                error = raised
            for one in started:
                try:
                    one.finish(str(self.plan))
                except CollectiveError as raised:
                    error = error or raised
        raise error

    def _subgroup(self, comm: Communicator) -> None:
        """Parts are made and used for the first time, again and again."""
        plan = self.plan
        if self._victim:
            self._blow(comm, later=True)
        while True:
            part = comm.split(comm.rank % 2 if comm.size > 3 else 0)
            assert part is not None
            try:
                verify.once(self._on, part, plan.call._replace(async_op=False), str(plan))
            finally:
                part.close()
            self._look_for_the_end(comm)

    def _disagree(self, comm: Communicator) -> None:
        """One rank makes another call; all hear of both, and the communicator works on. On GPUs a
        new one does.
        """
        plan = self.plan
        more = plan.elements + comm.size
        elements = more if self._victim else plan.elements
        # (Symmetric buffers have one size on all ranks.)
        call = plan.call._replace(elements=elements, room=more, async_op=False)
        try:
            verify.once(self._on, comm, call, str(plan))
        except MismatchError as error:
            self._raised(error, "call")
        else:
            self.report("wrong", text="ranks disagreed, and no MismatchError was raised")
        verify.everything(verify.OnHost(), comm)
        if plan.device == "cuda":
            twin = comm.duplicate()
            verify.everything(self._on, twin)
            twin.close()
        comm.close()

    # ---- the blow --------------------------------------------------------------------------------

    def _blow(self, comm: Communicator | None, *, later: bool = False) -> None:
        """The fault happens to this rank: now, or `later`, while it goes on with what it does."""
        plan = self.plan
        if plan.kind in ("sigkill", "sigstop", *STOPPED):
            self.report("armed")
            end = time.monotonic() + plan.timeout + 60
            while not later and not self._continued and time.monotonic() < end:
                time.sleep(0.01)  # most end here
            return
        if later and plan.kind not in ("raise", "leave"):
            threading.Timer(plan.delay, self._act, [comm]).start()
        else:
            self._act(comm)

    def _act(self, comm: Communicator | None) -> None:
        kind = self.plan.kind
        self.report("ends")
        if kind == "exit":
            os._exit(3)
        if kind == "leave":
            raise SystemExit(0)
        if kind == "raise":
            raise _Raised
        assert comm is not None
        if kind == "abort":
            comm.abort("chaos")
        if kind == "close":
            comm.close()
            raise SystemExit(0)

    def _continue(self, number: int, frame: object) -> None:
        self._continued = True

    # ---- after it --------------------------------------------------------------------------------

    def _expect(self, call: Callable[[], Any], where: str = "call") -> Any:
        """What the call returns; None, and a report, if it raises an error of this package."""
        try:
            return call()
        except CollectiveError as error:
            self._raised(error, where)
            return None

    def _raised(self, error: CollectiveError, where: str) -> None:
        self.report(
            "raised",
            kind=type(error).__name__,
            text=str(error),
            peer=error.peer,
            where=where,
            starved=max(0.0, seconds_starved() - self._starved),
        )

    def _go_on(self, comm: Communicator) -> None:
        """Shrinks until those that are left can work, and checks that they do."""
        plan = self.plan
        in_shrink = plan.moment == "in shrink"
        second = in_shrink and self.rank == plan.victims[1]
        if second:
            self.report("armed")
        silent = plan.kind in ("sigstop", "sigcont") and plan.moment == "in a subgroup"
        patience = _PATIENCE_WITH_SERVER if silent and plan.server == "rank 0" else _PATIENCE
        current, attempts = comm, 0
        while True:
            new = current.shrink(timeout=patience)
            attempts += 1
            if current is not comm:
                current.close()
            current = new
            try:
                verify.everything(self._on, current)
                # Until the second victim has been hit, whoever came that far goes round again.
                while second or (in_shrink and current.size > len(plan.survivors)):
                    verify.everything(self._on, current)
                break
            except CollectiveError as error:
                if attempts == _ATTEMPTS:
                    raise
                self.report("again", kind=type(error).__name__, text=str(error))
        self.report("shrunk", size=current.size, rank=current.rank, attempts=attempts)
        current.close()
        comm.close()
