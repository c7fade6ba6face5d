"""A rank of Tcp."""

from __future__ import annotations

import hmac
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from ..config import DEFAULT_HEARTBEAT, DEFAULT_TIMEOUT
from ..errors import (
    BootstrapError,
    ClosedError,
    CollectiveError,
    DeadlineError,
    PeerDiedError,
)
from . import descriptors
from .forks import Birth, close_sockets_in_child
from .groups import Base, Failure, failure_of, interrupted, part_name
from .wire import (
    ABORT,
    ACCEPTED,
    CALL,
    ERROR,
    FOREVER,
    FRAME_LIMIT,
    GOODBYE,
    GRACE,
    GREETING,
    HANDSHAKE_SECONDS,
    HELLO,
    MAGIC,
    NONCE,
    REFUSED,
    RESULT,
    VERDICT,
    WELCOME,
    Hello,
    Link,
    pack_call,
    pack_hello,
    prove,
    tune,
    unpack_failure,
    unpack_list,
    unpack_welcome,
)

if TYPE_CHECKING:
    from .hosting import Hosted

Answer = TypeVar("Answer")


class Tcp(Base):
    """A rank that meets the others at a `Server`.

    address   host name or IP address, and port
    rank      this rank
    size      number of ranks of the group
    secret    the same on all ranks and the server
    job       name of the job, "" if it has none
    timeout   seconds to wait for all ranks, and in each call
    group     name of the group; names that begin with "world" are those of all ranks
    hosted    the server, if it runs in this process and ends with this object
    heartbeat seconds until a host that vanished is noticed
    parent    the group that this is a part of; nothing is waited for once that is broken

    Raises BootstrapError if nothing listens in time, a rank is missing, or this one does not belong
    here.
    """

    kind = "tcp"

    def __init__(
        self,
        address: tuple[str, int],
        *,
        rank: int,
        size: int,
        secret: bytes = b"",
        job: str = "",
        timeout: float = DEFAULT_TIMEOUT,
        group: str = "world",
        hosted: Hosted | None = None,
        heartbeat: float = DEFAULT_HEARTBEAT,
        parent: Tcp | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self._address = address
        self._secret = secret
        self._job = job
        self._group = group
        self._hosted = hosted
        self._heartbeat = heartbeat
        self._birth = Birth()
        self._parent = parent
        # The server of a part was there before: one that says nothing is late, and no stranger.
        self._silence = BootstrapError if parent is None else DeadlineError
        # Who runs the server; it tells when all are there.
        self._host: str = parent._host if parent is not None else "rank 0 (or a launcher)"
        self._lock = threading.Lock()  # one call at a time
        self._send_lock = threading.Lock()  # one frame at a time: abort does not wait for a call
        self._failure: Failure | None = None
        self._closed = False
        deadline = time.monotonic() + timeout
        try:
            self._sock, self._link = self._connect(deadline)
            self._parent = None
        except BaseException:
            self._release()
            raise
        close_sockets_in_child(self)
        try:
            self.job = self._join(deadline)
        except BaseException:
            self._sock.close()
            self._release()
            raise

    @property
    def _where(self) -> str:
        return f"{self._address[0]}:{self._address[1]}"

    def _connect(self, deadline: float) -> tuple[socket.socket, Link]:
        """Tries until the deadline: the server may start later than this rank."""
        pause = 0.01
        while True:
            left = deadline - time.monotonic()
            try:
                sock = socket.create_connection(
                    self._address, timeout=max(0.05, min(left, HANDSHAKE_SECONDS))
                )
                try:
                    tune(sock, self._heartbeat)
                    seconds = max(0.05, min(deadline - time.monotonic(), HANDSHAKE_SECONDS))
                    return sock, self._shake_hands(sock, seconds)
                except BaseException:
                    sock.close()
                    raise
            except UnicodeError as error:
                raise BootstrapError(
                    f"the address {self._address[0]!r} is no name of a host: {error}",
                    rank=self.rank,
                ) from error
            except OSError as error:
                if isinstance(error, CollectiveError):
                    raise
                if error.errno in descriptors.SHORT:
                    if self._hosted is not None and descriptors.raise_limit(error.errno):
                        continue
                    raise BootstrapError(
                        f"rank {self.rank} of {self.size} cannot reach the rendezvous at "
                        f"{self._where}: {error.strerror}; raise the limit of open files with "
                        "ulimit -n",
                        rank=self.rank,
                    ) from error
                if self._parent is not None:
                    self._parent.check()
                if time.monotonic() + pause >= deadline:
                    raise self._silence(
                        f"rank {self.rank} of {self.size} reached no rendezvous at {self._where} "
                        f"in {self.timeout:g} s ({error}); has rank 0 started, and is the address "
                        "right?",
                        rank=self.rank,
                    ) from error
            time.sleep(pause)
            pause = min(0.5, pause * 1.5)

    def _shake_hands(self, sock: socket.socket, seconds: float) -> Link:
        greeting = receive_exactly(sock, GREETING, len(MAGIC), MAGIC, seconds)
        if greeting is None or not greeting.startswith(MAGIC):
            said = f"said {greeting!r}" if greeting else f"said nothing for {seconds:.2g} s"
            stopped = "" if greeting else f", or {self._host}, which hosts it, has stopped"
            raise (BootstrapError if greeting else self._silence)(
                f"what listens at {self._where} is no rendezvous of this package, or of another "
                f"version of it (it {said}){stopped}; choose another port with COLLECTIVES_PORT or "
                "MASTER_PORT",
                rank=self.rank,
            )
        theirs, ours = greeting[len(MAGIC) :], secrets.token_bytes(NONCE)
        sock.sendall(MAGIC + ours + prove(self._secret, b"rank", theirs, ours))
        verdict = receive_exactly(sock, VERDICT, seconds=seconds)
        if verdict is None:
            raise TimeoutError("no answer to the handshake")
        if verdict.startswith(REFUSED):
            raise BootstrapError(
                f"the rendezvous at {self._where} refused the secret of rank {self.rank}: "
                "COLLECTIVES_SECRET or COLLECTIVES_SECRET_FILE differ, or the address is another "
                "job's",
                rank=self.rank,
            )
        expected = ACCEPTED + prove(self._secret, b"server", theirs, ours)
        if not hmac.compare_digest(verdict, expected):
            raise BootstrapError(
                f"what listens at {self._where} does not know the secret of this job: it is not "
                "our rendezvous",
                rank=self.rank,
            )
        return Link(prove(self._secret, b"key", theirs, ours), b"rank", b"server", FRAME_LIMIT)

    def _join(self, deadline: float) -> str:
        left = max(0.0, deadline - time.monotonic())
        hello = Hello(
            rank=self.rank,
            size=self.size,
            group=self._group,
            job=self._job,
            timeout=left,
            asked=self.timeout,
            host=socket.gethostname(),
            pid=os.getpid(),
        )
        welcome = self._talk((HELLO, pack_hello(hello)), (WELCOME, unpack_welcome), left, "init")
        self._host = welcome.host
        return welcome.job

    def _talk(
        self,
        question: tuple[int, bytes],
        answers: tuple[int, Callable[[bytes], Answer]],
        timeout: float,
        op: str,
    ) -> Answer:
        """Sends one frame, waits for one of the kind that answers it, and decodes that; any error
        is remembered, since the conversation is then broken.
        """
        deadline = time.monotonic() + timeout + GRACE
        decoded: Answer | None = None
        try:
            try:
                self._sock.settimeout(min(timeout + GRACE, FOREVER))
                with self._send_lock:
                    self._sock.sendall(self._link.seal(*question))
            except (BrokenPipeError, ConnectionResetError, TimeoutError):
                pass  # what the server said before it hung up, or stopped, is still to be read
            answer = self._receive(deadline)
            if answer is not None and answer[0] == ERROR:
                self._failure = unpack_failure(answer[1])
            elif answer is not None and answer[0] != answers[0]:
                raise ValueError(f"it answered {op} with frame {answer[0]}")
            elif answer is not None:
                decoded = answers[1](answer[1])
            else:
                self._failure = failure_of(
                    DeadlineError,
                    f"{op}: the rendezvous at {self._where} did not answer in {timeout + GRACE:g} "
                    f"s; has {self._host}, which hosts it, stopped?",
                )
        except (OSError, ValueError) as error:
            self._failure = self._lost(str(error))
        except BaseException as error:
            self._failure = interrupted(op, error)
            raise
        if self._failure is not None:
            raise self._failure.error(self.rank)
        assert decoded is not None
        return decoded

    def _receive(self, deadline: float) -> tuple[int, bytes] | None:
        """The next frame, None at the deadline. Raises OSError or ValueError if the connection is
        over.
        """
        while (frame := self._link.next()) is None:
            self._sock.settimeout(min(max(1e-3, deadline - time.monotonic()), FOREVER))
            try:
                data = self._sock.recv(1 << 18)
            except TimeoutError:
                return None
            if not data:
                raise ConnectionResetError("the connection ended")
            self._link.feed(data)
        return frame

    def _lost(self, why: str) -> Failure:
        return failure_of(
            PeerDiedError,
            f"rank {self.rank} lost the rendezvous at {self._where}: {why}; has {self._host}, "
            "which hosts it, died?",
        )

    def _exchange(self, op: str, data: bytes, timeout: float) -> list[bytes]:
        self._birth.check(self.rank)
        with self._lock:
            self._raise_if_broken()
            call = pack_call(op, data, timeout)
            return self._talk((CALL, call), (RESULT, self._parts), timeout, op)

    def _parts(self, payload: bytes) -> list[bytes]:
        parts = unpack_list(payload)
        if len(parts) != self.size:
            raise ValueError(f"it answered with {len(parts)} parts for {self.size} ranks")
        return parts

    def subgroup(self, ranks: Sequence[int], name: str, *, timeout: float | None = None) -> Tcp:
        self.check()
        members = self._check_members(ranks)
        return Tcp(
            self._address,
            rank=members.index(self.rank),
            size=len(members),
            secret=self._secret,
            job=self._job,
            timeout=self.timeout if timeout is None else timeout,
            group=part_name(self.job, name),
            hosted=self._hosted.share() if self._hosted is not None else None,
            heartbeat=self._heartbeat,
            parent=self,
        )

    def check(self) -> None:
        self._birth.check(self.rank)
        if not self._lock.acquire(blocking=False):
            return  # another thread waits in a call, which will raise
        try:
            self._raise_if_broken()
            try:
                self._read_what_came()
            except (OSError, ValueError) as error:
                self._failure = self._lost(str(error))
            self._raise_if_broken()
        finally:
            self._lock.release()

    def _read_what_came(self) -> None:
        """Takes every frame that has arrived, without waiting. An error may lie in the buffer
        already: it came in one piece with the answer before it.
        """
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        while self._failure is None:
            while (frame := self._link.next()) is not None:
                if frame[0] == ERROR:
                    self._failure = unpack_failure(frame[1])
                    return
            if not poll.poll(0):
                return
            data = self._sock.recv(1 << 18)
            if not data:
                raise ConnectionResetError("the connection ended")
            self._link.feed(data)

    def _raise_if_broken(self) -> None:
        if self._closed:
            raise ClosedError("this communicator is closed", rank=self.rank)
        if self._failure is not None:
            raise self._failure.error(self.rank)

    def abort(self, reason: str) -> None:
        self._birth.check(self.rank)
        # Without the lock of calls, which another thread may hold: its call is what this ends.
        if self._failure is None and not self._closed:
            try:
                with self._send_lock:
                    self._sock.sendall(self._link.seal(ABORT, reason.encode()))
            except OSError as error:
                self._failure = self._lost(str(error))

    def close_sockets(self) -> None:
        self._sock.close()

    def close(self) -> None:
        if self._birth.in_child():
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                if self._failure is None:
                    self._sock.settimeout(min(GRACE, self.timeout))
                    with self._send_lock:
                        self._sock.sendall(self._link.seal(GOODBYE, b""))
                    # The server hangs up once it has read the goodbye; leaving before that could
                    # reset the connection.
                    while self._sock.recv(1 << 16):
                        pass
            except OSError:
                pass  # the server is gone, and so there is nobody to take leave of
            finally:
                self._sock.close()
                self._release()

    def _release(self) -> None:
        if self._hosted is not None:
            self._hosted.release()
            self._hosted = None


def receive_exactly(
    sock: socket.socket,
    count: int,
    prefix: int = 0,
    expected: bytes = b"",
    seconds: float = HANDSHAKE_SECONDS,
) -> bytes | None:
    """`count` bytes, or fewer as soon as the first `prefix` differ from `expected`; None if there
    is only silence.

    Raises OSError if the connection ends before.
    """
    data = b""
    deadline = time.monotonic() + seconds
    while len(data) < count:
        sock.settimeout(max(1e-3, deadline - time.monotonic()))
        try:
            more = sock.recv(count - len(data))
        except TimeoutError:
            return data or None
        if not more:
            raise ConnectionResetError("the connection ended during the handshake")
        data += more
        head = data[:prefix]
        if head != expected[: len(head)]:
            return data
    return data
