"""all_reduce of sparse tensors: what the ranks hold is gathered, and summed by each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import UnsupportedError
from .tensors import Tensor
from .work import CompletedWork

if TYPE_CHECKING:
    from .group import CollectivesGroup


def all_reduce_sparse(group: CollectivesGroup, tensors: Sequence[Tensor], opts: Any) -> Any:
    """Sums COO tensors of one shape, whose numbers of values may differ. Blocks, also where torch
    does not ask to wait. Costs the traffic of an all_gather of indices and values.
    """
    if hash(opts.reduceOp) != 0:
        raise UnsupportedError("all_reduce of sparse tensors knows SUM only")
    key = 0
    for tensor in tensors:
        if tensor.layout is not torch.sparse_coo:
            raise UnsupportedError(
                f"all_reduce of a tensor of layout {tensor.layout}: COO tensors and dense ones only"
            )
        mine = tensor.detach().coalesce()
        size, dense_dims = group.size(), mine.dense_dim()
        shape = torch.tensor([mine.sparse_dim(), dense_dims, mine._nnz(), *mine.shape])
        shapes = [torch.empty_like(shape) for _ in range(size)]
        work = group.allgather([shapes], [shape])  # on the host, where calls have keys
        work.wait()
        key = work.future_key()
        same = shape.clone()
        for other in shapes:
            same[2] = other[2]
            if not torch.equal(other, same):
                raise UnsupportedError(
                    f"all_reduce of sparse tensors: rank {group.rank()} has shape "
                    f"{tuple(mine.shape)} with {dense_dims} dense dimensions, another has "
                    f"{other.tolist()} (sparse and dense dimensions, values, shape)"
                )
        indices, values = mine.indices().t().contiguous(), mine.values().contiguous()
        counts = [int(s[2]) for s in shapes]
        all_indices = [indices.new_empty((n, *indices.shape[1:])) for n in counts]
        all_values = [values.new_empty((n, *values.shape[1:])) for n in counts]
        group.allgather([all_indices], [indices]).wait()
        group.allgather([all_values], [values]).wait()
        total = torch.sparse_coo_tensor(
            torch.cat(all_indices).t(), torch.cat(all_values), mine.shape, check_invariants=False
        ).coalesce()
        with torch.no_grad():
            tensor.copy_(total)  # a detached one would keep what it gets to itself
    return CompletedWork(list(tensors), key)
