"""torch.distributed on this runtime. Ranks are processes; see fork_ranks.py."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import launch
import pytest

HERE = Path(__file__).resolve().parent

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
]
# torch warns of parts of its own that it still uses; the workers say which of their warnings count.
QUIET = {"PYTHONWARNINGS": "default", "OMP_NUM_THREADS": "1"}


def ranks(n: int, worker: str, *arguments: object, timeout: float = 110) -> launch.Result:
    return launch.run(
        n, HERE / "workers" / worker, *arguments, launcher="fork", env=QUIET, timeout=timeout
    )


@pytest.mark.parametrize("n", [1, 3])
def test_every_call(n: int) -> None:
    if n == 1:
        result = ranks(1, "calls.py", "all_reduce_of_every_dtype", "all_reduce_with_every_op",
                       "gathers", "reduce_scatters", "objects", "sparse", "works")  # fmt: skip
    else:
        result = ranks(n, "calls.py")
    assert "all checks passed" in result.expect(status=0).output


@pytest.mark.parametrize("n", [2, 3])
def test_gathers_out_of_their_own_output(n: int) -> None:
    assert "all checks passed" in ranks(n, "places.py").expect(status=0).output


def test_functional_calls() -> None:
    assert "all checks passed" in ranks(3, "functional.py").expect(status=0).output


def test_training() -> None:
    assert "all checks passed" in ranks(2, "training.py").expect(status=0).output


def test_calls_out_of_callbacks() -> None:
    assert "all checks passed" in ranks(3, "callbacks.py").expect(status=0).output


def test_fsdp2_reduces_gradients_beside_the_backward_pass() -> None:
    assert "all checks passed" in ranks(2, "overlap.py").expect(status=0).output


@pytest.mark.parametrize("backends", ["cpu:collectives,cuda:gloo", "cpu:gloo,cuda:collectives"])
def test_one_backend_of_several(backends: str) -> None:
    result = ranks(2, "mixed.py", backends).expect(status=0)
    assert result.output.count("all checks passed") == 2


@pytest.mark.faults
@pytest.mark.parametrize(
    "parts",
    [
        "disagreement wrong_arguments tensors_without_memory again",
        "lateness",
        "timeouts_set_later",
        "calls_out_of_callbacks_of_closed_groups",
        "abort",
        "leaving",
    ],
)
def test_faults(parts: str) -> None:
    ranks(3, "faults.py", *parts.split()).expect(status=0)


@pytest.mark.faults
@pytest.mark.parametrize("part", ["missing", "all_came", "not_met", "not_connected"])
def test_what_rank_0_says_at_last_is_heard(part: str) -> None:
    result = ranks(3, "last_words.py", part).expect(status=0)
    assert result.output.count("heard it") == (2 if part in ("all_came", "not_connected") else 1)


@pytest.mark.parametrize("n", [1, 3])
def test_outputs_of_another_size_than_the_input(n: int) -> None:
    ranks(n, "faults.py", "outputs_of_another_size").expect(status=0)


@pytest.mark.faults
def test_a_rank_dies() -> None:
    result = ranks(3, "faults.py", "death").expect(status=1)
    assert "rank 0 saw it" in result.output and "rank 1 saw it" in result.output
    assert "rank 2 ended with status -9" in result.output
    assert "rank 0 ended with" not in result.output


@pytest.mark.parametrize(
    ("launcher", "n"), [("torchrun", 2), ("run", 2),
                        pytest.param("openmpi", 2, marks=pytest.mark.mpi),
                        pytest.param("mpich", 2, marks=pytest.mark.mpi)]
)  # fmt: skip
def test_launchers(launcher: str, n: int, tmp_path: Path) -> None:
    """A script that knows nothing of this project."""
    # MPICH's environment has no torch of its own: this one's, behind all that it has.
    spec = importlib.util.find_spec("torch")
    site = str(Path(spec.origin).parents[1]) if spec is not None and spec.origin else ""
    tmp_path.joinpath("sitecustomize.py").write_text(f"import sys; sys.path.append({site!r})")
    env = {**QUIET, "PYTHONPATH": str(tmp_path)} if launcher == "mpich" else QUIET
    result = launch.run(
        n, HERE / "workers" / "unmodified.py", launcher=launcher, env=env, timeout=110
    ).expect(status=0)
    assert result.output.count(f"the sum of {n} ranks") == n


def test_debug_detail() -> None:
    result = launch.run(
        2,
        HERE / "workers" / "calls.py",
        "gathers",
        "works",
        launcher="fork",
        env=QUIET | {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
        timeout=110,
    )
    assert "all checks passed" in result.expect(status=0).output


def test_import_of_torch_loads_no_core() -> None:
    """Who has the package installed pays for it only where it is used."""
    code = (
        "import sys, torch, torch.distributed as d\n"
        "assert 'COLLECTIVES' in d.Backend._plugins, d.Backend._plugins\n"
        "print([m for m in sys.modules if m.startswith('collectives.torch')])"
    )
    said = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=110
    )
    assert said.returncode == 0, said.stderr
    assert "group" not in said.stdout


@pytest.mark.parametrize("name", ["torch_ddp", "torch_fsdp2", "torch_zero"])
def test_examples(name: str) -> None:
    script = HERE.parents[1] / "examples" / f"{name}.py"
    assert len(script.read_text().splitlines()) < 60
    result = launch.run(2, script, launcher="fork", env=QUIET, timeout=110).expect(status=0)
    assert "2 ranks: " in result.output


def test_example_with_accelerate() -> None:
    pytest.importorskip("accelerate", reason="the example needs Hugging Face's accelerate")
    test_examples("torch_accelerate")
    script = HERE.parents[1] / "examples" / "torch_accelerate.py"
    result = launch.run(2, script, launcher="run", env=QUIET, timeout=110).expect(status=1)
    assert "accelerate needs torchrun, or mpirun" in result.output


SUBSET = (
    "test_(broadcast|reduce_sum|all_reduce_(sum|product|full_group_sum|complex)"
    "|gather|scatter|all_gather|all_to_all_single_unequal_split|send_recv(_any_source|_with_tag)?"
    "|isend|barrier|ddp_hook_pickling_powerSGD|DistributedDataParallelCPU|accumulate_gradients_no_sync"
    "|new_group_local_sync|sparse_all_reduce_sum|ddp_uneven_inputs_stop_iteration_sync_bn)$"
)


# Cases that torch has for GPUs alone, on tensors of the host: see suite_pretended.py.
PRETENDED = (
    "test_(broadcast_cuda|all_gather_v_cuda|reduce_scatter_v_cuda|all_to_all_cuda|coalescing_manager"
    "|batch_isend_irecv_nccl|batch_isend_irecv_self_nccl|get_future|nccl_backend_bool_allreduce"
    "|ddp_grad_div_uneven_inputs|ddp_join_model_equivalence|ddp_comm_hook_logging)$"
)


# Some for ranks that are kept, and are started as on GPUs: of what a case may leave behind.
KEPT = "test_(broadcast|reduce_sum|get_rank|barrier|DistributedDataParallelCPU|ddp_device)$"


@pytest.mark.parametrize(
    ("cases", "least", "options"),
    [
        (SUBSET, 15, ["--device", "cpu"]),
        (PRETENDED, 12, ["--device", "pretended"]),
        (KEPT, 5, ["--device", "cpu", "--keep", "--spawn"]),
    ],
    ids=["cpu", "pretended", "kept"],
)
def test_a_part_of_torchs_suite(cases: str, least: int, options: list[str], tmp_path: Path) -> None:
    pytest.importorskip("expecttest", reason="torch's suite needs expecttest")
    outcomes = tmp_path / "outcomes.json"
    run = subprocess.run(
        [sys.executable, str(HERE / "suite.py"), "--backends", "collectives", "--cases", cases,
         *options, "--seconds", "60", "--json", str(outcomes), "--log", str(tmp_path)],
        capture_output=True, text=True, timeout=115,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    told = json.loads(outcomes.read_text())
    assert "again" not in told["about"]
    results = told["results"]["collectives"]
    passed = [case for case, said in results.items() if said["outcome"] == "passed"]
    assert len(passed) >= least, run.stdout
