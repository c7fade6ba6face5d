// The ends of a block's FIFOs to and from all peers, as the kernels made by hand use them. (The
// interpreter, whose steps have one peer each, has its own way to the same FIFOs: plan.cu.)
#pragma once

#include "signal.cuh"

namespace collectives::device {

// Messages of all calls before this one, to and from each peer. In shared memory.
struct FifoNumbers {
  u32 sent[kMaxRanks], received[kMaxRanks];
};

// Thread q of a block speaks with peer q.
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
        lane_(static_cast<int>(threadIdx.x)),
        peer_(lane_ < world.nranks && lane_ != world.rank) {}

  // Where this call's message of a number, from 0, lies at peer q, and the peer's here.
  __device__ unsigned char* slot_there(int q, u32 number) const {
    return slot_of(world_, q, world_.rank, block_, numbers_.sent[q] + number);
  }
  __device__ const unsigned char* slot_here(int q, u32 number) const {
    return slot_of(world_, world_.rank, q, block_, numbers_.received[q] + number);
  }

  // Waits for room at the thread's peer, and for its next message, if it shall. (All threads of the
  // block; false on all if the rank gave up.)
  __device__ bool wait(bool room, bool message) {
    bool failed = false;
    if (peer_ && message) {
      const u32 number = numbers_.received[lane_] + received_;
      const u32* filled = &fifo_of(world_, world_.rank, lane_, block_).filled[number % kDepth];
      const Waiting what{Phase::message, lane_, block_, -1, -1, epoch_, u64(number) + 1};
      failed = !wait_until(world_, what, [&](u64& seen) {
        seen = load_acquire(filled);
        return u32(seen) == number + 1;
      });
    }
    if (peer_ && room && !failed) {
      const u32 number = numbers_.sent[lane_] + sent_;
      const u32* released = &fifo_of(world_, world_.rank, lane_, block_).released;
      const Waiting what{Phase::slot, lane_, block_, -1, -1, epoch_, number};
      failed = !wait_until(world_, what, [&](u64& seen) {
        seen = load_acquire(released);
        return number - u32(seen) < u32(kDepth);  // counters may wrap
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
  bool peer_;
  u32 sent_ = 0, received_ = 0;  // messages of this call, to and from the thread's peer
};

}  // namespace collectives::device
