"""First steps, in ten lines: python -m collectives run -n 4 examples/first_steps.py"""

import numpy as np

import collectives as cc

comm = cc.init()  # also under mpirun or torchrun, or alone
x = np.arange(2 * comm.size, dtype=np.float32) + comm.rank
comm.all_reduce(x)  # in place: every rank has the sum now
shard = comm.reduce_scatter(x, op="avg")  # each rank's block of the mean of all x
whole = comm.all_gather(shard)  # and the blocks of all, joined again
work = comm.all_reduce(np.ones(1 << 20), op="max", async_op=True)  # goes on in the background
names = comm.all_gather(np.array([comm.rank * comm.rank]))
work.wait(timeout=30)
print(f"rank {comm.rank} of {comm.size} over {comm.transports}: {whole[:3]}..., {names}")
comm.close()
