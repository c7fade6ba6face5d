// How the ranks of one region enter a call together and find out that they do not mean the same
// call.
//
// Every call has a sequence number. A rank announces the hash of its call's signature under that
// number and goes on only when all ranks have announced the same; so nothing is written to a user's
// array before the ranks agree. The announcement costs one cache-line exchange, and nothing for
// small messages, whose lines carry number and hash themselves.
//
// Two slots by parity are enough: a rank announces call k+2 only after all have announced k+1,
// hence read k.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "recorder.hpp"
#include "region.hpp"
#include "wait.hpp"

namespace collectives {

class Gate {
 public:
  // `names[q]`: the rank number to print for local rank q.
  Gate(std::shared_ptr<Region> region, int me, std::vector<int> names, bool crowded);

  void record_to(Recorder* recorder) { recorder_ = recorder; }
  int me() const { return me_; }
  int size() const { return n_; }
  Region& region() { return *region_; }
  std::uint64_t sequence() const { return sequence_; }

  // Begins the next call. The signature must live until the call ends.
  std::uint64_t begin(const Signature& signature, std::uint64_t hash) {
    signature_ = &signature;
    hash_ = hash;
    announced_ = false;
    may_announce_late_ = false;
    return ++sequence_;
  }
  void end() {
    signature_ = nullptr;
    may_announce_late_ = false;
  }
  // This call's data travel in lines, so nothing depends on when the announcement is made.
  void allow_late_announcement() { may_announce_late_ = true; }

  // Tells the peers that this rank has joined, with what the call needs to say. Writes made before
  // (staged data) are visible to whoever sees the announcement.
  void announce(std::uint64_t token = 0, std::uint64_t amount = 0, const std::byte* input = nullptr,
                std::byte* output = nullptr);

  // Waits until all have announced this call; throws Error(mismatch) on every rank if hashes
  // differ.
  void meet(Waiter& waiter);
  const Arrival& arrival(int q) { return region_->rank(q).arrival[sequence_ & 1]; }

  // Numbers of the ranks that have not come to the call that this rank is in.
  std::vector<int> missing();

  // For calls that do not announce (lines): called from slow waits. Announces late, and throws if a
  // peer is in another call.
  void look_around();
  // A peer's line carries this call's number with another hash: collects the signatures and throws.
  [[noreturn]] void mismatch(Waiter& waiter);

  // Wakes peers that wait for this rank; call after the change they wait for.
  void ring_all() {
    if (crowded_) std::atomic_thread_fence(std::memory_order_seq_cst);  // see Doorbell
    for (int q = 0; q < n_; ++q)
      if (q != me_) region_->rank(q).doorbell.ring(me_);
  }
  std::string name(int q) const { return "rank " + std::to_string(names_[q]); }
  int number(int q) const { return names_[q]; }

 private:
  [[noreturn]] void throw_mismatch();

  std::shared_ptr<Region> region_;
  int me_;
  int n_;
  std::vector<int> names_;
  bool crowded_;
  Recorder* recorder_ = nullptr;
  std::uint64_t sequence_ = 0;
  const Signature* signature_ = nullptr;
  std::uint64_t hash_ = 0;
  bool announced_ = false;
  bool may_announce_late_ = false;
};

}  // namespace collectives
