// Hierarchical: any intra-node algorithm composed with any inter-node algorithm,
// "hierarchical(intra, inter)".
//
// Links within a node are fast and links between nodes are slow, so a node first reduces what it
// has, and each rank then talks to other nodes about its share only. The ranks that hold the same
// share on different nodes form a *rail*.
//
//   all_reduce, 2 nodes of 4 ranks                       rank      0   1   2   3    4   5   6   7
//     1. reduce_scatter within each node (intra)         share     s0  s1  s2  s3   s0  s1  s2  s3
//     2. all_reduce along each rail (inter)              rails     0-4, 1-5, 2-6, 3-7 all at once
//     3. all_gather within each node (intra)             share     all, on every rank
//   reduce_scatter   1. intra reduce_scatter, blocks dealt to rails   2. inter reduce_scatter
//   all_gather       1. inter all_gather along rails                  2. intra all_gather
//   broadcast        1. the root deals its node the shares   2. inter broadcast   3. all_gather
//   reduce           1. intra reduce_scatter   2. inter reduce   3. the root collects the shares
//   all_to_all       1. intra: to whoever on this node is on the rail of the block's receiver
//                    2. inter all_to_all along rails
//
// Uneven nodes. The vector is cut into units, and each node deals the units evenly to its ranks:
// unit u of U belongs to local rank u·m/U on a node of m ranks. The owners of a unit, one on each
// node, are its rail. With as many units as the least common multiple of the node sizes, all shares
// on a node are equal; for 3 + 2 + 1 ranks that is
//
//     unit            0  1  2  3  4  5
//     node 0 (0 1 2)  0  0  1  1  2  2       rails 0-3-5 (two units), 1-3-5, 1-4-5,
//     node 1 (3 4)    3  3  3  4  4  4             2-4-5 (two units)
//     node 2 (5)      5  5  5  5  5  5
//
// so all ranks of all nodes take part. Beyond four times the largest node the multiple is given up,
// and shares may differ by one unit. In reduce_scatter, all_gather and all_to_all the blocks are
// the units: the block of the j-th of m ranks is handled on another node of m' ranks by its rank
// j·m'/m.
//
// The two levels overlap: data go through the phases slice by slice, and several slices at once
// (the lanes of the engine), so one slice is on the network while others are within the nodes.
//
// Where ranks are placed does not matter (in blocks, round robin, scattered); nodes of one rank
// have no intra steps. Chunks keep the channels that the inter schedule gives them; channels of the
// intra schedule are not used.
//
// Cost, N nodes of L ranks, S bytes:  all_reduce: intra 2(L-1)/L·S per rank and, with a ring or
//   halving_doubling between nodes, 2(N-1)/N·S/L per rank and rail, so 2(N-1)/N·S leave a node:
//   what is due once for the node, not for each rank.  all_to_all: the bytes of a direct one within
//   and again between nodes, in (L-1) + (N-1) messages a rank instead of L·N - 1.
// Limits: intra must do reduce_scatter and all_gather (all_to_all: all_to_all), inter the
// collective
//   itself, for each size of node and rail.
// Source: the two-level scheme is folklore; e.g. R. Thakur, R. Rabenseifner, W. Gropp, Int. J. High
//   Perform. Comput. Appl. 19 (2005), doi:10.1177/1094342005051521, for its parts. The dealing of
//   units to uneven nodes is ours.
#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <set>
#include <utility>

#include "../schedule.hpp"

namespace collectives {
namespace {

using Chunks = std::vector<int>;

// The ranks of each node, nodes in order of their lowest rank.
struct Nodes {
  explicit Nodes(const World& world) : node_of(world.nranks), local_of(world.nranks) {
    std::map<int, int> number;
    for (int r = 0; r < world.nranks; ++r) {
      const int name = world.node.empty() ? 0 : world.node[r];
      const int k = number.emplace(name, static_cast<int>(number.size())).first->second;
      if (k == static_cast<int>(members.size())) members.emplace_back();
      node_of[r] = k;
      local_of[r] = static_cast<int>(members[k].size());
      members[k].push_back(r);
    }
  }
  int count() const { return static_cast<int>(members.size()); }
  int size(int node) const { return static_cast<int>(members[node].size()); }

