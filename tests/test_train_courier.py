"""The thread that hands gradients over while backward goes on."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.fixture
def courier():
    from collectives.train.courier import Courier

    return Courier(None)


def threads():
    return [t for t in threading.enumerate() if t.name == "collectives: hands gradients over"]


def test_errands_are_done_in_order_and_beside(courier):
    done, go = [], threading.Event()
    courier.give(go.wait)
    for i in range(100):
        courier.give(lambda i=i: done.append((i, threading.current_thread())))
    assert not done  # nobody waited for it
    go.set()
    courier.wait()
    assert [i for i, _ in done] == list(range(100))
    (own,) = {t for _, t in done}
    assert own in threads()
    courier.wait()  # for nothing


def test_what_an_errand_raises_is_told_and_those_behind_it_are_left_out(courier):
    done = []

    def fail():
        raise KeyError("wrong")

    for _ in range(2):  # it goes on afterwards
        courier.give(lambda: done.append(1))
        courier.give(fail)
        courier.give(lambda: done.append(2))
        with pytest.raises(KeyError, match="wrong"):
            courier.wait()
        courier.give(lambda: done.append(3))
        courier.wait()
    courier.give(fail)
    assert isinstance(courier.end(), KeyError)
    assert courier.end() is None
    assert done == [1, 3, 1, 3]


def test_nothing_of_an_errand_is_kept(courier):
    class Big:
        def __call__(self):
            pass

    errand = Big()
    held = weakref.ref(errand)
    courier.give(errand)
    del errand
    courier.wait()
    assert held() is None


@pytest.mark.parametrize("closes", [False, True])
def test_the_thread_ends_with_the_courier(closes):
    from collectives.train.courier import Courier

    before = set(threads())
    courier = Courier(None)
    assert not {*threads()} - before  # it has nothing to do yet
    courier.give(lambda: None)
    (own,) = {*threads()} - before
    courier.wait()
    if closes:
        courier.close()
        courier.close()
    else:
        del courier
        gc.collect()
    own.join(timeout=10)
    assert not own.is_alive()
