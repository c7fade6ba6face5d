// What goes between ranks in packets or lines: small pieces that carry flags, so that a reader
// knows at once that one is whole, and needs no barrier.
//
// A packet is 8 bytes of data with two flags, written with one 16-byte store. The flags say which
// call it belongs to (44 bits of the epoch, so that a stale packet is never taken for a new one)
// and of what signature (20 bits of its hash). Either flag says so of its own half, which may come
// before the other: the second is another for each call, also of calls that are alike.
//
// A line is 128 bytes that eight threads write at once: 120 bytes of data, and 8 of the same flags.
// NVLink keeps a line whole, so its one flag tells of all of it. PTX does not promise that: lines
// are for GPUs whose link also does atomics, which is NVLink.
//
// A mismatch costs the fast path nothing: a rank that waits long announces its call and looks at
// what the others have announced.
#pragma once

#include "cuda_call.hpp"
#include "packs.cuh"
#include "signal.cuh"

namespace collectives::device {

template <class A>
__device__ __noinline__ u64 combine_units(const u64* units, int n, int divisor) {
  A value;
  value.load(units[0]);
  for (int q = 1; q < n; ++q) {
    A operand;
    operand.load(units[q]);
    value.combine(operand);
  }
  if (divisor != 1) value.divide(divisor);
  return value.store();
}

template <class A>
__device__ __noinline__ u64 scale_unit(u64 unit, double re, double im) {
  A value;
  value.load(unit);
  value.scale(re, im);
  return value.store();
}

// complex128 sums are sums of doubles; its products do not fit a unit and are refused by the host.
template <class Function>
__device__ inline void dispatch_unit(const Reducer& reducer, Function&& f) {
  if (reducer.format == static_cast<u32>(Format::complex128)) {
    f(Accumulator<Float64Format, SumOp>());
  } else {
    dispatch(reducer, [&](auto a) {
      if constexpr (sizeof(typename decltype(a)::Unit) == 8) f(a);
    });
  }
}

__device__ inline u64 load_unit(const unsigned char* p, u64 bytes) {
  if (bytes >= 8) return load_small<8>(p);
  u64 v = 0;
  for (u64 i = 0; i < bytes; ++i) v |= static_cast<u64>(p[i]) << (8 * i);
  return v;
}
__device__ inline void store_unit(unsigned char* p, u64 bytes, u64 v) {
  if (bytes >= 8) return store_small<8>(p, v);
  for (u64 i = 0; i < bytes; ++i) p[i] = static_cast<unsigned char>(v >> (8 * i));
}

// (One copy of each of these: as many calls in line take minutes to compile.)
__device__ __noinline__ inline u64 result_of(const Arithmetic& arithmetic, const u64* units,
                                             int n) {
  u64 result = 0;
  dispatch_unit(arithmetic.reducer,
                [&](auto a) { result = combine_units<decltype(a)>(units, n, arithmetic.divisor); });
  return result;
}

__device__ __noinline__ inline u64 scaled_by_any(const Arithmetic& arithmetic, u64 unit) {
  u64 result = unit;
  dispatch_unit(arithmetic.reducer, [&](auto a) {
    result = scale_unit<decltype(a)>(unit, arithmetic.factor[0], arithmetic.factor[1]);
  });
  return result;
}

// What comes of the units of all ranks, which are added in rank order. Kernels are made for each of
// the accumulators whose speed counts, once for any other (void), and once for no reduction.
template <class A>
class Combination {
 public:
  static constexpr bool kReduces = true;
  static constexpr int kTogether = 4;  // parcels of different peers that are looked at together
  __device__ static u64 scaled(const Arithmetic& arithmetic, u64 unit) {
    return scale_unit<A>(unit, arithmetic.factor[0], arithmetic.factor[1]);
  }
  __device__ void add(int q, u64 unit) {
    A operand;
    operand.load(unit);
    if (q == 0) {
      value_ = operand;
    } else {
      value_.combine(operand);
    }
  }
  __device__ u64 result(const OneShotCall& call) {
    if (call.arithmetic.divisor != 1) value_.divide(call.arithmetic.divisor);
    return value_.store();
  }

 private:
  A value_;
};
template <>
class Combination<void> {
 public:
  static constexpr bool kReduces = true;
  static constexpr int kTogether = 1;  // which compiles in a fraction of the time
  __device__ static u64 scaled(const Arithmetic& arithmetic, u64 unit) {
    return scaled_by_any(arithmetic, unit);
  }
  __device__ void add(int q, u64 unit) { unit_[q] = unit; }
  __device__ u64 result(const OneShotCall& call) {
    return result_of(call.arithmetic, unit_, call.world.nranks);
  }

 private:
  u64 unit_[kMaxRanks];
};

// This rank's contribution, of what lies in memory.
template <class Work>
__device__ u64 contribution(const OneShotCall& call, u64 unit) {
  if constexpr (Work::kReduces) {
    if (call.arithmetic.scaled) return Work::scaled(call.arithmetic, unit);
  }
  return unit;
}

// What a thread that waits long does: the first one looks whether all are in the same call.
struct LookAround {
  const OneShotCall& call;
  u64 epoch;
  bool announced = false;
  __device__ bool operator()() {
    if (blockIdx.x != 0 || threadIdx.x != 0) return false;
    bool other = false;
    for (int q = 0; q < call.world.nranks; ++q) {
      if (q == call.world.rank) continue;
      if (!announced) announce(call.world, call.head, epoch, q);
      other = other || disagrees(call.world, call.head, epoch, q);
    }
    announced = true;
    return other;
  }
};

// The flags of a call, beside its data.
struct Flags {
  u32 first, second;
  __device__ Flags(const OneShotCall& call, u64 epoch)
      : first(static_cast<u32>(epoch)),
        second((static_cast<u32>(epoch >> 32) << 20 | (call.head.hash & 0xfffffu)) ^
               first * kSpread) {}

