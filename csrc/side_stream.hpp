// A stream beside the caller's, and marks in streams: what puts a call in the background with two
// calls from Python. No CUDA here: built without it, every way in throws Error(unsupported).
#pragma once

#include <cstdint>
#include <memory>

namespace collectives {

// A place in a stream (a cudaStream_t as a number), with the time at which the GPU came there.
class Mark {
 public:
  class Impl;
  explicit Mark(std::unique_ptr<Impl> impl);
  ~Mark();  // gives its event back to its stream
  Mark(const Mark&) = delete;
  Mark& operator=(const Mark&) = delete;

  // What comes next on `stream`, one of the same device, waits for this place; the host does not.
  void hold(std::uintptr_t stream) const;
  // True once the GPU has come there.
  bool done() const;
  // Waits until it has.
  void wait() const;
  // Seconds from another place to this one, negative if this comes first; both are done.
  double seconds_since(const Mark& other) const;

 private:
  std::unique_ptr<Impl> impl_;
};

class SideStream {
 public:
  // `stream`: one that somebody else made and keeps; 0: its own.
  explicit SideStream(int device, std::uintptr_t stream = 0);
  ~SideStream();
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;

  std::uintptr_t handle() const;
  // A place behind all that is on `stream`, one of the same device.
  std::shared_ptr<Mark> mark(std::uintptr_t stream) const;
  // What comes next on the side stream waits for all that is on `current`; the place of it.
  std::shared_ptr<Mark> begin(std::uintptr_t current) const;
  // The place behind all that is on the side stream.
  std::shared_ptr<Mark> end() const;

 private:
  class Events;
  friend class Mark;
  std::shared_ptr<Events> events_;
};

// What comes next on `stream` waits for all that is on `before`; both are of one device. Streams
// that are being captured are left as they are: false.
bool let_wait(int device, std::uintptr_t stream, std::uintptr_t before);

// How many times as long small kernels on `computing` take while `waiting`, another stream of the
// device, waits for a word in memory. Waits for what is on both, for at most 2 s each; 1 if it
// cannot be told: a stream is being captured or does not come to its end, ranks are threads of this
// process, the driver has no words.
double slowdown(int device, std::uintptr_t computing, std::uintptr_t waiting);

}  // namespace collectives
