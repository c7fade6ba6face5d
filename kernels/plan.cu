// The interpreter: one kernel that runs the lowered program of any schedule (csrc/plan.hpp).
//
// A block is a strand: a channel and a lane. It walks the channel's steps for the segments of its
// lane, a few segments together, and meets peers in FIFOs, which lie in the receiver's memory:
//
//   sender                                   receiver
//   wait until the slot is released          wait until the slot is filled
//   write the pieces into it, over NVLink    read them from own memory, combine, store
//   filled = number of the message           released = messages taken out, at the sender
//
// Before the first step all ranks agree that they are in the same call: each announces its epoch
// and signature to all peers. So a mismatch is found before anything is written, and a call returns
// only after all ranks have entered it, which is all that a barrier is.
//
// Cost: about 3 µs to start and agree, and 1 to 2 µs for each message on the longest chain; large
// messages go at the speed of the link, with enough strands. Limits: kMaxRanks ranks; all blocks of
// all ranks must be resident at once (the host sees to that).
#include "cuda_call.hpp"
#include "jobs.cuh"
#include "launch.cuh"
#include "signal.cuh"

namespace collectives::device {
namespace {

// ---- spans of chunks: the same rules as csrc/layout.hpp -----------------------------------------

struct Span {
  u64 offset, length;
};

__device__ u64 length_of(const FlatBlocks& b, int q) {
  return b.table ? b.length[q] : b.each + (static_cast<u64>(q) < b.extra);
}
__device__ u64 offset_of(const FlatBlocks& b, int q) {
  return b.table ? b.offset[q] : q * b.each + min(static_cast<u64>(q), b.extra);
}

__device__ Span flat_span(const FlatLayout& l, int chunk, u64 s) {
  const u64 stride = l.segment * l.nchunks, base = s * stride;
  const u64 total = min(stride, l.count > base ? l.count - base : 0);
  u64 each = total == stride ? l.segment : (total + l.nchunks - 1) / l.nchunks;
  if (each >= 4 * l.align)
    each = min((each + l.align - 1) / l.align * l.align, max(l.segment, each));
  const u64 begin = min(total, each * chunk);
  return {base + begin, min(total, begin + each) - begin};
}

__device__ Span within(const FlatLayout& l, u64 offset, u64 length, int sub, u64 s) {
  const u64 each = l.per_block == 1 ? length : (length + l.per_block - 1) / l.per_block;
  const u64 begin = min(length, each * sub), end = min(length, begin + each);
  const u64 from = min(end, begin + s * l.segment);
  return {offset + from, min(end - from, l.segment)};
}

__device__ Span input_span(const FlatLayout& l, int chunk, u64 s) {
  if (l.flat) return flat_span(l, chunk, s);
  switch (l.collective) {
    case Collective::all_gather:
    case Collective::gather:
      return within(l, 0, length_of(l.out, chunk / l.per_block), chunk % l.per_block, s);
    case Collective::all_to_all:
      return within(l, offset_of(l.in, chunk % l.nranks), length_of(l.in, chunk % l.nranks), 0, s);
    default:
      return within(l, offset_of(l.in, chunk / l.per_block), length_of(l.in, chunk / l.per_block),
                    chunk % l.per_block, s);
  }
}

__device__ Span output_span(const FlatLayout& l, int chunk, u64 s) {
  if (l.flat) return flat_span(l, chunk, s);
  switch (l.collective) {
    case Collective::reduce_scatter:
    case Collective::scatter:
      return within(l, 0, length_of(l.in, chunk / l.per_block), chunk % l.per_block, s);
    case Collective::all_to_all:
      return within(l, offset_of(l.out, chunk / l.nranks), length_of(l.out, chunk / l.nranks), 0,
                    s);
    default:
      return within(l, offset_of(l.out, chunk / l.per_block), length_of(l.out, chunk / l.per_block),
                    chunk % l.per_block, s);
  }
}

__device__ u64 chunk_length(const FlatLayout& l, int chunk, u64 s) {
  if (l.flat) return flat_span(l, chunk, s).length;
  if (l.collective == Collective::all_to_all)
    return chunk / l.nranks == l.rank ? input_span(l, chunk, s).length
                                      : output_span(l, chunk, s).length;
  const bool by_output =
      l.collective == Collective::all_gather || l.collective == Collective::gather;
  return by_output ? output_span(l, chunk, s).length : input_span(l, chunk, s).length;
}

// ---- a strand -----------------------------------------------------------------------------------

// Programs up to this long lie in shared memory: each look at device memory takes 0.7 µs.
constexpr int kNearSteps = 96, kNearPieces = 160;

struct Shared {
  alignas(8) unsigned char steps[kNearSteps * sizeof(Step)];
  alignas(8) unsigned char pieces[kNearPieces * sizeof(Piece)];
  Job job[2];
  u32 sent[kMaxRanks], received[kMaxRanks];
  bool leave;
};

class Strand {
 public:
  __device__ Strand(const PlanCall& call, Shared& shared)
      : call_(call),
        world_(call.world),
        shared_(shared),
        strand_(blockIdx.x),
        channel_(blockIdx.x % max(1, call.channels)),
        lane_(blockIdx.x / max(1, call.channels)),
        reduce_(reduce_job_of(call.arithmetic.reducer)),
        steps_(call.steps + call.channel[channel_].first_step),
        pieces_(call.pieces + call.channel[channel_].first_piece) {}

