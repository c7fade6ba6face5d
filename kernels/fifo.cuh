// The ends of a block's FIFOs to and from all peers, as the kernels made by hand use them. (The
// interpreter, whose steps have one peer each, has its own way to the same FIFOs: plan.cu.)
#pragma once

#include "signal.cuh"

namespace collectives::device {

// Messages of all calls before this one, to and from each peer. In shared memory.
struct FifoNumbers {
  u32 sent[kMaxRanks], received[kMaxRanks];
};

// Thread q of a block speaks with peer q, and the same thread of the second warp looks for room at
// it: what both read takes 0.7 µs, even from own memory.
class FifoEnds {
 public:
  // The next __syncthreads() ends it.
  __device__ void load() {
    if (!peer_) return;
    const FifoControl& control = fifo_of(world_, world_.rank, lane_, block_);
    numbers_.sent[lane_] = control.sent;
    numbers_.received[lane_] = control.received;
  }
  __device__ void keep() {
    __syncthreads();
    if (!peer_) return;
    FifoControl& control = fifo_of(world_, world_.rank, lane_, block_);
    control.sent = numbers_.sent[lane_] + sent_;
    control.received = numbers_.received[lane_] + received_;
  }

 protected:
  __device__ FifoEnds(const DeviceWorld& world, u64 epoch, FifoNumbers& numbers)
      : world_(world),
        epoch_(epoch),
        numbers_(numbers),
        block_(static_cast<int>(blockIdx.x)),
        lane_(static_cast<int>(threadIdx.x % 32)),
        for_peer_(threadIdx.x < 64 && lane_ < world.nranks && lane_ != world.rank),
        peer_(for_peer_ && threadIdx.x < 32) {}

  // Where this call's message of a number, from 0, lies at peer q, and the peer's here.
  __device__ unsigned char* slot_there(int q, u32 number) const {
    return slot_of(world_, q, world_.rank, block_, numbers_.sent[q] + number);
  }
  __device__ const unsigned char* slot_here(int q, u32 number) const {
    return slot_of(world_, world_.rank, q, block_, numbers_.received[q] + number);
  }

  // Is there room for a message to the thread's peer? Waits for it; false if the rank gave up.
  __device__ bool has_room() const {
    if (!for_peer_ || peer_) return true;
    const u32 number = numbers_.sent[lane_] + sent_;
    const u32* released = &fifo_of(world_, world_.rank, lane_, block_).released;
    const Waiting what{Phase::slot, lane_, block_, -1, -1, epoch_, number};
    return wait_until(world_, what, [&](u64& seen) {
      seen = load_acquire(released);
      return number - u32(seen) < u32(kDepth);  // counters may wrap
    });
  }

  // Waits for room at the thread's peer, and for its next message, if it shall. (All threads of the
  // block; false on all if the rank gave up.)
  __device__ bool wait(bool room, bool message) {
    bool failed = room && !has_room();
    if (peer_ && message) {
      const u32 number = numbers_.received[lane_] + received_;
      const u32* filled = &fifo_of(world_, world_.rank, lane_, block_).filled[number % kDepth];
      const Waiting what{Phase::message, lane_, block_, -1, -1, epoch_, u64(number) + 1};
      failed = !wait_until(world_, what, [&](u64& seen) {
        seen = load_acquire(filled);
        return u32(seen) == number + 1;
      });
    }
    return __syncthreads_or(failed) == 0;
  }

  // Tells the thread's peer that the block has written a message, or taken one. (All threads.)
  __device__ void tell(bool sent, bool received) {
    __syncthreads();
    sent_ += sent;
    received_ += received;
    if (!peer_) return;
    if (sent) {
      const u32 number = numbers_.sent[lane_] + sent_;
      store_release(&fifo_of(world_, lane_, world_.rank, block_).filled[(number - 1) % kDepth],
                    number);
    }
    // Relaxed: what was read has been used, or the stores before the barrier had not issued.
    if (received)
      store_relaxed(&fifo_of(world_, lane_, world_.rank, block_).released,
                    numbers_.received[lane_] + received_);
  }

  const DeviceWorld& world_;
  u64 epoch_;
  FifoNumbers& numbers_;
  int block_, lane_;
  bool for_peer_, peer_;         // one of the two threads for peer lane_; that which speaks with it
  u32 sent_ = 0, received_ = 0;  // messages of this call, to and from the thread's peer
};

}  // namespace collectives::device
