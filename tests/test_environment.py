"""Environments that are in the way: what is forbidden, full, limited, apart or shared is found out
and named, with its cure, or does not matter; and forks, signals, threads and the end of the
interpreter do no harm.
"""

from __future__ import annotations

import gc
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import weakref

import launch
import numpy as np
import pytest
from worlds import outcomes

import collectives as cc
from collectives.bootstrap import host_parts, listen, why_apart


def unshared(*kinds: str) -> list[str]:
    """A command that starts its arguments in namespaces of their own; skips where it may not."""
    command = ["unshare", *(f"--{kind}" for kind in kinds)]
    if "pid" in kinds:
        command += ["--fork", "--mount-proc"]
    if not shutil.which("unshare"):
        pytest.skip("no unshare(1) here")
    tried = subprocess.run([*command, "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"{' '.join(command)}: {tried.stderr.strip()}")
    return command


# Some of these end without closing; then Python may warn of a socket, and that is all.
UNCLOSED = {"PYTHONWARNINGS": "error,ignore::ResourceWarning"}


def ranks_say(scenario: str, *arguments: str) -> list[str]:
    got = launch.run(2, "trouble.py", scenario, *arguments, env=UNCLOSED, timeout=60)
    return sorted(got.output.splitlines())


# ---- /dev/shm -----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", ["size=4k", "ro,mode=000"])
def test_dev_shm_does_not_matter(options):
    """Full, read-only or closed: segments are memfds. And a job that was killed leaves nothing."""
    worker = launch.WORKERS / "trouble.py"
    run = f"{sys.executable} -m collectives run -n 2 {worker}"
    script = f"""
        mount -t tmpfs -o {options} tmpfs /dev/shm && cd {launch.TESTS} || exit 9
        head -c 8192 /dev/zero > /dev/shm/full 2>/dev/null
        {run} plain || exit 8
        {run} abandoned & sleep 1; pkill -9 -P $! ; wait
        ls -A /dev/shm | grep -v full; echo end
    """
    got = subprocess.run(
        [*unshared("mount", "pid"), "sh", "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        env={k: v for k, v in os.environ.items() if not k.startswith("COLLECTIVES_")},
    )
    lines = got.stdout.splitlines()
    assert "rank 0 of 2: right over shm " in lines, got
    assert lines[-1] == "end" and not any("shm/" in line for line in lines), got


# ---- what a container may forbid ----------------------------------------------------------------


def test_memfd_create_is_forbidden():
    lines = ranks_say("forbid", "memfd_create")
    assert len(lines) == 3 - 1, lines
    for line in lines:
        assert line.startswith(
            "BootstrapError: the ranks cannot share memory: rank 0: memfd_create"
        )
        assert "seccomp profile forbids it: allow it, or start the job with mpirun" in line


def test_pidfd_open_is_forbidden():
    """Deaths are noticed all the same, by other means."""
    text = "\n".join(ranks_say("forbid", "pidfd_open"))
    assert re.search(r"PeerDiedError: rank 1 \(process \d+\) died .*\(after [01] s\)", text), text


def test_process_vm_readv_is_forbidden():
    """Nothing is read from peers' memory then; results are the same."""
    assert ranks_say("forbid", "process_vm_readv") == [
        "rank 0 of 2: right over shm ",
        "rank 1 of 2: right over shm ",
    ]


@pytest.mark.parametrize(
    ("limit", "cure"), [("NOFILE", "ulimit -n"), ("FSIZE", "ulimit -f"), ("AS", "ulimit -v")]
)
def test_a_limit_is_too_low(limit, cure):
    lines = ranks_say("limit", limit)
    assert len(lines) == 2, lines
    for line in lines:
        assert line.startswith("BootstrapError: the ranks cannot share memory: rank "), lines
        assert cure in line, lines


# ---- namespaces ---------------------------------------------------------------------------------

MEETS = """
import sys, collectives as cc, numpy as np
try:
    comm = cc.init(sys.argv[1], timeout=30)
except cc.CollectiveError as error:
    print(f"{type(error).__name__}: {error}", flush=True)
else:
    x = comm.all_reduce(np.full(100_000, comm.rank + 1.0))
    assert (x == 3).all() and (comm.all_reduce(np.ones(3)) == 2).all()
    print(f"right over {comm.transports}; {comm.fallback}", flush=True)
    comm.close()
"""


@pytest.mark.parametrize("kind", ["pid", "ipc"])
def test_ranks_in_different_namespaces(kind):
    """Without MPI: an error on all ranks that names the namespace, and both cures."""
    with listen("127.0.0.1") as sock:
        port = sock.getsockname()[1]
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    clean = {k: v for k, v in os.environ.items() if not k.startswith("COLLECTIVES_")}
    program = [sys.executable, "-c", MEETS, "tcp"]
    ranks = [
        subprocess.Popen(
            [*before, *program],
            env={**clean, **meeting, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tempfile.gettempdir(),
        )
        for rank, before in enumerate(([], unshared(kind)))
    ]
    for rank, process in enumerate(ranks):
        said, _ = process.communicate(timeout=60)
        assert said.startswith(f"UnsupportedError: ranks {rank} and {1 - rank}, on one machine"), (
            said
        )
        assert f"{kind.upper()} namespace (containers?)" in said, said
        assert "--pid=host --ipc=host" in said and "start the job with mpirun" in said, said


@pytest.mark.mpi
@pytest.mark.parametrize("kind", ["pid", "ipc"])
def test_ranks_in_different_namespaces_use_mpi(kind):
    start, environment = launch.command("openmpi", 1)
    sockets = ["--mca", "pml", "ob1", "--mca", "btl", "self,tcp"]  # Open MPI's own shared memory
    python, program = start.pop(), ["-c", MEETS, "mpi"]
    line = [start[0], *sockets, "-n", "1", python, *program, ":"]
    line += ["-n", "1", *unshared(kind), python, *program]
    got = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=90)
    assert got.stdout.count("right over mpi; MPI is used between ranks") == 2, got
    assert got.stdout.count(f"on one machine, but with different {kind.upper()} namespace") == 2, (
        got
    )


def test_what_keeps_ranks_apart_is_named():
    mine = host_parts()
    assert why_apart(mine, mine) == ""
    assert why_apart(mine, {**mine, "boot": "another", "PID namespace": "x"}) == ""
    words = why_apart(mine, {**mine, "PID namespace": "x", "IPC namespace": "y"})
    assert words == (
        "on one machine, but with different PID namespace and IPC namespace (containers?)"
    )


# ---- counts -------------------------------------------------------------------------------------


def test_more_than_there_is():
    """Sizes that no machine has raise on all ranks, and calls go on."""

    def body(comm):
        words = []
        for shape in ((1 << 62, 8), (1 << 45,), 1 << 63):
            with pytest.raises((cc.CollectiveError, OverflowError)) as caught:
                comm.empty(shape, "float32")
            words.append(str(caught.value))
            assert (comm.all_reduce(np.ones(5)) == comm.size).all()
        assert "more than any machine addresses" in words[0]
        assert "no symmetric memory, on any rank: rank 0: cannot map" in words[1]
        assert "ulimit -v" in words[1]
        with pytest.raises((ValueError, OverflowError)):
            comm.reduce_scatter_v(np.ones(5), [1 << 63, *[0] * (comm.size - 1)])
        with pytest.raises(ValueError):
            comm.all_gather_v(np.ones(5), [1 << 40] * comm.size)
        assert (comm.all_reduce(np.ones(5)) == comm.size).all()
        return True

    for got in outcomes(3, body):
        assert got is True, got


# ---- fork ---------------------------------------------------------------------------------------


@pytest.mark.faults
def test_fork_after_init():
    """A child that uses, closes, drops, or simply ends, does nothing to the parent's job."""
    lines = ranks_say("fork")
    ended = "{'uses': 0, 'closes': 0, 'exits': 0, 'drops': 0, 'crashes': -9}"
    for rank in range(2):
        assert f"rank {rank}: children ended with {ended}" in lines, lines
        assert f"rank {rank}: goes on" in lines, lines
    assert len(lines) == 4, lines


@pytest.mark.faults
def test_a_child_does_not_keep_a_dead_parent_alive():
    text = "\n".join(ranks_say("orphan"))
    assert re.search(r"rank 0: PeerDiedError: rank 1 \(.*is gone.*\(after [01] s\)", text), text


# ---- signals ------------------------------------------------------------------------------------

HOWS = ["small", "large", "ring", "barrier", "queued", "behind", "recv", "send"]


@pytest.mark.faults
@pytest.mark.parametrize("how", [*HOWS, "split"])
def test_ctrl_c_leaves_any_wait(how):
    """At once; and the communicator says its state, on both sides."""
    text = "\n".join(ranks_say("interrupt", how))
    assert re.search(r"rank 0: KeyboardInterrupt after [0-4]\.\d s", text), text
    if how in ("queued", "split"):  # the call itself is not in the wait that ended
        return
    assert re.search(r"rank 0, again: AbortedError: .*a signal handler raised", text), text
    assert re.search(r"rank 1: AbortedError: rank 0 gave up: .*a signal handler raised", text), text


@pytest.mark.parametrize("how", ["large", "recv", "behind"])
def test_handlers_run_while_a_rank_waits(how):
    assert ranks_say("alarms", how) == ["rank 0: several alarms"]


# ---- threads and the end ------------------------------------------------------------------------


def test_two_threads_on_one_communicator_never_mix_their_calls():
    """Large calls, which run without the GIL: each is right, or refused in words."""
    lines = ranks_say("threads")
    assert len(lines) == 2, lines
    assert all("never wrong" in line for line in lines), lines


def test_a_dropped_work_does_not_free_its_arrays():
    """The queue goes on to work on them; a peer's data must not come into memory of others."""

    class Watched(np.ndarray):
        pass

    def body(comm):
        if comm.rank == 1:
            go.wait(20)
            comm.send(np.ones(200_000, np.float32), 0)
            return (comm.all_reduce(np.ones(200_000, np.float32)) == 2).all()
        for start in (
            lambda x: comm.recv(x, 1, async_op=True),
            lambda x: comm.all_reduce(x, async_op=True),
        ):
            x = np.ones(200_000, np.float32).view(Watched)
            ends.append(weakref.ref(x))
            start(x)
            del x
        gc.collect()
        alive = [end() is not None for end in ends]
        go.set()
        comm.close()  # after what is queued
        gc.collect()
        return alive == [True, True] and [end() for end in ends] == [None, None]

    ends: list[weakref.ref[Watched]] = []
    go = threading.Event()
    assert outcomes(2, body) == [True, True]


def test_exit_in_the_middle_of_an_asynchronous_call():
    """Python ends on one rank while another has not called yet: it waits, and the call is right."""
    got = launch.run(2, "trouble.py", "unfinished", env=UNCLOSED, timeout=30).expect(status=0)
    assert sorted(got.output.splitlines()) == ["rank 0 exits", "rank 1 exits"], got


def test_exit_while_a_call_waits_for_nobody():
    """... up to the deadline of the communicator, and no longer."""
    got = launch.run(2, "trouble.py", "abandoned", timeout=30).expect(status=0)
    assert "rank 0 exits" in got.output, got
    assert re.search(r"rank 1: AbortedError: rank 0 gave up.* of rank 1", got.output), got


def test_exit_while_daemon_threads_are_in_calls():
    got = launch.run(2, "trouble.py", "daemon", timeout=30)
    assert got.status is not None and "terminate called" not in got.output, got
    assert "Fatal Python error" not in got.output and "Segmentation" not in got.output, got
    assert got.output.count("exits\n") == 2, got


@pytest.mark.slow
def test_sixteen_ranks_on_two_cores():
    cores = sorted(os.sched_getaffinity(0))[:2]
    got = launch.run(16, "trouble.py", "plain", *map(str, cores), timeout=110).expect(status=0)
    assert got.output.count(" of 16: right over shm") == 16, got
