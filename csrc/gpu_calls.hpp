// The flight recorder's part for calls on GPU arrays: what this rank has put on its streams, and
// how far it knows that they have come.
//
// A call is put on a stream and ends unseen. The rank learns of it when it looks next (`idle`,
// `synchronize`): all calls up to the one that it looked at have ended then. Nothing here touches
// the GPU, so that a dump does not wait for a driver that is stuck.
#pragma once

#include <pthread.h>

#include <array>
#include <atomic>
#include <cstdint>

#include "call_record.hpp"
#include "layout.hpp"

namespace collectives {

class GpuCalls {
 public:
  // A call is about to be put on a stream, or captured into a graph. One thread at a time.
  CallRecord* begin(const Call& call, std::uint64_t count, int algorithm, Order order,
                    bool captured) {
    CallRecord* const r = next(captured);
    r->describe(call, count, algorithm, order);
    publish(r, captured);
    return r;
  }
  // The same for a send or a receive, of a kind as Recorder has them.
  CallRecord* begin_transfer(std::uint8_t kind, const Call& call, std::uint32_t tag,
                             bool captured) {
    CallRecord* const r = next(captured);
    r->describe(call, call.count, -1, Order::any);
    r->collective.store(kind, std::memory_order_relaxed);
    r->tag.store(tag, std::memory_order_relaxed);
    publish(r, captured);
    return r;
  }
  // How many so far.
  std::uint64_t begun() const { return begun_.load(std::memory_order_relaxed); }
  // The event that the rank looks at is now behind every call so far. One thread at a time.
  void mark() { marked_.store(begun_.load(std::memory_order_relaxed), std::memory_order_release); }

  // Before the rank looks at its event: what it will know of.
  std::uint64_t marked() const { return marked_.load(std::memory_order_acquire); }
  void done(std::uint64_t sequence) {
    done_.store(sequence, std::memory_order_relaxed);
    waits_for_.store(0, std::memory_order_relaxed);
  }
  void not_done(std::uint64_t sequence) {
    if (waits_for_.exchange(sequence, std::memory_order_relaxed) != sequence)
      since_.store(ticks(), std::memory_order_relaxed);
  }
  // No call works any more. If a kernel gave up, it was the `launched`-th of this rank's (from 1; 0
  // if none did). Replays of graphs count there and are not seen here, so behind a capture nobody
  // knows which call it was.
  void failed(std::uint64_t launched) {
    broken_.store(true, std::memory_order_relaxed);
    waits_for_.store(0, std::memory_order_relaxed);
    if (launched == 0 || captures_.load(std::memory_order_relaxed)) return;
    done_.store(launched - 1, std::memory_order_relaxed);
    failed_.store(launched, std::memory_order_relaxed);
  }

  // For dumps.
  const std::array<CallRecord, kRecords>& calls() const { return calls_; }
  bool broken() const { return broken_.load(std::memory_order_relaxed); }
  std::uint64_t done() const { return done_.load(std::memory_order_relaxed); }
  // What has become of a call whose record says `state`.
  CallState outcome(std::uint64_t sequence, CallState state) const {
    if (state != CallState::entered) return state;
    if (sequence <= done()) return CallState::done;
    const std::uint64_t failed = failed_.load(std::memory_order_relaxed);
    return failed != 0 && sequence >= failed ? CallState::failed : state;
  }
  // The call that the host was last seen waiting for, since when; 0 if none.
  std::uint64_t waits_for() const { return waits_for_.load(std::memory_order_relaxed); }
  std::uint64_t waits_since() const { return since_.load(std::memory_order_relaxed); }

 private:
  CallRecord* next(bool captured) {
    constexpr auto plain = std::memory_order_relaxed;
    begun_.store(begun() + 1, plain);
    if (captured) captures_.store(true, plain);
    return &calls_[begun() % kRecords];
  }
  void publish(CallRecord* r, bool captured) {
    r->state.store(captured ? CallState::captured : CallState::entered, std::memory_order_relaxed);
    r->sequence.store(begun(), std::memory_order_release);
  }

  std::array<CallRecord, kRecords> calls_{};
  std::atomic<std::uint64_t> begun_{0}, marked_{0}, done_{0}, failed_{0}, waits_for_{0}, since_{0};
  std::atomic<bool> captures_{false}, broken_{false};
};

}  // namespace collectives
