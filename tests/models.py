"""Small models and data for the tests of training."""

from __future__ import annotations

import numpy as np

# "w2" is longer than several chunks, so shards end inside of it; "w3" has an odd count.
SHAPES = {"w1": (11, 60), "b1": (60,), "w2": (60, 53), "b2": (53,), "w3": (53, 7), "scale": ()}


def parameters(dtype="float32", seed=0):
    random = np.random.default_rng(seed)
    made = {n: random.normal(0, 0.3, shape) for n, shape in SHAPES.items()}
    return {n: np.asarray(x, dtype) for n, x in made.items()}


def data(count=240, seed=1):
    random = np.random.default_rng(seed)
    x = random.normal(size=(count, 11)).astype(np.float32)
    return x, np.sin(x @ random.normal(size=(11, 7))).astype(np.float32)


@np.errstate(over="ignore", invalid="ignore")  # what fp16 is tried for
def loss_and_grads(params, batch, emit):
    """Two hidden layers and the mean squared error, in the dtype of the parameters."""
    x, y = batch
    kind = np.asarray(params["w1"]).dtype
    x, y = x.astype(kind), y.astype(kind)
    h1 = np.tanh((x @ params["w1"] + params["b1"]).astype(np.float32)).astype(kind)
    h2 = np.maximum(h1 @ params["w2"] + params["b2"], kind.type(0))
    out = h2 @ params["w3"]
    scaled = out * params["scale"]
    error = (scaled - y).astype(np.float32)
    loss = float((error.astype(np.float64) ** 2).mean())
    back = (error * np.float32(2 * emit.scale / error.size)).astype(kind)

    def give(name, grad):
        emit(name, np.asarray(grad, kind))

    give("scale", (back * out).sum())
    back = (back * params["scale"]).astype(kind)
    give("w3", h2.T @ back)
    back = (back @ params["w3"].T) * (h2 > 0)
    give("b2", back.sum(axis=0))
    give("w2", h1.T @ back)
    back = (back @ params["w2"].T) * (kind.type(1) - h1 * h1)
    give("b1", back.sum(axis=0))
    give("w1", x.T @ back)
    return loss


def part_of(batch, rank, ranks):
    """This rank's part of a batch, as numpy.array_split deals it."""
    return tuple(np.array_split(a, ranks)[rank] for a in batch)


def bits(arrays):
    return {name: np.ascontiguousarray(x).tobytes() for name, x in arrays.items()}


def part_of_tensors(batch, rank, ranks):
    """The same for tensors of torch."""
    return tuple(t.tensor_split(ranks)[rank] for t in batch)
