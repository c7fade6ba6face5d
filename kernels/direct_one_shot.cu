// Small calls in one step: every rank sends to each peer what that one needs, in packets or lines
// that need no barrier.
//
//   all_reduce       the whole array to all; each combines all n in rank order
//   reduce_scatter   to each its block; each combines the n copies of its own in rank order
//   all_gather       the own block to all, who put it in its place
//   all_to_all       the block of each to it, if all blocks are equal
//   broadcast, scatter, gather, reduce   likewise, from the root or to it
//
//   rank 0   x0 ──┬── packets ──> buffer [parity][from 0] of ranks 1, 2, ...
//                 └─ waits for packets from 1, 2, ...; result = ((x0 + x1) + x2) + ...
//
// A packet is 8 bytes of data with two flags, written with one 16-byte store, so a reader knows at
// once that it is whole. The flags say which call it belongs to (44 bits of the epoch, so that a
// stale packet is never taken for a new one) and of what signature (20 bits of its hash).
//
// A line is 128 bytes that eight threads write at once: 120 bytes of data, and 8 of the same flags.
// NVLink keeps a line whole, so its one flag tells of all of it. PTX does not promise that: lines
// are for GPUs whose link also does atomics, which is NVLink.
//
// Every rank sends every peer at least one packet or line, be it empty, and a thread writes results
// only when it has seen one from each. So nothing is written before all are known to be in the same
// call; and two buffers, by parity, are enough: a rank's call k needs every peer's call k - 1. What
// a thread waits for may be behind the end of what a short block has: then it is the block's last.
//
// All combine in rank order and so get equal bits; narrow floats are rounded once. Cost: one
// crossing of the link, 2.5 µs or so; a share of S bytes is 2 S bytes as packets, 16/15 S as lines.
//
// A mismatch costs the fast path nothing: a rank that waits long announces its call and looks at
// what the others have announced.
#include "cuda_call.hpp"
#include "launch.cuh"
#include "packs.cuh"
#include "signal.cuh"

namespace collectives::device {
namespace {

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

__device__ u64 load_unit(const unsigned char* p, u64 bytes) {
  if (bytes >= 8) return load_small<8>(p);
  u64 v = 0;
  for (u64 i = 0; i < bytes; ++i) v |= static_cast<u64>(p[i]) << (8 * i);
  return v;
}
__device__ void store_unit(unsigned char* p, u64 bytes, u64 v) {
  if (bytes >= 8) return store_small<8>(p, v);
  for (u64 i = 0; i < bytes; ++i) p[i] = static_cast<unsigned char>(v >> (8 * i));
}

__device__ u64 result_of(const Arithmetic& arithmetic, const u64* units, int n) {
  u64 result = 0;
  dispatch_unit(arithmetic.reducer,
                [&](auto a) { result = combine_units<decltype(a)>(units, n, arithmetic.divisor); });
  return result;
}

// What comes of the units of all ranks, which are added in rank order. Kernels are made for each of
// the accumulators whose speed counts, once for any other (void), and once for no reduction.
template <class A>
class Combination {
 public:
  static constexpr bool kReduces = true;
  __device__ void add(int q, u64 unit) {
    A operand;
    operand.load(unit);
    if (q == 0) {
      value_ = operand;
    } else {
      value_.combine(operand);
    }
  }
  template <class Shares>
  __device__ void deliver(const OneShotCall& call, const Shares& shares, u64 at) {
    const Parcels& to = shares.received(call, call.world.rank);
    if (at >= to.bytes) return;
    if (call.arithmetic.divisor != 1) value_.divide(call.arithmetic.divisor);
    store_unit(call.output + to.begin + at, to.bytes - at, value_.store());
  }

 private:
  A value_;
};
template <>
class Combination<void> {
 public:
  static constexpr bool kReduces = true;
  __device__ void add(int q, u64 unit) { unit_[q] = unit; }
  template <class Shares>
  __device__ void deliver(const OneShotCall& call, const Shares& shares, u64 at) {
    const Parcels& to = shares.received(call, call.world.rank);
    if (at >= to.bytes) return;
    store_unit(call.output + to.begin + at, to.bytes - at,
               result_of(call.arithmetic, unit_, call.world.nranks));
  }

 private:
  u64 unit_[kMaxRanks];
};
class Concatenation {
 public:
  static constexpr bool kReduces = false;
  __device__ void add(int q, u64 unit) { unit_[q] = unit; }
  template <class Shares>
  __device__ void deliver(const OneShotCall& call, const Shares& shares, u64 at) {
    for (int q = 0; q < call.world.nranks; ++q) {
      const Parcels& to = shares.received(call, q);
      if (at < to.bytes) store_unit(call.output + to.begin + at, to.bytes - at, unit_[q]);
    }
  }

