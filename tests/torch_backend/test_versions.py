"""What differs between releases of torch is chosen by what a release has: tried on stand-ins."""

from __future__ import annotations

import sys
import types
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from collectives.torch import mixed, overlap  # noqa: E402
from collectives.torch.group import CollectivesGroup  # noqa: E402

pytestmark = pytest.mark.torch


class WithConstructor:
    """torch's class Backend from 2.14 on."""

    def __init__(self, rank: int, size: int) -> None:
        self.ends = rank, size


class WithoutConstructor:
    """The same before: Python cannot make one."""

    def __init__(self) -> None:
        raise TypeError("No constructor defined!")


class Group:
    """A process group of this runtime, as far as it is asked here."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 3

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.calls.append((name, *arguments))


class Config:
    """torch's BackendConfig."""

    def __init__(self, **devices: str) -> None:
        self.devices = devices

    def get_device_backend_map(self) -> dict[str, str]:
        return self.devices


def make_group(backend_config: Config, group: Any) -> Any:
    """As torch makes one: the creator is called from a function that has this argument."""
    return mixed.in_place(group)


@pytest.mark.parametrize("base", [WithConstructor, WithoutConstructor])
def test_alone_it_is_the_whole_group(monkeypatch: pytest.MonkeyPatch, base: type) -> None:
    monkeypatch.setattr(mixed, "Backend", base)
    group = Group()
    assert make_group(Config(cpu="collectives", cuda="collectives"), group) is group


def test_with_others_and_a_constructor_it_is_one_of_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    body = dict(vars(mixed.CollectivesBackend))
    body.pop("__dict__", None)
    body.pop("__weakref__", None)
    body["__init__"] = lambda self, group: (
        WithConstructor.__init__(self, group.rank(), group.size()),
        setattr(self, "group", group),
    )[0]
    monkeypatch.setattr(mixed, "Backend", WithConstructor)
    monkeypatch.setattr(mixed, "CollectivesBackend", type("OnNewer", (WithConstructor,), body))
    group = Group()
    made = make_group(Config(cpu="gloo", cuda="collectives"), group)
    assert made is not group
    assert made.ends == (1, 3)
    made.allreduce("tensors", "options")
    made.allreduce_sparse("tensors", "options")
    made.recv_anysource("tensors", 7)
    assert group.calls == [
        ("allreduce", "tensors", "options"),
        ("allreduce", "tensors", "options"),
        ("recv_anysource", "tensors", 7),
    ]


def test_with_others_and_no_constructor_a_warning_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mixed, "Backend", WithoutConstructor)
    group = Group()
    with pytest.warns(UserWarning, match=r"'cpu:gloo,cuda:collectives'.* serves all devices here"):
        assert make_group(Config(cpu="gloo", cuda="collectives"), group) is group


def test_the_group_has_all_that_a_backend_passes_on() -> None:
    missing = [name for name in mixed.CALLS if not hasattr(CollectivesGroup, name)]
    assert not missing


def test_both_generations_of_names() -> None:
    for older, newer in {
        "_allgather_base": "all_gather_single",
        "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
        "_reduce_scatter_base": "reduce_scatter_single",
        "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
        "alltoall_base": "all_to_all_single",
        "gather_into_tensor": "gather_single",
        "_get_backend": "get_backend",
        "_set_default_timeout": "set_timeout",
    }.items():
        assert getattr(CollectivesGroup, older) is getattr(CollectivesGroup, newer)


@pytest.fixture
def fsdp2(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A stand-in for the module of FSDP2 that reduces gradients."""
    module = types.ModuleType("fsdp2")
    monkeypatch.setattr(overlap, "_MODULE", "fsdp2")
    monkeypatch.setattr(overlap, "installed", False)
    monkeypatch.setitem(sys.modules, "fsdp2", module)
    return module


def test_overlap_leaves_another_fsdp2_alone(fsdp2: types.ModuleType) -> None:
    """Without the function, and with one that takes something else."""
    overlap.install()
    assert not hasattr(fsdp2, "foreach_reduce")

    def foreach_reduce(parameters: Any, group: Any) -> None: ...

    fsdp2.foreach_reduce = foreach_reduce
    fsdp2.DefaultReduceScatter = object
    overlap.install()
    assert fsdp2.foreach_reduce is foreach_reduce


def test_overlap_waits_until_fsdp2_is_imported(
    fsdp2: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "fsdp2")
    overlap.install()
    assert not overlap.installed


def test_overlap_fits_the_fsdp2_that_is_here() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        param_group = pytest.importorskip(overlap._MODULE)
    import inspect

    function = inspect.unwrap(param_group.foreach_reduce)
    assert inspect.signature(function).parameters.keys() >= overlap._NEEDED
