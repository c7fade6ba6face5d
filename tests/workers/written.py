"""Algorithms written in Python among ranks that are processes."""

from __future__ import annotations

import cases
import test_python_algorithm
import worker

import collectives as cc


def main() -> None:
    comm = cc.init(timeout=30)
    for rounds, collective in test_python_algorithm.WRITTEN:
        cc.algorithm(collective)(rounds)
        pairs = [(rounds.__name__, collective)]
        assert pairs[0] in cases.registry(comm.size)
        done = cases.run_cases(comm, cases.sweep(comm.size, pairs, (0, 1, 289, 70_000)))
        assert done == 8
    cc.algorithm("all_reduce")(test_python_algorithm.broken_ring)
    try:
        cases.run(comm, cases.Case("all_reduce", "broken_ring"))
    except cc.ScheduleError:
        pass
    else:
        raise AssertionError("a broken schedule was run")
    cases.check(comm, cases.Case("all_reduce"))
    comm.close()


if __name__ == "__main__":
    worker.run(main)
