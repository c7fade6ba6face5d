"""Data-parallel training on real scans: handwritten digits, one all_reduce a step.

    python -m collectives run -n 4 examples/digits.py   (or: mpirun -n 4 python ...)

Every rank takes its part of each batch and computes the gradient of the batch's mean loss over that
part. The sum over the ranks, one all_reduce, is then the gradient of the whole batch, whatever the
number of ranks and however unequal the parts. So the training takes the same steps as one process
that sees whole batches. Rank 0 runs that too, and compares.

The model is a network with one hidden layer, trained by SGD with momentum in float64 on
scikit-learn's bundled digits (1,797 scans of 8 x 8 pixels; every fifth is for testing). Exits with
status 1 if the test accuracy is below 97 % or if the losses differ by more than 1e-6.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # one thread a rank: the ranks fill the cores

import sys
import time
from collections.abc import Callable

import numpy as np
from sklearn.datasets import load_digits

import collectives as cc

EPOCHS, BATCH, RATE, MOMENTUM = 20, 64, 0.2, 0.9
SHAPES = [(64, 96), (96,), (96, 10), (10,)]  # weights and biases of the two layers
SIZE = sum(int(np.prod(shape)) for shape in SHAPES)


def layers(flat: np.ndarray) -> list[np.ndarray]:
    """The weights and biases, as views into one flat vector."""
    ends = np.cumsum([int(np.prod(shape)) for shape in SHAPES])
    parts = np.split(flat[:SIZE], ends[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, SHAPES, strict=True)]


def predict(weights: np.ndarray, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The hidden layer, and the probability of each digit, for every image."""
    w1, b1, w2, b2 = layers(weights)
    hidden = np.maximum(images @ w1 + b1, 0)
    scores = np.exp((z := hidden @ w2 + b2) - z.max(axis=1, keepdims=True))
    return hidden, scores / scores.sum(axis=1, keepdims=True)


def gradient(weights, images, labels, count: int, out: np.ndarray) -> None:
    """These images' part of the gradient of the mean loss of `count` images; out[SIZE] is their
    part of that loss."""
    hidden, error = predict(weights, images)
    each = np.arange(len(labels))
    out[SIZE] = -np.log(error[each, labels]).sum() / count
    error[each, labels] -= 1
    error /= count
    w1, b1, w2, b2 = layers(out)
    back = (error @ layers(weights)[2].T) * (hidden > 0)
    w1[:], b1[:] = images.T @ back, back.sum(axis=0)
    w2[:], b2[:] = hidden.T @ error, error.sum(axis=0)


def train(images, labels, rank: int, ranks: int, add_up: Callable, title: str):
    """Trains rank `rank` of `ranks`; add_up(x) sums x over them. Returns weights and final loss."""
    random = np.random.default_rng(1)  # the same on all ranks: they agree on batches without a word
    weights = np.zeros(SIZE)
    for part in layers(weights):
        part[...] = random.normal(0, (2 / len(part)) ** 0.5, part.shape) if part.ndim > 1 else 0
    velocity, grad = np.zeros(SIZE), np.empty(SIZE + 1)
    for epoch in range(1, EPOCHS + 1):
        rate = RATE * (1 + np.cos(np.pi * (epoch - 1) / EPOCHS)) / 2
        order, losses = random.permutation(len(labels)), 0.0
        for batch in np.split(order, range(BATCH, len(order), BATCH)):
            mine = np.array_split(batch, ranks)[rank]
            gradient(weights, images[mine], labels[mine], len(batch), grad)
            add_up(grad)
            velocity = MOMENTUM * velocity + grad[:SIZE]
            weights -= rate * velocity
            losses += grad[SIZE] * len(batch)
        if rank == 0 and (sys.stdout.isatty() or epoch % 10 == 0):
            end = "\r" if sys.stdout.isatty() and epoch < EPOCHS else "\n"
            line = f"{title}: epoch {epoch}/{EPOCHS}, loss {losses / len(order):.6f}"
            print(line, end=end, flush=True)
    mine = np.array_split(np.arange(len(labels)), ranks)[rank]
    gradient(weights, images[mine], labels[mine], len(labels), grad)
    return weights, float(add_up(grad)[SIZE])


def main() -> int:
    scans = load_digits()
    images, labels = scans.data / 16, scans.target
    test = np.arange(len(labels)) % 5 == 0
    data = images[~test], labels[~test]

    with cc.init() as comm:
        start = time.perf_counter()
        title = f"{comm.size} rank{'s'[: comm.size - 1]} ({comm.transports})"
        weights, loss = train(*data, comm.rank, comm.size, comm.all_reduce, title)
        seconds = time.perf_counter() - start
        good = np.zeros(1, np.uint8)
        if comm.rank == 0:
            _, alone = train(*data, 0, 1, lambda x: x, "1 process")
            found = predict(weights, images[test])[1].argmax(axis=1)
            accuracy = float((found == labels[test]).mean())
            good[0] = accuracy >= 0.97 and abs(loss - alone) <= 1e-6
            print(f"test accuracy {accuracy:.2%} of {test.sum()} scans, trained in {seconds:.1f} s")
            print(f"loss {loss:.12f}, of one process {alone:.12f}, difference {loss - alone:.1e}")
            print(f"{'good' if good[0] else 'FAILED'}: due are >= 97 % and losses equal to 1e-6")
        comm.broadcast(good)  # so that all ranks end with the same status
        return 0 if good[0] else 1


if __name__ == "__main__":
    sys.exit(main())