  std::vector<std::vector<int>> members;
  std::vector<int> node_of, local_of;  // by rank
};

// A part's schedule for `nranks` ranks that are alike (one node), or all apart.
Schedule part_schedule(const std::string& name, Collective collective, int nranks, bool apart,
                       int root = 0) {
  World world{nranks, root, {}};
  if (apart) {
    world.node.resize(nranks);
    std::iota(world.node.begin(), world.node.end(), 0);
  }
  return build_schedule(name, collective, world);
}

int chunks_per_block(const Schedule& part) { return std::max(1, part.nchunks / part.world.nranks); }

// Splits a list of chunks evenly into `count` lists.
std::vector<Chunks> split(const Chunks& all, int count) {
  std::vector<Chunks> lists(count);
  for (std::size_t i = 0; i < all.size(); ++i) lists[i * count / all.size()].push_back(all[i]);
  return lists;
}

// Writes part schedules into a schedule: some in parallel (one phase), phases one after the other.
class Composer {
 public:
  Composer(Schedule& s, std::vector<int> channel_of_chunk)
      : s_(s), channel_(std::move(channel_of_chunk)) {}

  // `ranks[i]` is the part's rank i; `chunks[c]` is what the part's chunk c stands for, any number
  // of chunks.
  void add(const Schedule& part, const std::vector<int>& ranks, const std::vector<Chunks>& chunks) {
    for (std::size_t i = 0; i < part.rounds.size(); ++i) {
      Round& round = round_at(begin_ + i);
      for (const Transfer& t : part.rounds[i]) {
        for (const int c : chunks[t.chunk])
          round.push_back({ranks[t.src], ranks[t.dst], c, t.reduce, channel_[c]});
      }
    }
  }
  void add(const Transfer& t) {
    round_at(begin_).push_back({t.src, t.dst, t.chunk, t.reduce, channel_[t.chunk]});
  }
  void next_phase() { begin_ = s_.rounds.size(); }

 private:
  Round& round_at(std::size_t i) {
    if (s_.rounds.size() <= i) s_.rounds.resize(i + 1);
    return s_.rounds[i];
  }

