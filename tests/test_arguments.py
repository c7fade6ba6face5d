"""Arguments of communicators that are refused, in words, before anything is sent or started."""

from __future__ import annotations

import copy
import gc
import pickle
import signal
import threading
import time

import numpy as np
import pytest
from bootstraps import run_all, tcp_world

import collectives as cc

NO_SECONDS = [
    (-1, ValueError, "positive number of seconds, such as 30, not -1"),
    (0, ValueError, "positive"),
    (float("nan"), ValueError, "positive.*not nan"),
    (float("inf"), ValueError, "positive.*not inf"),
    ("x", TypeError, "timeout must be a number of seconds, not 'x'"),
    ("3", TypeError, "timeout must be a number of seconds, not '3'"),
    ([], TypeError, "number of seconds"),
]


@pytest.mark.parametrize(("timeout", "kind", "words"), NO_SECONDS)
def test_a_timeout_that_is_none(monkeypatch, timeout, kind, words):
    from collectives import communicator, starting

    for module in (communicator, starting):
        monkeypatch.setattr(module, "detect", lambda *_, **__: pytest.fail("it looked for ranks"))
    monkeypatch.setattr(starting.Threads, "world", lambda *_: pytest.fail("it made ends"))
    for start in (
        lambda: cc.init(timeout=timeout),
        lambda: cc.from_mpi(None, timeout=timeout),
        lambda: cc.run_threads(2, lambda comm: None, timeout=timeout),
    ):
        with pytest.raises(kind, match=words):
            start()


@pytest.mark.parametrize(("timeout", "kind", "words"), NO_SECONDS)
def test_a_timeout_of_a_part_that_is_none(timeout, kind, words):
    def body(comm):
        for call in (
            lambda: comm.split(0, timeout=timeout),
            lambda: comm.duplicate(timeout),
            lambda: comm.shrink(timeout),
        ):
            with pytest.raises(kind, match=words):
                call()
        return comm.all_reduce(np.ones(1))[0]

    assert cc.run_threads(2, body, timeout=20) == [2, 2]


def test_a_timeout_beyond_what_a_wait_can_last():
    """As good as none; the calls that take seconds or milliseconds do not overflow."""

    def body(comm):
        with comm.split(0, timeout=1e300) as part, part.shrink(1e300) as left:
            work = left.all_reduce(np.ones(1), async_op=True)
            return work.wait(1e300)[0]

    assert cc.run_threads(2, body, timeout=1e300) == [2, 2]
    with tcp_world(2, timeout=1e9) as ends:
        assert run_all(*(lambda e=e: e.all_gather(b"here") for e in ends)) == [[b"here"] * 2] * 2


def integers():
    found = [np.int64, np.uint8, lambda value: np.array(value, np.int32)]
    torch = pytest.importorskip("torch")
    return [*found, torch.tensor]


def test_split_takes_integers_of_any_kind():
    def body(comm):
        for kind in integers():
            part = comm.split(kind(comm.rank % 2), kind(1 - comm.rank // 2))
            assert (part.rank, part.size) == (1 - comm.rank // 2, 2), kind
            part.close()

    cc.run_threads(4, body, timeout=20)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("a",), "color must be an integer, not 'a'"),
        ((1.5,), "color must be an integer, not 1.5"),
        ((0, None), "key must be an integer, not None"),
        ((0, "0"), "key must be an integer, not '0'"),
    ],
)
def test_split_refuses_what_is_no_integer(arguments, words):
    """Before anything is sent: the next collective call finds the ranks where they were."""

    def body(comm):
        if comm.rank == 0:
            with pytest.raises(TypeError, match=words):
                comm.split(*arguments)
        return comm.all_reduce(np.ones(1))[0]

    assert cc.run_threads(2, body, timeout=20) == [2, 2]


@pytest.mark.parametrize(
    ("nodes", "error", "words"),
    [
        (["a", "b"], TypeError, "nodes must be an integer, not 'a'"),
        ([0.5, 1], TypeError, "nodes must be an integer"),
        ([1 << 40, 0], ValueError, "a number from 0 on"),
        ([-1, 0], ValueError, "a number from 0 on"),
        ([0], ValueError, "names 1 ranks, there are 2"),
    ],
)
def test_nodes_that_are_none(nodes, error, words):
    with pytest.raises(error, match=words):
        cc.run_threads(2, lambda comm: None, nodes=nodes, timeout=20)


def test_nodes_by_a_generator():
    assert cc.run_threads(2, lambda comm: comm.nodes, nodes=(r for r in (1, 0)), timeout=20)


