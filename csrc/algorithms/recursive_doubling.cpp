// Recursive doubling: groups of ranks that hold the sum of their group merge in pairs until one
// group is left.
//
// The groups are the halves of the halves of the ranks, the lower half larger by one where they
// cannot be equal:
//
//   all_reduce over 5 ranks (each transfer is the whole vector, reduced by the receiver)
//     round 0   {0} {1} and {3} {4} merge    0 <-> 1               3 <-> 4
//     round 1   {0 1} {2} merge              0 <-> 2, and 2 -> 1
//     round 2   {0 1 2} {3 4} merge          0 <-> 3, 1 <-> 4, and 3 -> 2
//
// All ranks of a group hold the same value, so a rank of the larger half that has no partner just
// listens to the first rank of the other half, which is the first of an upper half in one merge
// only. Every rank receives once a round at most, none is folded away, all sizes take ceil(log2 n)
// rounds. Both sides of an exchange evaluate lower half op upper half, which is a balanced tree in
// the order of the ranks.
//
// barrier is the dissemination barrier: in round k rank r tells r + 2^k what it has heard of.
//
// Cost, vector of S bytes:  all_reduce ceil(log2 n) steps, S·ceil(log2 n) per rank, S more
//   for those that serve an odd one; barrier ceil(log2 n) steps of empty messages.
// Limits: none; any n.
// Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication
//   Operations in MPICH", Int. J. High Perform. Comput. Appl. 19 (2005) 49-66,
//   doi:10.1177/1094342005051521 (they fold ranks beyond a power of two; the uneven halves are
//   ours). Barrier: D. Hensgen, R. Finkel, U. Manber, "Two algorithms for barrier synchronization",
//   Int. J. Parallel Program. 17 (1988) 1-17, doi:10.1007/BF01379320.
#include <algorithm>

#include "../schedule.hpp"

namespace collectives {
namespace {

// Merges the halves of positions [lo, hi) after the halves themselves are merged; returns the
// rounds that took.
int merge(int lo, int hi, const std::vector<int>& at, std::vector<Round>& rounds) {
  if (hi - lo < 2) return 0;
  const int mid = lo + (hi - lo + 1) / 2;
  const int level = std::max(merge(lo, mid, at, rounds), merge(mid, hi, at, rounds));
  if (static_cast<int>(rounds.size()) <= level) rounds.resize(level + 1);
  for (int p = lo; p < mid; ++p) {
    const int partner = p - lo < hi - mid ? mid + (p - lo) : mid;  // which serves the odd rank too
    rounds[level].push_back({at[partner], at[p], 0, true});
  }
  for (int p = mid; p < hi; ++p) rounds[level].push_back({at[lo + (p - mid)], at[p], 0, true});
  return level + 1;
}

Schedule recursive_doubling(Collective collective, const World& world) {
  Schedule s;
  const int n = world.nranks;
  if (collective == Collective::barrier) {
    for (int distance = 1; distance < n; distance *= 2) {
      Round round;
      for (int r = 0; r < n; ++r) round.push_back({r, (r + distance) % n, 0, true});
      s.rounds.push_back(round);
    }
  } else {
    merge(0, n, ranks_by_node(world), s.rounds);
  }
  return s;
}

const RegisterAlgorithm registered({
    "recursive_doubling",
    "groups of ranks exchange their whole sums and merge, doubling in size each round",
    "tiny messages, between nodes as well: the fewest rounds, but log2(n) times the data",
    "R. Thakur, R. Rabenseifner, W. Gropp, Optimization of collective communication operations in "
    "MPICH, Int. J. High "
    "Perform. Comput. Appl. 19 (2005), doi:10.1177/1094342005051521",
    {Collective::all_reduce, Collective::barrier},
    nullptr,
    recursive_doubling,
    nullptr,
});

}  // namespace
}  // namespace collectives
