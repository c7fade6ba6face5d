// Executes lowered programs on values that are hashes of expressions: the ranks' processes advance
// in a random interleaving over FIFOs of a given depth. Whatever an engine must not do (read
// garbage, write input, write output that a rank does not have, exceed a scratch cell) throws
// Failure.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "../../csrc/plan.hpp"
#include "../../csrc/schedule.hpp"
#include "../../csrc/symbolic.hpp"

namespace collectives {

// ---- values -------------------------------------------------------------------------------------

// What a buffer holds for a chunk: the hash of an expression, and whether its final combination was
// announced.
struct Symbol {
  std::uint64_t hash = 0;  // 0: garbage
  bool finished = false;
};

inline std::uint64_t mix(std::uint64_t h, std::uint64_t x) {
  h = (h ^ x) * 0xBF58476D1CE4E5B9ull;
  h = (h ^ (h >> 31)) * 0x94D049BB133111EBull;
  return h ^ (h >> 29);
}
inline std::uint64_t leaf(int rank) { return mix(0x51ED270B, rank + 1); }
inline std::uint64_t combined(const std::vector<std::uint64_t>& operands) {
  std::uint64_t h = 7 + operands.size();
  for (const auto x : operands) h = mix(h, x);
  return h;
}
inline std::uint64_t rank_order(int n) {
  std::vector<std::uint64_t> all;
  for (int r = 0; r < n; ++r) all.push_back(leaf(r));
  return n == 1 ? all[0] : combined(all);
}

inline std::uint64_t hash_of(const Expressions& expressions, Expr e,
                             std::map<Expr, std::uint64_t>& known) {
  if (expressions.is_leaf(e)) return leaf(expressions.smallest(e));
  const auto found = known.find(e);
  if (found != known.end()) return found->second;
  std::vector<std::uint64_t> operands;
  for (const Expr x : expressions.operands(e)) operands.push_back(hash_of(expressions, x, known));
  return known[e] = combined(operands);
}

// ---- the executor -------------------------------------------------------------------------------

struct Failure {
  std::string what;
};

class Executor {
 public:
  Executor(const Schedule& s, const std::vector<RankProgram>& programs, bool in_place, int depth,
           unsigned seed)
      : s_(s), programs_(programs), depth_(depth), random_(seed) {
    const int n = s.world.nranks;
    input_.resize(n);
    output_.resize(n);
    for (int r = 0; r < n; ++r) {
      input_[r] = std::make_shared<std::vector<Symbol>>(s.nchunks);
      output_[r] = in_place ? input_[r] : std::make_shared<std::vector<Symbol>>(s.nchunks);
      for (int c = 0; c < s.nchunks; ++c) {
        if (holds_at_start(s, r, c)) (*input_[r])[c].hash = leaf(r);
      }
      for (std::size_t ch = 0; ch < programs[r].channels.size(); ++ch) {
        processes_.push_back(
            {r, static_cast<int>(ch), 0, std::vector<Symbol>(programs[r].scratch_cells)});
      }
    }
  }

  void run() {
    for (bool moved = true; moved;) {
      moved = false;
      std::shuffle(processes_.begin(), processes_.end(), random_);
      for (Process& p : processes_) {
        for (int steps = 1 + static_cast<int>(random_() % 3); steps > 0 && advance(p); --steps)
          moved = true;
      }
    }
    for (const Process& p : processes_) {
      const auto& steps = programs_[p.rank].channels[p.channel].steps;
      if (p.at < steps.size())
        throw Failure{"rank " + std::to_string(p.rank) + " hangs at step " + std::to_string(p.at)};
    }
    for (const auto& [ends, fifo] : fifos_) {
      if (!fifo.empty()) throw Failure{"a message was never received"};
    }
  }

  const Symbol& output(int rank, int chunk) const { return (*output_[rank])[chunk]; }
  const Symbol& input(int rank, int chunk) const { return (*input_[rank])[chunk]; }

 private:
  struct Process {
    int rank;
    int channel;
    std::size_t at;
    std::vector<Symbol> scratch;
  };
  struct Part {
    int chunk;
    Symbol value;
  };
  using Parts = std::vector<Part>;

  std::deque<Parts>& fifo(int src, int dst, int channel) { return fifos_[{src, dst, channel}]; }

