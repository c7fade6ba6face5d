"""Rank 1 puts a call on its GPU, as far as the others can see; they call with host arrays."""

import time

import numpy as np

import collectives as cc


def main() -> None:
    comm = cc.init(timeout=60)
    comm.barrier()
    start = time.monotonic()
    try:
        if comm.rank == 1:
            comm._core.enter_device_call()
            while True:
                time.sleep(0.001)
                comm._core.look()
        comm.all_reduce(np.ones(5))
    except cc.MismatchError as error:
        assert "pass all on the same side" in str(error), error
        assert time.monotonic() - start < 30, "that was the deadline, not the check"
    else:
        raise AssertionError("ranks that cannot meet went on")
    comm.close()


main()
