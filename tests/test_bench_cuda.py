"""The benchmark on GPUs, on machines without one: everything but cupy, NCCL and the kernels is the
real thing, and those are fakes that keep time (fake_cupy.py).
"""

from __future__ import annotations

import json
import re
import threading
from typing import ClassVar

import fake_cupy
import numpy as np
import pytest
from commands import run
from fake_cupy import CALL_NS, NCCL_NS, NODE_NS

from collectives import CollectiveError, UnsupportedError, _core, run_threads
from collectives.bench import backends, cuda, gpus, nccl, pcie, timing
from collectives.bench.cases import Case, bind, places
from collectives.bench.measuring import Bench
from collectives.cli import info

TINY = ("-b", "4", "-e", "64", "-f", "16", "-n", "12")


def bench(capsys, tmp_path, *arguments, command="bench"):
    """Status, output, errors and what was written as JSON."""
    file = tmp_path / "result.json"
    status, out, err = run(capsys, command, "--device", "cuda", *arguments, "--json", file)
    return status, out, err, json.loads(file.read_text()) if file.exists() else None


def test_tables_rows_and_header(capsys, monkeypatch, tmp_path):
    """Both modes beside NCCL: the times are those that the clocks of the fakes say."""
    fake_cupy.install(monkeypatch)
    status, out, err, result = bench(
        capsys, tmp_path, "--threads", 2, *TINY, "--mode", "both", "--peer", "nccl"
    )
    assert status == 0, err
    assert "# all_reduce, algorithm auto, launched one by one" in out
    assert "# all_reduce, algorithm auto, in a CUDA graph" in out
    assert "# GPUs: 2 x Fake H100" in out
    assert "# settings of peers: NCCL_NVLS_ENABLE=0" in out
    assert "# wrong elements: 0 OK" in out
    header, rows = result["header"], result["rows"]
    assert [g["bus"] for g in header["machine"]["gpus"]] == ["0000:18:00.0", "0000:19:00.0"]
    assert header["versions"]["nccl"] == "2.28.9"
    assert header["versions"]["cuda driver"] == "13.0"
    assert header["settings"] == {"NCCL_NVLS_ENABLE": "0"}
    assert len(rows) == 2 * 2 * 2
    node = NODE_NS / cuda.graph_calls(64)
    for row in rows:
        ours = CALL_NS + (node if row["mode"] == "graph" else 0)
        theirs = NCCL_NS + (node if row["mode"] == "graph" else 0)
        assert row["device"] == "cuda" and row["transport"] == "threads"
        assert row["time_us"] == pytest.approx(ours / 1e3)
        assert row["p99_us"] == pytest.approx(ours / 1e3)
        assert row["busbw_gbs"] == pytest.approx(row["bytes"] / ours)  # 2 (n - 1) / n is 1
        assert row["wrong"] == 0 and row["predicted_us"] > 0
        (peer,) = row["peers"]
        assert (peer["name"], peer["version"]) == ("nccl", "NCCL 2.28.9")
        assert peer["ratio"] == pytest.approx(theirs / ours, rel=1e-5)
    assert {row["mode"] for row in rows} == {"stream", "graph"}
    words = header["notes"]["host time of a call that is launched"]
    assert f"# host time of a call that is launched: {words}" in out
    assert re.fullmatch(
        r"median .* us over all tables, least .* us; of an empty .*: [\d.]+ us", words
    )


