"""Gradients that lie where their bucket does, as their own view or otherwise."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import collectives as cc
from collectives.bucketing import Bucketer
from collectives.gradients import meets

GIVEN = [[1.0, 2.0], [3.0, 4.0]]


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("turned", [lambda v: v.T, lambda v: v[::-1], lambda v: v[:, ::-1]])
def test_a_gradient_that_lies_in_its_place_in_another_way(turned, scale):
    def body(comm):
        bucketer = Bucketer(comm, {"w": np.zeros((2, 2))}, rebuild=False)
        for reduced in (False, True):  # what is written into the view holds what was there
            view = bucketer.view("w")
            view[...] = GIVEN
            if reduced:
                bucketer.ready("w", turned(view), scale)
                bucketer.finish()
            else:
                with bucketer.no_sync():
                    bucketer.ready("w", view)
        return bucketer.view("w").tolist()

    wanted = (2 * scale * turned(np.array(GIVEN))).tolist()
    assert cc.run_threads(2, body, timeout=20) == [wanted] * 2


def test_a_gradient_that_lies_in_its_place_in_another_dtype():
    def body(comm):
        given = {"w": np.zeros(4, ml_dtypes.bfloat16)}
        bucketer = Bucketer(comm, given, dtype="float32", rebuild=False)
        view = bucketer.view("w")
        grad = view.view(ml_dtypes.bfloat16)[:4]
        grad[...] = [1, 2, 3, 4]
        bucketer.ready("w", grad)
        bucketer.finish()
        return bucketer.view("w").tolist()

    assert cc.run_threads(2, body, timeout=20) == [[2, 4, 6, 8]] * 2


def test_what_meets():
    x = np.zeros((4, 6))
    for a, b, wanted in (
        (x, x, True),
        (x[::-1, ::-1], x[3, 5:], True),
        (x[:2], x[2:], False),
        (x[2:], x[:2], False),
        (x[:0], x, False),
        (x[1], x.T, True),
        (x, x.copy(), False),
    ):
        assert meets(a, b) == wanted


@pytest.mark.torch
def test_tensors_that_wait_and_lie_in_their_place():
    """The way of tensors on GPUs, on the host."""
    torch = pytest.importorskip("torch")
    from collectives.torch_gradients import Known, TorchGradients, Waiting

    place = torch.tensor(GIVEN)
    for grad, kept in (
        (place, None),
        (place.t(), [[1, 3], [2, 4]]),
        (place.view(torch.bfloat16)[:, :2], "its own dtype"),
        (torch.ones(2, 2), [[1, 1], [1, 1]]),
    ):
        waiting = Waiting("float32")
        known = Known(None, waiting, grad, place.data_ptr())
        TorchGradients(0, lasting=True).put("w", grad, known, again=False)
        held = waiting._grads.get("w")
        if kept is None:
            assert held is None
            continue
        assert held.dtype is grad.dtype and torch.equal(held, grad)
        assert held.data_ptr() != place.data_ptr()
        assert kept == "its own dtype" or held.tolist() == kept
