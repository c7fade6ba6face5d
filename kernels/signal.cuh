// Signals between GPUs: every memory-order argument of the kernels lives here. (The instructions
// themselves are in primitives.cuh.)
//
// All flags are words in an arena that one rank writes and another polls. Both orders are of
// system scope, since a peer is another GPU. The pattern is always the same:
//   writer   all threads of a block write data; __syncthreads() puts these writes before what one
//            thread does next; that thread stores the flag with release: whoever reads the flag
//            sees the data of the whole block
//   reader   one thread polls the flag with acquire; __syncthreads() puts the data reads of the
//            whole block after it
// Data that a peer writes are read past L1 (ld.global.cg), which is not coherent.
//
// A wait is bounded: past its hot phase it looks at the clock, at the host's abort word and at the
// word in which peers say that they gave up. A thread that gives up writes a record for the host
// and tells all peers.
#pragma once

#include "cuda_call.hpp"
#include "primitives.cuh"

namespace collectives::device {

// ---- where things lie ---------------------------------------------------------------------------

__device__ inline State& state_of(const DeviceWorld& w, int rank) {
  return *reinterpret_cast<State*>(w.arena[rank]);
}
__device__ inline u32& poison_of(const DeviceWorld& w, int rank) {
  return state_of(w, rank).progress.poison;
}
// In the arena of `owner`: its ends of the FIFOs between it and `peer`.
__device__ inline FifoControl& fifo_of(const DeviceWorld& w, int owner, int peer, int strand) {
  return reinterpret_cast<FifoControl*>(w.arena[owner] +
                                        w.geometry.controls)[peer * w.geometry.strands + strand];
}
// The number of `peer` among those of `owner`, who has no memory for messages to itself.
__device__ inline int seat_of(int owner, int peer) { return peer - (peer > owner ? 1 : 0); }
__device__ inline unsigned char* slot_of(const DeviceWorld& w, int owner, int peer, int strand,
                                         u32 message) {
  const u64 fifo = u64(seat_of(owner, peer)) * w.geometry.strands + strand;
  const u64 index = fifo * kDepth + message % kDepth;
  return w.arena[owner] + w.geometry.slots + index * w.geometry.slot_bytes;
}
__device__ inline Packet* packets_of(const DeviceWorld& w, int owner, int peer, int parity) {
  return reinterpret_cast<Packet*>(w.arena[owner] + w.geometry.packets) +
         (u64(parity) * (w.nranks - 1) + seat_of(owner, peer)) * w.geometry.packet_units;
}
__device__ inline Line* lines_of(const DeviceWorld& w, int owner, int peer, int parity) {
  return reinterpret_cast<Line*>(w.arena[owner] + w.geometry.lines) +
         (u64(parity) * (w.nranks - 1) + seat_of(owner, peer)) * w.geometry.lines_each;
}

// ---- giving up ----------------------------------------------------------------------------------

struct Waiting {
  Phase phase;
  int peer;
  int strand, step, round;
  u64 epoch, expected;
  int about = -1;  // the rank that is to blame, where somebody else has told
};
__device__ inline int about_in(u32 word) {
  return static_cast<int>(word >> kAboutShift & ((1u << (kWhyShift - kAboutShift)) - 1)) - 1;
}
__device__ inline int teller_in(u32 word) {
  return static_cast<int>(word & ((1u << kAboutShift) - 1)) - 1;
}

// Any thread, any number of times: the first writes the record and tells the peers.
__device__ inline void give_up(const DeviceWorld& w, Leave why, const Waiting& what, u64 seen,
                               u64 waited_ns, const Arrival* theirs = nullptr) {
  if (atomicCAS(&w.progress->left, 0u, static_cast<u32>(why)) != 0) return;
  volatile Record& r = w.control->record;
  r.leave = static_cast<u32>(why);
  r.phase = static_cast<u32>(what.phase);
  r.peer = what.peer;
  r.strand = what.strand;
  r.step = what.step;
  r.round = what.round;
  r.epoch = what.epoch;
  r.expected = what.expected;
  r.seen = seen;
  r.waited_ns = waited_ns;
  r.theirs[0] = theirs != nullptr ? theirs->signature[0] : 0;
  r.theirs[1] = theirs != nullptr ? theirs->signature[1] : 0;
  const int about = why == Leave::deadline ? what.peer : what.about;
  r.about = about;
  __threadfence_system();  // the record before its state, for the host
  r.state = 1;
  if (why == Leave::peer_left) return;  // whoever left first has told all, and why
  const u32 word = static_cast<u32>(why) << kWhyShift | static_cast<u32>(about + 1) << kAboutShift |
                   static_cast<u32>(w.rank + 1);
  for (int q = 0; q < w.nranks; ++q)
    if (q != w.rank) store_release(&poison_of(w, q), word);
}

// What every block reads first: the number of this call, and whether this rank or a peer gave up
// in an earlier one.
struct Entry {
  u64 epoch;
  u32 left, poison;
};
// Each thread for itself, where a meeting (0.2 µs) would take longer: so it is one load.
__device__ inline Entry enter(const DeviceWorld& w) {
  static_assert(offsetof(Progress, left) == 8 && offsetof(Progress, poison) == 12);
  const Two progress = load_two(&w.progress->epoch);
  Entry entry{progress.first + 1, u32(progress.second), u32(progress.second >> 32)};
  if (w.progress != &state_of(w, w.rank).progress)
    entry.poison = load_relaxed(&poison_of(w, w.rank));
  return entry;
}
// All threads of a block, who meet. One of them reads, for all: the loads of many blocks queue up.
// (All threads of 128 blocks: for 2 µs.) What `meanwhile()` brings into shared memory is there
// afterwards.
template <class Meanwhile>
__device__ inline Entry enter_together(const DeviceWorld& w, Meanwhile meanwhile) {
  __shared__ Entry entry;
  const bool reads = threadIdx.x == 0;
  Entry read = {};  // on its way, as is what `meanwhile` loads: each alone takes 0.7 µs
  if (reads) read = enter(w);
  meanwhile();
  if (reads) entry = read;
  __syncthreads();
  return entry;
}
// True if there is nothing to be done any more; the host is told why.
__device__ inline bool has_left(const DeviceWorld& w, const Entry& entry) {
  if ((entry.left | entry.poison) == 0) return false;
  if (entry.left != 0) return true;
  const u64 epoch = entry.epoch;
  const u32 poison = entry.poison;
  const Waiting what{Phase::none, teller_in(poison), -1, -1, -1, epoch, epoch, about_in(poison)};
  give_up(w, Leave::peer_left, what, poison >> kWhyShift, 0);
  return true;
}

inline constexpr u64 kAskHostAfterNs = 1'000'000;

// The slow look around of a wait; true if it must end.
__device__ inline bool must_leave(const DeviceWorld& w, const Waiting& what, u64 since, u64 seen) {
  const u64 waited = clock_ns() - since;
  if (load_relaxed(&w.progress->left) != 0) return true;
  if (const u32 poison = load_relaxed(&poison_of(w, w.rank))) {
    Waiting from = what;
    from.peer = teller_in(poison);
    from.about = about_in(poison);
    give_up(w, Leave::peer_left, from, poison >> kWhyShift, waited);
    return true;
  }
  // The host's word is behind PCIe, where thousands of readers would queue up for 200 µs and, with
  // the peers waiting for them in turn, never catch up again.
  const bool asks = waited > kAskHostAfterNs && __ffs(static_cast<int>(__activemask())) - 1 ==
                                                    static_cast<int>(threadIdx.x & 31);
  if (const u32 word = asks ? *static_cast<volatile u32*>(&w.control->abort) : 0) {
    Waiting told = what;
    told.about = about_in(word);
    give_up(w, static_cast<Leave>(word >> kWhyShift), told, seen, waited);
    return true;
  }
  if (waited > w.timeout_ns) {
    give_up(w, Leave::deadline, what, seen, waited);
    return true;
  }
  return false;
}

// Polls before a wait looks around: about 20 µs on own memory.
inline constexpr int kPolls = 64;

// Polls `ready(seen)` until it is true; false if the rank gave up. `slow()` runs with each look
// around and may end the wait too, by returning true after give_up(). Threads that poll together
// leave together: `any` tells each whether one of them must.
template <class Ready, class Slow, class Any>
__device__ inline bool wait_until(const DeviceWorld& w, const Waiting& what, Ready ready,
                                  Slow& slow, Any any) {
  u64 seen = 0;
  if (ready(seen)) return true;
  for (u64 since = 0;;) {
    for (int i = 0; i < kPolls; ++i) {
      poll_again();
      if (ready(seen)) return true;
    }
    if (since == 0) since = clock_ns();  // not before: reading it takes long
    if (any(slow() || must_leave(w, what, since, seen))) return false;
  }
}
template <class Ready, class Slow>
__device__ inline bool wait_until(const DeviceWorld& w, const Waiting& what, Ready ready,
                                  Slow& slow) {
  return wait_until(w, what, ready, slow, [](bool leave) { return leave; });
}
template <class Ready>
__device__ inline bool wait_until(const DeviceWorld& w, const Waiting& what, Ready ready) {
  const auto nothing = [] { return false; };
  return wait_until(w, what, ready, nothing);
}

// ---- entering and leaving a call ----------------------------------------------------------------

// Named barriers, beside that of __syncthreads().
enum Barrier { kEntered = 1, kReady, kDone, kWorkers };

__device__ inline u64 arrival_word(u64 epoch, u32 hash) { return (epoch << 32) | hash; }

// Tells `peer` that this rank is in call `epoch`. Relaxed, since no data come with it: a release
// would add a crossing of the link. What the arrival says of itself, for messages, may come late.
__device__ inline void announce(const DeviceWorld& w, const CallHead& head, u64 epoch, int peer) {
  Arrival& there = state_of(w, peer).arrivals[epoch & 1][w.rank];
  store_relaxed(&there.signature[0], head.count);
  store_relaxed(&there.signature[1], head.signature_word);
  store_relaxed(&there.word, arrival_word(epoch, head.hash));
}

// True (after give_up) if `peer`, whose arrival says `word`, has arrived at this call's number with
// another signature.
__device__ inline bool disagrees(const DeviceWorld& w, const CallHead& head, u64 epoch, int peer,
                                 u64 word) {
  if (u32(word >> 32) != u32(epoch) || u32(word) == head.hash) return false;
  const Waiting what{Phase::arrival, peer, -1, -1, -1, epoch, head.hash};
  give_up(w, Leave::mismatch, what, u32(word), 0, &state_of(w, w.rank).arrivals[epoch & 1][peer]);
  return true;
}
__device__ inline bool disagrees(const DeviceWorld& w, const CallHead& head, u64 epoch, int peer) {
  const u64* word = &state_of(w, w.rank).arrivals[epoch & 1][peer].word;
  return disagrees(w, head, epoch, peer, load_acquire(word));
}

// Waits until `peer` is in this call, with what is expected of it; false if it is in another one,
// or the rank gave up.
__device__ inline bool has_arrived(const DeviceWorld& world, const CallHead& expected, u64 epoch,
                                   int peer) {
  const u64* word = &state_of(world, world.rank).arrivals[epoch & 1][peer].word;
  const Waiting what{Phase::arrival, peer, static_cast<int>(blockIdx.x), -1, -1, epoch, epoch};
  u64 now = 0;
  const bool came = wait_until(world, what, [&](u64& seen) {
    now = load_acquire(word);
    seen = now >> 32;
    return u32(seen) == u32(epoch);
  });
  return came && !disagrees(world, expected, epoch, peer, now);
}

// All blocks wait until all ranks are in this call; false if a rank is in another one.
__device__ inline bool agree(const DeviceWorld& world, const CallHead& head, const Entry& entry) {
  bool failed = has_left(world, entry);
  const int q = static_cast<int>(threadIdx.x);
  if (q < world.nranks && q != world.rank && !failed) {
    if (blockIdx.x == 0) announce(world, head, entry.epoch, q);
    failed = !has_arrived(world, head, entry.epoch, q);
  }
  return __syncthreads_or(failed) == 0;
}

// Blocks are counted when they have read the epoch; whoever is counted last advances it when it
// ends. That all have read it is enough, since calls of one rank follow each other on a stream. So
// the count, which takes 0.5 µs, is on its way while there is something else to do. (No fence:
// nobody else reads what is written.)

// The thread of a block that counts it: of a crew, one that has nothing else to do at first.
__device__ inline bool counts() { return threadIdx.x == blockDim.x - 1; }

// After enter_together(). What it returns is for finish_call().
__device__ inline u32 count_block(const DeviceWorld& w) {
  return counts() && gridDim.x > 1 ? atomicAdd(&w.progress->ticket, 1u) : 0;
}
// The same after enter(): the last warp waits until all have read, and the others go on.
__device__ inline u32 count_warps(const DeviceWorld& w) {
  if (gridDim.x == 1) return 0;
  const int threads = static_cast<int>(blockDim.x);
  __syncwarp();
  if (threadIdx.x / 32 != (blockDim.x - 1) / 32) {
    named_arrival(kEntered, threads);
  } else {
    named_barrier(kEntered, threads);
  }
  return count_block(w);
}

// All threads of all blocks call this last. A kernel that is launched early may take its places
// from here on: nothing waits any more.
__device__ inline void finish_call(const DeviceWorld& w, u64 epoch, u32 ticket) {
  __syncthreads();
  let_next_start();
  if (!counts() || ticket != gridDim.x - 1) return;
  store_relaxed(&w.progress->ticket, 0u);
  store_relaxed(&w.progress->epoch, epoch);
}

}  // namespace collectives::device
