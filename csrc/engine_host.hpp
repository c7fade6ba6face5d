// The host engine: runs any rank program over any transport.
//
// A *strand* is one channel of the program on one lane: its own program counter, FIFOs and scratch
// cells. The engine polls the strands round robin; each runs its steps in order for its segments,
// and goes as far as arrived data and free slots allow. Strands of a call are what overlaps: two
// trees, or the up phase of one segment with the down phase of another.
//
// Arrays may be on a GPU where the transport sends from there and receives there: then its Hands
// work on a stream, and a strand waits until they have.
#pragma once

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "hands.hpp"
#include "layout.hpp"
#include "plan.hpp"
#include "transport.hpp"
#include "wait.hpp"

namespace collectives {

// How to reach peers: the transport of each (nullptr for oneself).
struct Links {
  std::vector<Transport*> to;
  std::size_t slot_bytes = 0;  // the smallest of any transport of any rank: the same on all ranks
  int max_channels = 1;        // FIFO channels there are for programs
};

// A program bound to its links and byte layout: what runs, and runs again.
class HostPlan {
 public:
  HostPlan(std::shared_ptr<const RankProgram> program, Layout layout, const Call& call,
           const Links& links, int lanes, int nranks);

  std::uint64_t segments() const { return layout_.segments(); }
  int strands() const { return static_cast<int>(strands_.size()); }
  std::size_t scratch_bytes() const { return scratch_bytes_; }

 private:
  friend class HostEngine;
  struct BoundStep {
    const Step* step;
    RecvPort* from;
    SendPort* to;
  };
  struct Strand {
    const Program* program;
    std::vector<BoundStep> steps;
    int lane;
    int channel;          // FIFO channel
    std::size_t scratch;  // offset of its cells
    // Run state. `lent`: memory that messages in flight are sent from, and that must not be written
    // before.
    struct Lent {
      SendPort* port;
      std::uint64_t ticket;
      const std::byte* begin;
      const std::byte* end;
    };
    std::vector<Lent> lent;
    std::size_t bytes = 0;     // of the message of the step at hand
    std::uint64_t ticket = 0;  // of what that step asked for, and waits for
    std::size_t at = 0;
    std::uint64_t segment = 0;
  };

  template <class Port>
  bool is_bare(const Step& step, std::size_t bytes, const Port& port) const;

  std::shared_ptr<const RankProgram> program_;
  Layout layout_;
  std::vector<Strand> strands_;
  std::vector<std::pair<RecvPort*, std::uint64_t>> expected_;
  std::vector<std::pair<SendPort*, int>> senders_;  // and to whom
  std::vector<Transport*> transports_;
  std::size_t cell_bytes_ = 0, scratch_bytes_ = 0;
  std::size_t element_ = 1;
  int lanes_ = 1, nranks_ = 1;
  bool agreed_ = true;  // all ranks know all lengths
};

class HostEngine {
 public:
  HostEngine(Waiter& waiter, std::unique_ptr<Hands> hands)
      : waiter_(waiter), hands_(std::move(hands)) {}

  // Runs the call. `tag` identifies it in messages; a message with another tag is a protocol error.
  void run(HostPlan& plan, const Call& call, std::uint64_t tag);
  // True once a call has failed while messages were sent from where they lie, and the peer has not
  // taken them, or came to where they go, and MPI would not withdraw that: its arrays must stay.
  bool lends() const { return lends_; }

 private:
  void leave(HostPlan& plan) noexcept;
  // False if a message may still leave from where it lies, or come to where it goes.
  bool taken_back(HostPlan& plan) noexcept;
  bool poll(HostPlan& plan);
  bool advance(HostPlan& plan, HostPlan::Strand& strand);
  bool work(HostPlan& plan, HostPlan::Strand& strand);
  void conclude(const HostPlan& plan, const HostPlan::Strand& strand);
  std::byte* address(const HostPlan& plan, const HostPlan::Strand& strand, const Piece& piece,
                     const Place& place) const;
  static bool writable(HostPlan::Strand& strand, const std::byte* p, std::size_t bytes);
  void check_message(const HostPlan::Strand& strand, const Step& step, const Header& header,
                     std::uint64_t expected) const;

  Waiter& waiter_;
  std::unique_ptr<Hands> hands_;
  std::byte* scratch_ = nullptr;
  const Call* call_ = nullptr;
  std::uint64_t tag_ = 0;
  std::size_t unfinished_ = 0;
  std::atomic<bool> lends_{false};
};

}  // namespace collectives