@pytest.mark.parametrize(
    "unique", [None, tuple(range(-64, 64)), bytes(range(128))], ids=["threads", "tuple", "bytes"]
)
def test_every_collective_beside_nccl(capsys, monkeypatch, tmp_path, unique):
    """Three ranks on three GPUs: results of both are verified, also those of grouped transfers."""
    fake_cupy.install(monkeypatch, gpus=3)
    monkeypatch.setattr(fake_cupy.Nccl, "unique", unique)
    if unique is not None:  # joined as processes do
        monkeypatch.setattr(nccl, "in_one_process", lambda comm: False)
    status, _, err, result = bench(
        capsys, tmp_path, "--threads", 3, *TINY, "-r", 1, "--collective", "all", "--peer", "nccl"
    )
    assert status == 0, err
    assert fake_cupy.NcclCommunicator.destroyed == 3
    found = {(r["collective"], r["in_place"]) for r in result["rows"]}
    assert found == {(c, p) for c in _core.collectives for p in places(c)}
    for row in result["rows"]:
        assert row["wrong"] == (None if row["collective"] == "barrier" else 0)
        assert len(row["peers"]) == (row["collective"] != "barrier"), row


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3", "bool", "complex64"])
def test_dtypes_that_cupy_or_nccl_lacks(capsys, monkeypatch, tmp_path, dtype):
    fake_cupy.install(monkeypatch)
    op = "max" if dtype == "bool" else "sum"
    status, _, err, result = bench(
        capsys, tmp_path, "--threads", 2, *TINY, "-d", dtype, "-o", op, "--peer", "nccl"
    )
    assert status == 0, err
    assert all(row["wrong"] == 0 and row["peers"] == [] for row in result["rows"])


def test_a_wrong_result_of_ours_fails_the_run(capsys, monkeypatch, tmp_path):
    fake_cupy.install(monkeypatch)
    right = cuda.DeviceMemory.reading

    def broken(self, array):
        values = right(self, array)
        values[-1:] += 1
        return values

    monkeypatch.setattr(cuda.DeviceMemory, "reading", broken)
    status, out, _, _ = bench(capsys, tmp_path, "--threads", 2, *TINY)
    assert status == 1
    assert "FAILED" in out


def test_a_wrong_result_of_the_peer_is_told(capsys, monkeypatch, tmp_path):
    fake_cupy.install(monkeypatch)
    monkeypatch.setattr(fake_cupy.NcclCommunicator, "wrong", True)
    status, _, err, _ = bench(capsys, tmp_path, "--threads", 2, *TINY, "--peer", "nccl")
    assert status == 2
    assert "NCCL 2.28.9: 2 wrong elements in all_reduce of 4 bytes" in err


def test_compare(capsys, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    fake_cupy.install(monkeypatch)
    picture = tmp_path / "gpus.png"
    status, out, err, result = bench(
        capsys, tmp_path, "--threads", 2, *TINY, "--peer", "nccl", "--png", picture,
        "--only", "ring", "--only", "direct_one_shot", command="compare",
    )  # fmt: skip
    assert status == 0, err
    assert "is the fastest at every size" in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert {row["algorithm"] for row in result["rows"]} == {"ring", "direct_one_shot"}
    assert {row["mode"] for row in result["rows"]} == {"graph"}
    assert all(row["peers"][0]["ratio"] > 2 for row in result["rows"])


def test_compare_leaves_out_what_the_engine_refuses(capsys, monkeypatch, tmp_path):
    fake_cupy.install(monkeypatch)
    right = cuda.Cuda.call

    def refusing(self, bound):
        if bound.kwargs.get("algorithm") == "double_binary_tree":
            raise UnsupportedError("double_binary_tree uses 2 channels, of 1")
        right(self, bound)

    monkeypatch.setattr(cuda.Cuda, "call", refusing)
    status, out, err, result = bench(capsys, tmp_path, "--threads", 2, *TINY, command="compare")
    assert status == 0, err
    assert "# note: without double_binary_tree: double_binary_tree uses 2 channels, of 1" in out
    names = {row["algorithm"] for row in result["rows"]}
    assert "ring" in names and "double_binary_tree" not in names
    only = ("--only", "double_binary_tree")
    status, _, err, _ = bench(capsys, tmp_path, "--threads", 2, *TINY, *only, command="compare")
    assert status == 2 and "uses 2 channels" in err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("bench", "--mode", "graph"), "add --device cuda"),
        (("bench", "--peer", "nccl"), "add --device cuda"),
        (("bench", "--max-blocks", "8"), "add --device cuda"),
        (("bench", "--device", "cuda", "--python"), "--mode stream makes every call from Python"),
        (("bench", "--device", "cuda", "--peer", "gloo"), "the peer is nccl"),
        (("bench", "--device", "cuad"), "did you mean 'cuda'?"),
        (("bench", "--device", "cuda", "--mode", "grahp"), "did you mean 'graph'?"),
        (("compare", "--device", "cuda", "--mode", "both"), "compare shows one"),
        (("compare", "--device", "cuda", "--fit"), "leave it out on GPUs"),
    ],
)
def test_options_of_the_other_device(capsys, arguments, expected):
    status, _, err = run(capsys, *arguments, "--threads", 2)
    assert status == 2
    assert expected in err


