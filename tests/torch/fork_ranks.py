"""Runs a script as ranks that are forked from one process, which has imported torch.

    python fork_ranks.py N SCRIPT [ARGUMENTS]

Importing torch takes seconds, and N ranks would do it N times. Ranks find RANK and WORLD_SIZE, and
the address of a store in STORE, for init_process_group(init_method=...).
"""

from __future__ import annotations

import os
import runpy
import sys
import tempfile

import torch.distributed
import torch.distributed.fsdp
import torch.nn.parallel


def main() -> int:
    n, script = int(sys.argv[1]), sys.argv[2]
    store = os.path.join(tempfile.mkdtemp(prefix="ranks-"), "store")
    ranks = {}
    for rank in range(n):
        pid = os.fork()
        if pid == 0:
            os.environ.update(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(n), STORE=f"file://{store}"
            )
            sys.argv[:] = sys.argv[2:]
            sys.path.insert(0, os.path.dirname(script))
            torch.set_num_threads(1)
            runpy.run_path(script, run_name="__main__")
            return 0
        ranks[pid] = rank
    worst = 0
    for _ in range(n):
        pid, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        if code:
            print(f"rank {ranks[pid]} ended with status {code}", flush=True)
            worst = worst or code
    if os.path.exists(store):
        os.remove(store)
    os.rmdir(os.path.dirname(store))
    return 0 if not worst else 1


if __name__ == "__main__":
    sys.exit(main())
