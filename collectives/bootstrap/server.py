"""The process where all ranks of Tcp meet: it lets them in and relays their calls."""

from __future__ import annotations

import contextlib
import heapq
import hmac
import itertools
import math
import selectors
import socket
import threading
import time
from collections.abc import Callable

from ..config import DEFAULT_HEARTBEAT
from ..errors import (
    AbortedError,
    BootstrapError,
    ClosedError,
    CollectiveError,
    DeadlineError,
    PeerDiedError,
)
from . import descriptors
from .forks import Birth, close_sockets_in_child
from .groups import Failure, Round, failure_of, name_ranks, parent_of
from .meetings import Connection, Meeting, Timer, Wait
from .wire import (
    ABORT,
    ACCEPTED,
    ANSWER,
    CALL,
    ERROR,
    FRAME_LIMIT,
    GOODBYE,
    HANDSHAKE_SECONDS,
    HELLO,
    HELLO_LIMIT,
    MAC,
    MAGIC,
    REFUSED,
    RESULT,
    WELCOME,
    Hello,
    Link,
    Welcome,
    bounded,
    pack_failure,
    pack_list,
    pack_welcome,
    prove,
    tune,
    unpack_call,
    unpack_hello,
)

STRANGERS = 256  # connections without a proof at a time; a job's own ranks come on top
_HURRY = 1.0  # seconds that a stranger has at least, where others find no room
REMEMBERED = 1024  # groups that ended before all came, for ranks that come to them late