  // Brings what the strand works by near, while the block enters.
  __device__ void load() {
    const int q = threadIdx.x;
    if (q < world_.nranks) {
      const FifoControl& control = fifo_of(world_, world_.rank, q, strand_);
      shared_.sent[q] = control.sent;
      shared_.received[q] = control.received;
    }
    const ChannelRange& range = call_.channel[channel_];
    if (range.steps > kNearSteps || range.pieces > kNearPieces) return;
    const u32* steps = reinterpret_cast<const u32*>(call_.steps + range.first_step);
    const u32* pieces = reinterpret_cast<const u32*>(call_.pieces + range.first_piece);
    for (int i = q; i < range.steps * int(sizeof(Step) / 4); i += kThreads)
      reinterpret_cast<u32*>(shared_.steps)[i] = steps[i];
    for (int i = q; i < range.pieces * int(sizeof(Piece) / 4); i += kThreads)
      reinterpret_cast<u32*>(shared_.pieces)[i] = pieces[i];
    steps_ = reinterpret_cast<const Step*>(shared_.steps);
    pieces_ = reinterpret_cast<const Piece*>(shared_.pieces);
  }

  __device__ void run(u64 epoch) {
    epoch_ = epoch;
    const int q = threadIdx.x;
    const int steps = call_.channel[channel_].steps;
    const u64 segments = call_.layout.segments, batch = u64(call_.lanes) * call_.together;
    bool whole = true;
    // Each step for all segments of a batch: while one is on its way, the others are worked at.
    // Both ends of a FIFO do so, and messages keep their order, as (batch, step, segment).
    for (u64 first = lane_; whole && first < segments; first += batch)
      for (int i = 0; whole && i < steps; ++i)
        for (at_ = 0; whole && at_ < call_.together; ++at_) {
          const u64 s = first + u64(call_.lanes) * at_;
          if (s < segments) whole = run_step(i, s);
        }
    __syncthreads();
    if (q < world_.nranks) {
      FifoControl& control = fifo_of(world_, world_.rank, q, strand_);
      control.sent = shared_.sent[q];
      control.received = shared_.received[q];
    }
  }