def test_without_a_gpu_the_reason_is_told_once(capsys, monkeypatch):
    fake_cupy.install(monkeypatch, gpus=0)
    status, _, err = run(capsys, "bench", "--device", "cuda", "--threads", 2)
    assert (status, err.count("no GPU was found")) == (2, 1)
    status, _, err = run(capsys, "bench", "--device", "cuda")
    assert (status, err.count("no GPU was found")) == (2, 1)


def test_without_cupy(capsys, monkeypatch):
    fake_cupy.install(monkeypatch)
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    status, _, err = run(capsys, "bench", "--device", "cuda", "--threads", 2)
    assert status == 2
    assert "pip install cupy-cuda12x" in err


def test_ranks_that_share_a_gpu_have_no_nccl(capsys, monkeypatch, tmp_path):
    fake_cupy.install(monkeypatch)
    status, _, err, _ = bench(capsys, tmp_path, "--threads", 3, *TINY, "--peer", "nccl")
    assert status == 2
    assert "ranks [0, 2] share one" in err
    status, out, err, _ = bench(capsys, tmp_path, "--threads", 3, *TINY)
    assert status == 0, err
    assert "# GPUs: 2 x Fake H100, shared by 3 ranks" in out


def test_max_blocks_reaches_the_engine(capsys, monkeypatch, tmp_path):
    fake_cupy.install(monkeypatch)
    status, _, err, result = bench(capsys, tmp_path, "--threads", 2, *TINY, "--max-blocks", 8)
    assert status == 0, err
    assert fake_cupy.Engine.bounds == [8, 8]
    assert "--max-blocks=8" in result["header"]["command"]


# ---- parts ---------------------------------------------------------------------------------------


def test_a_window_is_the_slowest_ranks_mean():
    def body(comm):
        def runner(warmup, iterations):
            return np.array([[0.0, 1000.0 * (comm.rank + 1)]])

        clock = timing.Windows(comm)
        (sample,) = timing.take_turns(clock, [runner], timing.Effort(seconds=0.01))
        return sample.median, len(sample.times), list(sample.last)

    for median, rows, last in run_threads(3, body):
        assert median == pytest.approx(3e-6)
        assert rows == timing.Windows.blocks
        assert last == [0, 0, rows]


def test_calls_of_a_window_fill_the_time(monkeypatch):
    """2 µs a call and 0.03 s for 15 windows: 1000 calls each, as whole graphs."""
    fake_cupy.install(monkeypatch, gpus=1)
    asked = []

    def body(comm):
        backend = backends.connect(comm, "cuda")
        stream = backend.gpu.stream
        loop = backend.loop(lambda: stream.advance(2000 - NODE_NS / 10), 64, "graph")

        def runner(warmup, iterations):
            before = fake_cupy.Graph.launches
            rows = loop(warmup, iterations)
            asked.append((iterations, fake_cupy.Graph.launches - before))
            return rows

        (sample,) = timing.take_turns(backend.clock, [runner], timing.Effort(seconds=0.03))
        return sample.median

    assert run_threads(1, body, devices=[0])[0] == pytest.approx(2e-6)
    timed = asked[-15:]
    assert {iterations for iterations, _ in timed} == {1000}
    assert {launches for _, launches in timed} == {100 + 1}  # and one before the first event


def test_large_graphs_hold_fewer_calls():
    assert cuda.graph_calls(16 << 20) > cuda.graph_calls((16 << 20) + 1) >= 1


