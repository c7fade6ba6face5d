"""Measuring: what the commands `bench`, `compare` and `explain --measure` share.

    cases.py      a collective on given buffers: its arguments, its data, its expected result
    timing.py     several ways to do the same thing, timed in turns
    backends.py   the host's arrays and loops; cuda.py: those on GPUs
    peers.py      MPI and Gloo, to compare with; nccl.py: NCCL
    measuring.py  one row of a benchmark: verify, then time, ours and the peers'
    machine.py    what a result depends on: processor, memory, pages, versions; gpus.py: GPUs
    report.py     bus bandwidth, tables, JSON

The scripts that make the published figures, and their results, are in bench/ at the top of the
repository.
"""
