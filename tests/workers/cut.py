"""Ranks on two hosts whose link is cut in the middle of calls: what each raises, and when.

    cut.py FOLDER COLLECTIVE TIMEOUT

Writes FOLDER/ready.RANK when the calls run, and FOLDER/rank.RANK with the name of the error and the
seconds from the last call that was done; standard output would have to cross the link that is cut.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np
import worker

import collectives as cc


def main() -> None:
    folder, collective, timeout = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    comm = cc.init(timeout=timeout)
    x = np.ones(1 << 18, np.float32)
    call = getattr(comm, collective)
    done = 0
    last = time.monotonic()
    try:
        while True:
            call(x[: x.size // comm.size] if collective == "all_gather" else x)
            last = time.monotonic()
            done += 1
            if done == 3:
                (folder / f"ready.{comm.rank}").touch()
    except cc.CollectiveError as error:
        seconds = time.monotonic() - last
        text = f"{type(error).__name__} {seconds:.2f} {str(error).splitlines()[0]}"
        written = folder / f".rank.{comm.rank}"
        written.write_text(text)
        written.rename(folder / f"rank.{comm.rank}")
        # The launcher ends all others with the first that ends.
        while len(list(folder.glob("rank.*"))) < comm.size and time.monotonic() - last < 30:
            time.sleep(0.01)
    os._exit(0)  # MPI's own end would wait for the other host


worker.run(main)
