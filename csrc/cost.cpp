// cost(): what a schedule sends, combines and waits for, in units of the whole vector.
#include <algorithm>
#include <map>
#include <vector>

#include "messages.hpp"
#include "schedule.hpp"

namespace collectives {

Cost cost(const Schedule& s) {
  const int n = s.world.nranks;
  const double chunk =
      s.collective == Collective::all_to_all ? 1.0 / n : 1.0 / s.nchunks;  // in vectors
  const auto node_of = [&](int rank) { return s.world.node.empty() ? 0 : s.world.node[rank]; };
  const auto slot = [&](int rank, int c) { return static_cast<std::size_t>(rank) * s.nchunks + c; };
  const Messages messages = group_messages(s);

  std::vector<double> sent(n, 0), reduced(n, 0);
  std::vector<int> count(n, 0);
  std::map<int, double> leaving;  // by node
  // depth[slot]: messages on the longest chain that led to the value there. Rounds read before they
  // write, so what a round makes is put aside until it ends.
  std::vector<int> depth(slot(n, 0), 0);
  struct Made {
    std::size_t slot;
    int chain;
    bool reduce;
  };
  std::vector<Made> made;
  Cost total;
  for (std::size_t i = 0; i < s.rounds.size(); ++i) {
    made.clear();
    for (int k = messages.round_begin[i]; k < messages.round_begin[i + 1]; ++k) {
      const Message& m = messages.list[k];
      int chain = 0;
      for (int j = m.first; j < m.first + m.count; ++j) {
        chain = std::max(chain, depth[slot(m.src, s.rounds[i][messages.transfers[j]].chunk)] + 1);
      }
      for (int j = m.first; j < m.first + m.count; ++j) {
        const Transfer& t = s.rounds[i][messages.transfers[j]];
        made.push_back({slot(t.dst, t.chunk), chain, t.reduce});
        if (t.reduce) reduced[t.dst] += chunk;
      }
      total.steps = std::max(total.steps, chain);
      sent[m.src] += m.count * chunk;
      total.sent_total += m.count * chunk;
      if (node_of(m.src) != node_of(m.dst)) leaving[node_of(m.src)] += m.count * chunk;
      ++count[m.src];
    }
    for (const Made& m : made)
      depth[m.slot] = m.reduce ? std::max(depth[m.slot], m.chain) : m.chain;
  }
  for (int r = 0; r < n; ++r) {
    total.sent_max = std::max(total.sent_max, sent[r]);
    total.reduced_max = std::max(total.reduced_max, reduced[r]);
    total.messages_max = std::max(total.messages_max, count[r]);
  }
  for (const auto& [node, amount] : leaving)
    total.internode_sent_max = std::max(total.internode_sent_max, amount);
  return total;
}

}  // namespace collectives
