// What the kernels of direct_two_shot have in common: an array divided into shares, one for each of
// the ranks that combine or hand on; a share is cut over the blocks, and what a block has over
// chunks of a FIFO's slot.
#pragma once

#include "cuda_call.hpp"
#include "fifo.cuh"
#include "jobs.cuh"
#include "launch.cuh"

namespace collectives::device {

// Made for each of the accumulators whose speed counts, and once for any other (void).
template <class A>
class Sharing : public FifoEnds {
 protected:
  __device__ Sharing(const TwoShotCall& call, Crew& crew)
      : FifoEnds(call.world, crew), call_(call) {
    if constexpr (__is_same(A, void))
      if (call.gather != Gather::none) reduce_ = reduce_job_of(call.arithmetic.reducer);
  }

  // Chunk c of what this block has of a rank's share.
  struct Span {
    u64 begin, bytes;
  };
  __device__ Span span(int owner, u32 c) const {
    const u64 all = call_.share[owner].bytes;
    const u64 from = min(all, u64(block_) * call_.block_bytes);
    const u64 to = min(all, from + call_.block_bytes);
    const u64 begin = min(to, from + u64(c) * call_.chunk_bytes);
    return {begin, min(to - begin, call_.chunk_bytes)};
  }

  // A job without sources and destinations yet.
  __device__ void begin_job(Job& job, u64 bytes) const {
    job.nsrc = job.ndst = 0;
    job.bytes = bytes;
    job.divisor = call_.arithmetic.divisor;
    job.scaled = call_.arithmetic.scaled ? (1u << world_.nranks) - 1 : 0;
  }
  __device__ void work(const Job& job) const {
    if (job.bytes == 0 || job.ndst == 0) return;
    if (call_.gather == Gather::none) {
      copy_job(job);
    } else if constexpr (__is_same(A, void)) {
      reduce_(job, call_.arithmetic);
    } else {
      reduce<A>(job, call_.arithmetic);
    }
  }

  const TwoShotCall& call_;

 private:
  ReduceJob reduce_ = nullptr;
};

// The kernel of a Sharing, which has run() and names what its threads share.
template <class Strand>
__global__ void __launch_bounds__(kCrewThreads, 1)
    share_kernel(const __grid_constant__ TwoShotCall call) {
  __shared__ typename Strand::Shared shared;
  Strand strand(call, shared);
  const Entry entry = enter_together(call.world, [&] { strand.load(); });
  const u32 ticket = count_block(call.world);
  if (!has_left(call.world, entry) && strand.run(entry.epoch)) strand.keep();
  finish_call(call.world, entry.epoch, ticket);
}

using ShareKernel = void (*)(TwoShotCall);

template <template <class> class Strand>
ShareKernel share_kernel_of(const TwoShotCall& call) {
  return with_fast_sum(call.arithmetic.reducer, [](auto sum) -> ShareKernel {
    return share_kernel<Strand<typename decltype(sum)::Type>>;
  });
}
template <template <class> class Strand>
int share_residency(int* blocks) {
  return residency_of<TwoShotCall>(
      {share_kernel<Strand<Float32Sum>>, share_kernel<Strand<Bfloat16Sum>>,
       share_kernel<Strand<Float16Sum>>, share_kernel<Strand<void>>},
      blocks, kCrewThreads);
}

}  // namespace collectives::device
