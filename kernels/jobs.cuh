// Work on memory that a whole block does: copies and combinations, aligned or not.
#pragma once

#include "packs.cuh"

namespace collectives::device {

// One piece's job, made by one thread for its block: dst[..] = src[0] op src[1] op ...
struct Job {
  const unsigned char* src[kMaxRanks];
  unsigned char* dst[kMaxRanks];
  int nsrc, ndst;
  u64 bytes;
  u32 scaled;  // bit i: src[i] is a contribution that premul_sum multiplies
  int divisor;
  bool leave;  // the strand gives up
};

template <class A>
__device__ void finish_value(A& value, const Job& job) {
  if (job.divisor != 1) value.divide(job.divisor);
}

// A pack in the making: two units of 8 bytes or one of 16, in the order of memory.
template <class A>
class PackSum {
 public:
  __device__ __forceinline__ void load(const ulonglong2& raw) {
    const Pack pack = *reinterpret_cast<const Pack*>(&raw);
#pragma unroll
    for (int u = 0; u < kUnits; ++u) value_[u].load(pack.unit[u]);
  }
  __device__ __forceinline__ void add(const ulonglong2& raw) {
    const Pack pack = *reinterpret_cast<const Pack*>(&raw);
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      A operand;
      operand.load(pack.unit[u]);
      value_[u].combine(operand);
    }
  }
  __device__ __forceinline__ ulonglong2 finish(const Job& job) {
    Pack pack;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      finish_value(value_[u], job);
      pack.unit[u] = value_[u].store();
    }
    return *reinterpret_cast<const ulonglong2*>(&pack);
  }

 private:
  static constexpr int kUnits = 16 / sizeof(typename A::Unit);
  struct Pack {
    typename A::Unit unit[kUnits];
  };
  A value_[kUnits];
};

// A thread's next kPacks packs, which are in flight together; with kSome, those that there are.
template <class A, int kPacks, bool kSome>
__device__ __forceinline__ void reduce_packs(const Job& job, u64 at, u64 packs) {
  const auto is_one = [&](int k) { return !kSome || at + k * kThreads < packs; };
  const auto load = [&](int source, ulonglong2* raw) {
    const ulonglong2* from = reinterpret_cast<const ulonglong2*>(job.src[source]);
#pragma unroll
    for (int k = 0; k < kPacks; ++k)
      raw[k] = is_one(k) ? __ldcg(from + at + k * kThreads) : ulonglong2{0, 0};
  };
  PackSum<A> sum[kPacks];
  const auto add = [&](const ulonglong2* raw) {
#pragma unroll
    for (int k = 0; k < kPacks; ++k) sum[k].add(raw[k]);
  };
  // The loads of two sources are in flight at once: a peer's take 1.5 µs.
  ulonglong2 first[kPacks], next[kPacks];
  load(0, first);
  if (job.nsrc > 1) load(1, next);
#pragma unroll
  for (int k = 0; k < kPacks; ++k) sum[k].load(first[k]);
  if (job.nsrc > 1) add(next);
  for (int s = 2; s < job.nsrc; ++s) {
    load(s, next);
    add(next);
  }
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    const ulonglong2 result = sum[k].finish(job);
    for (int d = 0; d < job.ndst && is_one(k); ++d)
      reinterpret_cast<ulonglong2*>(job.dst[d])[at + k * kThreads] = result;
  }
}

// Element by element, from the byte `begin` on: what is not aligned, or less than a pack.
template <class A>
__device__ __noinline__ void reduce_elements(const Job& job, const Arithmetic& arithmetic,
                                             u64 begin) {
  using F = typename A::FormatType;
  for (u64 i = begin + threadIdx.x * F::kElement; i < job.bytes; i += kThreads * F::kElement) {
    A value;
    for (int s = 0; s < job.nsrc; ++s) {
      A operand;
      operand.load(load_element<F>(job.src[s] + i));
      if (A::kSum && (job.scaled >> s & 1) != 0)
        operand.scale(arithmetic.factor[0], arithmetic.factor[1]);
      if (s == 0) {
        value = operand;
      } else {
        value.combine(operand);
      }
    }
    finish_value(value, job);
    for (int d = 0; d < job.ndst; ++d) store_element<F>(job.dst[d] + i, value.store());
  }
}