class Server:
    """The rendezvous: lets ranks in, relays their calls, and tells all of them when one is gone.

    listener  a listening socket (see `listen`), owned by the server from here on
    size      number of ranks in the world
    secret    what a rank must know; b"" lets in everyone who reaches the socket
    job       a rank that names another job is refused ("" on either side: not compared)
    heartbeat seconds until a rank's host that vanished is noticed
    host      how errors name the process that this runs in

    Runs in a daemon thread of its own between `start` and `stop`. Each rank takes a file descriptor
    of this process for every group that it is in. Where these run out, the soft limit is raised,
    and at the hard one groups whose ranks do not all find room fail on all of them.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        size: int,
        secret: bytes = b"",
        job: str = "",
        host: str = "rank 0",
        heartbeat: float = DEFAULT_HEARTBEAT,
    ) -> None:
        self.size = size
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self._secret = secret
        self._job = job
        self._host = host
        self._heartbeat = heartbeat
        self._listener = listener
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._wake_read, self._wake_write = socket.socketpair()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._spare: socket.socket | None = socket.socket(socket.AF_UNIX)  # room for one more
        self._short = 0  # the error since when there is no such room
        self._connections: set[Connection] = set()
        self._strangers: dict[Connection, None] = {}  # in order of arrival
        self._meetings: dict[str, Meeting] = {}
        self._failed: dict[str, Failure] = {}  # why, by the job of a group that is broken
        self._deserted: dict[str, None] = {}  # groups that ended in trouble, oldest first
        self._timers: list[Timer] = []
        self._cancelled = 0  # timers that are still in the heap
        self._stop_at: float | None = None
        self._stopping = False
        self.lost: list[int] = []  # ranks of the world that left without a goodbye, in order
        self._birth = Birth()
        close_sockets_in_child(self)
        self._thread = threading.Thread(
            target=self._run, name="collectives-rendezvous", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def stop(self, seconds: float = 5.0) -> None:
        """Tells ranks that are still there, sends what is still to be sent within `seconds`, and
        ends the thread.
        """
        if self._birth.in_child():
            return  # the thread is the parent's
        if self._thread.ident is None:
            self.close_sockets()
            return
        self._stop_at = time.monotonic() + seconds
        try:
            self._wake_write.send(b"x")
        except OSError:  # the thread has ended, and closed it
            return
        self._thread.join(seconds + 1)

    # The loop

    def _run(self) -> None:
        try:
            while not self._done():
                for key, events in self._selector.select(self._patience()):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is self._wake_read:
                        self._wake_read.recv(64)
                    else:
                        self._serve(key.data, events)
                self._drop_silent_strangers()
                while self._timers and self._timers[0].when <= time.monotonic():
                    self._ring_timer(heapq.heappop(self._timers))
        finally:
            self.close_sockets()

    def _patience(self) -> float | None:
        ends = [self._timers[0].when] if self._timers else []
        ends += [s.came + HANDSHAKE_SECONDS for s in itertools.islice(self._strangers, 1)]
        if self._stop_at is not None:
            ends.append(self._stop_at)
        # poll() counts milliseconds in 31 bits: 24 days. Woken before it is time, it waits again.
        return min(max(0.0, min(ends) - time.monotonic()), 1e6) if ends else None

    def _done(self) -> bool:
        if self._stop_at is None:
            return False
        if not self._stopping:
            self._stopping = True
            for meeting in list(self._meetings.values()):
                meeting.group.fail(
                    ClosedError, f"{self._host}, which hosts the rendezvous, has closed"
                )
                self._tell(meeting)
        owing = any(m.crowded and len(m.told) < m.group.size for m in self._meetings.values())
        ended = not owing and not any(c.outgoing for c in self._connections)
        return ended or time.monotonic() >= self._stop_at

    def close_sockets(self) -> None:
        for connection in self._connections:
            connection.sock.close()
        if self._spare is not None:
            self._spare.close()
        self._listener.close()
        self._wake_read.close()
        self._wake_write.close()
        self._selector.close()

    def _at(self, when: float, action: Callable[[], None]) -> Timer:
        timer = Timer(when, action)
        heapq.heappush(self._timers, timer)
        return timer

    def _ring_timer(self, timer: Timer) -> None:
        action, timer.action = timer.action, None
        if action is None:
            self._cancelled -= 1
        else:
            action()

    def _cancel(self, timers: list[Timer]) -> None:
        """Forgets what the timers would have done; they themselves go when they are the most."""
        for timer in timers:
            if timer.action is not None:
                timer.action = None
                self._cancelled += 1
        timers.clear()
        if self._cancelled > 64 and self._cancelled > len(self._timers) // 2:
            self._timers = [timer for timer in self._timers if timer.action is not None]
            heapq.heapify(self._timers)
            self._cancelled = 0

    # Connections

    def _accept(self) -> None:
        try:
            sock, address = self._listener.accept()
        except OSError as error:
            if error.errno in descriptors.SHORT:
                self._make_room(error.errno)
            else:  # gone again
                time.sleep(0.01)
            return
        try:
            sock.setblocking(False)
            tune(sock, self._heartbeat)
        except OSError:  # one connection of many
            sock.close()
            return
        self._admit(
            sock, f"{address[0]}:{address[1]}" if isinstance(address, tuple) else str(address)
        )

    def _admit(self, sock: socket.socket, address: str) -> Connection:
        """A stranger, until it has proved the secret and joined; the oldest make room."""
        connection = Connection(sock, address)
        self._connections.add(connection)
        self._strangers[connection] = None
        self._selector.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE, connection)
        if len(self._strangers) > STRANGERS + self.size:
            self._close(next(iter(self._strangers)))
        return connection

    def _make_room(self, number: int) -> None:
        """No descriptor is free for who comes; `number` says so."""
        if descriptors.raise_limit(number):
            return
        self._short = number
        if self._spare is not None:  # it comes in and says to which group it belongs
            self._spare.close()
            self._spare = None
            return
        self._fail_crowded()
        oldest = next(iter(self._strangers), None)
        if oldest is not None and oldest.came + _HURRY < time.monotonic():
            self._close(oldest)
        else:
            time.sleep(0.01)

    def _fail_crowded(self) -> None:
        """Fails the groups that gather, if more of their ranks are missing than could still be on
        connections that are in.
        """
        groups = [
            meeting
            for meeting in self._meetings.values()
            if meeting.members and not meeting.complete and meeting.group.failure is None
        ]
        missing = sum(m.group.size - len(m.members) for m in groups)
        if missing > len(self._strangers):
            words = descriptors.in_words(self._short, self._host, missing)
            for meeting in groups:
                meeting.crowded = True
                meeting.group.fail(BootstrapError, words)
                self._tell(meeting)

    def _drop_silent_strangers(self) -> None:
        now = time.monotonic()
        while self._strangers:
            oldest = next(iter(self._strangers))
            if oldest.came + HANDSHAKE_SECONDS > now:
                return
            self._close(oldest)

    def _close(self, connection: Connection) -> None:
        self._strangers.pop(connection, None)
        if connection in self._connections:
            self._connections.remove(connection)
            self._cancel(connection.timers)
            self._selector.unregister(connection.sock)
            connection.sock.close()
            if self._spare is None:
                with contextlib.suppress(OSError):  # another thread was faster
                    self._spare, self._short = socket.socket(socket.AF_UNIX), 0

    def _serve(self, connection: Connection, events: int) -> None:
        if connection not in self._connections:
            return  # closed since select returned
        try:
            if events & selectors.EVENT_READ:
                self._read(connection)
            if connection in self._connections and connection.outgoing:
                sent = connection.sock.send(connection.outgoing)
                del connection.outgoing[:sent]
        except (BlockingIOError, InterruptedError):
            pass
        except Exception as error:
            # The peer is gone, or does not speak as it should. Whatever it sent ends its own
            # connection, with these words for the others, and never the server.
            self._lose(connection, str(error) or type(error).__name__)
        if connection in self._connections:
            if connection.ending and not connection.outgoing:
                self._close(connection)
            else:
                self._watch(connection)

    def _watch(self, connection: Connection) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.outgoing else 0)
        if self._selector.get_key(connection.sock).events != events:
            self._selector.modify(connection.sock, events, connection)

    def _send(self, connection: Connection, kind: int, payload: bytes) -> None:
        if connection.link is not None and connection in self._connections:
            connection.outgoing += connection.link.seal(kind, payload)
            self._watch(connection)

    def _read(self, connection: Connection) -> None:
        link = connection.link
        if link is None:
            data = connection.sock.recv(ANSWER - len(connection.answer))
            if not data:
                self._close(connection)
                return
            connection.answer += data
            self._authenticate(connection)
            return
        data = connection.sock.recv(1 << 18)
        if not data:
            self._lose(connection, "its connection ended")
            return
        if connection.ending:
            return
        link.feed(data)
        while connection in self._connections and not connection.ending:
            frame = link.next()
            if frame is None:
                return
            self._handle(connection, *frame)

    def _authenticate(self, connection: Connection) -> None:
        answer = bytes(connection.answer)
        magic = answer[: len(MAGIC)]
        if magic != MAGIC[: len(magic)]:
            self._close(connection)
            return
        if len(answer) < ANSWER:
            return
        nonce, proof = answer[len(MAGIC) : -MAC], answer[-MAC:]
        if not hmac.compare_digest(proof, prove(self._secret, b"rank", connection.nonce, nonce)):
            connection.outgoing += REFUSED + bytes(MAC)
            connection.ending = True
            return
        connection.outgoing += ACCEPTED + prove(self._secret, b"server", connection.nonce, nonce)
        key = prove(self._secret, b"key", connection.nonce, nonce)
        connection.link = Link(key, b"server", b"rank", HELLO_LIMIT)

    # Groups

    def _handle(self, connection: Connection, kind: int, payload: bytes) -> None:
        if connection.meeting is None:
            if kind != HELLO:
                raise ValueError(f"frame {kind} before a hello")
            self._join(connection, unpack_hello(payload))
            return
        meeting, rank = connection.meeting, connection.rank
        group = meeting.group
        if kind == CALL:
            op, data, timeout = unpack_call(payload)
            if rank in meeting.waiting:
                raise ValueError("a second call before the first has ended")
            if group.failure is None:
                current = group.put(rank, op, data)
                deadline = time.monotonic() + bounded(timeout)
                meeting.waiting[rank] = Wait(current, deadline, timeout)
                if current.result is not None:
                    self._finish_round(meeting, current)
                else:
                    self._set_alarm(meeting, connection)
        elif kind == GOODBYE:
            group.leave(rank)
            connection.ending = True
            del meeting.members[rank]
            if not meeting.members:
                if meeting.complete:
                    self._meetings.pop(group.name, None)
                else:
                    self._desert(meeting)
        elif kind == ABORT:
            group.fail(AbortedError, f"rank {rank} aborted: {payload.decode()}", rank)
        else:
            raise ValueError(f"frame of unknown kind {kind}")
        if group.failure is not None:
            self._tell(meeting)

    def _join(self, connection: Connection, hello: Hello) -> None:
        rank, size, name = hello.rank, hello.size, hello.group
        job, timeout = hello.job, hello.timeout
        connection.who = f"{hello.host}, pid {hello.pid}"
        connection.rank = rank
        self._strangers.pop(connection, None)
        if job and self._job and job != self._job:
            self._refuse(
                connection,
                f"this rendezvous belongs to job {self._job!r}, and {connection.where} belongs to "
                f"job {job!r}: two jobs use one address and port",
            )
            return
        world = name.startswith("world")
        meeting = self._meetings.get(name)
        if world and meeting is not None and not meeting.complete and rank in meeting.told:
            # It knows that this one failed, and tries again.
            self._failed.pop(meeting.group.job, None)
            meeting = None
        if world and size != self.size:
            message = (
                f"{connection.where} was told that the world has {size} ranks, but {self._host}, "
                f"which hosts the rendezvous, was told {self.size}"
            )
        elif meeting is not None and size != meeting.group.size:
            message = (
                f"group {name!r}: {connection.where} says it has {size} ranks, "
                f"{meeting.founder.where} said {meeting.group.size}"
            )
        elif not 1 <= size <= self.size:
            message = f"group {name!r} of {size} ranks: this job has {self.size}"
        elif not 0 <= rank < size:
            message = (
                f"{connection.where} is no rank of a world of {size}: ranks are 0 to {size - 1}"
            )
        elif meeting is not None and rank in meeting.members:
            message = f"rank {rank} came twice: {meeting.members[rank].who}, and {connection.who}"
        else:
            message = ""
        if message:
            # While ranks gather, a set-up that contradicts itself can only end in a missing rank:
            # all hear of it now. A job that is complete goes on.
            if meeting is None and world:
                meeting = self._meetings[name] = Meeting(name, self.size, connection)
            if meeting is not None and not meeting.complete:
                meeting.group.fail(BootstrapError, message, rank)
                self._tell(meeting)
            self._refuse(connection, message)
            return
        if meeting is None:
            meeting = self._meetings[name] = Meeting(name, size, connection)
        connection.meeting = meeting
        assert connection.link is not None
        connection.link.limit = FRAME_LIMIT
        if meeting.group.failure is None and rank in meeting.group.left:
            meeting.group.fail(
                ClosedError, f"rank {rank} of group {name!r} had left it and came again", rank
            )
        meeting.members[rank] = connection
        parent = parent_of(name)
        if parent in self._failed and not meeting.complete:
            meeting.group.failure = meeting.group.failure or self._failed[parent]
        if meeting.group.failure is not None:
            self._tell(meeting)
        elif len(meeting.members) == size:
            meeting.complete = True
            self._cancel(meeting.timers)
            welcome = pack_welcome(Welcome(meeting.group.job, self._host))
            for member in meeting.members.values():
                self._send(member, WELCOME, welcome)
        else:
            deadline = time.monotonic() + bounded(timeout)
            expire = self._at(deadline, lambda: self._expire_meeting(meeting, hello.asked))
            meeting.timers.append(expire)
            if self._short:
                self._fail_crowded()

    def _refuse(self, connection: Connection, message: str) -> None:
        self._send(connection, ERROR, pack_failure(failure_of(BootstrapError, message)))
        connection.ending = True

    def _finish_round(self, meeting: Meeting, current: Round) -> None:
        assert current.result is not None
        result = pack_list(current.result)
        if len(result) > FRAME_LIMIT:
            message = f"{current.op}: {len(result)} bytes in all are more than {FRAME_LIMIT}"
            meeting.group.fail(CollectiveError, message)
            return
        for rank in [rank for rank, wait in meeting.waiting.items() if wait.round is current]:
            del meeting.waiting[rank]
            self._send(meeting.members[rank], RESULT, result)

    # One alarm a connection, set to the earliest deadline seen and moved on when it goes off too
    # early: a timer for each call would pile up, since nearly all end long before their deadline.

    def _set_alarm(self, meeting: Meeting, connection: Connection) -> None:
        deadline = meeting.waiting[connection.rank].deadline
        if deadline < connection.alarm:
            connection.alarm = deadline
            connection.timers.append(
                self._at(deadline, lambda: self._ring(meeting, connection, deadline))
            )

    def _ring(self, meeting: Meeting, connection: Connection, set_to: float) -> None:
        if connection.alarm != set_to or connection not in self._connections:
            return
        connection.alarm = math.inf
        connection.timers.clear()
        wait = meeting.waiting.get(connection.rank)
        if wait is None or meeting.group.failure is not None:
            return
        if wait.deadline > time.monotonic():
            self._set_alarm(meeting, connection)
        else:
            meeting.group.expire(wait.round, connection.rank, wait.seconds)
            self._tell(meeting)

    def _expire_meeting(self, meeting: Meeting, seconds: float) -> None:
        group = meeting.group
        if meeting.complete or group.failure is not None or not meeting.members:
            return
        missing = set(range(group.size)) - meeting.members.keys()
        who = (
            f"{name_ranks(meeting.members)} of {group.size} came, {name_ranks(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing"
        )
        if parent_of(group.name):
            words = f"a part of the ranks did not gather within {seconds:g} s: {who}"
            group.fail(DeadlineError, words, min(missing))
        else:
            group.fail(
                BootstrapError,
                f"not all ranks came within {seconds:g} s: {who}; were they started, and do they "
                f"reach {self.address[0]}:{self.address[1]}?",
                min(missing),
            )
        self._tell(meeting)

    def _lose(self, connection: Connection, why: str) -> None:
        self._close(connection)
        meeting = connection.meeting
        if meeting is None or meeting.members.get(connection.rank) is not connection:
            return
        del meeting.members[connection.rank]
        meeting.waiting.pop(connection.rank, None)
        if meeting.group.name.startswith("world") and connection.rank not in self.lost:
            self.lost.append(connection.rank)
        when = "" if meeting.complete else " while the others gathered"
        meeting.group.fail(
            PeerDiedError, f"{connection.where} is gone{when}: {why}", connection.rank
        )
        self._tell(meeting)
        if not meeting.members:
            self._desert(meeting)

    def _desert(self, meeting: Meeting) -> None:
        """Who comes late to a group that is no more still hears why, if it is of the latest."""
        self._cancel(meeting.timers)
        self._deserted[meeting.group.name] = None
        if len(self._deserted) > REMEMBERED:
            name = next(iter(self._deserted))
            del self._deserted[name]
            if name in self._meetings and not self._meetings[name].members:
                self._failed.pop(self._meetings.pop(name).group.job, None)

    def _tell(self, meeting: Meeting) -> None:
        """Sends a group's failure to all members that do not know it yet."""
        failure = meeting.group.failure
        assert failure is not None
        payload = pack_failure(failure)
        for member in meeting.members.values():
            if not member.told:
                member.told = True
                meeting.told.add(member.rank)
                self._send(member, ERROR, payload)
        job = meeting.group.job
        if job in self._failed:
            return
        # Who gathers for a part of this group may wait for a rank that will not come.
        self._failed[job] = failure
        for part in list(self._meetings.values()):
            if parent_of(part.group.name) == job and not part.complete:
                part.group.failure = part.group.failure or failure
                self._tell(part)
