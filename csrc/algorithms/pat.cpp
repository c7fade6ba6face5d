// PAT, parallel aggregated trees: all_gather and reduce_scatter in ceil(log2 n) rounds, long
// distances carry little.
//
// Each block is spread from (all_gather) or gathered to (reduce_scatter) its rank along a binomial
// tree; the n trees are one another shifted, so in each round all blocks that a rank passes on go
// to the same peer, aggregated in one message. all_gather goes far first, while there is little to
// send. Tree of block 0 over 6 ranks, distances 4, 2, 1:
//
//     round 0   0 ──4──> 4                       distance 4, 1 block in a message
//     round 1   0 ──2──> 2                       distance 2, 1 block (there is no 4 + 2)
//     round 2   0, 2, 4 ──1──> 1, 3, 5           distance 1, 3 blocks
//
// Rank b + o gets block b over the bits of o, highest first; every prefix of the bits is smaller
// than o, so it exists, whatever n is. reduce_scatter runs the trees backwards: neighbours first
// with half of the blocks, then ever further with ever fewer. (The reverse of Bruck's order would
// begin with the most data going the furthest.)
//
// Cost, S bytes in all:  ceil(log2 n) steps, (n-1)/n·S per rank, n/2 blocks at most in one message.
// Limits: none; any n. The published algorithm also has a variant that runs the trees one after
//   another when buffers are small; here segments bound the buffers instead.
// Source: S. Jeaugey, "PAT: a new algorithm for all-gather and reduce-scatter operations at scale",
//   arXiv:2506.20252 (2025); the algorithm of NCCL 2.23 and later.
#include <algorithm>
#include <utility>

#include "../schedule.hpp"

namespace collectives {
namespace {

Schedule pat(Collective collective, const World& world) {
  Schedule s;
  const int n = world.nranks;
  const std::vector<int> at = ranks_by_node(world);
  s.nchunks = n;
  int farthest = 1;
  while (farthest * 2 < n) farthest *= 2;
  for (int distance = n > 1 ? farthest : 0; distance > 0; distance /= 2) {
    Round round;
    for (int p = 0; p < n; ++p) {
      for (int offset = 0; offset + distance < n; offset += 2 * distance) {
        round.push_back({at[p], at[(p + distance) % n], at[(p - offset + n) % n]});
      }
    }
    s.rounds.push_back(round);
  }
  if (collective == Collective::reduce_scatter) {
    std::reverse(s.rounds.begin(), s.rounds.end());
    for (Round& round : s.rounds) {
      for (Transfer& t : round) {
        std::swap(t.src, t.dst);
        t.reduce = true;
      }
    }
  }
  return s;
}

const RegisterAlgorithm registered({
    "pat",
    "n binomial trees, one for each block and shifted, share their messages; far peers get the "
    "small ones",
    "small and middle blocks on many ranks: log2(n) rounds and the least possible bytes",
    "S. Jeaugey, PAT: a new algorithm for all-gather and reduce-scatter operations at scale, "
    "arXiv:2506.20252 (2025)",
    {Collective::all_gather, Collective::reduce_scatter},
    nullptr,
    pat,
    nullptr,
});

}  // namespace
}  // namespace collectives