template <class A>
__device__ __forceinline__ void reduce(const Job& job, const Arithmetic& arithmetic) {
  using F = typename A::FormatType;
  // More packs in flight for the sums that are hot. (Each instance costs seconds to compile.)
  constexpr int kPacks = A::kSum && !F::kComplex && F::kParts <= 4 ? (F::kParts == 4 ? 2 : 4) : 1;
  bool aligned = job.scaled == 0;  // premul_sum goes by elements, which keeps the code small
  for (int s = 0; s < job.nsrc; ++s) aligned = aligned && aligned_to(job.src[s], 16);
  for (int d = 0; d < job.ndst; ++d) aligned = aligned && aligned_to(job.dst[d], 16);
  const u64 packs = aligned ? job.bytes / 16 : 0;
  u64 at = threadIdx.x;
  for (; at + (kPacks - 1) * kThreads < packs; at += kPacks * kThreads)
    reduce_packs<A, kPacks, false>(job, at, packs);
  if constexpr (kPacks > 1)
    if (at < packs) reduce_packs<A, kPacks, true>(job, at, packs);
  reduce_elements<A>(job, arithmetic, packs * 16);
}

template <class A>
__device__ __noinline__ void reduce_job(const Job& job, const Arithmetic& arithmetic) {
  reduce<A>(job, arithmetic);
}

struct Copy {
  const unsigned char* src;
  unsigned char* const* dst;
  int ndst;
  u64 bytes;
};

template <class T, int kAhead>
__device__ __forceinline__ void copy_as(const Copy& c, u64 begin, u64 end) {
  const T* from = reinterpret_cast<const T*>(c.src);
  u64 at = begin / sizeof(T) + threadIdx.x;
  const u64 last = end / sizeof(T);
  for (; at + (kAhead - 1) * kThreads < last; at += kAhead * kThreads) {
    T raw[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) raw[k] = __ldcg(from + at + k * kThreads);
    for (int d = 0; d < c.ndst; ++d) {
#pragma unroll
      for (int k = 0; k < kAhead; ++k) reinterpret_cast<T*>(c.dst[d])[at + k * kThreads] = raw[k];
    }
  }
  if (at >= last) return;
  T raw[kAhead];
#pragma unroll
  for (int k = 0; k < kAhead; ++k)
    if (at + k * kThreads < last) raw[k] = __ldcg(from + at + k * kThreads);
  for (int d = 0; d < c.ndst; ++d) {
#pragma unroll
    for (int k = 0; k < kAhead; ++k)
      if (at + k * kThreads < last) reinterpret_cast<T*>(c.dst[d])[at + k * kThreads] = raw[k];
  }
}

// With so many loads in flight.
template <int kAhead = 8>
__device__ __forceinline__ void copy(const Copy& c) {
  u64 mixed = reinterpret_cast<u64>(c.src);
  for (int d = 0; d < c.ndst; ++d) mixed |= reinterpret_cast<u64>(c.dst[d]);
  u64 done = 0;
  if ((mixed & 15) == 0) {
    done = c.bytes / 16 * 16;
    copy_as<ulonglong2, kAhead>(c, 0, done);
  } else if ((mixed & 3) == 0) {
    done = c.bytes / 4 * 4;
    copy_as<u32, kAhead>(c, 0, done);
  }
  copy_as<unsigned char, kAhead>(c, done, c.bytes);
}
__device__ __noinline__ inline void copy_job(const Job& job) {
  copy({job.src[0], job.dst, job.ndst, job.bytes});
}
__device__ __noinline__ inline void copy_bytes(unsigned char* to, const unsigned char* from,
                                               u64 bytes) {
  copy({from, &to, 1, bytes});
}

// What combines for a reducer. Called through a pointer: with a call site for each of the 59
// functions, each site would get stack slots of its own for what the caller keeps, 4 KB a thread.
using ReduceJob = void (*)(const Job&, const Arithmetic&);
__device__ inline ReduceJob reduce_job_of(const Reducer& reducer) {
  ReduceJob function = nullptr;
  dispatch(reducer, [&](auto accumulator) { function = &reduce_job<decltype(accumulator)>; });
  return function;
}

}  // namespace collectives::device