 private:
  __device__ bool run_step(int number, u64 s) {
    const Step& step = steps_[number];
    const bool receives = step.recv_peer >= 0, sends = step.send_peer >= 0;
    const bool combines = step.kind == StepKind::combine;
    const int jobs = combines ? 1 : step.npieces;
    u64 at = 0;
    for (int k = 0; k < jobs; ++k) {
      Job& job = shared_.job[turn_ & 1];
      ++turn_;
      if (threadIdx.x == 0) {
        prepare(job, step, step.first_piece + k, s, at);  // while messages are on their way
        job.leave = k == 0 && !wait(step, number, s);
      }
      __syncthreads();
      if (job.leave) return false;
      if (job.bytes != 0 && job.ndst != 0) {
        if (job.nsrc == 1 && job.scaled == 0 && job.divisor == 1) {
          copy_job(job);
        } else {
          reduce_(job, call_.arithmetic);
        }
      }
      at += (job.bytes + 15) / 16 * 16;
    }
    if (!receives && !sends) return true;
    __syncthreads();
    if (threadIdx.x == 0) {
      if (sends) {
        const u32 message = ++shared_.sent[step.send_peer];
        store_release(
            &fifo_of(world_, step.send_peer, world_.rank, strand_).filled[(message - 1) % kDepth],
            message);
      }
      if (receives) {
        const u32 taken = ++shared_.received[step.recv_peer];
        // Relaxed: what was read has been used, or the stores before the barrier had not issued.
        store_relaxed(&fifo_of(world_, step.recv_peer, world_.rank, strand_).released, taken);
      }
    }
    return true;
  }

  // For the step's message and for room for the one that it sends. One thread.
  __device__ bool wait(const Step& step, int number, u64 s) {
    Waiting what{Phase::message, step.recv_peer, strand_, number, step.round, epoch_, s};
    if (step.recv_peer >= 0) {
      const u32 message = shared_.received[step.recv_peer];
      const u32* filled =
          &fifo_of(world_, world_.rank, step.recv_peer, strand_).filled[message % kDepth];
      if (!wait_until(world_, what, [&](u64& seen) {
            seen = load_acquire(filled);
            return u32(seen) == message + 1;
          }))
        return false;
    }
    if (step.send_peer >= 0) {
      const u32 message = shared_.sent[step.send_peer];
      const u32* released = &fifo_of(world_, world_.rank, step.send_peer, strand_).released;
      what.phase = Phase::slot;
      what.peer = step.send_peer;
      if (!wait_until(world_, what, [&](u64& seen) {
            seen = load_acquire(released);
            return message - u32(seen) < u32(kDepth);  // counters may wrap
          }))
        return false;
    }
    return true;
  }

  __device__ unsigned char* address(const Piece& piece, const Place& place, u64 s) const {
    switch (place.space) {
      case Space::input:
        return const_cast<unsigned char*>(call_.input) +
               input_span(call_.layout, piece.chunk, s).offset * call_.arithmetic.element;
      case Space::output:
        return call_.output +
               output_span(call_.layout, piece.chunk, s).offset * call_.arithmetic.element;
      case Space::scratch:
        return call_.scratch + ((u64(strand_) * call_.together + at_) * call_.cells + place.index) *
                                   call_.cell_bytes;
      case Space::none:
        break;
    }
    return nullptr;
  }

  __device__ void add_source(Job& job, const Piece& piece, u64 s) const {
    if (call_.arithmetic.scaled && piece.src.space == Space::input) job.scaled |= 1u << job.nsrc;
    job.src[job.nsrc++] = address(piece, piece.src, s);
  }

