// One thread at a time in a communicator.
#pragma once

#include <atomic>

#include "errors.hpp"

namespace collectives {

// Marks the communicator as in use by one thread; a second one is refused rather than interleaved.
// A plain load and store, since this is on the path of every call: Python's threads come here with
// the GIL, which keeps them apart, and the queue's own thread runs calls only while `queued_` is
// not 0, which keeps others out.
class Busy {
 public:
  explicit Busy(std::atomic<bool>& flag) : flag_(flag) {
    if (flag_.load(std::memory_order_relaxed))
      throw Error(ErrorKind::invalid,
                  "two threads called this communicator at the same time; give each its own with "
                  "duplicate(), or use async_op=True from one thread");
    flag_.store(true, std::memory_order_relaxed);
  }
  ~Busy() { flag_.store(false, std::memory_order_release); }

 private:
  std::atomic<bool>& flag_;
};

}  // namespace collectives
