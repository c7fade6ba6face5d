// Direct, two shots: each rank reduces one block, taken straight from all others, then hands it
// straight to all.
//
//   all_reduce over 4 ranks, 4 blocks        step 1 (reduce_scatter)     step 2 (all_gather)
//     rank 0   a0 a1 a2 a3                   0: a0+b0+c0+d0 = s0         s0 s1 s2 s3
//     rank 1   b0 b1 b2 b3                   1: a1+b1+c1+d1 = s1         s0 s1 s2 s3
//     rank 2   c0 c1 c2 c3                   2: a2+b2+c2+d2 = s2         s0 s1 s2 s3
//     rank 3   d0 d1 d2 d3                   3: a3+b3+c3+d3 = s3         s0 s1 s2 s3
//
// Rank r serves its peers in the order r+1, r+2, ..., so each rank hears from one peer at a time.
// all_to_all is the same pattern without arithmetic: the block for d goes straight to d. With a
// root the array is divided over the others: broadcast hands each its part, which that one gives to
// the rest; reduce has each combine its part and hand it to the root. (Of two ranks, one sends the
// other all.)
//
// Cost, vector of S bytes:  all_reduce 2 steps, 2(n-1)/n·S per rank; reduce_scatter, all_gather 1
//   step, half of it; all_to_all 1 step, (n-1)/n·S; broadcast, reduce 2 steps, S. All of them the
//   least possible. At most 2(n-1) messages per rank.
// Limits: none; any n. The operands are in rank order whatever `order` asks for, and are rounded
//   once.
// Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication
//   Operations in MPICH", Int. J. High Perform. Comput. Appl. 19 (2005) 49-66,
//   doi:10.1177/1094342005051521 (pairwise exchange); as a kernel for NVLink: "two-shot"
//   all_reduce.
#include "../schedule.hpp"

namespace collectives {
namespace {

Schedule with_root(Collective collective, int n, int root) {
  Schedule s;
  const bool reduces = collective == Collective::reduce;
  s.nchunks = n - 1;
  Round apart, together;
  for (int i = 1; i < n; ++i) {
    const int owner = (root + i) % n, chunk = i - 1;
    if (n == 2) {
      apart.push_back({reduces ? owner : root, reduces ? root : owner, chunk, reduces});
      break;
    }
    if (!reduces) apart.push_back({root, owner, chunk});
    for (int k = 1; k < n; ++k) {
      const int peer = (owner + k) % n;
      if (reduces)
        apart.push_back({peer, owner, chunk, true});
      else if (peer != root)
        together.push_back({owner, peer, chunk});
    }
    if (reduces) together.push_back({owner, root, chunk});
  }
  s.rounds.push_back(apart);
  if (!together.empty()) s.rounds.push_back(together);
  return s;
}

Schedule direct_two_shot(Collective collective, const World& world) {
  Schedule s;
  const int n = world.nranks;
  if (n > 1 && (collective == Collective::broadcast || collective == Collective::reduce))
    return with_root(collective, n, world.root);
  s.nchunks = collective == Collective::all_to_all ? n * n : n;
  if (n == 1) return s;
  Round scatter, gather, exchange;
  for (int i = 1; i < n; ++i) {
    for (int r = 0; r < n; ++r) {
      const int peer = (r + i) % n;
      scatter.push_back({r, peer, peer, true});
      gather.push_back({r, peer, r});
      exchange.push_back({r, peer, r * n + peer});
    }
  }
  if (collective == Collective::all_to_all) {
    s.rounds = {exchange};
  } else if (collective == Collective::reduce_scatter) {
    s.rounds = {scatter};
  } else if (collective == Collective::all_gather) {
    s.rounds = {gather};
  } else {
    s.rounds = {scatter, gather};
  }
  return s;
}

const RegisterAlgorithm registered({
    "direct_two_shot",
    "each rank reduces one block from all others in rank order, then sends it to all others (with "
    "a root, from it or to it)",
    "middle and large messages where every pair of ranks has a link; all_to_all",
    "R. Thakur, R. Rabenseifner, W. Gropp, Optimization of collective communication operations in "
    "MPICH, Int. J. High "
    "Perform. Comput. Appl. 19 (2005), doi:10.1177/1094342005051521",
    {Collective::all_reduce, Collective::reduce_scatter, Collective::all_gather,
     Collective::broadcast, Collective::reduce, Collective::all_to_all},
    nullptr,
    direct_two_shot,
    nullptr,
});

}  // namespace
}  // namespace collectives
