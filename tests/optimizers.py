"""Optimizers to test, of every kind."""

from __future__ import annotations

from collectives.train import LAMB, LARS, SGD, Adam, AdamW

# That step every element by itself.
ELEMENTWISE = [
    SGD(lr=0.1, weight_decay=0.01),
    SGD(lr=0.1, momentum=0.9),
    SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    Adam(lr=0.01, weight_decay=0.01),
    AdamW(lr=0.01, weight_decay=0.1),
]
OPTIMIZERS = [*ELEMENTWISE, LARS(lr=1.0, weight_decay=0.01), LAMB(lr=0.02)]
