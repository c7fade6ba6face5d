"""ZeroRedundancyOptimizer on this runtime: each rank keeps the states of its part of the optimizer.

torchrun --nproc-per-node 2 examples/torch_zero.py       # or: mpirun -n 2 python ...
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("collectives")
rank, size = dist.get_rank(), dist.get_world_size()


def train(make_optimizer):
    """A regression of y on x, on this rank's rows."""
    torch.manual_seed(0)
    layers = [nn.Linear(20, 20) if i % 2 else nn.GELU() for i in range(1, 9)]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(20, 1)))
    optimizer = make_optimizer(model.parameters())
    x = torch.randn(512, 20)
    y = (x[:, :5].sum(1, keepdim=True)).sin()
    for _ in range(100):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x[rank::size]), y[rank::size])
        loss.backward()
        optimizer.step()
    return model, optimizer, loss.detach()


model, optimizer, loss = train(
    lambda parameters: ZeroRedundancyOptimizer(
        parameters, optimizer_class=torch.optim.Adam, lr=1e-2
    )
)
plain, _, _ = train(lambda parameters: torch.optim.Adam(parameters, lr=1e-2))
for p, q in zip(model.parameters(), plain.parameters(), strict=True):
    assert torch.equal(p, q), "the same steps, bit for bit"

kept = sum(t.numel() for s in optimizer.optim.state.values() for t in s.values())
optimizer.consolidate_state_dict(to=0)
if rank == 0:
    everything = optimizer.state_dict()["state"]
    total = sum(t.numel() for s in everything.values() for t in s.values())
    print(f"{size} ranks: rank 0 keeps {kept} of {total} numbers of Adam's; loss {loss:.3f}")
dist.destroy_process_group()
