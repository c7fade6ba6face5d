// Self-tests of staging: what a GPU does while one of its streams waits in a kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <thread>

#include "cuda_staging.hpp"

namespace collectives::device {

// What kernels wait by, as the host and as the GPU address it, and the number of the last one that
// was launched. All calls before it have ended.
struct WaitWords {
  StagingControl *control, *mapped;
  u64* issued;
};

// While one lives, a stream of its own waits in a kernel, for `patience_s` at most.
class HeldStream {
 public:
  explicit HeldStream(const WaitWords& words, double patience_s = 40);
  ~HeldStream() { end(); }
  HeldStream(const HeldStream&) = delete;
  HeldStream& operator=(const HeldStream&) = delete;

  // A thread copies some of `bytes` at `from`, on the GPU, into memory of the host that is not
  // pinned, behind the kernel, and is held up by it, as a program is that looks at a call's result
  // at once.
  void copy_behind(int device, const void* from, std::size_t bytes);
  // Lets the kernel go. False if it has given up: something waited for it, and could do its work
  // only then.
  bool end();

 private:
  WaitWords words_;
  cudaStream_t stream_ = nullptr;
  std::thread copier_;
};

// A word goes from `from`, in pinned memory, to the GPU and to `to`, on the streams of copies.
// Throws Error(unsupported) if it does not arrive.
void test_copies(int device, const WaitWords& words, std::byte* from, std::byte* to,
                 cudaStream_t down, cudaStream_t up);

// Has each of some more streams a queue of its own? With CUDA's 8 for all of a process, one of them
// stands behind the stream that waits, and stays there: that takes half a second to see.
// `down` is used before.
bool test_streams(const WaitWords& words, cudaStream_t down);

}  // namespace collectives::device
