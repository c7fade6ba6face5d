"""The doctor: what merged dumps say, and what is found on a machine."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

import collectives as cc
from collectives.bench import machine
from collectives.doctor import packages, system
from collectives.doctor.findings import Finding, as_text
from collectives.doctor.merging import diagnose, judge, read
from collectives.doctor.system import Place
from collectives.hardware import summary
from collectives.tuning import tables


def call(sequence, state="done", begin=100.0, **more):
    facts = {
        "sequence": sequence,
        "collective": "all_reduce",
        "count": 1 << 20,
        "bytes": 4 << 20,
        "dtype": "float32",
        "op": "sum",
        "algorithm": "ring",
        "state": state,
        "begin": begin,
        "thread": 1,
    }
    if state in ("done", "failed"):
        facts["end"] = begin + 0.5
    return {**facts, **more}


def dump(rank, calls, size=4, **more):
    facts = {"name": "abcdefgh12", "rank": rank, "size": size, "state": "open", "time": 112.3}
    return {**facts, "calls": calls, "transfers": [], **more}


WAITS = [call(17, begin=99.0), call(18, "entered")]


def test_who_is_behind():
    dumps = [dump(r, WAITS) for r in (0, 1, 3)] + [dump(2, [call(17, begin=99.0)])]
    assert diagnose(dumps) == [
        "communicator abcdefgh of 4: rank 2 has not entered all_reduce #18 (float32, 4 MiB, ring) "
        "(rank 2 finished all_reduce #17 12.8 s ago); ranks 0-1, 3 wait in it since 12.3 s"
    ]


def test_who_never_came_and_whose_dump_is_missing():
    dumps = [dump(0, [call(1, "entered")]), dump(1, [])]
    assert diagnose(dumps) == [
        "communicator abcdefgh of 4: rank 1 has not entered all_reduce #1 (float32, 4 MiB, ring) "
        "(rank 1 has made no call yet); rank 0 waits in it since 12.3 s; no dump of ranks 2-3"
    ]


def test_who_gave_up():
    error = {"kind": "deadline", "message": "gave up after ...", "time": 110.0, "peer": 1}
    late = [call(17), call(18, "failed", end=105.0)]
    dumps = [
        dump(0, late, size=2, state="broken", error=error),
        dump(1, [call(17)], size=2),
    ]
    (sentence,) = diagnose(dumps)
    assert "rank 1 has not entered all_reduce #18" in sentence
    assert "rank 0 gave up after 5.0 s in it" in sentence


def test_different_calls():
    other = call(18, "entered", collective="broadcast", root=1)
    dumps = [dump(0, WAITS), dump(1, WAITS), dump(2, [call(17), other]), dump(3, WAITS)]
    assert diagnose(dumps) == [
        "communicator abcdefgh of 4: the ranks make different calls: all_reduce #18 (float32, "
        "4 MiB, ring) on ranks 0-1, 3, broadcast #18 (float32, 4 MiB, root 1, ring) on rank 2"
    ]


def test_all_in_one_call():
    waiting = {"sequence": 18, "for": "a message", "seconds": 3.25, "peer": 1, "step": 4}
    dumps = [dump(0, WAITS, size=2, waiting=waiting), dump(1, WAITS, size=2)]
    assert diagnose(dumps) == [
        "communicator abcdefgh of 2: ranks 0-1 are in all_reduce #18 (float32, 4 MiB, ring); "
        "rank 0 waits for a message of rank 1, step 4, since 3.2 s"
    ]


def test_the_dead():
    error = {"kind": "peer_died", "message": "rank 2 (process 7) died", "time": 110.0, "peer": 2}
    failed = [call(17), call(18, "failed")]
    dumps = [dump(r, failed, state="broken", error=error) for r in (0, 1, 3)]
    assert diagnose(dumps) == [
        "communicator abcdefgh of 4: rank 2 died; ranks 0-1, 3 noticed in all_reduce #18 (float32, "
        "4 MiB, ring); no dump of rank 2"
    ]


def test_a_mismatch_counts_until_the_next_call():
    error = {"kind": "mismatch", "message": "the ranks disagree about call 5", "time": 110.0}
    calls = [call(5, "failed")]
    dumps = [dump(r, calls, size=2, error=error) for r in range(2)]
    assert diagnose(dumps) == ["communicator abcdefgh of 2: the ranks disagree about call 5"]
    dumps = [dump(r, [*calls, call(6)], size=2, error=error) for r in range(2)]
    (one,) = judge(dumps)
    assert not one.trouble
    assert one.sentence.endswith(
        "all ranks that are here have finished all_reduce #6 (float32, 4 MiB, ring); nobody waits"
    )


def test_a_receive_that_nobody_answers():
    recv = call(1, "entered", collective="recv", peer=1, tag=3, bytes=24)
    send = call(1, "entered", collective="send", peer=0, tag=4, bytes=24)
    dumps = [
        dump(0, [], size=2, transfers=[recv]),
        dump(1, [], size=2, transfers=[send]),
    ]
    assert diagnose(dumps) == [
        "communicator abcdefgh of 2: rank 0 is in recv from rank 1 with tag 3 (float32, 24 bytes) "
        "since 12.3 s; rank 1 waits in no send with that tag"
    ]


def test_a_receive_on_a_gpu_that_nobody_answers():
    recv = call(2, "entered", collective="recv", peer=1, tag=3, bytes=24)
    done = call(1, "done", collective="send", peer=1, tag=3, bytes=24)
    waits = {"sequence": 2, "since": 100.0}
    first = dump(0, [], size=2, gpu_transfers=[done, recv], gpu_transfers_waiting=waits)
    assert diagnose([first, dump(1, [], size=2)]) == [
        "communicator abcdefgh of 2: rank 0 waits for its GPU, where it put a recv from rank 1 "
        "with tag 3 (float32, 24 bytes) 12.3 s ago"
    ]
    del first["gpu_transfers_waiting"]  # it may have ended
    (one,) = judge([first, dump(1, [], size=2)])
    assert not one.trouble


def test_trouble_comes_first_and_the_newest_dump_of_a_rank_counts():
    calm = [dump(r, [call(3)], size=8) for r in range(8)]
    stuck = [{**dump(r, [call(1)], size=2), "name": "part"} for r in range(2)]
    newer = {**dump(0, [call(1), call(2, "entered")], size=2, time=120.0), "name": "part"}
    found = judge([*calm, *stuck, newer])
    assert [(one.communicator, one.trouble) for one in found] == [
        ("part", True),
        ("abcdefgh12", False),
    ]
    assert "rank 0 waits in it since 20.0 s" in found[0].sentence


# ---- real dumps, and the command ----------------------------------------------------------------


def doctor(*arguments, **changes):
    env = {k: v for k, v in os.environ.items() if not k.startswith("COLLECTIVES_")} | changes
    command = [sys.executable, "-m", "collectives", "doctor", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=env)


def test_the_command_reads_dumps(tmp_path):
    def body(comm):
        comm.all_reduce(np.ones(3))
        if comm.rank == 0:
            comm.all_reduce(np.ones(3), async_op=True)
        comm.dump(tmp_path / f"{comm.rank}.json")
        if comm.rank == 1:
            comm.all_reduce(np.ones(3))

    cc.run_threads(2, body, timeout=20)
    files = sorted(tmp_path.glob("*.json"))
    got = doctor(*files)
    waits = (
        "rank 1 has not entered all_reduce #2 (float64, 24 bytes, direct_one_shot)" in got.stdout
    )
    # Rank 0's thread may not have begun the call when it wrote its dump.
    assert (got.returncode, waits) in [(1, True), (0, False)], got
    as_json = json.loads(doctor("--json", *files).stdout)
    assert as_json[0]["trouble"] == waits


def test_files_that_are_no_dumps(tmp_path):
    bad = tmp_path / "bad.json"
    for text, words in (
        ("{", "is no JSON"),
        ('{"format": "other"}', "is no dump of a flight recorder"),
        ('{"format": "collectives flight recorder", "version": 99}', "a dump of version 99"),
        ("[" * 100_000, "is no JSON"),
    ):
        bad.write_text(text)
        with pytest.raises(cc.ConfigError, match=words):
            read([bad])
    with pytest.raises(cc.ConfigError, match="cannot be read: No such file"):
        read([tmp_path / "missing.json"])
    assert doctor(bad).returncode == 2


def damaged(place, value):
    """A whole dump but for one thing."""
    record = {"sequence": 1, "collective": "barrier", "state": "done", "begin": 1.0}
    comm = {"name": "x", "rank": 0, "size": 1, "state": "open", "time": 2.0, "calls": [record]}
    whole = {"host": "h", "pid": 1, "time": 2.0, "communicators": [{**comm, "transfers": []}]}
    inner = {"dump": whole, "communicator": whole["communicators"][0], "record": record}
    where, _, name = place.partition(".")
    inner[where].pop(name, None)
    inner[where].update({} if value is None else {name: value})
    return json.dumps({"format": "collectives flight recorder", "version": 1, **whole})


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ("dump.host", None, "it has no 'host'"),
        ("dump.communicators", 3, "communicators is no list"),
        ("dump.communicators", [7], "communicators 0 is no object"),
        ("dump.start", {}, "start has no 'begin'"),
        ("communicator.name", None, "communicators 0 has no 'name'"),
        ("communicator.rank", "0", "rank is '0'"),
        ("communicator.error", {"kind": "closed"}, "error has no 'message'"),
        ("record.begin", None, "calls 0 has no 'begin'"),
    ],
)
def test_dumps_that_are_damaged(tmp_path, place, value, words):
    file = tmp_path / "dump.json"
    file.write_text(damaged("record.sequence", 1))
    assert len(read([file])) == 1
    file.write_text(damaged(place, value))
    with pytest.raises(cc.ConfigError, match=f"a damaged dump: {words}"):
        read([file])


def test_the_command_examines_this_machine():
    got = doctor("--json")
    found = [Finding(**one) for one in json.loads(got.stdout)]
    assert got.returncode == int(any(f.level == "problem" for f in found)), got
    topics = {f.topic for f in found}
    assert {"segments", "/dev/shm", "leftovers", "pidfd", "sharing", "reading peers"} <= topics
    assert {"namespaces", "open files", "locked memory", "processors", "MPI", "GPUs"} <= topics
    assert all((f.level == "ok") == (f.cure == "") for f in found), found
    # Ranks of this machine share memory, or no other test would pass.
    assert {f.level for f in found if f.topic in ("segments", "pidfd", "sharing")} == {"ok"}


@pytest.mark.parametrize(
    ("pid", "first", "contained", "level"),
    [
        (4026531836, 4026531836, True, "ok"),  # the host's own, in a container that shares them
        (4026531836, 4026531836, False, "ok"),
        (4026532999, 4026532999, True, "advice"),
        (4026532999, 4026532999, False, "ok"),
        (4026532999, 4026531836, False, "advice"),  # another one than that of process 1
    ],
)
def test_namespaces(monkeypatch, tmp_path, pid, first, contained, level):
    for process, number in (("self", pid), ("1", first)):
        folder = tmp_path / process / "ns"
        folder.mkdir(parents=True)
        (folder / "pid").symlink_to(f"pid:[{number}]")
        (folder / "ipc").symlink_to("ipc:[4026531839]")
    monkeypatch.setattr(system, "in_container", lambda: contained)
    (found,) = system.namespaces(Place(proc=tmp_path))
    assert found.level == level and str(pid) in found.words
    of_host = contained and pid == 4026531836
    assert of_host == ("in a container, but in the host's pid and ipc namespaces" in found.words)


def test_a_setting_that_is_not_understood():
    got = doctor(COLLECTIVES_TIMEOUT="soon")
    assert got.returncode == 1
    assert "COLLECTIVES_TIMEOUT" in got.stdout


@pytest.mark.parametrize(
    ("name", "value", "level", "words"),
    [
        ("SIMD", "avx3", "problem", "COLLECTIVES_SIMD: 'avx3' is none of auto, avx512"),
        ("ALGORITHM", "all_reduce:foo", "advice", "unknown algorithm 'foo'"),
        ("DUMP", "TMP/no/such", "problem", "/no/such' is no directory"),
        ("SECRET", "short", "problem", "holds 5 bytes, fewer than 16"),
        ("TABLE", "TMP/other.json", "problem", "was measured on other hardware (cpu"),
        ("TABLE", "TMP/damaged.json", "problem", "is damaged"),
        ("TABLE", "TMP/none.json", "advice", "there is no such file"),
        ("TABLE", "/" + 300 * "x", "problem", "cannot be read: File name too long"),
    ],
)
def test_settings_that_init_refuses(tmp_path, name, value, level, words):
    here = {k: v for k, v in tables.hardware_of([{**summary(), "mpi": ""}]).items() if k != "mpi"}
    for file, hardware in (("other", {**here, "cpu": "a"}), ("damaged", {**here, "mpi": "Any 1"})):
        content = {"format": tables.FORMAT, "hardware": hardware, "layouts": {"shm 0,0": {}}}
        (tmp_path / f"{file}.json").write_text(json.dumps(content))
    got = doctor("--json", **{f"COLLECTIVES_{name}": value.replace("TMP", str(tmp_path))})
    (found,) = [f for f in json.loads(got.stdout) if f["topic"] == "settings"]
    assert found["level"] == level and words in found["words"] and found["cure"], found


def test_settings_that_init_takes():
    got = doctor("--json", COLLECTIVES_SIMD="auto", COLLECTIVES_ALGORITHM="all_reduce:ring")
    findings = json.loads(got.stdout)
    (found,) = [f for f in findings if f["topic"] == "settings"]
    assert found["level"] == "ok", found
    assert any("reductions in" in f["words"] for f in findings if f["topic"] == "libraries")


@pytest.mark.parametrize(
    ("soft", "hard", "cure"),
    [
        (256, 256, "raise the hard limit, which is 256: nofile in /etc/security/limits.conf"),
        (256, 4096, "ulimit -n 4096"),
        (256, resource.RLIM_INFINITY, "ulimit -n 65536"),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, ""),
    ],
)
def test_the_cure_for_few_open_files_can_be_done(monkeypatch, soft, hard, cure):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
    (found,) = [f for f in system.limits() if f.topic == "open files"]
    assert found.cure.startswith(cure) and bool(found.cure) == bool(cure)


def test_cupy_is_found_under_all_its_names(monkeypatch):
    monkeypatch.setattr(packages, "_version", lambda name: "14.0" if "13x" in name else "")
    (found,) = packages.libraries()
    assert "cupy-cuda13x 14.0" in found.words


# ---- single findings ----------------------------------------------------------------------------


def levels(findings):
    return {f.topic: f.level for f in findings}


def test_leftovers_of_crashed_jobs(tmp_path):
    old = time.time() - 1000
    for name in ("vader_segment.1", "nccl-2", "sem.mine", "collectives-3", "psm2_shm.4"):
        path = tmp_path / name
        path.write_bytes(bytes(2 << 20))
        os.utime(path, (old, old))
    fresh = tmp_path / "nccl-fresh"
    fresh.write_bytes(b"")
    in_use = (tmp_path / "psm2_shm.4").open("rb")
    place = Place(shm=tmp_path)
    # The time of the last change cannot be set back: it decides that nothing here is old.
    assert levels(system.leftovers(place)) == {"leftovers": "ok"}
    system_old, system._OLD = system._OLD, -1.0
    try:
        (found,) = system.leftovers(place)
    finally:
        system._OLD = system_old
        in_use.close()
    assert found.level == "advice"
    assert found.words.startswith("4 segments (6 MiB)")
    assert "NCCL" in found.words
    assert "Open MPI" in found.words
    for name in ("vader_segment.1", "nccl-2", "collectives-3", "nccl-fresh"):
        assert str(tmp_path / name) in found.cure
    assert "psm2_shm.4" not in found.cure  # it is open
    assert "sem.mine" not in found.cure  # not of a job


def test_a_place_without_shared_memory(tmp_path):
    found = {f.topic: f for f in system.shared_memory(Place(shm=tmp_path / "missing"))}
    assert found["/dev/shm"].level == "advice"
    assert "mount" in found["/dev/shm"].cure


def test_a_kernel_that_gives_no_segments(monkeypatch):
    """That is told, with all that can still be found out."""

    def refuse(name):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr("os.memfd_create", refuse)
    found = {f.topic: f for f in system.examine()}
    assert found["segments"].level == "problem" and "seccomp" in found["segments"].cure
    assert "sharing" not in found and "processors" in found


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        ("0::/", {"cpu.max": "50000 100000"}, "0.5"),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/a/b", {"cpu.max": "max 100000", "a/cpu.max": "25000 100000"}, "0.25"),
        ("0::/a/b", {"a/cpu.max": "75000 100000", "a/b/cpu.max": "50000 100000"}, "0.5"),
        ("0::/../b", {"cpu.max": "50000 100000", "../b/cpu.max": "1 100000"}, "0.5"),
        ("3:cpuset:/\n1:cpu,cpuacct:/a\n0::/",
         {"cpu,cpuacct/a/cpu.cfs_quota_us": "50000", "cpu,cpuacct/a/cpu.cfs_period_us": "100000",
          "cpu,cpuacct/cpu.cfs_quota_us": "-1", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, "0.5"),
        ("", {"cpu.max": "50000 100000"}, None),
    ],
)  # fmt: skip
def test_quotas_of_control_groups(tmp_path, groups, files, quota):
    """Of the group that the process is in, and of those around it, in both versions."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups + "\n")
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    found = {
        f.topic: f for f in system.processors(Place(sys=tmp_path / "sys", proc=tmp_path / "proc"))
    }
    said = found["processors"].words
    assert f"a quota of {quota}:" in said if quota else "quota" not in said


