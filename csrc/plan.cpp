// lower(): from the rounds of all ranks to the steps of one. Four passes over a draft in which
// values have no place yet:
//   1. draft    the symbolic run says what each message carries; the rank's sends, receives and
//               combines are written down on *values* (each step makes new ones, none is ever
//               changed);
//   2. fuse     a receive and the send that passes it on become one step;
//   3. place    values get places: output, a scratch cell, or none if nobody reads them; and the
//               sends that may leave from there are found;
//   4. copies   what the rank must hold at the end and only ever had in `input` is copied.
#include "plan.hpp"

#include <algorithm>
#include <array>
#include <map>
#include <string>
#include <utility>

#include "messages.hpp"
#include "symbolic.hpp"

namespace collectives {
namespace {

constexpr int kNoValue = -1;

struct Value {
  int chunk = 0;
  bool current =
      false;  // what the rank now holds for the chunk, not just an operand that waits in scratch
  bool kept = false;  // must be held at the end
  int last_use = -1;  // step that reads it last
  Place place;
};

struct DraftPiece {
  int chunk = 0;
  int src = kNoValue;
  int dst = kNoValue;
  bool reduce = false;
  bool incoming_first = false;
  bool complete = false;
};

struct DraftStep {
  Step step;
  int message = -1;  // of a receive
  bool awaited = false;
  std::vector<DraftPiece> pieces;
};

// One operand of a chunk as the rank holds it, `rank` being the smallest that contributed.
struct Part {
  int rank = 0;
  int value = kNoValue;
};

// Makes the program of one rank; fed with the messages of the rank, round by round.
class Lowering {
 public:
  Lowering(const Schedule& s, const Messages& messages, const SymbolicRun& run, int rank,
           Order order);

  // In this order within a round, while the symbolic run has evaluated it and not yet committed.
  // awaited: the peer asks for the message without waiting for anybody in that round.
  void send(const Message& message, bool awaited);
  void receive(int number);
  void end_round();

  RankProgram finish(const std::vector<char>& fused);

 private:
  int new_value(int chunk, bool current);
  DraftStep& new_step(StepKind kind, int channel, int round);
  const Transfer& transfer(const Message& m, int k) const {
    return s_.rounds[m.round][messages_.transfers[m.first + k]];
  }
  bool travels_whole(Expr e) const {
    return order_ == Order::any || run_.expressions().complete(e);
  }
  void store(const Transfer& t, Expr e, DraftStep& step);
  void reduce_alone(const Transfer& t, Expr e, DraftStep& step);
  void keep_operands(const Transfer& t, Expr e, DraftStep& step);

  static void fuse(std::vector<DraftStep>& steps, const std::vector<char>& fused);
  int place(const std::vector<DraftStep>& steps);
  void find_lent(std::vector<DraftStep>& steps) const;
  Program emit(const std::vector<DraftStep>& steps, const std::vector<int>& copies) const;

