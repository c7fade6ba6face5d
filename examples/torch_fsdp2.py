"""FSDP2 on this runtime: parameters, gradients and optimizer states are sharded over the ranks.

torchrun --nproc-per-node 2 examples/torch_fsdp2.py      # or: mpirun -n 2 python ...
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("collectives")
rank, size = dist.get_rank(), dist.get_world_size()
mesh = dist.init_device_mesh("cpu", (size,))
VOCABULARY, LENGTH, WIDTH = 16, 12, 32


class Decoder(nn.Module):
    """A small transformer that continues sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        self.block = nn.TransformerEncoderLayer(WIDTH, 4, 64, 0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=x.dtype)
        return self.head(self.block(x, src_mask=mask, is_causal=True))


torch.manual_seed(0)
model = Decoder()
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
fully_shard(model.block, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

torch.manual_seed(1 + rank)
for _step in range(60):
    start = torch.randint(VOCABULARY, (32, 1))
    sequence = (start + 3 * torch.arange(LENGTH + 1)) % VOCABULARY  # is to be continued
    loss = nn.functional.cross_entropy(model(sequence[:, :-1]).flatten(0, 1).float(),
                                       sequence[:, 1:].flatten())  # fmt: skip
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
dist.all_reduce(loss := loss.detach(), op=dist.ReduceOp.AVG)
if rank == 0:
    print(f"{size} ranks: loss {loss.item():.2f}, {len(whole)} whole tensors in the state dict")
assert loss < 1.0
dist.destroy_process_group()
