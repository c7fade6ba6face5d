// Instructions that C++ has no words for, with their memory orders. tests/emulated/primitives.cuh
// says the same for a host compiler; the include path chooses. What they are for: signal.cuh.
#pragma once

#include "cuda_call.hpp"

namespace collectives::device {

// ---- flags: words that one rank writes and another polls, so all are of system scope -----------

__device__ inline void store_release(u32* p, u32 v) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ inline void store_release(u64* p, u64 v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ inline u32 load_acquire(const u32* p) {
  u32 v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ inline u64 load_acquire(const u64* p) {
  u64 v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
// Words that carry no data with them.
__device__ inline u32 load_relaxed(const u32* p) {
  u32 v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ inline u64 load_relaxed(const u64* p) {
  u64 v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
// Both relaxed, in one access.
struct Two {
  u64 first, second;
};
__device__ inline Two load_two(const u64* p) {
  Two v;
  asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(v.first), "=l"(v.second)
               : "l"(p)
               : "memory");
  return v;
}
__device__ inline void store_relaxed(u32* p, u32 v) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ inline void store_relaxed(u64* p, u64 v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

// ---- packets and lines: data and flags in one access -------------------------------------------

// 8 bytes of data and two flags, one beside each half, in one 16-byte access. Only 8 bytes are
// promised to arrive together, so each half has its flag, and no order is needed.
struct Packet {
  u32 low, low_flag, high, high_flag;
};
__device__ inline void store_packet(Packet* p, u64 data, u32 flag, u32 second) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(u32(data)),
               "r"(flag), "r"(u32(data >> 32)), "r"(second)
               : "memory");
}
__device__ inline Packet load_packet(const Packet* p) {
  Packet v;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.low), "=r"(v.low_flag), "=r"(v.high), "=r"(v.high_flag)
               : "l"(p)
               : "memory");
  return v;
}

// 128 bytes that eight threads of a warp store and load at once, two words each; the last word is
// the flag. `together` is the mask of all that come here at once, `is_any` that a thread has a
// line.
struct alignas(128) Line {
  u64 word[16];
};
struct LinePart {
  u64 low, high;
};
__device__ inline void store_line(Line* line, int lane, u32 together, bool is_any,
                                  const LinePart& part) {
  __syncwarp(together);  // one access of all eight
  if (!is_any) return;
  asm volatile("st.volatile.global.v2.u64 [%0], {%1, %2};" ::"l"(&line->word[lane * 2]),
               "l"(part.low), "l"(part.high)
               : "memory");
}
__device__ inline LinePart load_line(const Line* line, int lane, u32 together) {
  LinePart part;
  __syncwarp(together);
  asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(part.low), "=l"(part.high)
               : "l"(&line->word[lane * 2])
               : "memory");
  return part;
}

// ---- kernels that follow each other -------------------------------------------------------------

// Of kernels that are launched early (launch.cuh): GPUs before Hopper know none.
__device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Once a thread of each block has said it.
__device__ inline void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// ---- bulk copies between shared and global memory, by a unit of the multiprocessor --------------
//
// GPUs before Hopper have none, and are never asked for them.

// Where bulk loads land: an mbarrier.
struct Landing {
  u64 word;
};

// Shared memory beyond what a kernel declares: as much as it was launched with.
__device__ inline unsigned char* bulk_memory() {
  extern __shared__ __align__(128) unsigned char memory[];
  return memory;
}
#if __CUDA_ARCH__ >= 900
__device__ inline u32 shared_address(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}
// A phase ends when so many threads have arrived, and all bytes that they expected have come.
__device__ inline void open_landing(Landing* landing, u32 threads) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(landing)), "r"(threads));
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void arrive(Landing* landing) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(landing)) : "memory");
}
// Arrives, and expects bytes.
__device__ inline void expect_bytes(Landing* landing, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(landing)),
               "r"(bytes)
               : "memory");
}
// Has the phase of this parity ended? (A phase's parity is that of the number of those before it.)
__device__ inline bool has_landed(Landing* landing, u32 parity) {
  u32 landed;
  asm volatile(
      "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
      : "=r"(landed)
      : "r"(shared_address(landing)), "r"(parity)
      : "memory");
  return landed != 0;
}
__device__ inline void bulk_load(unsigned char* to, const unsigned char* from, u32 bytes,
                                 Landing* landing) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(landing))
      : "memory");
}
__device__ inline void bulk_store(unsigned char* to, const unsigned char* from, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
}
// A thread's stores since the last one are a group.
__device__ inline void end_bulk_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until the shared memory of all groups but the last kLeft has been read.
template <int kLeft>
__device__ inline void wait_bulk_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLeft) : "memory");
}
// Waits until all that this thread has stored in bulk is written.
__device__ inline void wait_bulk_written() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  asm volatile("fence.proxy.async;" ::: "memory");
}
// Bulk copies that are started later come after what this thread has seen, and stored to shared
// memory.
__device__ inline void bulk_after_all() { asm volatile("fence.proxy.async;" ::: "memory"); }
__device__ inline void bulk_after_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
#else
__device__ inline void open_landing(Landing*, u32) {}
__device__ inline void arrive(Landing*) {}
__device__ inline void expect_bytes(Landing*, u32) {}
__device__ inline bool has_landed(Landing*, u32) { return true; }
__device__ inline void bulk_load(unsigned char*, const unsigned char*, u32, Landing*) {}
__device__ inline void bulk_store(unsigned char*, const unsigned char*, u32) {}
__device__ inline void end_bulk_group() {}
template <int kLeft>
__device__ inline void wait_bulk_read() {}
__device__ inline void wait_bulk_written() {}
__device__ inline void bulk_after_all() {}
__device__ inline void bulk_after_shared() {}
#endif

// ---- threads of a block that meet ---------------------------------------------------------------

// `threads` of a block, whole warps, meet at barrier `id`, 1 to 15.
__device__ inline void named_barrier(int id, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same, but the caller goes on.
__device__ inline void named_arrival(int id, int threads) {
  asm volatile("barrier.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- time ---------------------------------------------------------------------------------------

__device__ inline u64 clock_ns() {
  u64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}
// Between two polls of a wait.
__device__ inline void poll_again() {}

// ---- conversions: the hardware's, of numbers that are not NaN ----------------------------------

__device__ inline float float_of_half_bits(u32 half) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(static_cast<unsigned short>(half)));
  return r;
}
__device__ inline u32 half_bits_of_float(float value) {
  unsigned short r;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(value));
  return r;
}
// Of two numbers, the first in the lower half.
__device__ inline u32 half_bits_of_floats(float low, float high) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ inline u32 bfloat_bits_of_floats(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

}  // namespace collectives::device
