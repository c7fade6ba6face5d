"""The flight recorder: what it keeps of calls, and how its dumps come about."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import launch
import numpy as np
import pytest
from worlds import outcomes, wait_until

import collectives as cc
from collectives import _core
from collectives.doctor.merging import diagnose, judge, read


def ones(count=12, dtype=np.float32):
    return np.ones(count, dtype)


# ---- records ------------------------------------------------------------------------------------


def test_an_abort_is_an_error_of_all_ranks():
    """Of the rank that aborts, and of one that hears of it when it begins its next call."""

    def body(comm):
        comm.barrier()
        if comm.rank == 0:
            comm.abort("the disk is full")
        wait_until(lambda: comm._core.why_broken)
        with pytest.raises(cc.AbortedError, match="the disk is full"):
            comm.all_reduce(ones())
        return comm.dump()

    dumps = cc.run_threads(2, body, timeout=20)
    errors = [dump["error"] for dump in dumps]
    assert [error["kind"] for error in errors] == ["aborted", "aborted"]
    assert errors[0]["message"] == "aborted: the disk is full"
    assert errors[1]["message"].endswith("the disk is full (rank 1 began a call)")
    (sentence,) = diagnose(dumps)
    assert sentence.endswith("rank 0 was the first to fail: aborted: the disk is full")


def test_what_a_record_says():
    def body(comm):
        began = time.time()
        comm.all_reduce(ones(5000), "max", algorithm="ring", order="rank")
        comm.broadcast(ones(3, np.float64), 1)
        comm.barrier()
        comm.all_gather(ones(7, np.uint8))
        comm.all_reduce(ones(1), async_op=True).wait()
        return began, comm.dump()

    for rank, (began, dump) in enumerate(cc.run_threads(2, body, timeout=20)):
        assert (dump["rank"], dump["size"], dump["transports"]) == (rank, 2, "threads")
        assert (dump["state"], dump["timeout"]) == ("open", 20.0)
        assert "error" not in dump
        assert "waiting" not in dump
        first, second, third, fourth, last = dump["calls"]
        assert [c["sequence"] for c in dump["calls"]] == [1, 2, 3, 4, 5]
        assert all(c["state"] == "done" for c in dump["calls"])
        assert first["collective"] == "all_reduce"
        assert (first["count"], first["bytes"], first["dtype"]) == (5000, 20000, "float32")
        assert (first["op"], first["order"], first["algorithm"]) == ("max", "rank", "ring")
        assert began - 1 < first["begin"] <= first["end"] < time.time() + 1
        assert (second["collective"], second["root"], second["bytes"]) == ("broadcast", 1, 24)
        assert "op" not in second
        assert third["collective"] == "barrier"
        assert "bytes" not in third
        assert (fourth["collective"], fourth["bytes"]) == ("all_gather", 14)
        # An asynchronous call runs on a thread of the communicator's own.
        assert first["thread"] == fourth["thread"] != last["thread"]
        begins = [c["begin"] for c in dump["calls"]]
        assert begins == sorted(begins)


def test_the_ring_keeps_the_last_calls():
    def body(comm):
        for _ in range(1000):
            comm.all_reduce(ones(1))
        return [c["sequence"] for c in comm.dump()["calls"]]

    assert cc.run_threads(2, body, timeout=60) == [list(range(873, 1001))] * 2


def test_sends_and_receives():
    def body(comm):
        if comm.rank == 0:
            comm.send(ones(4), 1, tag=9)
            work = comm.recv(ones(6, np.int32), 1, tag=3, async_op=True)
            dumped.append(comm.dump())
            posted.set()
            work.wait()
            return comm.dump()
        comm.recv(ones(4), 0, tag=9)
        wait_until(posted.is_set)
        comm.send(ones(6, np.int32), 0, tag=3)
        return comm.dump()

    posted, dumped = threading.Event(), []
    after, other = cc.run_threads(2, body, timeout=20)
    sent, waiting = dumped[0]["transfers"]
    assert (sent["collective"], sent["peer"], sent["tag"], sent["state"]) == ("send", 1, 9, "done")
    assert (waiting["collective"], waiting["bytes"], waiting["state"]) == ("recv", 24, "entered")
    assert [t["state"] for t in after["transfers"]] == ["done", "done"]
    assert [t["collective"] for t in other["transfers"]] == ["recv", "send"]


def test_a_record_that_went_to_a_later_transfer_stays_open():
    """The ring keeps 128: the first receive's record is the last one's when the first one ends."""

    def body(comm):
        if comm.rank == 0:
            works = [comm.recv(ones(), 1, tag=tag, async_op=True) for tag in range(129)]
            posted.set()
            works[0].wait()
            states = {t["tag"]: t["state"] for t in comm.dump()["transfers"]}
            told.set()
            for work in works[1:]:
                work.wait()
            return states
        wait_until(posted.is_set)
        comm.send(ones(), 0, tag=0)
        wait_until(told.is_set)
        for tag in range(1, 129):
            comm.send(ones(), 0, tag=tag)
        return None

    posted, told = threading.Event(), threading.Event()
    states = cc.run_threads(2, body, timeout=20)[0]
    assert states == dict.fromkeys(range(1, 129), "entered")


def test_a_dump_while_a_call_waits():
    """From another thread, with what is waited for and since when."""

    def body(comm):
        if comm.rank == 0:
            ends.append(comm)
        comm.barrier()
        if comm.rank == 1:
            wait_until(lambda: "waiting" in ends[0].dump())
            found = ends[0].dump()
            comm.all_reduce(ones(9000))
            return found
        comm.all_reduce(ones(9000))
        return comm.dump()

    ends = []
    after, found = cc.run_threads(2, body, timeout=20)
    assert found["calls"][-1]["state"] == "entered"
    assert "end" not in found["calls"][-1]
    assert (found["waiting"]["peer"], found["waiting"]["sequence"]) == (1, 2)
    assert found["waiting"]["seconds"] >= 0
    assert "waiting" not in after
    assert after["calls"][-1]["state"] == "done"


def test_errors_are_kept():
    def body(comm):
        with pytest.raises(cc.MismatchError):
            comm.all_reduce(ones(3 + comm.rank))
        mismatch = comm.dump()
        comm.barrier()
        if comm.rank == 1:
            comm.close()
            return mismatch, comm.dump()
        with pytest.raises(cc.ClosedError) as raised:
            comm.barrier()
        assert raised.value.peer == 1
        return mismatch, comm.dump()

    (mismatch, after), (_, closed) = cc.run_threads(2, body, timeout=20)
    assert mismatch["error"]["kind"] == "mismatch"
    assert mismatch["calls"][-1]["state"] == "failed"
    assert mismatch["state"] == "open"
    assert (after["state"], after["error"]["kind"], after["error"]["peer"]) == (
        "broken",
        "closed",
        1,
    )
    assert closed["state"] == "closed"


# ---- files --------------------------------------------------------------------------------------


def test_a_dump_as_a_file(tmp_path):
    def body(comm):
        comm.all_reduce(ones())
        path = tmp_path / f"{comm.rank}.json"
        found = comm.dump(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        whole = json.loads(path.read_text())
        assert whole["communicators"] == [found]
        assert (whole["format"], whole["version"]) == ("collectives flight recorder", 1)
        assert whole["pid"] == os.getpid()
        return path

    dumps = read(cc.run_threads(3, body, timeout=20))
    assert [d["rank"] for d in dumps] == [0, 1, 2]
    assert len({d["name"] for d in dumps}) == 1


def test_a_dump_follows_no_link_and_is_private(tmp_path):
    link, other, known = tmp_path / "link", tmp_path / "other", tmp_path / "known"
    other.write_text("untouched")
    link.symlink_to(other)
    known.touch(mode=0o644)
    with cc.init("solo") as comm:
        with pytest.raises(cc.ConfigError, match="is a symbolic link"):
            comm.dump(link)
        comm.dump(known)
    assert other.read_text() == "untouched"
    assert stat.S_IMODE(known.stat().st_mode) == 0o600


def test_links_where_dumps_go_by_themselves_are_replaced(tmp_path):
    """Somebody who can write there may have guessed the names."""
    other = tmp_path / "other"
    other.write_text("untouched")
    folder = tmp_path / "dumps"
    folder.mkdir()
    name = f"collectives-{socket.gethostname()}-{os.getpid()}"
    for end in (".part", ".json"):
        (folder / (name + end)).symlink_to(other)
    _core.set_dump_directory(str(folder))
    try:
        written = Path(_core.dump_process("a test"))
    finally:
        _core.set_dump_directory("")
    assert written.name == name + ".json" and not written.is_symlink()
    assert other.read_text() == "untouched" and len(list(folder.iterdir())) == 1


def test_the_directory_must_be_there(tmp_path, monkeypatch):
    monkeypatch.setenv("COLLECTIVES_DUMP", str(tmp_path / "missing"))
    with pytest.raises(cc.ConfigError, match=r"COLLECTIVES_DUMP .*missing.* is no directory"):
        cc.init("solo")


def test_the_directory_is_named_in_text(tmp_path, monkeypatch):
    (tmp_path / "\udcff").mkdir()
    monkeypatch.setenv("COLLECTIVES_DUMP", str(tmp_path / "\udcff"))
    with pytest.raises(cc.ConfigError, match=r"COLLECTIVES_DUMP '.*udcff' is no text in UTF-8"):
        cc.init("solo")
    with pytest.raises(cc.ConfigError, match=r"directory '.*udcff' is no text in UTF-8"):
        cc.dump_on_signal(signal.SIGUSR2, tmp_path / "\udcff")


def test_dumps_stay_where_the_program_was_when_it_began(tmp_path):
    """It may change its directory; here it also fails to start once, with odd letters in the error,
    and then again.
    """
    (tmp_path / "dumps").mkdir()
    (tmp_path / "elsewhere").mkdir()
    program = (
        "import collectives as cc, os\n"
        "from collectives.flight_recorder import starting\n"
        "cc.init('solo').close()\n"
        "os.chdir('elsewhere')\n"
        "try:\n"
        "    with starting('dumps', 0, 2): raise cc.BootstrapError('no \\udcff')\n"
        "except cc.BootstrapError: pass\n"
        "cc.init('solo').close()\n"
    )
    env = {**os.environ, "COLLECTIVES_DUMP": "dumps"}
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=env, timeout=60, check=True)
    (file,) = (tmp_path / "dumps").iterdir()
    assert json.loads(file.read_text())["reason"] == "init failed: no \\udcff"


def test_a_signal_makes_stuck_ranks_dump(tmp_path):
    """They wait in the core, or sleep in Python; the handler needs neither."""
    env = {"COLLECTIVES_DUMP": str(tmp_path)}
    got = launch.run(3, "recording.py", "stuck", env=env, timeout=60).expect(status=0)
    assert got.output.count("ended well") == 3, got
    files = sorted(tmp_path.glob("collectives-*.json"))
    assert len(files) == 3
    assert all(stat.S_IMODE(f.stat().st_mode) == 0o600 for f in files)
    assert not list(tmp_path.glob("*.part"))
    (sentence,) = diagnose(read(files))
    assert re.search(
        r"rank 1 has not entered all_reduce #7 \(float32, 4 MiB, max, \w+\) "
        r"\(rank 1 finished all_gather #6 \d+\.\d s ago\); ranks 0, 2 wait in it since \d+\.\d s",
        sentence,
    ), sentence


def test_a_handler_of_the_program_stays(tmp_path):
    env = {"COLLECTIVES_DUMP": str(tmp_path)}
    got = launch.run(2, "recording.py", "handler", env=env, timeout=60).expect(status=0)
    assert got.output.count("ended well") == 2, got
    assert list(tmp_path.iterdir()) == []


def test_errors_dump_by_themselves(tmp_path):
    env = {"COLLECTIVES_DUMP": str(tmp_path)}
    launch.run(3, "recording.py", "error", env=env, timeout=60).expect(status=0)
    files = sorted(tmp_path.glob("collectives-*.json"))
    assert len(files) == 3
    assert all(json.loads(f.read_text())["reason"].startswith("mismatch: ") for f in files)
    (sentence,) = diagnose(read(files))
    assert "the ranks disagree about call 1" in sentence
    assert "rank 1: all_reduce(count=4" in sentence


def test_nothing_is_written_unless_asked_for(tmp_path):
    """The default action of SIGUSR1 ends a process; without COLLECTIVES_DUMP it still does."""
    program = (
        "import collectives as cc, os, signal\n"
        "comm = cc.init('solo'); comm.barrier()\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\n"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith("COLLECTIVES_")}
    got = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=env, timeout=60)
    assert got.returncode == -signal.SIGUSR1
    assert list(tmp_path.iterdir()) == []


def test_dump_on_signal_when_asked(tmp_path):
    """In a process that computes in Python, and in one that forked off it."""
    program = (
        "import collectives as cc, os, signal, sys, time, pathlib\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "cc.dump_on_signal(signal.SIGUSR2, folder)\n"
        "comm = cc.init('solo'); comm.barrier()\n"
        "child = os.fork()\n"
        "os.kill(os.getpid(), signal.SIGUSR2)\n"  # the child's thread is the parent's: no dump
        "end = time.monotonic() + 20\n"
        "while not list(folder.glob('*.json')) and time.monotonic() < end: pass\n"
        "if child: os.waitpid(child, 0)\n"
    )
    got = subprocess.run([sys.executable, "-W", "ignore", "-c", program, tmp_path], timeout=60)
    assert got.returncode == 0
    (file,) = tmp_path.glob("*.json")
    (dump,) = read([file])
    assert dump["calls"][0]["collective"] == "barrier"


# ---- before there is a communicator -------------------------------------------------------------


class Started(NamedTuple):
    """Processes that call init, each with an environment of its own."""

    folder: Path
    processes: list[subprocess.Popen[str]]

    def ended(self) -> list[str]:
        """What they wrote, when all have."""
        return [p.communicate(timeout=60)[0] for p in self.processes]


_PROGRAM = """
import collectives as cc
try:
    cc.init()
