"""A thin data-parallel trainer: DDP to ZeRO-3 with one result, for functions over arrays and for
torch modules.

    from collectives.train import AdamW, Trainer

    trainer = Trainer(loss_and_grads, AdamW(lr=3e-4), comm, params=params, sharding=2)
    for batch in trainer.progress(batches):
        trainer.step(batch)
    trainer.save("run/last")
"""

from .data_parallel import Trainer
from .functional import FunctionModel
from .optimizers import LAMB, LARS, SGD, Adam, AdamW, Optimizer
from .precision import LossScale
from .progress import Metrics
from .sampler import Sampler
from .schedules import Constant, Cosine, Schedule, Steps, WarmUp, scaled_lr

__all__ = [
    "LAMB",
    "LARS",
    "SGD",
    "Adam",
    "AdamW",
    "Constant",
    "Cosine",
    "FunctionModel",
    "LossScale",
    "Metrics",
    "Optimizer",
    "Sampler",
    "Schedule",
    "Steps",
    "Trainer",
    "WarmUp",
    "scaled_lr",
]
