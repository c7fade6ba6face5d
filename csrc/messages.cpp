#include "messages.hpp"

#include <algorithm>

#include "symbolic.hpp"

namespace collectives {
namespace {

// Numbers by key, for keys that are few among many possible ones (pairs of ranks): open addressing.
class KeyTable {
 public:
  explicit KeyTable(std::size_t entries) {
    while (size_ < 2 * entries) size_ *= 2;
    entries_.resize(size_);
  }
  void clear() { ++stamp_; }
  // The number kept for this key, -1 at first.
  int& operator[](std::uint64_t key) {
    std::size_t at = (key * 0x9E3779B97F4A7C15ull >> 20) & (size_ - 1);
    while (entries_[at].stamp == stamp_ && entries_[at].key != key) at = (at + 1) & (size_ - 1);
    if (entries_[at].stamp != stamp_) entries_[at] = {key, stamp_, -1};
    return entries_[at].number;
  }

 private:
  struct Entry {
    std::uint64_t key = 0;
    std::uint32_t stamp = 0;
    int number = -1;
  };
  std::size_t size_ = 16;
  std::uint32_t stamp_ = 1;
  std::vector<Entry> entries_;
};

std::uint64_t connection(int src, int dst, int channel) {
  return (static_cast<std::uint64_t>(channel) << 48) | (static_cast<std::uint64_t>(src) << 24) |
         static_cast<unsigned>(dst);
}

}  // namespace

Messages group_messages(const Schedule& s) {
  std::size_t all = 0, widest = 0;
  for (const Round& round : s.rounds) {
    all += round.size();
    widest = std::max(widest, round.size());
  }
  Messages m;
  m.transfers.resize(all);
  m.round_begin.push_back(0);
  KeyTable known(widest);
  std::vector<int> message_of(widest);
  int first = 0;
  for (std::size_t i = 0; i < s.rounds.size(); ++i) {
    known.clear();
    const Round& round = s.rounds[i];
    for (std::size_t k = 0; k < round.size(); ++k) {
      const Transfer& t = round[k];
      int& number = known[connection(t.src, t.dst, t.channel)];
      if (number < 0) {
        number = static_cast<int>(m.list.size());
        m.list.push_back({static_cast<int>(i), t.src, t.dst, t.channel, 0, 0});
      }
      message_of[k] = number;
      ++m.list[number].count;
    }
    for (std::size_t k = m.round_begin.back(); k < m.list.size(); ++k) {
      m.list[k].first = first;
      first += m.list[k].count;
      m.list[k].count = 0;
    }
    for (std::size_t k = 0; k < round.size(); ++k) {
      Message& message = m.list[message_of[k]];
      m.transfers[message.first + message.count++] = static_cast<int>(k);
    }
    m.round_begin.push_back(static_cast<int>(m.list.size()));
  }
  return m;
}

// ---- progress -----------------------------------------------------------------------------------

Progress::Progress(const std::vector<Message>& messages, int nranks, int nchannels, int depth)
    : nchannels_(nchannels),
      moves_(static_cast<std::size_t>(nranks) * nchannels),
      at_(moves_.size(), 0),
      before_(messages.size(), -1),
      sent_(messages.size(), 0),
      received_(messages.size(), 0),
      queued_(moves_.size(), 0) {
  KeyTable last(messages.size());
  std::vector<int> previous(messages.size(), -1);
  sender_.reserve(messages.size());
  receiver_.reserve(messages.size());
  for (std::size_t i = 0; i < messages.size(); ++i) {
    const Message& m = messages[i];
    sender_.push_back(process_of(m.src, m.channel));
    receiver_.push_back(process_of(m.dst, m.channel));
    int& newest = last[connection(m.src, m.dst, m.channel)];
    previous[i] = newest;
    newest = static_cast<int>(i);
    int before = static_cast<int>(i);
    for (int d = 0; d < depth && before >= 0; ++d) before = previous[before];
    before_[i] = before;
  }
}

void Progress::wake(int process) {
  if (queued_[process]) return;
  queued_[process] = 1;
  ready_.push_back(process);
}

void Progress::advance(int process) {
  const std::vector<Move>& moves = moves_[process];
  std::size_t& at = at_[process];
  for (; at < moves.size(); ++at) {
    const Move& move = moves[at];
    if (!move.receive) {
      if (!sendable(move.message)) return;
      sent_[move.message] = 1;
      wake(receiver_[move.message]);
      continue;
    }
    if (!sent_[move.message]) return;
    if (move.joined && !sendable(moves[at + 1].message)) return;
    received_[move.message] = 1;
    wake(sender_[move.message]);
  }
}

bool Progress::run() {
  for (int p = 0; p < processes(); ++p) wake(p);
  while (!ready_.empty()) {
    const int process = ready_.back();
    ready_.pop_back();
    queued_[process] = 0;
    advance(process);
  }
  for (int p = 0; p < processes(); ++p) {
    if (waits_at(p) != nullptr) return false;
  }
  return true;
}

bool Progress::run_splitting() {
  bool helped = true;
  while (!run()) {
    if (!helped) return false;
    helped = false;
    // One process after the other, so that the cost of the splits is spread over the ranks.
    for (int p = 0; p < processes(); ++p) {
      if (waits_at(p) == nullptr) continue;
      Move& move = moves_[p][at_[p]];
      if (!move.receive || !move.joined || !sent_[move.message]) continue;
      move.joined = false;
      helped = true;
      for (wake(p); !ready_.empty();) {
        const int process = ready_.back();
        ready_.pop_back();
        queued_[process] = 0;
        advance(process);
      }
    }
  }
  return true;
}

const Progress::Move* Progress::waits_at(int process) const {
  return at_[process] < moves_[process].size() ? &moves_[process][at_[process]] : nullptr;
}

// ---- fusions ------------------------------------------------------------------------------------

std::vector<char> choose_fusions(const Schedule& s, const Messages& messages, Order order,
                                 int depth) {
  Progress progress(messages.list, s.world.nranks, s.nchannels, depth);
  for (std::size_t i = 0; i + 1 < messages.round_begin.size(); ++i) {
    const int begin = messages.round_begin[i], end = messages.round_begin[i + 1];
    for (int m = begin; m < end; ++m) {  // a round's sends come before its receives
      progress.moves(progress.process_of(messages.list[m].src, messages.list[m].channel))
          .push_back({m, false, false});
    }
    for (int m = begin; m < end; ++m) {
      progress.moves(progress.process_of(messages.list[m].dst, messages.list[m].channel))
          .push_back({m, true, false});
    }
  }

  // Where several messages of a round arrive they may have to be combined first, so only a lone one
  // is passed on. In rank order, what is reduced leaves with one more contribution than came, or is
  // combined first.
  const auto passes_on = [&](const Message& in, const Message& out) {
    if (in.count != out.count) return false;
    for (int k = 0; k < in.count; ++k) {
      const Transfer& came = s.rounds[in.round][messages.transfers[in.first + k]];
      const Transfer& goes = s.rounds[out.round][messages.transfers[out.first + k]];
      if (came.chunk != goes.chunk || (came.reduce && order == Order::rank)) return false;
    }
    return true;
  };
  const auto lone = [&](const std::vector<Progress::Move>& moves, std::size_t k) {
    return k == 0 || !moves[k - 1].receive ||
           messages.list[moves[k - 1].message].round != messages.list[moves[k].message].round;
  };
  for (int p = 0; p < progress.processes(); ++p) {
    std::vector<Progress::Move>& moves = progress.moves(p);
    for (std::size_t k = 0; k + 1 < moves.size(); ++k) {
      if (!moves[k].receive || moves[k + 1].receive || !lone(moves, k)) continue;
      moves[k].joined =
          passes_on(messages.list[moves[k].message], messages.list[moves[k + 1].message]);
    }
  }

  if (!progress.run_splitting()) {
    for (int p = 0; p < progress.processes(); ++p) {
      const Progress::Move* move = progress.waits_at(p);
      if (move == nullptr) continue;
      const Message& m = messages.list[move->message];
      throw ScheduleError(title_of(s) + ", round " + std::to_string(m.round) + ": message " +
                          std::to_string(m.src) + " -> " + std::to_string(m.dst) + " on channel " +
                          std::to_string(m.channel) + " waits for ever where connections hold " +
                          std::to_string(depth) + " message" + (depth == 1 ? "" : "s"));
    }
  }
  std::vector<char> fused(messages.list.size(), 0);
  for (int p = 0; p < progress.processes(); ++p) {
    for (const Progress::Move& move : progress.moves(p)) {
      if (move.joined) fused[move.message] = 1;
    }
  }
  return fused;
}

}  // namespace collectives
