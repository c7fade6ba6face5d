// direct_two_shot by hand: all_reduce, reduce_scatter and all_gather, where every rank owns a share
// of the array, combines it, and gives it to all.
//
//   gather    each rank gets the others' copies of its share: they push them into its FIFOs, or it
//             pulls them out of their arrays (symmetric ones)
//   combine   in rank order, rounded once: to its own output, and
//   spread    into all peers' FIFOs, from where they copy it; or right into their arrays
//   (symmetric)
//
// reduce_scatter has no spread, all_gather no gather. Chunks are pushed ahead of what is combined:
//
//   push 0, push 1, agree, { combine j, push j + 2, collect j - 1 } ..., collect the last
//
// Messages are consumed in the order in which they were sent, and a message is sent only when those
// that its receiver needs before it are on their way, so FIFOs of two slots would do.
//
// Nothing is written to a user's array before all ranks agree. Where peers read or write each
// other's arrays, an empty message to each at the end says that a rank is done with them.
//
// Cost: two crossings of the link, 10 to 12 µs with the start; 2 (n - 1) / n S bytes sent; none are
// copied twice on the link. Through FIFOs each byte is also written to and read from own memory.
// Few blocks do what needs no FIFO by bulk copies (bulk.cuh). Calls with a root have a kernel of
// their own (rooted.cuh); all are compiled here, since each reduction that they share takes long
// to.
#include "bulk.cuh"
#include "launch.cuh"
#include "rooted.cuh"
#include "shares.cuh"

namespace collectives::device {
namespace {

struct TwoShotShared {
  Job combine[2];  // of this chunk, and of the next
  Crew crew;
  BulkLandings landings;
};

template <class A>
class TwoShot : public Sharing<A> {
 public:
  using Shared = TwoShotShared;
  __device__ TwoShot(const TwoShotCall& call, Shared& shared)
      : Sharing<A>(call, shared.crew),
        shared_(shared),
        pushes_(call.gather == Gather::push),
        spreads_(call.spread == Spread::push) {}

  __device__ bool run(u64 epoch) {
    const auto head = [&](int) { return call_.head; };
    announce_all(epoch, head);
    if (threadIdx.x == kThreads - 1) prepare(0);
    if (pushes_ && !(push(0) && push(1))) return false;
    // Room for the last message, where it is the only one.
    const bool alone = !pushes_ && !spreads_;
    if (!agree(head, alone)) return false;
    for (u32 j = 0; j < call_.chunks; ++j) {
      if (!combine(j)) return false;
      if (pushes_ && !push(j + 2)) return false;
      if (spreads_ && j > 0 && !collect(j - 1)) return false;
    }
    if (spreads_ && !collect(call_.chunks - 1)) return false;
    if (call_.gather != Gather::pull && call_.spread != Spread::write) return true;
    return (alone || wait(true, false)) && part();
  }

 private:
  using Ends = Sharing<A>;
  using Ends::agree, Ends::announce_all, Ends::begin_job, Ends::call_, Ends::received_, Ends::role_,
      Ends::sent_, Ends::slot_here, Ends::slot_there, Ends::span, Ends::tell, Ends::wait,
      Ends::works, Ends::world_;
  using typename Ends::Span;

  // Where a share begins in the inputs and outputs of all ranks.
  __device__ u64 input_at(int owner) const {
    return call_.input_is_share ? 0 : call_.share[owner].begin;
  }
  __device__ u64 output_at(int owner) const {
    return call_.output_is_share ? 0 : call_.share[owner].begin;
  }
  // Each peer's share, of this rank's array, to its owner.
  __device__ bool push(u32 c) {
    if (c >= call_.chunks) return true;
    if (!wait(true, false)) return false;
    for (int k = 1; works() && k < world_.nranks; ++k) {
      const int q = (world_.rank + k) % world_.nranks;
      const Span s = span(q, c);
      copy_bytes(slot_there(q, sent_), call_.input + input_at(q) + s.begin, s.bytes);
    }
    return tell(true, false);
  }

