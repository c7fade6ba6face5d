"""Training of a function of jax on GPUs, by ranks that are processes: every stage gives the same
bits, and what numpy gives on the host but for rounding. COLLECTIVES_TEST_DEVICE=cpu tries it
without a GPU.
"""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import collectives as cc
from collectives.train import AdamW, Trainer

STEPS = 5
ON_HOST = os.environ.get("COLLECTIVES_TEST_DEVICE") == "cpu"


def parameters() -> dict[str, Any]:
    random = np.random.default_rng(0)
    shapes = {"w1": (20, 65), "b1": (65,), "w2": (65, 3)}
    return {name: random.normal(size=s).astype(np.float32) for name, s in shapes.items()}


@jax.jit
def gradients(params: dict[str, Any], x: Any, y: Any) -> Any:
    def loss(p: dict[str, Any]) -> Any:
        return ((jnp.tanh(x @ p["w1"] + p["b1"]) @ p["w2"] - y) ** 2).mean()

    return jax.value_and_grad(loss)(params)


def in_jax(params: Any, batch: Any, emit: Any) -> Any:
    kinds = {next(iter(x.devices())).platform for x in params.values()}
    assert kinds == {"cpu" if ON_HOST else "gpu"}, kinds
    return gradients(dict(params), *(jnp.asarray(part) for part in batch))


def in_numpy(params: Any, batch: Any, emit: Any) -> Any:
    x, y = batch
    h = np.tanh(x @ params["w1"] + params["b1"])
    off = h @ params["w2"] - y
    d = 2 * off / off.size
    inner = d @ params["w2"].T * (1 - h * h)
    grads = {"w2": h.T @ d, "b1": inner.sum(0), "w1": x.T @ inner}
    return (off**2).mean(), {name: grad.astype(np.float32) for name, grad in grads.items()}


def train(comm: cc.Communicator, function: Any, params: Any, stage: int) -> dict[str, Any]:
    random = np.random.default_rng(comm.rank)
    trainer = Trainer(
        function, AdamW(lr=1e-2), comm, params=params, sharding=stage, clip_norm=0.5,
        bucket_bytes=4000, first_bucket_bytes=400,
    )  # fmt: skip
    for _ in range(STEPS):
        sizes = (8, 20), (8, 3)
        trainer.step(tuple(random.normal(size=s).astype(np.float32) for s in sizes))
    found = trainer.parameters()
    trainer.close()
    return found


def main() -> None:
    with cc.init() as comm:
        device = jax.devices("cpu")[0]
        if not ON_HOST:
            import cupy

            ordinal = comm.local_rank % len(jax.devices("gpu"))
            device = jax.devices("gpu")[ordinal]
            cupy.cuda.Device(ordinal).use()
        jax.config.update("jax_default_device", device)
        # On GPUs jax multiplies in TF32 otherwise, with 10 bits of a float32's 23.
        jax.config.update("jax_default_matmul_precision", "highest")
        wanted = train(comm, in_numpy, parameters(), 0)
        first: dict[str, Any] = {}
        for stage in range(4):
            params = {name: jax.device_put(x, device) for name, x in parameters().items()}
            found = train(comm, in_jax, params, stage)
            first = first or found
            for name, x in wanted.items():
                np.testing.assert_allclose(found[name], x, rtol=1e-4, atol=1e-5)
                assert found[name].tobytes() == first[name].tobytes(), (stage, name)
        print("trained alike", flush=True)


main()
