// The ends of a block's FIFOs to and from all peers, as the kernels made by hand use them, and the
// crew that works on them. (The interpreter, whose steps have one peer each, has its own way to the
// same FIFOs: plan.cu.)
//
//   workers   kThreads threads, which copy and combine
//   waiter    a warp that waits, for messages and for room; while the workers are at something, it
//             waits for what they need next
//   teller    a warp that tells the peers. What it tells must not overtake what the workers wrote,
//             and waiting for that takes 2 µs, in which the workers go on
//
// All three go through the same program of wait, work and tell, and meet at named barriers:
//
//   waiter   wait ──┐          wait ──┐
//   workers         ready  work ──┐   ready  work ──┐
//   teller                        done  tell        done  tell
//
// Workers are held at `ready` until what they need is there, and at `done` only if the teller is
// still at what they did before.
//
// If a wait fails, workers let the teller go that is, or will be, at `done`. So every wait of a
// program is followed by a tell, be it of nothing; else they would stay there for ever.
#pragma once

#include "signal.cuh"

namespace collectives::device {

inline constexpr int kCrewThreads = kThreads + 64;
enum class Role { worker, waiter, teller };

// Messages of all calls before this one, to and from each peer; and the meeting, from 0, up to
// which the waiter, who may be one ahead, has not given up. In shared memory.
struct Crew {
  u32 sent[kMaxRanks], received[kMaxRanks];
  volatile u32 failed_at;
};

// Lane q of the waiter waits for messages of peer q, and lane 16 + q for room there; lane q of the
// teller tells it.
class FifoEnds {
 public:
  // While the block enters.
  __device__ void load() {
    if (role_ == Role::waiter) crew_.failed_at = ~0u;
    if (!tells()) return;
    const FifoControl& control = fifo_of(world_, world_.rank, peer_, block_);
    crew_.sent[peer_] = control.sent;
    crew_.received[peer_] = control.received;
  }
  __device__ void keep() {
    if (!tells()) return;
    FifoControl& control = fifo_of(world_, world_.rank, peer_, block_);
    control.sent = crew_.sent[peer_] + sent_;
    control.received = crew_.received[peer_] + received_;
  }

 protected:
  __device__ FifoEnds(const DeviceWorld& world, Crew& crew)
      : world_(world),
        crew_(crew),
        block_(static_cast<int>(blockIdx.x)),
        role_(threadIdx.x < kThreads        ? Role::worker
              : threadIdx.x < kThreads + 32 ? Role::waiter
                                            : Role::teller),
        peer_(static_cast<int>(threadIdx.x % kMaxRanks)),
        upper_(threadIdx.x % 32 >= kMaxRanks),
        for_peer_(role_ != Role::worker && peer_ < world.nranks && peer_ != world.rank) {}
  static_assert(kMaxRanks == 16, "a warp has two threads for each rank");

  __device__ bool works() const { return role_ == Role::worker; }

  // Where this call's message of a number, from 0, lies at peer q, and the peer's here.
  __device__ unsigned char* slot_there(int q, u32 number) const {
    return slot_of(world_, q, world_.rank, block_, crew_.sent[q] + number);
  }
  __device__ const unsigned char* slot_here(int q, u32 number) const {
    return slot_of(world_, world_.rank, q, block_, crew_.received[q] + number);
  }

  // The call begins: the waiter tells its peers that this rank is in it, before anything else.
  template <class Told>
  __device__ void announce_all(u64 epoch, Told told) {
    epoch_ = epoch;
    if (role_ == Role::waiter && for_peer_ && !upper_ && block_ == 0)
      announce(world_, told(peer_), epoch_, peer_);
  }
  // Until all ranks are in this call; false if one is in another, or the rank gave up. If `room`,
  // until there is room at each peer, too.
  template <class Expected>
  __device__ bool agree(Expected expected, bool room) {
    return meet([&] {
      return (!upper_ && !has_arrived(world_, expected(peer_), epoch_, peer_)) ||
             (upper_ && room && !has_room());
    });
  }
  // Until there is room at the peers, and the next message of each, if it shall; false if the rank
  // gave up. (What is wanted counts in the waiter, for the thread's peer.)
  __device__ bool wait(bool room, bool message) {
    return meet([&] { return upper_ ? room && !has_room() : message && !has_message(); });
  }

  // The workers have written a message to the thread's peer, or taken one. False if the rank gave
  // up.
  __device__ bool tell(bool sent, bool received) {
    sent_ += sent;
    received_ += received;
    if (role_ == Role::waiter) return true;
    named_barrier(kDone, kThreads + 32);
    if (role_ == Role::worker) return true;
    if (has_failed()) return false;
    if (!tells()) return true;
    if (sent) {
      const u32 number = crew_.sent[peer_] + sent_;
      store_release(&fifo_of(world_, peer_, world_.rank, block_).filled[(number - 1) % kDepth],
                    number);
    }
    // Relaxed: what was read has been used, or the stores before the barrier had not issued.
    if (received)
      store_relaxed(&fifo_of(world_, peer_, world_.rank, block_).released,
                    crew_.received[peer_] + received_);
    return true;
  }

  const DeviceWorld& world_;
  u64 epoch_ = 0;
  Crew& crew_;
  int block_;
  Role role_;
  int peer_;
  bool upper_, for_peer_;
  u32 sent_ = 0, received_ = 0;  // messages of this call, to and from the thread's peer

 private:
  u32 meetings_ = 0;

  __device__ bool tells() const { return role_ == Role::teller && for_peer_ && !upper_; }

  // What `fails` waits for, on the threads for peers; then all but the teller, who learns of a
  // failure when it next has something to tell.
  template <class Fails>
  __device__ bool meet(Fails fails) {
    const u32 meeting = meetings_++;
    if (role_ == Role::teller) return true;
    if (role_ == Role::waiter) {
      const bool failed = __any_sync(0xffffffffu, for_peer_ && fails()) != 0;
      if (failed) crew_.failed_at = meeting;
      __syncwarp();
    }
    named_barrier(kReady, kThreads + 32);
    if (!has_failed()) return true;
    if (role_ == Role::worker) named_barrier(kDone, kThreads + 32);
    return false;
  }

  __device__ bool has_failed() const { return crew_.failed_at < meetings_; }

  __device__ bool has_room() const {
    const u32 number = crew_.sent[peer_] + sent_;
    const u32* released = &fifo_of(world_, world_.rank, peer_, block_).released;
    const Waiting what{Phase::slot, peer_, block_, -1, -1, epoch_, number};
    return wait_until(world_, what, [&](u64& seen) {
      seen = load_acquire(released);
      return number - u32(seen) < u32(kDepth);  // counters may wrap
    });
  }
  __device__ bool has_message() const {
    const u32 number = crew_.received[peer_] + received_;
    const u32* filled = &fifo_of(world_, world_.rank, peer_, block_).filled[number % kDepth];
    const Waiting what{Phase::message, peer_, block_, -1, -1, epoch_, u64(number) + 1};
    return wait_until(world_, what, [&](u64& seen) {
      seen = load_acquire(filled);
      return u32(seen) == number + 1;
    });
  }
};

}  // namespace collectives::device
