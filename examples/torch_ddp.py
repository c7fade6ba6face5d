"""DistributedDataParallel on this runtime: the backend's name is all that is not plain torch.

torchrun --nproc-per-node 2 examples/torch_ddp.py        # or: mpirun -n 2 python ...
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("collectives")
rank, size = dist.get_rank(), dist.get_world_size()

# Points on two spirals; which spiral a point is on is to be learnt.
generator = torch.Generator().manual_seed(0)
angle = torch.rand(2048, generator=generator) * 6
label = torch.arange(2048) % 2
turn = angle + label * torch.pi
points = torch.stack([angle * turn.cos(), angle * turn.sin()], 1) / 6
data = TensorDataset(points, label)
sampler = DistributedSampler(data, size, rank, seed=1)
loader = DataLoader(data, batch_size=256 // size, sampler=sampler)

torch.manual_seed(0)
layers = [nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)]
model = DistributedDataParallel(nn.Sequential(*layers))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

for epoch in range(30):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

with torch.no_grad():
    right = (model(points[rank::size]).argmax(1) == label[rank::size]).sum().float()
dist.all_reduce(right)
if rank == 0:
    print(f"{size} ranks: {right.item() / 2048:.1%} of the points are put on the right spiral")
assert right > 0.95 * 2048
dist.destroy_process_group()
