// Direct, one shot: everything goes straight to whoever needs it, in a single step.
//
//   all_reduce   r -> every d: the whole vector; each rank combines all n in rank order
//   all_gather   r -> every d: the block of r
//   broadcast    root -> every d            reduce   every r -> root, combined there in rank order
//   scatter      root -> d: the block of d  gather   r -> root: the block of r
//   reduce_scatter   r -> every d: the block of d, combined there in rank order
//   barrier      r -> every d: "I am here"
//
//   all_reduce over 4 ranks:   rank 0   a  ──┬─> 1, 2, 3     every rank evaluates
//                              rank 1   b  ──┼─> 2, 3, 0     ((a + b) + c) + d;
//                              rank 2   c  ──┼─> 3, 0, 1     peers are served in the order r+1,
//                              rank 3   d  ──┴─> 0, 1, 2     r+2, ..., so that none is swamped
//
// Cost, vector of S bytes:  1 step; all_reduce sends (n-1)·S per rank, needs n - 1 scratch cells.
// Limits: none; any n. The operands are in rank order whatever `order` asks for, and are rounded
//   once.
// Source: folklore; as a kernel for NVLink: "one-shot" all_reduce in TensorRT-LLM, vLLM, PyTorch
//   symmetric memory.
#include "../schedule.hpp"

namespace collectives {
namespace {

Schedule direct_one_shot(Collective collective, const World& world) {
  Schedule s;
  const int n = world.nranks, root = world.root;
  const bool blocks = collective == Collective::all_gather || collective == Collective::gather ||
                      collective == Collective::scatter || collective == Collective::reduce_scatter;
  s.nchunks = blocks ? n : 1;
  Round round;
  for (int i = 1; i < n; ++i) {
    const int peer = (root + i) % n;  // of the root
    switch (collective) {
      case Collective::broadcast:
        round.push_back({root, peer, 0});
        break;
      case Collective::scatter:
        round.push_back({root, peer, peer});
        break;
      case Collective::gather:
        round.push_back({peer, root, peer});
        break;
      case Collective::reduce:
        round.push_back({peer, root, 0, true});
        break;
      case Collective::all_gather:
        for (int r = 0; r < n; ++r) round.push_back({r, (r + i) % n, r});
        break;
      case Collective::reduce_scatter:
        for (int r = 0; r < n; ++r) round.push_back({r, (r + i) % n, (r + i) % n, true});
        break;
      default:  // all_reduce, barrier
        for (int r = 0; r < n; ++r) round.push_back({r, (r + i) % n, 0, true});
    }
  }
  if (!round.empty()) s.rounds.push_back(round);
  return s;
}

const RegisterAlgorithm registered({
    "direct_one_shot",
    "every rank sends its whole contribution straight to whoever needs it; receivers combine in "
    "rank order",
    "small messages within a node; one step, but (n-1) times the data",
    "folklore; the one-shot all_reduce of NVLink kernels",
    {Collective::all_reduce, Collective::reduce_scatter, Collective::all_gather,
     Collective::broadcast, Collective::reduce, Collective::gather, Collective::scatter,
     Collective::barrier},
    nullptr,
    direct_one_shot,
    nullptr,
});

}  // namespace
}  // namespace collectives
