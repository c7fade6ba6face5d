"""The limit of open files, which the process that hosts the rendezvous reaches first: a rank takes
one there for each communicator that is open.

The soft limit is raised where it is in the way, as NCCL does where its ranks meet, and by no more
than is needed: programs may choose it with care, since select() cannot have files above 1,024.
"""

from __future__ import annotations

import errno
import resource

SHORT = (errno.EMFILE, errno.ENFILE)  # of this process, of the machine


def raise_limit(number: int) -> bool:
    """After the error `number` doubles the soft limit, up to the hard one; False if that is no
    help.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    more = 2 * soft if hard == resource.RLIM_INFINITY else min(2 * soft, hard)
    if number != errno.EMFILE or soft == resource.RLIM_INFINITY or more <= soft:
        return False
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))
    except (OSError, ValueError):  # the kernel allows less
        return False
    return True


def in_words(number: int, host: str, missing: int) -> str:
    """Why `host` lets in no more ranks though some are `missing`, and what to do."""
    why = f"{host}, which hosts the rendezvous, cannot let in all ranks"
    if number == errno.ENFILE:
        return f"{why}: its machine has reached its limit of open files; raise sysctl fs.file-max"
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        f"{why}: it has reached its limit of open files, {soft}, and each rank takes one for every "
        f"communicator that is open; raise the limit, the hard one too, where it is started: "
        f"`ulimit -n {1 << (soft + missing).bit_length()}`"
    )