def test_arrays_slice_as_numpy_does(monkeypatch):
    """A case gets the same addresses, lengths and dtypes on both kinds of memory."""
    fake_cupy.install(monkeypatch, gpus=1)

    def body(comm):
        on_gpu = backends.connect(comm, "cuda").areas(4096, False)
        on_host = backends.Host(comm).areas(4096, False)
        for collective in _core.collectives:
            for in_place in places(collective):
                case = Case(collective, 3, "float64")
                for rank in range(3):
                    bounds = [bind(case, rank, 33, in_place, a) for a in (on_gpu, on_host)]
                    mine, numpys = bounds
                    for name in ("x", "out"):
                        a, b = getattr(mine, name), getattr(numpys, name)
                        assert (len(a), a.nbytes, a.dtype) == (len(b), b.nbytes, b.dtype)
                        offsets = set()
                        for area in ("first", "second"):
                            start = getattr(on_host, area).ctypes.data
                            if 0 <= b.ctypes.data - start < 4096:
                                offsets.add((area, b.ctypes.data - start))
                            start = getattr(on_gpu, area).pointer
                            if 0 <= a.pointer - start < 4096:
                                offsets.add((area, a.pointer - start))
                        assert len(offsets) == 1, (collective, rank, name, offsets)
        return 1

    assert run_threads(1, body, devices=[0]) == [1]


def test_reasons_are_told_once():
    def body(comm):
        return (
            cuda.told_by(comm, ""),
            cuda.told_by(comm, "no GPU"),
            cuda.told_by(comm, "no cupy" if comm.rank else ""),
        )

    assert run_threads(3, body)[0] == ("", "no GPU", "rank 1, 2: no cupy")


def test_a_bench_of_the_host_takes_no_nccl():
    def body(comm):
        with pytest.raises(UnsupportedError, match="--device cuda"):
            from collectives.bench import peers

            peers.connect(backends.Host(comm), ["nccl"])
        with pytest.raises(UnsupportedError, match="known: cpu, cuda"):
            backends.connect(comm, "tpu")
        return Bench(backends.Host(comm), 64).row is not None

    assert run_threads(1, body) == [True]


def test_the_errors_of_a_peer_are_errors_of_the_package():
    assert issubclass(UnsupportedError, CollectiveError)
    assert nccl.NcclPeer.name == "nccl"


# ---- what machines say ---------------------------------------------------------------------------


def test_versions_and_drivers():
    assert gpus.dotted(12040, 1000, 10) == "12.4"
    assert gpus.dotted(13000, 1000, 10) == "13.0"
    assert gpus.dotted(22809, 10000, 100) == "2.28.9"
    text = "NVRM version: NVIDIA UNIX {} Kernel Module  {}560.35.03  Release Build\nGCC version:"
    assert gpus.driver_version(text.format("x86_64", "")) == "560.35.03"
    open_module = (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build"
    )
    assert gpus.driver_version(open_module) == "580.65.06"
    assert gpus.driver_version("nothing of the kind") == ""


class Nvml:
    """pynvml of three GPUs: 0 and 1 have two links between them, 2 has one to a switch."""

    NVML_P2P_CAPS_INDEX_NVLINK = 2
    NVML_NVLINK_MAX_LINKS = 18

    class NVMLError(Exception):
        pass

    ends: ClassVar = {
        0: ["00000000:19:00.0"] * 2,
        1: ["00000000:18:00.0"] * 2,
        2: ["00000000:99:00.0"],
    }

    def nvmlInit(self):
        pass

    def nvmlSystemGetDriverVersion(self):
        return "580.65.06"

    def nvmlDeviceGetHandleByPciBusId(self, bus):
        return {"0000:18:00.0": 0, "0000:19:00.0": 1, "0000:1a:00.0": 2}[bus]

    def nvmlDeviceGetPciInfo(self, handle):
        return type("Pci", (), {"busId": f"00000000:{0x18 + handle:02X}:00.0"})

    def nvmlDeviceGetP2PStatus(self, a, b, index):
        assert index == self.NVML_P2P_CAPS_INDEX_NVLINK
        return 0 if {a, b} != {0, 2} else 5  # 0: NVML_P2P_STATUS_OK

    def nvmlDeviceGetNvLinkState(self, handle, link):
        if link >= len(self.ends[handle]):
            raise self.NVMLError("Invalid Argument")
        return 1

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle, link):
        return type("Pci", (), {"busId": self.ends[handle][link]})


