// Bruck: all_gather and all_to_all in ceil(log2 n) rounds, for any number of ranks.
//
// all_gather. In round k every rank sends what it holds to the rank 2^k further on. The block of
// rank b is at b + 0, then at b + 0..1, then b + 0..3, ...; the last round sends only what is still
// missing:
//
//   over 6 ranks, the blocks that rank r holds          sends to r + 2^k
//     round 0     r                                     1 block    r
//     round 1     r, r-1                                2 blocks   r, r-1
//     round 2     r, r-1, r-2, r-3                      2 blocks   r, r-1 (the others are there)
//     end         r, r-1, ..., r-5
//
// all_to_all. The block from s to d has d - s (mod n) to go; in round k it moves on by 2^k if bit k
// of that is set. So a rank packs all blocks that must move into one message: log2 n messages
// instead of n - 1, for log2(n)/2 times the bytes.
//
// Cost, S bytes in all:  all_gather ceil(log2 n) steps, (n-1)/n·S per rank; all_to_all ceil(log2 n)
//   steps, about S/2·log2 n per rank (S: the n blocks of one rank), the blocks on their way in
//   scratch.
// Limits: none; any n. The last messages are large and go far: see `pat` for the other way around.
// Source: J. Bruck, C.-T. Ho, S. Kipnis, E. Upfal, D. Weathersby, "Efficient Algorithms for
//   All-to-All Communications in Multiport Message-Passing Systems", IEEE Trans. Parallel Distrib.
//   Syst. 8 (1997) 1143-1156, doi:10.1109/71.642949.
#include <algorithm>

#include "../schedule.hpp"

namespace collectives {
namespace {

Schedule bruck(Collective collective, const World& world) {
  Schedule s;
  const int n = world.nranks;
  s.nchunks = collective == Collective::all_gather ? n : n * n;
  for (int distance = 1; distance < n; distance *= 2) {
    Round round;
    for (int r = 0; r < n; ++r) {
      const int peer = (r + distance) % n;
      if (collective == Collective::all_gather) {
        const int blocks = std::min(distance, n - distance);
        for (int i = 0; i < blocks; ++i) round.push_back({r, peer, (r - i + n) % n});
        continue;
      }
      for (int to_go = distance; to_go < n; ++to_go) {
        if ((to_go & distance) == 0) continue;
        const int source =
            (r - to_go % distance + n) % n;  // it has moved by the lower bits already
        round.push_back({r, peer, source * n + (source + to_go) % n});
      }
    }
    s.rounds.push_back(round);
  }
  return s;
}

const RegisterAlgorithm registered({
    "bruck",
    "each round sends everything needed by the rank twice as far as in the round before, in one "
    "message",
    "small blocks: log2(n) rounds; all_to_all pays with log2(n)/2 times the bytes",
    "J. Bruck, C.-T. Ho, S. Kipnis, E. Upfal, D. Weathersby, Efficient algorithms for all-to-all "
    "communications in "
    "multiport message-passing systems, IEEE Trans. Parallel Distrib. Syst. 8 (1997), "
    "doi:10.1109/71.642949",
    {Collective::all_gather, Collective::all_to_all},
    nullptr,
    bruck,
    nullptr,
});

}  // namespace
}  // namespace collectives
