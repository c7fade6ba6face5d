// Binomial tree: one rank reaches, or hears from, all others in ceil(log2 n) rounds.
//
// Ranks are renumbered v = (r - root) mod n, so that the root is 0. v is responsible for the 2^k
// numbers from v on, where 2^k is its lowest set bit (the root: for all). broadcast and scatter
// halve that again and again:
//
//   over 6 ranks      round 0:  0 -> 4                   scatter sends with it the blocks 4 5
//                     round 1:  0 -> 2                                                    2 3
//                     round 2:  0 -> 1, 2 -> 3, 4 -> 5                                    1 | 3 | 5
//
// reduce and gather are the same, backwards: 1 -> 0, 3 -> 2, 5 -> 4, then 2 -> 0, then 4 -> 0.
//
// Cost, vector of S bytes:  ceil(log2 n) steps; broadcast: the root sends log2(n)·S; reduce: S per
//   rank; scatter, gather: (n-1)/n·S at the root, the least possible.
// Limits: none; any n and root. For large broadcasts a chain (ring) or double_binary_tree loads the
//   root less.
// Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication
//   Operations in MPICH", Int. J. High Perform. Comput. Appl. 19 (2005) 49-66,
//   doi:10.1177/1094342005051521.
#include <algorithm>
#include <utility>

#include "../schedule.hpp"

namespace collectives {
namespace {

Schedule binomial_tree(Collective collective, const World& world) {
  Schedule s;
  const int n = world.nranks;
  const bool blocks = collective == Collective::gather || collective == Collective::scatter;
  const bool inward = collective == Collective::gather || collective == Collective::reduce;
  const auto rank_of = [&](int v) { return (v + world.root) % n; };
  s.nchunks = blocks ? n : 1;
  int top = 1;
  while (top * 2 < n) top *= 2;
  for (int distance = n > 1 ? top : 0; distance > 0; distance /= 2) {
    Round round;
    for (int v = 0; v + distance < n; v += 2 * distance) {
      const int peer = v + distance;
      const int end =
          blocks ? std::min(peer + distance, n) : peer + 1;  // what the peer is responsible for
      for (int b = peer; b < end; ++b) {
        Transfer t{rank_of(v), rank_of(peer), blocks ? rank_of(b) : 0,
                   collective == Collective::reduce};
        if (inward) std::swap(t.src, t.dst);
        round.push_back(t);
      }
    }
    s.rounds.push_back(round);
  }
  if (inward) std::reverse(s.rounds.begin(), s.rounds.end());
  return s;
}

const RegisterAlgorithm registered({
    "binomial_tree",
    "the ranks that have the data double each round (or halve, towards the root)",
    "small messages from or to one rank",
    "R. Thakur, R. Rabenseifner, W. Gropp, Optimization of collective communication operations in "
    "MPICH, Int. J. High "
    "Perform. Comput. Appl. 19 (2005), doi:10.1177/1094342005051521",
    {Collective::broadcast, Collective::reduce, Collective::gather, Collective::scatter},
    nullptr,
    binomial_tree,
    nullptr,
});

}  // namespace
}  // namespace collectives
