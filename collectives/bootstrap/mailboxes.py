"""Ranks that meet through memory that they share already: no server, no socket, no launcher.

A communicator that is shrunk is set up over the region of the old one, whoever died; from then on,
its own region carries its own control plane. Reached only by ranks of one host.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Callable, Sequence

from .. import _core
from ..errors import (
    AbortedError,
    ClosedError,
    CollectiveError,
    DeadlineError,
    MismatchError,
    PeerDiedError,
)
from .groups import Base, Failure, failure_of, have, interrupted, name_ranks, new_job
from .local import Solo

HOME = "home"  # the purpose of the group that a region is for
_HEAD = struct.Struct("=IQ")  # bytes of the name of the call, bytes of all that is sent


class Mailboxes(Base):
    """Some ranks of a region, by the boxes in its memory.

    council  this rank's end of it
    members  ranks of the region that belong to the group, in the group's order
    purpose  tells this group from any other of the region; the same on all members. HOME for the
             one that the region was made for
    kind     "threads" or "shm"
    watch    (member) -> "" while it is there, else "died" or "closed"
    trouble  () -> why the group is to be given up, "" while it is not

    Raises what `Bootstrap` says: PeerDiedError, ClosedError, DeadlineError, AbortedError.
    """

    def __init__(
        self,
        council: _core.Council,
        members: Sequence[int],
        purpose: str,
        *,
        kind: str,
        timeout: float,
        job: str | None = None,
        watch: Callable[[int], str] | None = None,
        trouble: Callable[[], str] | None = None,
    ) -> None:
        self.kind = kind
        self.rank = list(members).index(council.me)
        self.size = len(members)
        self.timeout = timeout
        self._council = council
        self._members = list(members)
        self._purpose = purpose
        self._part = purpose != HOME
        self._watch = watch or (lambda member: council.gone(self._members[member]))
        self._trouble = trouble or council.told
        digest = hashlib.sha256(f"{purpose}|{self._members}".encode()).digest()
        self._tag = int.from_bytes(digest[:8], "little")
        self._round = 0
        self._failure: Failure | None = None
        self._closed = False
        self.job = ""
        self.job = job or self.broadcast(new_job().encode()).decode()

    def _exchange(self, op: str, data: bytes, timeout: float) -> list[bytes]:
        self.check()
        try:
            return self._exchange_letters(op, data, timeout)
        except BaseException as error:
            self._failure = self._failure or interrupted(op, error)
            raise

    def _exchange_letters(self, op: str, data: bytes, timeout: float) -> list[bytes]:
        end = time.monotonic() + timeout
        name = op.encode()
        whole = _HEAD.pack(len(name), len(name) + len(data)) + name + data
        got = [bytearray() for _ in self._members]
        at, longest = 0, 1
        # All take as many rounds as the longest of them needs, which the first one tells.
        while at < longest:
            letters = self._letters(whole[at : at + _core.letter_bytes], op, end, timeout)
            for i, letter in enumerate(letters):
                got[i] += letter
            if at == 0:
                longest = max(_HEAD.size + _HEAD.unpack_from(part)[1] for part in got)
            at += _core.letter_bytes
        answers, names = [], []
        for part in got:
            length, total = _HEAD.unpack_from(part)
            names.append(bytes(part[_HEAD.size : _HEAD.size + length]).decode())
            answers.append(bytes(part[_HEAD.size + length : _HEAD.size + total]))
        others = [r for r, said in enumerate(names) if said != op]
        if others:
            self._fail(
                MismatchError,
                f"ranks make different calls: {op} on rank {self.rank}, {names[others[0]]} on "
                f"{name_ranks(others)}",
                others[0],
            )
        return answers

    def _letters(self, mine: bytes, op: str, end: float, seconds: float) -> list[bytes]:
        """One letter of every member."""
        self._round += 1
        self._council.post(self._part, self._tag, self._round, mine)
        letters: list[bytes | None] = [None] * self.size
        pause = 0.0
        while True:
            for i in range(self.size):
                letters[i] = letters[i] or self._fetch(i)
            missing = [i for i, letter in enumerate(letters) if letter is None]
            if not missing:
                return [letter for letter in letters if letter is not None]
            self._look_around(missing, op)
            if time.monotonic() > end:
                came = set(range(self.size)) - set(missing)
                self._fail(
                    DeadlineError,
                    f"{op}: rank {self.rank} waited {seconds:g} s; {name_ranks(came)} of "
                    f"{self.size} came, {name_ranks(missing)} {have(missing)} not called it",
                    missing[0],
                )
            time.sleep(pause)  # ranks may share cores: others go first
            pause = min(1e-3, pause * 1.5 + 10e-6)

    def _fetch(self, member: int) -> bytes | None:
        return self._council.fetch(self._members[member], self._part, self._tag, self._round)

    def _look_around(self, missing: list[int], op: str) -> None:
        """Raises if one of them will never come."""
        why = self._trouble()
        if why:
            self._fail(AbortedError, f"{op}: {why}")
        for i in missing:
            how = self._watch(i)
            # What it posted before it went is visible now.
            if not how or self._fetch(i) is not None:
                continue
            if how == "died":
                process = self._council.process(self._members[i])
                which = "" if self.kind == "threads" else f" (process {process})"
                self._fail(PeerDiedError, f"{op}: rank {i}{which} died", i)
            self._fail(ClosedError, f"{op} needs rank {i}, which has closed before", i)

    def _fail(self, cls: type[CollectiveError], message: str, peer: int | None = None) -> None:
        self._failure = failure_of(cls, message, peer)
        raise self._failure.error(self.rank)

    def moved_to(self, council: _core.Council) -> Mailboxes:
        """The same group over a region that all members have made for themselves. Collective.

        Who returns from this knows that all members have read all letters in the old region.
        """
        members = list(range(self.size))
        moved = Mailboxes(
            council,
            members,
            HOME,
            kind=self.kind,
            timeout=self.timeout,
            job=self.job,
            watch=self._watch,
            trouble=self._trouble,
        )
        moved.barrier()
        moved._watch = lambda member: council.gone(member)
        moved._trouble = council.told
        return moved

    def subgroup(
        self, ranks: Sequence[int], name: str, *, timeout: float | None = None
    ) -> Mailboxes | Solo:
        self.check()
        members = self._check_members(ranks)
        seconds = self.timeout if timeout is None else timeout
        if len(members) == 1:
            return Solo(seconds)
        return Mailboxes(
            self._council,
            [self._members[r] for r in members],
            f"{self._purpose}/{name}",
            kind=self.kind,
            timeout=seconds,
        )

    def check(self) -> None:
        if self._closed:
            raise ClosedError("this communicator is closed", rank=self.rank)
        if self._failure is not None:
            raise self._failure.error(self.rank)

    def abort(self, reason: str) -> None:
        # The others hear of it from the region's abort word, which the core writes.
        if self._failure is None:
            self._failure = failure_of(
                AbortedError, f"rank {self.rank} aborted: {reason}", self.rank
            )

    def close(self) -> None:
        self._closed = True  # the core says so in the region