  const Schedule& s_;
  const Messages& messages_;
  const SymbolicRun& run_;
  int rank_;
  Order order_;
  std::vector<Value> values_;
  std::vector<std::vector<Part>> held_;  // by chunk: one whole value, or operands still apart
  std::vector<std::vector<DraftStep>> channels_;  // the draft
  struct Pending {
    int chunk = 0;
    int channel = 0;
    int round = 0;
  };
  std::vector<Pending> pending_;  // chunks with operands that came in this round
  std::vector<char> is_pending_;  // by chunk
};

Lowering::Lowering(const Schedule& s, const Messages& messages, const SymbolicRun& run, int rank,
                   Order order)
    : s_(s),
      messages_(messages),
      run_(run),
      rank_(rank),
      order_(order),
      held_(s.nchunks),
      channels_(s.nchannels),
      is_pending_(s.nchunks, 0) {
  for (int c = 0; c < s.nchunks; ++c) {
    if (run.held(rank, c) == kNothing) continue;
    const int value = new_value(c, true);
    values_[value].place = {Space::input, c};
    held_[c].push_back({run.expressions().smallest(run.held(rank, c)), value});
  }
}

int Lowering::new_value(int chunk, bool current) {
  Value value;
  value.chunk = chunk;
  value.current = current;
  values_.push_back(value);
  return static_cast<int>(values_.size()) - 1;
}

DraftStep& Lowering::new_step(StepKind kind, int channel, int round) {
  channels_[channel].emplace_back();
  DraftStep& draft = channels_[channel].back();
  draft.step.kind = kind;
  draft.step.round = round;
  return draft;
}

// ---- pass 1: draft ------------------------------------------------------------------------------

void Lowering::send(const Message& message, bool awaited) {
  DraftStep& draft = new_step(StepKind::send, message.channel, message.round);
  draft.step.send_peer = message.dst;
  draft.awaited = awaited;
  for (int k = 0; k < message.count; ++k) {
    const int chunk = transfer(message, k).chunk;
    for (const Part& part : held_[chunk]) {
      DraftPiece piece;
      piece.chunk = chunk;
      piece.src = part.value;
      draft.pieces.push_back(piece);
    }
  }
}

void Lowering::receive(int number) {
  const Message& message = messages_.list[number];
  DraftStep& draft = new_step(StepKind::recv, message.channel, message.round);
  draft.step.recv_peer = message.src;
  draft.message = number;
  for (int k = 0; k < message.count; ++k) {
    const Transfer& t = transfer(message, k);
    const Expr e = run_.sent(messages_.transfers[message.first + k]);
    if (!t.reduce) {
      store(t, e, draft);
    } else if (order_ == Order::any && run_.arrival(rank_, t.chunk).count == 1) {
      reduce_alone(t, e, draft);
    } else {
      keep_operands(t, e, draft);
    }
  }
}

// The chunk becomes what arrives.
void Lowering::store(const Transfer& t, Expr e, DraftStep& draft) {
  held_[t.chunk].clear();
  keep_operands(t, e, draft);
  if (travels_whole(e)) values_[held_[t.chunk].front().value].current = true;
}

// The only value that reaches the chunk in this round: combined as it arrives.
void Lowering::reduce_alone(const Transfer& t, Expr e, DraftStep& draft) {
  const Expressions& expressions = run_.expressions();
  Part& own = held_[t.chunk].front();
  DraftPiece piece;
  piece.chunk = t.chunk;
  piece.src = own.value;
  piece.dst = new_value(t.chunk, true);
  piece.reduce = true;
  piece.incoming_first = expressions.smallest(e) < own.rank;
  piece.complete = expressions.complete(run_.arrival(rank_, t.chunk).result);
  draft.pieces.push_back(piece);
  own = {std::min(own.rank, expressions.smallest(e)), piece.dst};
}

// What arrives waits beside what is held.
void Lowering::keep_operands(const Transfer& t, Expr e, DraftStep& draft) {
  const Expressions& expressions = run_.expressions();
  const std::vector<int> ranks =
      travels_whole(e) ? std::vector<int>{expressions.smallest(e)} : expressions.ranks(e);
  for (const int rank : ranks) {
    DraftPiece piece;
    piece.chunk = t.chunk;
    piece.dst = new_value(t.chunk, false);
    draft.pieces.push_back(piece);
    held_[t.chunk].push_back({rank, piece.dst});
  }
  if (!t.reduce || is_pending_[t.chunk]) return;
  is_pending_[t.chunk] = 1;
  pending_.push_back({t.chunk, t.channel, draft.step.round});
}

void Lowering::end_round() {
  for (const Pending& pending : pending_) {
    is_pending_[pending.chunk] = 0;
    std::vector<Part>& parts = held_[pending.chunk];
    std::sort(parts.begin(), parts.end(),
              [](const Part& a, const Part& b) { return a.rank < b.rank; });
    const bool complete = run_.expressions().complete(run_.arrival(rank_, pending.chunk).result);
    if (order_ == Order::rank && !complete) continue;
    DraftStep& draft = new_step(StepKind::combine, pending.channel, pending.round);
    const int result = new_value(pending.chunk, true);
    for (const Part& part : parts) {
      DraftPiece piece;
      piece.chunk = pending.chunk;
      piece.src = part.value;
      piece.dst = &part == &parts.front() ? result : kNoValue;
      piece.complete = complete;
      draft.pieces.push_back(piece);
    }
    parts = {{parts.front().rank, result}};
  }
  pending_.clear();
}

// ---- pass 2: fuse -------------------------------------------------------------------------------

void Lowering::fuse(std::vector<DraftStep>& steps, const std::vector<char>& fused) {
  std::size_t out = 0;
  for (std::size_t i = 0; i < steps.size(); ++i, ++out) {
    if (out != i) steps[out] = std::move(steps[i]);
    if (steps[out].message < 0 || !fused[steps[out].message]) continue;
    steps[out].step.kind = StepKind::recv_send;
    steps[out].step.send_peer =
        steps[++i].step.send_peer;  // its pieces are what this step received, in this order
  }
  steps.resize(out);
}

// ---- pass 3: place ------------------------------------------------------------------------------

// Gives places to all values made by these steps; returns the scratch cells needed.
int Lowering::place(const std::vector<DraftStep>& steps) {
  for (std::size_t i = 0; i < steps.size(); ++i) {
    for (const DraftPiece& piece : steps[i].pieces) {
      if (piece.src != kNoValue) values_[piece.src].last_use = static_cast<int>(i);
    }
  }
  int cells = 0;
  std::vector<int> free;
  std::vector<int> dying;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const int now = static_cast<int>(i);
    dying.clear();
    for (const DraftPiece& piece : steps[i].pieces) {
      const Place* from = piece.src == kNoValue ? nullptr : &values_[piece.src].place;
      const bool frees =
          from != nullptr && from->space == Space::scratch && values_[piece.src].last_use == now;
      Value* made = piece.dst == kNoValue ? nullptr : &values_[piece.dst];
      const bool read = made != nullptr && (made->kept || made->last_use >= 0);
      if (read && made->current && holds_at_end(s_, rank_, made->chunk)) {
        made->place = {Space::output, made->chunk};
      } else if (read && piece.reduce && frees) {
        made->place = *from;  // combined in place
        continue;
      } else if (read) {
        if (free.empty()) free.push_back(cells++);
        made->place = {Space::scratch, free.back()};
        free.pop_back();
      }
      if (frees) dying.push_back(from->index);
    }
    free.insert(free.end(), dying.begin(), dying.end());
  }
  return cells;
}

// Finds the sends whose piece a receive of the same round overwrites: `output` may be the memory of
// `input`.
void Lowering::find_lent(std::vector<DraftStep>& steps) const {
  std::map<std::pair<bool, int>, int> next;  // by place: the round of the receive that writes there
  const auto at = [](const Place& p) { return std::pair(p.space == Space::scratch, p.index); };
  for (auto draft = steps.rbegin(); draft != steps.rend(); ++draft) {
    Step& step = draft->step;
    if (step.recv_peer >= 0) {
      for (const DraftPiece& piece : draft->pieces) {
        if (piece.dst == kNoValue) continue;
        const Place& to = values_[piece.dst].place;
        if (to.space != Space::none) next[at(to)] = step.round;
      }
    } else if (step.kind == StepKind::send && draft->pieces.size() == 1 && !draft->awaited) {
      const auto found = next.find(at(values_[draft->pieces.front().src].place));
      step.lends = found == next.end() || found->second != step.round;
    }
  }
}

Program Lowering::emit(const std::vector<DraftStep>& steps, const std::vector<int>& copies) const {
  Program program;
  const auto add = [&](Step step, const std::vector<DraftPiece>& pieces) {
    step.first_piece = static_cast<int>(program.pieces.size());
    step.npieces = static_cast<int>(pieces.size());
    for (const DraftPiece& p : pieces) {
      Piece piece;
      piece.chunk = p.chunk;
      if (p.src != kNoValue) piece.src = values_[p.src].place;
      if (p.dst != kNoValue) piece.dst = values_[p.dst].place;
      piece.reduce = p.reduce;
      piece.incoming_first = p.incoming_first;
      piece.complete = p.complete;
      program.pieces.push_back(piece);
    }
    program.steps.push_back(step);
  };
  // The copies come after the first sends, while this rank would wait for its first message anyway.
  bool copied = copies.empty();
  const auto copy = [&] {
    Step step;
    step.kind = StepKind::copy;
    step.first_piece = static_cast<int>(program.pieces.size());
    step.npieces = static_cast<int>(copies.size());
    for (const int chunk : copies) {
      Piece piece;
      piece.chunk = chunk;
      piece.src = {Space::input, chunk};
      piece.dst = {Space::output, chunk};
      program.pieces.push_back(piece);
    }
    program.steps.push_back(step);
    copied = true;
  };
  for (const DraftStep& draft : steps) {
    if (!copied && draft.step.kind != StepKind::send) copy();
    const bool dead = draft.step.kind == StepKind::combine &&
                      values_[draft.pieces.front().dst].place.space == Space::none;
    if (!dead) add(draft.step, draft.pieces);
  }
  if (!copied) copy();
  return program;
}

RankProgram Lowering::finish(const std::vector<char>& fused) {
  std::vector<std::vector<int>> copies(s_.nchannels);  // by channel: chunks
  for (int c = 0; c < s_.nchunks; ++c) {
    if (!holds_at_end(s_, rank_, c)) continue;
    if (held_[c].size() != 1) {
      throw ScheduleError(title_of(s_) + ", at the end: rank " + std::to_string(rank_) +
                          " does not hold chunk " + std::to_string(c) + " complete");
    }
    Value& value = values_[held_[c].front().value];
    value.kept = true;
    if (value.place.space == Space::input) copies[run_.channel_of(c)].push_back(c);
  }
  RankProgram program;
  for (int channel = 0; channel < s_.nchannels; ++channel) {
    std::vector<DraftStep>& steps = channels_[channel];
    fuse(steps, fused);
    program.scratch_cells = std::max(program.scratch_cells, place(steps));
    find_lent(steps);
    program.channels.push_back(emit(steps, copies[channel]));
  }
  return program;
}

// ---- all of it ----------------------------------------------------------------------------------

// The pieces of a message of the round that the run has evaluated.
int pieces_of(const Messages& messages, const Message& m, const SymbolicRun& run, Order order) {
  if (order == Order::any) return m.count;
  int pieces = 0;
  for (int k = 0; k < m.count; ++k) {
    const Expr e = run.sent(messages.transfers[m.first + k]);
    pieces += run.expressions().complete(e) ? 1 : run.expressions().size(e);
  }
  return pieces;
}

std::vector<RankProgram> lower_ranks(const Schedule& s, const std::vector<int>& ranks, Order order,
                                     int depth) {
  // Of two contributions the canonical order is the order of ranks; where nothing is computed there
  // is none.
  if (!reduces(s.collective) || s.world.nranks <= 2) order = Order::any;
  SymbolicRun run(s);
  const Messages messages = group_messages(s);
  std::vector<Lowering> lowerings;
  std::vector<Lowering*> of(s.world.nranks, nullptr);
  lowerings.reserve(ranks.size());
  for (const int r : ranks) {
    lowerings.emplace_back(s, messages, run, r, order);
    of[r] = &lowerings.back();
  }
  int widest = 1;
  std::vector<int> heard(static_cast<std::size_t>(s.world.nranks) * s.nchannels, -1);  // in round
  for (std::size_t i = 0; i < s.rounds.size(); ++i) {
    run.evaluate(static_cast<int>(i));
    const int begin = messages.round_begin[i], end = messages.round_begin[i + 1];
    for (int m = begin; m < end; ++m) {
      const Message& message = messages.list[m];
      widest = std::max(widest, pieces_of(messages, message, run, order));
      // The first receive of a round that combines asks at once; any other may have to wait before.
      int& last = heard[static_cast<std::size_t>(message.dst) * s.nchannels + message.channel];
      const bool first = std::exchange(last, static_cast<int>(i)) != static_cast<int>(i);
      const Transfer& t = s.rounds[i][messages.transfers[message.first]];
      const bool awaited =
          first && order == Order::any && t.reduce && run.arrival(message.dst, t.chunk).count == 1;
      if (Lowering* sender = of[message.src]) sender->send(message, awaited);
    }
    for (int m = begin; m < end; ++m) {
      if (Lowering* receiver = of[messages.list[m].dst]) receiver->receive(m);
    }
    for (Lowering& lowering : lowerings) lowering.end_round();
    run.commit();
  }
  const std::vector<char> fused = choose_fusions(s, messages, order, depth);
  std::vector<RankProgram> programs;
  for (Lowering& lowering : lowerings) {
    programs.push_back(lowering.finish(fused));
    programs.back().max_message_pieces = widest;
  }
  return programs;
}

// ---- deadlock -----------------------------------------------------------------------------------

std::string where(int rank, int channel, std::size_t step, int round) {
  return "rank " + std::to_string(rank) + " (channel " + std::to_string(channel) + ", step " +
         std::to_string(step) + ", round " + std::to_string(round) + ")";
}

// The messages of lowered programs: every send, matched with its receive.
class Meeting {
 public:
  explicit Meeting(const std::vector<RankProgram>& ranks) : ranks_(ranks) {
    for_each_step([this](int rank, int channel, std::size_t i, const Step& step) {
      if (step.send_peer < 0) return;
      sends_[{rank, step.send_peer, channel}].ids.push_back(static_cast<int>(messages.size()));
      messages.push_back({step.round, rank, step.send_peer, channel, static_cast<int>(i), 0});
    });
  }

