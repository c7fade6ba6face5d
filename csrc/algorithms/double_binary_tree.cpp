// Double binary tree: two binary trees over the same ranks, each with half of the data; who is
// inner in one is a leaf in the other, so all links work in both directions.
//
// The first tree is the in-order binary tree: odd positions are its leaves, a position's lowest set
// bit is its height. The second is its mirror image (an even number of ranks) or shifted by one
// (odd). Over 8 ranks:
//
//             0                                   7
//             └──────4                     3──────┘
//                ┌───┴───┐             ┌───┴───┐
//                2       6             1       5
//               ┌┴┐     ┌┴┐           ┌┴┐     ┌┴┐
//               1 3     5 7           0 2     4 6
//
// all_reduce: up to the root, each rank adding (lower subtree + own) + upper subtree, then down
// again. The first tree thereby adds in rank order. broadcast and reduce put the root above both
// trees, which then span the other n - 1 ranks.
//
// Cost, vector of S bytes:  all_reduce at most 2·ceil(log2 n) steps, each rank sends at most 2·S:
//   half of S up in each tree, and twice half of S down in the one where it is inner. broadcast,
//   reduce: at most ceil(log2 n) + 1 steps, at most S per rank; the root has half of S for each
//   tree.
// Limits: none; any n. (1 or 2 ranks: the trees fall together.)
// Source: P. Sanders, J. Speck, J. L. Träff, "Two-tree algorithms for full bandwidth broadcast,
//   reduction and scan", Parallel Computing 35 (2009) 581-594, doi:10.1016/j.parco.2009.09.001.
#include <algorithm>
#include <utility>

#include "../schedule.hpp"

namespace collectives {
namespace {

// A tree over positions 0 .. n-1.
struct Tree {
  std::vector<int> parent;                 // -1: the root
  std::vector<std::vector<int>> children;  // in ascending order
};

// The in-order tree. A position of height h (its lowest set bit) has its children half of 2^h below
// and above, where the upper one may have to be looked for lower down because the ranks end before
// it. Position 0 is above all.
Tree in_order_tree(int n) {
  Tree tree{std::vector<int>(n, -1), std::vector<std::vector<int>>(n)};
  for (int v = 1; v < n; ++v) {
    const int bit = v & -v;
    int up = (v ^ bit) | (bit << 1);
    if (up >= n) up = v ^ bit;
    tree.parent[v] = up;
    tree.children[up].push_back(v);
  }
  return tree;
}

int height_of(const Tree& tree, int v) {
  int height = 0;
  for (const int child : tree.children[v]) height = std::max(height, height_of(tree, child) + 1);
  return height;
}

// Writes one tree's transfers. `at`: position -> rank; `above`: the rank above the tree's root, -1:
// none.
class Writer {
 public:
  Writer(Schedule& s, const Tree& tree, std::vector<int> at, int above, int chunk)
      : s_(s), tree_(tree), at_(std::move(at)), above_(above), chunk_(chunk) {}

  // All contributions to the top; returns the first round in which the top has them. The children
  // of a rank deliver in different rounds, so that each is added as it comes.
  int up() {
    const int ready = gather(0);
    if (above_ < 0) return ready;
    add(ready, at_[0], above_, true);
    return ready + 1;
  }
  void down(int round) {
    if (above_ >= 0) add(round++, above_, at_[0], false);
    spread(0, round);
  }

 private:
  int gather(int v) {
    int ready = 0;
    for (const int child : tree_.children[v]) {
      const int round = std::max(gather(child), ready);
      add(round, at_[child], at_[v], true);
      ready = round + 1;
    }
    return ready;
  }
  // The child with the higher subtree is served first.
  void spread(int v, int round) {
    std::vector<int> children = tree_.children[v];
    std::stable_sort(children.begin(), children.end(),
                     [&](int a, int b) { return height_of(tree_, a) > height_of(tree_, b); });
    for (const int child : children) {
      add(round, at_[v], at_[child], false);
      spread(child, round + 1);
    }
  }
  void add(int round, int src, int dst, bool reduce) {
    if (static_cast<int>(s_.rounds.size()) <= round) s_.rounds.resize(round + 1);
    s_.rounds[round].push_back({src, dst, chunk_, reduce, chunk_});
  }

  Schedule& s_;
  const Tree& tree_;
  std::vector<int> at_;
  int above_;
  int chunk_;  // also its channel: the trees run side by side
};

Schedule double_binary_tree(Collective collective, const World& world) {
  Schedule s;
  s.nchunks = 2;
  s.nchannels = 2;
  std::vector<int> ranks = ranks_by_node(world);
  int above = -1;
  if (rooted(collective)) {
    above = world.root;
    ranks.erase(std::find(ranks.begin(), ranks.end(), above));
  }
  const int n = static_cast<int>(ranks.size());
  if (n == 0 || world.nranks == 1) return s;
  const Tree tree = in_order_tree(n);
  std::vector<int> second(n);
  for (int v = 0; v < n; ++v) second[v] = n % 2 == 0 ? ranks[n - 1 - v] : ranks[(v + n - 1) % n];
  for (const int t : {0, 1}) {
    Writer writer(s, tree, t == 0 ? ranks : second, above, t);
    const int ready = collective == Collective::broadcast ? 0 : writer.up();
    if (collective != Collective::reduce) writer.down(ready);
  }
  return s;
}

const RegisterAlgorithm registered({
    "double_binary_tree",
    "two binary trees, each for half of the data, reduce upwards and send back down; inner ranks "
    "of one are leaves of the other",
    "middle messages on many nodes: log2(n) steps at up to full bandwidth",
    "P. Sanders, J. Speck, J. L. Traeff, Two-tree algorithms for full bandwidth broadcast, "
    "reduction and scan, Parallel "
    "Computing 35 (2009), doi:10.1016/j.parco.2009.09.001",
    {Collective::all_reduce, Collective::broadcast, Collective::reduce},
    nullptr,
    double_binary_tree,
    nullptr,
});

}  // namespace
}  // namespace collectives