@pytest.fixture
def devices(tmp_path, monkeypatch):
    """Where sysfs lists devices: `plug` adds one at a place below a host bridge."""
    listed = tmp_path / "bus"
    listed.mkdir()
    monkeypatch.setattr(pcie, "DEVICES", listed)

    def plug(bus, *above, **files):
        place = tmp_path.joinpath("devices", *above, bus)
        place.mkdir(parents=True)
        for name, text in files.items():
            (place / name).write_text(f"{text}\n")
        (listed / bus).symlink_to(place)

    return plug


def test_pcie_of_devices(devices):
    devices(
        "0000:18:00.0", "pci0000:15", "0000:15:01.0", "0000:16:00.0", "0000:17:00.0",
        max_link_speed="32.0 GT/s PCIe", current_link_width=16, numa_node=0,
    )  # fmt: skip
    devices("0000:19:00.0", "pci0000:15", "0000:15:01.0", "0000:16:00.0", "0000:17:01.0")
    devices("0000:1a:00.0", "pci0000:15", "0000:15:02.0", numa_node=-1, current_link_width=0)
    devices("0000:2a:00.0", "pci0000:29", "0000:29:01.0", numa_node=0, max_link_speed="Unknown")
    devices("0000:9a:00.0", "pci0000:98", "0000:98:01.0", numa_node=1)
    assert pcie.facts("0000:18:00.0") == {"speed": "32.0 GT/s", "lanes": 16, "numa": 0}
    assert pcie.facts("0000:19:00.0") == {} == pcie.facts("0000:1a:00.0")
    assert pcie.facts("0000:77:00.0") == {}
    first = "0000:18:00.0"
    assert pcie.way(first, "0000:19:00.0") == "a PCIe switch"
    assert pcie.way(first, "0000:1a:00.0") == "a PCIe host bridge"
    assert pcie.way(first, "0000:2a:00.0") == "PCIe host bridges of NUMA node 0"
    assert pcie.way(first, "0000:9a:00.0") == "PCIe and NUMA nodes 0 and 1"
    assert pcie.way("0000:1a:00.0", "0000:9a:00.0") == "PCIe host bridges"
    assert pcie.way(first, "0000:77:00.0") == ""


def test_survey_with_pcie(monkeypatch, devices):
    """It is told where no NVLink is known."""
    for bus in ("18", "19", "1a"):
        devices(f"0000:{bus}:00.0", "pci0000:15", f"0000:15:{bus}.0", numa_node=1)
    cupy = fake_cupy.install(monkeypatch, gpus=3)
    modules = {"cupy": cupy, "pynvml": Nvml()}
    found = gpus.survey(modules.get)
    assert [d["pcie"] for d in found["devices"]] == [{"numa": 1}] * 3
    assert gpus.link_lines(found["links"]) == [
        "0-1, 1→2: peer access, 2 NVLinks",
        "0-2: no peer access, no NVLink, through a PCIe host bridge",
        "2→1: peer access, 1 NVLink",
    ]
    del modules["pynvml"]
    found = gpus.survey(modules.get)
    assert gpus.link_lines(found["links"]) == [
        "0-1, 1-2: peer access, through a PCIe host bridge",
        "0-2: no peer access, through a PCIe host bridge",
    ]


