// What multiprocessors do in calls by copy engines (csrc/cuda_copies.cpp): the kernels between the
// copies and the waits of a stream. None waits for a peer, but for what has arrived already.
//
// Cost: each is over within microseconds, in blocks that find room one by one beside others.
#include "jobs.cuh"
#include "launch.cuh"
#include "signal.cuh"

namespace collectives::device {
namespace {

__device__ void tell_host(const CopiesStep& step) {
  if (blockIdx.x == 0 && threadIdx.x == 0) store_relaxed(&step.world.control->moves, step.moves);
}

__global__ void copies_begin(const __grid_constant__ CopiesStep step) {
  const Entry entry = enter(step.world);
  const int q = static_cast<int>(threadIdx.x);
  if ((entry.left | entry.poison) == 0 && q < step.world.nranks && q != step.world.rank)
    announce(step.world, step.head, entry.epoch, q);
  tell_host(step);
}

// This block's part of a copy or combination.
struct Part {
  u64 begin, bytes;
};
__device__ Part part_of(const CopiesStep& step, u64 all) {
  const u64 begin = min(all, u64(blockIdx.x) * step.part);
  return {begin, min(step.part, all - begin)};
}

// This rank has left, but what is on its stream goes on: copies of what it has not combined, into
// landings that peers may still read, and words. So all peers hear of it before, whoever left
// first: a kernel that ends without this has seen nothing but what its peers meant.
__device__ void pass_on(const DeviceWorld& w) {
  const u32 poison = load_relaxed(&poison_of(w, w.rank));
  if (poison == 0) return;  // it left first, and has told all
  for (int q = 0; q < w.nranks; ++q)
    if (q != w.rank) store_release(&poison_of(w, q), poison);
}

// Does the work if all ranks are in this call. (They have told so before the stream went on.)
template <class Work>
__device__ void take_part(const CopiesStep& step, Work work) {
  const DeviceWorld& w = step.world;
  tell_host(step);
  const Entry entry = enter_together(w, [] {});
  const u32 ticket = step.last ? count_block(w) : 0;
  const bool all_are_here = agree(w, step.head, entry);
  if (all_are_here) {
    work();
    __syncthreads();
  }
  if (threadIdx.x == 0 && (!all_are_here || has_left(w, enter(w)))) pass_on(w);
  if (step.last) finish_call(w, entry.epoch, ticket);
}

template <class A>
__global__ void __launch_bounds__(kThreads)
    copies_combine(const __grid_constant__ CopiesStep step) {
  __shared__ Job job;
  if (threadIdx.x == 0) {
    const Part part = part_of(step, step.bytes[0]);
    job.bytes = part.bytes;
    job.nsrc = step.count;
    for (int i = 0; i < step.count; ++i) job.src[i] = step.src[i] + part.begin;
    job.ndst = 1;
    job.dst[0] = step.dst[0] + part.begin;
    job.divisor = step.arithmetic.divisor;
    job.scaled = step.arithmetic.scaled ? (1u << step.count) - 1 : 0;
  }
  take_part(step, [&] {
    if constexpr (__is_same(A, void)) {
      reduce_job_of(step.arithmetic.reducer)(job, step.arithmetic);
    } else {
      reduce<A>(job, step.arithmetic);
    }
  });
}

__global__ void __launch_bounds__(kThreads) copies_place(const __grid_constant__ CopiesStep step) {
  take_part(step, [&] {
    for (int i = 0; i < step.count; ++i) {
      const Part part = part_of(step, step.bytes[i]);
      copy_bytes(step.dst[i] + part.begin, step.src[i] + part.begin, part.bytes);
    }
  });
}

// One thread.
__global__ void copies_look(const __grid_constant__ CopiesLook look) {
  const DeviceWorld& w = look.world;
  const Entry entry = enter(w);
  State& own = state_of(w, w.rank);
  if (entry.left == 0) {
    int peer = -1;
    u64 seen = 0;
    for (int q = 0; q < w.nranks && peer < 0; ++q) {
      if (q == w.rank) continue;
      seen = load_acquire(&own.moved[q]);
      if (seen < look.exchange) peer = q;
    }
    if (peer < 0) return;  // it goes on by itself
    const u64 arrival = load_relaxed(&own.arrivals[entry.epoch & 1][peer].word);
    const Phase phase = u32(arrival >> 32) == u32(entry.epoch) ? Phase::message : Phase::arrival;
    const Waiting what{phase, peer, -1, -1, -1, entry.epoch, look.exchange};
    if (!must_leave(w, what, clock_ns() - look.waited_ns, seen)) return;
  }
  for (int q = 0; q < w.nranks; ++q) store_release(&own.moved[q], kReleased);
}

using StepKernel = void (*)(CopiesStep);
StepKernel kernel_of(const CopiesStep& step) {
  if (!step.combines) return copies_place;
  return with_fast_sum(step.arithmetic.reducer, [](auto sum) -> StepKernel {
    return copies_combine<typename decltype(sum)::Type>;
  });
}

constexpr int kOneWarp = 32;
static_assert(kMaxRanks <= kOneWarp);

}  // namespace

int launch_copies_begin(const CopiesStep& step, void* stream) {
  return launch(copies_begin, {1, kOneWarp}, stream, step);
}
int launch_copies_step(const CopiesStep& step, int blocks, void* stream) {
  return launch(kernel_of(step), {blocks, kThreads}, stream, step);
}
int launch_copies_look(const CopiesLook& look, void* stream) {
  return launch(copies_look, {1, 1}, stream, look);
}

int load_copies() {
  int blocks = 0;
  const int error = residency_of<CopiesStep>(
      {copies_begin, copies_place, copies_combine<Float32Sum>, copies_combine<Bfloat16Sum>,
       copies_combine<Float16Sum>, copies_combine<void>},
      &blocks);
  cudaFuncAttributes attributes;
  return error != cudaSuccess ? error : cudaFuncGetAttributes(&attributes, copies_look);
}

}  // namespace collectives::device
