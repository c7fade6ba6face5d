// Sends and receives between pairs of ranks: a list of them in one kernel.
//
//   each block of threads, for its part of every transfer's bytes, in turns:
//     look      which transfers can go on: those with room at the receiver, or a message here
//     copy      one message of each: into the receiver's FIFO, or out of this rank's
//     tell      the other rank
//
// No transfer of the list waits for another one, but for those before it between the same two ranks
// in the same direction, which keep their order. A send ends when its last message lies in the
// receiver's FIFO: what fits in there (kTransferDepth slots for each block) needs no receiver yet.
//
// Only the two ranks of a pair know of a transfer, so the pair counts them, apart from the calls of
// all ranks. The first message of each block's part carries an envelope: the transfer's number,
// tag, count and dtype. The receiver writes nothing before it has compared it, and where it differs
// tells the sender both.
//
// Cost: one crossing of the link, and the bytes at the speed that the blocks reach. A message is
// sent kTransferDepth ahead of what its receiver has taken.
#include "cuda_call.hpp"
#include "jobs.cuh"
#include "launch.cuh"
#include "signal.cuh"

namespace collectives::device {
namespace {

static_assert(kMaxTransfers <= kThreads, "each transfer has a thread that looks after it");

__device__ inline Pair& pair_of(const DeviceWorld& w, int owner, int peer) {
  return reinterpret_cast<Pair*>(w.arena[owner] + w.geometry.pairs)[peer];
}
__device__ inline TransferControl& control_of(const DeviceWorld& w, int owner, int peer,
                                              int strand) {
  return reinterpret_cast<TransferControl*>(w.arena[owner] +
                                            w.geometry.transfers)[peer * kTransferStrands + strand];
}
__device__ inline unsigned char* mail_of(const DeviceWorld& w, int owner, int peer, int strand,
                                         u32 message) {
  const u64 index =
      (u64(peer) * kTransferStrands + strand) * kTransferDepth + message % kTransferDepth;
  return w.arena[owner] + w.geometry.mail + index * w.geometry.slot_bytes;
}

// What all threads of a block know of its transfers.
struct Shared {
  enum : u32 { kNotYet, kReady, kFailed };
  u32 state[kMaxTransfers];
  u32 left[kMaxTransfers];  // messages
  u32 base[kMaxTransfers];  // number of the first
};

class Mover {
 public:
  __device__ Mover(const TransferCall& call, u64 epoch, Shared& shared)
      : call_(call),
        world_(call.world),
        epoch_(epoch),
        shared_(shared),
        block_(static_cast<int>(blockIdx.x)),
        index_(static_cast<int>(threadIdx.x)) {}

  // All threads. False on all of them if the rank gave up.
  __device__ bool run() {
    begin();
    while (__syncthreads_or(left_ != 0) != 0) {
      if (index_ < call_.count) shared_.state[index_] = look();
      __syncthreads();
      bool moved = false;
      for (int i = 0; i < call_.count; ++i) {
        const u32 now = shared_.state[i];
        if (now == Shared::kFailed) return false;
        if (now != Shared::kReady) continue;
        move(i);
        moved = true;
      }
      if (!moved) continue;
      idle_ = 0;
      since_ = 0;
      __syncthreads();  // the message is written, or read, before its other end is told
      if (index_ < call_.count && shared_.state[index_] == Shared::kReady) tell();
    }
    return true;
  }

 private:
  __device__ u64 part(const PairTransfer& t) const {
    return ((t.bytes + t.strands - 1) / t.strands + 127) / 128 * 128;
  }
  // Messages of this block's part of a transfer; of an empty one too there is one.
  __device__ u32 messages(const PairTransfer& t) const {
    if (block_ >= t.strands) return 0;
    const u64 slot = world_.geometry.slot_bytes;
    return t.bytes == 0 ? 1 : static_cast<u32>((part(t) + slot - 1) / slot);
  }

  // The transfer of this thread: how much, and where its messages begin.
  __device__ void begin() {
    if (index_ >= call_.count) return;
    const PairTransfer& t = call_.list[index_];
    left_ = messages(t);
    shared_.left[index_] = left_;
    if (left_ == 0) return;
    const TransferControl& own = control_of(world_, world_.rank, t.peer, block_);
    const Pair& pair = pair_of(world_, world_.rank, t.peer);
    next_ = t.sends ? own.sent : own.received;
    number_ = (t.sends ? pair.sent : pair.received) + t.ahead;
    for (int i = t.before; i >= 0; i = call_.list[i].before) next_ += messages(call_.list[i]);
    shared_.base[index_] = next_;
    first_ = true;
  }