def test_huge_pages(tmp_path):
    folder = tmp_path / "kernel/mm/transparent_hugepage"
    folder.mkdir(parents=True)
    (folder / "shmem_enabled").write_text("always within_size advise [never] deny force\n")
    found = {f.topic: f for f in system.processors(Place(sys=tmp_path))}
    assert "shmem_enabled is never" in found["huge pages"].words


@pytest.mark.parametrize(
    ("library", "launcher", "level"),
    [
        ("Open MPI v5.0.8, package", "mpirun (Open MPI) 5.0.8", "ok"),
        ("MPICH Version: 4.3", "HYDRA build details: Version: 4.3", "ok"),
        ("Intel(R) MPI Library 2021.17", "Intel(R) MPI Library for Linux* HYDRA", "ok"),
        ("Open MPI v5.0.8, package", "HYDRA build details: Version: 4.3", "problem"),
        ("MPICH Version: 4.3", "mpirun (Open MPI) 5.0.8", "problem"),
        ("", "mpirun (Open MPI) 5.0.8", "problem"),
    ],
)
def test_launcher_and_library_of_mpi(library, launcher, level, monkeypatch):
    monkeypatch.setattr(packages.shutil, "which", lambda name: f"/somewhere/{name}")
    monkeypatch.setattr(packages, "_version", lambda name: "4" if name == "mpi4py" else "")
    answers = {sys.executable: library, "/somewhere/mpirun": launcher}
    (found,) = packages.mpi(lambda program, *rest: answers[program])
    assert found.level == level, found