  Symbol read(const Process& p, const Piece& piece) const {
    const Place& at = piece.src;
    const auto where = "rank " + std::to_string(p.rank) + ", step " + std::to_string(p.at) +
                       ", chunk " + std::to_string(piece.chunk);
    if (at.space == Space::none) throw Failure{where + ": reads from nowhere"};
    if (at.space != Space::scratch && at.index != piece.chunk)
      throw Failure{where + ": another chunk's place"};
    if (at.space == Space::input && !holds_at_start(s_, p.rank, piece.chunk))
      throw Failure{where + ": input that does not exist"};
    if (at.space == Space::output && !holds_at_end(s_, p.rank, piece.chunk))
      throw Failure{where + ": output that does not exist"};
    const Symbol v = at.space == Space::input    ? (*input_[p.rank])[at.index]
                     : at.space == Space::output ? (*output_[p.rank])[at.index]
                                                 : p.scratch.at(at.index);
    if (v.hash == 0) throw Failure{where + ": reads garbage"};
    return v;
  }

  void write(Process& p, const Piece& piece, const Symbol& v) {
    const auto where = "rank " + std::to_string(p.rank) + ", step " + std::to_string(p.at) +
                       ", chunk " + std::to_string(piece.chunk);
    switch (piece.dst.space) {
      case Space::none:
        return;
      case Space::input:
        throw Failure{where + ": writes into input"};
      case Space::scratch:
        p.scratch.at(piece.dst.index) = v;
        return;
      case Space::output:
        if (piece.dst.index != piece.chunk) throw Failure{where + ": writes another chunk's place"};
        if (!holds_at_end(s_, p.rank, piece.chunk))
          throw Failure{where + ": writes output that does not exist"};
        (*output_[p.rank])[piece.chunk] = v;
    }
  }

  Symbol combine(const std::vector<Symbol>& operands, bool complete) const {
    std::vector<std::uint64_t> hashes;
    for (const Symbol& v : operands) {
      if (v.finished && reduces(s_.collective)) throw Failure{"a finished value is combined again"};
      hashes.push_back(v.hash);
    }
    return {combined(hashes), complete};
  }

  bool advance(Process& p) {
    const Program& program = programs_[p.rank].channels[p.channel];
    if (p.at >= program.steps.size()) return false;
    const Step& step = program.steps[p.at];
    const Piece* first = program.pieces.data() + step.first_piece;
    const Piece* last = first + step.npieces;
    std::deque<Parts>* in = step.recv_peer < 0 ? nullptr : &fifo(step.recv_peer, p.rank, p.channel);
    std::deque<Parts>* out =
        step.send_peer < 0 ? nullptr : &fifo(p.rank, step.send_peer, p.channel);
    if ((in != nullptr) != (step.kind == StepKind::recv || step.kind == StepKind::recv_send) ||
        (out != nullptr) != (step.kind == StepKind::send || step.kind == StepKind::recv_send)) {
      throw Failure{"peers do not fit the kind of step"};
    }
    if (in != nullptr && in->empty()) return false;
    if (out != nullptr && static_cast<int>(out->size()) >= depth_) return false;
    if (step.npieces < 1) throw Failure{"an empty step"};
    if ((in != nullptr || out != nullptr) && step.npieces > programs_[p.rank].max_message_pieces)
      throw Failure{"a message is longer than said"};

    Parts message;
    if (step.kind == StepKind::send) {
      for (const Piece* x = first; x != last; ++x) message.push_back({x->chunk, read(p, *x)});
    } else if (in != nullptr) {
      const Parts arrived = in->front();
      in->pop_front();
      if (static_cast<int>(arrived.size()) != step.npieces)
        throw Failure{"a message has another length than expected"};
      for (const Piece* x = first; x != last; ++x) {
        const Part& part = arrived[x - first];
        if (part.chunk != x->chunk) throw Failure{"a message brings another chunk than expected"};
        Symbol v = part.value;
        if (x->reduce) {
          const Symbol own = read(p, *x);
          v = combine(x->incoming_first ? std::vector<Symbol>{v, own} : std::vector<Symbol>{own, v},
                      x->complete);
        }
        write(p, *x, v);
        message.push_back({x->chunk, v});
      }
    } else if (step.kind == StepKind::copy) {
      for (const Piece* x = first; x != last; ++x) write(p, *x, read(p, *x));
    } else {
      std::vector<Symbol> operands;
      for (const Piece* x = first; x != last; ++x) {
        if (x->chunk != first->chunk) throw Failure{"a combine mixes chunks"};
        operands.push_back(read(p, *x));
      }
      write(p, *first, combine(operands, first->complete));
    }
    if (out != nullptr) out->push_back(message);
    ++p.at;
    return true;
  }

  const Schedule& s_;
  const std::vector<RankProgram>& programs_;
  int depth_;
  std::mt19937 random_;
  std::vector<std::shared_ptr<std::vector<Symbol>>> input_, output_;
  std::vector<Process> processes_;
  std::map<std::vector<int>, std::deque<Parts>> fifos_;
};

}  // namespace collectives
