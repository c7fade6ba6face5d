#include "symbolic.hpp"

#include <algorithm>

namespace collectives {
namespace {

std::uint64_t mix(std::uint64_t h, std::uint64_t x) {
  h = (h ^ x) * 0x9E3779B97F4A7C15ull;
  return h ^ (h >> 29);
}

}  // namespace

std::string title_of(const Schedule& s) {
  return s.algorithm + ", " + std::string(name_of(s.collective)) + " over " +
         std::to_string(s.world.nranks) + " ranks";
}

std::string list_of_ranks(const std::vector<int>& ranks) {
  constexpr std::size_t kShown = 8;
  std::string text = "ranks [";
  for (std::size_t i = 0; i < std::min(ranks.size(), kShown); ++i)
    text += (i ? ", " : "") + std::to_string(ranks[i]);
  if (ranks.size() > kShown) text += ", ... " + std::to_string(ranks.size()) + " in all";
  return text + "]";
}

// ---- expressions --------------------------------------------------------------------------------

Expressions::Expressions(int nranks, bool repeats)
    : nranks_(nranks),
      repeats_(repeats),
      words_((nranks + 63) / 64),
      nodes_(nranks + 1),
      table_(1024, kNothing) {
  sets_.resize(nodes_.size() * words_);
  for (int r = 0; r < nranks; ++r) {
    nodes_[leaf(r)].smallest = r;
    nodes_[leaf(r)].size = 1;
    sets_[leaf(r) * words_ + r / 64] = std::uint64_t{1} << (r % 64);
  }
}

Expr Expressions::combine(const Expr* operands, int count) {
  std::uint64_t hash = count;
  for (int i = 0; i < count; ++i) hash = mix(hash, operands[i]);
  std::size_t at = hash & (table_.size() - 1);
  for (; table_[at] != kNothing; at = (at + 1) & (table_.size() - 1)) {
    const Node& known = nodes_[table_[at]];
    if (known.hash == hash && known.operands == static_cast<std::uint32_t>(count) &&
        std::equal(operands, operands + count, &operands_[known.first_operand])) {
      return table_[at];
    }
  }

  const Expr e = static_cast<Expr>(nodes_.size());
  sets_.resize(sets_.size() + words_, 0);
  std::uint64_t* all = &sets_[e * words_];
  int size = 0;
  for (int i = 0; i < count; ++i) {
    const std::uint64_t* more = set(operands[i]);
    std::uint64_t twice = 0;
    for (std::size_t w = 0; w < words_; ++w) {
      twice |= all[w] & more[w];
      all[w] |= more[w];
    }
    if (twice != 0 && !repeats_) {
      sets_.resize(e * words_);
      return kNothing;
    }
  }
  for (std::size_t w = 0; w < words_; ++w) size += __builtin_popcountll(all[w]);

  Node node;
  node.hash = hash;
  node.first_operand = static_cast<std::uint32_t>(operands_.size());
  node.operands = count;
  node.size = size;
  node.smallest = nranks_;
  for (int i = 0; i < count; ++i) node.smallest = std::min(node.smallest, smallest(operands[i]));
  operands_.insert(operands_.end(), operands, operands + count);
  nodes_.push_back(node);
  table_[at] = e;
  if (nodes_.size() * 2 > table_.size()) grow_table();
  return e;
}

void Expressions::grow_table() {
  table_.assign(table_.size() * 4, kNothing);
  for (Expr e = 1; e < nodes_.size(); ++e) {
    if (is_leaf(e)) continue;
    std::size_t at = nodes_[e].hash & (table_.size() - 1);
    while (table_[at] != kNothing) at = (at + 1) & (table_.size() - 1);
    table_[at] = e;
  }
}

std::vector<int> Expressions::ranks(Expr e) const { return common_ranks(e, e); }

std::vector<int> Expressions::common_ranks(Expr a, Expr b) const {
  std::vector<int> all;
  for (std::size_t w = 0; w < words_; ++w) {
    for (std::uint64_t left = set(a)[w] & set(b)[w]; left != 0; left &= left - 1) {
      all.push_back(static_cast<int>(w) * 64 + __builtin_ctzll(left));
    }
  }
  return all;
}

std::vector<Expr> Expressions::operands(Expr e) const {
  const auto first = operands_.begin() + nodes_[e].first_operand;
  return {first, first + nodes_[e].operands};
}

// ---- the run ------------------------------------------------------------------------------------

SymbolicRun::SymbolicRun(const Schedule& s)
    : s_(s), expressions_(std::max(1, s.world.nranks), s.collective == Collective::barrier) {
  const int n = s.world.nranks;
  const auto malformed = [&](const std::string& what) {
    return ScheduleError(title_of(s) + ": " + what);
  };
  if (n < 1) throw malformed("there must be at least one rank");
  if (s.world.root < 0 || s.world.root >= n)
    throw malformed("root " + std::to_string(s.world.root) + " is not a rank");
  if (!s.world.node.empty() && static_cast<int>(s.world.node.size()) != n) {
    throw malformed("nodes are named for " + std::to_string(s.world.node.size()) + " ranks");
  }
  if (s.nchunks < 1 || s.nchannels < 1)
    throw malformed("there must be at least one chunk and one channel");
  const std::string chunks = std::to_string(s.nchunks) + " chunks";
  switch (s.collective) {
    case Collective::reduce_scatter:
    case Collective::all_gather:
    case Collective::gather:
    case Collective::scatter:
      if (s.nchunks % n != 0)
        throw malformed(chunks + ", but each rank's block must have equally many");
      break;
    case Collective::all_to_all:
      if (s.nchunks != n * n)
        throw malformed(chunks + ", but there must be one for each pair of ranks");
      break;
    default:
      break;
  }

  held_.assign(static_cast<std::size_t>(n) * s.nchunks, kNothing);
  mark_.assign(held_.size(), -1);
  channel_.assign(s.nchunks, -1);
  const bool contributes = reduces(s.collective) || s.collective == Collective::barrier;
  for (int r = 0; r < n; ++r) {
    for (int c = 0; c < s.nchunks; ++c) {
      if (contributes || holds_at_start(s, r, c)) held_[slot(r, c)] = expressions_.leaf(r);
    }
  }
}

void SymbolicRun::fail(const Transfer& t, const std::string& what) const {
  throw ScheduleError(title_of(s_) + ", round " + std::to_string(round_) + ": transfer " +
                      std::to_string(t.src) + " -> " + std::to_string(t.dst) + " of chunk " +
                      std::to_string(t.chunk) + " " + what);
}

void SymbolicRun::check(const Transfer& t) {
  const int n = s_.world.nranks;
  const auto outside = [](int x, int end) { return x < 0 || x >= end; };
  const auto range = [](int end) { return " is out of range 0 to " + std::to_string(end - 1); };
  if (outside(t.src, n)) fail(t, "is wrong: rank " + std::to_string(t.src) + range(n));
  if (outside(t.dst, n)) fail(t, "is wrong: rank " + std::to_string(t.dst) + range(n));
  if (outside(t.chunk, s_.nchunks))
    fail(t, "is wrong: chunk " + std::to_string(t.chunk) + range(s_.nchunks));
  if (outside(t.channel, s_.nchannels))
    fail(t, "is wrong: channel " + std::to_string(t.channel) + range(s_.nchannels));
  if (t.src == t.dst) fail(t, "sends to itself");
  if (t.reduce && !reduces(s_.collective) && s_.collective != Collective::barrier) {
    fail(t, "reduces, but " + std::string(name_of(s_.collective)) + " only moves data");
  }
  int& channel = channel_[t.chunk];
  if (channel < 0) channel = t.channel;
  if (channel != t.channel) {
    fail(t, "crosses channels: it is on channel " + std::to_string(t.channel) +
                ", earlier transfers of the chunk on channel " + std::to_string(channel));
  }
  if (held_[slot(t.src, t.chunk)] == kNothing) {
    fail(t, "sends what rank " + std::to_string(t.src) + " does not hold yet");
  }
}

void SymbolicRun::evaluate(int round) {
  round_ = round;
  const Round& transfers = s_.rounds[round];
  arrivals_.clear();
  sent_.resize(transfers.size());
  earlier_.resize(transfers.size());
  for (std::size_t i = 0; i < transfers.size(); ++i) {
    const Transfer& t = transfers[i];
    check(t);
    sent_[i] = held_[slot(t.src, t.chunk)];
    int& mark = mark_[slot(t.dst, t.chunk)];
    if (mark < base_) {
      mark = base_ + static_cast<int>(arrivals_.size());
      earlier_[i] = -1;
      arrivals_.push_back({slot(t.dst, t.chunk), static_cast<int>(i), 1, kNothing});
      continue;
    }
    Arrival& arrival = arrivals_[mark - base_];
    if (!t.reduce || !transfers[arrival.transfer].reduce) {
      fail(t, "writes a chunk that transfer " + std::to_string(transfers[arrival.transfer].src) +
                  " -> " + std::to_string(t.dst) +
                  " of the same round writes too (only reductions may meet)");
    }
    earlier_[i] = arrival.transfer;
    arrival.transfer = static_cast<int>(i);
    ++arrival.count;
  }
  for (Arrival& arrival : arrivals_) {
    if (transfers[arrival.transfer].reduce) {
      combine(arrival);
    } else {
      arrival.result = sent_[arrival.transfer];
    }
  }
}

// The value held and all that arrive, in canonical order.
void SymbolicRun::combine(Arrival& arrival) {
  operands_.assign(1, held_[arrival.slot]);
  for (int i = arrival.transfer; i >= 0; i = earlier_[i]) operands_.push_back(sent_[i]);
  std::sort(operands_.begin(), operands_.end(), [this](Expr a, Expr b) {
    return expressions_.smallest(a) != expressions_.smallest(b)
               ? expressions_.smallest(a) < expressions_.smallest(b)
               : a < b;
  });
  arrival.result = expressions_.combine(operands_.data(), static_cast<int>(operands_.size()));
  if (arrival.result != kNothing) return;

  // Which transfer brings what is there already? Look again in the order in which the transfers are
  // written.
  std::vector<int> order;
  for (int i = arrival.transfer; i >= 0; i = earlier_[i]) order.insert(order.begin(), i);
  std::vector<Expr> present(1, held_[arrival.slot]);
  for (const int i : order) {
    for (const Expr e : present) {
      const std::vector<int> twice = expressions_.common_ranks(e, sent_[i]);
      if (!twice.empty()) {
        fail(s_.rounds[round_][i],
             "counts the contributions of " + list_of_ranks(twice) + " twice");
      }
    }
    present.push_back(sent_[i]);
  }
}

void SymbolicRun::commit() {
  for (const Arrival& arrival : arrivals_) held_[arrival.slot] = arrival.result;
  base_ += static_cast<int>(arrivals_.size());
}

}  // namespace collectives
