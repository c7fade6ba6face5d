// The emulated CUDA runtime's streams, events and graphs, and the launch of kernels there.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <thread>
#include <utility>
#include <vector>

#include "cuda.h"
#include "fibers.hpp"
#include "runtime.hpp"

using namespace emulated;

namespace {

std::atomic<unsigned> largest{0}, largest_early{0};

// Something that will be done.
class Completion {
 public:
  void finish() {
    const std::lock_guard lock(mutex_);
    done_ = true;
    when_ = std::chrono::steady_clock::now();
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_; });
  }
  bool done() {
    const std::lock_guard lock(mutex_);
    return done_;
  }
  std::chrono::steady_clock::time_point when() {
    wait();
    return when_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::chrono::steady_clock::time_point when_;
};

// OS threads that run one thing after another, as many as are needed at once.
class Pool {
 public:
  void run(Work work) {
    std::unique_lock lock(mutex_);
    waiting_.push_back(std::move(work));
    if (idle_ >= waiting_.size()) {
      changed_.notify_one();
      return;
    }
    std::thread([this] { serve(); }).detach();
  }

 private:
  void serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      while (!waiting_.empty()) {
        const Work work = std::move(waiting_.front());
        waiting_.pop_front();
        lock.unlock();
        work();
        lock.lock();
      }
      ++idle_;
      changed_.wait(lock, [&] { return !waiting_.empty(); });
      --idle_;
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> waiting_;
  std::size_t idle_ = 0;
};
// Lives as long as the process, as threads that nobody joins use it. (So do the others below.)
Pool& pool() {
  static auto* const one = new Pool;
  return *one;
}

// Places for blocks on a device: those beyond them wait, as they do on a GPU.
class Places {
 public:
  explicit Places(int n) : free_(n) {}
  void take() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return free_ > 0; });
    --free_;
  }
  void give() {
    const std::lock_guard lock(mutex_);
    ++free_;
    changed_.notify_one();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int free_;
};
Places& places(int device) {
  static auto* const all = [] {
    auto* made = new std::vector<std::unique_ptr<Places>>;
    for (int d = 0; d < devices(); ++d)
      made->push_back(std::make_unique<Places>(processors(d) * emulated::kBlocksOfProcessor));
    return made;
  }();
  return *(*all)[static_cast<std::size_t>(device)];
}

}  // namespace

// Work that was recorded in place of being done.
struct EmulatedGraph {
  unsigned long long id = 0;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  bool broken = false;  // by what may not be done in a capture
  std::vector<Work> nodes;
};

struct EmulatedStream {
  inline static std::atomic<int> made{0};

  explicit EmulatedStream(int device) : device(device) {}

  void put(Work work) {
    if (emulated::connections() > 0) work = behind_connection(std::move(work));
    const std::lock_guard lock(mutex);
    queue.push_back(std::move(work));
    ++submitted;
    if (running) return;
    running = true;
    pool().run([this] { serve(); });
  }
  void wait_all() {
    std::unique_lock lock(mutex);
    const unsigned long long until = submitted;
    changed.wait(lock, [&] { return finished >= until; });
  }

  bool idle() {
    const std::lock_guard lock(mutex);
    return finished == submitted;
  }

  // A copy within the devices. The stream finds a queue for these at its first one, and streams of
  // two threads that do so at the same moment find the same.
  Work behind_copies(Work work) {
    static std::atomic<int> latest{0};
    static auto* const queues = new Queues;
    if (copies == 0) {
      const int found = latest + 1;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      latest = copies = found;
    }
    return behind(*queues, copies, std::move(work));
  }

  const int device;
  const int number = made.fetch_add(1);    // of all streams
  int copies = 0;                          // queue of its copies, once it has one
  std::shared_ptr<EmulatedGraph> capture;  // while one goes on

 private:
  using Queues = std::map<int, std::shared_ptr<Completion>>;  // what each ends with

  // What was put into that queue before, on any stream, comes first.
  static Work behind(Queues& queues, int number, Work work) {
    static std::mutex all;
    const std::lock_guard lock(all);
    std::shared_ptr<Completion>& here = queues[number];
    const auto before = std::exchange(here, std::make_shared<Completion>());
    return [before, mine = here, work = std::move(work)] {
      if (before != nullptr) before->wait();
      work();
      mine->finish();
    };
  }
  Work behind_connection(Work work) {
    static auto* const queues = new Queues;
    return behind(*queues, number % emulated::connections(), std::move(work));
  }

  void serve() {
    std::unique_lock lock(mutex);
    while (!queue.empty()) {
      const Work work = std::move(queue.front());
      queue.pop_front();
      lock.unlock();
      work();
      lock.lock();
      ++finished;
      changed.notify_all();
    }
    running = false;
  }

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Work> queue;
  unsigned long long submitted = 0, finished = 0;
  bool running = false;
};