def test_gpus_that_cannot_reach_each_other(monkeypatch):
    class Driver:
        def count(self):
            return 3

        def can_access(self, device, peer):
            return {device, peer} != {0, 2}

    def broken():
        raise OSError("no driver")

    monkeypatch.setattr(packages._core, "has_cuda", True)
    (found,) = packages.gpus(Driver)
    assert (found.level, "0 -> 2, 2 -> 0" in found.words) == ("problem", True)
    (found,) = packages.gpus(broken)
    assert (found.level, "no driver" in found.words) == ("advice", True)
    monkeypatch.setattr(packages._core, "has_cuda", False)
    assert levels(packages.gpus(broken)) == {"GPUs": "ok"}


def test_how_findings_are_shown():
    text = as_text([Finding("ok", "a", "fine"), Finding("problem", "b", "bad " * 40, "do this")])
    lines = text.splitlines()
    assert lines[0] == "ok       a                  fine"
    assert all(len(line) <= 100 for line in lines)
    assert lines[-3].strip() == "-> do this"
    assert lines[-1] == "1 ok, 1 problem"


@pytest.mark.mpi
def test_asking_mpi_leaves_no_segment(monkeypatch, tmp_path):
    """Open MPI's segments of a world of one, which it puts into /dev/shm unless told otherwise."""
    pytest.importorskip("mpi4py")
    where = {"OMPI_MCA_btl_sm_backing_directory": str(tmp_path)}
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI"))}
    real = subprocess.run

    def beside(command, env=None, **options):
        return real(command, env={**(kept if env is None else env), **where}, **options)

    monkeypatch.setattr(subprocess, "run", beside)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    (found,) = packages.mpi()
    assert "no mpirun" in found.words, found
    alone = SimpleNamespace(_bootstrap=SimpleNamespace(kind="self"))
    assert machine.mpi(alone)["threads"].startswith("MPI_THREAD")
    assert list(tmp_path.iterdir()) == []