 private:
  u64 unit_[kMaxRanks];
};

// This rank's contribution, of what lies in memory.
template <class Work>
__device__ u64 contribution(const OneShotCall& call, u64 unit) {
  if constexpr (Work::kReduces) {
    if (call.arithmetic.scaled) {
      u64 scaled = unit;
      dispatch_unit(call.arithmetic.reducer, [&](auto a) {
        scaled =
            scale_unit<decltype(a)>(unit, call.arithmetic.factor[0], call.arithmetic.factor[1]);
      });
      return scaled;
    }
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
        second(static_cast<u32>(epoch >> 32) << 20 | (call.head.hash & 0xfffffu)) {}
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
  __device__ bool receive(const DeviceWorld& world, int from, int parity, u64 number, u64* unit,
                          const Flags& flags, u64& seen) const {
    const Packet p = load_packet(packets_of(world, world.rank, from, parity) + number);
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
  __device__ bool receive(const DeviceWorld& world, int from, int parity, u64 number, u64* unit,
                          const Flags& flags, u64& seen) const {
    const LinePart part =
        load_line(lines_of(world, world.rank, from, parity) + number, lane, kTogether);
    unit[0] = part.low;
    unit[1] = part.high;
    seen = __shfl_sync(kTogether, part.high, kLineThreads - 1, kLineThreads);
    return __all_sync(kTogether, seen == flag_of(flags)) != 0;
  }
};

// all_reduce: every rank sends all it has to everybody, which is known when the kernel is compiled,
// and saves a tenth of the time.
struct Whole {
  static constexpr int kAhead = 1, kMostThreads = kWholeThreads;
  __device__ bool alike(const OneShotCall&) const { return true; }
  __device__ const Parcels& sent(const OneShotCall& call, int) const { return call.send[0]; }
  __device__ const Parcels& received(const OneShotCall& call, int) const { return call.receive[0]; }
};
// Any other: each pair of ranks has a share of its own.
template <bool kCanBeAlike>
struct Each {
  static constexpr int kAhead = 4;  // parcels to different peers whose data are loaded at once
  static constexpr int kMostThreads = kThreads;
  __device__ bool alike(const OneShotCall& call) const { return kCanBeAlike && call.alike; }
  __device__ const Parcels& sent(const OneShotCall& call, int q) const { return call.send[q]; }
  __device__ const Parcels& received(const OneShotCall& call, int q) const {
    return call.receive[q];
  }
};

template <class Carrier, class Work, class Shares>
__global__ void __launch_bounds__(Shares::kMostThreads)
    one_shot_kernel(const __grid_constant__ OneShotCall call) {
  constexpr int kUnits = Carrier::kUnits, kAhead = Shares::kAhead;
  const Shares shares{};
  const bool alike = shares.alike(call);
  const DeviceWorld& world = call.world;
  const int n = world.nranks, rank = world.rank;
  const Carrier carrier{};
  const u64 step = gridDim.x * (blockDim.x / Carrier::kHands);
  u64 number = blockIdx.x * (blockDim.x / Carrier::kHands) + threadIdx.x / Carrier::kHands;
  const auto peer = [&](int k) { return rank + k < n ? rank + k : rank + k - n; };
  // What goes to this rank itself and to those behind it, from the k-th on; where all get the same,
  // only that.
  u64 raw[kAhead][kUnits] = {};
  const auto load = [&](int from) {
    const int loads = alike ? 1 : n;
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (from + a >= loads) break;
      const Parcels& share = shares.sent(call, peer(from + a));
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        const u64 at = carrier.at(number, u);
        raw[a][u] = carrier.carries(u) && at < share.bytes
                        ? load_unit(call.input + share.begin + at, share.bytes - at)
                        : 0;
      }
    }
  };
  // (In this order: else the one after the next could be there too, and so on.)
  wait_for_previous();
  if (call.early) let_next_start();
  // The first loads are in flight together with those of the entry.
  if (number < call.parcels) load(0);
  const Entry entry = enter(world);
  const u64 epoch = entry.epoch;
  const int parity = static_cast<int>(epoch & 1);
  const Flags flags(call, epoch);
  LookAround slow{call, epoch};
  bool failed = carrier.any(has_left(world, entry));
  while (number - carrier.ahead() < call.parcels && !failed) {
    const bool is_any = number < call.parcels;
    u64 own[kUnits];
#pragma unroll
    for (int u = 0; u < kUnits; ++u) own[u] = contribution<Work>(call, raw[0][u]);
    if (alike) {
      for (int k = 1; k < n; ++k) carrier.send(world, peer(k), parity, number, is_any, own, flags);
    } else {
      for (int from = 0; from < n; from += kAhead) {
        if (from != 0) load(from);
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
          const int k = from + a;
          if (k == 0 || k >= n) continue;
          const bool sends = number < shares.sent(call, peer(k)).parcels;
          u64 theirs[kUnits];
#pragma unroll
          for (int u = 0; u < kUnits; ++u) theirs[u] = contribution<Work>(call, raw[a][u]);
          carrier.send(world, peer(k), parity, number, sends, theirs, flags);
        }
      }
    }
    Work work[kUnits];
    for (int q = 0; q < n && !failed; ++q) {
      u64 theirs[kUnits];
#pragma unroll
      for (int u = 0; u < kUnits; ++u) theirs[u] = own[u];
      if (q != rank) {
        const u64 wanted = min(number, static_cast<u64>(shares.received(call, q).parcels) - 1);
        const Waiting what{Phase::packet, q, static_cast<int>(blockIdx.x), -1, -1, epoch, epoch};
        const auto ready = [&](u64& seen) {
          return carrier.receive(world, q, parity, wanted, theirs, flags, seen);
        };
        const auto any = [&](bool leave) { return carrier.any(leave); };
        failed = !wait_until(world, what, ready, slow, any);
      }
#pragma unroll
      for (int u = 0; u < kUnits; ++u) work[u].add(q, theirs[u]);
    }
    if (failed) break;
#pragma unroll
    for (int u = 0; u < kUnits; ++u)
      if (carrier.carries(u)) work[u].deliver(call, shares, carrier.at(number, u));
    number += step;
    if (number < call.parcels) load(0);
  }
  finish_call(world, epoch);
}

using Kernel = void (*)(OneShotCall);

template <class Carrier, class Shares>
Kernel reducing(const OneShotCall& call) {
  if (call.arithmetic.reducer.op == static_cast<u32>(Combine::sum)) {
    switch (static_cast<Format>(call.arithmetic.reducer.format)) {
      case Format::float32:
        return one_shot_kernel<Carrier, Combination<Float32Sum>, Shares>;
      case Format::bfloat16:
        return one_shot_kernel<Carrier, Combination<Bfloat16Sum>, Shares>;
      case Format::float16:
        return one_shot_kernel<Carrier, Combination<Float16Sum>, Shares>;
      default:
        break;
    }
  }
  return one_shot_kernel<Carrier, Combination<void>, Shares>;
}

template <class Carrier>
Kernel kernel_of(const OneShotCall& call) {
  if (!call.reduces) return one_shot_kernel<Carrier, Concatenation, Each<true>>;
  return call.alike ? reducing<Carrier, Whole>(call) : reducing<Carrier, Each<false>>(call);
}

template <class Carrier, class Shares>
int residency_reducing(int* blocks) {
  return residency_of<OneShotCall>({one_shot_kernel<Carrier, Combination<Float32Sum>, Shares>,
                                    one_shot_kernel<Carrier, Combination<Bfloat16Sum>, Shares>,
                                    one_shot_kernel<Carrier, Combination<Float16Sum>, Shares>,
                                    one_shot_kernel<Carrier, Combination<void>, Shares>},
                                   blocks, Shares::kMostThreads);
}

template <class Carrier>
int residency(OneShotResidency* blocks) {
  int gathers = 0;
  if (const int error = residency_reducing<Carrier, Whole>(&blocks->whole)) return error;
  if (const int error = residency_reducing<Carrier, Each<false>>(&blocks->shares)) return error;
  if (const int error = residency_of<OneShotCall>(
          {one_shot_kernel<Carrier, Concatenation, Each<true>>}, &gathers))
    return error;
  blocks->shares = min(blocks->shares, gathers);
  return 0;
}

}  // namespace

int launch_one_shot(const OneShotCall& call, int blocks, void* stream) {
  return launch(call.lines ? kernel_of<Lines>(call) : kernel_of<Packets>(call),
                {blocks, static_cast<int>(call.threads), call.early}, stream, call);
}

int one_shot_residency(OneShotResidency* blocks) {
  OneShotResidency packets, lines;
  if (const int error = residency<Packets>(&packets)) return error;
  if (const int error = residency<Lines>(&lines)) return error;
  *blocks = {min(packets.whole, lines.whole), min(packets.shares, lines.shares)};
  return 0;
}

}  // namespace collectives::device