  // Calls f(rank, channel, step index, step, received message or -1, sent message or -1) in program
  // order.
  template <class F>
  void for_each(const F& f) {
    int sent = 0;
    for_each_step([&](int rank, int channel, std::size_t i, const Step& step) {
      int received = -1;
      if (step.recv_peer >= 0) {
        Connection& connection = sends_[{step.recv_peer, rank, channel}];
        if (connection.taken == connection.ids.size()) {
          throw ScheduleError(where(rank, channel, i, step.round) +
                              " receives a message that rank " + std::to_string(step.recv_peer) +
                              " never sends");
        }
        received = connection.ids[connection.taken++];
        compare(received, rank, i, step);
      }
      f(rank, channel, i, step, received, step.send_peer >= 0 ? sent++ : -1);
    });
    for (const auto& [ends, connection] : sends_) {
      if (connection.taken == connection.ids.size()) continue;
      const Message& m = messages[connection.ids[connection.taken]];
      throw ScheduleError(where(m.src, m.channel, m.first, m.round) +
                          " sends a message that rank " + std::to_string(m.dst) +
                          " never receives");
    }
  }

  std::vector<Message> messages;  // `first` is the step that sends it

 private:
  struct Connection {
    std::vector<int> ids;
    std::size_t taken = 0;
  };

