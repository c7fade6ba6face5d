// Calls by copy engines: what a stream does without a kernel, and who looks after it.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "cuda_call.hpp"

namespace collectives::device {

// A call, but for its kernels' heads and where the caller's arrays are.
struct CopiesCall : Shares {
  CopiesStep step;  // what all its kernels are told
  const unsigned char* input;
  unsigned char* output;
  bool gathers, spreads;
  u64 longest, chunk;  // bytes of a share: of the longest, and at a time
};

// Streams for looking at ones that wait. Streams share the GPU's queues, and what is behind a wait
// in its queue waits too; so there are several, made one after the other, which have different
// ones. Those of a GPU are for all communicators of a process, and are never destroyed. Any thread.
class LookStreams {
 public:
  // Those of the current device, which is `device`.
  static LookStreams& of(int device);
  // One that has nothing to do, if need be a new one; nullptr: there is none.
  cudaStream_t idle();
  // Does one of them do something, while other streams may wait? Looks for so long.
  bool go_on(std::chrono::milliseconds patience);

 private:
  bool add();
  cudaStream_t found() const;

  std::mutex mutex_;
  std::vector<cudaStream_t> all_;
  u64* word_ = nullptr;  // for go_on()
};

// Looks after a stream that waits for peers' words, since it cannot give up by itself: from a
// thread that sleeps while there is nothing to wait for.
class CopiesWatch {
 public:
  struct Stuck {
    u64 exchange;   // that the stream waits for
    u64 waited_ns;  // for so long
  };
  // moves  Control::moves, which the GPU writes
  // told   the host knows that kernels must leave, or that this rank gave up
  // look   what to do about a stream that waits: called again until it goes on
  CopiesWatch(const volatile u64* moves, std::function<bool()> told,
              std::function<void(Stuck)> look);
  ~CopiesWatch();
  CopiesWatch(const CopiesWatch&) = delete;
  CopiesWatch& operator=(const CopiesWatch&) = delete;

  // The stream will wait for exchanges up to this one, behind which a call ends.
  void expect(u64 last);

 private:
  void run();
  // Until the last exchange that is expected, or the end.
  void watch(std::unique_lock<std::mutex>& lock);

  const volatile u64* moves_;
  std::function<bool()> told_;
  std::function<void(Stuck)> look_;
  std::mutex mutex_;
  std::condition_variable changed_;
  u64 end_ = 0;  // of the moves that are expected
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace collectives::device
