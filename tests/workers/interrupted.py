"""Rank 0 is interrupted while it waits for the others over MPI; they come, and it makes another
call.
"""

import gc
import signal
import sys
import time

from collectives.bootstrap import Mpi
from collectives.errors import CollectiveError


def interrupt(number, frame):
    raise KeyboardInterrupt


group = Mpi(timeout=3)
if group.rank == 0:
    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        group.all_gather(b"first of 0")
    except KeyboardInterrupt:
        pass
    else:
        sys.exit("it was not interrupted")
    gc.collect()
    taken = [bytearray(b"x" * 32) for _ in range(1000)]  # where MPI would still write
    try:
        sys.exit(f"out of step: {group.all_gather(b'second of 0')}")
    except CollectiveError as error:
        assert str(error).endswith("all_gather was interrupted by KeyboardInterrupt"), error
    time.sleep(1.5)  # the other one comes, and waits for the rest
    group.comm.Iprobe()  # MPI goes on with what it has
    assert all(piece == b"x" * 32 for piece in taken)
else:
    time.sleep(1)
    try:
        sys.exit(f"out of step: {group.all_gather(b'first of 1')}")
    except CollectiveError as error:
        assert "rank 1 waited 3 s" in str(error), error
print(f"ended well: {group.rank}")
