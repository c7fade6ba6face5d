"""Hugging Face accelerate on this runtime: its training loop, with the backend's name.

torchrun --nproc-per-node 2 examples/torch_accelerate.py     # pip install accelerate

accelerate counts ranks by what torchrun or mpirun sets. Under `python -m collectives run`, which
sets neither's, it would train in each rank alone.
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

# accelerate chooses from the backends it knows, unless there is a process group already.
torch.distributed.init_process_group("collectives")
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
size = accelerator.num_processes
assert size == torch.distributed.get_world_size(), "accelerate needs torchrun, or mpirun"
set_seed(0)

# Is a point inside the ring? The rule is to be learnt.
points = torch.rand(2048, 2) * 2 - 1
inside = ((points.norm(dim=1) > 0.4) & (points.norm(dim=1) < 0.8)).long()
loader = DataLoader(TensorDataset(points, inside), batch_size=64 // size, shuffle=True)

layers = [nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)]
model = nn.Sequential(*layers)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for _epoch in range(25):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

right = []
with torch.no_grad():
    for x, y in loader:
        right.append(accelerator.gather_for_metrics(model(x).argmax(1) == y))
share = torch.cat(right).float().mean().item()
assert torch.distributed.get_backend() == "collectives"
accelerator.print(f"{size} ranks: {share:.1%} of {len(torch.cat(right))} points are told right")
assert share > 0.9
accelerator.end_training()
