// The symbolic run of a schedule: which expression each rank holds for each chunk, round by round.
// verify() looks at its end, lower() at everything on the way. Internal to the core.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "schedule.hpp"

namespace collectives {

// The number of an expression; equal expressions have equal numbers. kNothing: no value is held.
using Expr = std::uint32_t;
inline constexpr Expr kNothing = 0;

// All expressions of a run, each stored once, with the set of ranks that contributed.
class Expressions {
 public:
  // `repeats`: a rank may contribute twice to a combination (a barrier).
  Expressions(int nranks, bool repeats);

  Expr leaf(int rank) const { return static_cast<Expr>(rank) + 1; }
  // operands[0] op operands[1] op ..., in this order; kNothing where a contribution would count
  // twice.
  Expr combine(const Expr* operands, int count);

  bool is_leaf(Expr e) const { return nodes_[e].operands == 0; }
  bool complete(Expr e) const { return nodes_[e].size == nranks_; }
  int size(Expr e) const { return nodes_[e].size; }          // ranks that contributed
  int smallest(Expr e) const { return nodes_[e].smallest; }  // the lowest of them
  bool contains(Expr e, int rank) const { return set(e)[rank / 64] >> (rank % 64) & 1; }
  std::vector<int> ranks(Expr e) const;
  std::vector<int> common_ranks(Expr a, Expr b) const;
  std::vector<Expr> operands(Expr e) const;

 private:
  struct Node {
    std::uint64_t hash = 0;
    std::uint32_t first_operand = 0;
    std::uint32_t operands = 0;  // 0: a leaf
    int smallest = 0;
    int size = 0;
  };
  const std::uint64_t* set(Expr e) const { return &sets_[e * words_]; }
  void grow_table();

  int nranks_;
  bool repeats_;
  std::size_t words_;                // of a set
  std::vector<Node> nodes_;          // by Expr; nodes_[0] is nothing
  std::vector<std::uint64_t> sets_;  // words_ for each node
  std::vector<Expr> operands_;
  std::vector<Expr> table_;  // open addressing; kNothing: free
};

// Everything that reaches one chunk of one rank in the round that is being evaluated.
struct Arrival {
  std::size_t slot = 0;  // rank · nchunks + chunk
  int transfer = 0;      // the last one, index in the round
  int count = 0;
  Expr result = kNothing;
};

class SymbolicRun {
 public:
  // Checks the schedule's shape; throws ScheduleError. The schedule must outlive the run.
  explicit SymbolicRun(const Schedule& s);

  // Evaluates a round without changing what ranks hold; throws ScheduleError if the round is not
  // legal.
  void evaluate(int round);
  // Now ranks hold what the evaluated round gave them.
  void commit();

  const Expressions& expressions() const { return expressions_; }
  Expr held(int rank, int chunk) const { return held_[slot(rank, chunk)]; }
  Expr sent(int transfer) const {
    return sent_[transfer];
  }  // what this transfer of the evaluated round carries
  // Only for a (rank, chunk) that a transfer of the evaluated round goes to.
  const Arrival& arrival(int rank, int chunk) const {
    return arrivals_[mark_[slot(rank, chunk)] - base_];
  }
  int channel_of(int chunk) const { return channel_[chunk] < 0 ? 0 : channel_[chunk]; }

 private:
  std::size_t slot(int rank, int chunk) const {
    return static_cast<std::size_t>(rank) * s_.nchunks + chunk;
  }
  void check(const Transfer& t);
  void combine(Arrival& arrival);
  [[noreturn]] void fail(const Transfer& t, const std::string& what) const;

  const Schedule& s_;
  Expressions expressions_;
  std::vector<Expr> held_;  // by slot
  std::vector<int> mark_;   // by slot: base_ + index of its arrival, smaller if none in this round
  std::vector<int> channel_;  // by chunk, -1: not touched yet
  std::vector<Expr> sent_;    // by transfer of the round
  std::vector<int> earlier_;  // by transfer: the one before it that goes to the same slot, -1: none
  std::vector<Arrival> arrivals_;
  std::vector<Expr> operands_;
  int base_ = 0;
  int round_ = 0;
};

// "my_ring, all_reduce over 4 ranks": how error messages begin.
std::string title_of(const Schedule& s);
// "ranks [0, 1, 5]", shortened where there are many.
std::string list_of_ranks(const std::vector<int>& ranks);

}  // namespace collectives