  // Can the thread's transfer go on? Waits for nothing, but gives up where it has waited too long.
  __device__ u32 look() {
    if (left_ == 0) return Shared::kNotYet;
    const PairTransfer& t = call_.list[index_];
    if (t.before >= 0 && shared_.left[t.before] != 0) return Shared::kNotYet;
    const TransferControl& own = control_of(world_, world_.rank, t.peer, block_);
    u32 seen;
    bool ready;
    if (t.sends) {
      seen = load_acquire(&own.released);
      ready = next_ - seen < u32(kTransferDepth);  // counters may wrap
    } else {
      seen = load_acquire(&own.filled[next_ % kTransferDepth]);
      ready = seen == next_ + 1;
    }
    if (ready && (t.sends || !first_ || agrees(t, own))) return Shared::kReady;
    // Block 0 has a part of every transfer, and says what differs for all blocks.
    if (ready && block_ == 0) {
      refuse(t, own);
      return Shared::kFailed;
    }
    poll_again();
    if (++idle_ % kPolls != 0) return Shared::kNotYet;
    if (since_ == 0) since_ = clock_ns();
    const Waiting what{
        t.sends ? Phase::slot : Phase::message, t.peer, block_, -1, -1, epoch_, u64(next_) + 1};
    return must_leave(world_, what, since_, seen) ? Shared::kFailed : Shared::kNotYet;
  }

  __device__ u64 word(const PairTransfer& t) const {
    return t.tag | u64(t.dtype) << 32 | u64(number_ & 0xffffff) << 40;
  }

  // Is what comes what the thread's transfer expects?
  __device__ bool agrees(const PairTransfer& t, const TransferControl& own) const {
    const Envelope& came = own.envelope[next_ % kTransferDepth];
    return load_relaxed(&came.count) == t.count && load_relaxed(&came.word) == word(t);
  }
  // It is not: tells the sender, and gives up.
  __device__ void refuse(const PairTransfer& t, const TransferControl& own) const {
    const Envelope& came = own.envelope[next_ % kTransferDepth];
    const u64 count = load_relaxed(&came.count), theirs = load_relaxed(&came.word);
    Refusal& there = pair_of(world_, t.peer, world_.rank).refusal;
    store_relaxed(&there.sent.count, count);
    store_relaxed(&there.sent.word, theirs);
    store_relaxed(&there.expected.count, t.count);
    store_relaxed(&there.expected.word, word(t));
    store_release(&there.valid, 1u);
    Arrival both{};
    both.signature[0] = word(t);
    both.signature[1] = theirs;
    const Waiting what{Phase::envelope, t.peer, block_, -1, -1, epoch_, t.count};
    give_up(world_, Leave::mismatch, what, count, 0, &both);
  }

  // The next message of transfer i. All threads.
  __device__ void move(int i) {
    const PairTransfer& t = call_.list[i];
    const u64 slot = world_.geometry.slot_bytes, each = part(t);
    const u32 done = messages(t) - shared_.left[i];
    const u64 from = min(t.bytes, block_ * each), to = min(t.bytes, from + each);
    const u64 begin = min(to, from + done * slot), bytes = min(to - begin, slot);
    const u32 message = shared_.base[i] + done;
    if (t.sends)
      copy_bytes(mail_of(world_, t.peer, world_.rank, block_, message), t.memory + begin, bytes);
    else
      copy_bytes(t.memory + begin, mail_of(world_, world_.rank, t.peer, block_, message), bytes);
  }

  // After move(): the thread tells its transfer's other end.
  __device__ void tell() {
    const PairTransfer& t = call_.list[index_];
    TransferControl& there = control_of(world_, t.peer, world_.rank, block_);
    TransferControl& own = control_of(world_, world_.rank, t.peer, block_);
    if (t.sends) {
      if (first_) {
        Envelope& envelope = there.envelope[next_ % kTransferDepth];
        store_relaxed(&envelope.count, t.count);
        store_relaxed(&envelope.word, word(t));
      }
      store_release(&there.filled[next_ % kTransferDepth],
                    next_ + 1);  // the block's writes before it
    } else {
      // Relaxed: what was read has been used, or the stores before the barrier had not issued.
      store_relaxed(&there.released, next_ + 1);
    }
    first_ = false;
    ++next_;
    (t.sends ? own.sent : own.received) = next_;
    shared_.left[index_] = --left_;
  }

  const TransferCall& call_;
  const DeviceWorld& world_;
  u64 epoch_;
  Shared& shared_;
  int block_, index_;
  // Of the thread's transfer:
  u32 left_ = 0, next_ = 0, number_ = 0;
  bool first_ = false;
  // Looks since something moved, and when the clock was first read then.
  u32 idle_ = 0;
  u64 since_ = 0;
};

// All threads of all blocks call this last: the block that ends last counts the transfers.
__device__ void finish(const TransferCall& call) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  Progress& own = *call.world.progress;
  if (gridDim.x > 1) {
    if (atomicAdd(&own.ticket, 1u) != gridDim.x - 1) return;
    store_relaxed(&own.ticket, 0u);
  }
  for (int i = 0; i < call.count; ++i) {
    const PairTransfer& t = call.list[i];
    Pair& pair = pair_of(call.world, call.world.rank, t.peer);
    (t.sends ? pair.sent : pair.received) += 1;
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    transfer_kernel(const __grid_constant__ TransferCall call) {
  __shared__ Shared shared;
  Entry entry = enter_together(call.world, [] {});
  entry.epoch = kOfTransfers | call.number;
  if (!has_left(call.world, entry)) Mover(call, entry.epoch, shared).run();
  finish(call);
}

}  // namespace

int launch_transfer(const TransferCall& call, int blocks, void* stream) {
  return launch(transfer_kernel, {blocks, kThreads}, stream, call);
}

int transfer_residency(int* blocks) {
  return residency_of<TransferCall>({transfer_kernel}, blocks);
}

}  // namespace collectives::device
