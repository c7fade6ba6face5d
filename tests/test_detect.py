"""Where ranks come from: MPI, torchrun, stores and the environment, and what is refused there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bootstraps import LOOPBACK, finish, run_all, start

from collectives import bootstrap
from collectives.bootstrap import Mpi, Solo, Threads, detect, through_store
from collectives.config import Settings
from collectives.errors import BootstrapError, ConfigError


def test_mpi_alone():
    pytest.importorskip("mpi4py")
    code = """
    import sys
    mpi = detect("mpi")
    print(mpi.all_gather(b"x"), mpi.broadcast(b"y"), mpi.size, mpi.kind)
    sub = mpi.subgroup([0], "sub")
    sub.close()
    mpi.close()
    try:
        mpi.barrier()
    except ClosedError as error:
        print(error)
    """
    # Of a world of one, Open MPI would leave a segment in /dev/shm.
    ((status, out, err),) = finish([start(code, OMPI_MCA_btl="self")])
    assert (status, out) == (0, "[b'x'] b'y' 1 mpi\nthis communicator is closed\n"), err


def run_under(launcher, script, *arguments):
    """Runs a script under the launcher of this Python's environment; returns its output by line."""
    program = Path(sys.executable).with_name(launcher)
    if not program.exists():
        pytest.skip(f"no {launcher} beside this Python")
    environment = {
        **os.environ,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [str(program), *arguments, *script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


LAUNCHED = """
import os, time
from collectives.bootstrap import detect
from collectives.errors import *
comm = detect(timeout=30)
got = comm.all_gather(b"%d" % comm.rank * (comm.rank + 1))
if comm.rank != 1:
    group = comm.subgroup([2, 0], "some")
    got += group.all_gather(b"%d" % comm.rank)
    group.close()
again = detect(timeout=30)
again.barrier()
again.close()
if comm.rank == 0:
    try:
        comm.barrier(timeout=0.1)
    except DeadlineError as error:
        got.append("waited 0.1 s" in str(error))
else:
    time.sleep(0.3)
os.write(1, f"{comm.kind} {comm.rank} of {comm.size}: {got}\\n".encode())
"""
LAUNCHED_SAYS = [
    "{} 0 of 3: [b'0', b'11', b'222', b'2', b'0', True]",
    "{} 1 of 3: [b'0', b'11', b'222']",
    "{} 2 of 3: [b'0', b'11', b'222', b'2', b'0']",
]


@pytest.mark.mpi
def test_mpi():
    pytest.importorskip("mpi4py")
    lines = run_under("mpiexec", [sys.executable, "-c", LAUNCHED], "-n", "3")
    assert lines == [line.format("mpi") for line in LAUNCHED_SAYS]


@pytest.mark.torch
@pytest.mark.slow
def test_torchrun(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(LAUNCHED)
    lines = run_under("torchrun", [str(script)], "--standalone", "--nproc-per-node", "3")
    assert lines == [line.format("tcp") for line in LAUNCHED_SAYS]


@pytest.mark.mpi
def test_mpi_launched_by_another_mpi():
    """N processes that each see a world of one must not go on."""
    pytest.importorskip("mpi4py")
    program = "from collectives.bootstrap import detect; detect()"
    hydra = {"PMI_RANK": "1", "PMI_SIZE": "4"}
    environment = {
        name: v for name, v in os.environ.items() if not name.startswith(("PMI", "OMPI"))
    }
    environment["OMPI_MCA_btl"] = "self"  # else each leaves a segment in /dev/shm
    check = "from mpi4py import MPI; print(MPI.get_vendor()[0])"
    vendor = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, env=environment
    )
    if "Open MPI" not in vendor.stdout:
        pytest.skip("needs a library that ignores the launcher")
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**environment, **hydra},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "as rank 1 of 4, but mpi4py, which uses Open MPI" in done.stderr
    assert "launcher and library belong to different MPIs" in done.stderr


# ---- stores, secrets, nodes, environment --------------------------------------------------------


class DictStore:
    def __init__(self):
        self.data = {}

    def set(self, key, value):
        self.data[key] = value if isinstance(value, bytes) else value.encode()

    def get(self, key):
        return self.data[key]

    def check(self, keys):
        return all(key in self.data for key in keys)


def test_through_a_store():
    store = DictStore()
    ranks = run_all(*(lambda r=r: through_store(store, r, 3, timeout=9) for r in range(3)))
    assert (
        run_all(*(lambda r=r: r.all_gather(b"%d" % r.rank) for r in ranks))
        == [[b"0", b"1", b"2"]] * 3
    )
    assert {rank.timeout for rank in ranks} == {9}
    said = json.loads(store.data["collectives/rendezvous"])
    assert said["host"] == LOOPBACK and len(said["secret"]) == 64
    run_all(*(rank.close for rank in ranks))


def test_through_a_store_with_a_missing_rank():
    store = DictStore()
    errors = run_all(*(lambda r=r: through_store(store, r, 3, timeout=0.3) for r in (0, 2)))
    for error in errors:
        assert isinstance(error, BootstrapError) and error.peer == 1
        assert "ranks 0, 2 of 3 came, rank 1 is missing" in str(error)


@pytest.mark.torch
def test_through_torch_stores(tmp_path):
    torch = pytest.importorskip("torch.distributed")
    store = torch.PrefixStore("p", torch.FileStore(str(tmp_path / "store"), 2))
    ranks = run_all(*(lambda r=r: through_store(store, r, 2, timeout=9) for r in range(2)))
    run_all(*(rank.barrier for rank in ranks))
    run_all(*(rank.close for rank in ranks))


def test_secrets(tmp_path):
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef\n")
    file.chmod(0o600)
    assert (
        bootstrap.read_secret(Settings({"COLLECTIVES_SECRET_FILE": str(file)}))
        == b"0123456789abcdef"
    )
    assert bootstrap.read_secret(Settings({})) == b""
    file.chmod(0o640)
    for environment, says in [
        (
            {"COLLECTIVES_SECRET_FILE": str(file)},
            r"read or written by others \(mode 640\): chmod 600",
        ),
        ({"COLLECTIVES_SECRET_FILE": str(tmp_path / "none")}, "cannot be read: No such file"),
        ({"COLLECTIVES_SECRET": "short"}, "holds 5 bytes, fewer than 16"),
        ({"COLLECTIVES_SECRET": "x" * 16, "COLLECTIVES_SECRET_FILE": str(file)}, "both set"),
    ]:
        with pytest.raises(BootstrapError, match=says):
            bootstrap.read_secret(Settings(environment))


def test_nodes():
    assert bootstrap.node_key(Settings({})) == bootstrap.host_key()
    keys = {bootstrap.node_key(Settings({"COLLECTIVES_NODE": name})) for name in ("a", "b")}
    assert len(keys) == 2
    # An override splits a host and never joins two.
    assert all(key.startswith(bootstrap.host_key()) for key in keys)


def test_loopback():
    assert bootstrap.is_loopback(LOOPBACK) and bootstrap.is_loopback("localhost")
    assert not bootstrap.is_loopback("0.0.0.0") and not bootstrap.is_loopback("192.0.2.1")


@pytest.mark.parametrize(
    ("environment", "error", "says"),
    [
        ({"RANK": "0"}, BootstrapError, "variable WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "2"}, BootstrapError, "variable RANK is not set"),
        (
            {"RANK": "2", "WORLD_SIZE": "2"},
            BootstrapError,
            "RANK is 2 and WORLD_SIZE is 2; ranks are 0 to",
        ),
        ({"RANK": "x", "WORLD_SIZE": "2"}, BootstrapError, "RANK is 'x', which is no whole number"),
        (
            {"RANK": "0", "WORLD_SIZE": "2"},
            BootstrapError,
            "neither COLLECTIVES_ADDR nor MASTER_ADDR",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": LOOPBACK},
            BootstrapError,
            "variable MASTER_PORT is not set",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": LOOPBACK, "MASTER_PORT": "0"},
            BootstrapError,
            "MASTER_PORT is 0, which is no port",
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": LOOPBACK, "MASTER_PORT": "70000"},
            BootstrapError,
            "MASTER_PORT is 70000, which is no port",
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1"},
            BootstrapError,
            "without a secret: anybody could join. Set COLLECTIVES_SECRET on all ranks",
        ),
        (
            {
                "RANK": "0",
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "192.0.2.1",
                "MASTER_PORT": "1",
                "COLLECTIVES_SECRET": "x" * 16,
            },
            BootstrapError,
            "192.0.2.1 is no address of this host",
        ),
        ({"COLLECTIVES_RANK": "0"}, BootstrapError, "COLLECTIVES_WORLD_SIZE is not set"),
        ({"COLLECTIVES_RNAK": "0"}, ConfigError, "did you mean 'COLLECTIVES_RANK'"),
        (
            {"SLURM_STEP_NUM_TASKS": "4"},
            BootstrapError,
            "srun started 4 tasks, but nothing says how",
        ),
    ],
)
def test_environments_that_are_refused(environment, error, says):
    with pytest.raises(error, match=says):
        detect(environ=environment, timeout=0.5)


def test_detect(monkeypatch):
    assert isinstance(detect(environ={}), Solo)
    assert detect(environ={"COLLECTIVES_TIMEOUT": "7"}).timeout == 7
    assert detect(environ={"COLLECTIVES_TIMEOUT": "7"}, timeout=8).timeout == 8
    assert isinstance(detect(environ={"RANK": "0", "WORLD_SIZE": "1"}), Solo)
    assert isinstance(detect("solo", environ={"RANK": "0", "WORLD_SIZE": "2"}), Solo)
    world = Threads.world(2)
    assert detect(world[1], environ={}) is world[1]
    with pytest.raises(
        BootstrapError, match="unknown way to find ranks 'torchrn'; did you mean 'torchrun'"
    ):
        detect("torchrn", environ={})
    with pytest.raises(BootstrapError, match="a int is no way to find ranks"):
        detect(3, environ={})
    # mpi4py that is not installed, under a launcher that started several ranks
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(BootstrapError, match="mpi4py is not installed: pip install mpi4py"):
        detect(environ={"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"})
    assert isinstance(detect(environ={"PMI_RANK": "0", "PMI_SIZE": "1"}), Solo)
    with pytest.raises(BootstrapError, match="mpi4py is not installed"):
        Mpi()


def test_a_communicator_of_mpi_is_not_asked_for_more(monkeypatch):
    """A null one fails on whatever it is asked; a set, in an order of its own, asked for `rank`."""

    class Null:
        Get_rank = Idup = None

        def __getattr__(self, name):
            raise RuntimeError("MPI_ERR_COMM: invalid communicator")

    monkeypatch.setattr(bootstrap.sources, "Mpi", lambda source, timeout: ("mpi", source))
    null = Null()
    assert detect(null) == ("mpi", null)


def test_a_group_of_mpi_is_not_asked_for_more(monkeypatch):
    class Asking(type(bootstrap.Bootstrap)):
        def __instancecheck__(cls, source):
            return hasattr(source, "rank")

    class Null:
        @property
        def rank(self):
            raise RuntimeError("MPI_ERR_GROUP: invalid group")

    monkeypatch.setattr(bootstrap.sources, "Bootstrap", Asking("Bootstrap", (), {}))
    with pytest.raises(BootstrapError, match="a Null is no way to find ranks"):
        detect(Null())
