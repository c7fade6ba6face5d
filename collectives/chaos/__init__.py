"""Faults drawn at random, and what the ranks that are left must do about them.

    plan.py      what happens in a round, drawn from a seed
    rank.py      what a rank does in it, in a process of its own
    verify.py    calls whose results are known, and those on arrays of the host
    on_gpu.py    the same calls on arrays of GPUs
    gauge.py     looks after the memory of GPUs
    stage.py     starts the ranks of a round, breaks them, and gathers what they report
    judging.py   holds the reports to what is promised
    playing.py   many rounds, one after the other or several at a time
    table.py     the figures of many rounds

`python -m collectives chaos` is the front.
"""