except cc.CollectiveError as error:
    print(error)
"""


@pytest.fixture
def start(tmp_path, port):
    """start(timeout, (rank, size), ...): processes that call init."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("COLLECTIVES_")}
    env |= {
        "COLLECTIVES_DUMP": str(tmp_path),
        "COLLECTIVES_ADDR": "127.0.0.1",
        "COLLECTIVES_PORT": str(port),
    }
    with contextlib.ExitStack() as stack:

        def begin(timeout, *ranks):
            processes = []
            for rank, size in ranks:
                more = {
                    "COLLECTIVES_TIMEOUT": str(timeout),
                    "COLLECTIVES_RANK": str(rank),
                    "COLLECTIVES_WORLD_SIZE": str(size),
                }
                process = subprocess.Popen(
                    [sys.executable, "-c", _PROGRAM],
                    env={**env, **more},
                    stdout=subprocess.PIPE,
                    text=True,
                )
                processes.append(stack.enter_context(process))
            return Started(tmp_path, processes)

        yield begin


def test_a_missing_rank_leaves_dumps_that_say_who_came(start):
    started = start(8, (0, 3), (2, 3))
    for words in started.ended():
        assert "ranks 0, 2 of 3 came, rank 1 is missing" in words
    files = sorted(started.folder.glob("*.json"))
    assert len(files) == 2
    assert all(stat.S_IMODE(f.stat().st_mode) == 0o600 for f in files)
    starts = [json.loads(f.read_text())["start"] for f in files]
    assert sorted((s["rank"], s["size"]) for s in starts) == [(0, 3), (2, 3)]
    assert all((s["error"]["kind"], s["error"]["peer"]) == ("BootstrapError", 1) for s in starts)
    (judged,) = judge(read(files))
    assert judged.trouble and judged.size == 3
    assert judged.sentence.startswith("ranks 0, 2 could not start: ")
    assert "ranks 0, 2 of 3 came, rank 1 is missing" in judged.sentence
    assert judged.sentence.endswith("no dump of rank 1")


