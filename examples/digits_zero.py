"""The same scans under every stage of sharding: ZeRO-0 to ZeRO-3 end with the same bits.

    python -m collectives run -n 4 examples/digits_zero.py     (or: mpirun -n 4 python ...)
    python -m collectives run -n 2 examples/digits_zero.py --device cuda      (arrays of cupy)

The network of digits.py in float32, trained by the trainer of `collectives.train` with AdamW, with
clipping and two micro-batches a step. Exits with status 1 if the test accuracy is below 97 %, or if
the stages differ in one bit of their losses or parameters.
"""

import argparse
import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # one thread a rank: the ranks fill the cores

import sys
import time
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import collectives as cc
from collectives.train import AdamW, Cosine, Sampler, Trainer, WarmUp

EPOCHS, BATCH = 20, 240  # 240 samples on all ranks together
SHAPES = {"w1": (64, 96), "b1": (96,), "w2": (96, 10), "b2": (10,)}


def initial() -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    return {
        name: random.normal(0, (2 / shape[0]) ** 0.5, shape).astype(np.float32)
        if len(shape) > 1
        else np.zeros(shape, np.float32)
        for name, shape in SHAPES.items()
    }


def predict(params, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The hidden layer, and the probability of each digit, for every image."""
    hidden = np.maximum(images @ params["w1"] + params["b1"], 0)
    scores = hidden @ params["w2"] + params["b2"]
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    return hidden, scores / scores.sum(axis=1, keepdims=True)


def loss_and_grads(params, batch, emit) -> float:
    """The mean cross-entropy; hands out each gradient as soon as it is there."""
    images, labels = batch
    hidden, error = predict(params, images)
    xp = sys.modules[type(images).__module__.partition(".")[0]]  # numpy or cupy
    each = xp.arange(len(labels))
    loss = -np.log(error[each, labels]).mean()
    error[each, labels] -= 1
    error /= len(labels)
    emit("b2", error.sum(axis=0))
    emit("w2", hidden.T @ error)
    back = (error @ params["w2"].T) * (hidden > 0)
    emit("b1", back.sum(axis=0))
    emit("w1", images.T @ back)
    return loss


def arrays_on(device: str, comm: cc.Communicator) -> Any:
    """numpy, or cupy with this rank's GPU; ranks share GPUs where there are fewer."""
    if device == "cpu":
        return np
    import cupy

    cupy.cuda.Device(comm.local_rank % cupy.cuda.runtime.getDeviceCount()).use()
    return cupy


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    device = parser.parse_args().device
    scans = load_digits()
    images, labels = (scans.data / 16).astype(np.float32), scans.target
    test = np.arange(len(labels)) % 5 == 0
    x, y = images[~test], labels[~test]

    with cc.init() as comm:
        xp = arrays_on(device, comm)
        x, y = xp.asarray(x), xp.asarray(y)
        start_values = {name: xp.asarray(value) for name, value in initial().items()}
        results = []
        for stage in range(4):
            start = time.perf_counter()
            micro = BATCH // (2 * comm.size)
            sampler = Sampler(len(y), comm, micro=micro, accumulate=2, seed=1)
            steps = EPOCHS * len(sampler)
            trainer = Trainer(
                loss_and_grads,
                AdamW(lr=3e-2),
                comm,
                params=start_values,
                sharding=stage,
                accumulate=2,
                clip_norm=1.0,
                schedule=WarmUp(steps // 10, Cosine(steps)),
                bucket_bytes=16 << 10,
                first_bucket_bytes=4 << 10,
            )
            losses = []
            for _ in range(EPOCHS):
                for i in trainer.progress(sampler):
                    rows = None if i is None else xp.asarray(i)
                    batch = None if rows is None else (x[rows], y[rows])
                    losses.append(trainer.step(batch).loss)
            params = trainer.parameters()
            accuracy = float((predict(params, images[test])[1].argmax(1) == labels[test]).mean())
            results.append((accuracy, losses, {n: p.tobytes() for n, p in params.items()}))
            if comm.rank == 0:
                held = sum(trainer.nbytes().values())
                print(
                    f"ZeRO-{stage} on {comm.size} ranks: test accuracy {accuracy:.2%}, loss "
                    f"{losses[-1]:.6f}, {held:,} bytes a rank, {time.perf_counter() - start:.1f} s",
                    flush=True,
                )
        equal = all(r == results[0] for r in results)
        good = equal and results[0][0] >= 0.97
        if comm.rank == 0:
            print(
                f"{'good' if good else 'FAILED'}: due are >= 97 % and the same bits in all stages"
            )
        return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