struct EmulatedEvent {
  int device;
  std::shared_ptr<Completion> last;
  std::shared_ptr<EmulatedGraph> capture;  // the last record went to this graph
};

namespace {

struct Streams {
  std::mutex mutex;
  std::set<EmulatedStream*> all;
  std::map<int, EmulatedStream*> defaults;
};
Streams& streams() {
  static auto* const one = new Streams;
  return *one;
}
EmulatedStream* stream_of(cudaStream_t stream) {
  if (stream != nullptr && stream != cudaStreamLegacy) return stream;
  Streams& s = streams();
  const std::lock_guard lock(s.mutex);
  EmulatedStream*& found = s.defaults[current_device];
  if (found == nullptr) s.all.insert(found = new EmulatedStream(current_device));
  return found;
}

}  // namespace

namespace emulated {

namespace {

std::shared_mutex driver;  // held alone by what waits for all devices

}  // namespace

cudaError_t put(cudaStream_t stream, Work work) {
  const std::shared_lock lock(driver);
  EmulatedStream* s = stream_of(stream);
  if (s->capture != nullptr) {
    s->capture->nodes.push_back(std::move(work));
  } else {
    s->put(std::move(work));
  }
  return cudaSuccess;
}

cudaError_t put_copy(cudaStream_t stream, Work work) {
  EmulatedStream* s = stream_of(stream);
  const bool queues = std::getenv("EMULATED_COPY_QUEUES") != nullptr && s->capture == nullptr;
  return put(stream, queues ? s->behind_copies(std::move(work)) : std::move(work));
}

bool is_capturing(cudaStream_t stream) { return stream_of(stream)->capture != nullptr; }

void wait_for_device(int device) {
  Streams& s = streams();
  std::vector<EmulatedStream*> on_device;
  {
    const std::lock_guard lock(s.mutex);
    for (EmulatedStream* one : s.all)
      if (one->device == device) on_device.push_back(one);
  }
  for (EmulatedStream* one : on_device) one->wait_all();
}

void wait_for_all_devices() {
  const std::unique_lock lock(driver);
  for (int device = 0; device < devices(); ++device) wait_for_device(device);
}

// ---- launches -----------------------------------------------------------------------------------

static void raise_to(std::atomic<unsigned>& noted, unsigned blocks) {
  unsigned before = noted;
  while (before < blocks && !noted.compare_exchange_weak(before, blocks)) {
  }
}

void note_launch(unsigned blocks, bool early) {
  raise_to(largest, blocks);
  if (early) raise_to(largest_early, blocks);
}

cudaError_t launch(Dim3 grid, Dim3 threads, cudaStream_t stream, std::function<void()> kernel) {
  if (grid.x == 0 || threads.x == 0 || threads.x > 1024) return fail(cudaErrorInvalidValue);
  const int device = stream_of(stream)->device;
  if (device != current_device) return fail(cudaErrorInvalidResourceHandle);
  const unsigned loses = losing_ways(device);
  return put(stream, [grid, threads, device, loses, kernel = std::move(kernel)] {
    Places& free = places(device);
    // Whoever finishes one is still in it when the wait for it has ended.
    const auto rest = std::make_shared<std::vector<Completion>>(grid.x - 1);
    const auto run = [&](unsigned index) {
      free.take();
      run_block({grid, Dim3(index, 0, 0), threads, loses}, kernel);
      free.give();
    };
    for (unsigned b = 1; b < grid.x; ++b)
      pool().run([rest, &run, b] {
        run(b);
        (*rest)[b - 1].finish();
      });
    run(0);
    for (Completion& one : *rest) one.wait();
  });
}

// ---- words that streams write and wait for ------------------------------------------------------

CUresult batch_mem_op(CUstream stream, unsigned count, CUstreamBatchMemOpParams* operations,
                      unsigned) {
  if (is_capturing(stream)) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  std::vector<CUstreamBatchMemOpParams> all(operations, operations + count);
  put(stream, [all] {
    for (const CUstreamBatchMemOpParams& one : all) {
      const bool waits = one.operation == CU_STREAM_MEM_OP_WAIT_VALUE_64;
      const auto& what = waits ? one.waitValue : one.writeValue;
      auto* const word = reinterpret_cast<unsigned long long*>(what.address);
      if (!waits) {
        __atomic_store_n(word, what.value64, __ATOMIC_SEQ_CST);
        continue;
      }
      while (static_cast<long long>(__atomic_load_n(word, __ATOMIC_SEQ_CST) - what.value64) < 0)
        std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  });
  return CUDA_SUCCESS;
}

}  // namespace emulated

extern "C" {

// ---- streams and events -------------------------------------------------------------------------

static thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
static std::atomic<int> live_events{0};

// What is unsafe while any thread captures, unless its thread says that it is not: ends captures.
static bool disturbs_captures() {
  if (capture_mode != cudaStreamCaptureModeGlobal) return false;
  bool found = false;
  const std::lock_guard lock(streams().mutex);
  for (EmulatedStream* one : streams().all) {
    if (one->capture == nullptr || one->capture->mode != cudaStreamCaptureModeGlobal) continue;
    found = one->capture->broken = true;
  }
  return found;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = new EmulatedStream(current_device);
  const std::lock_guard lock(streams().mutex);
  streams().all.insert(*stream);
  return cudaSuccess;
}
// (The stream itself stays: its last piece of work may still look at it.)
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  stream->wait_all();
  const std::lock_guard lock(streams().mutex);
  streams().all.erase(stream);
  return cudaSuccess;
}
// What may not be asked of a stream that is captured, and ends the capture.
static bool ends_capture(cudaStream_t stream) {
  EmulatedStream* s = stream_of(stream);
  if (s->capture != nullptr) s->capture->broken = true;
  return s->capture != nullptr;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (ends_capture(stream)) return fail(cudaErrorStreamCaptureUnsupported);
  stream_of(stream)->wait_all();
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (ends_capture(stream)) return fail(cudaErrorStreamCaptureUnsupported);
  return stream_of(stream)->idle() ? cudaSuccess : fail(cudaErrorNotReady);
}
cudaError_t cudaStreamGetDevice(cudaStream_t stream, int* device) {
  if (std::getenv("EMULATED_OLD_DRIVER") != nullptr) return fail(cudaErrorCallRequiresNewerDriver);
  if (ends_capture(stream)) return fail(cudaErrorStreamCaptureUnsupported);
  *device = stream_of(stream)->device;
  return cudaSuccess;
}
cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  *id = reinterpret_cast<unsigned long long>(stream_of(stream));  // none is ever freed
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  ++live_events;
  *event = new EmulatedEvent{current_device, nullptr, nullptr};
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  --live_events;
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (event->device != stream_of(stream)->device) return fail(cudaErrorInvalidResourceHandle);
  event->capture = stream_of(stream)->capture;
  if (event->capture != nullptr) return cudaSuccess;
  const auto completion = event->last = std::make_shared<Completion>();
  return put(stream, [completion] { completion->finish(); });
}
// Nodes of a graph are replayed in the order of their recording, so a wait within a capture only
// makes the stream part of it.
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  EmulatedStream* s = stream_of(stream);
  if (event->capture != nullptr) {
    if (s->capture == nullptr) {
      const std::lock_guard lock(streams().mutex);
      s->capture = event->capture;
    }
    return s->capture == event->capture ? cudaSuccess : fail(cudaErrorStreamCaptureUnsupported);
  }
  if (s->capture != nullptr) return fail(cudaErrorStreamCaptureUnsupported);
  if (event->last == nullptr) return cudaSuccess;
  return put(stream, [completion = event->last] { completion->wait(); });
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (disturbs_captures()) return fail(cudaErrorStreamCaptureUnsupported);
  if (event->capture != nullptr) return fail(cudaErrorStreamCaptureUnsupported);
  return event->last == nullptr || event->last->done() ? cudaSuccess : fail(cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (event->last != nullptr) event->last->wait();
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
  if (begin->last == nullptr || end->last == nullptr) return fail(cudaErrorInvalidValue);
  *ms = std::chrono::duration<float, std::milli>(end->last->when() - begin->last->when()).count();
  return cudaSuccess;
}

