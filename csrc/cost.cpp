// cost(): what a schedule sends, combines and waits for, in units of the whole vector.
#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "messages.hpp"
#include "schedule.hpp"

namespace collectives {

Cost cost(const Schedule& s) {
  const int n = s.world.nranks;
  const double chunk =
      s.collective == Collective::all_to_all ? 1.0 / n : 1.0 / s.nchunks;  // in vectors
  const auto node_of = [&](int rank) { return s.world.node.empty() ? 0 : s.world.node[rank]; };
  const auto program = [&](int rank, int channel) {
    return static_cast<std::size_t>(rank) * s.nchannels + channel;
  };
  const Messages messages = group_messages(s);

  std::vector<double> sent(n, 0), reduced(n, 0);
  std::vector<int> count(n, 0);
  std::map<int, double> leaving;  // by node
  // By a rank's program on one channel, which runs in order: messages on the longest chain that
  // ends with one it has received. It sends in a round before it receives, so what a round brings
  // is put aside until that ends.
  std::vector<int> depth(program(n, 0), 0);
  std::vector<std::pair<std::size_t, int>> brought;
  Cost total;
  for (std::size_t i = 0; i < s.rounds.size(); ++i) {
    brought.clear();
    for (int k = messages.round_begin[i]; k < messages.round_begin[i + 1]; ++k) {
      const Message& m = messages.list[k];
      const int chain = depth[program(m.src, m.channel)] + 1;
      brought.emplace_back(program(m.dst, m.channel), chain);
      for (int j = m.first; j < m.first + m.count; ++j)
        if (s.rounds[i][messages.transfers[j]].reduce) reduced[m.dst] += chunk;
      total.steps = std::max(total.steps, chain);
      sent[m.src] += m.count * chunk;
      total.sent_total += m.count * chunk;
      if (node_of(m.src) != node_of(m.dst)) leaving[node_of(m.src)] += m.count * chunk;
      ++count[m.src];
    }
    for (const auto& [at, chain] : brought) depth[at] = std::max(depth[at], chain);
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