def test_survey_of_gpus_and_links(monkeypatch, devices):
    cupy = fake_cupy.install(monkeypatch, gpus=3)
    modules = {"cupy": cupy, "pynvml": Nvml()}
    found = gpus.survey(modules.get)
    assert (found["count"], found["driver"], found["unknown"]) == (3, "580.65.06", [])
    assert [d["bus"] for d in found["devices"]] == [f"0000:{b}:00.0" for b in ("18", "19", "1a")]
    assert gpus.link_lines(found["links"]) == [
        "0-1, 1→2: peer access, 2 NVLinks",
        "0-2: no peer access, no NVLink",
        "2→1: peer access, 1 NVLink",
    ]
    assert gpus.path_words(found["links"]).startswith("no peer access (0-2): communicators")
    assert gpus.path_words(found["links"][:1]) == "peer access between all"
    del modules["pynvml"]
    found = gpus.survey(modules.get)
    assert "pip install nvidia-ml-py" in found["unknown"][0]
    assert gpus.link_lines(found["links"]) == ["0-1, 1-2: peer access", "0-2: no peer access"]
    found = gpus.survey({}.get)
    assert found["devices"] == [{}, {}, {}] and "cupy" in found["unknown"][0]


def test_survey_without_a_gpu(monkeypatch):
    fake_cupy.install(monkeypatch, gpus=0)
    found = gpus.survey({}.get)
    assert (found["count"], found["why"], found["links"]) == (0, "no GPU was found", [])


def test_a_broken_nvml_is_told(monkeypatch, devices):
    class Broken(Nvml):
        def nvmlInit(self):
            raise self.NVMLError("Driver/library version mismatch")

    cupy = fake_cupy.install(monkeypatch, gpus=2)
    found = gpus.survey({"cupy": cupy, "pynvml": Broken()}.get)
    assert found["unknown"] == ["NVLink: NVML says Driver/library version mismatch"]
    assert gpus.link_lines(found["links"]) == ["0-1: peer access"]


def test_info_lists_gpus_links_and_driver(capsys, monkeypatch, devices):
    devices(
        "0000:18:00.0", "pci0000:15", max_link_speed="32.0 GT/s PCIe", current_link_width=16,
        numa_node=0,
    )  # fmt: skip
    cupy = fake_cupy.install(monkeypatch, gpus=3)
    monkeypatch.setattr(gpus, "_module", {"cupy": cupy, "pynvml": Nvml()}.get)
    status, out, err = run(capsys, "info")
    assert status == 0, err
    lines = {line[:12].strip(): line[13:] for line in out.splitlines() if line[:12].strip()}
    assert lines["GPUs"].startswith("cuda:0 Fake H100 at 0000:18:00.0, 80 GiB, 132 multiproc")
    assert "compute capability 9.0, PCIe 32.0 GT/s x16, NUMA node 0\n" in out
    assert "cuda:2 Fake H100" in out
    assert lines["GPU links"] == "0-1, 1→2: peer access, 2 NVLinks"
    assert lines["GPU driver"] == "580.65.06"
    status, out, _ = run(capsys, "info", "--json")
    assert json.loads(out)["gpus"]["count"] == 3


def test_info_tells_nodes_that_have_other_gpus(monkeypatch):
    """Each survey is by the first rank of a node; those like rank 0's are told once."""
    one = {"count": 1, "why": "", "driver": "580", "devices": [{}], "links": [], "unknown": []}
    none = one | {"count": 0, "why": "no GPU was found", "devices": []}

    here = threading.local()
    monkeypatch.setattr(gpus, "survey", lambda: none if here.node in (1, 3) else one)

    def body(comm):
        here.node = comm.node
        return info._gpus_of_nodes(comm)

    found = run_threads(6, body, nodes=[0, 1, 1, 2, 3, 0])
    wanted = {"gpus": one, "gpus_elsewhere": [{"nodes": [1, 3], "gpus": none}]}
    assert found == [wanted] * 6
    lines = info._others(wanted["gpus_elsewhere"])
    assert lines == [("GPUs", "nodes 1,3: none: no GPU was found")]


def test_info_without_gpus_says_why(capsys, monkeypatch):
    fake_cupy.install(monkeypatch, gpus=0)
    status, out, _ = run(capsys, "info")
    assert status == 0
    assert "GPUs         none: no GPU was found" in out
