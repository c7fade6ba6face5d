// How much a stream that waits slows the kernels of another down, which is a matter of luck.
//
// A GPU serves the queues of streams in two halves. While a stream waits for a word in memory (or
// for an event behind such a wait), small kernels of the streams in its half follow each other in
// 3.1 µs on an H200, those of the other half in 1.5 (bench/waiting_gpu.py). A stream gets its queue
// when it is first used, and keeps it if no more streams are at work than there are queues
// (CUDA_DEVICE_MAX_CONNECTIONS). Streams that were first used in turns while nothing else was at
// work got the halves in turns; all but one of 24 that were while another had just got a kernel,
// the half that this was not in. CUDA tells nothing of it, and promises nothing, so it is timed.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <vector>

#include "cuda_memory.hpp"
#include "cuda_words.hpp"
#include "side_stream.hpp"

namespace collectives {
namespace device {

namespace {

using std::chrono::steady_clock;

class TimedEvent {
 public:
  TimedEvent() {
    check_cuda(cudaEventCreateWithFlags(&event_, cudaEventDefault), "cudaEventCreateWithFlags");
  }
  ~TimedEvent() { cudaEventDestroy(event_); }
  TimedEvent(const TimedEvent&) = delete;
  TimedEvent& operator=(const TimedEvent&) = delete;

  void record(cudaStream_t stream) {
    check_cuda(cudaEventRecord(event_, stream), "cudaEventRecord");
  }
  float ms_until(const TimedEvent& end) const {
    check_cuda(cudaEventSynchronize(end.event_), "cudaEventSynchronize");
    float ms = 0;
    check_cuda(cudaEventElapsedTime(&ms, event_, end.event_), "cudaEventElapsedTime");
    return ms;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

// Words that the host opens for streams. They are never freed: that waits for all GPUs.
class Gates {
 public:
  enum Gate { chain, wait };

  Gates() {
    void* pinned = nullptr;
    check_cuda(cudaHostAlloc(&pinned, sizeof(u64[2]), cudaHostAllocMapped | cudaHostAllocPortable),
               "cudaHostAlloc");
    host_ = static_cast<volatile u64*>(pinned);
    host_[chain] = host_[wait] = 0;
    check_cuda(cudaHostGetDevicePointer(reinterpret_cast<void**>(&device_), pinned, 0),
               "cudaHostGetDevicePointer");
  }

  void close() { ++turn_; }
  void open(Gate gate) { host_[gate] = turn_; }
  void hold(cudaStream_t stream, Gate gate) { exchange_words(stream, {}, {device_ + gate}, turn_); }

 private:
  volatile u64* host_;
  u64* device_ = nullptr;
  u64 turn_ = 0;
};

void put_nothing(cudaStream_t stream) {
  check_cuda(static_cast<cudaError_t>(launch_nothing(stream)), "launching a kernel");
}

// Milliseconds that small kernels take on a stream, while another waits if there is one. The
// kernels wait until all are there, so that the host does not count.
float time_chain(Gates& gates, cudaStream_t computing, const cudaStream_t* waiting) {
  constexpr int kKernels = 64;
  constexpr auto kBothWait = std::chrono::microseconds(50);  // the GPU has come to the waits
  TimedEvent begin, end;
  gates.close();
  try {
    gates.hold(computing, Gates::chain);
    begin.record(computing);
    for (int i = 0; i < kKernels; ++i) put_nothing(computing);
    end.record(computing);
    if (waiting != nullptr) {
      gates.hold(*waiting, Gates::wait);
      put_nothing(*waiting);
    }
    for (const auto from = steady_clock::now(); steady_clock::now() - from < kBothWait;) {
    }
    gates.open(Gates::chain);
    const float ms = begin.ms_until(end);
    gates.open(Gates::wait);
    return ms;
  } catch (...) {
    gates.open(Gates::chain);
    gates.open(Gates::wait);
    throw;
  }
}

// Uses a stream while another is at work: if it never was used, it gets a queue of the other half.
void use_beside(Gates& gates, cudaStream_t computing, cudaStream_t waiting) {
  gates.close();
  try {
    gates.hold(computing, Gates::chain);
    put_nothing(computing);
    put_nothing(waiting);
  } catch (...) {
    gates.open(Gates::chain);
    throw;
  }
  gates.open(Gates::chain);
  check_cuda(cudaStreamSynchronize(waiting), "cudaStreamSynchronize");
}

// Has the stream nothing to do, within a time?
bool comes_to_rest(cudaStream_t stream) {
  constexpr auto kPatience = std::chrono::seconds(2);
  const auto from = steady_clock::now();
  cudaError_t error;
  while ((error = cudaStreamQuery(stream)) == cudaErrorNotReady) {
    cudaGetLastError();  // the next call must not see it again
    if (steady_clock::now() - from > kPatience) return false;
  }
  check_cuda(error, "cudaStreamQuery");
  return true;
}

}  // namespace

}  // namespace device

using namespace device;

double slowdown(int device, std::uintptr_t computing, std::uintptr_t waiting) {
  static std::mutex one_at_a_time;
  static auto* const gates = new std::map<int, Gates>;
  const auto computes = reinterpret_cast<cudaStream_t>(computing);
  const auto waits = reinterpret_cast<cudaStream_t>(waiting);
  const OnDevice on(device);
  const WhileCapturing relaxed;
  if (is_shared() || !has_words() || is_captured(computes) || is_captured(waits)) return 1;
  put_nothing(computes);  // loads the kernel
  if (!comes_to_rest(computes) || !comes_to_rest(waits)) return 1;
  const std::lock_guard lock(one_at_a_time);
  Gates& own = (*gates)[device];
  use_beside(own, computes, waits);
  const auto time = [&](const cudaStream_t* other) {
    const float first = time_chain(own, computes, other);
    return std::min(first, time_chain(own, computes, other));
  };
  const float alone = time(nullptr);
  return static_cast<double>(time(&waits)) / std::max(static_cast<double>(alone), 1e-3);
}

}  // namespace collectives
