// all_to_all by hand: every pair of ranks exchanges blocks, of any lengths.
//
//   each block of threads, for its part of every pair's bytes, chunk by chunk:
//     push      the chunk for each peer into its FIFO, one ahead
//     collect   the chunk from each peer out of its message
//
// A rank sends its part of a pair's bytes before it stores what comes to the same place, so that
// input and output may be one array if all blocks are equal. Only the two ranks of a pair know its
// length: the sender's word of arrival says what it sends, and the receiver compares it.
//
// Nothing is written to a user's array before all ranks agree. The first chunk is on its way by
// then, if all blocks are equal; else only two ranks may know that they disagree, and the others
// hear of it since these send nothing.
//
// Cost: one crossing of the link, and the bytes of the largest block at the speed of the link, with
// all pairs at once. A message is sent four ahead of what its receiver has taken.
#include "cuda_call.hpp"
#include "fifo.cuh"
#include "jobs.cuh"
#include "launch.cuh"

namespace collectives::device {
namespace {

class Exchange : public FifoEnds {
 public:
  __device__ Exchange(const ExchangeCall& call, Crew& crew)
      : FifoEnds(call.world, crew), call_(call) {}

  __device__ bool run(u64 epoch) {
    const auto head = [&](const Share* shares, int q) {
      CallHead pair = call_.head;
      pair.count = shares[q].bytes;
      pair.hash ^= static_cast<u32>(shares[q].bytes * 0x9e3779b97f4a7c15ull >> 32);
      return pair;
    };
    announce_all(epoch, [&](int q) { return head(call_.send, q); });
    const auto expected = [&](int q) { return head(call_.receive, q); };
    if (call_.alike && !push(0)) return false;
    if (!agree(expected, false) || (!call_.alike && !push(0))) return false;
    const int rank = world_.rank;
    const u64 own = call_.send[rank].bytes;
    for (u32 c = 0; c < call_.chunks; ++c) {
      if (!push(c + 1) || !collect(c)) return false;
      if (!works()) continue;
      const Span s = span(own, c);
      const unsigned char* const from = call_.input + call_.send[rank].begin + s.begin;
      unsigned char* const to = call_.output + call_.receive[rank].begin + s.begin;
      if (from != to) copy_bytes(to, from, s.bytes);
    }
    return true;
  }

 private:
  struct Span {
    u64 begin, bytes;
  };
  // Chunk c of what this block has of a pair's bytes.
  __device__ Span span(u64 all, u32 c) const {
    const u64 each = part(all);
    const u64 from = min(all, u64(block_) * each), to = min(all, from + each);
    const u64 begin = min(to, from + u64(c) * call_.chunk_bytes);
    return {begin, min(to - begin, call_.chunk_bytes)};
  }
  __device__ u64 part(u64 all) const {
    return ((all + gridDim.x - 1) / gridDim.x + 127) / 128 * 128;
  }
  // Both ranks of a pair, and all blocks of both, count the same messages.
  __device__ bool has(const Share* shares, int q, u32 c) const {
    return u64(c) * call_.chunk_bytes < part(shares[q].bytes);
  }

  __device__ bool push(u32 c) {
    if (c >= call_.chunks) return true;
    const bool mine = for_peer_ && has(call_.send, peer_, c);
    if (!wait(mine, false)) return false;
    for (int k = 1; works() && k < world_.nranks; ++k) {
      const int q = (world_.rank + k) % world_.nranks;
      if (!has(call_.send, q, c)) continue;
      const Span s = span(call_.send[q].bytes, c);
      copy_bytes(slot_there(q, c), call_.input + call_.send[q].begin + s.begin, s.bytes);
    }
    return tell(mine, false);
  }
  __device__ bool collect(u32 c) {
    const bool theirs = for_peer_ && has(call_.receive, peer_, c);
    if (!wait(false, theirs)) return false;
    for (int k = 1; works() && k < world_.nranks; ++k) {
      const int q = (world_.rank + world_.nranks - k) % world_.nranks;
      if (!has(call_.receive, q, c)) continue;
      const Span s = span(call_.receive[q].bytes, c);
      copy_bytes(call_.output + call_.receive[q].begin + s.begin, slot_here(q, c), s.bytes);
    }
    return tell(false, theirs);
  }

  const ExchangeCall& call_;
};

__global__ void __launch_bounds__(kCrewThreads, 1)
    exchange_kernel(const __grid_constant__ ExchangeCall call) {
  __shared__ Crew crew;
  Exchange strand(call, crew);
  const Entry entry = enter_together(call.world, [&] { strand.load(); });
  const u32 ticket = count_block(call.world);
  if (!has_left(call.world, entry) && strand.run(entry.epoch)) strand.keep();
  finish_call(call.world, entry.epoch, ticket);
}

}  // namespace

int launch_exchange(const ExchangeCall& call, int blocks, void* stream) {
  return launch(exchange_kernel, {blocks, kCrewThreads}, stream, call);
}

int exchange_residency(int* blocks) {
  return residency_of<ExchangeCall>({exchange_kernel}, blocks, kCrewThreads);
}

}  // namespace collectives::device