  template <class F>
  void for_each_step(const F& f) const {
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      for (std::size_t c = 0; c < ranks_[r].channels.size(); ++c) {
        const std::vector<Step>& steps = ranks_[r].channels[c].steps;
        for (std::size_t i = 0; i < steps.size(); ++i)
          f(static_cast<int>(r), static_cast<int>(c), i, steps[i]);
      }
    }
  }

  void compare(int message, int rank, std::size_t i, const Step& in) const {
    const Message& m = messages[message];
    const Program& from = ranks_[m.src].channels[m.channel];
    const Program& to = ranks_[rank].channels[m.channel];
    const Step& out = from.steps[m.first];
    bool same = out.npieces == in.npieces;
    for (int k = 0; same && k < in.npieces; ++k) {
      same = from.pieces[out.first_piece + k].chunk == to.pieces[in.first_piece + k].chunk;
    }
    if (same) return;
    throw ScheduleError(where(rank, m.channel, i, in.round) + " expects other chunks than " +
                        where(m.src, m.channel, m.first, m.round) + " sends");
  }

  const std::vector<RankProgram>& ranks_;
  std::map<std::array<int, 3>, Connection> sends_;  // by src, dst, channel
};

}  // namespace

void check_deadlock(const std::vector<RankProgram>& ranks, int depth) {
  Meeting meeting(ranks);
  int nchannels = 1;
  for (const RankProgram& r : ranks)
    nchannels = std::max(nchannels, static_cast<int>(r.channels.size()));
  Progress progress(meeting.messages, static_cast<int>(ranks.size()), nchannels, depth);
  meeting.for_each([&](int rank, int channel, std::size_t, const Step&, int received, int sent) {
    auto& moves = progress.moves(progress.process_of(rank, channel));
    if (received >= 0) moves.push_back({received, true, sent >= 0});
    if (sent >= 0) moves.push_back({sent, false, false});
  });
  if (progress.run()) return;

  constexpr int kShown = 8;
  int waiting = 0;
  std::string message = "deadlock where connections hold " + std::to_string(depth) + " message" +
                        (depth == 1 ? "" : "s") + ":";
  for (int p = 0; p < progress.processes(); ++p) {
    const Progress::Move* move = progress.waits_at(p);
    if (move == nullptr || ++waiting > kShown) continue;
    const Message& m = meeting.messages[move->message];
    message += waiting == 1 ? " " : "; ";
    message +=
        "rank " + std::to_string(p / nchannels) + " waits, on channel " +
        std::to_string(m.channel) +
        (move->receive ? ", for or with the message of " : ", for room for the message of ") +
        where(m.src, m.channel, m.first, m.round);
  }
  if (waiting > kShown) message += "; and " + std::to_string(waiting - kShown) + " more";
  throw ScheduleError(message);
}

RankProgram lower(const Schedule& s, int rank, Order order, int depth) {
  return std::move(lower_ranks(s, {rank}, order, depth).front());
}

std::vector<RankProgram> lower_all(const Schedule& s, Order order, int depth) {
  std::vector<int> ranks(std::max(0, s.world.nranks));
  for (int r = 0; r < s.world.nranks; ++r) ranks[r] = r;
  return lower_ranks(s, ranks, order, depth);
}

}  // namespace collectives
