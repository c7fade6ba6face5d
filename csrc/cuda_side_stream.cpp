// Side streams and marks on CUDA: events come from a pool, since making one takes longer than
// recording it.
#include <cuda_runtime_api.h>

#include <mutex>
#include <utility>
#include <vector>

#include "cuda_memory.hpp"
#include "process.hpp"
#include "side_stream.hpp"

namespace collectives {

using device::check_cuda;
using device::is_captured;
using device::OnDevice;
using device::WhileCapturing;

namespace {

cudaStream_t stream_of(std::uintptr_t handle) { return reinterpret_cast<cudaStream_t>(handle); }

}  // namespace

// The stream and the events that are not in use. It lives as long as a mark does.
class SideStream::Events {
 public:
  Events(int device, cudaStream_t stream)
      : device_(device), owns_(stream == nullptr), stream_(stream) {
    if (!owns_) return;
    const OnDevice on(device);
    check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking),
               "cudaStreamCreateWithFlags");
  }

  ~Events() {
    if (birth_.in_child()) return;  // a forked child has nothing of the GPU's to free
    for (cudaEvent_t event : free_) cudaEventDestroy(event);
    if (owns_) cudaStreamDestroy(stream_);
  }

  Events(const Events&) = delete;
  Events& operator=(const Events&) = delete;

  int device() const { return device_; }
  cudaStream_t stream() const { return stream_; }

  cudaEvent_t take() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!free_.empty()) {
        cudaEvent_t event = free_.back();
        free_.pop_back();
        return event;
      }
    }
    const OnDevice on(device_);
    cudaEvent_t event = nullptr;
    check_cuda(cudaEventCreateWithFlags(&event, cudaEventDefault), "cudaEventCreateWithFlags");
    return event;
  }

  void give(cudaEvent_t event) {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(event);
  }

 private:
  const int device_;
  const bool owns_;
  const Birth birth_;
  cudaStream_t stream_;
  std::mutex mutex_;
  std::vector<cudaEvent_t> free_;
};

class Mark::Impl {
 public:
  Impl(std::shared_ptr<SideStream::Events> events, cudaStream_t stream)
      : events_(std::move(events)), event_(events_->take()) {
    const OnDevice on(events_->device());  // the default stream is that of the current device
    const cudaError_t error = cudaEventRecord(event_, stream);
    if (error != cudaSuccess) events_->give(event_);
    check_cuda(error, "cudaEventRecord");
  }

  ~Impl() { events_->give(event_); }

  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  int device() const { return events_->device(); }
  cudaEvent_t event() const { return event_; }

 private:
  std::shared_ptr<SideStream::Events> events_;
  cudaEvent_t event_;
};

Mark::Mark(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Mark::~Mark() = default;

void Mark::hold(std::uintptr_t stream) const {
  const OnDevice on(impl_->device());
  check_cuda(cudaStreamWaitEvent(stream_of(stream), impl_->event(), 0), "cudaStreamWaitEvent");
}

bool Mark::done() const {
  const WhileCapturing relaxed;
  const cudaError_t error = cudaEventQuery(impl_->event());
  if (error == cudaErrorNotReady) return false;
  check_cuda(error, "cudaEventQuery");
  return true;
}

void Mark::wait() const {
  const WhileCapturing relaxed;
  check_cuda(cudaEventSynchronize(impl_->event()), "cudaEventSynchronize");
}

double Mark::seconds_since(const Mark& other) const {
  const WhileCapturing relaxed;
  float milliseconds = 0;
  check_cuda(cudaEventElapsedTime(&milliseconds, other.impl_->event(), impl_->event()),
             "cudaEventElapsedTime");
  return static_cast<double>(milliseconds) / 1e3;
}

SideStream::SideStream(int device, std::uintptr_t stream)
    : events_(std::make_shared<Events>(device, stream_of(stream))) {}

SideStream::~SideStream() = default;

std::uintptr_t SideStream::handle() const {
  return reinterpret_cast<std::uintptr_t>(events_->stream());
}

std::shared_ptr<Mark> SideStream::mark(std::uintptr_t stream) const {
  return std::make_shared<Mark>(std::make_unique<Mark::Impl>(events_, stream_of(stream)));
}

std::shared_ptr<Mark> SideStream::begin(std::uintptr_t current) const {
  std::shared_ptr<Mark> before = mark(current);
  before->hold(handle());
  return before;
}

std::shared_ptr<Mark> SideStream::end() const { return mark(handle()); }

bool let_wait(int device, std::uintptr_t stream, std::uintptr_t before) {
  if (stream == before) return true;
  const OnDevice on(device);
  if (is_captured(stream_of(stream)) || is_captured(stream_of(before))) return false;
  cudaEvent_t event = nullptr;
  check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  cudaError_t error = cudaEventRecord(event, stream_of(before));
  if (error == cudaSuccess) error = cudaStreamWaitEvent(stream_of(stream), event, 0);
  cudaEventDestroy(event);  // which lasts until the stream has waited for it
  check_cuda(error, "cudaStreamWaitEvent");
  return true;
}

}  // namespace collectives