 private:
  // Odd: each epoch's product is another. Its bits are far from those of the hash.
  static constexpr u32 kSpread = 0x9e3779b1u;
};

// How units travel: kUnits of a thread in each parcel, which kHands threads of a warp handle.
struct Packets {
  static constexpr int kHands = 1, kUnits = 1;

  // Of the threads that go together, the one with the lowest parcel: as far behind this one.
  __device__ u64 ahead() const { return 0; }

  // Where a unit lies, in bytes, in what a pair of ranks exchanges.
  __device__ u64 at(u64 number, int) const { return number * 8; }
  __device__ bool carries(int) const { return true; }
  __device__ bool any(bool leave) const { return leave; }
  __device__ void send(const DeviceWorld& world, int to, int parity, u64 number, bool is_any,
                       const u64* unit, const Flags& flags) const {
    if (!is_any) return;
    store_packet(packets_of(world, to, world.rank, parity) + number, unit[0], flags.first,
                 flags.second);
  }
  // What lies there, and its units, if it is whole.
  using Found = Packet;
  __device__ Found fetch(const DeviceWorld& world, int from, int parity, u64 number) const {
    return load_packet(packets_of(world, world.rank, from, parity) + number);
  }
  __device__ bool open(const Found& p, u64* unit, const Flags& flags, u64& seen) const {
    seen = p.low_flag;
    unit[0] = static_cast<u64>(p.high) << 32 | p.low;
    return p.low_flag == flags.first && p.high_flag == flags.second;
  }
};

// Each of the eight threads has two units, but the last one: it has one, and the flags. A warp goes
// through its four lines together: apart, they would take turns.
struct Lines {
  static constexpr int kHands = kLineThreads, kUnits = 2;
  static constexpr u32 kTogether = 0xffffffffu;
  const int lane = static_cast<int>(threadIdx.x % kLineThreads);
  const bool last = lane == kLineThreads - 1;

  __device__ u64 ahead() const { return threadIdx.x % 32 / kLineThreads; }
  __device__ u64 at(u64 number, int u) const { return (number * kLineUnits + lane * 2 + u) * 8; }
  __device__ bool carries(int u) const { return u == 0 || !last; }
  __device__ bool any(bool leave) const { return __any_sync(kTogether, leave) != 0; }
  __device__ static u64 flag_of(const Flags& flags) {
    return static_cast<u64>(flags.second) << 32 | flags.first;
  }
  __device__ void send(const DeviceWorld& world, int to, int parity, u64 number, bool is_any,
                       const u64* unit, const Flags& flags) const {
    store_line(lines_of(world, to, world.rank, parity) + number, lane, kTogether, is_any,
               {unit[0], last ? flag_of(flags) : unit[1]});
  }
  using Found = LinePart;
  __device__ Found fetch(const DeviceWorld& world, int from, int parity, u64 number) const {
    return load_line(lines_of(world, world.rank, from, parity) + number, lane, kTogether);
  }
  __device__ bool open(const Found& part, u64* unit, const Flags& flags, u64& seen) const {
    unit[0] = part.low;
    unit[1] = part.high;
    const u64 flag = __shfl_sync(kTogether, part.high, kLineThreads - 1, kLineThreads);
    seen = static_cast<u32>(flag);  // of the epoch
    return __all_sync(kTogether, flag == flag_of(flags)) != 0;
  }
};

// What a rank has sent is read by `take(q, units)`, for all ranks in order; this rank's is `own`.
// The parcels of kTogether of them, whose numbers `wanted(q)` tells, are looked at together, since
// each look takes 0.7 µs. False if the rank gave up.
template <int kTogether, class Carrier, class Wanted, class Slow, class Take>
__device__ inline bool receive_from_all(const DeviceWorld& world, const Carrier& carrier,
                                        int parity, const Flags& flags, u64 epoch, Wanted wanted,
                                        const u64* own, Slow& slow, Take take) {
  const int n = world.nranks, rank = world.rank;
  for (int first = 0; first < n; first += kTogether) {
    typename Carrier::Found found[kTogether];
#pragma unroll
    for (int a = 0; a < kTogether; ++a) {
      const int q = first + a;
      if (q < n && q != rank) found[a] = carrier.fetch(world, q, parity, wanted(q));
    }
#pragma unroll
    for (int a = 0; a < kTogether; ++a) {
      const int q = first + a;
      if (q >= n) break;
      u64 theirs[Carrier::kUnits];
#pragma unroll
      for (int u = 0; u < Carrier::kUnits; ++u) theirs[u] = own[u];
      u64 seen = 0;
      if (q != rank && !carrier.open(found[a], theirs, flags, seen)) {
        const Waiting what{Phase::packet, q, static_cast<int>(blockIdx.x), -1, -1, epoch, epoch};
        const u64 number = wanted(q);
        const auto ready = [&](u64& now) {
          return carrier.open(carrier.fetch(world, q, parity, number), theirs, flags, now);
        };
        const auto any = [&](bool leave) { return carrier.any(leave); };
        if (!wait_until(world, what, ready, slow, any)) return false;
      }
      take(q, theirs);
    }
  }
  return true;
}

}  // namespace collectives::device
