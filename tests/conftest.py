"""What every test gets: the environment of the tests, without the names that the package refuses.

COLLECTIVES_TEST_NODES=all   runs the whole matrix of virtual hosts (`make test-nodes`)
COLLECTIVES_TEST_MPICH=DIR   a virtual environment with MPICH, mpi4py and this project, for the
                             tests that start ranks under MPICH; they are skipped without it
"""

import atexit
import os
import shutil
import signal
import tempfile

import pytest

# The package refuses COLLECTIVES_ names that it does not know, so the tests keep theirs under
# another one. (The workers of pytest-xdist inherit it so.)
if mpich := os.environ.pop("COLLECTIVES_TEST_MPICH", ""):
    os.environ["TESTS_MPICH"] = mpich
if nodes := os.environ.pop("COLLECTIVES_TEST_NODES", ""):
    os.environ["TESTS_NODES"] = nodes

# Tables that were measured on this machine choose otherwise than the tests expect.
if "TESTS_CACHE" not in os.environ:
    os.environ["TESTS_CACHE"] = tempfile.mkdtemp(prefix="collectives-tests-")
    atexit.register(shutil.rmtree, os.environ["TESTS_CACHE"], ignore_errors=True)
os.environ["XDG_CACHE_HOME"] = os.environ["TESTS_CACHE"]


def pytest_collection_modifyitems(items):
    # Workers of pytest-xdist must all find the same names.
    for item in items:
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(f"{item.nodeid}: the name of a test has an address in it")


@pytest.fixture(autouse=True)
def _signals_as_before():
    """Programs that later tests start would inherit what a test leaves blocked, and not end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    assert signal.pthread_sigmask(signal.SIG_SETMASK, before) == before


@pytest.fixture
def no_launcher(monkeypatch):
    """This process is no rank of a launcher."""
    for name in ("RANK", "WORLD_SIZE", "COLLECTIVES_RANK", "COLLECTIVES_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def port():
    """A port that was free a moment ago: what a user picks for MASTER_PORT."""
    from collectives.bootstrap import listen  # after the environment is set

    with listen("127.0.0.1") as sock:
        return sock.getsockname()[1]
