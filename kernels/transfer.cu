// Sends and receives between pairs of ranks: a list of them in one kernel.
//
// A block of threads has a part of every transfer's bytes. Its clerks, a thread for each transfer,
// and its workers, who copy, go through rounds:
//
//   clerks    look ──┐  tell, look ──┐  tell, look ──┐
//   workers          copy ───────────copy ───────────copy ...
//
//     look      which transfers can go on: those with room at the receiver, or a message here
//     copy      one message of each: into the receiver's FIFO, or out of this rank's
//     tell      the other rank of what was copied in the round before. What is told must not
//               overtake it, and waiting for that takes 2 µs, in which the workers go on
//
// No transfer of the list waits for another one, but for those before it between the same two ranks
// in the same direction, which keep their order. A send ends when its last message lies in the
// receiver's FIFO: what fits in there (kTransferDepth slots for each block) needs no receiver yet.
// Where there is room for twice the blocks, half of them send and half receive.
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

constexpr int kClerks = kMaxTransfers;  // threads, behind the workers
static_assert(kClerks % 32 == 0);

__device__ inline Pair& pair_of(const DeviceWorld& w, int owner, int peer) {
  return reinterpret_cast<Pair*>(w.arena[owner] + w.geometry.pairs)[peer];
}
__device__ inline TransferControl& control_of(const DeviceWorld& w, int owner, int peer,
                                              int strand) {
  return reinterpret_cast<TransferControl*>(
      w.arena[owner] + w.geometry.transfers)[peer * w.geometry.mail_strands + strand];
}
__device__ inline unsigned char* mail_of(const DeviceWorld& w, int owner, int peer, int strand,
                                         u32 message) {
  const u64 index =
      (u64(peer) * w.geometry.mail_strands + strand) * kTransferDepth + message % kTransferDepth;
  return w.arena[owner] + w.geometry.mail + index * w.geometry.mail_bytes;
}

// What all threads of a block know of its transfers.
struct Shared {
  static constexpr u32 kFailed = ~0u, kNothing = ~0u - 1;   // in place of a message
  static constexpr u32 kFails = 1, kMoves = 2, kLasts = 4;  // what a round may bring
  // Of a round, which has the parity of its number:
  u32 at[2][kMaxTransfers];    // the message of a transfer's part that is copied, from 0
  u32 left[2][kMaxTransfers];  // messages that are not copied then
  u32 round[2][kClerks / 32];  // what it brings, as each warp of clerks sees it; 0: it is the last
  u32 base[kMaxTransfers];     // number of a transfer's first message
};

class Mover {
 public:
  __device__ Mover(const TransferCall& call, u64 epoch, Shared& shared)
      : call_(call),
        world_(call.world),
        epoch_(epoch),
        shared_(shared),
        block_(static_cast<int>(call.split != 0 ? blockIdx.x % call.split : blockIdx.x)),
        works_(threadIdx.x < kThreads),
        index_(static_cast<int>(threadIdx.x) - kThreads) {}

  // The transfer of a clerk: how much, and where its messages begin.
  __device__ void begin() {
    if (!has_transfer()) return;
    const PairTransfer& t = call_.list[index_];
    left_ = messages(t);
    shared_.left[1][index_] = left_;  // as if it were of the round before the first
    if (left_ == 0) return;
    const TransferControl& own = control_of(world_, world_.rank, t.peer, block_);
    const Pair& pair = pair_of(world_, world_.rank, t.peer);
    next_ = t.sends ? own.sent : own.received;
    number_ = (t.sends ? pair.sent : pair.received) + t.ahead;
    for (int i = t.before; i >= 0; i = call_.list[i].before) {
      const u32 earlier = messages(call_.list[i]);
      if (before_ < 0 && earlier != 0) before_ = i;
      next_ += earlier;
    }
    shared_.base[index_] = told_ = next_;
  }

  // After begin() of all threads; until all is moved, or the rank gives up.
  __device__ void run() {
    if (works_) {
      work();
    } else {
      see_to_it();
    }
  }

 private:
  __device__ void work() {
    for (u32 round = 0;; ++round) {
      const u32 brings = meet(round);
      if (brings == 0 || (brings & Shared::kFails) != 0) return;
      if ((brings & Shared::kMoves) == 0) continue;
      const u32* const at = shared_.at[round & 1];
      for (int i = 0; i < call_.count; ++i)
        if (at[i] != Shared::kNothing) move(i, at[i]);
    }
  }

  __device__ void see_to_it() {
    for (u32 round = 0;; ++round) {
      const u32 now = round & 1;
      const u32 message = has_transfer() ? look(shared_.left[now ^ 1]) : Shared::kNothing;
      const bool ready = message < Shared::kNothing, was_left = left_ != 0;
      if (ready) --left_;
      if (has_transfer()) {
        shared_.at[now][index_] = message;
        shared_.left[now][index_] = left_;
      }
      const auto any = [](bool one) { return __any_sync(0xffffffffu, one) != 0; };
      const u32 warp = (any(message == Shared::kFailed) ? Shared::kFails : 0) |
                       (any(ready) ? Shared::kMoves : 0) | (any(was_left) ? Shared::kLasts : 0);
      if (index_ % 32 == 0) shared_.round[now][index_ / 32] = warp;
      const u32 brings = meet(round);
      if ((brings & Shared::kFails) != 0) return;
      if (told_ != next_) tell();
      if (ready) ++next_;
      if (brings == 0) return;
      if ((brings & Shared::kMoves) != 0) {
        idle_ = 0;
        since_ = 0;
      }
    }
  }

