// Messages: the transfers of a schedule gathered by round, ranks and channel, and how far ranks get
// with them when connections hold only so many. Internal to the core.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "plan.hpp"
#include "schedule.hpp"

namespace collectives {

struct Message {
  int round = 0;
  int src = 0;
  int dst = 0;
  int channel = 0;
  int first = 0;  // its transfers are Messages::transfers[first, first + count)
  int count = 0;
};

struct Messages {
  std::vector<Message> list;     // by round, then in order of their first transfers
  std::vector<int> round_begin;  // list[round_begin[i], round_begin[i + 1]) is round i
  std::vector<int> transfers;    // indices into the message's round
};

// The schedule must be in range (verify() or SymbolicRun checks that).
Messages group_messages(const Schedule& s);

// What each process (a rank's program on one channel) does with messages, in order, and a run of
// them all. The order in which processes advance does not matter: an enabled step stays enabled, so
// one run that ends proves that all end.
class Progress {
 public:
  struct Move {
    int message = 0;
    bool receive = false;
    bool joined =
        false;  // a receive that frees its message only together with the send that follows
  };

  // `depth`: messages that a connection (src, dst, channel) holds.
  Progress(const std::vector<Message>& messages, int nranks, int nchannels, int depth);

  int processes() const { return static_cast<int>(moves_.size()); }
  int process_of(int rank, int channel) const { return rank * nchannels_ + channel; }
  std::vector<Move>& moves(int process) { return moves_[process]; }

  // Advances all processes as far as they get; true if all ended.
  bool run();
  // Undoes the joins that stop the run, where `run` got stuck; true if that helped it to the end.
  bool run_splitting();
  // The move at which a process waits, nullptr if it has ended.
  const Move* waits_at(int process) const;

 private:
  void advance(int process);
  void wake(int process);
  bool sendable(int message) const { return before_[message] < 0 || received_[before_[message]]; }

  int nchannels_;
  std::vector<std::vector<Move>> moves_;  // by process
  std::vector<std::size_t> at_;           // by process: its next move
  std::vector<int> sender_, receiver_;    // by message: processes
  std::vector<int> before_;  // by message: the one that must leave the connection first, -1: none
  std::vector<char> sent_, received_;  // by message
  std::vector<int> ready_;
  std::vector<char> queued_;  // by process
};

// Which received messages are passed on in one step with the send that follows (see
// StepKind::recv_send), for all ranks alike: where a rank's next send carries just what it
// received, and as far as connections of this depth allow (on a cycle of ranks somebody must take a
// message out before the next one fits in). By message.
std::vector<char> choose_fusions(const Schedule& s, const Messages& messages, Order order,
                                 int depth);

}  // namespace collectives
