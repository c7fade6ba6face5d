// all_reduce in one step for small arrays: every rank sends all it has to everybody, in packets
// that need no barrier.
//
//   rank 0   x0 ──┬── packets ──> buffer [parity][from 0] of ranks 1, 2, ...
//                 └─ waits for packets from 1, 2, ...; result = ((x0 + x1) + x2) + ...
//
// A packet is 8 bytes of data with two flags, written with one 16-byte store, so a reader knows at
// once that it is whole. The flags say which call it belongs to (44 bits of the epoch, so that a
// stale packet is never taken for a new one) and of what signature (20 bits of its hash). Two
// buffers, by parity, are enough: a rank's call k needs every peer's call k - 1.
//
// A line is 128 bytes that eight threads write at once: 120 bytes of data, and 8 of the same flags.
// NVLink keeps a line whole, so its one flag tells of all of it. PTX does not promise that: lines
// are for GPUs whose link also does atomics, which is NVLink.
//
// All ranks combine in rank order and so get equal bits; narrow floats are rounded once. Cost: one
// crossing of the link, 2.5 µs or so; 2 (n - 1) S bytes sent as packets, 16/15 (n - 1) S as lines.
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

// All ranks' contributions to a unit, which come in rank order. The kernel is made for each of the
// accumulators whose speed counts, and once for any other (void).
template <class A>
class Combination {
 public:
  __device__ void add(int q, u64 unit) {
    A operand;
    operand.load(unit);
    if (q == 0) {
      value_ = operand;
    } else {
      value_.combine(operand);
    }
  }
  __device__ u64 result(const Arithmetic& arithmetic, int) {
    if (arithmetic.divisor != 1) value_.divide(arithmetic.divisor);
    return value_.store();
  }

 private:
  A value_;
};
template <>
class Combination<void> {
 public:
  __device__ void add(int q, u64 unit) { unit_[q] = unit; }
  __device__ u64 result(const Arithmetic& arithmetic, int n) {
    return result_of(arithmetic, unit_, n);
  }

 private:
  u64 unit_[kMaxRanks];
};

