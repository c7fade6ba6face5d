// One call in the flight recorder: a cache line of plain stores.
#pragma once

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <cstdint>

#include "layout.hpp"
#include "plan.hpp"
#include "types.hpp"

namespace collectives {

// Counts up at a constant rate; the recorder finds out how fast.
inline std::uint64_t ticks() {
#if defined(__x86_64__)
  return __builtin_ia32_rdtsc();
#elif defined(__aarch64__)
  std::uint64_t t;
  asm volatile("mrs %0, cntvct_el0" : "=r"(t));
  return t;
#else
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
#endif
}

enum class CallState : std::uint8_t {
  empty,
  entered,   // by this rank; of a call on the GPU: put on a stream
  captured,  // into a graph: the call runs when the graph does, unseen
  running,   // all ranks are in it, with the same arguments
  done,
  failed,
};

struct alignas(64) CallRecord {
  std::atomic<std::uint64_t> sequence;  // of the communicator's calls, from 1; 0: nothing here
  std::atomic<std::uint64_t> begin, end;
  std::atomic<std::uint64_t> count;
  std::atomic<std::uint64_t> thread;
  std::atomic<std::int32_t> peer;  // the root; of a send or recv the other rank
  std::atomic<std::uint32_t> tag;
  std::atomic<std::int16_t> algorithm;
  std::atomic<std::uint8_t> collective, dtype, op, order;
  std::atomic<CallState> state;

  // A call begins on this thread. The record says nothing until its sequence is stored.
  void start(std::uint64_t elements) {
    constexpr auto plain = std::memory_order_relaxed;
    sequence.store(0, plain);
    std::atomic_thread_fence(std::memory_order_release);  // who sees what follows sees the 0
    begin.store(ticks(), plain);
    end.store(0, plain);
    count.store(elements, plain);
    thread.store(static_cast<std::uint64_t>(pthread_self()), plain);
  }

  // All but what makes it valid: state and sequence.
  void describe(const Call& call, std::uint64_t elements, int number, Order wanted) {
    constexpr auto plain = std::memory_order_relaxed;
    start(elements);
    peer.store(call.root, plain);
    algorithm.store(static_cast<std::int16_t>(number), plain);
    collective.store(static_cast<std::uint8_t>(call.collective), plain);
    dtype.store(static_cast<std::uint8_t>(call.dtype), plain);
    op.store(static_cast<std::uint8_t>(call.op), plain);
    order.store(static_cast<std::uint8_t>(wanted), plain);
  }
};
static_assert(sizeof(CallRecord) == 64);

inline constexpr std::size_t kRecords = 128;  // 8 KiB: a quarter of a first-level cache

}  // namespace collectives