  // What a round brings. What the one before copied is written, or read, from here on.
  __device__ u32 meet(u32 round) const {
    __syncthreads();
    u32 brings = 0;
    for (const u32 seen : shared_.round[round & 1]) brings |= seen;
    return brings;
  }

  __device__ bool has_transfer() const { return !works_ && index_ < call_.count; }

  // Messages of this block's part of a transfer; of an empty one too there is one.
  __device__ u32 messages(const PairTransfer& t) const {
    const bool sends = blockIdx.x < static_cast<u32>(call_.split);
    if (block_ >= t.strands || (call_.split != 0 && t.sends != sends)) return 0;
    const u64 slot = world_.geometry.mail_bytes;
    return t.bytes == 0 ? 1 : static_cast<u32>((t.part + slot - 1) / slot);
  }

  // The message that the thread's transfer can go on with, if any. Waits for nothing, but gives up
  // where it has waited too long.
  //   left  of each transfer, after the round before
  __device__ u32 look(const u32* left) {
    if (left_ == 0) return Shared::kNothing;
    const PairTransfer& t = call_.list[index_];
    if (before_ >= 0 && left[before_] != 0) return Shared::kNothing;
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
    const u32 message = next_ - shared_.base[index_];
    if (ready && (t.sends || message != 0 || agrees(t, own))) return message;
    // Block 0 has a part of every transfer, and says what differs for all blocks.
    if (ready && block_ == 0) {
      refuse(t, own);
      return Shared::kFailed;
    }
    poll_again();
    if (++idle_ % kPolls != 0) return Shared::kNothing;
    if (since_ == 0) since_ = clock_ns();
    const Waiting what{
        t.sends ? Phase::slot : Phase::message, t.peer, block_, -1, -1, epoch_, u64(next_) + 1};
    return must_leave(world_, what, since_, seen) ? Shared::kFailed : Shared::kNothing;
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

  // A message of transfer i. All workers.
  __device__ void move(int i, u32 number) {
    const PairTransfer& t = call_.list[i];
    const u64 slot = world_.geometry.mail_bytes;
    const u64 from = min(t.bytes, block_ * t.part), to = min(t.bytes, from + t.part);
    const u64 begin = min(to, from + number * slot), bytes = min(to - begin, slot);
    const u32 message = shared_.base[i] + number;
    unsigned char* const mail = t.sends ? mail_of(world_, t.peer, world_.rank, block_, message)
                                        : mail_of(world_, world_.rank, t.peer, block_, message);
    unsigned char* const memory = t.memory + begin;
    unsigned char* const target = t.sends ? mail : memory;
    // With 8 loads in flight so many threads had too few registers.
    copy<4>({t.sends ? memory : mail, &target, 1, bytes});
  }

  // The clerk tells its transfer's other end of a message, the workers being through with it.
  __device__ void tell() {
    const PairTransfer& t = call_.list[index_];
    TransferControl& there = control_of(world_, t.peer, world_.rank, block_);
    TransferControl& own = control_of(world_, world_.rank, t.peer, block_);
    const u32 slot = told_ % kTransferDepth;
    const bool first = told_ == shared_.base[index_];
    ++told_;
    if (t.sends) {
      if (first) {
        store_relaxed(&there.envelope[slot].count, t.count);
        store_relaxed(&there.envelope[slot].word, word(t));
      }
      store_release(&there.filled[slot], told_);  // the block's writes before it
    } else {
      // Relaxed: what was read has been used, or the stores before the barrier had not issued.
      store_relaxed(&there.released, told_);
    }
    (t.sends ? own.sent : own.received) = told_;
  }

  const TransferCall& call_;
  const DeviceWorld& world_;
  u64 epoch_;
  Shared& shared_;
  int block_;  // of those that send, or receive
  bool works_;
  int index_;
  // Of a clerk's transfer. Messages are counted from the first between the two ranks: those of
  // before `next_` are copied, or in this round, and those before `told_` told.
  u32 left_ = 0, next_ = 0, told_ = 0, number_ = 0;
  // The last transfer before it, with the same peer and direction, that this block has a part of.
  int before_ = -1;
  // Looks since something moved, and when the clock was first read then.
  u32 idle_ = 0;
  u64 since_ = 0;
};

// All threads of all blocks call this last: the block that was counted last counts the transfers.
__device__ void finish(const TransferCall& call, u32 ticket) {
  __syncthreads();
  if (!counts() || ticket != gridDim.x - 1) return;
  store_relaxed(&call.world.progress->ticket, 0u);
  for (int i = 0; i < call.count; ++i) {
    const PairTransfer& t = call.list[i];
    Pair& pair = pair_of(call.world, call.world.rank, t.peer);
    (t.sends ? pair.sent : pair.received) += 1;
  }
}

__global__ void __launch_bounds__(kThreads + kClerks, 1)
    transfer_kernel(const __grid_constant__ TransferCall call) {
  __shared__ Shared shared;
  Entry entry = enter_together(call.world, [] {});
  entry.epoch = kOfTransfers | call.number;
  const bool left = has_left(call.world, entry);
  Mover mover(call, entry.epoch, shared);
  if (!left) mover.begin();
  __syncthreads();
  const u32 ticket = count_block(call.world);  // all of its clerks know what the pairs have counted
  if (!left) mover.run();
  finish(call, ticket);
}

}  // namespace

int launch_transfer(const TransferCall& call, int blocks, void* stream) {
  return launch(transfer_kernel, {blocks, kThreads + kClerks}, stream, call);
}

int transfer_residency(int* blocks) {
  return residency_of<TransferCall>({transfer_kernel}, blocks, kThreads + kClerks);
}

}  // namespace collectives::device
