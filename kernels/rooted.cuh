// direct_two_shot with a root, by hand: broadcast and reduce, through FIFOs. The array is divided
// over the ranks that are not the root.
//
//   broadcast   push     the root gives each its share
//               hand on  each puts it into its own output and gives it to all but the root
//               collect  each takes the others' shares
//   reduce      push     each rank gives each its share of its own array
//               hand on  each combines the copies of its share, in rank order, rounded once, and
//                        gives the result to the root
//               collect  the root takes the results
//
// Of two ranks, one gives the other all: there is nothing to hand on. Between two ranks messages of
// one kind go each way, one for each chunk, so chunk c is in message c. They are pushed two ahead
// of what is handed on, and collected one behind.
//
// Cost: two crossings of the link, 10 to 12 µs with the start; each rank sends and gets at most S
// bytes, the array's, of which each is also written to and read from own memory.
#pragma once

#include "shares.cuh"

namespace collectives::device {

struct RootedShared {
  Job hand_on[2];  // of this chunk, and of the next
  Crew crew;
};

template <class A>
class Rooted : public Sharing<A> {
 public:
  using Shared = RootedShared;
  __device__ Rooted(const TwoShotCall& call, RootedShared& shared)
      : Sharing<A>(call, shared.crew),
        shared_(shared),
        reduces_(call.gather != Gather::none),
        at_root_(call.world.rank == call.root),
        pushes_(reduces_ || at_root_),
        hands_on_(owns(call.world.rank)),
        collects_(call.world.nranks > 2 && reduces_ == at_root_) {}

  __device__ bool run(u64 epoch) {
    const auto head = [&](int) { return call_.head; };
    announce_all(epoch, head);
    if (threadIdx.x == kThreads - 1) prepare(0);
    if (!(push(0) && push(1) && agree(head, false))) return false;
    for (u32 c = 0; c < call_.chunks; ++c) {
      if (!(hand_on(c) && push(c + 2))) return false;
      if (c > 0 && !collect(c - 1)) return false;
    }
    // Who takes nothing tells nothing at the end, for the meeting of its crew that nothing else may
    // follow (fifo.cuh): that of the ranks, if there are one or two chunks.
    return collects_ ? collect(call_.chunks - 1) : tell(false, false);
  }

 private:
  using Ends = Sharing<A>;
  using Ends::agree, Ends::announce_all, Ends::begin_job, Ends::call_, Ends::peer_, Ends::role_,
      Ends::slot_here, Ends::slot_there, Ends::span, Ends::tell, Ends::wait, Ends::work,
      Ends::works, Ends::world_;
  using typename Ends::Span;

  // Does rank q have a share?
  __device__ bool owns(int q) const {
    return (call_.world.nranks == 2 && reduces_) == (q == call_.root);
  }
  // Does this rank, handing on, give to q? Does it get from q?
  __device__ bool gives_to(int q) const {
    return world_.nranks > 2 && q != world_.rank && reduces_ == (q == call_.root);
  }
  __device__ bool gets_from(int q) const {
    return q != world_.rank && (reduces_ || q == call_.root);
  }

  __device__ bool push(u32 c) {
    if (!pushes_ || c >= call_.chunks) return true;
    if (!wait(owns(peer_), false)) return false;
    for (int k = 1; works() && k < world_.nranks; ++k) {
      const int q = (world_.rank + k) % world_.nranks;
      if (!owns(q)) continue;
      const Span s = span(q, c);
      copy_bytes(slot_there(q, c), call_.input + call_.share[q].begin + s.begin, s.bytes);
    }
    return tell(owns(peer_), false);
  }

  __device__ bool hand_on(u32 c) {
    if (!hands_on_) return true;
    if (!wait(gives_to(peer_), gets_from(peer_))) return false;
    // The next one's job, by a thread that has nothing else to do.
    if (role_ == Role::waiter && threadIdx.x % 32 == 31 && c + 1 < call_.chunks) prepare(c + 1);
    if (works()) work(shared_.hand_on[c & 1]);
    return tell(gives_to(peer_), gets_from(peer_));
  }
  __device__ void prepare(u32 c) {
    const int rank = world_.rank;
    const Span s = span(rank, c);
    const u64 at = call_.share[rank].begin + s.begin;
    Job& job = shared_.hand_on[c & 1];
    begin_job(job, s.bytes);
    for (int q = 0; q < world_.nranks; ++q) {
      if (gets_from(q)) {
        job.src[job.nsrc++] = slot_here(q, c);
      } else if (q == rank && reduces_) {
        job.src[job.nsrc++] = call_.input + at;
      }
    }
    if (!reduces_ || at_root_) job.dst[job.ndst++] = call_.output + at;
    for (int k = 1; k < world_.nranks; ++k) {
      const int q = (rank + k) % world_.nranks;
      if (gives_to(q)) job.dst[job.ndst++] = slot_there(q, c);
    }
  }

  __device__ bool collect(u32 c) {
    if (!collects_) return true;
    if (!wait(false, owns(peer_))) return false;
    for (int k = 1; works() && k < world_.nranks; ++k) {
      const int q = (world_.rank + world_.nranks - k) % world_.nranks;
      if (!owns(q)) continue;
      const Span s = span(q, c);
      copy_bytes(call_.output + call_.share[q].begin + s.begin, slot_here(q, c), s.bytes);
    }
    return tell(false, owns(peer_));
  }

  RootedShared& shared_;
  bool reduces_, at_root_, pushes_, hands_on_, collects_;
};

}  // namespace collectives::device
