"""Measuring: what the commands `bench`, `compare` and `explain --measure` share.

    cases.py      a collective on given buffers: its arguments, its data, its expected result
    timing.py     several ways to do the same thing, timed in turns
    peers.py      MPI and Gloo, to compare with
    measuring.py  one row of a benchmark: verify, then time, ours and the peers'
    machine.py    what a result depends on: processor, memory, pages, versions
    report.py     bus bandwidth, tables, JSON

The scripts that make the published figures, and their results, are in bench/ at the top of the
repository.
"""