def test_gpus_by_an_array():
    """Their numbers are read, and what is wrong with them is not that there are none."""
    with pytest.raises(ValueError, match="names no GPU"):
        cc.run_threads(1, lambda comm: None, devices=np.array([], int))
    with pytest.raises(cc.CollectiveError) as caught:
        cc.run_threads(1, lambda comm: None, devices=np.array([4096]))
    assert "names no GPU" not in str(caught.value)


def test_shapes_and_devices_of_symmetric_arrays():
    def body(comm):
        shapes = (3, np.array(3), (3,), np.array([3]), (n for n in (3,)))
        made = [comm.empty(shape).shape for shape in shapes]
        with pytest.raises(TypeError, match="device must be 'cpu', 'cuda' or 'cuda:N', not None"):
            comm.empty(3, device=None)
        return made

    assert cc.run_threads(2, body, timeout=20) == [[(3,)] * 5] * 2


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_communicators_are_not_copied(copied):
    def body(comm):
        with pytest.raises(TypeError, match="cannot be copied or pickled: duplicate"):
            copied(comm)
        return comm.all_reduce(np.ones(1))[0]

    assert cc.run_threads(2, body, timeout=20) == [2, 2]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"devices": 0}, TypeError, r"devices must be a list of numbers, such as \[0\], not 0"),
        ({"devices": "cuda"}, TypeError, "devices must be an integer, not 'c'"),
        ({"devices": [-1]}, ValueError, r"devices=\[-1\]: a GPU is a number from 0 on"),
        ({"nodes": 3}, TypeError, r"nodes must be a list of numbers, such as \[0\], not 3"),
    ],
)
def test_lists_that_are_none(arguments, error, words):
    with pytest.raises(error, match=words):
        cc.run_threads(2, lambda comm: None, timeout=20, **arguments)


def test_a_kind_of_symmetric_arrays_that_is_none():
    """Before anything is sent: the next collective call finds the ranks where they were."""

    def body(comm):
        if comm.rank == 0:
            with pytest.raises(TypeError, match="kind must be a name such as 'numpy', not 3"):
                comm.empty(3, kind=3)
        return comm.all_reduce(np.ones(1))[0]

    assert cc.run_threads(2, body, timeout=20) == [2, 2]


@pytest.mark.parametrize("bootstrap", [None, 3, "solo", object()])
def test_communicators_are_made_of_a_bootstrap(bootstrap):
    words = f"made of a Bootstrap, not of a {type(bootstrap).__name__}; init"
    with pytest.raises(TypeError, match=words):
        cc.Communicator(bootstrap)


def test_communicators_that_are_made_while_one_is(monkeypatch):
    """As engines for GPUs on several nodes do; they end with the rank too."""

    def set_up(comm, device):
        if comm.size > 1:
            comm.part = comm._of_ranks([comm.rank], "part")

    monkeypatch.setattr(cc.Communicator, "_set_up_device", set_up)
    parts = {}

    def body(comm):
        parts[comm.rank] = comm.part
        comm.barrier()
        if comm.rank == 1:
            raise KeyError("the program's own")
        with pytest.raises(cc.AbortedError, match="rank 1 raised KeyError"):
            comm.barrier()

    with pytest.raises(KeyError, match="the program's own"):
        cc.run_threads(2, body, devices=[0], timeout=20)
    assert "rank 1 raised KeyError" in parts[1]._core.why_broken


def test_communicators_that_were_closed_are_forgotten():
    def body(comm):
        kept = comm.duplicate()
        for _ in range(20):
            with comm.duplicate() as twin, twin.split(0) as part:
                part.barrier()
        del twin, part
        gc.collect()
        return list(comm.family._members) == [kept]

    assert cc.run_threads(2, body, timeout=20) == [True, True]


def test_a_communicator_that_is_made_during_an_interruption(monkeypatch):
    """It hears of it as those do that were there."""
    make, ends = cc.Communicator._made_of, []

    def slowly(comm, *arguments, **more):
        made = make(comm, *arguments, **more)
        comm.barrier()
        if comm.rank == 0:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        while not comm._core.why_broken:
            time.sleep(1e-3)
        time.sleep(0.2)  # until all communicators were told
        return made

    monkeypatch.setattr(cc.Communicator, "_made_of", slowly)

    def body(comm):
        with comm.duplicate() as twin, pytest.raises(cc.AbortedError, match="interrupted by Key"):
            twin.barrier()
        ends.append(comm.rank)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            cc.run_threads(2, body, timeout=20)
    finally:
        signal.signal(signal.SIGINT, handler)
    deadline = time.monotonic() + 10
    while len(ends) < 2 and time.monotonic() < deadline:
        time.sleep(1e-2)
    assert sorted(ends) == [0, 1]
