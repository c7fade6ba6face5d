"""What a collective would take on a machine that is not here: topologies of nodes, GPUs and links,
and an event-driven simulation of the same schedules on them.

    from collectives import simulate
    topology = simulate.load("dgx-h100", nodes=16)
    simulate.simulate("hierarchical(direct_two_shot, ring)", "all_reduce", 64 << 20, topology)

`python -m collectives simulate`, and `compare --topology`, are made of it; docs/simulate.md says
what is simulated and what is not.
"""

from .simulator import Outcome, Simulator, candidates, simulate
from .topology import Topology, load, presets, read, with_ranks

__all__ = [
    "Outcome",
    "Simulator",
    "Topology",
    "candidates",
    "load",
    "presets",
    "read",
    "simulate",
    "with_ranks",
]