  // This rank's share: all contributions, in rank order.
  __device__ bool combine(u32 c) {
    if (!wait(spreads_, pushes_)) return false;
    // The next one's job, by a thread that has nothing else to do.
    if (role_ == Role::waiter && threadIdx.x % 32 == 31 && c + 1 < call_.chunks) prepare(c + 1);
    if (works()) work(shared_.combine[c & 1]);
    return !(spreads_ || pushes_) || tell(spreads_, pushes_);
  }
  __device__ void work(const Job& job) {
    if (!call_.bulk) return Ends::work(job);
    if (job.bytes == 0 || job.ndst == 0) return;
    if (call_.gather == Gather::none) {
      bulk_job<void>(job, call_.arithmetic, shared_.landings);
    } else if constexpr (!__is_same(A, void)) {
      bulk_job<A>(job, call_.arithmetic, shared_.landings);
    }
  }
  __device__ void prepare(u32 c) {
    const int rank = world_.rank;
    const Span s = span(rank, c);
    // Of the messages that are pushed and spread in turn (see above), those of chunk c.
    const u32 taken = spreads_ && c > 0 ? 2 * c - 1 : c;
    const u32 given = pushes_ ? min(c + 2, call_.chunks) + c : c;
    Job& job = shared_.combine[c & 1];
    begin_job(job, s.bytes);
    const unsigned char* const own = call_.input + input_at(rank) + s.begin;
    for (int q = 0; q < world_.nranks; ++q) {
      if (q == rank) {
        job.src[job.nsrc++] = own;
      } else if (pushes_) {
        job.src[job.nsrc++] = slot_here(q, taken);
      } else if (call_.gather == Gather::pull) {
        job.src[job.nsrc++] = call_.inputs[q] + input_at(rank) + s.begin;
      }
    }
    unsigned char* const out = call_.output + output_at(rank) + s.begin;
    if (call_.gather != Gather::none || out != own) job.dst[job.ndst++] = out;
    if (call_.spread == Spread::none) return;
    for (int k = 1; k < world_.nranks; ++k) {
      const int q = (rank + k) % world_.nranks;
      job.dst[job.ndst++] =
          spreads_ ? slot_there(q, given) : call_.outputs[q] + output_at(rank) + s.begin;
    }
  }

  // The peers' shares, out of their messages.
  __device__ bool collect(u32 c) {
    if (!wait(false, true)) return false;
    for (int k = 1; works() && k < world_.nranks; ++k) {
      const int q = (world_.rank + world_.nranks - k) % world_.nranks;
      const Span s = span(q, c);
      copy_bytes(call_.output + output_at(q) + s.begin, slot_here(q, received_), s.bytes);
    }
    return tell(false, true);
  }

  // All ranks are done with each other's arrays. (There is room for a message.)
  __device__ bool part() { return tell(true, false) && wait(false, true) && tell(false, true); }

  Shared& shared_;
  bool pushes_, spreads_;  // through FIFOs
};

}  // namespace

int launch_two_shot(const TwoShotCall& call, int blocks, void* stream) {
  const int shared_bytes = call.bulk ? kBulkBytes : 0;
  return launch(share_kernel_of<TwoShot>(call), {blocks, kCrewThreads, false, shared_bytes}, stream,
                call);
}
int launch_rooted(const TwoShotCall& call, int blocks, void* stream) {
  return launch(share_kernel_of<Rooted>(call), {blocks, kCrewThreads}, stream, call);
}

int two_shot_residency(int* blocks) { return share_residency<TwoShot>(blocks); }
int rooted_residency(int* blocks) { return share_residency<Rooted>(blocks); }

bool has_hopper_code() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, share_kernel<TwoShot<void>>) == cudaSuccess &&
         attributes.ptxVersion >= 90;
}

int allow_bulk() {
  for (const ShareKernel kernel :
       {share_kernel<TwoShot<Float32Sum>>, share_kernel<TwoShot<Bfloat16Sum>>,
        share_kernel<TwoShot<Float16Sum>>, share_kernel<TwoShot<void>>})
    if (const int error =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBulkBytes))
      return error;
  return cudaSuccess;
}

bool two_shot_is_fast(const TwoShotCall& call) {
  return share_kernel_of<TwoShot>(call) != ShareKernel{share_kernel<TwoShot<void>>} &&
         !call.arithmetic.scaled;
}

}  // namespace collectives::device
