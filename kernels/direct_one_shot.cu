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
// Every rank sends every peer at least one packet or line, be it empty, and a thread writes results
// only when it has seen one from each. So nothing is written before all are known to be in the same
// call; and two buffers, by parity, are enough: a rank's call k needs every peer's call k - 1. What
// a thread waits for may be behind the end of what a short block has: then it is the block's last.
//
// All combine in rank order and so get equal bits; narrow floats are rounded once. Cost: one
// crossing of the link, 2.5 µs or so; a share of S bytes is 2 S bytes as packets, 16/15 S as lines.
//
// direct_two_shot's all_reduce in lines (two_shot_lines.cuh) is compiled here too, since each
// reduction that they share takes long to.
#include "cuda_call.hpp"
#include "launch.cuh"
#include "parcels.cuh"
#include "two_shot_lines.cuh"

namespace collectives::device {
namespace {

class Concatenation {
 public:
  static constexpr bool kReduces = false;
  static constexpr int kTogether = 4;
  __device__ void add(int q, u64 unit) { unit_[q] = unit; }
  template <class Shares>
  __device__ void deliver(const OneShotCall& call, const Shares& shares, u64 at) const {
    for (int q = 0; q < call.world.nranks; ++q) {
      const Parcels& to = shares.received(call, q);
      if (at < to.bytes) store_unit(call.output + to.begin + at, to.bytes - at, unit_[q]);
    }
  }

 private:
  u64 unit_[kMaxRanks];
};

// all_reduce: every rank sends all it has to everybody, which is known when the kernel is compiled,
// and saves a tenth of the time.
template <int kParcels>
struct Whole {
  static constexpr int kAhead = 1, kMostThreads = kWholeThreads;
  static constexpr int kTogether = kParcels;  // parcels that are looked at together
  __device__ bool alike(const OneShotCall&) const { return true; }
  __device__ const Parcels& sent(const OneShotCall& call, int) const { return call.send[0]; }
  __device__ const Parcels& received(const OneShotCall& call, int) const { return call.receive[0]; }
};
// Any other: each pair of ranks has a share of its own.
template <bool kCanBeAlike>
struct Each {
  static constexpr int kAhead = 4;  // parcels to different peers whose data are loaded at once
  static constexpr int kMostThreads = kThreads, kTogether = 4;
  __device__ bool alike(const OneShotCall& call) const { return kCanBeAlike && call.alike; }
  __device__ const Parcels& sent(const OneShotCall& call, int q) const { return call.send[q]; }
  __device__ const Parcels& received(const OneShotCall& call, int q) const {
    return call.receive[q];
  }
};

// Into this rank's output, at `at` of what it receives.
template <class Shares, class Work>
__device__ void deliver(const OneShotCall& call, const Shares& shares, u64 at, Work& work) {
  if constexpr (Work::kReduces) {
    const Parcels& to = shares.received(call, call.world.rank);
    if (at < to.bytes) store_unit(call.output + to.begin + at, to.bytes - at, work.result(call));
  } else {
    work.deliver(call, shares, at);
  }
}

template <class Carrier, class Work, class Shares>
__global__ void __launch_bounds__(Shares::kMostThreads, 1)
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
  const u32 ticket = count_warps(world);
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
    const auto wanted = [&](int q) {
      return min(number, static_cast<u64>(shares.received(call, q).parcels) - 1);
    };
    const auto take = [&](int q, const u64* units) {
#pragma unroll
      for (int u = 0; u < kUnits; ++u) work[u].add(q, units[u]);
    };
    constexpr int kTogether =
        Shares::kTogether < Work::kTogether ? Shares::kTogether : Work::kTogether;
    failed =
        !receive_from_all<kTogether>(world, carrier, parity, flags, epoch, wanted, own, slow, take);
    if (failed) break;
#pragma unroll
    for (int u = 0; u < kUnits; ++u)
      if (carrier.carries(u)) deliver(call, shares, carrier.at(number, u), work[u]);
    number += step;
    if (number < call.parcels) load(0);
  }
  finish_call(world, epoch, ticket);
}

using Kernel = void (*)(OneShotCall);

// What has no sum of its own looks at one parcel at a time however many there are: one kernel less.
template <class Sum, class Shares>
struct Taken {
  using Type = Shares;
};
template <>
struct Taken<void, Whole<4>> {
  using Type = Whole<1>;
};
template <class Carrier, class Sum, class Shares>
constexpr Kernel kCombining =
    one_shot_kernel<Carrier, Combination<Sum>, typename Taken<Sum, Shares>::Type>;

template <class Carrier, class Shares>
Kernel reducing(const OneShotCall& call) {
  return with_fast_sum(call.arithmetic.reducer, [](auto sum) -> Kernel {
    return kCombining<Carrier, typename decltype(sum)::Type, Shares>;
  });
}

template <class Carrier>
Kernel kernel_of(const OneShotCall& call) {
  if (!call.reduces) return one_shot_kernel<Carrier, Concatenation, Each<true>>;
  if (!call.alike) return reducing<Carrier, Each<false>>(call);
  return call.world.nranks == 2 ? reducing<Carrier, Whole<1>>(call)
                                : reducing<Carrier, Whole<4>>(call);
}

template <class Carrier, class Shares>
int residency_reducing(int* blocks) {
  return residency_of<OneShotCall>(
      {kCombining<Carrier, Float32Sum, Shares>, kCombining<Carrier, Bfloat16Sum, Shares>,
       kCombining<Carrier, Float16Sum, Shares>, kCombining<Carrier, void, Shares>},
      blocks, Shares::kMostThreads);
}

template <class Carrier>
int residency(OneShotResidency* blocks) {
  int gathers = 0, many = 0;
  if (const int error = residency_reducing<Carrier, Whole<1>>(&blocks->whole)) return error;
  if (const int error = residency_reducing<Carrier, Whole<4>>(&many)) return error;
  blocks->whole = min(blocks->whole, many);
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
  *blocks = {min(packets.whole, lines.whole), min(packets.shares, lines.shares), 0};
  return 0;
}

int launch_two_shot_lines(const OneShotCall& call, int blocks, void* stream) {
  const Kernel kernel = with_fast_sum(call.arithmetic.reducer, [](auto sum) -> Kernel {
    return two_shot_lines_kernel<typename decltype(sum)::Type>;
  });
  return launch(kernel, {blocks, static_cast<int>(call.threads), call.early}, stream, call);
}

int two_shot_lines_residency(int* blocks) {
  return residency_of<OneShotCall>(
      {two_shot_lines_kernel<Float32Sum>, two_shot_lines_kernel<Bfloat16Sum>,
       two_shot_lines_kernel<Float16Sum>, two_shot_lines_kernel<void>},
      blocks);
}

}  // namespace collectives::device
