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
// the flag. `together` is their mask.
struct alignas(128) Line {
  u64 word[16];
};
struct LinePart {
  u64 low, high;
};
__device__ inline void store_line(Line* line, int lane, u32 together, const LinePart& part) {
  __syncwarp(together);  // one access of all eight
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

}  // namespace collectives::device
