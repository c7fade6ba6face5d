"""Runs a script as ranks that are forked from one process, which has imported torch.

    python fork_ranks.py N SCRIPT [ARGUMENTS]

Importing torch takes seconds, and N ranks would do it N times. Ranks find each other as under
torchrun: the environment tells each its rank, and of a store that this process keeps.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys

import torch.distributed
import torch.distributed.fsdp
import torch.nn.parallel


def main() -> int:
    n, script = int(sys.argv[1]), sys.argv[2]
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    os.environ.update(
        WORLD_SIZE=str(n),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    ranks = {}
    for rank in range(n):
        pid = os.fork()
        if pid == 0:
            listener.close()
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            sys.argv[:] = sys.argv[2:]
            sys.path.insert(0, os.path.dirname(script))
            torch.set_num_threads(1)
            runpy.run_path(script, run_name="__main__")
            return 0
        ranks[pid] = rank
    # Its thread starts after the ranks were forked.
    store = torch.distributed.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )  # fmt: skip
    worst = 0
    for _ in range(n):
        pid, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        if code:
            print(f"rank {ranks[pid]} ended with status {code}", flush=True)
            worst = worst or code
    del store
    return 0 if not worst else 1


if __name__ == "__main__":
    sys.exit(main())
