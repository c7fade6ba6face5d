"""Training of a function of cupy on GPUs, by ranks that are processes: every stage gives the same
bits, with what the optimizer keeps on the GPU and on the host. Only LARS and LAMB round otherwise
there, since norms of parameters are summed in double precision on a GPU and in their own on hosts.
"""

from __future__ import annotations

from typing import Any

import cupy
import models
import numpy as np
from optimizers import OPTIMIZERS

import collectives as cc
from collectives.array import device_name
from collectives.train import Trainer, WarmUp

STEPS = 4
SHAPES = {"w1": (20, 65), "b1": (65,), "w2": (65, 33), "seldom": (700,)}


def parameters() -> dict[str, Any]:
    """On the current GPU. Those longer than 512 have shards that end inside of them."""
    random = np.random.default_rng(0)
    return {n: cupy.asarray(random.normal(size=s).astype(np.float32)) for n, s in SHAPES.items()}


def gradients(params: Any, batch: Any, emit: Any) -> Any:
    """Of two layers, computed in float32, and of what has a gradient in every other step only."""
    x, y, step = batch
    wide = {name: params[name].astype(np.float32) for name in SHAPES}
    h = cupy.tanh(x @ wide["w1"] + wide["b1"])
    off = h @ wide["w2"] - y
    d = off * np.float32(2 / off.size)
    inner = (d @ wide["w2"].T) * (1 - h * h)
    found = {"w2": h.T @ d, "b1": inner.sum(axis=0), "w1": x.T @ inner}
    if step[0] % 2:
        found["seldom"] = wide["seldom"] * np.float32(0.1)
    for name, grad in found.items():
        emit(name, grad.astype(params[name].dtype))
    return (off * off).mean()


def train(
    comm: cc.Communicator, optimizer: Any, **options: Any
) -> tuple[list[tuple[float, float]], dict[str, dict[str, Any]]]:
    """Losses and norms; and what is kept of all parameters, by key, with what is "used"."""
    trainer = Trainer(
        gradients, optimizer, comm, params=parameters(), accumulate=2, clip_norm=0.5,
        find_unused=True, groups=[{"params": ["b*"], "weight_decay": 0.0}], schedule=WarmUp(3),
        bucket_bytes=6000, first_bucket_bytes=400, **options,
    )  # fmt: skip
    here = "cpu" if options["offload"] else f"cuda:{cupy.cuda.Device().id}"
    for shard in trainer.store.shards:
        assert device_name(shard.used) != "cpu"
        assert {device_name(x) for x in trainer.store.arrays(shard).values()} == {here}
    random = np.random.default_rng(comm.rank)
    told = []
    for step in range(STEPS):
        x, y = (cupy.asarray(random.normal(size=(8, n)).astype(np.float32)) for n in (20, 33))
        metrics = trainer.step((x, y, np.full(8, step)))
        told.append((metrics.loss, metrics.grad_norm))
    assert min(norm for _, norm in told) > 0.5  # it did clip
    found = {key: trainer.whole(key) for key in ("master", *trainer.slots)}
    with trainer.gathered() as used:
        found["used"] = {name: cupy.asnumpy(used[name]) for name in SHAPES}
    trainer.close()
    return told, found


def in_all_stages(comm: cc.Communicator, optimizer: Any, **options: Any) -> dict[str, Any]:
    """Trains in every stage, on the GPU and with `offload`. Returns what all have in common; of
    optimizers that round otherwise on the host, by where they step.
    """
    alike: dict[Any, Any] = {}
    for stage in range(4):
        for offload in (None, "host"):
            told, found = train(comm, optimizer, sharding=stage, offload=offload, **options)
            where = offload if optimizer.layerwise else None
            first_told, first = alike.setdefault(where, (told, found))
            case = optimizer, options, stage, offload
            assert told == first_told, case
            for key, arrays in found.items():
                assert models.bits(arrays) == models.bits(first[key]), (*case, key)
    return {where: found for where, (_, found) in alike.items()}


def main() -> None:
    with cc.init() as comm:
        cupy.cuda.Device(comm.local_rank % cupy.cuda.runtime.getDeviceCount()).use()
        for optimizer in OPTIMIZERS:
            in_all_stages(comm, optimizer, precision="bf16")
            in_all_stages(comm, optimizer, precision="bf16", master_weights=False)
            found = in_all_stages(comm, optimizer)
            if optimizer.layerwise:
                for key, arrays in found[None].items():
                    for name, x in arrays.items():
                        error = np.linalg.norm(found["host"][key][name] - x)
                        assert error <= 1e-6 * np.linalg.norm(x), (optimizer, key, name)
        print("trained alike", flush=True)


main()