  // The job of a piece; of a combine step: of all its pieces. One thread.
  __device__ void prepare(Job& job, const Step& step, int number, u64 s, u64 at) const {
    const Piece& piece = pieces_[number];
    job.nsrc = job.ndst = 0;
    job.scaled = 0;
    job.divisor = piece.complete ? call_.arithmetic.divisor : 1;
    job.bytes = chunk_length(call_.layout, piece.chunk, s) * call_.arithmetic.element;
    unsigned char* const kept = address(piece, piece.dst, s);
    switch (step.kind) {
      case StepKind::send:
        add_source(job, piece, s);
        job.divisor = 1;
        break;
      case StepKind::recv:
      case StepKind::recv_send: {
        const unsigned char* message = slot_of(world_, world_.rank, step.recv_peer, strand_,
                                               shared_.received[step.recv_peer]) +
                                       at;
        if (!piece.reduce) job.divisor = 1;
        if (piece.reduce && !piece.incoming_first) add_source(job, piece, s);
        job.src[job.nsrc++] = message;
        if (piece.reduce && piece.incoming_first) add_source(job, piece, s);
        break;
      }
      case StepKind::copy:
        add_source(job, piece, s);
        job.divisor = 1;
        if (job.scaled == 0 && kept == job.src[0]) job.bytes = 0;
        break;
      case StepKind::combine:
        for (int i = 0; i < step.npieces; ++i) add_source(job, pieces_[number + i], s);
        break;
    }
    if (kept != nullptr) job.dst[job.ndst++] = kept;
    if (step.send_peer >= 0)
      job.dst[job.ndst++] =
          slot_of(world_, step.send_peer, world_.rank, strand_, shared_.sent[step.send_peer]) + at;
  }

  const PlanCall& call_;
  const DeviceWorld& world_;
  Shared& shared_;
  u64 epoch_ = 0;
  int strand_, channel_, lane_;
  int at_ = 0;  // of the batch: the segment that is worked at
  ReduceJob reduce_;
  const Step* steps_;    // of the channel
  const Piece* pieces_;  // of the channel: steps count from the first of these
  u32 turn_ = 0;
};

__global__ void __launch_bounds__(kThreads, 1) plan_kernel(const __grid_constant__ PlanCall call) {
  __shared__ Shared shared;
  Strand strand(call, shared);
  const Entry entry = enter_together(call.world, [&] {
    if (call.channels > 0) strand.load();
  });
  const u32 ticket = count_block(call.world);
  if (agree(call.world, call.head, entry) && call.channels > 0) strand.run(entry.epoch);
  finish_call(call.world, entry.epoch, ticket);
}

// Each block combines a piece of what a rank has: see csrc/cuda_straight.cpp. It is here because
// the functions that combine are, which take long to compile.
constexpr u64 kCombinedByBlock = 64 << 10;
constexpr u64 kMostCombiningBlocks = 128;

__global__ void __launch_bounds__(kThreads, 1)
    combine_kernel(const __grid_constant__ CombineCall call) {
  __shared__ Job job;
  if (threadIdx.x == 0) {
    const u64 packs = (call.bytes + 15) / 16;
    const u64 each = (packs + gridDim.x - 1) / gridDim.x * 16;
    const u64 begin = min(call.bytes, blockIdx.x * each), end = min(call.bytes, begin + each);
    job.nsrc = call.nsrc;
    job.ndst = call.ndst;
    for (int i = 0; i < call.nsrc; ++i) job.src[i] = call.src[i] + begin;
    for (int i = 0; i < call.ndst; ++i) job.dst[i] = call.dst[i] + begin;
    job.bytes = end - begin;
    job.scaled = 0;
    job.divisor = call.arithmetic.divisor;
  }
  __syncthreads();
  if (job.nsrc == 1 && job.divisor == 1) {
    copy_job(job);
  } else {
    reduce_job_of(call.arithmetic.reducer)(job, call.arithmetic);
  }
}

}  // namespace

int launch_combine(const CombineCall& call, void* stream) {
  const u64 wanted = (call.bytes + kCombinedByBlock - 1) / kCombinedByBlock;
  const int blocks =
      static_cast<int>(wanted < kMostCombiningBlocks ? wanted : kMostCombiningBlocks);
  return launch(combine_kernel, {blocks, kThreads}, stream, call);
}

int launch_plan(const PlanCall& call, int blocks, void* stream) {
  return launch(plan_kernel, {blocks, kThreads}, stream, call);
}

int load_combine() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, combine_kernel);
}

int plan_residency(int* blocks) { return residency_of<PlanCall>({plan_kernel}, blocks); }

}  // namespace collectives::device
