"""Trains under every stage in processes; `--die` ends one rank in the middle of a step instead."""

import os
import signal
import sys

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import models

import collectives as cc
from collectives.train import LAMB, Trainer


def make(comm, stage, function):
    return Trainer(
        function,
        LAMB(lr=0.01),
        comm,
        params=models.parameters(),
        sharding=stage,
        accumulate=2,
        clip_norm=0.1,
        bucket_bytes=6000,
        first_bucket_bytes=1000,
    )


def train(comm):
    x, y = models.data(96)
    found = []
    for stage in range(4):
        trainer = make(comm, stage, models.loss_and_grads)
        losses = []
        for step in range(6):
            batch = x[16 * step : 16 * step + 16], y[16 * step : 16 * step + 16]
            losses.append(trainer.step(models.part_of(batch, comm.rank, comm.size)).loss)
        found.append((losses, models.bits(trainer.parameters())))
    assert all(f == found[0] for f in found)
    print(f"rank {comm.rank}: equal over {comm.transports}", flush=True)


def die(comm, stage):
    calls = []

    def function(params, batch, emit):
        calls.append(None)
        if comm.rank == 1 and len(calls) == 5:
            os._exit(9)
        return models.loss_and_grads(params, batch, emit)

    trainer = make(comm, stage, function)
    x, y = models.data(8)
    try:
        for _ in range(9):
            trainer.step((x, y))
    except (cc.PeerDiedError, cc.AbortedError, cc.ClosedError) as error:
        print(f"rank {comm.rank} ended: {error}", flush=True)


comm = cc.init()
if "--die" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher ends the others; not this time
    die(comm, int(sys.argv[-1]))
else:
    train(comm)
comm.close()
