// Ring. Every rank only ever sends to its right neighbour; n - 1 steps of reduce_scatter, then
// n - 1 of all_gather.
//
// all_reduce over 4 ranks, what is sent at each step (chunk, and whose contributions it holds):
//
//      step   0 -> 1        1 -> 2        2 -> 3        3 -> 0
//        0    c0 {0}        c1 {1}        c2 {2}        c3 {3}        reduced by the receiver
//        1    c3 {3,0}      c0 {0,1}      c1 {1,2}      c2 {2,3}
//        2    c2 {2,3,0}    c3 {3,0,1}    c0 {0,1,2}    c1 {1,2,3}    r has chunk r + 1 complete
//        3    c1            c2            c3            c0            stored by the receiver
//        4    c0            c1            c2            c3
//        5    c3            c0            c1            c2
//
// broadcast and reduce are the ring cut open: a chain that starts (broadcast) or ends (reduce) at
// the root. Segments follow each other along it, so that all links are busy at once although the
// schedule has a single chunk.
//
// Cost, vector of S bytes:  all_reduce 2(n-1) steps, each rank sends 2(n-1)/n·S, which is the least
//   possible; reduce_scatter, all_gather half of both; broadcast, reduce n - 1 steps, S through
//   each link.
// Limits: none; any n. Ranks of a node are neighbours in the ring, so one link of each node goes
//   out and one comes in.
// Source: P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
//   workstations", J. Parallel Distrib. Comput. 69 (2009) 117-124, doi:10.1016/j.jpdc.2008.09.002.
#include <algorithm>

#include "../schedule.hpp"

namespace collectives {
namespace {

// The chain of a rooted collective: the root, its node, then node after node.
std::vector<int> chain_from_root(const World& world) {
  std::vector<int> chain = ranks_by_node(world);
  const auto node_of = [&](int r) { return world.node.empty() ? 0 : world.node[r]; };
  const auto place = [&](int r) {
    return r == world.root ? 0 : node_of(r) == node_of(world.root) ? 1 : 2;
  };
  std::stable_sort(chain.begin(), chain.end(), [&](int a, int b) { return place(a) < place(b); });
  return chain;
}

Schedule ring(Collective collective, const World& world) {
  Schedule s;
  const int n = world.nranks;
  const bool rooted_one = rooted(collective);
  const std::vector<int> at = rooted_one ? chain_from_root(world) : ranks_by_node(world);

  if (collective == Collective::broadcast) {
    for (int i = 0; i + 1 < n; ++i) s.rounds.push_back({{at[i], at[i + 1], 0}});
    return s;
  }
  if (collective == Collective::reduce) {
    for (int i = n - 1; i > 0; --i) s.rounds.push_back({{at[i], at[i - 1], 0, true}});
    return s;
  }

  // The chunk named after a rank is the chunk of that rank's block, so positions in the ring map to
  // chunks by `at`. In step i the rank at position p sends the chunk of position p + first - i.
  s.nchunks = n;
  const auto steps = [&](int first, bool reduce) {
    for (int i = 0; i < n - 1; ++i) {
      Round round;
      for (int p = 0; p < n; ++p)
        round.push_back({at[p], at[(p + 1) % n], at[(p + first - i + 2 * n) % n], reduce});
      s.rounds.push_back(round);
    }
  };
  switch (collective) {
    case Collective::all_reduce:
      steps(0, true);  // ends with the chunk of position p + 1 complete at p
      steps(1, false);
      break;
    case Collective::reduce_scatter:
      steps(-1, true);  // ends with the chunk of position p complete at p
      break;
    default:  // all_gather
      steps(0, false);
  }
  return s;
}

const RegisterAlgorithm registered({
    "ring",
    "chunks travel around a ring of all ranks, reduced on the first round trip and stored on the "
    "second",
    "large messages on any links; it sends the least bytes possible, in 2(n-1) steps",
    "P. Patarasuk, X. Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, "
    "J. Parallel Distrib. "
    "Comput. 69 (2009), doi:10.1016/j.jpdc.2008.09.002",
    {Collective::all_reduce, Collective::reduce_scatter, Collective::all_gather,
     Collective::broadcast, Collective::reduce},
    nullptr,
    ring,
    nullptr,
});

}  // namespace
}  // namespace collectives
