// Calls on device arrays between nodes: device -> pinned host memory -> the communicator's own call
// on host arrays -> pinned host memory -> device. No CUDA here: built without it, every way in
// throws Error(unsupported).
//
// A call is put on the caller's stream and returns at once. On the stream it is a mark, and a
// kernel of one thread that waits; what it waits for is done in the call's turn by the thread of
// the communicator's queue. So device calls keep their order with each other and with calls on host
// arrays, whatever streams they are on.
//
// Large calls go in slices through two slots: while a slice is on the network, the next one comes
// from the device and the one before goes back to it.
//
// Where MPI takes pointers to memory of GPUs, larger calls need none of this: MPI sends from there
// and receives there, and kernels combine (straight.hpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "communicator.hpp"
#include "device.hpp"
#include "straight.hpp"

namespace collectives {

class Staging {
 public:
  // What is done in a call's turn: the whole call, on all ranks; a call of this rank's rail, which
  // takes part in one of all ranks; or nothing but that all ranks agree that they are in this call.
  enum class Way { whole, rail, agreement };

  // Allocates 2 * 2 * slot_bytes of pinned memory (two slots, each with an input and an output),
  // and tests that copies go on while a kernel waits: else Error(unsupported). `threads`: ranks of
  // this process.
  Staging(int device, std::size_t slot_bytes, int threads);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // Puts the call on `stream` (a cudaStream_t). Throws what an earlier call found, and
  // Error(unsupported) while the stream is captured.
  void run(Communicator& comm, const Call& call, const Communicator::Options& options,
           std::uintptr_t stream, Way way = Way::whole);
  // Throws Error(unsupported) while the stream is captured.
  void refuse_capture(std::uintptr_t stream) const;
  // What goes along rails from now on: `rail` is the communicator of this rank's, whose ranks have
  // the numbers `ranks` among all, and `near` its GPU's end within the node. If a call fails,
  // `near` is stopped before the stream goes on; where `near` gave up, calls fail. Both must
  // outlive this.
  void join(DeviceCommunicator& near, Communicator& rail, std::vector<int> ranks);
  int rail_size() const;
  // Memory on the GPU, until close() or the next one is made; its address. Of 0 bytes: none.
  std::uintptr_t make_scratch(std::size_t bytes);
  // Memory for calls of `nranks` ranks that go straight, for a transport among them.
  std::shared_ptr<GpuSlots> make_slots(int nranks);
  // Why MPI does not take pointers to memory of this GPU while a kernel waits; "" if it does.
  // `strictly`: while a copy into memory of the host that is not pinned waits behind it, too. All
  // ranks of the transport at the same time.
  std::string probe(GpuSlots& slots, MpiTransport& mpi, double timeout_s, bool strictly);
  // Makes calls of a communicator, all ranks' or the rail's, go straight from now on if they have
  // `from` bytes or more.
  void go_straight(Communicator& comm, std::shared_ptr<MpiTransport> mpi,
                   const std::shared_ptr<GpuSlots>& slots, std::uint64_t from);
  // Does nothing on one stream stand behind what waits on another?
  bool streams_apart();
  // Calls that have gone straight.
  std::uint64_t straight_calls() const;
  // Throws what a call found.
  void check();
  // True when all calls so far have ended; throws as check() does.
  bool idle();
  // Waits for the calls that were put on streams, and frees.
  void close();

 private:
  struct State;
  class Turn;
  std::shared_ptr<State> state_;
};

}  // namespace collectives
