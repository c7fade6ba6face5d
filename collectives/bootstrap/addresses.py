"""Where ranks of Tcp may meet, and what keeps others out."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import stat

from ..config import Settings
from ..errors import BootstrapError

_MIN_SECRET = 16  # bytes


def listen(host: str, port: int = 0, *, backlog: int = 1024) -> socket.socket:
    """A socket that listens on exactly this address (port 0: any free one).

    Raises BootstrapError where the address is another machine's, or is in use.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:  # the latter: no name of a host at all
        raise BootstrapError(f"the address {host!r} is unknown: {error}") from error
    family, kind, protocol, _, address = found[0]
    try:
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise BootstrapError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(backlog)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise BootstrapError(
                f"{host}:{port} is in use, by another job or program; choose another port with "
                "COLLECTIVES_PORT or MASTER_PORT"
            ) from error
        if error.errno == errno.EADDRNOTAVAIL:
            raise BootstrapError(
                f"{host} is no address of this host ({socket.gethostname()}), where rank 0 runs "
                "and must listen; set COLLECTIVES_ADDR or MASTER_ADDR to one of its addresses on "
                "all ranks"
            ) from error
        raise BootstrapError(f"cannot listen on {host}:{port}: {error}") from error
    return sock


def is_loopback(host: str) -> bool:
    """True if every address of `host` reaches this machine only."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        return False
    return all(
        ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_loopback for entry in found
    )


def _read_private(path: str, name: str) -> bytes:
    """What is in a file that nobody else can read or have put there."""
    try:
        # A link could be another user's; O_NONBLOCK: a FIFO would wait for its writer.
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise BootstrapError(f"{name} is a symbolic link: name the file itself") from error
        raise BootstrapError(f"{name} cannot be read: {error.strerror}") from error
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode):
        os.close(file)
        raise BootstrapError(f"{name} is no regular file")
    with open(file, "rb") as opened:
        if found.st_uid not in (os.geteuid(), 0):
            raise BootstrapError(
                f"{name} belongs to user {found.st_uid}, this process to user {os.geteuid()}"
            )
        if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            mode = found.st_mode & 0o777
            raise BootstrapError(
                f"{name} can be read or written by others (mode {mode:o}): chmod 600 it"
            )
        return opened.read(1 << 16).strip()


def read_secret(settings: Settings) -> bytes:
    """The secret that the settings name, b"" if none. Raises BootstrapError for one that is short
    or not private.
    """
    if settings.secret and settings.secret_file:
        raise BootstrapError("COLLECTIVES_SECRET and COLLECTIVES_SECRET_FILE are both set; set one")
    if settings.secret_file:
        name = f"COLLECTIVES_SECRET_FILE {settings.secret_file!r}"
        secret = _read_private(settings.secret_file, name)
    else:
        name = "COLLECTIVES_SECRET"
        secret = os.fsencode(settings.secret.strip())  # any bytes
        if not settings.secret:
            return b""
    if len(secret) < _MIN_SECRET:
        raise BootstrapError(
            f"{name} holds {len(secret)} bytes, fewer than {_MIN_SECRET}: too easy to guess"
        )
    return secret