  Schedule& s_;
  std::vector<int> channel_;
  std::size_t begin_ = 0;
};

// Which chunks the chunks of a part's blocks stand for, if block i stands for `blocks[i]`.
std::vector<Chunks> chunks_of_blocks(const Schedule& part, const std::vector<Chunks>& blocks) {
  std::vector<Chunks> all;
  for (const Chunks& block : blocks) {
    for (Chunks& list : split(block, chunks_per_block(part))) all.push_back(std::move(list));
  }
  return all;
}

// The channel on which each of a schedule's chunks travels.
std::vector<int> channels_of(const Schedule& part) {
  std::vector<int> channel(part.nchunks, 0);
  for (const Round& round : part.rounds) {
    for (const Transfer& t : round) channel[t.chunk] = t.channel;
  }
  return channel;
}

// A reduce_scatter or all_gather within every node at once. share(node, local): the chunks of that
// rank's block.
void add_intra(Composer& composer, const Nodes& nodes, const std::string& intra,
               Collective collective, const std::function<Chunks(int, int)>& share) {
  for (int k = 0; k < nodes.count(); ++k) {
    if (nodes.size(k) == 1) continue;
    const Schedule part = part_schedule(intra, collective, nodes.size(k), false);
    std::vector<Chunks> blocks;
    for (int j = 0; j < nodes.size(k); ++j) blocks.push_back(share(k, j));
    composer.add(part, nodes.members[k], chunks_of_blocks(part, blocks));
  }
}

// ---- one vector: all_reduce, broadcast, reduce
// -----------------------------------------------------------------

int units_for(const Nodes& nodes) {
  int largest = 1, multiple = 1;
  for (int k = 0; k < nodes.count(); ++k) largest = std::max(largest, nodes.size(k));
  for (int k = 0; k < nodes.count(); ++k) {
    multiple = std::lcm(multiple, nodes.size(k));
    if (multiple > 4 * largest) return 4 * largest;
  }
  return multiple;
}

void whole_vector(Schedule& s, const std::string& intra, const std::string& inter) {
  const Nodes nodes(s.world);
  const int root_node = rooted(s.collective) ? nodes.node_of[s.world.root] : 0;
  const int units = units_for(nodes);
  const Schedule rail = part_schedule(inter, s.collective, nodes.count(), true, root_node);
  const auto owner = [&](int node, int unit) { return unit * nodes.size(node) / units; };  // local

  s.nchunks = units * rail.nchunks;
  s.nchannels = rail.nchannels;
  const std::vector<int> rail_channel = channels_of(rail);
  std::vector<int> channel;
  for (int c = 0; c < s.nchunks; ++c) channel.push_back(rail_channel[c % rail.nchunks]);
  Composer composer(s, channel);
  const auto share = [&](int node, int local) {
    Chunks chunks;
    for (int c = 0; c < s.nchunks; ++c) {
      if (owner(node, c / rail.nchunks) == local) chunks.push_back(c);
    }
    return chunks;
  };

  // The root's node, where one rank has all to deal out or to collect.
  const auto for_each_share_of_root = [&](const auto& f) {
    for (int j = 0; j < nodes.size(root_node); ++j) {
      const int rank = nodes.members[root_node][j];
      if (rank == s.world.root) continue;
      for (const int c : share(root_node, j)) f(rank, c);
    }
  };

  if (s.collective == Collective::broadcast) {
    for_each_share_of_root([&](int rank, int c) { composer.add({s.world.root, rank, c}); });
  } else {
    add_intra(composer, nodes, intra, Collective::reduce_scatter, share);
  }
  composer.next_phase();

  std::map<std::vector<int>, std::vector<Chunks>>
      rails;  // ranks -> what each chunk of the rail's schedule stands for
  for (int unit = 0; unit < units; ++unit) {
    std::vector<int> ranks;
    for (int k = 0; k < nodes.count(); ++k) ranks.push_back(nodes.members[k][owner(k, unit)]);
    std::vector<Chunks>& chunks = rails[ranks];
    chunks.resize(rail.nchunks);
    for (int c = 0; c < rail.nchunks; ++c) chunks[c].push_back(unit * rail.nchunks + c);
  }
  for (const auto& [ranks, chunks] : rails) composer.add(rail, ranks, chunks);
  composer.next_phase();

  if (s.collective == Collective::reduce) {
    for_each_share_of_root([&](int rank, int c) { composer.add({rank, s.world.root, c}); });
  } else {
    add_intra(composer, nodes, intra, Collective::all_gather, share);
  }
}

// ---- blocks: reduce_scatter, all_gather, all_to_all
// ------------------------------------------------------------

// Who on a node handles the block of `rank`, as a local rank.
int handler(const Nodes& nodes, int node, int rank) {
  return nodes.local_of[rank] * nodes.size(node) / nodes.size(nodes.node_of[rank]);
}

// The ranks that handle the block of `rank`, one on each node.
std::vector<int> rail_of(const Nodes& nodes, int rank) {
  std::vector<int> ranks;
  for (int k = 0; k < nodes.count(); ++k)
    ranks.push_back(nodes.members[k][handler(nodes, k, rank)]);
  return ranks;
}

void blocked(Schedule& s, const std::string& intra, const std::string& inter) {
  const Nodes nodes(s.world);
  const int n = s.world.nranks;
  const Schedule rail = part_schedule(inter, s.collective, nodes.count(), true);
  int per_block = chunks_per_block(rail);
  for (int k = 0; k < nodes.count(); ++k) {
    per_block = std::max(
        per_block, chunks_per_block(part_schedule(intra, s.collective, nodes.size(k), false)));
  }
  const auto chunks_of = [&](int rank) {
    Chunks chunks(per_block);
    std::iota(chunks.begin(), chunks.end(), rank * per_block);
    return chunks;
  };
  const auto share = [&](int node, int local) {
    Chunks chunks;
    for (int r = 0; r < n; ++r) {
      if (handler(nodes, node, r) != local) continue;
      for (const int c : chunks_of(r)) chunks.push_back(c);
    }
    return chunks;
  };

  std::map<std::vector<int>, std::vector<Chunks>> rails;  // ranks -> block of each node
  for (int r = 0; r < n; ++r) {
    std::vector<Chunks>& blocks = rails[rail_of(nodes, r)];
    blocks.resize(nodes.count());
    for (const int c : chunks_of(r)) blocks[nodes.node_of[r]].push_back(c);
  }

  s.nchunks = n * per_block;
  s.nchannels = rail.nchannels;
  std::vector<int> channel(s.nchunks, 0);
  const std::vector<int> rail_channel = channels_of(rail);
  for (const auto& entry : rails) {
    const std::vector<Chunks> lists = chunks_of_blocks(rail, entry.second);
    for (std::size_t c = 0; c < lists.size(); ++c) {
      for (const int chunk : lists[c]) channel[chunk] = rail_channel[c];
    }
  }

  Composer composer(s, channel);
  const auto along_rails = [&] {
    for (const auto& [ranks, blocks] : rails)
      composer.add(rail, ranks, chunks_of_blocks(rail, blocks));
  };
  if (s.collective == Collective::reduce_scatter) {
    add_intra(composer, nodes, intra, s.collective, share);
    composer.next_phase();
    along_rails();
  } else {
    along_rails();
    composer.next_phase();
    add_intra(composer, nodes, intra, s.collective, share);
  }
}

void pairs(Schedule& s, const std::string& intra, const std::string& inter) {
  const Nodes nodes(s.world);
  const int n = s.world.nranks, count = nodes.count();
  const Schedule rail = part_schedule(inter, s.collective, count, true);
  s.nchunks = n * n;
  s.nchannels = rail.nchannels;
  // Channels of a rail's schedule belong to pairs of nodes.
  const std::vector<int> rail_channel = channels_of(rail);
  std::vector<int> channel;
  for (int c = 0; c < n * n; ++c)
    channel.push_back(rail_channel[nodes.node_of[c / n] * count + nodes.node_of[c % n]]);
  Composer composer(s, channel);

  for (int k = 0; k < count; ++k) {
    const int m = nodes.size(k);
    if (m == 1) continue;
    std::vector<Chunks> chunks(m * m);
    for (int i = 0; i < m; ++i) {
      for (int d = 0; d < n; ++d)
        chunks[i * m + handler(nodes, k, d)].push_back(nodes.members[k][i] * n + d);
    }
    composer.add(part_schedule(intra, s.collective, m, false), nodes.members[k], chunks);
  }
  composer.next_phase();

  std::map<std::vector<int>, std::vector<Chunks>> rails;  // ranks -> chunks from node to node
  for (int d = 0; d < n; ++d) {
    std::vector<Chunks>& chunks = rails[rail_of(nodes, d)];
    chunks.resize(count * count);
    for (int r = 0; r < n; ++r)
      chunks[nodes.node_of[r] * count + nodes.node_of[d]].push_back(r * n + d);
  }
  for (const auto& [ranks, chunks] : rails) composer.add(rail, ranks, chunks);
}

// ---- the composition
// -------------------------------------------------------------------------------------------

// What the intra-node part does in a collective.
std::vector<Collective> needed_within(Collective collective) {
  switch (collective) {
    case Collective::all_reduce:
      return {Collective::reduce_scatter, Collective::all_gather};
    case Collective::broadcast:
      return {Collective::all_gather};
    case Collective::reduce:
      return {Collective::reduce_scatter};
    default:
      return {collective};
  }
}

// Why the intra or the inter part cannot do its share of the collective.
std::string why_part_cannot(const std::string& intra, const std::string& inter,
                            Collective collective, const World& world) {
  const Nodes nodes(world);
  std::set<int> sizes = {1};
  for (int k = 0; k < nodes.count(); ++k) sizes.insert(nodes.size(k));
  for (const Collective needed : needed_within(collective)) {
    for (const int size : sizes) {
      const std::string why = why_unsupported(intra, needed, {size, 0, {}});
      if (!why.empty())
        return "hierarchical needs " + std::string(name_of(needed)) +
               " of its intra-node part: " + why;
    }
  }
  World rail{nodes.count(), 0, std::vector<int>(nodes.count())};
  std::iota(rail.node.begin(), rail.node.end(), 0);
  const std::string why = why_unsupported(inter, collective, rail);
  if (!why.empty())
    return "hierarchical needs " + std::string(name_of(collective)) +
           " of its inter-node part: " + why;
  return "";
}

Schedule compose(const std::string& intra, const std::string& inter, Collective collective,
                 const World& world) {
  Schedule s;
  s.collective = collective;
  s.world = world;
  if (collective == Collective::all_to_all) {
    pairs(s, intra, inter);
  } else if (collective == Collective::reduce_scatter || collective == Collective::all_gather) {
    blocked(s, intra, inter);
  } else {
    whole_vector(s, intra, inter);
  }
  return s;
}

Algorithm hierarchical(const std::vector<std::string>& parts) {
  if (parts.size() != 2) {
    throw std::invalid_argument(
        "hierarchical takes two parts, \"hierarchical(intra, inter)\", got " +
        std::to_string(parts.size()));
  }
  const std::string intra = parts[0], inter = parts[1];
  return {
      "hierarchical(" + intra + ", " + inter + ")",
      "works within nodes, along rails of one rank a node, and within nodes again",
      "several nodes whose links are slower than those within a node",
      "folklore; parts as in their own algorithms",
      {Collective::all_reduce, Collective::reduce_scatter, Collective::all_gather,
       Collective::broadcast, Collective::reduce, Collective::all_to_all},
      [=](Collective collective, const World& world) {
        return why_part_cannot(intra, inter, collective, world);
      },
      [=](Collective collective, const World& world) {
        return compose(intra, inter, collective, world);
      },
      hierarchical,
  };
}

// Without parts: those that are hardest to beat at middle and large sizes.
std::string default_inter(Collective collective) {
  return collective == Collective::all_to_all ? "direct_two_shot" : "ring";
}

Algorithm with_default_parts() {
  Algorithm algorithm = hierarchical({"direct_two_shot", "ring"});
  algorithm.name = "hierarchical";
  algorithm.why_unsupported = [](Collective collective, const World& world) {
    return why_part_cannot("direct_two_shot", default_inter(collective), collective, world);
  };
  algorithm.build = [](Collective collective, const World& world) {
    return compose("direct_two_shot", default_inter(collective), collective, world);
  };
  return algorithm;
}

const RegisterAlgorithm registered(with_default_parts());

}  // namespace
}  // namespace collectives