def test_a_wrong_world_size_leaves_dumps(start):
    started = start(30, (0, 3), (1, 2))
    started.ended()
    (sentence,) = diagnose(read(started.folder.glob("*.json")))
    assert "ranks 0-1 could not start" in sentence
    assert "was told that the world has 2 ranks" in sentence


def test_a_rank_that_waits_in_init_dumps_when_told(start):
    started = start(60, (0, 2))
    (process,) = started.processes

    def dumped():
        # Until init has set it up, the signal would end the process.
        status = Path(f"/proc/{process.pid}/status").read_text()
        caught = int(re.search(r"SigCgt:\s*(\w+)", status).group(1), 16)
        if caught >> (signal.SIGUSR1 - 1) & 1:
            process.send_signal(signal.SIGUSR1)
        return any("start" in f.read_text() for f in started.folder.glob("*.json"))

    wait_until(dumped)
    (sentence,) = diagnose(read(started.folder.glob("*.json")))
    process.kill()
    assert re.fullmatch(r"rank 0 waits in init since \d+\.\d s; no dump of rank 1", sentence), (
        sentence
    )


def test_a_start_that_succeeds_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("COLLECTIVES_DUMP", str(tmp_path))
    try:
        with cc.init("solo"):
            assert "start" not in json.loads(Path(_core.dump_process("a test")).read_text())
        with pytest.raises(cc.BootstrapError):
            cc.init("nowhere")
        assert "nowhere" in json.loads(next(tmp_path.glob("*.json")).read_text())["reason"]
    finally:
        _core.note_start("")
        _core.set_dump_directory("")