// This rank's contribution.
__device__ u64 own_unit(const OneShotCall& call, u64 i) {
  const u64 unit = load_unit(call.input + i * 8, call.bytes - i * 8);
  if (!call.arithmetic.scaled) return unit;
  u64 scaled = unit;
  dispatch_unit(call.arithmetic.reducer, [&](auto a) {
    scaled = scale_unit<decltype(a)>(unit, call.arithmetic.factor[0], call.arithmetic.factor[1]);
  });
  return scaled;
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
__device__ inline u32 first_flag(u64 epoch) { return static_cast<u32>(epoch); }
__device__ inline u32 second_flag(const OneShotCall& call, u64 epoch) {
  return static_cast<u32>(epoch >> 32) << 20 | (call.head.hash & 0xfffffu);
}

template <class A>
__global__ void __launch_bounds__(kThreads)
    packets_kernel(const __grid_constant__ OneShotCall call) {
  const DeviceWorld& world = call.world;
  const u64 units = (call.bytes + 7) / 8;
  u64 i = blockIdx.x * blockDim.x + threadIdx.x;
  // The first load is in flight together with those of the entry.
  u64 own = i < units ? own_unit(call, i) : 0;
  const Entry entry = enter(world);
  const u64 epoch = entry.epoch;
  const int parity = static_cast<int>(epoch & 1), n = world.nranks, rank = world.rank;
  const u32 flag = first_flag(epoch), second = second_flag(call, epoch);
  LookAround slow{call, epoch};
  bool failed = has_left(world, entry);
  while (i < units && !failed) {
    for (int k = 1; k < n; ++k) {
      const int q = rank + k < n ? rank + k : rank + k - n;
      store_packet(packets_of(world, q, rank, parity) + i, own, flag, second);
    }
    Combination<A> all;
    for (int q = 0; q < n && !failed; ++q) {
      u64 theirs = own;
      if (q != rank) {
        const Packet* from = packets_of(world, rank, q, parity) + i;
        const Waiting what{Phase::packet, q, static_cast<int>(blockIdx.x), -1, -1, epoch, epoch};
        const auto ready = [&](u64& seen) {
          const Packet p = load_packet(from);
          seen = p.low_flag;
          theirs = static_cast<u64>(p.high) << 32 | p.low;
          return p.low_flag == flag && p.high_flag == second;
        };
        failed = !wait_until(world, what, ready, slow);
      }
      all.add(q, theirs);
    }
    if (failed) break;
    store_unit(call.output + i * 8, call.bytes - i * 8, all.result(call.arithmetic, n));
    i += gridDim.x * blockDim.x;
    if (i < units) own = own_unit(call, i);
  }
  finish_call(world, epoch);
}

// Eight threads of a warp that go together handle a line: two units each, but one and the flags the
// last.
template <class A>
__global__ void __launch_bounds__(kThreads) lines_kernel(const __grid_constant__ OneShotCall call) {
  constexpr int kUnits = kLineUnits;
  const DeviceWorld& world = call.world;
  const u64 units = (call.bytes + 7) / 8, lines = (units + kUnits - 1) / kUnits;
  const int lane = static_cast<int>(threadIdx.x % kLineThreads);
  const bool last = lane == kLineThreads - 1;
  const u32 together = 0xffu << (threadIdx.x % 32 - lane);
  const u64 step = gridDim.x * (blockDim.x / kLineThreads);
  u64 line = blockIdx.x * (blockDim.x / kLineThreads) + threadIdx.x / kLineThreads;
  const auto load = [&](u64 number, u64 own[2]) {
    const u64 i = number * kUnits + lane * 2;
    own[0] = i < units ? own_unit(call, i) : 0;
    own[1] = !last && i + 1 < units ? own_unit(call, i + 1) : 0;
  };
  u64 own[2] = {0, 0};
  if (line < lines) load(line, own);
  const Entry entry = enter(world);
  const u64 epoch = entry.epoch;
  const int parity = static_cast<int>(epoch & 1), n = world.nranks, rank = world.rank;
  const u64 flag = static_cast<u64>(second_flag(call, epoch)) << 32 | first_flag(epoch);
  LookAround slow{call, epoch};
  bool failed = __any_sync(together, has_left(world, entry)) != 0;
  while (line < lines && !failed) {
    for (int k = 1; k < n; ++k) {
      const int q = rank + k < n ? rank + k : rank + k - n;
      store_line(lines_of(world, q, rank, parity) + line, lane, together,
                 {own[0], last ? flag : own[1]});
    }
    Combination<A> low, high;
    for (int q = 0; q < n && !failed; ++q) {
      LinePart theirs{own[0], own[1]};
      if (q != rank) {
        const Line* from = lines_of(world, rank, q, parity) + line;
        const Waiting what{Phase::packet, q, static_cast<int>(blockIdx.x), -1, -1, epoch, epoch};
        const auto ready = [&](u64& seen) {
          theirs = load_line(from, lane, together);
          seen = __shfl_sync(together, theirs.high, kLineThreads - 1, kLineThreads);
          return seen == flag;
        };
        const auto any = [&](bool leave) { return __any_sync(together, leave) != 0; };
        failed = !wait_until(world, what, ready, slow, any);
      }
      low.add(q, theirs.low);
      high.add(q, theirs.high);
    }
    if (failed) break;
    const u64 i = line * kUnits + lane * 2;
    if (i < units)
      store_unit(call.output + i * 8, call.bytes - i * 8, low.result(call.arithmetic, n));
    if (!last && i + 1 < units)
      store_unit(call.output + i * 8 + 8, call.bytes - i * 8 - 8, high.result(call.arithmetic, n));
    line += step;
    if (line < lines) load(line, own);
  }
  finish_call(world, epoch);
}

using Kernel = void (*)(OneShotCall);

Kernel kernel_of(const OneShotCall& call) {
  const bool lines = call.lines;
  if (call.arithmetic.reducer.op == static_cast<u32>(Combine::sum)) {
    switch (static_cast<Format>(call.arithmetic.reducer.format)) {
      case Format::float32:
        return lines ? lines_kernel<Float32Sum> : packets_kernel<Float32Sum>;
      case Format::bfloat16:
        return lines ? lines_kernel<Bfloat16Sum> : packets_kernel<Bfloat16Sum>;
      case Format::float16:
        return lines ? lines_kernel<Float16Sum> : packets_kernel<Float16Sum>;
      default:
        break;
    }
  }
  return lines ? lines_kernel<void> : packets_kernel<void>;
}

}  // namespace

int launch_one_shot(const OneShotCall& call, int blocks, void* stream) {
  return launch(kernel_of(call), {blocks, kThreads}, stream, call);
}

int one_shot_residency(int* blocks) {
  return residency_of<OneShotCall>(
      {packets_kernel<Float32Sum>, packets_kernel<Bfloat16Sum>, packets_kernel<Float16Sum>,
       packets_kernel<void>, lines_kernel<Float32Sum>, lines_kernel<Bfloat16Sum>,
       lines_kernel<Float16Sum>, lines_kernel<void>},
      blocks);
}

}  // namespace collectives::device
