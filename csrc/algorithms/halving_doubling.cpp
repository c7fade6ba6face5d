// Recursive halving, then doubling (Rabenseifner), for any number of ranks.
//
// The ranks are cut in two halves [lo, mid) and [mid, hi), the lower one larger by one where they
// cannot be equal. Each rank gives the other half its contribution to the other half's chunks; then
// each half does the same on its own. In the end every rank has its own chunk complete. all_gather
// is the same picture, backwards and without arithmetic.
//
//   reduce_scatter over 5 ranks, who sends which chunks, with all that it has gathered for them
//     round 0   {0 1 2 | 3 4}       c3 c4: 0->3, 1->4, 2->3    c0 c1 c2: 3->0, 4->1
//     round 1   {0 1 | 2} {3 | 4}   c2: 0->2, 1->2             c0 c1: 2->0   c4: 3->4   c3: 4->3
//     round 2   {0 | 1}             c1: 0->1                   c0: 1->0
//
// Where halves differ, the odd rank of the lower half has no partner: the first rank of the upper
// half takes its chunks too (two messages, combined at once), and nothing comes back, since all of
// the upper half is delivered already. A rank is first of an upper half in one cut only, so it
// serves an odd one at most once. Nothing is folded, and all sizes work alike.
//
// Cost, vector of S bytes:  reduce_scatter ceil(log2 n) steps, each rank sends exactly (n-1)/n·S;
//   all_gather the same for a power of two, else up to 1.6 times that for a rank that serves an
//   odd one; all_reduce the sum.
// Limits: none; any n. Messages of many chunks: n/2 at first.
// Source: R. Rabenseifner, "Optimization of Collective Reduction Operations", ICCS 2004, LNCS 3036,
//   1-9, doi:10.1007/978-3-540-24685-5_1; R. Thakur, R. Rabenseifner, W. Gropp, Int. J. High
//   Perform. Comput. Appl. 19 (2005) 49-66, doi:10.1177/1094342005051521. They fold ranks beyond a
//   power of two; the uneven cut above is ours.
#include <algorithm>
#include <utility>

#include "../schedule.hpp"

namespace collectives {
namespace {

// The halving of positions [lo, hi); rounds[level] gets the transfers of this cut.
void halve(int lo, int hi, std::size_t level, const std::vector<int>& at,
           std::vector<Round>& rounds) {
  if (hi - lo < 2) return;
  if (rounds.size() <= level) rounds.emplace_back();
  const int mid = lo + (hi - lo + 1) / 2;
  for (int p = lo; p < mid; ++p) {
    const int partner = p - lo < hi - mid ? mid + (p - lo) : mid;  // which serves the odd rank too
    for (int c = mid; c < hi; ++c) rounds[level].push_back({at[p], at[partner], at[c], true});
  }
  for (int p = mid; p < hi; ++p) {
    for (int c = lo; c < mid; ++c)
      rounds[level].push_back({at[p], at[lo + (p - mid)], at[c], true});
  }
  halve(lo, mid, level + 1, at, rounds);
  halve(mid, hi, level + 1, at, rounds);
}

Schedule halving_doubling(Collective collective, const World& world) {
  Schedule s;
  s.nchunks = world.nranks;
  std::vector<Round> halving;
  halve(0, world.nranks, 0, ranks_by_node(world), halving);
  if (collective != Collective::all_gather) s.rounds = halving;
  if (collective != Collective::reduce_scatter) {
    std::reverse(halving.begin(), halving.end());
    for (Round& round : halving) {
      for (Transfer& t : round) {
        std::swap(t.src, t.dst);
        t.reduce = false;
      }
      s.rounds.push_back(std::move(round));
    }
  }
  return s;
}

const RegisterAlgorithm registered({
    "halving_doubling",
    "halves of the ranks exchange halves of the data, again and again; then everything backwards "
    "as an all_gather",
    "middle messages; the bytes of a ring in 2·log2(n) steps",
    "R. Rabenseifner, Optimization of Collective Reduction Operations, ICCS 2004, LNCS 3036, "
    "doi:10.1007/978-3-540-24685-5_1",
    {Collective::all_reduce, Collective::reduce_scatter, Collective::all_gather},
    nullptr,
    halving_doubling,
    nullptr,
});

}  // namespace
}  // namespace collectives