# ---- whoever reads while it is written ----------------------------------------------------------


def test_dumps_beside_a_running_program_are_whole():
    """A record that is being written is left out, never read by halves."""

    def body(comm):
        if comm.rank == 0:
            ends.append(comm)
        count = 0
        while True:
            comm.all_reduce(ones(3), "max")
            comm.all_reduce(ones(7, np.float64))
            count += 1
            if comm.all_reduce(np.array([int(stop.is_set())]), "max")[0]:
                return count

    def look():
        wait_until(lambda: bool(ends))
        for _ in range(200):
            for call in ends[0].dump()["calls"]:
                known = {(12, "float32", "max"), (56, "float64", "sum"), (8, "int64", "max")}
                if (call["bytes"], call["dtype"], call["op"]) not in known:
                    wrong.append(call)
        stop.set()

    ends, wrong, stop = [], [], threading.Event()
    reader = threading.Thread(target=look)
    reader.start()
    counts = outcomes(2, body)
    reader.join(20)
    assert wrong == []
    assert counts[0] == counts[1] >= 1


def test_dumps_into_no_directory(tmp_path):
    with pytest.raises(cc.ConfigError, match=r"nowhere.* is no directory"):
        cc.dump_on_signal(signal.SIGUSR2, tmp_path / "nowhere")
    with pytest.raises(TypeError, match="number must be an integer"):
        cc.dump_on_signal("USR2", tmp_path)


def test_a_relative_directory_counts_from_where_the_program_began(tmp_path):
    (tmp_path / "dumps").mkdir()
    code = (
        "import os, collectives as cc\n"
        "os.chdir('/')\n"
        "comm = cc.init()\n"
        "os.kill(os.getpid(), 10)\n"
        "import time\n"
        "end = time.monotonic() + 20\n"
        f"while not os.listdir({str(tmp_path / 'dumps')!r}): assert time.monotonic() < end\n"
    )
    environment = os.environ | {"COLLECTIVES_DUMP": "dumps"}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True)
    assert list((tmp_path / "dumps").iterdir())
