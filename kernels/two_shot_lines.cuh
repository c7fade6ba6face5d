// direct_two_shot's all_reduce in lines, without a barrier: for three and more ranks, from where
// one shot sends too much up to where a block's messages (direct_two_shot.cu) are worth their
// signals.
//
//   scatter   each rank sends every peer that one's share of its array
//   combine   each waits for the n - 1 others' lines of its share, adds in rank order, rounds once,
//             puts the result into its own output and sends it to every peer
//   collect   each puts what the others have combined into its output
//
// Lines of the first step lie in the first call.parcels of what a pair has, those of the second
// behind them. A thread goes through all of its lines in one step before the next, so it waits only
// once all that it sends before has been sent; it needs no other thread of its rank.
//
// Nothing is written before all are known to be in the same call: a rank writes its own share when
// it has a line of each, and another's when that one has, which said so with the same flags. Two
// buffers, by parity, are enough, as in one shot.
//
// Cost: two crossings of the link, 5 µs or so; 16/15 · 2 (n - 1) / n S bytes sent.
#pragma once

#include "parcels.cuh"

namespace collectives::device {

template <class A>
class TwoSteps {
 public:
  __device__ explicit TwoSteps(const OneShotCall& call)
      : call_(call),
        world_(call.world),
        first_((blockIdx.x * blockDim.x + threadIdx.x) / Lines::kHands),
        step_(gridDim.x * blockDim.x / Lines::kHands) {}

  __device__ void load_first() {
    if (first_ < call_.parcels) load(first_, 1);
  }

  // False if the rank gave up.
  __device__ bool run(u64 epoch) {
    const Flags flags(call_, epoch);
    LookAround slow{call_, epoch};
    const int parity = static_cast<int>(epoch & 1);
    scatter(flags, parity);
    return combine(flags, parity, epoch, slow) && collect(flags, parity, epoch, slow);
  }

 private:
  static constexpr int kUnits = Lines::kUnits;
  static constexpr int kTogether = 4;  // lines to or from different peers in flight together

  __device__ int peer(int k) const { return (world_.rank + k) % world_.nranks; }
  // A warp goes through its lines together; of these, some may be behind the end.
  __device__ bool goes_on(u64 number) const { return number - lines_.ahead() < call_.parcels; }

  // Of the shares of the k-th peer and those behind it.
  __device__ void load(u64 number, int from) {
#pragma unroll
    for (int a = 0; a < kTogether; ++a) {
      if (from + a >= world_.nranks) break;
      load_share(peer(from + a), number, raw_[a]);
    }
  }
  __device__ void load_share(int owner, u64 number, u64* units) const {
    const Parcels& share = call_.send[owner];
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const u64 at = lines_.at(number, u);
      units[u] = lines_.carries(u) && at < share.bytes
                     ? load_unit(call_.input + share.begin + at, share.bytes - at)
                     : 0;
    }
  }
  __device__ void store_share(int owner, u64 number, const u64* units) const {
    const Parcels& share = call_.receive[owner];
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const u64 at = lines_.at(number, u);
      if (lines_.carries(u) && at < share.bytes)
        store_unit(call_.output + share.begin + at, share.bytes - at, units[u]);
    }
  }

  __device__ void scatter(const Flags& flags, int parity) {
    for (u64 number = first_; goes_on(number); number += step_) {
      for (int from = 1; from < world_.nranks; from += kTogether) {
        if (number != first_ || from != 1) load(number, from);
#pragma unroll
        for (int a = 0; a < kTogether; ++a) {
          if (from + a >= world_.nranks) break;
          u64 own[kUnits];
#pragma unroll
          for (int u = 0; u < kUnits; ++u) own[u] = contribution<Combination<A>>(call_, raw_[a][u]);
          lines_.send(world_, peer(from + a), parity, number, number < call_.parcels, own, flags);
        }
      }
    }
  }

  __device__ bool combine(const Flags& flags, int parity, u64 epoch, LookAround& slow) {
    for (u64 number = first_; goes_on(number); number += step_) {
      const bool is_any = number < call_.parcels;
      const u64 wanted = min(number, u64(call_.parcels) - 1);
      u64 units[kUnits];
      load_share(world_.rank, number, units);
#pragma unroll
      for (int u = 0; u < kUnits; ++u) units[u] = contribution<Combination<A>>(call_, units[u]);
      Combination<A> sum[kUnits];
      const auto take = [&](int q, const u64* theirs) {
#pragma unroll
        for (int u = 0; u < kUnits; ++u) sum[u].add(q, theirs[u]);
      };
      if (!receive_from_all<Combination<A>::kTogether>(
              world_, lines_, parity, flags, epoch, [&](int) { return wanted; }, units, slow, take))
        return false;
#pragma unroll
      for (int u = 0; u < kUnits; ++u) units[u] = sum[u].result(call_);
      for (int k = 1; k < world_.nranks; ++k)
        lines_.send(world_, peer(k), parity, call_.parcels + number, is_any, units, flags);
      if (is_any) store_share(world_.rank, number, units);
    }
    return true;
  }

  __device__ bool collect(const Flags& flags, int parity, u64 epoch, LookAround& slow) {
    for (u64 number = first_; goes_on(number); number += step_) {
      const bool is_any = number < call_.parcels;
      const u64 wanted = call_.parcels + min(number, u64(call_.parcels) - 1);
      const auto take = [&](int q, const u64* theirs) {
        if (is_any && q != world_.rank) store_share(q, number, theirs);
      };
      const u64 none[kUnits] = {};
      if (!receive_from_all<Combination<A>::kTogether>(
              world_, lines_, parity, flags, epoch, [&](int) { return wanted; }, none, slow, take))
        return false;
    }
    return true;
  }

  const OneShotCall& call_;
  const DeviceWorld& world_;
  const Lines lines_{};
  const u64 first_, step_;
  u64 raw_[kTogether][kUnits] = {};
};

template <class A>
__global__ void __launch_bounds__(kThreads, 1)
    two_shot_lines_kernel(const __grid_constant__ OneShotCall call) {
  TwoSteps<A> steps(call);
  wait_for_previous();
  if (call.early) let_next_start();
  steps.load_first();
  const Entry entry = enter(call.world);
  const bool left = __any_sync(Lines::kTogether, has_left(call.world, entry)) != 0;
  const u32 ticket = count_warps(call.world);
  if (!left) steps.run(entry.epoch);
  finish_call(call.world, entry.epoch, ticket);
}

}  // namespace collectives::device