// ---- graphs -------------------------------------------------------------------------------------

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(capture_mode, *mode);
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  static unsigned long long captures = 0;
  EmulatedStream* s = stream_of(stream);
  if (s->capture != nullptr) return fail(cudaErrorStreamCaptureUnsupported);
  const std::lock_guard lock(streams().mutex);
  s->capture = std::make_shared<EmulatedGraph>();
  s->capture->id = ++captures;
  s->capture->mode = mode;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  EmulatedStream* s = stream_of(stream);
  if (s->capture == nullptr) return fail(cudaErrorInvalidValue);
  const auto captured = s->capture;
  *graph = captured->broken ? nullptr : new EmulatedGraph(*captured);
  const std::lock_guard lock(streams().mutex);
  for (EmulatedStream* one : streams().all)
    if (one->capture == captured) one->capture = nullptr;
  return captured->broken ? fail(cudaErrorStreamCaptureInvalidated) : cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id) {
  const EmulatedStream* s = stream_of(stream);
  *status = s->capture != nullptr ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  *id = s->capture != nullptr ? s->capture->id : 0;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  *exec = new EmulatedGraph(*graph);
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  for (const Work& node : exec->nodes) put(stream, node);
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  delete exec;
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}

// For tests: events that were made and not destroyed.
__attribute__((visibility("default"))) int emulatedEvents() { return live_events; }

// For tests: blocks of the largest kernel, and of the largest that was to start early, of those
// since this was asked.
__attribute__((visibility("default"))) unsigned emulatedLargest() { return largest.exchange(0); }
__attribute__((visibility("default"))) unsigned emulatedLargestEarly() {
  return largest_early.exchange(0);
}

}  // extern "C"
