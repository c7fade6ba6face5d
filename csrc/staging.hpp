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
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "communicator.hpp"

namespace collectives {

class Staging {
 public:
  // Allocates 2 * 2 * slot_bytes of pinned memory (two slots, each with an input and an output),
  // and tests that copies go on while a kernel waits: else Error(unsupported).
  Staging(int device, std::size_t slot_bytes);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // Puts the call on `stream` (a cudaStream_t). Throws what an earlier call found, and
  // Error(unsupported) while the stream is captured.
  void run(Communicator& comm, const Call& call, const Communicator::Options& options,
           std::uintptr_t stream);
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
