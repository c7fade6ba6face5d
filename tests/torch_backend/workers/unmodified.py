"""As a user of torch writes it: nothing but the backend's name is of this project."""

import torch
import torch.distributed as dist

dist.init_process_group("collectives")
x = torch.full((1000,), float(dist.get_rank()))
dist.all_reduce(x)
n = dist.get_world_size()
assert x[0] == n * (n - 1) / 2
half = dist.new_group([0])
if dist.get_rank() == 0:
    dist.barrier(group=half)
future = dist.all_reduce(torch.ones(3), async_op=True).get_future()
future.then(lambda f: dist.all_reduce(f.value()[0])).wait()
assert future.value()[0][0] == n * n
print(f"the sum of {n} ranks\n", end="")
dist.destroy_process_group()
