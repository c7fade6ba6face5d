// kernels/nvidia/primitives.cuh for a host compiler: the same names, with the same memory orders.
#pragma once

#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <vector>

#include "cuda_call.hpp"

namespace collectives::device {

inline void store_release(u32* p, u32 v) {
  if (!emulated::lost(p)) __atomic_store_n(p, v, __ATOMIC_RELEASE);
}
inline void store_release(u64* p, u64 v) {
  if (!emulated::lost(p)) __atomic_store_n(p, v, __ATOMIC_RELEASE);
}
inline u32 load_acquire(const u32* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
inline u64 load_acquire(const u64* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
inline u32 load_relaxed(const u32* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
inline u64 load_relaxed(const u64* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
struct Two {
  u64 first, second;
};
inline Two load_two(const u64* p) { return {load_relaxed(p), load_relaxed(p + 1)}; }
inline void store_relaxed(u32* p, u32 v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
inline void store_relaxed(u64* p, u64 v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }

// Only halves of 8 bytes arrive together, and in any order: either goes first, in turns, and others
// take their turn before the other goes.
struct Packet {
  u32 low, low_flag, high, high_flag;
};
inline void store_packet(Packet* p, u64 data, u32 flag, u32 second) {
  const u64 words[2] = {(data & 0xffffffffu) | u64(flag) << 32, data >> 32 | u64(second) << 32};
  static thread_local unsigned stored = 0;
  const unsigned first = ++stored & 1;
  u64* const halves = reinterpret_cast<u64*>(p);
  __atomic_store_n(&halves[first], words[first], __ATOMIC_RELAXED);
  emulated::poll();
  __atomic_store_n(&halves[first ^ 1], words[first ^ 1], __ATOMIC_RELAXED);
}
inline Packet load_packet(const Packet* p) {
  const u64* const halves = reinterpret_cast<const u64*>(p);
  const u64 low = __atomic_load_n(&halves[0], __ATOMIC_RELAXED);
  const u64 high = __atomic_load_n(&halves[1], __ATOMIC_RELAXED);
  return {u32(low), u32(low >> 32), u32(high), u32(high >> 32)};
}

// A line arrives as a whole: its flag is stored last and loaded first.
struct alignas(128) Line {
  u64 word[16];
};
struct LinePart {
  u64 low, high;
};
inline void store_line(Line* line, int lane, u32 together, bool is_any, const LinePart& part) {
  u64* const words = &line->word[lane * 2];
  if (is_any && lane != 7) __atomic_store_n(&words[1], part.high, __ATOMIC_RELAXED);
  if (is_any) __atomic_store_n(&words[0], part.low, __ATOMIC_RELAXED);
  __syncwarp(together);
  if (is_any && lane == 7) __atomic_store_n(&words[1], part.high, __ATOMIC_RELEASE);
}
inline LinePart load_line(const Line* line, int lane, u32 together) {
  const u64* const words = &line->word[lane * 2];
  LinePart part{0, 0};
  if (lane == 7) part.high = __atomic_load_n(&words[1], __ATOMIC_ACQUIRE);
  __syncwarp(together);
  part.low = __atomic_load_n(&words[0], __ATOMIC_RELAXED);
  if (lane != 7) part.high = __atomic_load_n(&words[1], __ATOMIC_RELAXED);
  return part;
}

// A kernel starts when the one before it has ended.
inline void wait_for_previous() {}
inline void let_next_start() {}

// Bulk copies are late: loads are made when somebody looks for them, stores when somebody waits for
// them. A block is one OS thread, so its copies are variables of that.
struct Landing {
  u64 ended;  // phases
  u32 threads, missing, expected;
};
struct BulkCopy {
  unsigned char* to;
  const unsigned char* from;
  u32 bytes;
  Landing* landing;
};
inline thread_local std::vector<BulkCopy> bulk_loads;
inline thread_local std::deque<std::vector<BulkCopy>> bulk_groups{{}};  // the last is open

inline unsigned char* bulk_memory() {
  alignas(128) static thread_local unsigned char memory[kBulkBytes];
  return memory;
}
inline void open_landing(Landing* landing, u32 threads) { *landing = {0, threads, threads, 0}; }
inline void end_phase(Landing* landing) {
  if (landing->missing != 0 || landing->expected != 0) return;
  ++landing->ended;
  landing->missing = landing->threads;
}
inline void arrive(Landing* landing) {
  --landing->missing;
  end_phase(landing);
}
inline void expect_bytes(Landing* landing, u32 bytes) {
  landing->expected += bytes;
  arrive(landing);
}
inline bool has_landed(Landing* landing, u32 parity) {
  std::vector<BulkCopy> left;
  for (const BulkCopy& load : bulk_loads) {
    if (load.landing != landing) {
      left.push_back(load);
      continue;
    }
    std::memcpy(load.to, load.from, load.bytes);
    landing->expected -= load.bytes;
    end_phase(landing);
  }
  bulk_loads = std::move(left);
  return (landing->ended & 1) != parity;
}
inline void bulk_load(unsigned char* to, const unsigned char* from, u32 bytes, Landing* landing) {
  bulk_loads.push_back({to, from, bytes, landing});
}
inline void bulk_store(unsigned char* to, const unsigned char* from, u32 bytes) {
  bulk_groups.back().push_back({to, from, bytes, nullptr});
}
inline void end_bulk_group() { bulk_groups.emplace_back(); }
template <int kLeft>
inline void wait_bulk_read() {
  while (bulk_groups.size() > kLeft + 1) {
    for (const BulkCopy& store : bulk_groups.front())
      std::memcpy(store.to, store.from, store.bytes);
    bulk_groups.pop_front();
  }
}
inline void wait_bulk_written() {
  wait_bulk_read<0>();
  std::atomic_thread_fence(std::memory_order_seq_cst);
}
inline void bulk_after_all() {}
inline void bulk_after_shared() {}

inline void named_barrier(int id, int threads) { emulated::meet_at(id, threads, true); }
inline void named_arrival(int id, int threads) { emulated::meet_at(id, threads, false); }

inline u64 clock_ns() {
  return static_cast<u64>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                              std::chrono::steady_clock::now().time_since_epoch())
                              .count());
}
inline void poll_again() { emulated::poll(); }

inline float float_of_half_bits(u32 half) {
  return static_cast<float>(emulated_bits<_Float16>(static_cast<unsigned short>(half)));
}
inline u32 half_bits_of_float(float value) {
  return emulated_bits<unsigned short>(static_cast<_Float16>(value));
}
inline u32 half_bits_of_floats(float low, float high) {
  return half_bits_of_float(low) | half_bits_of_float(high) << 16;
}
// The hardware has one NaN.
inline u32 bfloat_bits_of_floats(float low, float high) {
  const auto one = [](float value) {
    const u32 bits = emulated_bits<u32>(value);
    return value != value ? 0x7fffu : (bits + ((bits >> 16 & 1u) + 0x7fffu)) >> 16;
  };
  return one(low) | one(high) << 16;
}

}  // namespace collectives::device
