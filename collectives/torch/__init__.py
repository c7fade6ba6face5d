"""The torch.distributed backend: `dist.init_process_group("collectives")`.

torch finds this package by itself: its entry point in the group `torch.backends` calls `register`
when torch is imported. The rest of this package is loaded with the first process group.

    registering.py   what torch is told at import
    rendezvous.py    RANK, WORLD_SIZE and a store for programs under mpirun or `collectives run`
    joining.py       a communicator for the ranks of a process group
    group.py         the process group: every call of torch.distributed
    tensors.py       tensors as the core sees them
    tracks.py         who makes which call when: callers, and callbacks of futures
    overlap.py       FSDP2 on CPUs: gradients are reduced beside the backward pass
    mixed.py         one backend of several in a group, as "cpu:gloo,cuda:collectives"
    streams.py       calls on CUDA tensors: streams, events, who waits
    short.py         those of them that are like ones before
    extension.py     the extension that makes these in C++, where it is built
    work.py          what an asynchronous call returns
    handed_over.py   works that torch's C++ holds
    futures.py       futures whose callbacks make calls
    completing.py    the threads that complete futures and run callbacks

But for that option it is pure Python, so one build serves every torch from 2.11 on. What a torch
can do is asked of it, not of its version.
"""

from __future__ import annotations

from .registering import register

__all__ = ["register"]
