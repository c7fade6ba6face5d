"""Training the small models of `models` on ranks that are threads, in every mode of the trainer."""

from __future__ import annotations

import models

import collectives as cc
from collectives.train import AdamW, Trainer

NODES = {1: [0], 2: [0, 1], 3: [0, 0, 1], 4: [0, 0, 1, 1], 5: [0, 0, 1, 1, 1]}
MODES = [(0, None), (1, None), (2, None), (3, None), (3, "node")]
SMALL = {"bucket_bytes": 6000, "first_bucket_bytes": 1000}


def make(comm, mode=(0, None), optimizer=None, **more):
    settings = {"params": models.parameters(), **SMALL, **more}
    function = settings.pop("function", models.loss_and_grads)
    stage, group = mode
    optimizer = optimizer or AdamW(lr=1e-2)
    return Trainer(function, optimizer, comm, sharding=stage, shard_group=group, **settings)


def batches(steps, size=24, count=240):
    x, y = models.data(count)
    for step in range(steps):
        low = step * size % (count - size)
        yield x[low : low + size], y[low : low + size]


def train(comm, mode, steps, **more):
    """Losses, gradient norms and the bits of all parameters after `steps`."""
    trainer = make(comm, mode, **more)
    told = [trainer.step(models.part_of(b, comm.rank, comm.size)) for b in batches(steps)]
    return [(m.loss, m.grad_norm, m.skipped) for m in told], models.bits(trainer.parameters())


def same_in_all_modes(n, steps, modes=MODES, **more):
    """Trains in every mode, on one communicator; returns what all ranks and modes have in
    common."""

    def body(comm):
        return [train(comm, mode, steps, **more) for mode in modes]

    found = cc.run_threads(n, body, nodes=NODES[n], timeout=60)
    first = found[0][0]
    for rank, results in enumerate(found):
        for mode, (told, parameters) in zip(modes, results, strict=True):
            assert told == first[0], (rank, mode)
            assert parameters == first[1], (rank, mode)
    return first


def alone(steps, **more):
    """One process on the global batch."""
    return cc.run_threads(1, lambda comm: train(comm, (0, None), steps, **more))[0]
